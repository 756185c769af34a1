"""A digest of the weights that an engine computes with, so that a text can be traced to the policy that wrote it.

It is of canonical tensors as they are read, before anything is packed at load: the same numbers in a directory, in memory, or in
another float dtype that holds them exactly have the same digest. Tensors that the engine does not use do not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from polydraft.contracts.packing import Matrix, PackedWeight
from polydraft.device import Array


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


def _digest(value: Matrix) -> bytes:
    arrays: tuple[Array | None, ...]
    if isinstance(value, PackedWeight):
        name, arrays = value.packing.name, (value.numbers, value.scales, value.zeros)
    else:
        name, arrays = "", (value,)
    found = hashlib.sha256(name.encode())
    for array in arrays:
        if array is not None:
            found.update(f"{array.dtype.str}{array.shape}".encode())
            found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.digest()
