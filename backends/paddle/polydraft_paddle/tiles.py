"""Lays out attention by tiles of rows on a place of its own memory: rows of one slot that read its keys together.

`RowLayout.tiles` makes one for a pass of many rows over long tables, and `attend_tiles` of `kernels/numeric.py` reads it. Row
by row a slot's whole table is copied for each of its rows; by tiles once for all of them. It takes a few more operations a layer,
so it is for passes that copy much, which shapes alone decide. Nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import paddle

from polydraft_paddle.cache import CacheRows
from polydraft_paddle.ops import (
    Tensor,
    and_behind,
    as_int,
    both,
    choose,
    constant,
    direct,
    equals,
    first_where,
    flat,
    full,
    multiples,
    number,
    numbers,
    part,
    take,
)  # fmt: skip

MOST_BY_ROW = 1 << 26
"""Bytes of keys and values that a layer copies row by row; a pass that would copy more is laid out in tiles where that is
cheaper. Tiles take five more operations a layer, of some 10 us each: in that time a memory of 2 TB/s moves 100 MB, and what is
copied is written and read again."""
MOST_IN_ONE = 2 * MOST_BY_ROW
"""The same where the place attends in one operation, which tiles take nine more than."""
LONG = 16
"""Rows of a tile where a slot may have more rows than a window has, as in prefill."""
SCORED = 11
"""What a score costs where an element of a key or value that is copied costs 1: so it is on a processor, for its exponential. On
a chip with much arithmetic for its memory it is less, and tiles are taken later than they would pay."""


class Heads(NamedTuple):
    """Heads of q, heads of k, and elements of each."""

    q: int
    kv: int
    dim: int


class Shape(NamedTuple):
    """So many tiles of so many rows each."""

    tiles: int
    rows: int

    def cost(self, heads: Heads) -> int:
        """What they cost for each position of a table, in elements that are copied."""
        return self.tiles * (2 * heads.kv * heads.dim + SCORED * heads.q * self.rows)


def shape_of(rows: int, slots: int, window: int, heads: Heads, *, windows_alone: bool) -> Shape | None:
    """The cheapest tiles that are enough for `rows` rows of at most `slots` slots, whatever these are; None where tiles are not
    cheaper than rows by a third. `windows_alone`: no slot has more than `window` rows, so each is one tile."""
    slots = max(1, min(slots, rows))
    found = [Shape((rows + slots * (size - 1)) // size, size) for size in (window, LONG)]
    if windows_alone:
        found.append(Shape(slots, window))
    best = min((shape for shape in found if shape.rows > 1), key=lambda shape: shape.cost(heads))
    return best if 3 * best.cost(heads) <= 2 * Shape(rows, 1).cost(heads) else None


class Tile(NamedTuple):
    """What the tiles S of one part of a pass attend to, in a layer of G heads of k, M = rows * groups heads of q for each of
    them, and C places in a table. int32 but for `visible` and `hidden`.

    `queries` [S * G * M]: the heads of q. `pieces` [S * G * (2 * C + rows * (rows - 1))]: those of the keys that some row of a
    tile sees, those of the values that its first row sees, and for each row those of the values behind these that it sees; in
    place of others a row of zeros. `visible` bool and `hidden` float32 [S, G, M, C]: as in `Keys`. `own`
    [S * G * M * (rows - 1)]: the places of the last values' weights among all, which are [S, G, M, C]."""

    queries: Tensor
    pieces: Tensor
    visible: Tensor
    hidden: Tensor
    own: Tensor


