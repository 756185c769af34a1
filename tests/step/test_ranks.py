"""One model over several ranks writes what it writes on one device, however it is served.

Sums over ranks round differently, so a choice between equals could fall otherwise; none does in these runs, which are the same
every time. Prefix hits, preemption and aborts happen in all of them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.backend import DeviceOptions
from polydraft.errors import CapabilityError
from polydraft.instruments.sanitize import Sanitizer
from polydraft.models import Checkpoint, FamilyRegistry, load_weights
from polydraft.models.ranks import OfRank, Share, of_ranks, shares_of
from polydraft.plugins.default_backend import default_backend
from polydraft.plugins.plugins import Plugins
from polydraft.program.plan import StepPlan
from polydraft.program.plan_bytes import ARRAYS, FLAGS, HEAD, NEW, WHOLE, PlanReader, PlanWriter
from polydraft.ranks import Group
from polydraft.reference.table import collectives
from tests.support import tiny
from tests.support.depth import among
from tests.support.emulator import SCHEDULES
from tests.support.of_ranks import OPTIONS, WHOLE_EXPERTS, asks, on_one_rank, pieces_read, served, split
from tests.support.runs import Ask, drive, engine, essence
from tools import make_checkpoint

MORE = [
    (model, ranks, drafts)
    for model in ("narrow", "deep", "sparse-glm", "sparse-ernie", "with-biases", "with-windows")
    for ranks in (2, 4)
    for drafts in (0, 1, 3, 5)
]
"""Key-value heads: "narrow" has 2, so that two of four ranks keep the same; tokens: 90 or 101 are no multiple of 4."""
NATIVE = pytest.mark.skipif(default_backend().name != "cpu", reason="the CPU backend is not built here")


def texts(running: Engine, model: str) -> list[dict[str, Any]]:
    """What becomes of the requests, behind preemption, prefix hits and an abort."""
    preempted, hits = running.scheduler.num_preemptions, running.ledger.num_hits
    found = [dict(essence(output)) for output in served(running, model)]
    assert running.scheduler.num_preemptions > preempted
    assert running.ledger.num_hits > hits
    assert [one["finish_reason"] for one in found].count("abort") == 1
    return found


@pytest.mark.parametrize(("model", "ranks", "drafts"), among([("with-biases", 2, 1)], MORE))
def test_texts_and_rounds_are_those_of_one_rank(model: str, ranks: int, drafts: int):
    with split(model, ranks, draft_tokens=drafts) as running:
        assert running.resolved.ranks == ranks
        assert texts(running, model) == on_one_rank(model, drafts)


def test_how_ranks_meet_is_told_where_there_is_a_choice(monkeypatch: pytest.MonkeyPatch):
    def choosing(device: Any, group: Group) -> Any:
        return dataclasses.replace(collectives(device, group), meets=("a ring", f"they are {num_ranks[group.rank]}"))

    def opened(self: Plugins, spec: str, options: DeviceOptions) -> Any:
        num_ranks[options.rank] = options.num_ranks
        return open_device(self, spec, options)

    num_ranks, open_device = dict[int, int](), Plugins.open_device
    monkeypatch.setattr("polydraft.reference.table.collectives", choosing)
    monkeypatch.setattr(Plugins, "open_device", opened)
    with split("narrow", 2) as running:
        found = [one for one in running.resolved.decisions if one.name == "collectives"]
        assert [(one.chosen, one.reason) for one in found] == [("a ring", "they are 2")]
    with split("narrow", 1) as running:
        assert "collectives" not in running.resolved.describe()


@pytest.mark.parametrize(
    ("model", "ranks", "drafts"),
    among([("sparse-ernie", 2, 0)], [(m, r, k) for m, r, k in MORE if (m, r) in WHOLE_EXPERTS]),
)
def test_experts_that_ranks_keep_whole(model: str, ranks: int, drafts: int):
    """Rows whose experts are all another rank's, and ranks without a row, among them."""
    with split(model, ranks, draft_tokens=drafts, expert_parallel=True) as running:
        assert texts(running, model) == on_one_rank(model, drafts)
        launched = {entry.contract for entry in running.runner.programs["greedy"]["target"].entries}
        assert "own_experts" in launched
        name = next(name for name in running.weights.bound if name.endswith("experts_down"))
        kept = running.weights.bound[name].nbytes
    with split(model, 1) as alone:
        assert kept * ranks == alone.weights.bound[name].nbytes


