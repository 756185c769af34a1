"""Large cases and surprises in the kit: who dies of them whatever the seed, what the seed decides, and what is said of both."""

from __future__ import annotations

import re
from typing import Any

import pytest

from polydraft import reference
from polydraft.conformance.catalogue import every_check, of_profile
from polydraft.conformance.faulty_backends import SIZED, Mutant
from polydraft.conformance.kernel_checks import MORE_SURPRISES, SURPRISES, Options, checks
from polydraft.conformance.outcomes import Result
from polydraft.conformance.pages import page
from polydraft.conformance.report import Selection, conform
from polydraft.conformance.target import Proxy, TableProxy, Target, wrap
from polydraft.contracts import REGISTRY
from polydraft.contracts.large import large_names, large_sizes
from polydraft.contracts.sizes import named
from tests.conformance.doubles import BACKENDS
from tests.support.depth import among, deep


def outcome(id_: str, plugin: Any, seed: int = 0) -> Result:
    return next(check for check in checks(Options(seed=seed)) if check.id == id_).result(Target(plugin))


# -- nobody dies by luck ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", among(["reference"], BACKENDS))
@pytest.mark.parametrize("mutant", [deep(one) if one.id == "M104" else one for one in SIZED], ids=lambda mutant: mutant.id)
def test_what_is_wrong_at_large_sizes_dies_whatever_the_seed(mutant: Mutant, name: str):
    """Of all killers the surprises alone hang on the seed."""
    broken = mutant.broken(BACKENDS[name])
    found = [outcome(mutant.killer, broken, seed) for seed in ((1, 2, 3) if mutant.killer.endswith("surprises") else (1,))]
    assert {one.outcome for one in found} == {"fail"}
    assert all(re.search("within|exactly|as before", one.message) for one in found), found[0].message


def test_one_that_is_right_at_every_listed_size_passes_all_but_surprises():
    (tuned,) = (mutant for mutant in SIZED if mutant.killer == "L2/linear/more-surprises")
    broken, sizes = Target(tuned.broken(reference)), {named(sizes) for sizes in large_sizes(REGISTRY["linear"])}
    mine = {check.id.split("/")[2]: check for check in checks(Options()) if check.kernel == "linear"}
    assert {mine[name].result(broken).outcome for name in (*sizes, "seeds", "one_row")} == {"pass"}
    result = mine["more-surprises"].result(broken)
    assert result.outcome == "fail"
    assert re.search(r"\(rerun: polydraft conform reference --contract linear --case surprise-\d+ --seed 0\)", result.message)


# -- which of them run where -----------------------------------------------------------------------------
def test_basic_has_one_large_case_a_contract_and_what_is_above_it_all():
    listed = {f"L2/{contract.name}/{named(sizes)}" for contract in REGISTRY for sizes in large_sizes(contract)}
    first = {f"L2/{contract.name}/{symbol}-{size}" for contract in REGISTRY for symbol, size in [next(large_names(contract))]}
    basic, graph, full = ({check.id for check in of_profile(profile)} for profile in ("basic", "graph", "full"))
    assert {"L2/linear/N-129+I-4099+O-4099", "L2/linear/N-1+I-28672"} < listed
    assert basic & listed == first
    assert graph >= listed <= full
    for contract in REGISTRY:
        assert f"L2/{contract.name}/surprises" in basic
        assert f"L2/{contract.name}/more-surprises" in full - basic


def test_a_deep_run_has_the_sizes_of_models():
    deep = {check.id for check in every_check(Options(deep=True))}
    assert {f"L2/linear/model-{name}" for name in ("qwen2.5-0.5b", "mimo-7b", "llama-3-70b")} <= deep
    assert not any("/model-" in check.id for check in every_check())
    assert {check.id for check in of_profile("basic", Options(deep=True))} > {"L2/linear/more-surprises", "L2/linear/N-33"}


# -- the seed --------------------------------------------------------------------------------------------
def drawn(selection: Selection) -> list[tuple[str, int, str]]:
    report = conform("reference", device="cpu", selection=selection)
    return [(one.id, one.comparisons, one.headroom_at) for one in report.results if one.id.endswith("surprises")]


@pytest.mark.deep
def test_the_seed_decides_what_is_drawn_and_nothing_else():
    one, again, other = (drawn(Selection("full", contract="rms_norm", seed=seed)) for seed in (5, 5, 6))
    assert one == again
    assert one != other
    assert [id_ for id_, *_ in one] == ["L2/rms_norm/surprises", "L2/rms_norm/more-surprises"]
    report = conform("reference", device="cpu", selection=Selection(contract="rms_norm", case="surprise-2", seed=5))
    assert (report.status, report.results[0].cases, report.content["claim"]["seed"]) == (0, 1, 5)


@pytest.mark.deep
def test_the_page_says_how_much_was_on_no_list():
    report = conform("reference", device="cpu", selection=Selection("full", contract="rms_norm", seed=5))
    cases = sum(result.cases for result in report.results)
    share = f"{MORE_SURPRISES:,} of {cases:,} cases of kernels, {MORE_SURPRISES / cases:.0%}"
    assert f"\nsurprises: {share}, are on no list; --seed 5 draws them again\n" in page(report)
    basic = conform("reference", device="cpu", selection=Selection(contract="rms_norm"))
    assert f"surprises: {SURPRISES} of " in page(basic)
    assert "surprises" not in page(conform("reference", device="cpu", selection=Selection(level="L1")))


# -- what goes wrong in a large case -----------------------------------------------------------------------
class Narrow(Proxy):
    """A provider that has no room for many rows."""

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        if args.gate_up.shape[0] > 300:
            raise MemoryError("no room for so many rows")
        return self._inner.bind(args, limits, workspace)


def test_a_kernel_that_raises_at_a_size_names_the_case():
    def table(answer: Any, device: Any) -> Any:
        del device
        return TableProxy(answer, {"swiglu": Narrow(answer.providers["swiglu"])})

    result = outcome("L2/swiglu/N-512", plugin := wrap(reference, polydraft_kernels=table))
    wanted = "swiglu, case 'N-512': MemoryError: no room for so many rows (rerun: polydraft conform reference --contract swiglu"
    assert (result.outcome, result.message) == ("fail", f"{wanted} --case N-512)")
    assert outcome("L2/swiglu/N-257", plugin).outcome == "pass"


@pytest.mark.parametrize("mode", among(["swiglu"], ["swiglu", "paged_attention", "linear"]))
def test_the_largest_cases_run_in_every_mode_that_is_declared(mode: str):
    result = outcome(f"L2/{mode}/large-other-modes", "cpu")
    assert result.outcome == "pass", result.message
    assert result.cases >= 2 * len(REGISTRY[mode].grows)
