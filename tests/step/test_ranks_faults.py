"""Whatever goes wrong with a rank ends the engine on all of them, soon, with one sentence that names the rank and its last
collective; nothing hangs and no text is wrong in silence."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, Engine, RequestOutput, SamplingParams, child_process, reference
from polydraft.backend import Collectives
from polydraft.conformance.rank_faults import computed, own_choice
from polydraft.conformance.target import wrap
from polydraft.errors import CapabilityError, ConfigError, DeviceError
from polydraft.host.followers import SHARED, WORKER, ProcessChannel
from polydraft.instruments.base import Instrument
from polydraft.loading import Loading
from polydraft.plugins.default_backend import default_backend
from polydraft.program.plan_bytes import PlanReader
from polydraft.ranks import Exchange, Group, exchange
from polydraft.reference.queued import QueuedDevice
from polydraft.step.graphs import CapturedSteps
from polydraft.step.runner import Runner
from tests.support import tiny
from tests.support.depth import deep
from tests.support.emulator import emulated
from tests.support.of_ranks import OPTIONS, split

SOON_S = 20
"""Seconds within which everything has ended, on a machine that is busy; patience is much shorter in these tests."""
NATIVE = pytest.mark.skipif(default_backend().name != "cpu", reason="the CPU backend is not built here")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks wait for a second; afterwards none of them is left."""
    monkeypatch.setattr(exchange, "PATIENCE_S", 1.0)
    yield
    begin = time.monotonic()
    while ranks_alive() and time.monotonic() - begin < SOON_S:
        time.sleep(0.01)
    assert ranks_alive() == []


def ranks_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


@contextmanager
def soon() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < SOON_S


def build(**options: Any) -> None:
    """An engine with two ranks, closed at once."""
    with split("narrow", 2, **options):
        pass


def run(running: Engine, count: int = 2, **params: Any) -> list[RequestOutput]:
    """Requests to their ends, whatever these are."""
    wanted = [running.add((3, 1, 4 + i), SamplingParams(max_new_tokens=30, ignore_eos=True, **params)) for i in range(count)]
    done: dict[str, RequestOutput] = {}
    while running.has_work:
        running.step()
        done |= {output.id: output for output in running.poll() if output.finished}
    return [done[one] for one in wanted]


def ended(running: Engine, *words: str, **params: Any) -> None:
    """All requests end with one sentence, and no further one is taken."""
    with soon():
        outputs = run(running, count=4, **params)
    assert {output.finish_reason for output in outputs} == {"error"}
    said = {output.error for output in outputs} | {running.failure}
    assert all(word in sentence for word in words for sentence in said), said
    with pytest.raises(DeviceError, match="every rank ends here"):
        running.add((1,), SamplingParams(max_new_tokens=1))


def on_rank(rank: int, change: Callable[[Any, int], Any], contract: str = "linear") -> Any:
    """The reference, with a kernel whose launches are changed on the thread of one rank: `change(launch, count)`."""

    def table(answer: Any, device: Any) -> Any:
        del device
        if threading.current_thread().name != f"rank {rank}":
            return answer
        provider, counted = answer.providers[contract], [0]

        class Changed:
            workspace_bytes = staticmethod(provider.workspace_bytes)

            @staticmethod
            def bind(args: Any, limits: Any, workspace: Any) -> Any:
                launch = provider.bind(args, limits, workspace)

                def changed(stream: Any, n: int) -> None:
                    counted[0] += 1
                    change(lambda: launch(stream, n), counted[0])

                return changed

        answer.providers = {**answer.providers, contract: Changed()}
        return answer

    return wrap(reference, polydraft_kernels=table)


def test_a_rank_that_fails_names_itself():
    def fail(launch: Callable[[], None], count: int) -> None:
        if count == 40:
            raise MemoryError("no memory for a temporary")
        launch()

    with split("narrow", 2, plugin=on_rank(1, fail), draft_tokens=2) as running:
        ended(running, "rank 1 failed: MemoryError('no memory for a temporary')", "every rank ends here")


