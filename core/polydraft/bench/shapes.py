"""Models that are only a shape: a file like config.json, and random weights in place of trained ones.

`polydraft bench --shape` opens them. Only the configuration and a tokenizer are written, and no more than one tensor exists at a
time: weights are views of a pool of random numbers until a backend packs them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from polydraft.demo import demo_model_path
from polydraft.device import Array
from polydraft.errors import CheckpointError
from polydraft.models.checkpoint import Checkpoint
from polydraft.models.config_file import read_json_object
from polydraft.models.families import FamilyRegistry
from polydraft.models.safetensors_file import SafetensorsFile

STRIDE = 61
"""By how many numbers of the pool a row of a weight is shifted against the one before: rows differ, and look random to a
matrix product, without being stored."""
STACK_STRIDE = 1021
"""Likewise a matrix of a stack, such as the next expert."""


class RandomCheckpoint(Checkpoint):
    """A checkpoint of the shape that a file describes, with weights that are the same in every run: normal numbers scaled by
    their fan-in, norms around 1. Its tokenizer is the demo model's, whose ids mean nothing here."""

    def __init__(self, shape: str | Path) -> None:
        """Read the shape file. Raises `CheckpointError` for what no family of this version describes."""
        file = Path(shape)
        values = read_json_object(file, missing="name another, such as one of bench/shapes", spoilt="correct the file")
        folder = Path(tempfile.mkdtemp(prefix="polydraft-shape-")) / file.stem
        self._remove = weakref.finalize(self, shutil.rmtree, folder.parent, ignore_errors=True)
        self._file = file.resolve()
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
        shutil.copy(demo_model_path() / "tokenizer.json", folder)
        self._shapes: dict[str, tuple[int, ...]] = {}
        super().__init__(folder)
        try:
            _, table = FamilyRegistry().describe(self)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(folder / "config.json"), str(file))) from error
        self._shapes = {part.name: part.stored_shape for parts in table.parts.values() for part in parts}

    def names(self) -> tuple[str, ...]:
        """Every tensor that the shape has."""
        return tuple(sorted(self._shapes))

    @property
    def most_tensors(self) -> int:
        """Those that it makes are as many as asked for, but no model has more than these."""
        return 1 << 20

    def file(self, name: str) -> Path:
        """The file that would hold the tensor."""
        del name
        return self.path / "model.safetensors"

    def shape(self, name: str) -> tuple[int, ...]:
        """As the configuration has it."""
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """What `torch_dtype` says of all of them; bfloat16 where it says nothing."""
        del name
        return str(self.config.get("torch_dtype", "bfloat16"))

    def read_into(self, name: str, out: NDArray[np.float32]) -> None:
        """Fill `out` with the tensor."""
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        rows, columns = (out.shape[0], out.shape[-1]) if out.ndim > 1 else (1, out.shape[0])
        pool = rng.standard_normal(STRIDE * rows + columns, np.float32)
        if out.ndim == 1:
            out[...] = pool[:columns] * np.float32(0.02) + np.float32("norm" in name)
            return
        pool *= np.float32(columns**-0.5)
        step = pool.strides[0]
        out[...] = as_strided(pool, (rows, columns), (STRIDE * step, step), writeable=False)

    def piece(self, name: str, look: Callable[[Array], Array]) -> NDArray[np.float32]:
        """As of a tensor that is stored."""
        return np.ascontiguousarray(look(self.tensor(name)))

    def whole(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
        """A canonical matrix, or a stack of them, as a read-only view of its pool, whose rows overlap: nothing of its size is
        ever stored here."""
        if len(shape) < 2:
            return None
        steps = [STACK_STRIDE] * (len(shape) - 2) + [STRIDE, 1]
        size = 1 + sum(step * (count - 1) for step, count in zip(steps, shape, strict=True))
        pool = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(size, np.float32)
        pool *= np.float32(shape[-1] ** -0.5)
        return as_strided(pool, shape, tuple(step * pool.itemsize for step in steps), writeable=False)

    @property
    def opening(self) -> tuple[str, str]:
        """By the shape file."""
        return f"{__name__}:{type(self).__name__}", str(self._file)

    def same_bytes(self, name: str, other: str) -> bool:
        """Copies are made of one tensor, so they agree."""
        return name in self._shapes and other in self._shapes

    def close(self) -> None:
        """Remove what was written."""
        super().close()
        self._remove()

    def _open(self) -> dict[str, SafetensorsFile]:
        return {}
