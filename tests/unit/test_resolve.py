"""Negotiation: every value has a reason, every refusal is said at once, and nothing asked for is downgraded."""

import copy
import dataclasses
import importlib.util
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from polydraft import LLM
from polydraft.backend import BackendInfo
from polydraft.config import EngineConfig
from polydraft.contracts.kernels.rope_kv_write import plain_frequencies
from polydraft.errors import CapabilityError, ConfigError
from polydraft.models import Attention, Block, GatedMlp, ModelDescription, Mtp, Rope
from polydraft.program.host_inputs import Needs
from polydraft.proposers.base import built_in
from polydraft.resolve import CACHE_BUDGET, MAX_DRAFTS, Resolved, resolve
from tests.support import tiny
from tests.support.plugin_doubles import info

BLOCK = Block(Attention(4, 2, 8, Rope(plain_frequencies(8, 1e4))), GatedMlp(32))
HEAD = Mtp((BLOCK,), "hidden_first", "pre", "own", "pre")
MODEL = ModelDescription(
    name="tiny", architecture="MiMoForCausalLM", hidden_size=16, vocab_size=40, eps=1e-5, blocks=(BLOCK, BLOCK),
    max_model_len=128, mtp=HEAD,
)  # fmt: skip
PLAIN = dataclasses.replace(MODEL, mtp=None, mtp_note="config.json names no MTP layers")
PROPOSERS: dict[str, Needs] = {"mtp": "none", "none": "none", "shy": "none"}


def run(
    *, model: ModelDescription = MODEL, backend: BackendInfo | None = None, proposers: dict[str, Needs] = PROPOSERS,
    draft_models: Collection[str] = (), **wishes: Any,
) -> Resolved:  # fmt: skip
    return resolve(
        EngineConfig(**wishes), backend or info("chip"), model, proposers=proposers, draft_models=draft_models,
        layers=built_in().layers,
    )  # fmt: skip


_LAST = Block(Attention(4, 2, 8, Rope(plain_frequencies(8, 1e4)), sliding_window=7), GatedMlp(32))
WINDOWED = dataclasses.replace(MODEL, blocks=(BLOCK, _LAST))


def test_a_backend_without_sliding_windows_refuses_layers_that_have_them():
    assert run(model=WINDOWED, backend=info("chip", sliding_window=True)).limits.max_len == 128
    with pytest.raises(CapabilityError, match=r"layers\.1 of model tiny needs sliding_window, but backend chip does not declare"):
        run(model=WINDOWED, backend=info("chip", sliding_window=False))
    with pytest.raises(CapabilityError, match="needs sliding_window, but chip:0 has none"):
        run(model=WINDOWED, backend=info("chip", sliding_window=True).without({"sliding_window": "chip:0 has none"}))


def reason(resolved: Resolved, name: str) -> str:
    return next(d.reason for d in resolved.decisions if d.name == name)


def test_grammars_are_refused_where_their_package_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match="--constraints: grammars need the package llguidance; install it"):
        run(constraints=True)
    assert run().proposer == "mtp"


def test_numbers_that_no_machine_counts_to_are_refused():
    for name in ("num_blocks", "max_num_seqs", "max_batched_tokens", "draft_tokens"):
        with pytest.raises(ConfigError, match=rf"^{name} is {10**20}, wanted a whole number .* and at most 2147483647; correct"):
            EngineConfig(**{name: 10**20})  # type: ignore[arg-type]


# -- decisions -------------------------------------------------------------------------------------
def test_every_option_is_decided_once_with_a_reason():
    resolved = run()
    decided = [d.name for d in resolved.decisions]
    assert len(decided) == len(set(decided))
    assert {f.name for f in dataclasses.fields(EngineConfig)} - set(decided) == {"model"}
    assert all(d.reason and not d.reason.startswith("asked for") for d in resolved.decisions)
    assert resolved.describe() == {d.name: d.chosen for d in resolved.decisions}


