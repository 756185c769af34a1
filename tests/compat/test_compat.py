"""Other people's packages of earlier versions: they load and conform as they are; what they stand on changes only in sight."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, SamplingParams, reference
from polydraft.conformance.check import Check
from polydraft.conformance.kernel_checks import Options, _of_kernel
from polydraft.conformance.probe import checkpoint, prompts
from polydraft.conformance.report import Selection, conform
from polydraft.conformance.surface import text
from polydraft.conformance.target import TableProxy, Target, wrap
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import UNITS, Case, Contract, Limits, tensor
from polydraft.contracts.residual_add import ResidualAddV1
from polydraft.errors import CapabilityError, PluginError
from polydraft.plugins import Plugins
from polydraft.runtime.program import ProgramBuilder, StepContext

HERE = Path(__file__).parent
FROZEN = HERE / "1.0"
FILES = tuple(str(FROZEN / name) for name in ("frozen_backend.py", "frozen_pack.py"))


# -- specification 1.0 -------------------------------------------------------------------------------
def test_nobody_has_edited_them():
    """Frozen means frozen: a package of somebody else's is not there to be repaired. Compare tests/compat/1.0/SHA256SUMS."""
    for line in (FROZEN / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((FROZEN / name).read_bytes()).hexdigest() == digest, name
    assert {p.name for p in FROZEN.glob("*.py")} == {Path(file).name for file in FILES}


@pytest.mark.parametrize("level", ["L0", "L1", "L2"])
def test_they_conform(level: str):
    report = conform("frozen", files=FILES, selection=Selection(level=level))
    assert (report.status, report.content["verdict"]["problems"]) == (0, [])
    if level == "L0":
        owners = report.content["owners"]
        assert {name for name, owner in owners.items() if owner == "own"} == {
            "embed", "rms_norm", "residual_add", "linear", "swiglu", "gather_rows", "argmax", "select_last_rows",
            "residual_add+rms_norm",
        }  # fmt: skip


def test_their_engine_has_the_text_of_the_reference():
    asked = [list(prompt) for prompt in prompts(3)], SamplingParams(max_new_tokens=6, ignore_eos=True)
    options: dict[str, Any] = {"model": str(checkpoint()), "draft_tokens": 3, "max_num_seqs": 3, "block_size": 4}
    texts = []
    for more in ({"backend": "frozen", "plugins": FILES}, {"backend": "reference"}):
        llm = LLM(**options, **more)
        texts.append([(out.token_ids, out.rounds) for out in llm.generate(*asked)])
        composites = [e.contract for e in llm.engine.runner.programs["greedy"]["target"].entries if "+" in e.contract]
        assert "residual_add+rms_norm" in composites
        llm.close()
    assert texts[0] == texts[1]


@pytest.mark.deep
def test_they_hold_the_whole_profile():
    report = conform("frozen", files=FILES)
    assert report.status == 0, report.content["verdict"]
    assert "basic (9 own, 0 delegated, 18 emulated) holds" in report.content["verdict"]["sentence"]


# -- the surface -------------------------------------------------------------------------------------
def test_the_surface_is_committed():
    """Something changed on which other people's packages stand. Where that is meant, run

    python -m polydraft.conformance.surface tests/compat/surface-1.0.txt

    and say in CHANGELOG.md what a backend or pack has to do."""
    assert (HERE / "surface-1.0.txt").read_text() == text(), test_the_surface_is_committed.__doc__


@pytest.mark.parametrize(
    "change",
    [
        {"unit": "seqs"},
        {"tolerance": {"x": 9.0}},
        {"deterministic": "none"},
        {"golden": lambda a, n: a.x.__setitem__(slice(0, n), a.x[:n] - a.y[:n])},
        {"version": 2},
        {"constraints": ("H >= 1",)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_change_of_a_contract_is_a_diff(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    changed = dataclasses.replace(REGISTRY["residual_add"], **change)
    monkeypatch.setattr(REGISTRY, "_contracts", {**REGISTRY._contracts, "residual_add/1": changed})
    before, after = ((HERE / "surface-1.0.txt").read_text().splitlines(), text().splitlines())
    assert set(before) != set(after)


def test_every_change_of_a_hook_record_or_list_is_a_diff(monkeypatch: pytest.MonkeyPatch):
    from polydraft import hooks
    from polydraft.conformance import surface

    before = (HERE / "surface-1.0.txt").read_text()
    with monkeypatch.context() as patched:
        patched.setattr(hooks, "polydraft_kernels", lambda device, options: None)
        assert text() != before
    with monkeypatch.context() as patched:
        patched.setattr(surface, "lists_digest", lambda spec: "0")
        assert text() != before

    @dataclasses.dataclass
    class StepMeta:
        role: str

    monkeypatch.setattr(surface, "RECORDS", (StepMeta,))
    assert text() != before


# -- versions N and N-1 ------------------------------------------------------------------------------
class ResidualAddV2(ResidualAddV1):
    """As version 1; `scale` is new."""

    scale: Any = tensor("N", "act", "Factor of each row of y; None: 1.", optional=True)


def golden(a: Any, n: int) -> None:
    factor = 1.0 if a.scale is None else a.scale[:n, None]
    a.x[:n] += factor * a.y[:n]


def cases() -> Any:
    """The cases of version 1, and one that needs the new field."""
    yield from REGISTRY["residual_add/1"].cases()
    rng = np.random.default_rng(5)
    x, y, scale = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 3), (4, 3), (4,)))
    yield Case("scaled", {"x": x, "y": y, "scale": scale}, {}, 3)


def adds_scaled(table: Any, device: Any) -> dict[str, Any]:
    """A provider of version 2."""

    class Scaled:
        def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
            x, y = args.x.host_array, args.y.host_array
            scale = None if args.scale is None else args.scale.host_array

            def launch(stream: Any, n: int) -> None:
                x[:n] += y[:n] if scale is None else scale[:n, None] * y[:n]

            return launch

        def workspace_bytes(self, args: Any, limits: Any) -> int:
            return 0

    return {"residual_add": Scaled()}


def offering(version: int, providers: Any = None) -> Any:
    """The reference with `residual_add` in a version, and without composites of it."""

    def kept(mapping: Any) -> dict[str, Any]:
        return {name: value for name, value in mapping.items() if "residual_add+" not in name}

    def table(answer: Any, device: Any) -> Any:
        changed = TableProxy(answer, {})
        changed.providers = {**kept(answer.providers), **(providers(answer, device) if providers else {})}
        changed.versions = {**kept(answer.versions), "residual_add": version}
        return changed

    def info(answer: Any) -> Any:
        return dataclasses.replace(answer, contract_versions={**kept(answer.contract_versions), "residual_add": version})

    return wrap(reference, polydraft_kernels=table, polydraft_backend_info=info)


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Contract:
    """`residual_add` in version 2, registered beside version 1."""
    newer = dataclasses.replace(REGISTRY["residual_add/1"], version=2, args=ResidualAddV2, golden=golden, cases=cases)
    monkeypatch.setattr(REGISTRY, "_contracts", {**REGISTRY._contracts, newer.key: newer})
    return newer


def checks() -> list[Check]:
    return list(_of_kernel(REGISTRY["residual_add"], Options(), optional=False))


def test_both_versions_conform(second: Contract):
    """A backend of the version before passes by that version's golden and cases; what is new is not claimed."""
    old, new = Target(offering(1)), Target(offering(2, adds_scaled))
    outcomes = {check.id: (check.result(old), check.result(new)) for check in checks()}
    assert {id_ for id_, (one, _) in outcomes.items() if one.outcome == "fail"} == set()
    scaled = outcomes["L2/residual_add/scaled"]
    assert [one.outcome for one in scaled] == ["unsupported", "pass"]
    assert "residual_add/1 is offered, which has no such case" in scaled[0].message
    assert outcomes["L2/residual_add/seeds"][0].outcome == "pass"
    assert [id_ for id_, (_, other) in outcomes.items() if other.outcome == "fail"] == []


def test_a_provider_of_the_wrong_version_is_seen(second: Contract):
    """Who says 2 and ignores what 2 brought fails."""
    ignoring = Target(offering(2))
    assert {check.id for check in checks() if check.result(ignoring).outcome == "fail"} == {
        "L2/residual_add/scaled", "L2/residual_add/invariant-mode"
    }  # fmt: skip


def test_the_step_serves_both(second: Contract):
    """A provider of version 1 is bound to that record, as long as the step does not use what is new."""
    limits = Limits(1, 1, 4, 4, 16, 4, 4, 4, 1, 8)
    for version, providers in [(1, None), (2, adds_scaled)]:
        target = Target(offering(version, providers))
        opened = target.open()
        x, y, scale = (opened.device.empty(name, shape, "f32") for name, shape in (("x", (4, 3)), ("y", (4, 3)), ("s", (4,))))
        for buffer, value in ((x, 1.0), (y, 2.0), (scale, 3.0)):
            opened.device.load(buffer, np.full(buffer.shape, value, np.float32))
        builder = ProgramBuilder("step", opened.table, limits, StepContext())
        builder.add("residual_add", ResidualAddV2(x=x, y=y, scale=None), "rows", "room")
        program = builder.build()
        assert program.entries[0].version == version
        program.run(opened.device.stream, tuple(4 for _ in UNITS))
        assert (x.host_array == 3.0).all()  # type: ignore[attr-defined]
        scaled = ProgramBuilder("step", opened.table, limits, StepContext())
        scaled.add("residual_add", ResidualAddV2(x=x, y=y, scale=scale), "rows", "room")
        if version == 2:
            scaled.build().run(opened.device.stream, tuple(4 for _ in UNITS))
            assert (x.host_array == 9.0).all()  # type: ignore[attr-defined]
        else:
            with pytest.raises(CapabilityError, match=r"scale of contract residual_add/2 .* update the backend to version 2"):
                scaled.build()


def test_two_versions_before_is_refused(second: Contract, monkeypatch: pytest.MonkeyPatch):
    third = dataclasses.replace(second, version=3)
    monkeypatch.setattr(REGISTRY, "_contracts", {**REGISTRY._contracts, third.key: third})
    with pytest.raises(PluginError, match="has version 1 of contract 'residual_add', core serves 3 or 2; rebuild it"):
        Plugins.load(offering(1))
    assert Plugins.load(offering(2)).info().contract_versions["residual_add"] == 2
