"""What a profile requires of a backend before anything runs: kernels to own, to offer, to leave out, and device functions.

`polydraft contracts --profile` prints it. It reads the catalogue of checks and the contract records, and decides nothing.
"""

from __future__ import annotations

import inspect
from typing import Final, Literal

from polydraft.conformance.catalogue import must_own
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.device import Device, Event, GraphCapture
from polydraft.plugins.bring_up import DEVICE_FUNCTIONS

Need = Literal["own", "offered", "optional"]
"""`own`: one or more (`basic`) or all (above) have to be the backend's code. `offered`: has to be there, also as the reference's.
`optional`: where it is missing, an engine refuses the options that need it."""
NEEDS: Final[tuple[Need, ...]] = ("own", "offered", "optional")


def need(name: str, profile: str) -> Need:
    """What `profile` asks of the contract or composite `name`."""
    if name in must_own(profile):
        return "own"
    return "optional" if name in COMPOSITES or REGISTRY[name].need == "optional" else "offered"


def by_need(profile: str) -> dict[Need, list[str]]:
    """Contracts by what `profile` asks of them, by name."""
    found: dict[Need, list[str]] = {kind: [] for kind in NEEDS}
    for name in REGISTRY.names():
        found[need(name, profile)].append(name)
    return found


def device_functions(profile: str) -> list[str]:
    """What a device has to bring: in bring-up, which does for `basic`, four functions; above, the methods of the protocols."""
    if profile == "basic":
        return list(DEVICE_FUNCTIONS)
    protocols = (Device, Event, GraphCapture)
    return [
        f"{protocol.__name__}.{name}"
        for protocol in protocols
        for name, value in vars(protocol).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