class Tiles:
    """The tiles of rows with `slots` [n], of which `carries` [n] says which carry something, and `positions` [n], over `table`
    [B, MB] of blocks of `size` places; all int32. The rows of a slot lie together, and their positions ascend by one."""

    def __init__(self, slots: Tensor, positions: Tensor, carries: Tensor, table: Tensor, size: int, shape: Shape) -> None:
        n, num_slots, rows, count = slots.shape[0], table.shape[0], shape.rows, shape.tiles + 1
        self.rows, self.count, self._table, self._size = rows, count, table, size
        self._found: dict[tuple[Any, ...], Any] = {}
        every, places = numbers(n, slots), direct.unsqueeze(numbers(rows, slots), [0])
        names = direct.equal(direct.unsqueeze(slots, [0]), direct.unsqueeze(numbers(num_slots, slots), [1]))
        known = choose(carries, slots, num_slots)
        begin = take(first_where(names), direct.minimum(known, number(num_slots - 1, known)))
        place = take(_cycle(rows, n, slots), choose(carries, direct.subtract(every, begin), 0))
        opens = both(carries, equals(place, 0))
        tile = direct.subtract(paddle.cumsum(as_int(opens), dtype="int32"), number(1, slots))
        # The row that opens each tile, n where none does, as in the last one; what opens none is written behind all.
        nowhere = full([count + 1], n, slots)
        at = direct.put_along_axis(nowhere, choose(opens, tile, count), every, 0, "assign", True)
        at = part(at, 0, count)
        slot_of, first_of = _and(known, num_slots), _and(positions, -1)
        self._slot, self._first = take(slot_of, at), direct.unsqueeze(take(first_of, at), [1])
        row = direct.minimum(direct.add(direct.unsqueeze(at, [1]), places), number(n, at))
        same = direct.equal(direct.reshape(take(slot_of, flat(row)), row.shape), direct.unsqueeze(self._slot, [1]))
        there = both(same, direct.less_than(direct.unsqueeze(self._slot, [1]), number(num_slots, at)))
        self._sees = choose(there, direct.add(self._first, places), -1)
        """The last position that each place of a tile sees, -1 where it has no row; [S, rows]."""
        self._row, self._place, self._tile = direct.minimum(row, number(n - 1, at)), place, choose(carries, tile, count - 1)

    def order(self, heads: Heads) -> Tensor:
        """Where the heads of each row of the pass are in what tiles give, [S, G, rows, groups, D]: int32 [n * H]. Rows that
        carry nothing take theirs from the empty tile, of which nothing but zeros comes."""
        key = "order", heads
        if key not in self._found:
            groups = heads.q // heads.kv
            of_tile = direct.multiply(self._tile, number(heads.q * self.rows, self._tile))
            begin = direct.add(of_tile, direct.multiply(self._place, number(groups, self._tile)))
            within = direct.unsqueeze(multiples(heads.kv, self.rows * groups, begin), [1])
            within = direct.add(within, direct.unsqueeze(numbers(groups, begin), [0]))
            self._found[key] = flat(direct.add(direct.unsqueeze(begin, [1, 2]), direct.unsqueeze(within, [0])))
        found: Tensor = self._found[key]
        return found

    def parts(self, cache: CacheRows, heads: Heads, most: int) -> list[Tile]:
        """What tiles attend to in `cache`, so many at a time that copies and scores stay within `most` bytes."""
        context = self._table.shape[1] * self._size
        some = max(1, most // (4 * context * (2 * heads.kv * heads.dim + heads.q * self.rows)))
        key = some, heads, cache.half, cache.units
        if key not in self._found:
            self._found[key] = list(self._parts(cache, heads, some))
        found: list[Tile] = self._found[key]
        return found

    def _parts(self, cache: CacheRows, heads: Heads, most: int) -> Iterator[Tile]:
        count, rows, groups = self.count, self.rows, heads.q // heads.kv
        blocks = direct.multiply(take(and_behind(self._table), self._slot), number(self._size * cache.units, self._slot))
        within = multiples(self._size, cache.units, blocks)
        context = self._table.shape[1] * self._size
        places = direct.reshape(direct.add(direct.unsqueeze(blocks, [2]), within), [count, context])
        each = direct.unsqueeze(numbers(context, places), [0])
        last = direct.max(self._sees, [1], True)
        keys = choose(direct.less_equal(each, last), places, cache.zeros)
        values = choose(direct.less_equal(each, self._first), places, cache.zeros)
        # Positions behind that of the first row: a row sees those up to its own.
        behind = direct.add(direct.unsqueeze(multiples(rows, 1, last)[1:], [0]), self._first)
        inside = direct.minimum(behind, number(context - 1, behind))
        at = direct.add(direct.unsqueeze(multiples(count, context, inside), [1]), inside)
        later = direct.unsqueeze(direct.reshape(take(flat(places), flat(at)), at.shape), [1])
        seen = direct.less_equal(direct.unsqueeze(behind, [1]), direct.unsqueeze(self._sees, [2]))
        later = choose(seen, later.expand(seen.shape), cache.zeros)
        visible = direct.less_equal(direct.unsqueeze(each, [1]), direct.unsqueeze(self._sees, [2]))
        head = direct.reshape(numbers(heads.q, last), [1, heads.kv, 1, groups])
        for begin in range(0, count, most):
            end = min(begin + most, count)
            size, of_k, of_v = end - begin, cache.pieces[:1], cache.pieces[1:]
            pieces = [
                direct.add(direct.unsqueeze(part(keys, begin, end), [1]), direct.unsqueeze(of_k, [2])),
                direct.add(direct.unsqueeze(part(values, begin, end), [1]), direct.unsqueeze(of_v, [2])),
                direct.add(direct.unsqueeze(part(later, begin, end), [1]), direct.unsqueeze(of_v, [2, 3])),
            ]
            row = direct.multiply(part(self._row, begin, end), number(heads.q, last))
            queries = direct.add(direct.unsqueeze(row, [1, 3]), head)
            shape = [size, heads.kv, rows, groups, context]
            mine = direct.unsqueeze(part(visible, begin, end), [1, 3]).expand(shape)
            mine = direct.reshape(mine, [size, heads.kv, rows * groups, context])
            of_tile = direct.unsqueeze(multiples(size, heads.q * rows * context, inside), [1])
            weights = direct.add(of_tile, direct.unsqueeze(multiples(heads.q * rows, context, inside), [0]))
            own = direct.add(direct.unsqueeze(weights, [2]), direct.unsqueeze(part(inside, begin, end), [1]))
            joined = direct.concat([flat(one) for one in pieces], 0)
            yield Tile(flat(queries), joined, mine, constant(HIDDEN, mine, "float32"), flat(own))


HIDDEN = -1e30
"""The score of a key that does not count."""


def _and(x: Tensor, value: int) -> Tensor:
    """`x` [n] with `value` behind it."""
    return direct.concat([x, full([1], value, x)], 0)


def _cycle(size: int, count: int, like: Tensor) -> Tensor:
    """0 to `size` - 1 again and again, at least `count` numbers, int32; made once for each."""
    key = size, count, like.place
    if key not in _CYCLES:
        _CYCLES[key] = flat(direct.unsqueeze(numbers(size, like), [0]).expand([-(-count // size), size]))
    return _CYCLES[key]


_CYCLES: dict[tuple[int, int, Any], Tensor] = {}
