"""Engines on the emulator, for tests of the step.

It finds the plugin, which lies in this checkout and need not be installed, and lists its schedules. The tests of `tests/step`
whose names begin with `test_emulator` use it; comparing results is up to them.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from typing import Any

from polydraft import LLM, Engine
from tests.support import tiny
from tests.support.project import ROOT

if importlib.util.find_spec("polydraft_emulator") is None:
    sys.path.insert(0, str(ROOT / "plugins" / "emulator"))

from polydraft_emulator import Emulator
from polydraft_emulator.device import EmulatorDevice
from polydraft_emulator.kernels import EmulatorTable
from polydraft_emulator.memory import EmulatorStaging
from polydraft_emulator.options import POLICIES, ROWS
from polydraft_emulator.streams import EmulatorEvent

__all__ = [
    "SCHEDULES",
    "Emulator",
    "EmulatorDevice",
    "EmulatorEvent",
    "EmulatorStaging",
    "EmulatorTable",
    "emulated",
]

SCHEDULES = tuple(f"policy={policy}&rows={rows}" for policy, rows in itertools.product(POLICIES, ROWS))
"""Every policy in every row order."""


def emulated(query: str, model: str = "", /, **options: Any) -> Engine:
    """An engine on an emulator with the options of `query` and the tiny checkpoint `model` ("": the demo checkpoint, or the
    directory that `options` name). Nothing is
    captured unless `graph` says so, which keeps engines cheap and operations easy to count."""
    if model:
        options = {"model": str(tiny.checkpoint(model)), "plugins": tiny.PLUGINS, **options}
    return LLM(plugin=Emulator(f"emulator:0?{query}"), **{"invariant": True, "graph": "off", **options}).engine
