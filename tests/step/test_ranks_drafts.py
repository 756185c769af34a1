"""Draft models and reduced draft vocabularies over several ranks: drafts, texts and rounds are those of one rank, each rank reads
what it keeps, and new weights of a draft model are in use on all ranks or on none.

Tiny draft models in every published layout, of which some share the target's embedding or head, score a part of the vocabulary or
are wider than their target.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.conformance.oracle.checkpoints import write_checkpoint
from polydraft.errors import CapabilityError, CheckpointError
from polydraft.host.draft_policy import ladder
from polydraft.models import Checkpoint, FamilyRegistry
from polydraft.models.ranks import in_leaves, of_ranks
from polydraft.proposers.base import DraftWeights
from polydraft.proposers.eagle3 import Eagle3Proposer
from polydraft.sampling.draft_vocab import own_rows
from tests.step.test_eagle3 import HARDLY, SOMETIMES, asks, named
from tests.step.test_eagle3 import engine as of_pair
from tests.support import tiny
from tests.support.cpu import needs_kernels
from tests.support.depth import among, deep
from tests.support.eagle3 import pair
from tests.support.of_ranks import on_one_core, on_one_rank, pieces_read, served, split
from tests.support.runs import drafts_at, drive, essence
from tools.make_eagle3 import LAYOUTS, V, draft_config, draft_tensors, write_target

RANKS, DRAFTS = (2, 4), (0, 3, 5)
LAZY = {"device": "queued", "max_batched_tokens": 20}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "preemption": {"num_blocks": 12},
    "ahead": {**LAZY, "overlap": 2},
    "graphs": {**LAZY, "overlap": 1, "graph": "decode", "graph_sizes": (1, 3)},
    "hazards": {**LAZY, "overlap": 1, "sanitize": True},
    "emulator": {"emulator": "seed=3&policy=reversed", "overlap": 2},
    "emulator, graphs": {"emulator": "seed=5&policy=lazy", "overlap": 1, "graph": "decode", "graph_sizes": (1, 3)},
    "cpu": {"backend": "cpu", "device": "cpu?threads=1"},
    "cpu, graphs": {"backend": "cpu", "device": "cpu?threads=1", "graph": "decode", "graph_sizes": (1, 3)},
}
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "coupled": {"temperature": 1.0, "top_p": 0.95}}


@contextmanager
def over(of: tuple[Path, Path], ranks: int, draft_tokens: int = 3, **options: Any) -> Any:
    """An engine on a target and its draft model, over several ranks."""
    with on_one_core(ranks > 1 and options.get("backend") != "cpu"):
        running = of_pair(of, draft_tokens, tensor_parallel=ranks, **options)
        try:
            yield running
        finally:
            running.close()


def texts(running: Engine, **sampling: Any) -> list[dict[str, Any]]:
    """What must not depend on the number of ranks."""
    outputs = drive(running, asks(16, **sampling))
    assert sum(output.accepted for output in outputs) > 5 or not running.resolved.limits.num_drafts
    return [dict(essence(output)) for output in outputs]


# -- texts and rounds --------------------------------------------------------------------------------------------------------
TAKEN = [
    ("sglang", 2, 3, "graphs", "greedy", True),
    ("speculators, two layers", 4, 3, "ahead", "coupled", False),
    deep(("wide", 2, 5, "emulator, graphs", "greedy", True)),
    ("speculators", 2, 3, "cpu", "greedy", False),
]
PRODUCT = itertools.product(LAYOUTS, RANKS, DRAFTS, WAYS, SAMPLINGS)
COMBINATIONS = [(*one, place % 2 == 0) for place, one in enumerate(PRODUCT) if place % 31 == 0]


@needs_kernels
@pytest.mark.parametrize(("layout", "ranks", "draft_tokens", "way", "sampling", "invariant"), [*TAKEN, *map(deep, COMBINATIONS)])
def test_texts_and_rounds(layout: str, ranks: int, draft_tokens: int, way: str, sampling: str, invariant: bool):
    of, options = pair(layout, SOMETIMES), {**WAYS[way], "invariant": invariant}
    with over(of, ranks, draft_tokens, **options) as running, over(of, 1, draft_tokens, **options) as alone:
        assert texts(running, **SAMPLINGS[sampling]) == texts(alone, **SAMPLINGS[sampling])
        assert running.resolved.ranks == ranks
        assert running.hazards == ()


@pytest.mark.parametrize(("layout", "ranks"), among([("speculators", 4)], itertools.product(LAYOUTS, RANKS)))
def test_every_draft_is_that_of_one_rank(layout: str, ranks: int):
    """The wrong ones, too: rounds show how many were right."""
    of = pair(layout, HARDLY)
    with over(of, ranks) as running, over(of, 1) as alone:
        assert (found := drafts_at(running, asks(8))) == drafts_at(alone, asks(8))
    assert len({token for drafts in found.values() for token in drafts}) > 5


@pytest.mark.deep
@pytest.mark.parametrize("layout", ["sglang", "speculators, two layers", "3.1"])
@pytest.mark.parametrize("ranks", RANKS)
def test_rounds_where_every_step_draws_its_number_of_drafts(layout: str, ranks: int):
    """Steps without drafts keep rows on all ranks."""
    options = {**WAYS["graphs"], "numbers": random.Random(3).choices(ladder(5), k=200)}
    of = pair(layout, SOMETIMES)
    with over(of, ranks, 5, **options) as running, over(of, 1, 5, **options) as alone:
        assert texts(running) == texts(alone)


def test_beside_a_lookup_and_checked():
    options: dict[str, Any] = {"hybrid": True, "proposer_options": ("min_token_prob=0",), "check_draft_state": 0.5}
    of = pair("sglang", SOMETIMES)
    with over(of, 2, 5, **options) as running, over(of, 1, 5, **options) as alone:
        assert [one["token_ids"] for one in texts(running)] == [one["token_ids"] for one in texts(alone)]
        assert running.draft_state is not None
        assert running.draft_state.compared.checked > 0
        assert running.draft_state.compared.differed == 0


def test_a_greedy_pass_exchanges_pairs_and_any_other_logits():
    """Of the whole vocabulary, where its tokens are: a head that scores some of them has their columns in its rank's share."""
    counts: dict[str, Counter[str]] = {}
    with over(pair("sglang", SOMETIMES), 2) as running:
        for kind in ("greedy", "sampling"):
            entries = [one.contract for one in running.runner.drafts[kind][3].entries if one.contract != "spread_logits"]
            counts[kind] = Counter(one for one in entries if one in ("all_gather", "all_reduce", "argmax_pair", "broadcast"))
        logits = running.runner.memory.buffers["eagle3.logits.share"]
        assert logits.shape[1] == V // 2
    assert counts["greedy"] == {"all_gather": 3, "all_reduce": 6, "argmax_pair": 3}
    assert counts["sampling"] == {"all_gather": 6, "all_reduce": 6, "broadcast": 3}


