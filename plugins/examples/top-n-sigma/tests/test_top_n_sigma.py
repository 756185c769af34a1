"""The parameter `top_n_sigma` from its contract to the texts of engines; nothing here needs more than what polydraft ships."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.depth import deep

import polydraft_top_n_sigma
from polydraft import LLM, RequestOutput, SamplingParams
from polydraft.conformance import KernelMismatch, check_kernel, conform, probe
from polydraft.conformance.adequacy import audit
from polydraft.conformance.oracle.coupled import Sampling, coupled_rounds
from polydraft.conformance.report import Selection
from polydraft.contracts import REGISTRY
from polydraft.device import Array
from polydraft.errors import RequestError
from polydraft_cpu.library import missing
from polydraft_top_n_sigma import CONTRACT, kernels

PACKAGE = Path(__file__).parents[1]
REFERENCE: dict[str, Any] = {"backend": "reference"}
QUEUED: dict[str, Any] = {"backend": "reference", "device": "queued"}
ENGINES: dict[str, dict[str, Any]] = {
    "reference": REFERENCE,
    "watched": {**QUEUED, "graph": "off", "sanitize": True},
    "overlap": {**QUEUED, "graph": "off", "overlap": 2},
    "graphs": {**QUEUED, "graph": "decode", "overlap": 1},
    "graphs in parts": {**QUEUED, "graph": "decode", "overlap": 0},
    "cpu": {"backend": "cpu"},
    "cpu eagerly": {"backend": "cpu", "graph": "off", "overlap": 1},
    "cpu without a queue": {"backend": "cpu", "device": "cpu?queue=0"},
}
"""Options of `LLM` for everything that launches the kernel in another way."""
needs_cpu = pytest.mark.skipif(bool(missing()), reason=f"the cpu backend is not available: {missing()}")
SHALLOW = ("graphs", "cpu")
"""Of these, what `make test` takes."""
each_engine = pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            options,
            id=name,
            marks=[needs_cpu] * (options["backend"] == "cpu") + [pytest.mark.deep] * (name not in SHALLOW),
        )
        for name, options in ENGINES.items()
    ],
)

# Contracts are registered for the whole process. These tests share theirs with those of polydraft, which look at the registry.
REGISTRY.remove(CONTRACT.name)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    REGISTRY.add(CONTRACT)
    yield
    REGISTRY.remove(CONTRACT.name)


def llm(*, plugins: tuple[str, ...] = ("polydraft_top_n_sigma",), **options: Any) -> LLM:
    return LLM(model=str(probe.checkpoint()), plugins=plugins, **{**REFERENCE, "invariant": True, **options})


def params(sigmas: float | None = None, **given: Any) -> SamplingParams:
    extra = {} if sigmas is None else {"top_n_sigma": sigmas}
    return SamplingParams(**{"max_new_tokens": 20, "ignore_eos": True, "seed": 5, "extra": extra, **given})


def rule(logits: Array, sigmas: float) -> tuple[Array, bool]:
    """What Top-nσ leaves of a row, and whether no rounding can decide otherwise: the second opinion of all that follows."""
    distance = logits - (logits.max() - sigmas * logits.std())
    return np.where(distance >= 0, logits, -np.inf), bool(np.abs(distance).min() > 1e-4)


# -- the contract ------------------------------------------------------------------------------------------
def test_cases_are_adequate() -> None:
    report = audit(CONTRACT)
    assert report.ok, report.describe()
    assert len(report.killed) == 11


def test_golden_by_hand() -> None:
    """Mean 3, deviation 2: with 1 deviation the border is 6 - 2 = 4, with 2.5 it is 6 - 5 = 1, and a slot with 0 keeps all."""
    row, cut = [0.0, 4.0, 1.0, 6.0, 3.0, 4.0], -np.inf
    a = SimpleNamespace(logits=np.array([row] * 3), row_slot=np.array([1, 2, 0]), top_n_sigma=np.array([0.0, 1.0, 2.5]))
    CONTRACT.golden(a, 3)
    assert a.logits.tolist() == [[cut, 4.0, cut, 6.0, cut, 4.0], [cut, 4.0, 1.0, 6.0, 3.0, 4.0], row]


def test_the_kernel_is_the_golden() -> None:
    assert len(check_kernel("top_n_sigma", kernels.top_n_sigma)) > 20


WRONG: dict[str, Callable[[Array, float], float]] = {
    "below the mean": lambda x, s: float(x.mean() - s * x.std()),
    "of a sample": lambda x, s: float(x.max() - s * x.std(ddof=1)) if len(x) > 1 else -np.inf,
    "in one pass of float32": lambda x, s: float(x.max() - s * np.sqrt(np.abs(np.mean(x * x) - np.mean(x) ** 2))),
    "variance": lambda x, s: float(x.max() - s * x.var()),
}
"""Borders that somebody might write."""


@pytest.mark.parametrize("name", [*WRONG, "cuts the border", "forbidden tokens count", "forgets who is off"])
def test_wrong_kernels_are_noticed(name: str) -> None:
    def wrong(a: Any, n: int) -> None:
        for row in np.flatnonzero(a.row_slot[:n] >= 0):
            logits, sigmas = a.logits[row], a.top_n_sigma[a.row_slot[row]]
            finite = logits[np.isfinite(logits)]
            if name == "forbidden tokens count" and finite.size:
                finite = np.where(np.isfinite(logits), logits, 0)
            if finite.size and (sigmas > 0 or name == "forgets who is off"):
                least = WRONG.get(name, lambda x, s: float(x.max() - s * x.std(dtype=np.float64)))(finite, sigmas)
                logits[(logits <= least) if name == "cuts the border" else (logits < least)] = -np.inf

    with pytest.raises(KernelMismatch):
        check_kernel("top_n_sigma", wrong)


@pytest.mark.parametrize(
    ("backend", "device"), [("reference", "cpu"), ("reference", "queued"), pytest.param("cpu", "cpu", marks=needs_cpu)]
)
def test_the_kit_passes_it_on_devices(backend: str, device: str) -> None:
    report = conform(backend, device=device, files=("polydraft_top_n_sigma",), selection=Selection(contract="top_n_sigma"))
    assert report.status == 0, report.content
    assert len(report.content["results"]) > 15


@pytest.mark.parametrize(("backend", "device"), [("reference", "queued"), pytest.param("cpu", "cpu", marks=needs_cpu)])
def test_it_is_captured_where_there_are_graphs(backend: str, device: str) -> None:
    check = Selection(check="L3/kernel/top_n_sigma")
    assert conform(backend, device=device, files=("polydraft_top_n_sigma",), selection=check).status == 0


# -- texts against oracles ---------------------------------------------------------------------------------
SIGMAS = 1.25
PROMPTS = probe.prompts(9)
SAMPLED: dict[str, Any] = {"temperature": 1.5, "seed": 11}


@functools.cache
def recomputed(prompt: tuple[int, ...], drafts: int, temperature: float) -> tuple[list[int], list[int], bool]:
    """Text and rounds from float64 equations without a cache, and whether all of it is clear."""
    borders: list[bool] = []

    def process(logits: Array, known: Sequence[int]) -> Array:
        kept, clear = rule(logits, SIGMAS)
        borders.append(clear)
        return kept

    sampling = Sampling(temperature, seed=SAMPLED["seed"])
    text = coupled_rounds(probe.oracle(), prompt, sampling, drafts, 20, (), process)
    return text.token_ids, text.rounds, text.clear and all(borders)


@pytest.mark.parametrize(("drafts", "temperature"), [deep((0, 1.5)), deep((0, 0.0)), deep((3, 0.0)), (3, 1.5)])
@each_engine
def test_texts_and_rounds_are_those_of_the_recomputing_oracle(options: dict[str, Any], drafts: int, temperature: float) -> None:
    served = llm(draft_tokens=drafts, max_num_seqs=4, **options)
    outputs = served.generate(PROMPTS, params(SIGMAS, **{**SAMPLED, "temperature": temperature}))
    compared = 0
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        token_ids, rounds, clear = recomputed(prompt, drafts, temperature)
        if clear:
            assert (list(out.token_ids), list(out.rounds)) == (token_ids, rounds)
        compared += clear
    assert compared > len(PROMPTS) // 2
    assert sum(out.accepted for out in outputs) > (20 if drafts else -1)
    served.close()


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_tokens_are_drawn_from_what_the_rule_leaves_of_reported_probabilities(verify: str) -> None:
    """Log probabilities are logits but for a constant, which the rule does not see; coupled tokens can be told exactly."""
    served = llm(draft_tokens=3, logprobs=probe.VOCAB, verify=verify)
    outputs = served.generate(PROMPTS, params(0.75, logprobs=probe.VOCAB, **SAMPLED))
    told, unruly = 0, 0
    for out in outputs:
        for place, record in enumerate(out.tokens, len(out.prompt_ids)):
            row = np.array([logprob for _, logprob in sorted(record.top)])
            kept, sure = rule(row, 0.75)
            choice, clear = Sampling(SAMPLED["temperature"], seed=SAMPLED["seed"]).choose(kept, place)
            if sure:
                assert kept[record.token_id] > -np.inf
            if sure and clear and verify == "coupled":
                assert record.token_id == choice
            told += sure and clear
            unruly += Sampling(SAMPLED["temperature"], seed=SAMPLED["seed"]).choose(row, place)[0] != choice
    assert told > 150
    assert unruly > 10, "without the rule these texts would be others"


@pytest.mark.deep
def test_rejection_draws_from_the_rules_distribution() -> None:
    """Texts of three tokens, a window of two drafts among them: how often each came against the product of exact shares."""
    model, prompt, size = probe.oracle(), PROMPTS[3], 1500
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for text, mass in expected.items():
            kept, clear = rule(model.target_logits(model.target_states([*prompt, *text])[-1:])[0], SIGMAS)
            assert clear
            shares = np.exp((kept - kept.max()) / SAMPLED["temperature"])
            longer |= {(*text, int(v)): mass * shares[v] / shares.sum() for v in np.flatnonzero(shares)}
        expected = longer
    served = llm(draft_tokens=2, verify="rejection", max_num_seqs=64)
    asked = [params(SIGMAS, temperature=SAMPLED["temperature"], seed=seed, max_new_tokens=3) for seed in range(size)]
    seen = Counter(out.token_ids for out in served.generate([prompt] * size, asked))
    assert set(seen) <= set(expected), "a token that the rule forbids"
    common = [text for text, mass in expected.items() if size * mass >= 5]
    rest = size - sum(seen[text] for text in common), size * (1 - sum(expected[text] for text in common))
    pairs = [*((seen[text], size * expected[text]) for text in common), *([rest] if rest[1] >= 5 else [])]
    freedom, statistic = len(pairs) - 1, sum((got - mean) ** 2 / mean for got, mean in pairs)
    assert freedom > 20
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    plain = served.generate([prompt] * 200, [params(**SAMPLED | {"seed": s}, max_new_tokens=3) for s in range(200)])
    assert {out.token_ids for out in plain} - set(expected), "without the parameter other texts come"


# -- requests beside each other ----------------------------------------------------------------------------
def mixed() -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Greedy and sampled requests whose prompts begin alike; every third wants it, every third nothing at all."""
    begin = PROMPTS[9 - 1][:16]
    wishes: tuple[Callable[[int], SamplingParams], ...] = (
        lambda i: params(0.75, temperature=i % 2 * 1.5, seed=i),
        lambda i: params(temperature=i % 2 * 1.5, seed=i),
        lambda i: params(1.5, temperature=1.2, top_p=0.9, seed=i, presence_penalty=0.5, logit_bias={7: 2.0}, bad_words=["w9"]),
    )
    return [((*begin, 20 + i), wishes[i % 3](i)) for i in range(12)]


