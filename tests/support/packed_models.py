"""Tiny checkpoints whose matrices two ranks share out in whole groups of 32, of floats or packed as others publish them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.conformance.oracle.checkpoints import tensor_shapes
from tests.support.published_packings import PUBLISHED, packed
from tools import make_checkpoint

WIDE: dict[str, dict[str, Any]] = {
    "mimo": {**make_checkpoint.FAMILIES["mimo"], "hidden_size": 64, "head_dim": 16, "intermediate_size": 128},
    "glm4-moe": {**make_checkpoint.FAMILIES["glm4-moe"], "hidden_size": 64, "head_dim": 16, "intermediate_size": 128,
                 "moe_intermediate_size": 64},
}  # fmt: skip


@functools.cache
def checkpoint(family: str, layout: str = "", seed: int = 0) -> Path:
    """The directory of a family of `WIDE`, as a layout of `PUBLISHED` has it, or of floats (""); written at the first call of a
    process and removed at its end."""
    directory = Path(tempfile.mkdtemp(prefix="polydraft-packed-")) / "model"
    atexit.register(shutil.rmtree, directory.parent, ignore_errors=True)
    config, rng = WIDE[family], np.random.default_rng(seed)
    tensors: Any = make_checkpoint.draw(tensor_shapes(config), config, rng, embedding_first=family != "mimo")
    if layout:
        tensors, config, _ = packed(tensors, config, PUBLISHED[layout])
    return make_checkpoint.write(directory, config, tensors)
