"""What a claim requires of a backend before anything runs: kernels to own, to offer, to leave out, and device functions.

`polydraft contracts --profile` prints it. It reads the catalogue of checks and the contract records, and decides nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Final, Literal

from polydraft.conformance.catalogue import must_own
from polydraft.conformance.outcomes import CLAIMED
from polydraft.contracts import REGISTRY
from polydraft.contracts.features import with_base
from polydraft.device import Device, Event, GraphCapture
from polydraft.plugins.bring_up import DEVICE_FUNCTIONS

Need = Literal["own", "offered", "optional"]
"""`own`: one or more (`basic`) or all (above) have to be the backend's code. `offered`: has to be there, also as the reference's.
`optional`: belongs to a feature that is not claimed; where it is missing, an engine refuses what needs it."""
NEEDS: Final[tuple[Need, ...]] = ("own", "offered", "optional")


def need(name: str, profile: str, features: Collection[str] = ()) -> Need:
    """What a claim of `profile` for `features` asks of the contract `name`."""
    claimed = with_base(features)
    if name in must_own(profile, claimed):
        return "own"
    return "offered" if REGISTRY[name].feature in claimed else "optional"


def by_need(profile: str, features: Collection[str] = ()) -> dict[Need, list[str]]:
    """Contracts by what a claim of `profile` for `features` asks of them, by name."""
    found: dict[Need, list[str]] = {kind: [] for kind in NEEDS}
    for name in REGISTRY.names():
        found[need(name, profile, features)].append(name)
    return found


def device_functions(profile: str) -> list[str]:
    """What a device has to bring: in bring-up, which does for `basic`, four functions; above, the methods of the protocols."""
    if profile == "basic":
        return list(DEVICE_FUNCTIONS)
    protocols = (Device, Event, GraphCapture) if "graph_capture" in CLAIMED[profile] else (Device, Event)
    return [
        f"{protocol.__name__}.{name}"
        for protocol in protocols
        for name, value in vars(protocol).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
