"""Lists the places that Paddle can open on this machine: asks Paddle in a separate process, which runs this module.

`polydraft_visible_devices` calls `visible`. The files of runtimes do not tell: how many devices one sees, and what it calls them,
is known once it is loaded.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Final

from polydraft.child_process import Written, ending, running
from polydraft.errors import DeviceError
from polydraft_paddle.installation import import_paddle, installed, places, unusable
from polydraft_paddle.runtimes import libraries

LIMIT_S: Final = 60.0


@functools.cache
def visible() -> tuple[str, ...]:
    """The places, in the order in which Paddle lists them; the CPU alone, without asking, where nothing else can be there. Raises
    `DeviceError` where Paddle does not load."""
    if unusable() or (not libraries() and set(installed()) == {"paddlepaddle"}):
        return ("cpu",)
    command = running("polydraft_paddle.visible")
    try:
        done = subprocess.run(  # noqa: S603  this interpreter, this module
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"Paddle did not say within {LIMIT_S:g} s which devices it sees; look at their runtimes") from None
    if done.returncode:
        said = done.stdout.strip().splitlines()
        why = said[-1] if said else f"Paddle does not load with its runtimes ({ending(done.returncode)})"
        raise DeviceError(why) from Written(done.stderr)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    try:
        import_paddle()
        answer, status = json.dumps(places()), 0
    except DeviceError as error:
        answer, status = str(error), 1
    sys.stdout.write(f"{answer}\n")
    sys.exit(status)