def texts(served: LLM, asked: Sequence[tuple[tuple[int, ...], SamplingParams]]) -> list[tuple[int, ...]]:
    outputs: list[RequestOutput] = served.generate([prompt for prompt, _ in asked], [given for _, given in asked])
    return [out.token_ids for out in outputs]


@each_engine
def test_neighbours_drafts_preemption_and_shared_blocks_change_no_text(options: dict[str, Any]) -> None:
    asked = mixed()
    alone = llm(**options, draft_tokens=0, max_num_seqs=1, prefix_cache=False)
    without = llm(**options, draft_tokens=0, max_num_seqs=1, prefix_cache=False, plugins=())
    wanted = [texts(alone if given.extra else without, [(prompt, given)])[0] for prompt, given in asked]
    for drafts in (0, 3):
        served = llm(**options, draft_tokens=drafts, max_num_seqs=5, block_size=4, num_blocks=40)
        assert texts(served, asked) == wanted
        assert served.engine.scheduler.num_preemptions > 0
        assert served.engine.ledger.num_hits > 0
        served.close()


def test_off_is_as_if_it_were_not_there() -> None:
    served, without = llm(draft_tokens=3), llm(draft_tokens=3, plugins=())
    asked = [(PROMPTS[0], params(0, **SAMPLED)), (PROMPTS[1], params(**SAMPLED))]
    assert texts(served, asked) == texts(without, [(prompt, params(**SAMPLED)) for prompt, _ in asked])


