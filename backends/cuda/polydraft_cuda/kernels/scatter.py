"""Staged runs of words into slot columns, whose addresses lie in a table on the device.

It comes first in a step that has such writes, and is never captured.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polydraft.device import Launch
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.provider import Kernel, source

THREADS = 128


def scatter(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a run."""
    del limits, workspace
    rows = np.array([(column.pointer, column.shape[1] if len(column.shape) > 1 else 1) for column in a.columns], np.int64)
    table = device.empty("scatter.columns", rows.view(np.int32).shape, "i32")
    device.load(table, rows.view(np.int32))
    kernel = device.function(source("scatter.cu"), "scatter")
    return kernel.bind(lambda n: n, THREADS, a.runs, a.payload, table, dependent=True)


KERNELS = {"scatter": Kernel(scatter)}
