"""Random programs on the emulator, by number: at every depth, with and without graphs, bit-equal to each request alone.

A number makes a whole program and the device it runs on (`tests/support/programs.py`); what fails is its name, and running that
one test again brings it about again. Texts, rounds, reasons, errors and log probabilities are compared, in `programs.unlike`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.support.depth import among
from tests.support.programs import WAYS, Program, program
from tests.support.progress import Progress

SEEDS = range(102)
PREEMPTING = (6, 17, 39, 47, 52, 65, 66, 70, 73, 78)
"""In these some request is preempted, which happens in few."""
SHALLOW = {*SEEDS[:9], *PREEMPTING[::4]}
"""What `make test` takes: one and two programs for each way, and some of those that are rare."""
FAULTY = range(60)
SHORT = (1, 3, 4, 5, 6, 8)
"""Of these, what `make test` takes: one for each way."""
DEEP = range(1000, 4000)
HOW = ("fail", "fail", "oom", "lost")
WHAT = ("op", "op", "copy", "kernel", "linear", "snapshot_output", "verify_match", "rope_kv_write", "download", "pack_rows")
IN_GRAPHS = ("replay", "replay", "upload", "download")
"""What can fail where graphs are captured: kernels run by the hundred before the first step already."""


def is_lossless(of: Program, depth: int, graph: str) -> Counter[str]:
    """What happened in the run, by name."""
    served_by = of.build(depth, graph)
    outputs = of.serve(served_by)
    assert of.differences(outputs) == [], f"seed {of.seed}, overlap {depth}, graphs {graph}, {served_by.device.spec}"
    graphs = served_by.runner.graphs
    happened = Counter(str(output.finish_reason) for output in outputs)
    happened += Counter(
        preempted=served_by.scheduler.num_preemptions,
        shared=served_by.ledger.num_hits,
        accepted=sum(output.accepted for output in outputs),
        replayed=graphs.counters.replayed_steps if graphs else 0,
        too_large=graphs.counters.too_large if graphs else 0,
        logprobs=sum(len(output.logprobs) for output in outputs),
    )
    served_by.close()
    return happened


HAPPENED: Counter[str] = Counter()


@pytest.mark.parametrize("seed", among(SHALLOW, SEEDS))
def test_a_program(seed: int) -> None:
    """Each is served one way; all six ways come up equally often."""
    HAPPENED.update(is_lossless(program(seed), *WAYS[seed % len(WAYS)]), programs=1)


def test_the_programs_do_what_they_are_for() -> None:
    """Behind all of the ones above, in the same process."""
    if HAPPENED["programs"] < len(SHALLOW):
        pytest.skip("not all programs ran in this process")
    for name in ("stop", "length", "abort", "preempted", "shared", "accepted", "replayed", "too_large", "logprobs"):
        assert HAPPENED[name] > 5, name
    assert not HAPPENED["error"]


@pytest.mark.parametrize("seed", among((), range(4)))
def test_a_program_every_way(seed: int) -> None:
    for way in WAYS:
        is_lossless(program(seed + 300), *way)


@pytest.mark.parametrize("seed", among((1,), range(12)))
def test_the_hazard_checker_finds_nothing_in_a_program(seed: int) -> None:
    """On a device that tells it what every kernel has written, by row and by KV block."""
    of = program(seed + 400)
    watched = replace(of, options={**of.options, "sanitize": True})
    served_by = watched.build(*WAYS[seed % len(WAYS)])
    assert watched.differences(watched.serve(served_by)) == []
    assert served_by.hazards == ()
    served_by.close()


@pytest.mark.deep
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_thousands_of_programs(way: int) -> None:
    mine = DEEP[way :: len(WAYS)]
    progress = Progress(f"programs on the emulator, overlap {WAYS[way][0]}, graphs {WAYS[way][1]}", len(mine))
    for seed in mine:
        is_lossless(program(seed), *WAYS[way])
        progress.tick()


# -- faults ----------------------------------------------------------------------------------------------------------------
def ends_well_or_says_why(of: Program, depth: int, graph: str) -> str:
    """A fault in the middle of the program: every request is right or ends with a sentence that names the device, what was said
    before was right, nothing leaks (`drive` audits), and the engine serves on or says why it does not. Returns what it did."""
    number, kinds = of.seed, WHAT if graph == "off" else IN_GRAPHS
    what, how = kinds[number % len(kinds)], HOW[(number // 7) % len(HOW)]
    at = {"op": 400 + 97 * (number % 23), "kernel": 300 + 97 * (number % 23), "linear": 30 + number % 40}.get(
        what, 6 + number % 13
    )
    asks = tuple(replace(ask, arrival=0) for ask in of.asks) if how == "lost" else of.asks  # without a device nothing is taken
    faulty = replace(of, asks=asks)
    served_by = faulty.build(depth, graph, f"fault={what}@{at}:{how}")
    outputs = faulty.serve(served_by)
    context = f"seed {of.seed}, overlap {depth}, graphs {graph}, {served_by.device.spec}"
    assert faulty.differences(outputs) == [], context
    failed = [output for output in outputs if output.finish_reason == "error"]
    assert all(served_by.device.spec in output.error and "\n" not in output.error for output in failed), context
    assert bool(served_by.failure) <= (how == "lost"), context
    served_by.close()
    return "nothing was running" if not failed else "the device was lost" if how == "lost" else "served on"


@pytest.mark.parametrize("seed", among(SHORT, FAULTY))
def test_a_program_with_a_fault(seed: int) -> None:
    ends_well_or_says_why(program(seed + 500), *WAYS[seed % len(WAYS)])


def test_what_a_failed_device_was_sent_is_sent_again() -> None:
    """Wishes for log probabilities went up with the step that failed, and the next request has the same ones."""
    assert ends_well_or_says_why(program(1222), 2, "off") == "served on"


@pytest.mark.deep
def test_thousands_of_programs_with_a_fault() -> None:
    mine = DEEP[::3]
    progress = Progress("programs with a fault", len(mine))
    done: Counter[str] = Counter()
    for seed in mine:
        done[ends_well_or_says_why(program(seed), *WAYS[seed % len(WAYS)])] += 1
        progress.tick()
    assert min(done["served on"], done["the device was lost"]) > len(mine) // 10, done
