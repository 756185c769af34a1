"""All checks of the kit in the order of their running, and what a claim needs: checks to pass, kernels to own.

A claim is one of a profile for features: a check counts where all features that it proves something of are claimed. Checks of
kernels follow from the contracts that there are, so the lists are worked out where they are used and stand nowhere else; a report
carries their digest. Nothing here runs a check.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Final

from polydraft.conformance import (
    binding_checks,
    cache_checks,
    collective_checks,
    device_checks,
    graph_checks,
    host_checks,
    kernel_checks,
    leaf_checks,
    load_checks,
    lossless_checks,
    memory_checks,
    overlap_checks,
    return_checks,
    sanity_checks,
    sleep_checks,
    tap_checks,
    wear_checks,
)
from polydraft.conformance.check import Check
from polydraft.conformance.kernel_checks import Options
from polydraft.conformance.outcomes import CLAIMED, PROFILES
from polydraft.contracts import REGISTRY
from polydraft.contracts.features import FEATURES, with_base

MAY_BE_UNSUPPORTED: Final = (
    "other-dtypes", "invariant-mode", "row-alone", "two-streams", "event-of-another-stream", "rebinding", "distribution",
    "large-other-modes", "launches-of-other-devices-return",
)  # fmt: skip
"""Checks that hang on what a backend declares or has; whoever has it has to pass them, nobody has to have it."""


def every_check(options: Options | None = None) -> Iterator[Check]:
    """Every check of every level, L0 first."""
    yield from load_checks.checks()
    yield from device_checks.checks()
    yield from kernel_checks.checks(options or Options())
    yield from binding_checks.checks(options or Options())
    yield from collective_checks.checks()
    yield from leaf_checks.checks()
    yield from graph_checks.checks()
    yield from overlap_checks.checks()
    yield from return_checks.checks()
    yield from lossless_checks.checks()
    yield from cache_checks.checks()
    yield from host_checks.checks()
    yield from tap_checks.checks()
    yield from sleep_checks.checks()
    yield from wear_checks.checks()
    yield from sanity_checks.checks()
    yield from memory_checks.checks()
    yield from sleep_checks.memory()


def of_profile(profile: str, options: Options | None = None, features: Iterable[str] = ()) -> list[Check]:
    """The checks that a run for `profile` consists of; of `features` and what they rest on, or of all where there are none."""
    levels = PROFILES[profile]  # type: ignore[index]
    wanted = set(with_base(features) if features else FEATURES)
    pool = (check for check in every_check(options) if check.basic or profile != "basic")
    return [check for check in pool if check.level in levels and wanted.issuperset(check.features)]


@cache
def must_pass(profile: str, features: tuple[str, ...]) -> tuple[str, ...]:
    """Ids of checks without which the profile cannot be claimed for `features`: everything that does not hang on an undeclared
    capability."""
    return tuple(check.id for check in _mandatory(profile) if set(features).issuperset(check.features))


def _mandatory(profile: str) -> tuple[Check, ...]:
    """The checks of `must_pass` for every feature."""
    return _mandatory_among(profile, kernel_checks.kernels())


@cache
def _mandatory_among(profile: str, kernels: tuple[str, ...]) -> tuple[Check, ...]:
    """Worked out once for the same `kernels`, of which plugins may bring more: a report asks for all profiles."""
    del kernels
    claimed = set(CLAIMED[profile])
    return tuple(
        check
        for check in of_profile(profile)
        if check.features
        and not check.optional
        and claimed.issuperset(check.needs)
        and check.id.rpartition("/")[2] not in MAY_BE_UNSUPPORTED
        and not check.id.endswith("/expansion")
    )


@cache
def features_by_id() -> Mapping[str, tuple[str, ...]]:
    """Id of every check to the features that it proves something of."""
    return {check.id: check.features for check in every_check()}


@cache
def must_own(profile: str, features: tuple[str, ...]) -> tuple[str, ...]:
    """Kernels of which a claim for `features` needs one (`basic`) or all (above) to be the backend's own."""
    return tuple(contract.name for contract in REGISTRY.of(features) if contract.compute or profile != "basic")


def lists_digest() -> str:
    """Digest of what every profile needs for every feature: names the tests that a report stands for."""
    sha, every = hashlib.sha256(), tuple(FEATURES)
    for profile in PROFILES:
        for check in _mandatory(profile):
            sha.update("\n".join(("mustpass", profile, check.id, *check.features, "")).encode())
        for name in must_own(profile, every):
            sha.update(f"mustown\n{profile}\n{name}\n{REGISTRY[name].feature}\n".encode())
    return sha.hexdigest()[:16]