def test_a_rank_that_stalls_is_named_with_its_last_collective():
    stalled = threading.Event()

    def stall(launch: Callable[[], None], count: int) -> None:
        if count == 40:
            stalled.wait(SOON_S)
        launch()

    with split("narrow", 4, plugin=on_rank(2, stall), draft_tokens=2) as running:
        ended(running, "rank 2 did not come to collective", "within 1 s; its last was collective", "of step ")
        stalled.set()


def test_a_rank_that_skips_a_draft_pass_is_named(monkeypatch: pytest.MonkeyPatch):
    """vLLM, issue 44185: elsewhere that hangs."""
    launched = Runner._run

    def skip(self: Runner, piece: Any, flight: Any) -> None:
        if piece == "draft" and flight.plan.step_id == 3 and threading.current_thread().name == "rank 1":
            return
        launched(self, piece, flight)

    monkeypatch.setattr(Runner, "_run", skip)
    with split("narrow", 2, draft_tokens=2) as running:
        ended(running, "rank 1 did not come to collective", "of step 3")


@pytest.mark.deep  # `make test` has one that skips them once
def test_a_rank_that_skips_drafts_for_good_is_named(monkeypatch: pytest.MonkeyPatch):
    launched = Runner._run

    def skip(self: Runner, piece: Any, flight: Any) -> None:
        if piece != "draft" or threading.current_thread().name != "rank 1":
            launched(self, piece, flight)

    monkeypatch.setattr(Runner, "_run", skip)
    with split("narrow", 2, draft_tokens=2) as running:
        ended(running, "rank 1 ", "collective")


def test_a_stale_plan_is_named(monkeypatch: pytest.MonkeyPatch):
    """Though its launches look like those of the others: a plan gives slots more blocks, and a rank runs the one before."""
    read, plans = PlanReader.read, list[Any]()

    def stale(self: PlanReader, message: bytes | int) -> Any:
        plans.append(read(self, message))
        *_, before, new = plans[0], *plans
        return before if before is not new and new.writes and new.slots is before.slots else new

    monkeypatch.setattr(PlanReader, "read", stale)
    with split("narrow", 2, draft_tokens=0) as running:
        ended(running, "rank 1 came to collective", "of the plan of step 2", "rank 0 for", "of the plan of step 3")


@pytest.mark.parametrize("broadcasts", [True, False])
def test_the_choice_of_rank_0_counts_where_arithmetic_differs(broadcasts: bool):
    """A rank whose noise is another one's goes on with the tokens of rank 0. One that samples for itself (M156) has another text,
    which only what it brings to sums gives away."""

    def wrong(launch: Callable[[], None], count: int) -> None:
        del launch, count

    plugin = on_rank(1, wrong, "gumbel_noise+sample")
    plugin = plugin if broadcasts else computed("broadcast", own_choice)(plugin)
    with split("narrow", 1, draft_tokens=0) as alone:
        wanted = [output.token_ids for output in run(alone, temperature=1.0, seed=3)]
    with split("narrow", 2, plugin=plugin, draft_tokens=0) as running:
        found = [output.token_ids for output in run(running, temperature=1.0, seed=3)]
    assert (found == wanted) == broadcasts


def test_a_rank_that_cannot_be_built_is_named():
    def refuse(answer: Any, spec: str, options: Any) -> Any:
        del spec, options
        if threading.current_thread().name == "rank 1":
            raise DeviceError("device 1 is in use; free it")
        return answer

    with soon(), pytest.raises(DeviceError, match="rank 1 failed: device 1 is in use; free it; every rank ends here"):
        build(plugin=wrap(reference, polydraft_open_device=refuse))


