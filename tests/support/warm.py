"""Runs scripts in processes that have imported Paddle already: its import takes longer than most of what tests ask of it.

One process of this session imports it, and forks for each script; `forked` of `tests.support.paddle` calls it. What a script
leaves behind, and how it ends, is its own process's affair. Scripts that look at the import itself, or at variables of the
environment that it reads, need a process from its beginning (`script`).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# The child leaves the loop and goes on as if the script had been its own; the end of the interpreter is the usual one.
SERVER = """
import json, os, sys
from polydraft_paddle.installation import import_paddle
import_paddle()
import polydraft.conformance.harness, polydraft.engine, polydraft_paddle.table
ready, requests = os.dup(1), os.dup(0)
for line in os.fdopen(requests, closefd=False):
    code, folder, arguments = json.loads(line)
    process = os.fork()
    if process == 0:
        for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY)):
            os.dup2(os.open(os.path.join(folder, name), flags), number)
        os.close(ready), os.close(requests)
        break
    os.write(ready, f"{process}\\n".encode())
    os.write(ready, f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\\n".encode())
else:
    sys.exit()
sys.argv = ["-c", *arguments]
own = {"__name__": "__main__", "__builtins__": __builtins__}
exec(compile(code, "<string>", "exec"), own)
"""


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """The process, started at the first call of a session."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
    )
    atexit.register(server.kill)
    return server


def run(code: str, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run the code in a fork, for at most `timeout` seconds, the first import of Paddle among them."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="polydraft-warm-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        for file in (out, err):
            file.touch()
        server.stdin.write(json.dumps([code, folder, arguments]).encode() + b"\n")
        process = int(server.stdout.readline())
        if not (ended := select.select([server.stdout], [], [], timeout)[0]):
            os.kill(process, signal.SIGKILL)
        status = int(server.stdout.readline())
        if not ended:
            raise subprocess.TimeoutExpired(code, timeout, out.read_bytes(), err.read_bytes())
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())
