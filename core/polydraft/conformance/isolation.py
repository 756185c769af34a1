"""Runs the checks of the command line in a separate process, so that a backend that crashes or hangs does not take the report
with it; and every faulty backend of `--prove`.

The child writes a line when a check begins and one when it has ended; the parent watches the file. A check during which the child
dies or writes nothing for too long fails, and a new child continues after it. What the child prints is passed on, and kept for
the check that it was lost in. Judging is done elsewhere.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from polydraft.child_process import Written, ending, executing, last_place, last_words, running
from polydraft.conformance.outcomes import Result, as_result
from polydraft.conformance.report import Selection, with_causes
from polydraft.conformance.target import Target
from polydraft.errors import DeviceError, PluginError
from polydraft.json_text import parsed

if TYPE_CHECKING:
    from polydraft.conformance.check import Check
    from polydraft.conformance.proof import Task

MOST_DEATHS: Final = 3
"""Children that a claim may lose; after that many, what is left is not run, and the report lacks it."""
POLL_S: Final = 0.05
LOADED: Final = 42
"""Exit status of a child that has got past loading the backend, well or with an exception."""
LOAD: Final = """
import contextlib, faulthandler, json, os, sys
faulthandler.enable()
from polydraft.plugins.plugins import Plugins
with contextlib.suppress(Exception):
    Plugins.load(**json.loads(sys.argv[1]))
