"""Which replica has a prompt's beginning in its cache: digests of prefixes, what was sent where, and the choice made of both.

The router of the engine's handle uses it (`polydraft.ray.router`); nothing here needs Ray, or knows time or chance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

BLOCK: Final = 16
"""Tokens of a block: those of the engine's cache by default. A prefix is known by its whole blocks."""
MOST_BLOCKS: Final = 1024
"""Blocks of a prompt that are looked at."""
DIGEST: Final = 8
"""Bytes of a digest."""
MOST_KNOWN: Final = 1 << 16
"""Prefixes that are remembered of one replica; those that were not sent for longest go first."""
SHARE: Final = 10
"""A cache with less than one part in so many of a prompt is no reason to go there, as in Ray's own router."""


def prefix_of(prompt_ids: Sequence[int]) -> bytes:
    """Digests of the prompt's first 1, 2, ... whole blocks, one behind the other: equal ones mean an equal beginning."""
    count = min(len(prompt_ids) // BLOCK, MOST_BLOCKS)
    data, digest = np.asarray(prompt_ids[: count * BLOCK], "<i8").tobytes(), blake2b(digest_size=DIGEST)
    found = bytearray()
    for start in range(0, len(data), 8 * BLOCK):
        digest.update(data[start : start + 8 * BLOCK])
        found += digest.copy().digest()
    return bytes(found)


def digests(prefix: bytes) -> list[bytes]:
    """Those of the first 1, 2, ... blocks."""
    return [prefix[start : start + DIGEST] for start in range(0, len(prefix), DIGEST)]


class Sent:
    """The prefixes that each replica was sent, `most` of them at most; an engine that has evicted one computes it again."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._known: dict[str, OrderedDict[bytes, None]] = {}

    def add(self, replica: str, prefix: bytes) -> None:
        """The replica was sent a prompt that begins so."""
        known = self._known.setdefault(replica, OrderedDict())
        for digest in reversed(digests(prefix)):  # so that the longest goes first
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._most:
            known.popitem(last=False)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all other replicas."""
        self._known = {replica: self._known[replica] for replica in replicas if replica in self._known}

    def blocks(self, replica: str, prefix: bytes) -> int:
        """How many blocks of this beginning the replica was sent before."""
        known, found = self._known.get(replica, ()), digests(prefix)
        return next((place for place, digest in enumerate(found) if digest not in known), len(found))


def ranked(prefix: bytes, loads: Mapping[str, int], blocks: Mapping[str, int], slack: int) -> list[list[str]]:
    """Replicas in order of preference: of a rank the one with the least to do is taken, of a rank without room the next is tried.

    `loads`: requests of every replica; `blocks`: of the prompt's beginning, how many it was sent before; `slack`: how many more
    requests than the least busy one a replica may have and still be preferred. A prefix that none of these was sent goes where
    its digest and the replicas' names say, so that several ingresses agree."""
    if not prefix or not loads:
        return [list(loads)]
    least = min(loads.values())
    near = [replica for replica in loads if loads[replica] <= least + slack]
    most = max(blocks.get(replica, 0) for replica in near)
    if most * SHARE * DIGEST >= len(prefix):
        first = [replica for replica in near if blocks.get(replica, 0) == most]
    else:
        first = [max(near, key=lambda replica: blake2b(prefix[:DIGEST] + replica.encode()).digest())]
    return [first, [replica for replica in loads if replica not in first]]
