"""What ranks exchange in a process group of Paddle, queued on the compute stream between the kernels around it.

`polydraft_paddle.ranks` lists them for places with a stream, and says where ranks meet. What is computed around an exchange is
made of portable Paddle operations. No launch chooses its way by size, and every rank computes the same of what all have brought.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle.base import core

from polydraft.contracts.base import Limits
from polydraft.sentinels import NO_TOKEN
from polydraft_paddle.ops import First, both, carried, choose, first_where, number, put
from polydraft_paddle.provider import Kernel, Run, plain

if TYPE_CHECKING:
    from polydraft_paddle.ranks import MeetingPlace

GATHER = "all_gather_into_tensor_on_calc_stream"


def kernels(here: MeetingPlace) -> Mapping[str, Kernel]:
    """Every collective of one rank, by contract."""
    made = {"all_reduce": _all_reduce, "all_gather": _all_gather, "argmax_pair": _argmax_pair, "broadcast": _broadcast}
    return {**{name: partial(bind, here) for name, bind in made.items()}, "own_experts": plain(partial(_own_experts, here.rank))}


def _all_reduce(here: MeetingPlace, a: Any, limits: Limits) -> Run:
    """Sums in place, in the order of the place's library."""
    del limits
    call, first = here.caller("all_reduce", a.step, 4 * a.x.shape[1]), First(a.x)

    def run(n: int) -> None:
        if n:
            call(n, "all_reduce_on_calc_stream", *first.rows(n), core.ReduceOp.SUM)

    return run


def _all_gather(here: MeetingPlace, a: Any, limits: Limits) -> Run:
    """Copies columns."""
    del limits
    (rows, width), columns, size = a.x.shape, a.out.shape[1], here.size
    call, room, first = here.caller("all_gather", a.step, 4 * width), here.room(size * rows * width), First(a.x, a.out)

    def run(n: int) -> None:
        if not n:
            return
        x, out = first.rows(n)
        found = room[: size * n * width].view([size * n, width])
        call(n, GATHER, found, x)
        for rank in range(size):
            begin, end = rank * width, min((rank + 1) * width, columns)
            if begin < end:
                put(out[:, begin:end], found[rank * n : (rank + 1) * n, : end - begin])

    return run


def _argmax_pair(here: MeetingPlace, a: Any, limits: Limits) -> Run:
    """Brings the highest logit of a row and its id, as a float, which has all ids below 2**24; infinity for a row with NaN."""
    del limits
    (rows, width), size = a.logits.shape, here.size
    begin = here.rank * width
    valid = min(max(int(a.num_valid) - begin, 0), width)
    call, room = here.caller("argmax_pair", a.step, 8), here.room(size * rows * 2)
    pairs = here.device.empty("ranks.pairs", (rows, 2), "f32").tensor
    here.device.fill(pairs, np.full((rows, 2), -np.inf, np.float32), "ranks.pairs")  # what a rank of padding alone brings

    def run(n: int) -> None:
        if not n:
            return
        if valid:
            logits = a.logits[:n, :valid]
            top = logits.max(axis=1, keepdim=True)
            highest = choose(~paddle.isnan(logits.sum(axis=1)), top.squeeze(1), math.inf)  # a comparison may pass NaN by
            ids = (first_where(logits >= top) + number(begin, a.tokens)).astype("float32")
            put(pairs[:n], paddle.stack([highest, ids], axis=1))
        found = room[: size * n * 2].view([size * n, 2])
        call(n, GATHER, found, pairs[:n])
        values, ids = found[:, 0].reshape([size, n]), found[:, 1].reshape([size, n])
        top, token = values.max(axis=0), ids[size - 1]
        for rank in range(size - 2, -1, -1):  # of equals the first rank's
            token = choose(values[rank] >= top, ids[rank], token)
        sound = both(paddle.isfinite(top), carried(a.row_slot[:n]))
        put(a.tokens[:n], choose(sound, token.astype("int32"), NO_TOKEN))

    return run


def _broadcast(here: MeetingPlace, a: Any, limits: Limits) -> Run:
    """Copies what rank 0 brought."""
    del limits
    call, first = here.caller("broadcast", a.step, 4), First(a.x)

    def run(n: int) -> None:
        if n:
            call(n, "broadcast_on_calc_stream", *first.rows(n), 0)

    return run


def _own_experts(rank: int, a: Any, n: int) -> None:
    """Counts from the rank's first expert."""
    ids, begin = a.expert_ids[:n], rank * int(a.num_kept)
    counted = ids - number(begin, ids)
    mine = both(carried(counted), number(int(a.num_kept), ids) > counted)
    put(a.own[:n], choose(mine, counted, -1))
