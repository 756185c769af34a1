"""What ranks exchange where NCCL carries it: three launches each, of which the middle one is `ncclAllGather`, in graphs, too.

`polydraft_collectives` lists them in the place of those of `collectives.py`. Each has the bits of the one there: NCCL moves bytes
and computes nothing, so whatever protocol it takes for so many of them, no sum depends on that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from polydraft.device import DTYPES, Launch, Stream
from polydraft.ranks.exchange import KINDS
from polydraft_cuda.compiler import ROWS, act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.collectives import own_experts
from polydraft_cuda.kernels.provider import Kernel, source
from polydraft_cuda.nccl import Communicator

THREADS = 256
MOST_BLOCKS = 1024


def kernels(place: Communicator) -> Mapping[str, Kernel]:
    """Every collective of one rank, by contract; `own_experts` exchanges nothing."""
    made = {"all_reduce": _all_reduce, "all_gather": _all_gather, "argmax_pair": _argmax_pair, "broadcast": _broadcast}
    carried = {name: Kernel(partial(bind, place)) for name, bind in made.items()}
    return {**carried, "own_experts": Kernel(partial(own_experts, place))}


def _blocks(row_bytes: int) -> Any:
    """A thread for each 16 bytes of rows of `row_bytes`, as far as there are blocks."""
    return lambda n: min(-(-n * row_bytes // (16 * THREADS)), MOST_BLOCKS)


def _carried(place: Communicator, row_bytes: int, bring: Launch, take: Launch) -> Launch:
    """Of `row_bytes` a row. Nothing to bring is nothing to do."""

    def launch(stream: Stream, n: int) -> None:
        if n > 0:
            place.come(n * row_bytes)
            bring(stream, n)
            place.gather(stream, n * row_bytes)
            take(stream, n)

    return launch


def _bound(place: Communicator, name: str, grid: Any, *arguments: Any, **defines: Any) -> Launch:
    """Where ranks meet comes first, the launch length last."""
    function = place.device.function(source("carried.cu"), name, RANKS=place.size, **defines)
    return function.bind(grid, THREADS, place.region(), *arguments, ROWS, dependent=True)


def _of_rows(place: Communicator, kind: str, x: Any, step: Any, take: str, *arguments: Any, **defines: Any) -> Launch:
    """A collective that brings the rows of x as they are."""
    row_bytes = math.prod(x.shape[1:]) * DTYPES[x.dtype].itemsize
    grid, number = _blocks(row_bytes), place.number()
    bring = _bound(place, "bring", grid, x, step, row_bytes, KINDS.index(kind), number)
    return _carried(place, row_bytes, bring, _bound(place, take, grid, *arguments, number, **defines))


def _all_reduce(place: Communicator, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Sums in one balanced binary tree over the ranks, by every rank for itself: the same bits on all of them."""
    del device, limits, workspace
    return _of_rows(place, "all_reduce", a.x, a.step, "add", a.x, a.step, a.x.shape[1], **act(a.x.dtype))


def _all_gather(place: Communicator, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Copies columns."""
    del device, limits, workspace
    width, columns = (buffer.shape[1] * DTYPES[buffer.dtype].itemsize for buffer in (a.x, a.out))
    whole = not any(number % 16 for number in (width, columns, a.out.pointer))
    each = 16 if whole else DTYPES[a.x.dtype].itemsize
    sizes = width // each, columns // each
    return _of_rows(place, "all_gather", a.x, a.step, "columns", a.out, a.step, *sizes, EACH_BYTES=each)


def _argmax_pair(place: Communicator, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Brings eight bytes a row, the key of its highest logit; ties go to the lowest id, as keys have it."""
    del device, limits, workspace
    width, number = a.logits.shape[1], place.number()
    first = place.rank * width
    valid = min(max(int(a.num_valid) - first, 0), width)
    each = lambda n: min(n, MOST_BLOCKS)  # noqa: E731  a block a row
    bring = _bound(place, "bring_choice", each, a.logits, a.row_slot, a.step, width, valid, first, number)
    return _carried(place, 8, bring, _bound(place, "choose", _blocks(8), a.tokens, a.step, number))


def _broadcast(place: Communicator, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Copies what rank 0 brought; the others bring as much, which are a few bytes."""
    del device, limits, workspace
    return _of_rows(place, "broadcast", a.x, a.step, "first", a.x, a.step)