os._exit(int(sys.argv[2]))
"""
"""What that child runs: no more than loading, and nothing of what libraries do at the end."""
START_S: Final = 60.0
"""Seconds that a child may take, beside the limit of a check, until it says its first word: it imports and opens things."""
ASKED_S: Final = 0.5
"""Seconds that a child which hangs has to say where it is."""
MOST_KEPT: Final = 4000
"""Characters of what a lost child wrote that a result keeps, the last ones."""
WHERE: Final = getattr(signal, "SIGUSR1", None)
"""The signal upon which a child writes where each of its threads is; None where there is none."""


@dataclass
class Watched:
    """What children have reported so far."""

    results: list[Result] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    withdrawn: dict[str, str] = field(default_factory=dict)
    """Capabilities that the device was found to lack when it was opened."""
    kernels: dict[str, Any] = field(default_factory=dict)
    """`Target.kernels`."""
    running: str = ""
    """Id of the check that has begun and not ended."""
    kernel: str = ""
    """Its contract or composite."""
    since: int = 0
    """Bytes that the present child had written to its streams when it began."""
    finished: bool = False

    def take(self, line: Mapping[str, Any], listen: Callable[[Result], None] | None) -> None:
        """File one line of a child. Raises `DeviceError` where it could not open the device that was named, and `PluginError`
        where a pack has no table for it."""
        if "begin" in line:
            self.running, self.kernel, self.since = line["begin"], line["kernel"], line["written"]
        elif "refused" in line:
            raise (PluginError if line["by"] == "pack" else DeviceError)(line["refused"])
        elif "result" in line:
            self.running = self.kernel = ""
            self.results.append(as_result(line["result"]))
            if listen is not None:
                listen(self.results[-1])
        elif "kernels" in line:
            self.kernels = line["kernels"]
        else:
            self.owners, self.withdrawn = line["owners"] or self.owners, line["withdrawn"] or self.withdrawn
            self.finished = line["finished"]

    def lost(self, why: str, seconds: float, streams: Path) -> None:
        """A child was lost in the check that is running (or, before the first, in loading the backend)."""
        written = streams.read_bytes()[self.since :].decode(errors="replace")
        place, words = last_place(written), last_words(written)
        why += f", at {place}" * bool(place) + f"; it wrote {words!r}" * bool(words)
        id_ = self.running or f"L0/process-{len(self.results)}"
        self.results.append(Result(id_, "fail", 1, round(seconds, 3), why, self.kernel, output=written[-MOST_KEPT:]))
        self.running = self.kernel = ""


def run(
    backend: str,
    *,
    device: str,
    files: Sequence[str],
    packs: Sequence[str] = (),
    variants: bool = True,
    selection: Selection,
    limit_s: float,
    listen: Callable[[Result], None] | None = None,
    most_deaths: int = MOST_DEATHS,
) -> Watched:
    """Run the selection in children; returns what they reported. `variants`: whether those of the backend that have passed are in
    use; `limit_s`: seconds that one check may take. Raises `DeviceError` where a device was named that cannot be opened, and
    `PluginError` where a pack has no table for it."""
    target = {
        "backend": backend, "device": device, "files": list(files), "packs": list(packs), "variants": variants,
        "allow_cpu_fallback": selection.allow_cpu_fallback,
    }  # fmt: skip
    return _in_children({"target": target, "selection": asdict(selection)}, limit_s, listen, most_deaths)


def run_tasks(
    backend: str,
    tasks: Sequence[Task],
    *,
    device: str,
    files: Sequence[str],
    seed: int,
    limit_s: float,
    listen: Callable[[Result], None] | None = None,
) -> dict[Task, Result]:
    """Run checks around changes of a backend in children (see `proof.py`), however many of them die of it; one that is lost
    before its first task is the last. Raises as `run` does."""
    target = {"backend": backend, "device": device, "files": list(files)}
    job = {"target": target, "tasks": [list(task) for task in tasks], "seed": seed}
    watched = _in_children(job, limit_s, listen, len(tasks) + 1)
    found = {result.id: result for result in watched.results}
    return {task: found[task.id] for task in tasks if task.id in found}


def _in_children(job: Mapping[str, Any], limit_s: float, listen: Callable[[Result], None] | None, most_deaths: int) -> Watched:
    """Have a job done by one child after the other, each of which goes on behind what the one before was lost in."""
    watched = Watched()
    with tempfile.TemporaryDirectory(prefix="polydraft-conform-") as folder:
        for number in range(most_deaths):
            lines, streams = (Path(folder) / f"{kind}-{number}" for kind in ("lines", "streams"))
            lines.touch()
            left = {"done": [result.id for result in watched.results], "withdrawn": watched.withdrawn}
            command = running("polydraft.conformance.isolation", str(lines), json.dumps({**job, **left}))
            with streams.open("wb") as out:
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)  # noqa: S603
            with child:
                try:
                    _watch(child, lines, streams, watched, limit_s, listen)
                finally:
                    child.kill()
            if watched.finished or ("tasks" in job and watched.results[-1].id.startswith("L0/process-")):
                break
    return watched


def _watch(
    child: subprocess.Popen[bytes],
    lines: Path,
    streams: Path,
    watched: Watched,
    limit_s: float,
    listen: Callable[[Result], None] | None,
) -> None:
    """Follow one child to its end; kill it where it takes too long."""
    since, patience, watched.since, rest = time.monotonic(), limit_s + START_S, 0, ""
    with lines.open(encoding="utf-8") as file, streams.open(encoding="utf-8", errors="replace") as written:
        while True:
            ended = child.poll() is not None  # asked before reading: what it wrote last is then read
            sys.stderr.write(written.read())
            text = rest + file.read()
            *whole, rest = text.split("\n")
            for line in whole:
                watched.take(parsed(line), listen)
                since, patience = time.monotonic(), limit_s
            waited = time.monotonic() - since
            if watched.finished:
                return
            if ended:
                watched.lost(f"the process died in this check ({ending(child.returncode)})", waited, streams)
                return
            if waited > patience:
                _ask_where(child)
                sys.stderr.write(written.read())
                watched.lost(f"the check did not end within {limit_s:g} s; it hangs, or --timeout is too short", waited, streams)
                return
            time.sleep(POLL_S)


def _ask_where(child: subprocess.Popen[bytes]) -> None:
    """Have a child that hangs write where it is, which it does whatever it is doing."""
    if WHERE is not None:
        child.send_signal(WHERE)
        time.sleep(ASKED_S)


def refuse_deadly(backend: str, *, files: Sequence[str], packs: Sequence[str], limit_s: float) -> None:
    """Load a backend in a process of its own, before anybody loads it here: raise `DeviceError` where that dies or hangs. What
    it raises otherwise is left to the caller, who meets it again."""
    job = json.dumps({"backend": backend, "files": list(files), "packs": list(packs)})
    command = executing(LOAD, job, str(LOADED))
    try:
        done = subprocess.run(  # noqa: S603  a constant, by this interpreter
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s + START_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"loading {backend!r} did not end within {limit_s + START_S:g} s; look at its imports and polydraft_backend_info"
        ) from None
    if done.returncode != LOADED:
        place, words = last_place(done.stderr), last_words(done.stderr)
        raise DeviceError(
            f"the process died while {backend!r} was loaded ({ending(done.returncode)}{f', at {place}' if place else ''})"
            f"{f'; it wrote {words!r}' if words else ''}; look at its imports and polydraft_backend_info"
        ) from Written(done.stderr)


def _child(out: TextIO, job: Mapping[str, Any]) -> None:
    """Run what is left of a job and write lines."""

    def tell(line: Mapping[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    gc.freeze()  # what was imported is never garbage: the collections of a long run need not look at it
    target = Target(**job["target"])
    target.withdrawn = job["withdrawn"]
    if not job["done"]:  # a device that a check has lost fails the checks behind it
        try:
            target.refuse_unopenable()
            target.ask_packs()
        except (DeviceError, PluginError) as error:
            tell({"refused": str(error), "by": "pack" if isinstance(error, PluginError) else "device"})
            return
        tell({"kernels": target.kernels})
    for id_, kernel, run_one in _work(job, target):
        if id_ not in job["done"]:
            tell({"begin": id_, "kernel": kernel, "written": _written()})
            tell({"result": asdict(replace(run_one(), id=id_))})
            if target.owners or target.withdrawn:
                tell({"owners": dict(target.owners), "withdrawn": dict(target.withdrawn), "finished": False})
    tell({"owners": dict(target.owners), "withdrawn": dict(target.withdrawn), "finished": True})


def _work(job: Mapping[str, Any], target: Target) -> Iterator[tuple[str, str, Callable[[], Result]]]:
    """The checks of a job: id, kernel, and what runs it."""
    if "selection" in job:
        for check in Selection(**job["selection"]).checks():
            yield check.id, check.kernel, partial(_checked, check, target)
        return
    from polydraft.conformance.proof import Task, run_task

    for task in (Task(*one) for one in job["tasks"]):
        yield task.id, "", partial(run_task, task, target, seed=job["seed"])


def _checked(check: Check, target: Target) -> Result:
    return with_causes(check.result(target), target)


def _written() -> int:
    """Bytes that this process has written to its streams, which are one file."""
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fstat(2).st_size


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a file, and what is printed may be the last word
    faulthandler.enable()
    if WHERE is not None:
        faulthandler.register(WHERE)
    tempfile.tempdir = str(Path(sys.argv[1]).parent)  # which goes with the claim, however this process ends
    with Path(sys.argv[1]).open("w", encoding="utf-8") as lines_file:
        _child(lines_file, parsed(sys.argv[2]))