def test_whole_experts_may_have_any_number_of_features(tmp_path: Path):
    """Seven of each, which no two ranks could share out."""
    config = {**make_checkpoint.FAMILIES["qwen3-moe"], "num_experts": 4, "moe_intermediate_size": 7}
    model = str(make_checkpoint.make(tmp_path / "model", config))
    asked = [Ask((1, 2, 3), SamplingParams(max_new_tokens=8, ignore_eos=True)), Ask((9,) * 8, SamplingParams(max_new_tokens=5))]
    found = []
    for ranks in (1, 2):
        running = engine(model=model, tensor_parallel=ranks, expert_parallel=True)
        found.append([output.token_ids for output in drive(running, asked)])
        running.close()
    assert found[0] == found[1]


WAYS = [(overlap, graph) for overlap in (0, 1, 2) for graph in ("off", "decode")]


@pytest.mark.parametrize(("overlap", "graph"), among([WAYS[3]], WAYS))
def test_queues_and_graphs(overlap: int, graph: str):
    """Collectives lie in graphs, whole steps among them, and in steps that are launched ahead."""
    device = {"backend": "reference", "device": f"lazy-{overlap}", "graph": graph}
    options: dict[str, Any] = {"draft_tokens": 3, **device}
    with split("narrow", 2, **options) as running:
        assert texts(running, "narrow") == on_one_rank("narrow", 3)
        replayed = running.runner.graphs.counters.replayed_steps if running.runner.graphs else 0
        assert (replayed > 0) == (graph == "decode")


EMULATED = [(schedule, graph) for schedule in SCHEDULES for graph in ("off", "decode")]