def test_defaults_of_a_synchronous_backend():
    resolved = run()
    assert (resolved.backend, resolved.device, resolved.dtype) == ("chip", "cpu", "f32")
    assert (resolved.proposer, resolved.verify, resolved.overlap, resolved.graph) == ("mtp", "coupled", 0, "off")
    limits = resolved.limits
    assert (limits.num_drafts, limits.window, limits.max_seqs, limits.max_logit_rows) == (5, 6, 8, 48)
    assert (resolved.adaptive, resolved.describe()["draft_tokens"]) == (True, "auto:5")
    assert (limits.max_len, limits.block_size, limits.max_blocks, limits.num_blocks) == (128, 16, 8, 64)
    assert (limits.max_rows, limits.vocab_size, limits.max_stop_tokens) == (512, 40, 16)
    ended = run(model=dataclasses.replace(MODEL, eos_token_ids=tuple(range(20))))
    assert ended.limits.max_stop_tokens == 36, "those of the model, and as many as a request may name"


def test_graphs_are_off_where_they_would_miss_something():
    chip = info("chip", graph_capture=True)
    assert (run(backend=chip).graph, run(backend=chip, graph="decode", allow_cpu_fallback=True).graph) == ("decode", "decode")
    straying = run(backend=chip, allow_cpu_fallback=True)
    lacking = run(backend=chip.without({"graph_capture": "chip:0 captured nothing"}))
    off = "every launch is enqueued by the host"
    assert (straying.graph, lacking.graph, run().graph) == ("off", "off", "off")
    assert [reason(one, "graph") for one in (straying, lacking, run())] == [
        f"{off}: what may run on the CPU is in no graph; --graph decode captures where nothing does",
        f"{off}: chip:0 captured nothing",
        f"{off}: backend chip does not declare graph_capture",
    ]


def test_what_was_asked_for_is_marked_and_taken():
    wishes: dict[str, Any] = {
        "device": "cpu:1", "draft_tokens": 5, "proposer": "mtp", "verify": "greedy", "max_num_seqs": 3, "max_model_len": 100,
        "block_size": 8, "num_blocks": 20, "max_batched_tokens": 40, "overlap": 2, "graph": "off", "dtype": "f16",
        "invariant": True, "kernels": ("fast",), "plugins": ("a.py",), "seed": 7, "prefix_cache": False,
    }  # fmt: skip
    resolved = run(backend=info("chip", dtypes=("f32", "f16")), **wishes)
    chosen = resolved.describe()
    assert {name: chosen[name] for name in wishes} == wishes
    assert {d.name for d in resolved.decisions if d.reason.startswith("asked for")} == set(wishes)
    limits = resolved.limits
    assert (limits.num_drafts, limits.max_seqs, limits.max_len, limits.block_size) == (5, 3, 100, 8)
    assert (limits.num_blocks, limits.max_blocks, limits.max_rows) == (20, 13, 40)
    assert (resolved.device, resolved.dtype, resolved.overlap, resolved.invariant) == ("cpu:1", "f16", 2, True)


def test_wishes_of_another_kind_are_refused():
    wishes: dict[str, Any] = {
        "model": 5, "device": 0, "kernels": "fast", "plugins": 5, "invariant": "no", "prefix_cache": 0, "sanitize": None,
    }  # fmt: skip
    for name, value in wishes.items():
        with pytest.raises(ConfigError, match=f"^{name} is .*, wanted (a text|a list|True or False); correct it or leave it out"):
            EngineConfig(**{name: value})
    lists: dict[str, Any] = {"kernels": [5], "plugins": [None], "graph_sizes": ["a"], "think_end_ids": [1, True]}
    for name, value in lists.items():
        with pytest.raises(ConfigError, match=f"^{name} has .*, wanted a list of (texts|whole numbers); correct it or leave it"):
            EngineConfig(**{name: value})
    assert EngineConfig(model=Path("a") / "b", device=None) == EngineConfig(model="a/b")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^model is '', wanted the directory of a checkpoint; name one, or leave it out for"):
        EngineConfig(model="")
    assert EngineConfig(plugins=[Path("a") / "b.py"]).plugins == ("a/b.py",)  # type: ignore[arg-type,list-item]
    plugin: Any = object()
    assert EngineConfig(backend=plugin).backend is plugin, "a plugin that is no installed one, which choosing looks at"


def test_auto_follows_the_capabilities():
    resolved = run(backend=info("chip", asynchronous=True, dtypes=("bf16", "f32"), devices=("chip:0", "chip:1")))
    assert (resolved.overlap, resolved.dtype, resolved.device) == (1, "bf16", "chip:0")
    assert "before they have run" in reason(resolved, "overlap")
    assert "nothing to overlap with" in reason(run(), "overlap")