# -- what it costs -----------------------------------------------------------------------------------------
def launches(served: LLM, given: SamplingParams) -> int:
    before = served.engine.device.counters.launches
    served.generate([PROMPTS[3]], given)
    return served.engine.device.counters.launches - before


def test_steps_in_which_nobody_wants_it_launch_nothing_of_it() -> None:
    served, without = llm(draft_tokens=3), llm(draft_tokens=3, plugins=())
    for name, kind in served.engine.runner.programs.items():
        count = 1 if ".processed" in name else 0
        assert {part: program.describe().count("top_n_sigma") for part, program in kind.items()} == {
            "target": count, "draft": 3 * count,
        }  # fmt: skip
    assert launches(served, params(**SAMPLED)) == launches(without, params(**SAMPLED)), "nobody wants it"
    assert launches(served, params(SIGMAS, **SAMPLED)) > launches(served, params(**SAMPLED)), "a request does"
    assert launches(served, params(**SAMPLED)) == launches(without, params(**SAMPLED)), "it has ended"


# -- what is refused ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [-1, 1e-4, 1001, float("nan"), float("inf"), "1.5", True, None, [1.0]])
def test_values_that_are_none_are_refused(value: Any) -> None:
    served = llm(draft_tokens=0)
    with pytest.raises(RequestError) as refused:
        served.generate([PROMPTS[0]], SamplingParams(extra={"top_n_sigma": value}))
    assert str(refused.value) == f"top_n_sigma is {value!r}, wanted 0 (off) or a number from 0.001 to 1000; correct the request"
    assert len(texts(served, [(PROMPTS[0], params(1000))])[0]) == 20, "others are served"


