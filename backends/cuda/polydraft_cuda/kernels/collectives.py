"""What ranks exchange over memory of each other's GPUs: one launch each, which a graph may hold.

`polydraft_collectives` lists them. Where ranks meet, and what happens when one does not come, is in `polydraft_cuda.ranks`. How
many blocks a launch has depends on its length alone, and no sum on how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from polydraft.device import DTYPES, Launch, Stream
from polydraft_cuda.compiler import ROWS, act, sequence
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import linear, norms, screen
from polydraft_cuda.kernels.provider import Kernel, source
from polydraft_cuda.kernels.sampling import Keys
from polydraft_cuda.ranks import BLOCKS, CHUNK, MeetingPlace, Place

THREADS = 256


def kernels(place: MeetingPlace) -> Mapping[str, Kernel]:
    """Every collective of one rank, by contract."""
    made = {
        "all_reduce": _all_reduce, "all_gather": _all_gather, "argmax_pair": _argmax_pair, "broadcast": _broadcast,
        "own_experts": own_experts,
    }  # fmt: skip
    return {name: Kernel(partial(bind, place)) for name, bind in made.items()}


def _blocks(row_bytes: int) -> Any:
    """As many as each have `CHUNK` bytes of rows of `row_bytes`."""
    return lambda n: min(-(-n * row_bytes // CHUNK), BLOCKS)


def _bound(
    place: MeetingPlace, name: str, row_bytes: int, grid: Any, *arguments: Any, threads: int = THREADS, **defines: Any
) -> Launch:
    """A launch that meets others and brings `row_bytes` a row: its region comes first, its number and the launch length last."""
    function = place.device.function(source("collectives.cu"), name, RANKS=place.size, **defines)
    bound = function.bind(grid, threads, place.region(), *arguments, place.number(), ROWS, dependent=True)

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


def takes_norm(summed: Any, added: Any, normed: Any) -> bool:
    """Whether a sum and the residual addition and norm behind it can be one launch: a block keeps whole rows."""
    defines, _ = norms.shape_of(summed.x.dtype, summed.x.shape[1], (summed.x, added.x, normed.weight, normed.out))
    return bool(defines["VECTORS"])


def norm_of_sum(place: MeetingPlace, early: bool, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block has whole rows, with threads as the norm by itself has, so that its sums are the same to the bit. With `early` the
    residual stream is read while the projection in front still runs. More rows than blocks have room for are two launches."""
    summed, added, normed = a.parts
    width, dtype = summed.x.shape[1], summed.x.dtype
    row_bytes = width * DTYPES[dtype].itemsize
    defines, threads = norms.shape_of(dtype, width, (summed.x, added.x, normed.weight, normed.out))

    def kernel(name: str) -> Launch:
        return _bound(
            place, name, row_bytes, lambda n: min(n, BLOCKS), summed.x, added.x, normed.weight, normed.out, summed.step, width,
            float(normed.eps), threads=threads, PLUS_ONE=int(normed.plus_one), EARLY=int(early), ROW_THREADS=threads, **defines,
        )  # fmt: skip

    sums = _all_reduce(place, device, summed, limits, workspace)
    return linear.by_rows([
        (place.rows_of_words(row_bytes), kernel("norm_of_few")),
        (place.rows_with_room(row_bytes), kernel("norm_of_sum")),
        (1 << 30, sequence(sums, norms.norm(device, normed, added.x, added.y))),
    ])  # fmt: skip


def _all_gather(place: MeetingPlace, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Copies columns."""
    del device, limits, workspace
    width, columns = (buffer.shape[1] * DTYPES[buffer.dtype].itemsize for buffer in (a.x, a.out))
    whole = not any(number % 16 for number in (width, columns, a.x.pointer, a.out.pointer))
    each = 16 if whole else DTYPES[a.x.dtype].itemsize
    return _bound(
        place, "all_gather", width, _blocks(width), a.x, a.out, a.step, width // each, columns // each, EACH_BYTES=each
    )  # fmt: skip


def _argmax_pair(place: MeetingPlace, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block finds the highest of its rows, and exchanges eight bytes a row."""
    del device, limits, workspace
    width = a.logits.shape[1]
    first = place.rank * width
    valid = min(max(int(a.num_valid) - first, 0), width)
    return _bound(
        place, "argmax_pair", 8, lambda n: min(n, BLOCKS), a.logits, a.row_slot, a.tokens, a.step, width, valid, first,
        threads=2 * THREADS,
    )  # fmt: skip


def takes_choice(place: MeetingPlace, device: CudaDevice, project: Any, choice: Any) -> bool:
    """Whether ranks can exchange what their heads have kept: all of their outputs are tokens."""
    return bool(choice.num_valid == place.size * project.out.shape[1]) and linear.is_chosen_from(device, project)


def chosen(place: MeetingPlace, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A head that keeps the best of each row, and the exchange of those. Many rows are two launches that write logits."""
    project, choice = a.parts
    keys = Keys(choice.row_slot, device.empty("argmax.keys", (choice.tokens.shape[0], 2), "i32"))
    first = place.rank * int(project.out.shape[1])
    grid = lambda n: -(-n // THREADS)  # noqa: E731  a thread a row
    exchange = _bound(place, "argmax_keys", 8, grid, keys.tokens, choice.row_slot, choice.tokens, choice.step, first)
    apart = sequence(linear.linear(device, project, limits, workspace), _argmax_pair(place, device, choice, limits, None))
    looks = 0 if device.row_invariant else screen.MOST_ROWS
    kept = linear.kept_choices(device, project, keys, workspace, looks=looks)
    return linear.by_rows([*((most, sequence(one, exchange)) for most, one in kept), (1 << 30, apart)])


def _broadcast(place: MeetingPlace, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Copies what rank 0 brought."""
    del device, limits, workspace
    return _bound(place, "broadcast", 4, _blocks(4), a.x, a.step)


def own_experts(place: Place, device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Counts from the rank's first expert; a thread a place."""
    del limits, workspace
    k, kept = a.expert_ids.shape[1], int(a.num_kept)
    function = device.function(source("collectives.cu"), "own_experts", RANKS=place.size)
    grid = lambda n: -(-n * k // 128)  # noqa: E731  as everywhere, a function of the launch length
    return function.bind(grid, 128, a.expert_ids, a.own, k, place.rank * kept, kept, ROWS, dependent=True)