@pytest.mark.parametrize(("schedule", "graph"), among([], EMULATED))
def test_the_emulator(schedule: str, graph: str):
    """Operations in any legal order, each rank's in one of its own, and memory that is poison until it is written. Nothing runs
    before somebody waits, and then perhaps more than was waited for."""
    options: dict[str, Any] = {"overlap": 1, "graph": graph, "graph_sizes": (1, 3) if graph == "decode" else ()}
    found = []
    for ranks in (2, 1):
        with split("narrow", ranks, emulator=f"seed=5&{schedule}", draft_tokens=3, **options) as running:
            found.append(texts(running, "narrow"))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("model", "ranks", "drafts"), among([], [(m, r, k) for m, r, k in MORE if m in ("narrow", "sparse-glm", "sparse-ernie")])
)
def test_the_emulator_with_more_ranks_drafts_and_models(model: str, ranks: int, drafts: int):
    """Behind each other, and with weights that are new in the middle."""
    schedule = SCHEDULES[(ranks + drafts) % len(SCHEDULES)]
    options: dict[str, Any] = {"overlap": drafts % 2, "graph": ("off", "decode")[ranks // 2 % 2], "draft_tokens": drafts}
    options["graph_sizes"] = (1, 3) if options["graph"] == "decode" else ()
    found = []
    for size in (ranks, 1):
        with split(model, size, emulator=f"seed=5&ranks=late&{schedule}", **options) as running:
            found.append(texts(running, model))
            running.update_weights(tiny.checkpoint(tiny.moved(model)))
            found[-1] += texts(running, model)
    assert found[0] == found[1]


@NATIVE
@pytest.mark.parametrize(("model", "ranks", "drafts"), among([], MORE))
def test_processes(model: str, ranks: int, drafts: int):
    """On the CPU backend ranks are processes that meet in shared memory."""
    on_cpu: dict[str, Any] = {"backend": "cpu", "draft_tokens": drafts}
    whole = (model, ranks) in WHOLE_EXPERTS
    with split(model, ranks, expert_parallel=whole, **on_cpu) as running, split(model, 1, **on_cpu) as alone:
        assert texts(running, model) == texts(alone, model)


def test_drafts_of_the_text_itself_and_fewer_by_step():
    """The proposer ngram, and numbers of drafts that rank 0 decides."""
    for options in ({"proposer": "ngram", "draft_tokens": 3}, {"draft_tokens": "auto:3"}):
        with split("narrow", 2, **options) as running, split("narrow", 1, **options) as alone:
            mine, theirs = texts(running, "narrow"), texts(alone, "narrow")
            assert [one["token_ids"] for one in mine] == [one["token_ids"] for one in theirs]


def test_log_probabilities_and_checks_of_the_run():
    params = SamplingParams(max_new_tokens=10, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    options: dict[str, Any] = {"draft_tokens": 2, "logprobs": 3, "check_texts": 1.0, "check_draft_state": 0.5}
    found = []
    for ranks in (1, 2):
        with split("narrow", ranks, **options) as running:
            running.add((3, 1, 4, 1, 5), params, id="one")
            outputs = []
            while running.has_work:
                running.step()
                outputs += running.poll()
            found += [output for output in outputs if output.finished and output.id == "one"]
            for check in (running.draft_state, running.text_check):
                assert check is not None
                assert check.compared.differed == 0
                assert check.compared.checked > 0
    one, two = found
    assert one.token_ids == two.token_ids
    for mine, theirs in zip(two.tokens, one.tokens, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert mine.rank == theirs.rank
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


def test_the_hazard_checker_finds_nothing():
    with split("narrow", 2, device="lazy-1", draft_tokens=3, sanitize=True) as running:
        assert texts(running, "narrow") == on_one_rank("narrow", 3)
        assert running.hazards == ()
        assert any(isinstance(one, Sanitizer) for one in running.instruments)


# -- what is launched --------------------------------------------------------------------------------------
def test_a_greedy_step_exchanges_pairs_and_any_other_step_logits():
    with split("narrow", 2, draft_tokens=3) as running:
        programs = running.runner.programs
        counts = {
            kind: Counter(
                entry.contract
                for program in (programs[kind]["target"], running.runner.drafts[kind][3])
                for entry in program.entries
                if entry.contract in ("all_gather", "all_reduce", "argmax_pair", "broadcast")
            )
            for kind in programs
        }
    halves = 2 * (1 + 3)  # a decoder block of the target, and one in each draft pass
    assert counts["greedy"] == {"all_gather": 4, "all_reduce": halves, "argmax_pair": 4}
    assert counts["sampling"] == {"all_gather": 8, "all_reduce": halves, "broadcast": 4}
    assert counts["greedy.processed"] == counts["sampling"]


def test_one_rank_launches_none():
    made = engine("narrow", draft_tokens=3)
    launched = {entry.contract for parts in made.runner.programs.values() for entry in parts["target"].entries}
    assert not launched & {"all_gather", "all_reduce", "argmax_pair", "broadcast"}
    assert "step" not in made.runner.memory.buffers


def test_a_share_keeps_less():
    """Bytes of weights and of KV rows, as they are planned and as they are."""
    with split("sparse-glm", 4) as running, split("sparse-glm", 1) as alone:
        mine, theirs = ({name: one.nbytes for name, one in e.weights.bound.items()} for e in (running, alone))
        for name in ("embed", "lm_head", "layers.0.o", "layers.1.experts_gate_up", "layers.1.shared_down", "mtp.0.o"):
            assert mine[name] * 4 == theirs[name], name
        assert mine["layers.0.q_norm"] == theirs["layers.0.q_norm"]
    with split("narrow", 2) as running, split("narrow", 1) as alone:
        assert 2 * running.resolved.describe()["kv_cache_bytes"] == alone.resolved.describe()["kv_cache_bytes"]


# -- shares ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["narrow", "sparse-glm", "sparse-ernie", "with-biases"])
@pytest.mark.parametrize(("ranks", "whole_experts"), [(2, False), (4, False), (2, True)])
def test_shares_make_up_the_whole_and_nothing_else_is_read(
    model: str, ranks: int, whole_experts: bool, monkeypatch: pytest.MonkeyPatch
):
    read = pieces_read(monkeypatch)
    with Checkpoint(tiny.checkpoint(model)) as checkpoint:
        description, table = FamilyRegistry().describe(checkpoint)
        weights, share = load_weights(checkpoint, description, table), of_ranks(description, ranks, whole_experts=whole_experts)
        kept = [OfRank(weights, shares_of(description, share, rank)) for rank in range(ranks)]
        for name, whole in description.weights().items():
            value, declared = weights[name], share.weights()[name]
            read.clear()
            shares = [np.asarray(one[name]) for one in kept]
            assert all(one.shape == declared.shape for one in shares), name
            if whole.split is None:
                assert all((one == value).all() for one in shares)
            elif whole.split == "first":
                assert (shares[0] == value).all()
                assert not np.any(shares[1:])
            else:
                assert sum(size for _, size in read) <= sum(one.size for one in shares), name
                assert joined(whole, declared, shares) == pytest.approx(value, abs=0), name


def joined(whole: Any, share: Any, shares: list[Any]) -> Any:
    """The shares put together again: each part for itself, what is kept twice once, without padding."""
    if whole.stack != share.stack:
        return np.concatenate(shares)
    parts, begins = [], [0] * len(shares)
    for of_whole, of_share in zip(whole.parts, share.parts, strict=True):
        axis = whole.split - bool(whole.stack)
        if axis == 1:
            return np.concatenate(shares, axis=whole.split)[..., : of_whole[1]]
        size, kept = of_whole[0], of_share[0]
        each = [np.take(one, range(begin, begin + kept), axis=whole.split) for one, begin in zip(shares, begins, strict=True)]
        twice = len(shares) * kept // size if len(shares) * kept % size == 0 else 1
        parts.append(np.take(np.concatenate(each[::twice], axis=whole.split), range(size), axis=whole.split))
        begins = [begin + kept for begin in begins]
    return np.concatenate(parts, axis=whole.split)


def test_key_value_heads_are_kept_by_several_ranks_where_these_are_more():
    with Checkpoint(tiny.checkpoint("narrow")) as checkpoint:
        description, _ = FamilyRegistry().describe(checkpoint)
    whole, share = description.weights()["layers.0.qkv"], of_ranks(description, 4).weights()["layers.0.qkv"]
    found = [Share.of_rank(whole, share, rank, 4) for rank in range(4)]
    assert [one.stretches for one in found if one] == [
        ((8 * rank, 0, 8), (32 + 8 * (rank // 2), 8, 8), (48 + 8 * (rank // 2), 16, 8)) for rank in range(4)
    ]


@pytest.mark.parametrize("model", ["narrow", "sparse-glm"])
@pytest.mark.parametrize("whole_experts", [False, True])
def test_a_share_of_an_array_is_what_is_read_of_it_in_parts(model: str, whole_experts: bool):
    with Checkpoint(tiny.checkpoint(model)) as checkpoint:
        description, _ = FamilyRegistry().describe(checkpoint)
    kinds = set()
    for name, share in of_ranks(description, 2, whole_experts=whole_experts).weights().items():
        whole = description.weights()[name]
        value = np.arange(np.prod(whole.shape), dtype=np.float32).reshape(whole.shape)
        for rank in range(2):
            kept = Share.of_rank(whole, share, rank, 2)
            if kept is None:
                continue
            wanted = np.zeros(kept.shape, np.float32)
            pieces = zip(wanted, value[kept.first :], strict=False) if kept.stacked else [(wanted, value)]
            for out, piece in pieces:
                for take, put in kept.of_part(0, len(piece)):
                    out[put] = piece[take]
            found = kept.of(value)
            np.testing.assert_array_equal(found, wanted, err_msg=name)
            kinds.add((np.shares_memory(found, value), kept.axis, kept.stacked))
    assert {(True, 0, False), (True, 1, False), (False, 0, False)} <= kinds, "views and copies"


# -- plans -------------------------------------------------------------------------------------------------
def test_plans_arrive_as_they_were_sent():
    made, plans = engine("narrow", device="lazy-1", draft_tokens=3, logprobs=2, **OPTIONS), list[StepPlan]()
    launch = made.runner.launch

    def noting(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    made.runner.launch = noting  # type: ignore[method-assign]
    wanting = Ask((4, 4, 8), SamplingParams(max_new_tokens=5, logprobs=1, prompt_logprobs=1))
    drive(made, [*asks("narrow"), wanting])
    writer, reader, before = PlanWriter(), PlanReader(), None
    sizes, kept = [], 0
    for plan in plans:
        message = writer.write(plan)
        sizes.append(0 if isinstance(message, int) else len(message))
        new = 0 if isinstance(message, int) else HEAD.size + plan.writes.runs.nbytes + plan.writes.payload.nbytes
        found = reader.read(message)
        for name, value in vars(plan).items():
            got = getattr(found, name)
            if name in ARRAYS and value is not None:
                assert got.dtype == value.dtype
                np.testing.assert_array_equal(got, value)
            elif name == "writes":
                assert (got.admits, got.runs.tolist(), got.payload.tolist()) == (
                    value.admits, value.runs.tolist(), value.payload.tolist()
                )  # fmt: skip
            elif name != "in_flight_counts":
                assert got == value, name
        if before is not None:
            assert (found.slots is before[1].slots) == (plan.slots is before[0].slots)
            kept += found.slots is before[1].slots
            assert sizes[-1] == new or plan.slots is not before[0].slots, "all that is sent of the same is new"
        before = plan, found
    known = {*NEW, *WHOLE, *FLAGS, *ARRAYS, "in_flight_counts"}
    assert {field.name for field in dataclasses.fields(StepPlan)} == known, "a new field has to be sent, or not be needed"
    assert kept > 5, "most plans are like the one before"
    assert sizes.count(0) > 5, "and most of those are sent as a number"
    assert any(plan.prompt_top is not None for plan in plans)


# -- refusals ----------------------------------------------------------------------------------------------
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads": ("mirrored", {"tensor_parallel": 4}, "2 query heads and 2 key-value heads cannot be shared out evenly"),
    "three": ("narrow", {"tensor_parallel": 3}, "32 features of a hidden row cannot be shared out evenly"),
    "intermediate": ("shared", {"tensor_parallel": 3}, "56 intermediate features cannot be shared out evenly .layers.0."),
    "experts": ("sparse-glm", {"tensor_parallel": 16}, "cannot be shared out evenly"),
    "rejection": ("narrow", {"verify": "rejection"}, "--verify rejection with --tensor-parallel 2"),
    "no experts": ("narrow", {"expert_parallel": True}, "--expert-parallel: model narrow has no experts; leave it out"),
    "one rank": (
        "sparse-glm", {"expert_parallel": True, "tensor_parallel": 1},
        "--expert-parallel: one rank keeps all experts; leave it out, or add --tensor-parallel",
    ),
    "six experts": ("sparse-ernie", {"expert_parallel": True, "tensor_parallel": 4}, "6 experts cannot be shared out evenly"),
    "digest": ("narrow", {"weights_digest": True}, "--weights-digest with --tensor-parallel 2: no rank reads all weights"),
    "backend": ("narrow", {"backend": "null"}, "--tensor-parallel 2: backend null does not declare ranks"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "options", "said"), REFUSED.values(), ids=list(REFUSED))
def test_what_ranks_cannot_do_is_refused_by_name(model: str, options: dict[str, Any], said: str):
    with pytest.raises(CapabilityError, match=said):
        engine(model, **{"tensor_parallel": 2, "draft_tokens": 2, "invariant": False, **options})
