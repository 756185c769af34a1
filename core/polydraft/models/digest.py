"""A digest of the weights that an engine computes with, so that a text can be traced to the policy that wrote it, and a checksum
of weights that are read twice, so that what was checked is what is written.

The digest is of canonical tensors as they are read, before anything is packed at load: the same numbers in a directory, in
memory, or in another float dtype that holds them exactly have the same digest. Tensors that the engine does not use do not count.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from polydraft.contracts.packing import Matrix, PackedWeight
from polydraft.errors import CheckpointError

LANES: Final = 4099
"""Of a checksum; a prime, so that rows and matrices that change places fall into others."""


class Digested(Mapping[str, Matrix]):
    """Canonical tensors, each of which is digested (SHA-256) when it is read for the first time."""

    def __init__(self, canonical: Mapping[str, Matrix]) -> None:
        self._canonical = canonical
        self._of: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> Matrix:
        value = self._canonical[name]
        if name not in self._of:
            self._of[name] = _digest(value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._canonical)

    def __len__(self) -> int:
        return len(self._canonical)

    def digest(self) -> str:
        """Of all that were read, in whatever order: 64 hexadecimal digits."""
        whole = hashlib.sha256()
        for name, part in sorted(self._of.items()):
            whole.update(f"{name}\0".encode() + part)
        return whole.hexdigest()


class Unchanged(Mapping[str, Matrix]):
    """Canonical tensors that have to be the same each time they are read, by a checksum: whoever gives them may change them
    meanwhile. Looking one up raises `CheckpointError` where it has changed."""

    def __init__(self, canonical: Mapping[str, Matrix]) -> None:
        self._canonical = canonical
        self._of: dict[str, int] = {}

    def __getitem__(self, name: str) -> Matrix:
        value, found = self._canonical[name], 0
        for part in _bytes(value):
            found = _checksum(part, found)
        if self._of.setdefault(name, found) != found:
            raise CheckpointError(
                f"weights that were given have changed since they were checked, first seen of {name}, wanted the same until the "
                "update has ended; give them again"
            )
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._canonical)

    def __len__(self) -> int:
        return len(self._canonical)


def _checksum(part: bytes | memoryview, begin: int) -> int:
    """CRC-32 of words of 8 bytes, of which every `LANES`-th is folded into one (XOR) before, which is as fast as memory; of what
    is left over as it is."""
    data = np.frombuffer(part, np.uint8)
    folded = len(data) // (8 * LANES) * 8 * LANES
    if folded:
        lanes = data[:folded].view(np.uint64).reshape(-1, LANES)
        begin = zlib.crc32(np.bitwise_xor.reduce(lanes, axis=0).data, begin)
    return zlib.crc32(data[folded:].data, begin)


def _digest(value: Matrix) -> bytes:
    found = hashlib.sha256(value.packing.name.encode() if isinstance(value, PackedWeight) else b"")
    for part in _bytes(value):
        found.update(part)
    return found.digest()


def _bytes(value: Matrix) -> Iterator[bytes | memoryview]:
    """What a tensor consists of: of each array its dtype and shape, and its bytes."""
    for array in value.arrays if isinstance(value, PackedWeight) else (value,):
        yield f"{array.dtype.str}{array.shape}".encode()
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
