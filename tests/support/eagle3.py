"""Pairs of a target and an EAGLE-3 draft model, each written once a session by `tools/make_eagle3.py`."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from tools.make_eagle3 import write_pair


@functools.cache
def pair(layout: str, noise: float, *, seed: int = 0, family: str = "llama") -> tuple[Path, Path]:
    """A target and its draft model: with noise 0 every draft is right, with 0.02 about every other one, with 0.5 hardly any."""
    return write_pair(Path(tempfile.mkdtemp(dir=_root())), layout, noise, seed=seed, family=family)


@functools.cache
def _root() -> str:
    root = tempfile.mkdtemp(prefix="polydraft-eagle3-")
    atexit.register(shutil.rmtree, root)
    return root