def test_without_the_package_the_parameter_is_refused() -> None:
    with pytest.raises(RequestError, match=r"has the parameter 'top_n_sigma', which no stage knows; no plugin of this engine"):
        texts(llm(draft_tokens=0, plugins=()), [(PROMPTS[0], params(1.0))])


def test_on_devices_with_other_memory_only_requests_that_want_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polydraft_top_n_sigma, "table", lambda device: kernels.table(SimpleNamespace(spec="gpu:0")))
    served = llm(draft_tokens=2)
    with pytest.raises(RequestError, match=r"^the request wants top n sigma, but this backend has no top_n_sigma; leave it out"):
        texts(served, [(PROMPTS[0], params(1.0))])
    asked = [(PROMPTS[0], params(**SAMPLED))]
    assert texts(served, asked) == texts(llm(draft_tokens=2, plugins=()), asked)


@needs_cpu
def test_on_the_default_backend_steps_are_overlapped_and_replayed_whole() -> None:
    served = llm(backend="cpu", draft_tokens=3)
    assert served.engine.resolved.overlap == 1
    texts(served, [(PROMPTS[0], params(SIGMAS, **SAMPLED))])
    graphs = served.engine.runner.graphs
    assert graphs is not None
    assert graphs.whole
    assert (graphs.counters.eager_steps, graphs.counters.replayed_steps > 5) == (1, True), "that of the prompt"


# -- the distribution --------------------------------------------------------------------------------------
@pytest.mark.parametrize("named", [("--kernels", "top-n-sigma"), ("--plugin", "polydraft_top_n_sigma")], ids=lambda n: n[0])
def test_it_is_a_distribution_of_its_own(installed: Path, named: tuple[str, str], tmp_path: Path) -> None:
    """Found by the name of its entry point, and by that of its module."""
    asked = {"prompt": "def f(x):", "max_new_tokens": 24, "temperature": 2.0, "seed": 1}
    lines = [json.dumps(asked | extra) for extra in ({}, {"extra": {"top_n_sigma": 0.5}}, {"temperature": 0})]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    path = os.pathsep.join([str(installed), *(entry for entry in sys.path if entry and Path(entry) != PACKAGE)])
    backend = "reference" if missing() else "cpu"
    asked_for = ["generate", "--prompts", "prompts.jsonl", "--backend", backend, "--json", *named]
    command = [sys.executable, "-m", "polydraft", *asked_for]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    texts = [request["text"] for request in json.loads(done.stdout)["requests"]]
    assert len(set(texts)) == 3


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the wheel of this one, unpacked as an installer does."""
    pytest.importorskip("setuptools", minversion="77", reason="the wheel of this package is built by setuptools 77 or newer")
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("tests", "__pycache__", "*.egg-info"))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True, timeout=100)
    (wheel,) = folder.glob("polydraft_top_n_sigma-0.1.0-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"
