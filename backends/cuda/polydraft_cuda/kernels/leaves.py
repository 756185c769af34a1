"""Sums by leaf: a projection by stretches of its inputs, and the tree that adds the leaves. Those of experts are in `experts.py`.

All leaves of a projection are one launch, in which each has blocks of its own. Its sum is that of a row-invariant `linear` of as
many inputs: in their order, or as the plain kernel takes it. Which of the two depends on the sizes of one leaf alone. Where the
tree follows at once, blocks have several leaves of the same outputs and add them where they are, in the order of the tree.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from polydraft.contracts.base import Limits
from polydraft.device import Launch
from polydraft_cuda.compiler import act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import linear
from polydraft_cuda.kernels.projections import plain
from polydraft_cuda.kernels.provider import Kernel, source

THREADS = 256
ADDED: Final = (1, 2, 4)
"""Leaves that `linear_split` adds."""


class _Summed(NamedTuple):
    """A projection of which the sum of all leaves is stored."""

    x: Any
    weight: Any
    bias: Any
    out: Any


def is_in_order(device: CudaDevice, a: Any) -> bool:
    """Whether a leaf is summed in the order of its inputs."""
    _, outputs, inputs = a.weight.shape
    return bool(device.arch == "sm_90" and a.x.dtype != "f32" and inputs % 64 == 0 and outputs % 8 == 0)


def linear_leaves(device: CudaDevice, a: Any, limits: Limits, workspace: Any) -> Launch:
    """A grid axis of leaves."""
    del limits, workspace
    if is_in_order(device, a):
        return linear.by_rows(linear.split_in_order(device, a, int(a.leaves)))
    return plain(device, a, leaves=int(a.leaves))


def is_summed(device: CudaDevice, a: Any) -> bool:
    """Whether leaves may be added where they are computed: a bias would be the first one's."""
    return is_in_order(device, a) and a.bias is None and a.leaves in ADDED


def summed(device: CudaDevice, args: Any, limits: Limits, workspace: Any) -> Launch:
    """`linear_leaves` and `sum_leaves` as one launch, which stores no leaves."""
    del limits, workspace
    a, total = args.parts
    product = _Summed(a.x, a.weight, a.bias, total.out)
    return linear.by_rows(linear.split_in_order(device, product, int(a.leaves), added=True))


def sum_leaves(device: CudaDevice, a: Any, limits: Limits, workspace: Any) -> Launch:
    """A thread an element."""
    del limits, workspace
    width = int(a.out.shape[1])
    function = device.function(
        source("leaves.cu"), "sum_leaves", LEAVES=int(a.leaves), OUT_F32=int(a.out.dtype == "f32"), **act(device.dtype)
    )
    return function.bind(lambda n: (n, -(-width // THREADS), 1), THREADS, a.x, a.out, width, dependent=True)


KERNELS: dict[str, Kernel] = {"linear_leaves": Kernel(linear_leaves), "sum_leaves": Kernel(sum_leaves)}