def test_where_rank_0_cannot_be_built_the_others_end():
    def refuse(answer: Any, spec: str, options: Any) -> Any:
        del spec, options
        if not threading.current_thread().name.startswith("rank "):
            raise DeviceError("device 0 is in use; free it")
        return answer

    with soon(), pytest.raises(DeviceError, match=r"^device 0 is in use; free it$"):
        build(plugin=wrap(reference, polydraft_open_device=refuse))


@pytest.mark.parametrize("interrupted", [1, 2])
@NATIVE
def test_ctrl_c_while_processes_are_started_leaves_none(interrupted: int, monkeypatch: pytest.MonkeyPatch):
    write = ProcessChannel._write

    def stop(self: ProcessChannel, *message: Any) -> None:
        if self._rank == interrupted:
            raise KeyboardInterrupt
        write(self, *message)

    monkeypatch.setattr(ProcessChannel, "_write", stop)
    with soon(), pytest.raises(KeyboardInterrupt) as caught, split("narrow", 4, backend="cpu"):
        pass
    assert ranks_alive() == [], caught


def test_threads_end_where_not_all_of_them_can_be_started(monkeypatch: pytest.MonkeyPatch):
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "rank 2":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with soon(), pytest.raises(RuntimeError, match="can't start new thread"), split("narrow", 4):
        pass


def test_an_error_of_rank_0_ends_all():
    def fail(launch: Callable[[], None], count: int) -> None:
        if count == 40:
            raise DeviceError("the device is gone")
        launch()

    plugin = on_rank(0, fail)
    threading.current_thread().name, name = "rank 0", threading.current_thread().name
    try:
        with split("narrow", 2, plugin=plugin, draft_tokens=2) as running:
            ended(running, "the device is gone")
    finally:
        threading.current_thread().name = name


def test_requests_are_told_what_ends_the_ranks_and_not_to_ask_again(monkeypatch: pytest.MonkeyPatch):
    """A kernel may fail before anybody was seen to end; what it says is true of one device."""
    with split("narrow", 2) as running:

        def fail(_: object) -> None:
            raise DeviceError("kernel all_gather failed, ask again")

        monkeypatch.setattr(running.runner, "launch", fail)
        (output,) = run(running, 1)
        assert (
            output.error == running.failure == "kernel all_gather failed, ask again; every rank ends here, start the engine again"
        )


def test_ranks_end_with_their_engine_closed_or_not():
    for close in (True, False):
        with soon():
            with split("narrow", 2) as running:
                run(running)
                assert ranks_alive() == ["rank 1"]
                if close:
                    running.close()
                    assert ranks_alive() == []
            del running
            while ranks_alive():
                time.sleep(0.01)


