"""What a command may be started among, and the server as a process: for tests of the installed command, whoever installed it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

TRAPS = ("queue.py", "logging.py", "json.py", "polydraft/__init__.py", "numpy/__init__.py")


def set_traps(folder: Path) -> Path:
    """Files and folders with the names of modules, each of which ends who imports it."""
    for name in TRAPS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"raise SystemExit('{name} of the working directory was imported')\n", encoding="utf-8")
    return folder


@contextlib.contextmanager
def serving(polydraft: str | Path, *options: str, cwd: Path, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of a server that the command `polydraft` runs, once its engine is ready."""
    command = [str(polydraft), "serve", "--port", "0", "--json", "--max-num-seqs", "1", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=cwd, env=env or os.environ, text=True, **pipes) as server:  # type: ignore[call-overload]
        try:
            said = server.stdout.readline()
            assert said, server.stderr.read()
            url = json.loads(said)["url"]
            assert _ready(url), "its engine did not become ready"
            yield url
        finally:
            server.terminate()


def _ready(url: str) -> bool:
    """Wait until the server says that its engine is ready."""
    for _ in range(600):
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/ready", timeout=20) as answer:
            if answer.status == 200:
                return True
        time.sleep(0.05)
    return False
