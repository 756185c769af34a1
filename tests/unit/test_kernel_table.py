"""The kernel table of an engine: packs laid over the backend, first wins, and nothing asked for is passed by."""

from types import SimpleNamespace
from typing import Any

import pytest

from polydraft.backend import PackNotes
from polydraft.contracts import COMPOSITES
from polydraft.errors import PluginError
from polydraft.plugins.kernel_table import BoundTable, PackTable, lay_over, parts_of
from polydraft.reference.device import ReferenceDevice

FUSED = "residual_add+rms_norm"
SAMPLED = "gumbel_noise+sample"


def table(owner: str, *contracts: str) -> Any:
    return SimpleNamespace(providers={c: f"{owner}:{c}" for c in contracts}, versions=dict.fromkeys(contracts, 1))


def pack(owner: str, *contracts: str, ordered: bool = True) -> PackTable:
    return PackTable(owner, f"digest of {owner}", table(owner, *contracts), ordered)


def laid(*packs: PackTable, backend: Any = None) -> BoundTable:
    base = backend or table("chip", "residual_add", "rms_norm", "gumbel_noise", "sample", FUSED, SAMPLED)
    return lay_over("chip", base, ReferenceDevice(), packs)


def owner(bound: BoundTable, contract: str) -> str | None:
    provider: Any = bound.providers.get(contract)
    return provider.partition(":")[0] if provider else None


def test_without_packs_the_table_is_the_backends():
    bound = laid()
    assert {owner(bound, c) for c in bound.providers} == {"chip"}
    assert bound.report() == {"overrides": [], "shadowed": [], "left_out": [], "packs": {}}


def test_first_pack_wins_and_the_report_says_so():
    bound = laid(pack("a", "sample", "embed"), pack("b", "sample", "swiglu"))
    assert [owner(bound, c) for c in ("sample", "embed", "swiglu", "gumbel_noise")] == ["a", "a", "b", "chip"]
    assert bound.report()["overrides"] == [
        {"contract": "embed", "pack": "a", "digest": "digest of a", "computed_by": ""},
        {"contract": "sample", "pack": "a", "digest": "digest of a", "computed_by": ""},
        {"contract": "swiglu", "pack": "b", "digest": "digest of b", "computed_by": ""},
    ]
    assert {"contract": "sample", "owner": "b", "by": "a"} in bound.report()["shadowed"]
    assert {"contract": "sample", "owner": "chip", "by": "a"} in bound.report()["shadowed"]


def test_what_a_pack_says_of_its_kernels_is_kept_for_those_that_it_serves():
    notes = PackNotes(
        computed_by={"sample": "an operator", FUSED: "another"}, left_out={"swiglu": "the operator is not there"},
        uncapturable=("sample", "rms_norm"), evidence="paper", library="operators 3",
    )  # fmt: skip
    noted = pack("b", "sample", FUSED)
    noted.table.notes = notes  # type: ignore[attr-defined]
    bound = laid(noted)
    assert {one.contract: one.computed_by for one in bound.overrides} == {"sample": "an operator", FUSED: "another"}
    assert bound.uncapturable == {"sample", "rms_norm"}
    report = bound.report()
    assert report["left_out"] == [{"contract": "swiglu", "pack": "b", "reason": "the operator is not there"}]
    assert report["packs"] == {"b": {"evidence": "paper", "library": "operators 3"}}
    shadowed = laid(pack("a", "sample"), noted)
    assert shadowed.uncapturable == {"rms_norm"}, "who does not serve it does not say whether it can be captured"


def test_fusion_of_the_backend_does_not_pass_by_the_kernel_of_a_pack():
    bound = laid(pack("a", "rms_norm"))
    assert owner(bound, "rms_norm") == "a"
    assert owner(bound, FUSED) is None
    assert owner(bound, SAMPLED) == "chip"
    assert {"contract": FUSED, "owner": "chip", "by": "a"} in bound.report()["shadowed"]


def test_composite_of_a_pack_leaves_the_single_kernels_to_whoever_has_them():
    bound = laid(pack("a", FUSED), pack("b", "rms_norm"))
    assert [owner(bound, c) for c in (FUSED, "rms_norm", "residual_add")] == ["a", "b", "chip"]


def test_composite_of_a_later_pack_does_not_pass_by_an_earlier_ones_kernel():
    bound = laid(pack("b", "rms_norm"), pack("a", FUSED))
    assert owner(bound, FUSED) is None
    assert owner(bound, "rms_norm") == "b"


def test_pack_may_offer_a_composite_and_its_parts():
    bound = laid(pack("a", FUSED, "rms_norm", "residual_add"))
    assert [owner(bound, c) for c in (FUSED, "rms_norm", "residual_add")] == ["a", "a", "a"]


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (("embed",), ("embed", "sample"), "embed"),
        ((FUSED,), ("rms_norm",), "rms_norm"),
        ((SAMPLED,), (SAMPLED,), "gumbel_noise, sample"),
    ],
)
@pytest.mark.parametrize("ordered", [(True, False), (False, False)])
def test_clash_without_an_order_names_both_and_the_way_out(
    first: tuple[str, ...], second: tuple[str, ...], shared: str, ordered: tuple[bool, bool]
):
    with pytest.raises(PluginError, match=rf"packs 'a' and 'b' both claim {shared} in polydraft_kernels.*--kernels a,b"):
        laid(pack("a", *first, ordered=ordered[0]), pack("b", *second, ordered=ordered[1]))
    laid(pack("a", *first), pack("b", *second))


def test_packs_without_an_order_may_stand_beside_each_other():
    bound = laid(pack("a", "embed", ordered=False), pack("b", "swiglu", ordered=False))
    assert [owner(bound, c) for c in ("embed", "swiglu")] == ["a", "b"]


def test_versions_follow_their_providers():
    newer = pack("a", "sample")
    newer.table.versions["sample"] = 7  # type: ignore[index]
    bound = laid(newer)
    assert bound.versions["sample"] == 7
    assert set(bound.versions) == set(bound.providers)


def test_parts_of_contracts_and_composites():
    assert parts_of("embed") == {"embed"}
    assert all(parts_of(name) == set(composite.parts) for name, composite in COMPOSITES.items())


def test_workspace_is_shared_and_grows_only_for_more():
    bound = laid()
    before = bound.device.counters.allocations
    assert bound.workspace(0) is None
    first: Any = bound.workspace(64)
    assert (first.nbytes, first.buffer.shape, first.buffer.dtype) == (64, (64,), "u8")
    assert bound.workspace(16) is first
    larger = bound.workspace(65)
    assert larger is not first
    assert bound.workspace(65) is bound.workspace(1) is larger
    assert bound.device.counters.allocations == before + 2