@NATIVE
@pytest.mark.parametrize("fatal", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stopped"])
def test_a_process_that_dies_or_stops_is_named(fatal: signal.Signals):
    with split("narrow", 2, backend="cpu", draft_tokens=2) as running:
        assert {output.finish_reason for output in run(running)} == {"length"}
        assert running._followers is not None
        (channel,) = running._followers._channels
        assert isinstance(channel, ProcessChannel)
        process = channel._process.pid
        os.kill(process, fatal)
        if fatal == signal.SIGSTOP:
            time.sleep(0.3)  # who watches the process waits as long as a collective does, and is to be first
        words = {
            signal.SIGKILL: (f"rank 1 (process {process}) ended: SIGKILL, Killed; its last was collective",),
            signal.SIGSTOP: (f"rank 1 (process {process}) was stopped and did not go on within 1 s; its last was collective",),
        }[fatal]
        try:
            ended(running, *words)
        finally:
            if fatal == signal.SIGSTOP:
                with suppress(ProcessLookupError):  # whoever watched it may have ended it
                    os.kill(process, signal.SIGKILL)


@NATIVE
def test_processes_end_when_rank_0_is_gone():
    """Its pipe closes, whatever else becomes of it."""
    with split("narrow", 2, backend="cpu") as running:
        assert running._followers is not None
        (channel,) = running._followers._channels
        assert isinstance(channel, ProcessChannel)
        assert channel._process.stdin is not None
        with soon():
            channel._process.stdin.close()
            assert channel._process.wait(SOON_S) == 0


def test_a_process_that_fails_ends_in_order_while_more_plans_may_come():
    """It is not aborted for the thread that waits for them."""
    with tempfile.TemporaryFile() as memory:
        Exchange.prepare(memory.fileno(), 2, 64)
        start = {"rank": 1, "size": 2, "memory": memory.fileno(), "capacity": 64, "config": {"no_such": 1}, "checkpoint": None}
        message = json.dumps(start).encode()
        command = child_process.running(WORKER)
        pipe = subprocess.PIPE
        with soon(), subprocess.Popen(command, stdin=pipe, stderr=pipe, pass_fds=[memory.fileno()]) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(len(message).to_bytes(8, "little") + message)
            process.stdin.flush()
            assert (process.wait(SOON_S), process.stderr.read()) == (1, b"")
        assert Exchange.over(memory.fileno(), 0, 2, 64).failure.startswith("rank 1 failed: ")


def test_objects_do_not_reach_processes():
    import polydraft_cpu

    with pytest.raises(CapabilityError, match="ranks of backend cpu are processes, got an object as backend or checkpoint"):
        build(plugin=polydraft_cpu, backend="cpu")


def test_instruments_that_would_part_the_ranks_are_refused():
    class Eager(Instrument):
        name = "eager"
        eager = True

    class Reader(Instrument):
        name = "reader"
        reads_weights = True

    where: dict[str, Any] = {"backend": "reference", "device": "queued", "tensor_parallel": 2}
    model = str(tiny.checkpoint("narrow"))
    with pytest.raises(CapabilityError, match="instrument eager with --tensor-parallel 2: it wants launches one by one"):
        LLM(model=model, graph="decode", instruments=(Eager(),), **where)
    with pytest.raises(CapabilityError, match="instrument reader with --tensor-parallel 2: it wants weights as they are stored"):
        LLM(model=model, graph="off", instruments=(Reader(),), **where)


def test_the_hook_is_asked_once_a_rank():
    asked: list[tuple[int, int]] = []

    def note(answer: Collectives, device: Any, group: Any) -> Collectives:
        del device
        asked.append((group.rank, group.size))
        return answer

    build(plugin=wrap(reference, polydraft_collectives=note))
    with split("narrow", 1, plugin=wrap(reference, polydraft_collectives=note)):
        pass
    assert sorted(asked) == [(0, 2), (1, 2)]


# -- the emulator's ranks ------------------------------------------------------------------------------------
def emulated_ranks(query: str, ranks: int = 2, **options: Any) -> Engine:
    return emulated(f"seed=7&{query}", "narrow", tensor_parallel=ranks, draft_tokens=2, **{**OPTIONS, **options})


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_come_late_change_nothing(seed: int):
    with split("narrow", 4, emulator=f"seed={seed}&ranks=late", draft_tokens=2) as running:
        found = [one.token_ids for one in run(running)]
    with split("narrow", 1, draft_tokens=2) as alone:
        assert found == [one.token_ids for one in run(alone)]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        deep(("ranks=stall@2:60", ("rank 2 did not come to collective", "its last was collective"))),
        ("ranks=dead@1:60", ("rank 1 failed", "the device of rank 1 was lost, as ranks=dead@1:60 asks")),
        deep(("ranks=dead@0:60", ("the device of rank 0 was lost",))),
        ("ranks=skip@3:60", ("rank 3 came to collective", "rank 0 for")),
        deep(("ranks=late,skip@0:60", ("rank 1 came to collective", "rank 0 for"))),
    ],
)
def test_what_the_emulator_does_to_ranks_is_named(query: str, words: tuple[str, ...]):
    running = emulated_ranks(query, 4)
    ended(running, *words)
    running.close()