@pytest.mark.parametrize(
    ("model", "changes", "wishes", "wanted", "why"),
    [
        (MODEL, {}, {"draft_tokens": 0}, ("none", 0), "no drafts were asked for"),
        (MODEL, {}, {"proposer": "none"}, ("none", 0), "no drafts were asked for"),
        (PLAIN, {}, {}, ("none", 0), "config.json names no MTP layers"),
        (
            dataclasses.replace(MODEL, mtp=dataclasses.replace(HEAD, blocks=(BLOCK, BLOCK))),
            {},
            {},
            ("none", 0),
            "2 distinct MTP layers",
        ),
        (MODEL, {"max_window": 1}, {}, ("none", 0), "backend chip verifies windows of at most 1 tokens"),
        (MODEL, {"max_window": 3}, {}, ("mtp", 2), "fewer than 5 because backend chip verifies windows of at most 3 tokens"),
        (MODEL, {}, {"max_model_len": 4}, ("mtp", 2), "fewer than 5 because a text of at most 4 tokens has no room"),
        (MODEL, {}, {"max_batched_tokens": 31}, ("mtp", 2), "--max-batched-tokens 31 leaves windows of 3 rows"),
        (MODEL, {}, {"max_batched_tokens": 8}, ("none", 0), "--max-batched-tokens 8 leaves windows of 1 rows"),
        (MODEL, {}, {"max_batched_tokens": 79}, ("mtp", 3), "--max-batched-tokens 79 leaves windows of 4 rows"),
        (MODEL, {}, {"max_batched_tokens": 80}, ("mtp", 4), "--max-batched-tokens 80 leaves windows of 5 rows"),
        (MODEL, {}, {"max_batched_tokens": 96}, ("mtp", 5), "drafts a step at most; each makes as many as pay"),
        (MODEL, {}, {"verify": "rejection"}, ("mtp", 3), "since what --verify rejection samples depends on it"),
        (MODEL, {}, {"accept_schedule": (0.9,) * 5}, ("mtp", 3), "since their acceptance is synthetic"),
        (MODEL, {}, {"draft_tokens": "auto:4", "verify": "rejection"}, ("mtp", 4), "rejection samples depends on measured times"),
        (PLAIN, {}, {"proposer": "shy"}, ("shy", 5), "chosen by name"),
        (MODEL, {}, {"draft_tokens": 1}, ("mtp", 1), "the checkpoint has an MTP head"),
        (MODEL, {}, {"draft_tokens": "auto:5"}, ("mtp", 5), "each makes as many as pay"),
    ],
)
def test_proposer_and_drafts_go_together(model: Any, changes: Any, wishes: Any, wanted: Any, why: str):
    resolved = run(model=model, backend=info("chip", **changes), **wishes)
    assert (resolved.proposer, resolved.limits.num_drafts) == wanted
    assert why in reason(resolved, "proposer") + reason(resolved, "draft_tokens")


@pytest.mark.parametrize(
    ("verify", "why"),
    [
        ("auto", "shared noise"),
        ("greedy", "only requests with temperature 0"),
        ("coupled", "lossless at any temperature"),
        ("rejection", "lossless in distribution; a sampled text depends on the number of drafts"),
    ],
)
def test_verification_says_what_it_promises(verify: str, why: str):
    resolved = run(verify=verify)
    assert resolved.verify == ("coupled" if verify == "auto" else verify)
    assert why in reason(resolved, "verify")


def test_a_backend_that_cannot_sample_is_greedy():
    versions = {name: 1 for name in info("chip").contract_versions if name != "sample"}
    chip = dataclasses.replace(info("chip"), contract_versions=versions)
    resolved = run(backend=chip)
    assert (resolved.verify, reason(resolved, "verify")) == (
        "greedy",
        "backend chip does not offer sample, so only requests with temperature 0 are accepted",
    )
    assert run(backend=chip, verify="coupled").verify == "coupled", "which is refused when its programs are built"
    assert run(backend=chip, kernels=("pack",)).verify == "coupled", "a pack may bring it"


