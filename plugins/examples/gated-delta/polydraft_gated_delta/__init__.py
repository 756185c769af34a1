"""A model family for polydraft whose layers keep a recurrent state: gated delta networks (arXiv 2412.06464), made small.

`--plugin polydraft_gated_delta` adds the family, and `--plugin polydraft_gated_delta.numpy_kernels` the kernel in NumPy.
"""

from __future__ import annotations

from polydraft import hookimpl
from polydraft.models import Family
from polydraft_gated_delta.family import GATED_DELTA


@hookimpl
def polydraft_models() -> list[Family]:
    """One architecture."""
    return [GATED_DELTA]
