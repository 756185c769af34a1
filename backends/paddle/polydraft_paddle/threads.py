"""Sets how many threads Paddle computes with on the CPU place: all of them in a large product, one in everything else.

`import_paddle` counts them, `kernels/host.py` and `kernels/host_attention.py` spread their products. By default Paddle uses one
thread for everything, or OMP_NUM_THREADS threads for everything; an operation of a few microseconds then waits longer for a
second thread than it computes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from polydraft.environment import given

MANY = 1 << 22
"""From so many multiplications on a product is worth a second thread: one does them in about 40 microseconds."""
_COUNT = [1]


def count() -> int:
    """Threads of a large product."""
    return _COUNT[0]


def note_wanted() -> None:
    """Count what large products get: OMP_NUM_THREADS, else a thread for each processor that this process may run on. To be called
    before Paddle is imported, which sets that variable to 1 where the user has not set it; later it changes nothing."""
    if "paddle" not in sys.modules:
        said = given("OMP_NUM_THREADS").partition(",")[0].strip()
        _COUNT[0] = max(1, int(said) if said.isdecimal() else processors())


def processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(work: int, product: Callable[..., Any], *operands: Any) -> Any:
    """`product(*operands)`, which takes `work` multiplications, with all threads where there is enough to do."""
    threads = _COUNT[0]
    if work < MANY or threads == 1:
        return product(*operands)
    change = _change()
    change(threads)
    try:
        return product(*operands)
    finally:
        change(1)


def one() -> None:
    """Let Paddle compute with one thread, as everything but `spread` wants it."""
    _change()(1)


def _change() -> Callable[[int], None]:
    from paddle.base import core  # the functions above are asked before Paddle is imported

    change: Callable[[int], None] = core.set_num_threads
    return change