@pytest.mark.parametrize(
    ("wishes", "wanted", "why"),
    [
        ({}, 64, "every slot at full length"),
        ({"max_num_seqs": 1}, 8, "every slot at full length"),
        ({"num_blocks": 5}, 5, "64 would hold every slot at full length, 8 one request"),
    ],
)
def test_blocks_and_their_memory(wishes: Any, wanted: int, why: str):
    resolved = run(**wishes)
    assert resolved.limits.num_blocks == wanted
    assert why in reason(resolved, "num_blocks")
    assert resolved.describe()["kv_cache_bytes"] == wanted * 16 * 3 * 2 * 16 * 4


def test_auto_blocks_keep_to_the_budget_but_hold_one_request():
    wide = Block(Attention(64, 64, 128, Rope(plain_frequencies(128, 1e4))), GatedMlp(32))
    large = dataclasses.replace(MODEL, blocks=(wide,) * 32, mtp=None, mtp_note="none", max_model_len=4096)
    per_block = 32 * 2 * 64 * 128 * 16 * 4
    resolved = run(model=large, max_model_len=1024)
    assert resolved.limits.num_blocks == max(CACHE_BUDGET // per_block, 64)
    assert run(model=large).limits.num_blocks == 256
    assert "1024 MiB" in reason(resolved, "num_blocks")


@pytest.mark.parametrize("drafts", [0, 3])
def test_estimate_of_the_caches_is_what_they_take(drafts: int):
    llm = LLM(model=str(tiny.checkpoint("narrow")), backend="reference", draft_tokens=drafts, max_num_seqs=2)
    caches = llm.engine.runner.memory.caches
    assert len(caches) == llm.engine.model.num_layers + (drafts > 0)
    assert llm.engine.resolved.describe()["kv_cache_bytes"] == sum(cache.nbytes for cache in caches.values())


@pytest.mark.parametrize(
    ("wishes", "wanted"),
    [
        ({"graph": "decode", "max_num_seqs": 9}, (1, 2, 4, 8, 9)),
        ({"graph": "decode", "graph_sizes": (8, 2, 2)}, (2, 8)),
        ({"graph": "prefill", "max_batched_tokens": 40}, (1, 2, 4, 8, 16, 24, 32, 40)),
        ({}, (1, 2, 4, 8)),
        ({"graph": "off"}, ()),
    ],
)
def test_graph_buckets(wishes: Any, wanted: tuple[int, ...]):
    resolved = run(backend=info("chip", graph_capture=True), **wishes)
    assert resolved.graph == wishes.get("graph", "decode")
    assert resolved.graph_sizes == wanted
    plain = run(**{**wishes, "graph": "off", "graph_sizes": ()})
    assert (plain.graph, plain.graph_sizes) == ("off", ())


def test_the_draft_model_is_for_a_proposer_that_takes_one():
    resolved = run(proposer="eagle", draft_model="heads", proposers={"eagle": "none"}, draft_models=("eagle",))
    assert resolved.describe()["draft_model"] == "heads"
    assert reason(resolved, "draft_model") == "asked for; the directory that proposer eagle drafts with"
    assert run().describe()["draft_model"] == ""
    assert reason(run(), "draft_model") == "proposer mtp takes none"


def test_synthetic_acceptance_is_as_long_as_there_are_drafts_and_says_what_it_is():
    resolved = run(draft_tokens=2, accept_schedule=(0.9, 0.5, 0.1))
    assert resolved.accept_schedule == (0.9, 0.5)
    assert "the text means nothing" in reason(resolved, "accept_schedule")
    assert run().accept_schedule == ()


FEATURES: list[tuple[dict[str, Needs], int, str]] = [
    ({"a": "none", "b": "upper_bound_lengths"}, 1, "launches return before they have run"),
    (
        {"a": "none", "grammar": "previous_tokens"},
        1,
        "grammar needs previous_tokens, so steps that it takes part in are launched in two halves and at",
    ),
    ({"grammar": "previous_tokens", "lengths": "exact_lengths"}, 0, "none: lengths needs exact_lengths, so each step waits"),
]


@pytest.mark.parametrize(("features", "depth", "said"), FEATURES, ids=["nothing", "halves", "all"])
def test_what_a_feature_needs_may_cost_overlap_and_says_so(features: dict[str, Needs], depth: int, said: str) -> None:
    resolved = resolve(EngineConfig(), info("chip", asynchronous=True), MODEL, proposers=PROPOSERS, features=features)
    assert resolved.overlap == depth
    assert said in reason(resolved, "overlap")


def test_a_proposer_of_the_host_counts_as_a_feature_only_where_it_is_chosen() -> None:
    known: dict[str, Needs] = {**PROPOSERS, "host": "exact_lengths"}
    given = info("chip", asynchronous=True), MODEL
    assert resolve(EngineConfig(), *given, proposers=known).overlap == 1
    chosen = resolve(EngineConfig(proposer="host"), *given, proposers=known)
    assert chosen.overlap == 0
    assert "proposer host needs exact_lengths" in reason(chosen, "overlap")


@pytest.mark.parametrize("overlap", [1, 2])
def test_overlap_that_a_feature_cannot_have_is_refused(overlap: int) -> None:
    given = EngineConfig(overlap=overlap), info("chip", asynchronous=True), MODEL
    with pytest.raises(
        CapabilityError, match=rf"--overlap {overlap}: lengths needs exact_lengths of the step before; use --over"
    ):
        resolve(*given, proposers=PROPOSERS, features={"lengths": "exact_lengths"})
    taken = resolve(*given, proposers=PROPOSERS, features={"grammar": "previous_tokens"})
    assert taken.overlap == overlap
    assert "grammar needs previous_tokens" in reason(taken, "overlap")


def test_data_in_the_middle_of_a_step_is_a_capability() -> None:
    backend = info("chip", asynchronous=True, host_inputs=False)
    with pytest.raises(
        CapabilityError, match=r"grammar needs previous_tokens, but backend chip takes no data in the middle of a s"
    ):
        resolve(EngineConfig(), backend, MODEL, proposers=PROPOSERS, features={"grammar": "previous_tokens"})
    assert resolve(EngineConfig(), backend, MODEL, proposers=PROPOSERS, features={"x": "exact_lengths"}).overlap == 0


# -- refusals --------------------------------------------------------------------------------------
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "unavailable": (
        {"backend": info("chip", available=False, reason="no driver; install it")},
        "backend chip is not available: no driver; install it",
    ),
    "dtype": ({"dtype": "bf16"}, "--dtype bf16: backend chip computes in f32; choose one of those or auto"),
    "length": ({"max_model_len": 129}, "--max-model-len 129: model tiny was trained for 128; lower it"),
    "no length": ({"max_model_len": 1}, "--max-model-len 1 has no room for a prompt and a token of output; use at least 2"),
    "unknown": ({"proposer": "mpt"}, "--proposer mpt is unknown; known: mtp, none, shy"),
    "no head": ({"proposer": "mtp", "model": PLAIN}, "--proposer mtp: config.json names no MTP layers; use --proposer none"),
    "drafts without a head": (
        {"draft_tokens": 2, "model": PLAIN},
        "--draft-tokens 2: config.json names no MTP layers; use --draft-tokens 0",
    ),
    "draft model of a proposer that has none": (
        {"draft_model": "heads"},
        "--draft-model heads: proposer mtp takes no draft model; leave it out or name another --proposer",
    ),
    "draft model without drafts": (
        {"draft_model": "heads", "draft_tokens": 0},
        "--draft-model heads: proposer none takes no draft model; leave it out or name another --proposer",
    ),
    "drafts of none": (
        {"draft_tokens": 2, "proposer": "none"},
        "--draft-tokens 2: --proposer none never drafts; use --draft-tokens 0",
    ),
    "idle proposer": (
        {"draft_tokens": 0, "proposer": "mtp"},
        "--proposer mtp with --draft-tokens 0 drafts nothing; use --proposer none",
    ),
    "window": (
        {"draft_tokens": 64},
        "--draft-tokens 64: backend chip verifies windows of at most 64 tokens; use at most 63",
    ),
    "no window": (
        {"proposer": "mtp", "backend": info("chip", max_window=1)},
        "--proposer mtp: backend chip verifies windows of at most 1 tokens; use --proposer none",
    ),
    "drafts beyond the text": (
        {"draft_tokens": 9, "max_model_len": 10},
        "--draft-tokens 9: a text of at most 10 tokens has no room for more; use at most 8",
    ),
    "drafts that cannot be counted": (
        {"draft_tokens": 300, "backend": info("chip", max_window=999), "model": dataclasses.replace(MODEL, max_model_len=999)},
        f"--draft-tokens 300: a round of more drafts cannot be counted; use at most {MAX_DRAFTS}",
    ),
    "slots": (
        {"max_num_seqs": 9, "backend": info("chip", max_seqs=8)},
        "--max-num-seqs 9: backend chip holds at most 8; lower it",
    ),
    "rows": (
        {"max_batched_tokens": 31, "draft_tokens": 3},
        "--max-batched-tokens 31: 8 windows of 4 need 32 rows a step; raise it or lower --max-num-seqs or --draft-tokens",
    ),
    "graph": ({"graph": "decode"}, "--graph decode: backend chip does not declare graph_capture; use --graph off"),
    "graphs that the open device lacks": (
        {"graph": "decode", "backend": info("chip", graph_capture=True).without({"graph_capture": "chip:0 captured nothing"})},
        "--graph decode: chip:0 captured nothing; use --graph off",
    ),
    "sizes without graphs": ({"graph_sizes": (4,)}, "--graph-sizes 4 without graphs; add --graph decode or prefill"),
    "sizes": (
        {"graph": "decode", "graph_sizes": (4, 9, 0), "backend": info("chip", graph_capture=True)},
        "--graph-sizes 9,0: a decode step has 1 to 8 of them; correct the sizes",
    ),
    "no synthetic acceptance": (
        {"accept_schedule": (0.9, 0.9, 0.9), "backend": info("chip", synthetic_acceptance=False)},
        "backend chip has no synthetic acceptance; leave the schedule out",
    ),
    "synthetic rejection": (
        {"accept_schedule": (0.9, 0.9, 0.9), "verify": "rejection"},
        "a synthetic acceptance schedule forces choices, which --verify rejection does not make; use --verify coupled",
    ),
    "short schedule": (
        {"accept_schedule": (0.9,), "draft_tokens": 2},
        "--draft-tokens 2: the synthetic acceptance schedule has 1 chances; give one for each draft",
    ),
    "invariant": (
        {"invariant": True, "backend": info("chip", row_invariant=False)},
        "--invariant: backend chip does not declare row_invariant; leave it out or use another --backend",
    ),
}


