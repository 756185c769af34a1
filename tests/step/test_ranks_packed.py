"""Packed matrices that ranks share out: a rank keeps some rows or columns of the numbers and scales that one device has, and
texts are the same; where a rank's would begin in the middle of what is packed together, that is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, SamplingParams
from polydraft.contracts.packing import PACKINGS, pack, unpacked
from polydraft.errors import CapabilityError
from polydraft.models import Checkpoint, FamilyRegistry, load_weights
from polydraft.models.ranks import OfRank, of_ranks, shares_of
from tests.support import tiny
from tests.support.cpu import needs_kernels
from tests.support.depth import among
from tests.support.of_ranks import on_one_core, served, split
from tests.support.packed_models import WIDE, checkpoint
from tests.support.published_packings import PUBLISHED
from tests.support.runs import essence

PROMPTS = [[5, 9, 11, 4], [7] * 9, [3, 8, 3, 8, 3, 8, 3]]


@contextmanager
def opened(model: Path, ranks: int, **options: Any) -> Iterator[LLM]:
    given: dict[str, Any] = {
        "max_num_seqs": 3,
        "block_size": 4,
        "backend": "reference",
        "draft_tokens": 3,
        "tensor_parallel": ranks,
        **options,
    }
    with on_one_core(ranks > 1 and given["backend"] != "cpu"), closing(LLM(model=str(model), **given)) as llm:
        yield llm


def texts(llm: LLM) -> list[tuple[Any, Any]]:
    found = llm.generate(PROMPTS, SamplingParams(max_new_tokens=20, ignore_eos=True))
    return [(one.token_ids, one.rounds) for one in found]


def of_one(model: Path, **options: Any) -> list[tuple[Any, Any]]:
    with opened(model, 1, **options) as llm:
        return texts(llm)


# -- shares ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_share_stands_for_that_part_of_the_whole(name: str, ranks: int):
    """Of all matrices, with stacks and padding; a block of 128 takes a matrix of its own."""
    packing, rng, found = PACKINGS[name], np.random.default_rng(ranks), list[bool]()
    for model, whole_experts in (("narrow", False), ("sparse-glm", False), ("sparse-glm", True), ("with-biases", False)):
        with Checkpoint(tiny.checkpoint(model)) as stored:
            description, _ = FamilyRegistry().describe(stored)
        try:
            share = of_ranks(description, ranks, whole_experts=whole_experts)
        except CapabilityError:
            continue
        for tensor, one in description.weights().items():
            if one.role not in ("linear", "experts") or len(one.shape) < 2:
                continue
            whole = pack(rng.standard_normal(one.shape).astype(np.float32), packing)
            for rank in range(ranks):
                kept = shares_of(description, share, rank)[tensor]
                if kept is None:
                    continue
                found.append(not kept.uncut(packing, one.joined[kept.axis], taken=False))
                if found[-1]:
                    np.testing.assert_array_equal(kept.of_packed(whole).read(), kept.of(whole.read()), err_msg=tensor)
    assert any(found)
    assert all(found) == (packing.rows == 1 and not packing.columns)


def test_what_is_packed_together_is_cut_at_its_borders_alone():
    with Checkpoint(tiny.checkpoint("narrow")) as stored:
        description, _ = FamilyRegistry().describe(stored)
    kept = shares_of(description, of_ranks(description, 2), 1)["layers.0.o"]
    assert kept is not None
    assert kept.axis == 1
    assert kept.uncut(PACKINGS["int4-channel"], 32, taken=True) == ""
    said = kept.uncut(PACKINGS["int4-group32"], 32, taken=True)
    assert said == "int4-group32 packs 32 inputs together, and those of a rank begin or end at 16 of 32"
    said = kept.uncut(PACKINGS["int8-channel-a8"], 32, taken=True)
    assert said == "int8-channel-a8 rounds a row of activations by all of its features, of which a rank has a part"
    assert kept.uncut(PACKINGS["int8-channel-a8"], 32, taken=False) == ""


# -- texts -------------------------------------------------------------------------------------------------
MODELS = [(model, ranks, how) for model in ("narrow", "sparse-glm", "with-biases") for ranks in (2, 4) for how in ("int8", "fp8")]


@pytest.mark.parametrize(("model", "ranks", "weights"), among([], MODELS))
def test_matrices_that_are_packed_at_load(model: str, ranks: int, weights: str):
    """The scale of an output is that of all of its inputs, also where a rank has some of these."""
    options: dict[str, Any] = {"weights": weights, "draft_tokens": 3}
    with split(model, 1, **options) as alone, split(model, ranks, **options) as running:
        assert [dict(essence(one)) for one in served(running, model)] == [dict(essence(one)) for one in served(alone, model)]
        assert running.weights.packing_errors.keys() == alone.weights.packing_errors.keys() > {"layers.0.o", "layers.0.qkv"}


WAYS = [("mimo", "int4", {}), ("glm4-moe", "int4", {"expert_parallel": True}), ("glm4-moe", "int4", {})]


@pytest.mark.parametrize(("family", "weights", "options"), among([], WAYS))
def test_groups_of_inputs(family: str, weights: str, options: dict[str, Any]):
    with opened(checkpoint(family), 2, weights=weights, **options) as llm:
        assert texts(llm) == of_one(checkpoint(family), weights=weights)
        llm.engine.update_weights(checkpoint(family, seed=1))
        assert texts(llm) == of_one(checkpoint(family, seed=1), weights=weights)


STORED = [(family, layout) for family in WIDE for layout, one in PUBLISHED.items() if not one.packing.endswith("-a8")]


@pytest.mark.parametrize(("family", "layout"), among([("mimo", "awq")], STORED))
def test_matrices_that_are_stored_packed(family: str, layout: str):
    """Those of "gptq-desc-act" cannot be had packed, and are shared out as floats. New ones are given to both ranks."""
    with opened(checkpoint(family, layout), 2) as llm:
        assert texts(llm) == of_one(checkpoint(family, layout))
        with Checkpoint(checkpoint(family, layout, 1)) as moved:
            arrays = {name: moved.stored(name) for name in moved.names()}
            llm.engine.update_weights(moved.path)
            after = texts(llm)
            llm.engine.update_weights(checkpoint(family, layout))
            llm.engine.update_weights(arrays)
            assert texts(llm) == after == of_one(moved.path)


@needs_kernels
@pytest.mark.parametrize(("family", "layout"), among([], STORED))
def test_processes(family: str, layout: str):
    on_cpu = {"backend": "cpu", "device": "cpu?threads=1"}
    with opened(checkpoint(family, layout), 2, expert_parallel=family != "mimo", **on_cpu) as llm:
        assert texts(llm) == of_one(checkpoint(family, layout), **on_cpu)


# -- refusals ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("int4", "--weights int4 with --tensor-parallel 2: layers.0.o: int4-group32 packs 32 inputs together, and those"),
        ("fp8-a8", "--weights fp8-a8 with --tensor-parallel 2: layers.0.o: fp8-channel-a8 rounds a row of activations by all"),
    ],
)
def test_what_cannot_be_packed_and_shared_out_is_refused(weights: str, said: str):
    with pytest.raises(CapabilityError, match=said), split("narrow", 2, weights=weights):
        pass


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        ("fp8-block", {}, "--tensor-parallel 2: model model: layers.0.o: fp8-block128-a8 packs 128 inputs together, and"),
        ("ct-int8-w8a8", {}, "layers.0.o: int8-channel-a8 rounds a row of activations by all of its features"),
        ("awq", {"invariant": True}, "--invariant with --tensor-parallel 2: sums of packed matrices have no leaves"),
    ],
)
def test_what_is_stored_otherwise_is_refused_before_it_is_read(
    layout: str, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(OfRank, "__getitem__", lambda *_: pytest.fail("it was read"))
    with pytest.raises(CapabilityError, match=said), opened(checkpoint("mimo", layout), 2, **options):
        pass


def test_a_share_of_what_is_stored_is_what_one_device_has():
    """To the bit, parts that lie below one another among them."""
    with Checkpoint(checkpoint("glm4-moe", "ct-int4-zeros")) as stored:
        description, table = FamilyRegistry().describe(stored)
        weights = load_weights(stored, description, table)
        share, names = of_ranks(description, 2), list(weights.packings)
        kept = [OfRank(weights, shares_of(description, share, rank)) for rank in range(2)]
        for name in names:
            declared = description.weights()[name]
            for rank, one in enumerate(kept):
                found, cut = one[name], shares_of(description, share, rank)[name]
                assert (cut is None) == (declared.split is None)
                wanted = weights[name] if cut is None else cut.of(weights[name])
                np.testing.assert_array_equal(unpacked(found), wanted, err_msg=name)
                assert found.packing == weights.packings[name]  # type: ignore[union-attr]
    assert {"layers.0.qkv", "layers.1.experts_gate_up", "layers.1.experts_down"} <= set(names)