# -- shares ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_shares_make_up_the_whole_and_nothing_else_is_read(layout: str, ranks: int, monkeypatch: pytest.MonkeyPatch):
    target, draft_model = pair(layout, SOMETIMES)
    with Checkpoint(target) as opened:
        model, _ = FamilyRegistry().describe(opened)
    share = of_ranks(model, ranks)
    whole, mine = (Eagle3Proposer.weights(one, str(draft_model)) for one in (model, share))
    kept = [mine.of_rank(whole, share, rank) for rank in range(ranks)]
    read = pieces_read(monkeypatch)
    values = arrays(whole, model)
    for tensor in whole.tensors:
        name = f"eagle3.{tensor.name}"
        read.clear()
        shares = [arrays(one, model, name)[name] for one in kept]
        declared = next(one for one in mine.tensors if one.name == tensor.name)
        assert all(one.shape == declared.shape for one in shares), name
        if tensor.split is None:
            assert all((one == values[name]).all() for one in shares)
        elif tensor.name in whole.tokens:
            rows = [own_rows(whole.tokens[tensor.name], share.vocab_share, rank) for rank in range(ranks)]
            assert sorted(np.concatenate(rows)) == [*range(len(values[name]))]
            for one, place in zip(shares, rows, strict=True):
                assert (one[: len(place)] == values[name][place]).all()
                assert not one[len(place) :].any()
        elif tensor.split in (0, 1) and len(tensor.parts) == 1:
            assert (np.concatenate(shares, axis=tensor.split)[: tensor.shape[0]] == values[name]).all()
        if tensor.split in (0, 1):
            assert sum(size for _, size in read) <= sum(one.size for one in shares), name


def arrays(weights: DraftWeights, model: Any, *names: str) -> dict[str, Any]:
    with weights.canonical(model) as found:
        return {name: np.array(found[name]) for name in names or found}


