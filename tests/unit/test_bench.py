"""`polydraft bench` and `polydraft trace`: what they measure and write, their JSON against its schemas, and their errors.

No test here asserts a time: figures are checked against counts, and against each other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from polydraft import Engine
from polydraft.bench import report
from polydraft.bench.measure import Load, full_steps, instruments, profiled, run, timed
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.bench.suite import Suite
from polydraft.cli import main
from polydraft.cli.bench import EXAMPLES
from polydraft.config import EngineConfig
from polydraft.errors import CapabilityError, CheckpointError, ConfigError, DeviceError, RequestError
from polydraft.instruments.idle import Idle
from polydraft.instruments.timeline import HOST_STAGES
from polydraft.models.families import FamilyRegistry
from polydraft.rank_worker import opened
from tests.support import tiny
from tests.support.depth import first
from tests.support.emulator import Emulator
from tests.support.project import ROOT
from tests.support.schemas import published

SHAPES = ROOT / "bench" / "shapes"
SMALLEST = {
    "architectures": ["MiMoForCausalLM"], "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "vocab_size": 50, "max_position_embeddings": 128,
    "rope_theta": 100.0, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
NARROW = str(tiny.checkpoint("narrow"))


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        answer = json.loads(self.out)
        validate(answer)
        return answer


def validate(answer: Any) -> None:
    published(answer["schema"]).validate(answer)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the program in this process."""

    def call(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        return Result(int(stopped.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def bench(command: Callable[..., Result]) -> Callable[..., Result]:
    return lambda *arguments: command(
        "bench", "--model", NARROW, "--backend", "reference", "--prompt-tokens", 4, "--new-tokens", 12, "--repeats", 2, *arguments
    )


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    file = tmp_path / "smallest.json"
    file.write_text(json.dumps(SMALLEST))
    return file


# -- shapes -------------------------------------------------------------------------------------------------------------
def test_random_weights_are_a_whole_model(shape: Path) -> None:
    engine = Engine(EngineConfig(backend="reference", draft_tokens=2), checkpoint=RandomCheckpoint(shape))
    folder = engine.tokenizer.directory
    assert engine.model.name == "smallest"
    assert (engine.model.hidden_size, engine.model.vocab_size, len(engine.model.blocks)) == (16, 50, 1)
    assert engine.resolved.proposer == "mtp"
    engine.close()
    assert not folder.exists(), "what was written is removed"


def test_random_weights_are_the_same_in_every_run_and_look_random(shape: Path) -> None:
    first, second = RandomCheckpoint(shape), RandomCheckpoint(shape)
    names = first.names()
    assert len(names) > 20
    for name in names:
        tensor = first.tensor(name)
        assert np.array_equal(tensor, second.tensor(name)), name
        assert tensor.shape == first.shape(name)
        assert np.isfinite(tensor).all()
        if tensor.ndim == 2:
            assert abs(tensor.std() * tensor.shape[1] ** 0.5 - 1) < 0.3, name
            assert np.linalg.matrix_rank(tensor) == min(tensor.shape), name
        elif "norm" in name:
            assert abs(tensor.mean() - 1) < 0.1, name
    assert not np.array_equal(first.tensor("lm_head.weight"), first.tensor("model.embed_tokens.weight"))


def test_a_rank_that_is_a_process_opens_the_same_random_weights(shape: Path) -> None:
    first = RandomCheckpoint(shape)
    assert first.opening is not None
    second = opened(*first.opening)
    for name in first.names():
        assert np.array_equal(first.tensor(name), second.tensor(name)), name


@pytest.mark.parametrize("file", sorted(SHAPES.glob("*.json")), ids=lambda path: path.stem)
def test_shapes_of_the_repository_are_described(file: Path) -> None:
    checkpoint = RandomCheckpoint(file)
    model, table = FamilyRegistry().describe(checkpoint)
    assert (model.mtp is None) == file.stem.startswith("qwen")
    parts = [part for each in table.parts.values() for part in each]
    size = sum(int(np.prod(part.shape)) for part in parts)
    millions = {
        "tiny": 9, "small": 174, "mimo-7b": 7833, "qwen2-0.5b": 630, "ernie21": 22213, "glm12": 29617, "glm45-air": 109227,
        "moe-cpu": 131, "qwen3-30b": 30532,
    }  # fmt: skip
    assert round(size / 1e6) == millions[file.stem]
    checkpoint.close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is missing, wanted a JSON file; name another, such as one of bench/shapes"),
        ("{", "is no valid JSON, got .*; correct the file"),
        ("[]", "holds a JSON list, wanted a JSON object; correct the file"),
        ("{}", "architectures is None"),
        ('{"architectures": ["MiMoForCausalLM"]}', "has no num_hidden_layers"),
    ],
)
def test_a_broken_shape(content: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        RandomCheckpoint(file)
    assert str(file) in str(caught.value)


# -- measuring ----------------------------------------------------------------------------------------------------------
def narrow(**options: Any) -> Engine:
    return Engine(
        EngineConfig(
            **{"model": NARROW, "backend": "reference", "draft_tokens": 2, "max_num_seqs": 2, "prefix_cache": False, **options}
        ),
        instruments=instruments(),
    )


def test_a_run_serves_the_whole_load() -> None:
    engine, load = narrow(), Load(2, 5, 14)
    steps, outputs = run(engine, load)
    assert [len(output.token_ids) for output in outputs] == [14, 14]
    assert sum(step.new_tokens for step in steps) == 28
    assert sum(step.rounds for step in steps) == sum(len(output.rounds) for output in outputs)
    assert [step.number for step in steps] == sorted(step.number for step in steps)
    again, _ = run(engine, load)
    assert [step.new_tokens for step in again] == [step.new_tokens for step in steps], "the same load each time"


def test_full_steps_are_those_in_which_all_have_a_round() -> None:
    engine, load = narrow(), Load(2, 5, 14)
    steps, _ = run(engine, load)
    full = full_steps(steps, load)
    assert 0 < len(full) < len(steps)
    assert {step.rounds for step in full} == {2}
    figures = timed(engine, load)
    assert 1 <= figures["tokens_per_round"] <= 3
    assert all(value > 0 for value in figures.values())


def test_requests_that_never_meet_are_refused() -> None:
    engine = narrow(max_batched_tokens=6)
    with pytest.raises(RequestError, match="no step had a round of all 2 requests"):
        timed(engine, Load(2, 40, 2))


def test_a_failing_request_ends_the_benchmark() -> None:
    plugin = Emulator("emulator:0?fault=op@400")
    engine = Engine(
        EngineConfig(model=NARROW, draft_tokens=2, max_num_seqs=2, graph="off"), backend=plugin, instruments=instruments()
    )
    with pytest.raises(DeviceError, match="of the benchmark failed"):
        timed(engine, Load(2, 5, 40))


def test_host_time_by_stage_on_the_reference() -> None:
    engine, load = narrow(), Load(2, 5, 14)
    figures, stages = profiled(engine, load)
    assert set(stages) == {*HOST_STAGES, "other"}
    assert figures["host_us_per_step"] and figures["host_us_per_step"] > 0  # noqa: PT018
    assert figures["idle_share"] is not None
    assert 0 <= figures["idle_share"] < 1
    assert not any(vars(engine.points).values()), "nobody listens any more"


def test_the_null_backend_knows_the_time_of_its_kernels_itself() -> None:
    engine = Engine(EngineConfig(backend="null", draft_tokens=3, max_num_seqs=2), instruments=instruments())
    load = Load(2, 5, 30)
    figures, stages = profiled(engine, load)
    assert figures == {}
    assert stages["launch"] > 0
    bare = timed(engine, load)
    assert 0 < bare["host_us_per_step"] < 1e3 * bare["ms_per_round"]
    assert bare["tokens_per_round"] == pytest.approx(4, abs=0.4)


def test_a_device_with_a_timeline_is_timed_by_its_own_clock() -> None:
    """A modelled launch of a second would take minutes by the wall."""
    plugin = Emulator("emulator:0?latency=kernel:1000000")
    engine = Engine(
        EngineConfig(model=NARROW, draft_tokens=1, max_num_seqs=1, graph="off"), backend=plugin, instruments=instruments()
    )
    figures = timed(engine, Load(1, 3, 6))
    launches = sum(len(engine.runner.programs["greedy"][part].calls) for part in ("target", "draft"))
    assert figures["ms_per_round"] == pytest.approx(1e3 * launches, rel=0.2)
    assert "ttft_ms" not in figures
    assert figures["idle_share"] == pytest.approx(0, abs=0.01)
    assert "idle_share" not in profiled(engine, Load(1, 3, 6))[0], "the run that is timed knows it"


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_device_that_tells_of_graphs_and_copies_alone_is_not_called_idle_while_it_prefills(overlap: int) -> None:
    """Prompts go through launch by launch, the draft passes of the last ones behind the snapshot that full steps follow."""
    plugin = Emulator("emulator:0?latency=kernel:1000000")
    config = EngineConfig(
        model=NARROW, draft_tokens=3, max_num_seqs=2, max_batched_tokens=24, block_size=64, overlap=overlap, graph="decode"
    )
    engine, load = Engine(config, backend=plugin, instruments=instruments()), Load(2, 20, 12)
    timed(engine, load)
    device: Any = engine.device
    whole = device.timeline

    def told() -> Any:
        spans = whole().spans
        replays = {span.issued_s for span in spans if span.kind == "replay"}
        return SimpleNamespace(spans=[span for span in spans if span.kind != "kernel" or span.issued_s in replays])

    device.timeline = told
    assert timed(engine, load)["idle_share"] == pytest.approx(0, abs=0.01)


class ModelledTimer:
    """A timer of the emulator: reached when all that was issued before it has run."""

    def __init__(self, device: Any) -> None:
        self._device, self._event = device, device.event()

    def record(self, stream: Any) -> None:
        self._event.record(stream)
        self._behind, self._now_s = len(self._device.timeline().spans), self._device.now_s()

    def synchronize(self) -> None:
        self._event.synchronize()

    def query(self) -> bool:
        return bool(self._event.query())

    def at_s(self) -> float:
        return max([self._now_s, *(span.end_s for span in self._device.timeline().spans[: self._behind])])

    def since(self, earlier: ModelledTimer) -> float:
        return 1e3 * (self.at_s() - earlier.at_s())


@pytest.mark.parametrize(("plan_us", "starves"), [(1000, True), (10, False)])
def test_one_timed_event_a_step_knows_what_the_operations_know(
    plan_us: float, starves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device whose times are exact, with a host that spends its time on plans alone."""
    host = [0.0]
    monkeypatch.setattr("polydraft_emulator.timeline.time", SimpleNamespace(thread_time=lambda: host[0]))
    plugin = Emulator("emulator:0?latency=kernel:2,upload:1,download:1")
    config = EngineConfig(model=NARROW, draft_tokens=3, max_num_seqs=2, block_size=64, overlap=1, graph="decode")
    engine, load = Engine(config, backend=plugin, instruments=instruments()), Load(2, 20, 40)
    device: Any = engine.device
    plan = engine.scheduler.plan

    def planned() -> Any:
        host[0] += 1e-6 * plan_us
        return plan()

    def by_operations(begin: float, end: float) -> float:
        """From the end of the first step replayed in between to the end of the last."""
        spans = device.timeline().spans
        replays = [span.issued_s for span in spans if span.kind == "replay" and begin <= span.issued_s <= end]
        ends = [max(span.end_s for span in spans if span.kind == "kernel" and span.issued_s == issued) for issued in replays]
        inside = sorted((span for span in spans if ends[0] <= span.start_s < ends[-1]), key=lambda span: span.start_s)
        gaps = [max(b.start_s - a.end_s, 0) for a, b in itertools.pairwise(inside)]
        return float(sum(gaps) / (ends[-1] - ends[0]))

    device.timer = lambda: ModelledTimer(device)
    engine.scheduler.plan = planned  # type: ignore[method-assign]
    with engine.instruments[Idle].watching(device.now_s, about=4) as idle_between:
        steps, _ = run(engine, load)
        full = full_steps(steps, load)
        begin, end = full[2].start_s, full[-2].start_s
        share = idle_between(begin, end)
    assert share is not None
    assert share == pytest.approx(by_operations(begin, end), abs=0.01)
    assert (share > 0.5) if starves else (share < 0.01)
    assert not any(vars(engine.points).values()), "nobody listens any more"
    assert idle_between(0.0, 0.0) is None, "nothing was launched then"


# -- the suite ----------------------------------------------------------------------------------------------------------
def test_a_suite_measures_every_combination_in_turn(shape: Path) -> None:
    told: list[str] = []
    config = EngineConfig(backend="reference", accept_schedule=(1.0, 0.0))
    suite = Suite(config, shape, (1, 3), (0, 2), "overlap", prompt_tokens=4, new_tokens=12, repeats=2)
    rows = list(suite.run(told.append))
    combinations = list(itertools.product((1, 3), (0, 2), (0, 1)))
    assert [(row["batch"], row["draft_tokens"], row["overlap"]) for row in rows] == combinations
    for row in rows:
        drafts = row["draft_tokens"]
        assert row["acceptance"] == ("synthetic" if drafts else "measured")
        assert row["accept_schedule"] == ([1.0, 0.0] if drafts else None)
        assert row["tokens_per_round"] == pytest.approx(2 if drafts else 1, abs=0.2)
        assert (row["shape"], row["weights"], row["repeats"], row["clock"]) == ("smallest", "random", 2, "wall")
        assert all(low <= row[name] <= high for name, (low, high) in row["spread"].items())
    first = [text.rpartition(": ")[2] for text in told if "tokens" not in text and text.startswith("batch 1")]
    loading = [f"loading the engine of K = {drafts}" for drafts in (0, 0, 2, 2)]
    assert first == [*loading, *(what for what in ("warm-up", "run 1 of 2", "run 2 of 2") for _ in range(4))]
    validate(report.document(rows))


def test_an_engine_holds_its_whole_load(shape: Path) -> None:
    suite = Suite(EngineConfig(backend="reference"), shape, prompt_tokens=20, new_tokens=13)
    engine = suite.engine(Load(3, 20, 13), 2, {})
    limits = engine.resolved.limits
    assert (limits.max_seqs, limits.max_len, limits.num_blocks) == (3, 33, 9)
    engine.close()


def test_a_proposer_is_measured_beside_plain_decoding(shape: Path) -> None:
    """The default numbers of drafts are 0 and 3, and with 0 there is nobody who drafts."""
    suite = Suite(EngineConfig(backend="reference", proposer="ngram"), shape, prompt_tokens=4, new_tokens=12, repeats=1)
    rows = list(suite.run(lambda text: None))
    assert [(row["draft_tokens"], row["proposer"]) for row in rows] == [(0, "none"), (3, "ngram")]
    alone = replace(suite, draft_tokens=(0,))
    with pytest.raises(CapabilityError, match="--proposer ngram with --draft-tokens 0 drafts nothing"):
        list(alone.run(lambda text: None))


@pytest.mark.parametrize("proposer", ["suffix", "hybrid"])
def test_a_lookup_does_not_find_the_texts_of_the_run_before(shape: Path, proposer: str) -> None:
    """All runs have the same prompts, so each text would be found in the one before."""
    suite = Suite(EngineConfig(backend="reference", proposer=proposer), shape)
    engine = suite.engine(Load(1, 32, 32), 3, {})
    assert engine.resolved.proposer_options["cached_tokens"] == 0
    engine.close()


@pytest.mark.parametrize("asked", [None, 0, 5])
def test_a_load_asks_for_log_probabilities(asked: int | None) -> None:
    added: list[Any] = []
    engine: Any = SimpleNamespace(model=SimpleNamespace(vocab_size=50), add=lambda prompt, params: added.append((prompt, params)))
    Load(3, 7, 5, asked).add(engine)
    assert [(len(prompt), params.logprobs, params.seed) for prompt, params in added] == [(7, asked, i) for i in range(3)]


def test_graphs_can_be_compared() -> None:
    config = EngineConfig(model=NARROW, backend="emulator", device="emulator:0?seed=1")
    rows = list(Suite(config, None, (2,), (1,), "graph", prompt_tokens=3, new_tokens=8, repeats=1).run(lambda text: None))
    assert [row["graph"] for row in rows] == ["off", "decode"]
    assert rows[0]["tokens_per_round"] == rows[1]["tokens_per_round"]
    assert rows[0]["idle_share"] is None, "nobody knows when this device works"


def test_graphs_and_overlap_can_be_compared_together() -> None:
    config = EngineConfig(model=NARROW, backend="emulator", device="emulator:0?seed=1")
    rows = list(Suite(config, None, (2,), (1,), "all", prompt_tokens=3, new_tokens=8, repeats=1).run(lambda text: None))
    assert [(row["graph"], row["overlap"]) for row in rows] == [("off", 0), ("decode", 0), ("off", 1), ("decode", 1)]
    tokens = [row["tokens_per_round"] for row in rows]
    assert (tokens[0], tokens[2]) == (tokens[1], tokens[3]), "a graph changes no token"


# -- the command --------------------------------------------------------------------------------------------------------
def test_bench_for_people(bench: Callable[..., Result]) -> None:
    result = bench("--batch", "1,2", "--draft-tokens", "2", "--accept-schedule", "0.5,0.5")
    assert result.status == 0
    assert "SYNTHETIC acceptance, 0.5, 0.5, in the rows" in result.out
    assert "B=1 K=2 synthetic" in result.out
    assert "B=2 K=2 synthetic" in result.out
    assert all(stage in result.out for stage in ("plan", "launch", "commit"))
    assert max(map(len, result.out.splitlines())) <= 100
    assert result.err.splitlines() == [
        line
        for batch in (1, 2)
        for line in (
            f"batch {batch}: loading the engine of K = 2",
            f"batch {batch}, K = 2, graph off, overlap 0: warm-up",
        )
    ]


def test_a_slow_bench_says_how_far_it_is(bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.cli.bench.SILENCE_S", 0.0)
    said = bench("--draft-tokens", "0", "--new-tokens", "4", "--repeats", "2").err.splitlines()
    name = "batch 1, K = 0, graph off, overlap 0"
    warm_up = [f"{name}: warm-up", *(f"{name}: warm-up, {tokens} of 4 tokens" for tokens in (1, 2, 3, 4))]
    assert said == ["batch 1: loading the engine of K = 0", *warm_up, *(f"{name}: run {turn} of 2" for turn in (1, 2))]


def test_what_the_model_accepts_is_not_called_synthetic(bench: Callable[..., Result]) -> None:
    assert "synthetic" not in bench("--draft-tokens", "1").out.lower()


def test_what_a_double_accepts_is_called_synthetic(bench: Callable[..., Result]) -> None:
    out = bench("--draft-tokens", "1", "--backend", "null").out
    assert "SYNTHETIC acceptance, by a backend that is a double" in out
    assert "B=1 K=1 synthetic" in out


def test_bench_as_json_and_into_a_file(bench: Callable[..., Result], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    result = bench("--draft-tokens", "0,1", "--json", "--out", out)
    assert result.out.count("\n") == 1
    assert json.loads(out.read_text()) == result.json
    assert [row["draft_tokens"] for row in result.json["rows"]] == [0, 1]
    assert {row["shape"] for row in result.json["rows"]} == {"narrow"}


@pytest.mark.parametrize("example", first(1, [line.split()[2:] for line in EXAMPLES.splitlines()[2:]]), ids=" ".join)
def test_every_example_of_the_help_runs(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, example: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    # Texts may be short where no example asks for their length: what an example names is run as it stands.
    result = command("bench", "--new-tokens", 24, *example, "--repeats", 1)
    assert result.status == 0, result.err


def test_an_error_leaves_the_rows_that_were_finished(bench: Callable[..., Result], tmp_path: Path) -> None:
    """Requests end before the last of them begins."""
    out, short = tmp_path / "result.json", ("--draft-tokens", "0", "--prompt-tokens", 40, "--new-tokens", 2)
    for batch, batches in (("60", []), ("1,60", [1])):
        result = bench(*short, "--batch", batch, "--out", out, "--json")
        assert (result.status, "no step had a round of all 60 requests" in result.err) == (2, True)
        if batches:
            assert [row["batch"] for row in result.json["rows"]] == batches
            assert json.loads(out.read_text()) == result.json
        else:
            assert json.loads(result.out)["schema"] == "polydraft.error/1"


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["people", "json"])
def test_ctrl_c_leaves_the_rows_that_were_finished(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    def interrupted(engine: Engine, load: Load, watch: Any) -> dict[str, float]:
        if load.batch == 2:
            raise KeyboardInterrupt
        return timed(engine, load, watch)

    monkeypatch.setattr("polydraft.bench.suite.timed", interrupted)
    result = bench("--batch", "1,2", "--draft-tokens", "1", *more)
    assert (result.status, result.err.splitlines()[-1]) == (
        130, "polydraft: interrupted; the answer holds what was finished by then",
    )  # fmt: skip
    assert [row["batch"] for row in result.json["rows"]] == [1] if more else "B=1 K=1" in result.out
    nothing = bench("--batch", "2", *more)
    assert (nothing.status, nothing.err.splitlines()[-1]) == (130, "polydraft: interrupted before there was a result")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", "0"), "wanted whole numbers from 1 and from 0 on"),
        (("--batch", "1,x"), "'1,x' is no list of whole numbers"),
        (("--draft-tokens", "-1"), "wanted whole numbers from 1 and from 0 on"),
        (("--accept-schedule", "0.5;0.5"), "'0.5;0.5' is no list of numbers"),
        (("--accept-schedule", "0.5,1.5"), "accept_schedule has 1.5, wanted chances from 0 to 1"),
        (("--accept-schedule", "0.5"), "--draft-tokens 3: the synthetic acceptance schedule has 1 chances"),
        (("--shape", "x.json"), "got both --model and --shape"),
        (("--compare", "overlap", "--overlap", "1"), "got both --compare overlap and --overlap"),
        (("--compare", "all", "--graph", "off"), "got both --compare all and --graph"),
        (("--compare", "graph"), "backend reference does not declare graph_capture"),
        (("--out", "no/folder/result.json"), "no/folder/result.json cannot be written"),
        (("--prompt-tokens", "90", "--new-tokens", "50"), "--prompt-tokens 90 --new-tokens 50: model narrow was trained for 96"),
    ],
)
def test_bench_refuses(bench: Callable[..., Result], arguments: tuple[str, ...], said: str) -> None:
    result = bench(*arguments)
    assert (result.status, result.out) == (2, "")
    assert said in result.err
    assert [line for line in result.err.splitlines() if line.startswith("polydraft: ")] == result.err.splitlines()[-1:]


# -- generate --trace and trace -------------------------------------------------------------------------------------------
def test_a_run_is_recorded_and_shown(command: Callable[..., Result], tmp_path: Path) -> None:
    file, page = tmp_path / "run.json", tmp_path / "run.html"
    model = ("--model", NARROW, "--backend", "reference")  # where what the device does is known exactly
    arguments = ("generate", *model, "--max-new-tokens", 12, "--ignore-eos", "w1 w2 w3", "--json")
    bare, recorded = command(*arguments), command(*arguments, "--trace", file)
    assert recorded.status == 0
    assert recorded.json["requests"] == bare.json["requests"]
    shown = command("trace", file, "--html", page)
    assert (shown.status, shown.err) == (0, "")
    assert "device times exact" in shown.out
    assert f"wrote {page}" in shown.out
    assert page.read_text().startswith("<!doctype html>")
    answer = command("trace", file, "--json").json
    assert answer["steps"] == recorded.json["totals"]["steps"]
    assert answer["about"]["model"] == "narrow"
    assert answer["html"] is None


def test_numbers_of_drafts_are_counted_where_steps_differ(command: Callable[..., Result], tmp_path: Path) -> None:
    """A short request with drafts beside a long one that wants none: behind its end steps make none."""
    file, prompts = tmp_path / "run.json", tmp_path / "prompts.jsonl"
    lines = [{"prompt": "w1 w2", "max_new_tokens": 8}, {"prompt": "w3 w4", "max_new_tokens": 30, "max_drafts": 0}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    run = (
        "generate",
        "--model",
        NARROW,
        "--backend",
        "reference",
        "--draft-tokens",
        3,
        "--ignore-eos",
        "--trace",
        file,
        "--json",
    )
    made = command(*run, "--prompts", prompts).json["totals"]["drafts_per_step"]
    assert [bool(count) for count in made] == [True, False, False, True]
    assert command("trace", file, "--json").json["drafts_per_step"] == made
    table = command("trace", file).out.partition("drafts a step")[2].splitlines()[2:4]
    assert [line.split() for line in table] == [["0", str(made[0])], ["3", str(made[3])]]
    command(*run, "w1 w2")
    assert "drafts a step" not in command("trace", file).out


def test_a_run_that_fails_is_recorded_up_to_there(command: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    device = ("--backend", "emulator", "--device", "emulator:0?fault=op@300", "--graph", "off")
    result = command("generate", "--model", NARROW, *device, "--draft-tokens", "3", "--ignore-eos", "w1 w2 w3", "--trace", file)
    assert result.status == 1
    assert command("trace", file, "--json").json["steps"] > 0


@pytest.mark.parametrize("name", ["nowhere.json", "pyproject.toml", "bench"])
def test_trace_refuses_another_file(command: Callable[..., Result], name: str) -> None:
    result = command("trace", ROOT / name)
    assert (result.status, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert str(ROOT / name) in result.err


def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(command: Callable[..., Result], tmp_path: Path) -> None:
    result = command("generate", "--model", "no/such/model", "w1", "--trace", tmp_path / "no" / "run.json")
    assert result.status == 2
    assert "cannot be written" in result.err


def test_one_file_for_two_outputs_is_refused_before_anything_runs(command: Callable[..., Result], tmp_path: Path) -> None:
    file, link = tmp_path / "run.json", tmp_path / "link.json"
    link.symlink_to(file)
    for trace, record in ((file, file), (file, tmp_path / "x" / ".." / "run.json"), (link, file)):
        result = command("generate", "--model", "no/such/model", "w1", "--trace", trace, "--record", record)
        assert (result.status, result.out) == (2, "")
        assert result.err.endswith(
            f"polydraft: --trace and --record both name {record}, wanted a file for each; change one of them\n"
        )
        assert not file.exists()


def test_a_picture_does_not_replace_the_recording(command: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text("the recording")
    for pictures, said in (
        (("--html", file), "FILE and --html"),
        (("--html", tmp_path / "a", "--png", tmp_path / "a"), "--html and --png"),
    ):
        result = command("trace", file, *pictures)
        assert result.status == 2
        assert f"{said} both name {pictures[-1]}, wanted a file for each" in result.err
        assert file.read_text() == "the recording"


# -- committed results ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("file", sorted((ROOT / "bench" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_fit_the_schema(file: Path) -> None:
    validate(json.loads(file.read_text(encoding="utf-8")))


def test_a_result_says_where_it_comes_from() -> None:
    document = report.document([{"shape": "x", "backend": "y", "draft_tokens": 1, "batch": 1}])
    assert all(document[key] for key in ("schema", "date", "device", "versions", "method"))
    assert set(document["versions"]) == {"polydraft", "numpy", "python"}


def test_a_page_has_the_new_table_and_keeps_the_rest(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- figures: a.json -->\n\nMeasured once:\n\n| old |\n|---|\n\nbehind\n\nend\n", encoding="utf-8")
    wanted = "before\n\n<!-- figures: a.json -->\n\nMeasured again:\n\n| new |\n|---|\n\nbehind\n\nend\n"
    for _ in range(2):
        report.renew(page, "a.json", "Measured again:", "| new |\n|---|\n")
        assert page.read_text(encoding="utf-8") == wanted
    assert report.renewed("<!-- figures: a -->\n\n| old |\n", "a", "| new |") == "<!-- figures: a -->\n\n| new |\n"
    with pytest.raises(ConfigError, match="no line <!-- figures: b"):
        report.renew(page, "b.json", "| new |")
