"""A checkpoint whose tensors are arrays in memory: what a trainer gives to `update_weights`.

Names, shapes and dtypes are those of the files that the model would be stored in, and so are all checks; the configuration is
that of the checkpoint that it replaces. Arrays are read one at a time and not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from polydraft.device import Array
from polydraft.errors import CheckpointError
from polydraft.models.checkpoint import Checkpoint
from polydraft.models.safetensors_file import SafetensorsFile

WeightSource = str | Path | Mapping[str, Any]
"""Where weights come from: a checkpoint directory, or arrays by the names that its tensors have there."""
FLOATS: Final = ("float32", "float16", "bfloat16")
STORED: Final = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64", "int8": "I8", "uint8": "F8_E4M3",
}  # fmt: skip
"""What safetensors call a dtype; bytes are E4M3, of which NumPy has none."""


class MemoryCheckpoint(Checkpoint):
    """Arrays by the names that files have, as `Checkpoint` reads them. An array is NumPy's, or has `__array__` or `__dlpack__`
    and lies on the host; PyTorch's bfloat16, which NumPy lacks, is converted by its own `float`."""

    def __init__(self, arrays: Mapping[str, Any], like: Checkpoint) -> None:
        """`like`: the checkpoint that has their configuration. Raises `CheckpointError` for what is no array on the host."""
        self.path, self.config = like.path, like.config
        self._files: dict[str, SafetensorsFile] = {}
        self._arrays = dict(arrays)
        self._dtypes = {name: self._dtype_of(name) for name in self._arrays}

    def names(self) -> tuple[str, ...]:
        """Of all arrays, sorted."""
        return tuple(sorted(self._arrays))

    def file(self, name: str) -> Path:
        """What an error calls the place of a tensor."""
        del name
        return Path("weights in memory")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an array. Raises `CheckpointError` where there is none of this name."""
        return tuple(self._named(name).shape)

    def dtype(self, name: str) -> str:
        """One of `FLOATS`. Raises `CheckpointError` for another dtype."""
        self._named(name)
        found = self._dtypes[name]
        if found not in FLOATS:
            raise CheckpointError(f"{self.file(name)}: tensor {name} is {found}, wanted {', '.join(FLOATS)}; convert it")
        return found

    def stored(self, name: str) -> Array:
        """A copy as it is."""
        return np.array(self._on_host(name))

    def stored_as(self, name: str) -> str:
        """What safetensors would call its dtype."""
        return STORED.get(self._dtypes[name], self._dtypes[name])

    def integers(self, name: str) -> NDArray[np.int64]:
        """As int64. Raises `CheckpointError` for floats."""
        if self._dtypes[name] in FLOATS:
            raise CheckpointError(f"{self.file(name)}: tensor {name} is {self._dtypes[name]}, wanted whole numbers; convert it")
        return self._on_host(name).astype(np.int64)

    def read_into(self, name: str, out: NDArray[np.float32]) -> None:
        """Copy an array into `out`, exactly."""
        self.dtype(name)
        out[...] = self._on_host(name).reshape(out.shape)

    def piece(self, name: str, look: Callable[[Array], Array]) -> NDArray[np.float32]:
        """What `look` picks of an array, as a copy."""
        self.dtype(name)
        return np.array(look(self._on_host(name)), np.float32)

    def same_bytes(self, name: str, other: str) -> bool:
        """Whether two arrays are equal."""
        return self.dtype(name) == self.dtype(other) and np.array_equal(self._on_host(name), self._on_host(other))

    def _named(self, name: str) -> Any:
        if name not in self._arrays:
            raise CheckpointError(f"{self.file(name)} lack tensor {name}, got {len(self._arrays)} others; give all of them")
        return self._arrays[name]

    def _dtype_of(self, name: str) -> str:
        dtype = getattr(self._arrays[name], "dtype", None)
        if dtype is None or not hasattr(self._arrays[name], "shape"):
            raise CheckpointError(
                f"{self.file(name)}: tensor {name} is {type(self._arrays[name]).__name__}, wanted an array with shape and dtype; "
                "give NumPy's or PyTorch's"
            )
        return str(dtype).rpartition(".")[2]

    def _on_host(self, name: str) -> Array:
        """An array of NumPy's: float32 where it is bfloat16, which stands for the same numbers."""
        value = self._named(name)
        if hasattr(value, "detach"):
            value = value.detach()
        try:
            if self._dtypes[name] == "bfloat16":
                return np.asarray(value.float() if hasattr(value, "float") else value.astype(np.float32))
            return np.asarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)
        except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as error:
            raise CheckpointError(
                f"{self.file(name)}: tensor {name} cannot be read as an array on the host ({error}); copy it there"
            ) from error
