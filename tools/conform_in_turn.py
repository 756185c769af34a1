"""Claims of the backends that need no accelerator, for every change: `basic` of all, and the most of one in turn.

    python tools/conform_in_turn.py [TURN]

TURN is the number of commits unless it is given, and the seed of the surprises: other ones for each change, the same each time
that one is judged. A backend that is not installed is named and passed over.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

ROOT = Path(__file__).parents[1]


class Backend(NamedTuple):
    """A backend on a device, and the most that it claims there."""

    name: str
    device: str
    most: str


BACKENDS: Final = (
    Backend("reference", "queued", "full"),
    Backend("cpu", "cpu", "full"),
    Backend("emulator", "emulator:0", "full"),
    Backend("paddle", "cpu", "basic"),
    Backend("paddle", "polyemu:0", "full"),
    Backend("xpu", "polyemu:0", "full"),
)


CHECK_S: Final = 400
"""Seconds that a check may take: two claims share the processors, and checks over ranks open a device in four processes."""


def turn_of(commits: int) -> Backend:
    """Whose turn it is."""
    return BACKENDS[commits % len(BACKENDS)]


def claims(commits: int) -> list[tuple[Backend, str]]:
    """What is claimed, each with its profile: the backend whose turn it is first."""
    mine = turn_of(commits)
    return [(mine, mine.most), *((one, "basic") for one in BACKENDS if one is not mine)]


def missing(backend: Backend) -> str:
    """What is not installed of what a backend needs; "" where nothing is."""
    if backend.name == "cpu":
        from polydraft_cpu.library import missing as kernels_missing

        return "a C++ compiler, or what it builds," if kernels_missing() else ""
    site = importlib.util.find_spec("paddle") if backend.name in ("paddle", "xpu") else None
    if backend.name in ("paddle", "xpu") and site is None:
        return "Paddle"
    if backend.device.startswith("polyemu"):
        library = Path(str(site and site.origin)).parents[1] / "paddle_custom_device" / "libpaddle-polyemu.so"
        return "" if library.exists() else "the emulated Paddle device"
    return "the emulator" if backend.name == "emulator" and importlib.util.find_spec("polydraft_emulator") is None else ""


def commits() -> int:
    """How many commits this checkout is made of; 0 where git does not say."""
    command = ["git", "rev-list", "--count", "HEAD"]
    counted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(counted.stdout) if counted.returncode == 0 else 0


def claimed(backend: Backend, profile: str, seed: int) -> tuple[int, str]:
    """Run one claim: its exit status, and what to print."""
    where = f"{backend.name} on {backend.device}"
    if lacking := missing(backend):
        return 0, f"{where}: passed over, {lacking} is not installed"
    start = time.perf_counter()
    polydraft = str(Path(sys.executable).with_name("polydraft"))
    command = [polydraft, "conform", backend.name, "--device", backend.device, "--profile", profile]
    command += ["--seed", str(seed), "--timeout", str(CHECK_S)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("polydraft-conformance")] or [done.stderr.strip()]
    text = f"{where}: {said[0]} ({time.perf_counter() - start:.0f} s)"
    return done.returncode, f"{text}\n{done.stdout}" if done.returncode else text


def main() -> int:
    number = int(sys.argv[1]) if sys.argv[1:] else commits()
    mine, status = turn_of(number), 0
    turn = f"turn {number % len(BACKENDS)} of {len(BACKENDS)} ({number} commits)"
    print(f"{turn}: {mine.most} of {mine.name} on {mine.device}", flush=True)
    with ThreadPoolExecutor(max_workers=2) as pool:
        for one, text in pool.map(lambda claim: claimed(claim[0], claim[1], number), claims(number)):
            print(text, flush=True)
            status = 1 if one else status
    return status


if __name__ == "__main__":
    sys.exit(main())