def test_collectives_that_cannot_be_captured_lie_between_graphs():
    running = emulated_ranks("uncapturable=all_reduce,argmax_pair", graph="decode", graph_sizes=(3,))
    with split("narrow", 1, draft_tokens=2) as alone:
        assert [one.token_ids for one in run(running)] == [one.token_ids for one in run(alone)]
    assert running.runner.graphs is not None
    assert running.runner.graphs.counters.replayed_steps > 0
    running.close()


@pytest.mark.parametrize(
    ("query", "words"), [("ranks=dead@1:1", "rank 1 failed: .*was lost"), ("ranks=stall@1:2", "rank 1 did not come to ")]
)
def test_what_happens_in_launches_of_the_warm_up_is_told_in_the_same_words(query: str, words: str):
    with soon(), pytest.raises(DeviceError, match=rf"^{words}.*; every rank ends here, start the engine again$"):
        emulated_ranks(query, graph="decode", graph_sizes=(1, 3))


def test_an_unknown_behaviour_is_refused():
    with pytest.raises(ConfigError, match="emulator option ranks has 'early', wanted late, stall@RANK:N, dead@RANK:N or skip"):
        emulated_ranks("ranks=early")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("ranks=late,stall@2:1", "ranks has stall@2:1, and there are 2 ranks, 0 to 1; name one of them"),
        ("ranks=skip@1:0", "ranks has 'skip@1:0', wanted late"),  # counted from 1
    ],
)
def test_a_behaviour_that_would_never_come_is_refused(query: str, words: str):
    with soon(), pytest.raises(ConfigError, match=words):
        emulated_ranks(query, 2)


# -- memory ------------------------------------------------------------------------------------------------
ROOM = 1 << 20


def held(file: Any) -> int:
    """Bytes of a file that have memory."""
    return 512 * os.fstat(file.fileno()).st_blocks


def test_what_launches_bring_has_memory_once_one_is_bound():
    """Where ranks meet on their devices, none does, and as little is taken as ranks need to find each other."""
    with tempfile.TemporaryFile(dir=SHARED if SHARED.is_dir() else None) as file:
        Exchange.prepare(file.fileno(), 2, ROOM)
        exchanges = [Exchange.over(file.fileno(), rank, 2, ROOM) for rank in range(2)]
        assert held(file) < ROOM
        Group(1, 2, exchanges[1]).swapper("all_reduce", np.zeros(1, np.int32))
        assert held(file) >= Exchange.nbytes(2, ROOM)


class Full:
    """Shared memory of which some bytes are left."""

    def __init__(self, left: int) -> None:
        self.left = left

    def allocate(self, file: int, begin: int, count: int) -> None:
        if count > self.left:
            raise OSError(errno.ENOSPC, "no space left")


@NATIVE
@pytest.mark.parametrize("left", [0, Exchange.nbytes(2, 0)], ids=["to meet in", "for what launches bring"])
def test_full_shared_memory_is_said_before_anything_is_written(left: int, monkeypatch: pytest.MonkeyPatch):
    """And not by a signal in the middle of a step."""
    monkeypatch.setattr(os, "posix_fallocate", Full(left).allocate)
    wanted = (
        r"ranks meet in shared memory, of which they want \d+\.\d MiB, and .* MiB are free \(/dev/shm\); give it more, in a cont"
    )
    with soon(), pytest.raises(DeviceError, match=wanted):
        build(backend="cpu")