@pytest.mark.parametrize(("wishes", "message"), REFUSALS.values(), ids=list(REFUSALS))
def test_refusal_is_one_sentence_with_the_next_step(wishes: dict[str, Any], message: str):
    with pytest.raises(CapabilityError, match="^this engine cannot be built: " + re.escape(message) + "$"):
        run(**wishes)


def test_all_refusals_are_said_at_once():
    names = ("dtype", "length", "unknown", "graph")
    wishes = {key: value for name in names for key, value in REFUSALS[name][0].items()}
    with pytest.raises(CapabilityError) as caught:
        run(**wishes)
    said = str(caught.value).removeprefix("this engine cannot be built: ")
    assert all(REFUSALS[name][1] in said for name in names)
    assert len(said) == sum(len(REFUSALS[name][1]) for name in names) + 2 * (len(names) - 1)


def test_every_refusal_comes_from_a_wish_or_a_fact_and_never_from_auto():
    for changes in (
        {"max_window": 1},
        {"max_window": 2},
        {"row_invariant": False},
        {"asynchronous": True},
        {"dtypes": ("bf16",)},
    ):
        for model in (MODEL, PLAIN):
            assert run(model=model, backend=info("chip", **changes)).backend == "chip"


def test_ranks_with_a_device_each_want_as_many_devices():
    def over(ranks: int, devices: tuple[str, ...], device: str = "", *, each: bool = True) -> Resolved:
        backend = dataclasses.replace(info("chip", ranks="processes", rank_devices=each), devices=devices)
        model = dataclasses.replace(PLAIN, vocab_size=40)
        return resolve(
            EngineConfig(tensor_parallel=ranks, device=device), backend, model, proposers=PROPOSERS, layers=built_in().layers,
            sharing=PROPOSERS,
        )  # fmt: skip

    four = tuple(f"chip:{index}" for index in range(4))
    for device in ("", "chip", "chip:2", "chip:3,1", "chip:0,0"):
        assert over(2, four, device).ranks == 2
    assert over(1, four, "chip:3").ranks == 1
    assert over(2, ("chip:0",), each=False).ranks == 2
    assert over(2, ("cpu",), "chip:0?few").ranks == 2, "a kind that is not listed is the backend's to refuse"
    assert over(1, ("chip:0",), "chip:0,1", each=False).device == "chip:0,1", "the backend refuses it"
    refused = {
        (2, four[:1], ""): "each rank needs a device of its own, wanted chip:0, chip:1, and this machine has chip:0; use fewer",
        (2, four, "chip:3"): "wanted chip:3, chip:4, and this machine has chip:0, chip:1, chip:2, chip:3; use fewer, or name",
        (2, four, "chip:0,7"): "wanted chip:0, chip:7, and this machine has chip:0, chip:1, chip:2, chip:3",
        (2, (), ""): "and this machine has none",
        (1, four, "chip:0,1"): "--device chip:0,1 names 2 devices for one rank, which opens one; name as many as ranks, or use "
        "--tensor-parallel 2",
        (2, four, "chip:0,1,2"): "names 3 devices for 2 ranks, each of which opens one",
        (4, four, "chip:0,1"): "names 2 devices for 4 ranks",
    }  # fmt: skip
    for given, said in refused.items():
        with pytest.raises(CapabilityError, match=said):
            over(*given)


