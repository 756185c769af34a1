"""All checks of the kit in the order of their running, and what a profile needs of them: checks to pass, kernels to own.

Checks of kernels follow from the contracts that there are, so the lists are worked out where they are used and stand nowhere
else; a report carries their digest. Nothing here runs a check.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Final

from polydraft.conformance import (
    binding_checks,
    cache_checks,
    device_checks,
    graph_checks,
    host_checks,
    kernel_checks,
    load_checks,
    lossless_checks,
    overlap_checks,
    sanity_checks,
)
from polydraft.conformance.check import Check
from polydraft.conformance.kernel_checks import Options
from polydraft.conformance.outcomes import PROFILES
from polydraft.contracts import REGISTRY

CLAIMED: Final = {
    "graph": ("graph_capture",),
    "async": ("graph_capture", "asynchronous"),
    "full": ("graph_capture", "asynchronous"),
}
"""Capabilities without which a profile cannot be claimed."""
MAY_BE_UNSUPPORTED: Final = (
    "other-dtypes", "invariant-mode", "row-alone", "two-streams", "event-of-another-stream", "rebinding", "distribution",
)  # fmt: skip
"""Checks that hang on what a backend declares or has; whoever has it has to pass them, nobody has to have it."""


def every_check(options: Options | None = None) -> Iterator[Check]:
    """Every check of every level, L0 first."""
    yield from load_checks.checks()
    yield from device_checks.checks()
    yield from kernel_checks.checks(options or Options())
    yield from binding_checks.checks(options or Options())
    yield from graph_checks.checks()
    yield from overlap_checks.checks()
    yield from lossless_checks.checks()
    yield from cache_checks.checks()
    yield from host_checks.checks()
    yield from sanity_checks.checks()


def of_profile(profile: str, options: Options | None = None) -> list[Check]:
    """The checks that a run for `profile` consists of."""
    levels = PROFILES[profile]  # type: ignore[index]
    return [check for check in every_check(options) if check.level in levels and profile in check.profiles]


@cache
def must_pass(profile: str) -> tuple[str, ...]:
    """Ids of checks without which the profile cannot be claimed: everything that does not hang on an undeclared capability."""
    claimed = CLAIMED.get(profile, ())
    return tuple(
        check.id
        for check in of_profile(profile)
        if not check.optional
        and (not check.needs or check.needs in claimed)
        and check.id.rpartition("/")[2] not in MAY_BE_UNSUPPORTED
        and not check.id.endswith("/expansion")
    )


@cache
def must_own(profile: str) -> tuple[str, ...]:
    """Kernels of which a claim needs one (`basic`) or all (above) to be the backend's own."""
    needs = ("compute",) if profile == "basic" else ("compute", "step")
    return tuple(contract.name for contract in REGISTRY if contract.need in needs)


def lists_digest() -> str:
    """Digest of what every profile needs: names the tests that a report stands for."""
    sha = hashlib.sha256()
    for profile in PROFILES:
        for kind, names in (("mustpass", must_pass(profile)), ("mustown", must_own(profile))):
            sha.update("\n".join((kind, profile, *names)).encode())
    return sha.hexdigest()[:16]
