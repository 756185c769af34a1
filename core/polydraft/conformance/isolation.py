"""Runs the checks of the command line in a separate process, so that a backend that crashes or hangs does not take the report
with it.

The child writes a line when a check begins and one when it has ended; the parent watches the file. A check during which the child
dies or writes nothing for too long fails, and a new child continues after it. Judging is done elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from polydraft.conformance.outcomes import Result, as_result
from polydraft.conformance.report import Selection, with_causes
from polydraft.conformance.target import Target
from polydraft.errors import DeviceError

MOST_DEATHS: Final = 3
"""Children that may be lost; after that many, what is left is not run, and the report lacks it."""
POLL_S: Final = 0.05
LOADED: Final = 42
"""Exit status of a child that has got past loading the backend, well or with an exception."""
LOAD: Final = """
import contextlib, json, os, sys
from polydraft.plugins.plugins import Plugins
with contextlib.suppress(Exception):
    Plugins.load(**json.loads(sys.argv[1]))
os._exit(int(sys.argv[2]))
"""
"""What that child runs: no more than loading, and nothing of what libraries do at the end."""
START_S: Final = 60.0
"""Seconds that a child may take, beside the limit of a check, until it says its first word: it imports and opens things."""


@dataclass
class Watched:
    """What children have reported so far."""

    results: list[Result] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    withdrawn: dict[str, str] = field(default_factory=dict)
    """Capabilities that the device was found to lack when it was opened."""
    running: str = ""
    """Id of the check that has begun and not ended."""
    finished: bool = False

    def take(self, line: Mapping[str, Any], listen: Callable[[Result], None] | None) -> None:
        """File one line of a child. Raises `DeviceError` where it could not open the device that was named."""
        if "begin" in line:
            self.running = line["begin"]
        elif "refused" in line:
            raise DeviceError(line["refused"])
        elif "result" in line:
            self.running = ""
            self.results.append(as_result(line["result"]))
            if listen is not None:
                listen(self.results[-1])
        else:
            self.owners, self.withdrawn = line["owners"] or self.owners, line["withdrawn"] or self.withdrawn
            self.finished = line["finished"]

    def lost(self, why: str, seconds: float) -> None:
        """A child was lost in the check that is running (or, before the first, in loading the backend)."""
        self.results.append(Result(self.running or f"L0/process-{len(self.results)}", "fail", 1, round(seconds, 3), why))
        self.running = ""


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
    use; `limit_s`: seconds that one check may take. Raises `DeviceError` where a device was named that cannot be opened."""
    watched = Watched()
    with tempfile.TemporaryDirectory(prefix="polydraft-conform-") as folder:
        for number in range(most_deaths):
            lines = Path(folder) / f"lines-{number}.jsonl"
            lines.touch()
            done = [result.id for result in watched.results]
            job = {
                "backend": backend, "device": device, "files": list(files), "packs": list(packs), "selection": asdict(selection),
                "done": done, "variants": variants, "withdrawn": watched.withdrawn,
            }  # fmt: skip
            command = [sys.executable, "-m", "polydraft.conformance.isolation", str(lines), json.dumps(job)]
            with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:  # noqa: S603
                try:
                    _watch(child, lines, watched, limit_s, listen)
                finally:
                    child.kill()
            if watched.finished:
                break
    return watched


def _watch(
    child: subprocess.Popen[bytes], lines: Path, watched: Watched, limit_s: float, listen: Callable[[Result], None] | None
) -> None:
    """Follow one child to its end; kill it where it takes too long."""
    since, patience = time.monotonic(), limit_s + START_S
    with lines.open(encoding="utf-8") as file:
        rest = ""
        while True:
            ended = child.poll() is not None  # asked before reading: what it wrote last is then read
            text = rest + file.read()
            *whole, rest = text.split("\n")
            for line in whole:
                watched.take(json.loads(line), listen)
                since, patience = time.monotonic(), limit_s
            waited = time.monotonic() - since
            if watched.finished:
                return
            if ended:
                watched.lost(f"the process died in this check (exit status {child.returncode})", waited)
                return
            if waited > patience:
                watched.lost(f"the check did not end within {limit_s:g} s; it hangs, or --timeout is too short", waited)
                return
            time.sleep(POLL_S)


def refuse_deadly(backend: str, *, files: Sequence[str], packs: Sequence[str], limit_s: float) -> None:
    """Load a backend in a process of its own, before anybody loads it here: raise `DeviceError` where that dies or hangs. What
    it raises otherwise is left to the caller, who meets it again."""
    job = json.dumps({"backend": backend, "files": list(files), "packs": list(packs)})
    command = [sys.executable, "-c", LOAD, job, str(LOADED)]
    try:
        done = subprocess.run(  # noqa: S603  a constant, by this interpreter
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s + START_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"loading {backend!r} did not end within {limit_s + START_S:g} s; look at its imports and polydraft_backend_info"
        ) from None
    if done.returncode != LOADED:
        raise DeviceError(
            f"the process died while {backend!r} was loaded (exit status {done.returncode}); look at its imports and "
            "polydraft_backend_info"
        )


def _child(out: TextIO, job: Mapping[str, Any]) -> None:
    """Run what is left of a job and write lines."""

    def tell(line: Mapping[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    taken = ("backend", "device", "files", "packs", "variants")
    selection = Selection(**job["selection"])
    target = Target(**{name: job[name] for name in taken}, allow_cpu_fallback=selection.allow_cpu_fallback)
    target.withdrawn = job["withdrawn"]
    if not job["done"]:  # a device that a check has lost fails the checks behind it
        try:
            target.refuse_unopenable()
        except DeviceError as error:
            tell({"refused": str(error)})
            return
    for check in selection.checks():
        if check.id not in job["done"]:
            tell({"begin": check.id})
            tell({"result": asdict(with_causes(check.result(target), target))})
            if target.owners or target.withdrawn:
                tell({"owners": dict(target.owners), "withdrawn": dict(target.withdrawn), "finished": False})
    tell({"owners": dict(target.owners), "withdrawn": dict(target.withdrawn), "finished": True})


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w", encoding="utf-8") as lines_file:
        _child(lines_file, json.loads(sys.argv[2]))