def test_a_proposer_that_does_not_say_ranks_is_refused_over_several():
    config = EngineConfig(tensor_parallel=2, proposer="own", draft_model="drafts")
    known: dict[str, Any] = {"proposers": {"own": "none"}, "draft_models": ["own"]}
    with pytest.raises(CapabilityError, match="--proposer own with --tensor-parallel 2: it does not draft over a share"):
        resolve(config, info("chip", ranks="threads"), MODEL, **known)
    assert resolve(config, info("chip", ranks="threads"), MODEL, **known, sharing=["own"]).ranks == 2


def test_sums_are_taken_by_leaf_where_more_ranks_could_write_the_same_text():
    ordered, plain = (info("chip", ordered_sums=one, dtypes=("f32", "bf16")) for one in (True, False))
    assert run(invariant=True, backend=ordered).leaves
    assert not run(backend=ordered).leaves
    assert not run(invariant=True, backend=plain).leaves
    assert not run(invariant=True, backend=ordered, dtype="bf16").leaves
    adding = info("chip", ordered_sums=True, dtypes=("f32", "bf16"), rank_dtypes=("f32", "bf16"))
    assert run(invariant=True, backend=adding, dtype="bf16").leaves
    assert not run(invariant=True, backend=ordered, weights="int8").leaves


