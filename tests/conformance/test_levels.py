"""What single checks of the kit can see: writes beside memory, rows of caches, distributions, close choices."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import reference
from polydraft.conformance import lifetime_faults
from polydraft.conformance.cache_checks import sample, weakest
from polydraft.conformance.catalogue import every_check
from polydraft.conformance.chance import ALPHA, POWER, p_value, power, sample_size, tail
from polydraft.conformance.check import Tally
from polydraft.conformance.device_checks import FREE_LARGE
from polydraft.conformance.fault_injection import launched, with_info
from polydraft.conformance.faulty_backends import MUTANTS
from polydraft.conformance.hidden_faults import wears_out
from polydraft.conformance.kernel_checks import Options
from polydraft.conformance.outcomes import Result
from polydraft.conformance.report import Selection, conform
from polydraft.conformance.samplers import WRONG, deviation, filtered, right
from polydraft.conformance.serving import Ask, as_expected
from polydraft.conformance.target import TableProxy, Target, wrap
from polydraft.conformance.wear import DRAWN, MANY
from polydraft.device import DTYPES
from polydraft.errors import DeviceError
from polydraft.output.request_output import RequestOutput
from polydraft.plugins.program_pass import Entry, Node, OwnKernel, Rewritten, UnboundProgram
from polydraft.reference.device import NumpyBuffer
from tests.support import bytes_backend
from tests.support.kernel_doubles import backend_with
from tests.support.wrong_samplers import NAMES, wrong_kernels

CHECKS = {check.id: check for check in every_check()}


def outcome(id_: str, plugin: Any) -> Result:
    return CHECKS[id_].result(Target(plugin))


# -- guard bands ---------------------------------------------------------------------------------------
def in_one_arena(answer: Any, **_: Any) -> Any:
    """A device whose buffers lie next to each other, as those of a real allocator do."""
    arena, taken = np.zeros(1 << 22, np.uint8), [0]

    def empty(name: str, shape: Any, dtype: str) -> NumpyBuffer:
        size = math.prod(shape) * DTYPES[dtype].itemsize
        begin = taken[0]
        taken[0] = begin + -(-size // 16) * 16
        answer.counters.allocations += 1
        return NumpyBuffer(name, arena[begin : begin + size].view(DTYPES[dtype]).reshape(shape), dtype)

    answer.empty, answer.arena = empty, arena
    return answer


@pytest.mark.parametrize("behind", [True, False])
def test_a_write_beside_a_buffer_is_seen(behind: bool):
    """The kernel is right in all that other cases look at."""

    def table(answer: Any, device: Any) -> Any:
        real = answer.providers["residual_add"]

        class Beside:
            def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
                launch, x, arena = real.bind(args, limits, workspace), args.x.host_array, device.arena
                begin = x.__array_interface__["data"][0] - arena.__array_interface__["data"][0]
                at = begin + x.nbytes + 20 if behind else begin - 20

                def run(stream: Any, n: int) -> None:
                    launch(stream, n)
                    arena[at] ^= 0xFF

                return run

            def workspace_bytes(self, args: Any, limits: Any) -> int:
                return 0

        answer.providers = {**answer.providers, "residual_add": Beside()}
        return answer

    neighbours = wrap(reference, polydraft_open_device=in_one_arena)
    assert outcome("L2/residual_add/guard-bands", neighbours).outcome == "pass"
    result = outcome("L2/residual_add/guard-bands", wrap(neighbours, polydraft_kernels=table))
    assert result.outcome == "fail"
    assert f"the guard {'behind' if behind else 'in front of'} residual_add.x" in result.message


def test_a_copy_that_rounds_up_is_seen():
    """L1: an upload of whole pieces of 16 bytes."""

    def careless(answer: Any, **_: Any) -> Any:
        answer = in_one_arena(answer)

        def load(target: Any, value: Any) -> None:
            array = target.host_array
            array[...] = value
            begin = array.__array_interface__["data"][0] - answer.arena.__array_interface__["data"][0]
            answer.arena[begin + array.nbytes : begin + -(-(array.nbytes + 1) // 16) * 16 + 16] = 0xEE

        answer.load = load
        return answer

    assert outcome("L1/guard-bands", wrap(reference, polydraft_open_device=in_one_arena)).outcome == "pass"
    assert "the guard" in outcome("L1/guard-bands", wrap(reference, polydraft_open_device=careless)).message


# -- caches --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mutant", ["M38", "M36"])
def test_rows_that_are_missing_are_seen(mutant: str):
    broken = next(m for m in MUTANTS if m.id == mutant).broken(reference)
    ids = ("L5/kv/with-and-without-drafts", "L5/kv/whole-and-in-chunks")
    assert "fail" in {outcome(id_, broken).outcome for id_ in ids}


# -- distributions -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_wrong_samplers_are_seen(name: str):
    result = outcome("L5/sampled/distribution", backend_with(**wrong_kernels(name)))
    assert (result.outcome, "are distributed as the target's" in result.message) == ("fail", True)


def test_the_sample_finds_the_weakest():
    prompt, texts, size = sample()
    assert sum(texts.values()) == pytest.approx(1)
    assert len(texts) == 27
    assert weakest(prompt) > 0.15
    assert size == sample_size(weakest(prompt), 27)
    rng = np.random.default_rng(1)
    p, q = (filtered(rng.standard_normal(8) * 2, 1.0, 3) for _ in range(2))
    assert deviation(right, p, q, q) == pytest.approx(0, abs=1e-12)
    assert set(WRONG) == set(NAMES)


def test_tails():
    """Closed forms: exp(-x/2) for two degrees; 23.209 is exceeded by ten with chance 1 in 100."""
    assert tail(3.0, 2) == pytest.approx(math.exp(-1.5))
    assert tail(23.209, 10) == pytest.approx(0.01, rel=1e-3)
    assert tail(0.0, 4) == 1.0
    assert tail(10.0, 3) == tail(10.0, 4)


def test_sizes():
    size = sample_size(0.12, 27)
    assert 500 < size < 5000
    assert power(size, 0.12, 26) > POWER > power(0.97 * size, 0.12, 26)
    assert sample_size(0.06, 27) == pytest.approx(4 * size, rel=0.01), "half the distance, four times the sample"


def test_p_values():
    rng = np.random.default_rng(0)
    expected = dict(enumerate(rng.dirichlet(np.ones(12)).tolist()))
    draws = rng.choice(12, 4000, p=list(expected.values()))
    assert p_value(Counter(draws.tolist()), expected) > 1e-3
    shifted = np.roll(list(expected.values()), 1)
    assert p_value(Counter(rng.choice(12, 4000, p=shifted).tolist()), expected) < ALPHA
    assert p_value({99: 1}, expected) == 0.0
    assert p_value({}, expected) == 0.0
    assert p_value({0: 3}, {0: 1.0}) == 1.0
    chances = [p_value(Counter(rng.choice(12, 500, p=list(expected.values())).tolist()), expected) for _ in range(200)]
    assert 0.35 < np.mean(chances) < 0.65


# -- close choices -------------------------------------------------------------------------------------
def output(ask: Ask, tokens: tuple[int, ...], rounds: tuple[int, ...]) -> RequestOutput:
    fields = {field.name: None for field in dataclasses.fields(RequestOutput)}
    given = {"prompt_ids": ask.prompt, "token_ids": tokens, "rounds": rounds, "finish_reason": "length", "error": ""}
    return RequestOutput(**{**fields, **given})  # type: ignore[arg-type]


def test_near_ties_are_tolerated_in_few_bits_and_counted(monkeypatch: pytest.MonkeyPatch):
    from polydraft.conformance import serving

    monkeypatch.setattr(serving, "certain", lambda *of: 4)
    from polydraft.conformance.probe import prompts

    ask = Ask(prompts(1)[0], max_new=8)
    right = tuple(ask.expected(0).token_ids)
    other = (*right[:6], (right[6] + 1) % 64, right[7])
    wrong = (*right[:2], (right[2] + 1) % 64, *right[3:])
    rounds = tuple(ask.expected(0).rounds)
    for tokens, dtype, failures, ties in (
        (right, "bf16", 0, 0), (other, "bf16", 0, 1), (wrong, "bf16", 1, 0), (other, "f32", 1, 0),
    ):  # fmt: skip
        tally = Tally()
        as_expected(tally, [ask], [output(ask, tokens, rounds)], 0, dtype)
        assert (len(tally.failures), tally.near_ties) == (failures, ties), (dtype, tokens)


# -- data from the host --------------------------------------------------------------------------------
def test_who_takes_no_data_in_the_middle_of_a_step_refuses_it_and_is_not_asked_more():
    def without(info: Any) -> Any:
        return dataclasses.replace(info, capabilities=dataclasses.replace(info.capabilities, host_inputs=False))

    plain = wrap(reference, polydraft_backend_info=without)
    assert outcome("L0/undeclared-is-refused", plain).outcome == "pass"
    result = outcome("L5/host-inputs/eager", plain)
    assert (result.outcome, result.message) == ("unsupported", "capability host_inputs is not declared")


class EverySwigluElsewhere:
    """A program pass that gives each swiglu to a kernel of its own, which the table does not list."""

    def __init__(self, provider: Any) -> None:
        self.kernels = {"elsewhere": OwnKernel(("swiglu",), provider)}

    def rewrite(self, program: UnboundProgram) -> list[Entry]:
        return [
            Rewritten((entry,), "elsewhere", "to be counted") if isinstance(entry, Node) and entry.contract == "swiglu" else entry
            for entry in program.entries
        ]


def test_launches_of_kernels_that_only_a_pass_can_choose_are_counted():
    def table(answer: Any, device: Any) -> Any:
        del device
        changed: Any = TableProxy(answer, {})
        changed.program_pass = EverySwigluElsewhere(answer.providers["swiglu"])
        return changed

    result = outcome("L6/launches-constant", wrap(reference, polydraft_kernels=table))
    assert result.outcome == "pass", result.message


# -- weights, memory and bounds that a device declares ---------------------------------------------------
def _counted(device: Any) -> list[int]:
    """One number: the bytes that have been allocated through the device since."""
    empty, taken = device.empty, [0]

    def counted(name: str, shape: Any, dtype: str) -> Any:
        taken[0] += math.prod(shape) * DTYPES[dtype].itemsize
        return empty(name, shape, dtype)

    device.empty = counted
    return taken


@pytest.mark.parametrize("check", ["L0/weights-refill-in-place", "L3/replay/refilled-weight"])
def test_a_refill_that_makes_another_weight_is_told(check: str):
    """Kernels and graphs are bound to the one that was given, and would go on with that."""

    class Another(TableProxy):
        def prepare_weight(self, role: str, value: Any, dtype: str, previous: Any = None) -> Any:
            del previous
            return self._inner.prepare_weight(role, value, dtype)

    plugin = wrap(reference, polydraft_kernels=lambda table, device: Another(table, {}))
    result = CHECKS[check].result(Target(plugin, device="queued"))
    assert result.outcome == "fail"
    assert "returned another weight, wanted the one that was given" in result.message


@pytest.mark.parametrize(("pooled", "outcome_"), [(0, "pass"), (3, "pass"), (99, "fail")])
def test_free_memory_has_to_fall(pooled: int, outcome_: str):
    """Behind a pool that serves the first allocations, too; a number that never falls is none."""

    def device(answer: Any, **_: Any) -> Any:
        taken = _counted(answer)
        answer.free_memory = lambda: (1 << 32) - max(taken[0] - pooled * FREE_LARGE, 0)
        return answer

    result = outcome("L1/counters", wrap(reference, polydraft_open_device=device))
    assert result.outcome == outcome_, result.message


def test_engines_of_the_kit_fit_what_is_declared():
    """Slots, drafts and buckets; what is refused beyond them is a check of its own."""
    small = Target(with_info(_small)(reference))
    asked = {"max_num_seqs": 8, "draft_tokens": 5, "graph": "decode", "graph_sizes": (1, 2, 4, 6), "block_size": 4}
    fitting = {"max_num_seqs": 4, "draft_tokens": 3, "graph": "decode", "graph_sizes": (1, 2, 4), "block_size": 4}
    assert small.within(asked) == fitting
    assert Target(reference).within(asked) == asked
    assert small.within({}) == {"max_num_seqs": 4, "draft_tokens": 3}
    narrow = Target(with_info(partial(_small, max_window=3))(reference))
    for target, check in ((small, "L5/greedy/K5-B3"), (narrow, "L5/sampled/0"), (narrow, "L5/thinking/K3")):
        result = CHECKS[check].result(target)
        assert result.outcome == "pass", result.message
    assert CHECKS["L0/undeclared-is-refused"].result(small).outcome == "pass"


def _small(info: Any, max_window: int = 4) -> Any:
    capabilities = dataclasses.replace(info.capabilities, max_seqs=4, max_window=max_window)
    return dataclasses.replace(info, capabilities=capabilities)


def test_memory_asleep_is_what_the_process_has_where_nobody_counts():
    """In a process of its own: one that has run other tests has memory to spare, in which nothing shows."""
    (result,) = conform("reference", selection=Selection(check="L6/memory-while-asleep"), limit_s=100.0).results
    assert result.outcome == "pass", result.message


def test_memory_asleep_is_not_seen_where_the_process_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("polydraft.conformance.sleep_checks.RESIDENT", tmp_path / "nothing")
    result = outcome("L6/memory-while-asleep", reference)
    assert result.outcome == "unseen", result.message


# -- what nobody can see -------------------------------------------------------------------------------
def _telling(tell: Any) -> Any:
    """The reference on a device that says how much memory is taken: `tell` is given what was really allocated."""

    def device(answer: Any, **_: Any) -> Any:
        taken = _counted(answer)
        answer.memory_taken = lambda: tell(taken[0])
        return answer

    return wrap(reference, polydraft_open_device=device)


@pytest.mark.parametrize(("tell", "outcome_"), [(lambda taken: taken, "pass"), (lambda taken: 0, "unseen")])
@pytest.mark.deep
def test_memory_is_asked_of_whoever_sees_it(tell: Any, outcome_: str, monkeypatch: pytest.MonkeyPatch):
    """A number of the device's counts where an allocation of the kit's shows in it, and no other one is believed."""
    monkeypatch.setattr("polydraft.conformance.memory_checks.heap", lambda: None)
    result = outcome("L6/memory-of-launches/swiglu", _telling(tell))
    assert result.outcome == outcome_, result.message
    assert outcome_ == "pass" or result.message.startswith("memory in use: no memory_taken() of the device")


def test_a_heap_that_shows_no_small_buffer_is_not_believed():
    """Python keeps small bytes in memory of its own: growth of the kit's own lists is none of the device's."""
    result = outcome("L6/memory-of-launches/swiglu", bytes_backend)
    assert (result.outcome, "no heap of the host shows" in result.message) == ("unseen", True)


def test_an_error_names_where_its_cause_was_raised():
    """On a device that runs later a wait raises what a launch did, and where that was is what helps."""

    def failing(launch: Any, device: Any) -> Any:
        del launch, device

        def run(*_: Any) -> None:
            try:
                raise ZeroDivisionError
            except ZeroDivisionError as error:
                raise DeviceError("the queue has failed") from error

        return run

    result = outcome("L2/swiglu/seeds", launched("swiglu", failing)(reference))
    assert result.outcome == "fail"
    assert "DeviceError: the queue has failed (raised in test_levels.py:" in result.message
    assert " because of test_levels.py:" in result.message


@pytest.mark.deep
@pytest.mark.parametrize(("settled_after", "outcome_"), [(700, "pass"), (math.inf, "fail")])
def test_a_pool_that_settles_is_no_leak(settled_after: float, outcome_: str, monkeypatch: pytest.MonkeyPatch):
    """A driver that keeps what launches needed, until it has enough, and one that keeps something with every launch."""
    monkeypatch.setattr("polydraft.conformance.memory_checks.heap", lambda: None)
    opened: list[Any] = []

    def device(answer: Any, **_: Any) -> Any:
        taken = _counted(answer)
        answer.memory_taken = lambda: taken[0] + 64 * int(min(answer.counters.launches, settled_after))
        opened.append(answer)
        return answer

    result = outcome("L6/memory-of-launches/swiglu", wrap(reference, polydraft_open_device=device))
    assert result.outcome == outcome_, result.message
    assert max(one.counters.launches for one in opened) > 5 * 128


def test_a_device_that_cannot_be_kept_busy_is_not_judged(monkeypatch: pytest.MonkeyPatch):
    """No call takes long and no work is ever seen running: what returns cannot be told, and nobody says that it can."""
    monkeypatch.setattr("polydraft.conformance.busy.SIZES", (1,))
    monkeypatch.setattr("polydraft.conformance.busy.SHAPES", ((1, 1),))
    monkeypatch.setattr("polydraft.conformance.busy.PIECE_S", 1.0)
    result = CHECKS["L4/copies-return"].result(Target(reference, device="queued"))
    assert (result.outcome, result.message.partition(":")[0]) == ("unseen", "whether calls return before work has run")


# -- wear ----------------------------------------------------------------------------------------------
def test_how_often_a_binding_is_launched_is_drawn_and_can_be_drawn_again():
    """A kernel that is wrong from some launch on, which a run's seed reaches or does not."""

    def failing(seed: int) -> str:
        checks = {check.id: check for check in every_check(Options(seed))}
        worn = launched("swiglu", wears_out(MANY + DRAWN // 2))(reference)
        return checks["L2/swiglu/many-launches"].result(Target(worn)).message

    found = {seed: failing(seed) for seed in range(6)}
    assert "" in found.values()
    seed, message = next((seed, message) for seed, message in found.items() if message)
    assert f"out of use {MANY + DRAWN // 2} of one binding" in message
    assert message.count(f"(rerun: polydraft conform reference --check L2/swiglu/many-launches --seed {seed})") == 1


@pytest.mark.deep
def test_weights_and_caches_that_outlive_their_device_are_seen():
    """No mutant of the zoo: a framework whose pool has kept memory of an earlier trial hides it."""
    (check,) = (one for one in every_check() if one.id == "L6/memory-of-devices")
    result = check.result(Target(lifetime_faults.outliving(reference)))
    assert (result.outcome, "that were closed, grows by" in result.message) == ("fail", True), result.message
