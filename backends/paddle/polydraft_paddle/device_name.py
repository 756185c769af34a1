"""Takes apart what `--device` says of a place: kind, index, and options for the package that comes with its runtime.

Whatever asks for the kind of a place calls it; Paddle itself is given kind and index alone. It does not know which places
there are.
"""

from __future__ import annotations

from typing import NamedTuple


class DeviceName(NamedTuple):
    """Such as `polyemu:0?ops=xpu3`."""

    kind: str
    number: int
    options: str
    """What stands behind the question mark; "" where nothing does."""
    place: str
    """What stands before it: the place as Paddle calls it."""


def take_apart(spec: str) -> DeviceName:
    """The parts of a device's name; an index that is left out, or is no number, is 0."""
    place, _, options = spec.partition("?")
    kind, _, index = place.partition(":")
    return DeviceName(kind, int(index) if index.isdecimal() else 0, options, place)


def of_rank(spec: str, rank: int) -> str:
    """The device of those that `spec` names that one rank of several opens (`Capabilities.rank_devices`)."""
    place, mark, options = spec.partition("?")
    kind, _, listed = place.partition(":")
    indices = listed.split(",")
    number = indices[rank] if len(indices) > 1 else take_apart(spec).number + rank
    return f"{kind}:{number}{mark}{options}"