# -- purity ----------------------------------------------------------------------------------------
def test_same_input_gives_the_same_output_and_is_left_alone():
    given = (EngineConfig(draft_tokens=2, kernels=("fast",)), info("chip"), MODEL)
    before = copy.deepcopy([dataclasses.asdict(one) for one in (given[0], given[2])])
    first, second = (resolve(*given, proposers=PROPOSERS) for _ in range(2))
    assert first == second
    assert [dataclasses.asdict(one) for one in (given[0], given[2])] == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.overlap = 1  # type: ignore[misc]


def test_decisions_are_those_of_the_engine():
    llm = LLM(model=str(tiny.checkpoint("narrow")), backend="reference", max_num_seqs=2, block_size=4)
    resolved, engine = llm.engine.resolved, llm.engine
    assert engine.runner.limits == engine.scheduler.limits == resolved.limits
    assert (engine.ledger.num_blocks, engine.ledger.block_size) == (resolved.limits.num_blocks, 4)
    assert len(engine.runner._outputs) == resolved.overlap + 1


@pytest.mark.parametrize(
    "given", ["auto:0", "auto:", "auto:x", "auto:-1", "auto:2.5", "auto:²", "auto: 3", "auto:" + 5000 * "9", "more"]
)
def test_a_number_of_drafts_that_is_none_is_refused(given: str):
    with pytest.raises(ConfigError, match="draft_tokens is"):
        EngineConfig(draft_tokens=given)


def test_drafts_that_a_step_may_choose():
    config = EngineConfig(draft_tokens="auto:7")
    assert (config.adaptive, config.most_drafts) == (True, 7)
    assert (EngineConfig().adaptive, EngineConfig().most_drafts) == (True, None)
    assert (EngineConfig(draft_tokens=2).adaptive, EngineConfig(draft_tokens=2).most_drafts) == (False, 2)
    assert run(draft_tokens="auto:5").describe()["draft_tokens"] == "auto:5"
    with pytest.raises(CapabilityError, match=r"--draft-tokens auto:70: .*use at most 63"):
        run(draft_tokens="auto:70", backend=info("chip", max_window=64))
