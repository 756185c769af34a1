"""What tests of the Paddle backends need: whether Paddle and the emulated Paddle device are installed, and runs of the command.

Tests of `tests/paddle` call it. Paddle is imported in processes of its own alone: it and PyTorch in one process get in each
other's way.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from polydraft_paddle.installation import has_graphs

from tests.support import progress, warm

SITE = importlib.util.find_spec("paddle")
HAS_PADDLE = SITE is not None
HAS_DEVICE = SITE is not None and (Path(str(SITE.origin)).parents[1] / "paddle_custom_device" / "libpaddle-polyemu.so").exists()
needs_paddle = pytest.mark.skipif(not HAS_PADDLE, reason="Paddle is not installed: pip install 'polydraft[paddle]'")
needs_device = pytest.mark.skipif(
    not HAS_DEVICE,
    reason="the emulated Paddle device is not installed: pip install --no-build-isolation plugins/paddle-emu-device",
)
HAS_GRAPHS = HAS_DEVICE and has_graphs("polyemu")
needs_graphs = pytest.mark.skipif(not HAS_GRAPHS, reason="no graphs: Paddle 3.3 or the emulated Paddle device is missing")


def polydraft(
    *arguments: str, timeout: float = 0, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, on one thread, for at most `timeout` seconds (`script`)."""
    code = "import sys; from polydraft.cli import main; sys.exit(main(sys.argv[1:]))"
    return script(code, *arguments, timeout=timeout, environment=environment)


def answer(*arguments: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The JSON object that a successful run prints. It says nothing else, and Paddle neither."""
    run = polydraft(*arguments, "--json", environment=environment)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr[-2000:] + run.stdout[-500:]
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def script(
    code: str, *arguments: str, timeout: float = 0, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, on one thread, with `environment` added to its own, for at most `timeout` seconds;
    0: nine tenths of what this session lets a test take, since `make deep` gives a busy machine time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    timeout = timeout or 0.9 * progress.timeout_s()
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )


def forked_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`polydraft` in a process that has imported Paddle already, with variables of `environment` set behind that."""
    return forked(
        "import json, os, sys; from polydraft.cli import main\n"
        "os.environ |= json.loads(sys.argv.pop(1)); sys.exit(main(sys.argv[1:]))",
        json.dumps(environment),
        *arguments,
    )


def forked(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`script` in a process that has imported Paddle already, which saves most of the time of short ones."""
    return warm.run(code, *arguments, timeout=0.9 * progress.timeout_s())
