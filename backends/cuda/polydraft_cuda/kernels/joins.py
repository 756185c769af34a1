"""Owns what was bound last on a device: a projection that a launch behind it may become one with, while a graph is captured.

Projections are noted here when they are bound; who is bound behind one asks for it by what it writes, and who uses that
without joining says so. Nothing here launches, or keeps a device alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

_LAST: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The newest projection of a device. Whoever launches it keeps it alive, and with it the device."""


def note(device: Any, projection: Any) -> None:
    """This projection is the newest."""
    _LAST[device] = weakref.ref(projection)


def projection_of(device: Any, out: Any) -> Any | None:
    """The newest projection of this device, if it writes `out`."""
    last = _LAST.get(device)
    found = last() if last is not None else None
    return found if found is not None and found.a.out is out else None


def used(device: Any, args: Any) -> None:
    """A launch with these arguments was bound that joins nothing: what it uses has to be written."""
    for buffer in _buffers(args):
        found = projection_of(device, buffer)
        if found is not None:
            found.shared = True


def _buffers(args: Any) -> Iterator[Any]:
    for part in getattr(args, "parts", (args,)):
        yield from vars(part).values()