def test_a_place_that_cannot_tell_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch):
    def refuse(file: int, begin: int, count: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with tempfile.TemporaryFile() as file:
        Exchange.prepare(file.fileno(), 1, ROOM)
        exchange = Exchange.over(file.fileno(), 0, 1, ROOM)
        exchange.reserve()
        exchange.meet(0)


@NATIVE
@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="what a process maps cannot be seen here")
def test_where_ranks_meet_has_no_name():
    """So nothing is left whoever dies when."""
    with split("narrow", 2, backend="cpu") as running:
        assert running._followers is not None
        (channel,) = running._followers._channels
        assert isinstance(channel, ProcessChannel)
        for process in (os.getpid(), channel._process.pid):
            mapped = [line for line in Path(f"/proc/{process}/maps").read_text().splitlines() if f"{SHARED}/" in line]
            assert mapped
            assert all(line.endswith("(deleted)") for line in mapped)


@NATIVE
@pytest.mark.deep
@pytest.mark.parametrize("closed", ["0<&-", "0<&- 1<&- 2<&-"])
def test_a_process_without_standard_files_has_ranks(closed: str, tmp_path: Path):
    """As some that start services leave it; what ranks meet in then has the number of one of these."""
    script = (
        "import sys\nfrom polydraft import LLM\n"
        "LLM(model=sys.argv[1], backend='cpu', tensor_parallel=2, draft_tokens=2, device='cpu?threads=1').close()\n"
        "open(sys.argv[2], 'w').write('closed')"
    )
    done = tmp_path / "done"
    command = ["/bin/sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", script, str(tiny.checkpoint("narrow")), str(done)]
    with soon():
        subprocess.run(command, timeout=60, check=False)
    assert done.read_text() == "closed"


@NATIVE
@pytest.mark.deep
@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.0])
def test_ranks_that_join_end_when_rank_0_dies(after_s: float):
    """However far it has come."""
    script = (
        "import sys\nfrom polydraft import LLM\n"
        "LLM(model=sys.argv[1], backend='cpu', tensor_parallel=2, draft_tokens=2, device='cpu?threads=1')\n"
        "print('built', flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tiny.checkpoint("narrow"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as first:
        begin = time.monotonic()
        while not (others := children(first.pid)):
            assert time.monotonic() - begin < SOON_S
            time.sleep(0.002)
        time.sleep(after_s)
        first.kill()
        with soon():
            while any(Path(f"/proc/{one}").exists() for one in others):
                time.sleep(0.01)


def children(process: int) -> list[int]:
    """The processes that it has started."""
    found = Path(f"/proc/{process}/task/{process}/children")
    return [int(one) for one in found.read_text().split()] if found.exists() else []


def test_ranks_capture_what_fits_on_all_of_them(monkeypatch: pytest.MonkeyPatch):
    """A rank with less free memory than the others leaves graphs out, and so do they: all replay the same."""
    asked, captured = list[str](), dict[str, CapturedSteps]()

    def free_memory(self: QueuedDevice) -> int:
        asked.append(threading.current_thread().name)
        return 1 << 20 if asked.count("rank 1") > 8 else 1 << 40  # what fits, two shapes of 3 drafts and one of fewer

    capture_all = CapturedSteps.capture_all

    def kept(self: CapturedSteps, programs: Any, loading: Loading) -> None:
        captured[threading.current_thread().name] = self
        capture_all(self, programs, loading)

    monkeypatch.setattr(QueuedDevice, "free_memory", free_memory, raising=False)
    monkeypatch.setattr(CapturedSteps, "capture_all", kept)
    options: dict[str, Any] = {"device": "lazy-1", "graph": "decode", "graph_sizes": (1, 3), "draft_tokens": "auto:3"}
    with split("narrow", 2, **options) as running:
        assert {output.finish_reason for output in run(running)} == {"length"}
        assert running.runner.graphs is not None
        assert running.runner.graphs.counters.replayed_steps > 0
    held = [{rung: (one.buckets, one.left_out) for rung, one in steps.held.items()} for steps in captured.values()]
    assert len(held) == 2
    assert held[0] == held[1]
    assert held[0][3] == ((1, 3), ())
    assert any(left_out for _, left_out in held[0].values())
    assert any(buckets for rung, (buckets, _) in held[0].items() if rung < 3)