def test_sums_by_leaf_have_the_same_leaves():
    target, draft_model = pair("speculators, two layers", SOMETIMES)
    with Checkpoint(target) as opened:
        model = in_leaves(FamilyRegistry().describe(opened)[0])
    for ranks in (1, 2, 4):
        blocks = Eagle3Proposer.layers(of_ranks(model, ranks), str(draft_model)).values()
        assert [(one.mixer.leaves, one.feed_forward.leaves) for one in blocks] == 2 * [(4 // ranks,) * 2]  # type: ignore[attr-defined]


def test_an_embedding_that_is_the_targets_is_kept_once_on_all_ranks_or_on_none(tmp_path: Path):
    """That of rank 1 alone differs."""
    target, draft_model = pair("speculators", SOMETIMES)
    with over((target, draft_model), 2) as running:
        assert "eagle3.embed" not in running.runner.memory.weights
    other = write_target(tmp_path / "target", "llama", SOMETIMES)
    change(other / "model.safetensors", "model.embed_tokens.weight", (3, V - 1))
    with over((other, draft_model), 2) as running, over((other, draft_model), 1) as alone:
        assert "eagle3.embed" in running.runner.memory.weights
        assert texts(running) == texts(alone)


def change(file: Path, name: str, place: tuple[int, int]) -> None:
    """Write another number into a stored matrix."""
    with Checkpoint(file.parent) as opened:
        value = opened.tensor(name)
    where = file.read_bytes().index(value.tobytes())
    value[place] += 1
    with file.open("r+b") as out:
        out.seek(where)
        out.write(value.tobytes())


def test_what_cannot_be_shared_out_is_refused_by_name(tmp_path: Path):
    (target, _), six = pair("sglang", SOMETIMES), replace(LAYOUTS["sglang"], layer={"num_attention_heads": 6})
    write_checkpoint(tmp_path, draft_config(six), draft_tensors(six, SOMETIMES, 0, np.eye(V)))
    wanted = (
        r"^--draft-model .* with --tensor-parallel 4: 6 query heads and 2 key-value heads cannot .*\(eagle3.layers.0\); use an"
    )
    with pytest.raises(CapabilityError, match=wanted):
        of_pair((target, tmp_path), tensor_parallel=4)


# -- new weights -------------------------------------------------------------------------------------------------------------
@needs_kernels
@pytest.mark.parametrize(
    ("layout", "kinds", "backend"),
    among(
        [("speculators", ("directory", "arrays"), "reference")],
        [
            (layout, kinds, backend)
            for layout in ("speculators", "3.1", "wide")
            for kinds in (("directory", "arrays"), ("arrays", "directory"), ("arrays", "arrays"), ("directory", "directory"))
            for backend in ("reference", "cpu")
        ],
    ),
)
def test_another_draft_model(layout: str, kinds: tuple[str, str], backend: str):
    """It comes with the target's weights, and is checked on all ranks before any of them is written."""
    of, (other, other_draft) = pair(layout, HARDLY), pair(layout, HARDLY, seed=1)
    where: dict[str, Any] = {"backend": backend} | ({"device": "cpu?threads=1"} if backend == "cpu" else {})
    with over(of, 2, **where) as running, over((other, other_draft), 1, **where) as fresh:
        before = drafted(running)
        given = [one if kind == "directory" else named(one) for one, kind in zip((other, other_draft), kinds, strict=True)]
        lacking = {name: value for name, value in named(other_draft).items() if "fc" not in name}
        with pytest.raises(CheckpointError, match="fc"):
            running.update_weights(given[0], draft=lacking)
        assert drafted(running) == before
        running.update_weights(given[0], draft=given[1])
        assert drafted(running) == drafted(fresh) != before
        running.update_weights(of[0], draft=of[1])
        assert drafted(running) == before


def drafted(running: Engine) -> list[Any]:
    """Texts and rounds."""
    return [dict(essence(output)) for output in drive(running, asks(12))]


def test_an_embedding_that_is_kept_once_cannot_become_two_on_any_rank():
    of = pair("speculators", HARDLY)
    with over(of, 2) as running:
        before = drafted(running)
        foreign = named(of[1])
        foreign["embed_tokens.weight"] = foreign["embed_tokens.weight"].copy()
        foreign["embed_tokens.weight"][3, V - 1] += 1  # a column of rank 1
        with pytest.raises(CheckpointError, match=r"embed_tokens.weight is another than embed of the target, .* engine$"):
            running.update_weights(of[0], draft=foreign)
        assert drafted(running) == before


# -- a reduced vocabulary of an MTP head -------------------------------------------------------------------------------------
NARROWED = [
    (model, ranks, drafts, tokens)
    for model in ("narrow", "sparse-glm", "with-biases")
    for ranks in RANKS
    for drafts in (1, 3, 5)
    for tokens in (1, 16, 40)
]


@pytest.mark.parametrize(("model", "ranks", "drafts", "tokens"), [*map(deep, NARROWED)])
def test_a_reduced_draft_vocabulary(model: str, ranks: int, drafts: int, tokens: int):
    """With few tokens some rank has none of them."""
    vocab = tiny.CONFIGS[model]["vocab_size"]
    options = {"draft_vocab": f"{tiny.token_counts(vocab)}:{tokens}"}
    with split(model, ranks, draft_tokens=drafts, **options) as running:
        assert [dict(essence(one)) for one in served(running, model)] == on_one_rank(model, drafts, **options)
        head, shared = (running.weights.bound[name] for name in ("mtp.0.draft_head", "lm_head"))
        assert head.nbytes <= shared.nbytes


@needs_kernels
def test_a_reduced_draft_vocabulary_of_processes_with_packed_matrices_and_new_weights():
    vocab = tiny.CONFIGS["narrow"]["vocab_size"]
    counts = f"{tiny.token_counts(vocab)}:30"
    options: dict[str, Any] = {"backend": "cpu", "draft_tokens": 3, "draft_vocab": counts, "weights": "int8"}
    other = tiny.checkpoint(tiny.moved("narrow"))
    params, found = SamplingParams(max_new_tokens=24, ignore_eos=True), []
    for ranks in (2, 1):
        with split("narrow", ranks, **options) as running:
            here = []
            for new in (None, other):
                if new is not None:
                    with Checkpoint(new) as opened:
                        running.update_weights({name: opened.tensor(name) for name in opened.names()})
                running.add((3, 1, 4, 1, 5), params)
                while running.has_work:
                    running.step()
                here.append(dict(essence(running.poll()[-1])))
            found.append(here)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
