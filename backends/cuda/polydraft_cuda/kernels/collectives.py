"""What ranks exchange over memory of each other's GPUs: one launch each, which a graph may hold.

`polydraft_collectives` lists them. Where ranks meet, and what happens when one does not come, is in `polydraft_cuda.ranks`. How
many blocks a launch has depends on its length alone, and no sum on how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from polydraft.device import DTYPES, Launch, Stream
from polydraft_cuda.compiler import ROWS, act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.provider import Kernel, source
from polydraft_cuda.ranks import BLOCKS, CHUNK, MeetingPlace

THREADS = 512


def kernels(place: MeetingPlace) -> Mapping[str, Kernel]:
    """Every collective of one rank, by contract."""
    made = {
        "all_reduce": _all_reduce, "all_gather": _all_gather, "argmax_pair": _argmax_pair, "broadcast": _broadcast,
        "own_experts": _own_experts,
    }  # fmt: skip
    return {name: Kernel(partial(bind, place)) for name, bind in made.items()}


def _blocks(row_bytes: int) -> Any:
    """As many as each have `CHUNK` bytes of rows of `row_bytes`."""
    return lambda n: min(-(-n * row_bytes // CHUNK), BLOCKS)


def _bound(place: MeetingPlace, name: str, row_bytes: int, grid: Any, *arguments: Any, **defines: Any) -> Launch:
    """A launch that meets others and brings `row_bytes` a row: its region comes first, its number and the launch length last."""
    function = place.device.function(source("collectives.cu"), name, RANKS=place.size, **defines)
    bound = function.bind(grid, THREADS, place.region(), *arguments, place.number(), ROWS, dependent=True)

    def launch(stream: Stream, n: int) -> None:
        place.come(n * row_bytes)
        bound(stream, n)

    return launch


def _all_reduce(place: MeetingPlace, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Sums in one balanced binary tree over the ranks, by every rank for itself: the same bits on all of them."""
    del device, limits, workspace
    width = a.x.shape[1]
    row_bytes = width * DTYPES[a.x.dtype].itemsize
    return _bound(place, "all_reduce", row_bytes, _blocks(row_bytes), a.x, a.step, width, **act(a.x.dtype))


def _all_gather(place: MeetingPlace, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Copies columns."""
    del device, limits, workspace
    width, columns, each = a.x.shape[1], a.out.shape[1], DTYPES[a.x.dtype].itemsize
    return _bound(
        place, "all_gather", width * each, _blocks(width * each), a.x, a.out, a.step, width, columns, EACH_BYTES=each
    )  # fmt: skip


def _argmax_pair(place: MeetingPlace, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block finds the highest of its rows, and exchanges eight bytes a row."""
    del device, limits, workspace
    width = a.logits.shape[1]
    first = place.rank * width
    valid = min(max(int(a.num_valid) - first, 0), width)
    return _bound(
        place, "argmax_pair", 8, lambda n: min(n, BLOCKS), a.logits, a.row_slot, a.tokens, a.step, width, valid, first
    )  # fmt: skip


def _broadcast(place: MeetingPlace, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Copies what rank 0 brought."""
    del device, limits, workspace
    return _bound(place, "broadcast", 4, _blocks(4), a.x, a.step)


def _own_experts(place: MeetingPlace, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Counts from the rank's first expert; a thread a place."""
    del limits, workspace
    k, kept = a.expert_ids.shape[1], int(a.num_kept)
    function = device.function(source("collectives.cu"), "own_experts", RANKS=place.size)
    grid = lambda n: -(-n * k // 128)  # noqa: E731  as everywhere, a function of the launch length
    return function.bind(grid, 128, a.expert_ids, a.own, k, place.rank * kept, kept, ROWS, dependent=True)
