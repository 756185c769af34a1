"""The process of a rank beside rank 0: `python -m polydraft.rank_worker`, which the engine of rank 0 starts.

Its standard input brings the record that says what to build, behind its length, and is then the pipe of `ProcessInbox`, by which
the plans of rank 0 arrive. It ends when there are no more, when rank 0 has gone, or when a launch
finds that some rank has failed.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from contextlib import suppress
from io import FileIO

from polydraft.child_process import read_message
from polydraft.config import EngineConfig
from polydraft.engine import Engine
from polydraft.errors import DeviceError
from polydraft.host.followers import ProcessInbox, Rungs, follow, said
from polydraft.json_text import parsed
from polydraft.models.checkpoint import Checkpoint
from polydraft.ranks import Exchange, Group


def opened(function: str, text: str) -> Checkpoint:
    """The checkpoint that rank 0 has (`Checkpoint.opening`)."""
    module, _, name = function.partition(":")
    checkpoint: Checkpoint = getattr(importlib.import_module(module), name)(text)
    return checkpoint


def main() -> int:
    """Build the engine of this rank and follow. Returns the exit status."""
    pipe = FileIO(0, closefd=False)  # not `sys.stdin`, which is buffered (`read_message`)
    start = parsed(read_message(pipe))
    rank, size = start["rank"], start["size"]
    exchange = Exchange.over(start["memory"], rank, size, start["capacity"], math.inf)
    os.close(start["memory"])
    inbox = ProcessInbox(pipe, exchange, building=True)
    engine: Engine | None = None
    try:
        config = EngineConfig.from_mapping(start["config"])
        checkpoint = opened(*start["checkpoint"]) if start["checkpoint"] else None
        engine = Engine(config, checkpoint=checkpoint, draft_policy=Rungs(start["rungs"]), group=Group(rank, size, exchange))
        inbox.building = False
        follow(engine, engine.resolved.overlap, inbox)
    except BaseException as error:  # noqa: BLE001  said to all ranks, of which rank 0 raises it
        with suppress(DeviceError):
            exchange.fail(said(rank, error))
        return 1
    finally:
        if engine is not None:
            with suppress(DeviceError):
                engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
