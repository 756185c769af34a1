"""Lays out the rows of a pass on a place of its own memory: which carry something, where they turn, where their keys lie.

`forward_meta.py` makes one for each pass, and the kernels in `kernels/numeric.py` read it. Everything is computed on the device,
in shapes that the host knows, by the first layer that asks, and shared by the others. Every row reads its keys for itself: in
place of what it must not see a row of zeros is read, so that poison elsewhere never meets it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from polydraft_paddle.cache import CacheRows, Spread
from polydraft_paddle.ops import (
    KEPT,
    Tensor,
    and_behind,
    both,
    carried,
    choose,
    constant,
    direct,
    full,
    multiples,
    number,
    numbers,
    take,
)  # fmt: skip
from polydraft_paddle.tiles import HIDDEN, LONG, Heads, Shape, Tiles, shape_of

MOST_GATHERED = 1 << 28
"""Bytes of keys and values that are copied at a time."""


class Keys(NamedTuple):
    """What rows `begin` to `end` of a pass attend to.

    `pieces` [2 * n * U * C] int32: of each place that a row may see the U pieces of its key, then those of its value, in a cache
    that is read so; those of a row of zeros where it must not. Of their scores [n, G, M, C] `visible`: which count, bool; and
    `hidden` float32: the score of those that do not."""

    begin: int
    end: int
    pieces: Tensor
    visible: Tensor
    hidden: Tensor


class Places(NamedTuple):
    """The same for attention in one operation, which wants places before heads.

    `pieces` [2 * n * C * U] int32: of each place the U pieces of its key, and behind all keys those of its value. `added`
    [n, H, 1, C]: what its scores get, 0 for keys that count and `HIDDEN` for the others."""

    begin: int
    end: int
    pieces: Tensor
    added: Tensor


class Bounds(NamedTuple):
    """What the host knows of a pass: its rows are of at most `slots` slots. `windows_alone`: none has more than `window`."""

    slots: int
    window: int
    windows_alone: bool


UNKNOWN = Bounds(slots=LONG * KEPT, window=LONG, windows_alone=False)
"""Of rows of which the host knows nothing."""


class Angles:
    """Whole heads of qkv, as they lie, and how far each turns.

    `sin` and `cos` [max_len + 1, D] float32: by position, of each element of a head; the last row leaves a head as it is. `least`
    int32 [1, heads]: the first of these rows that a head of a row of qkv may take: the last one for those of v."""

    def __init__(self, sin: Tensor, cos: Tensor, least: Tensor) -> None:
        self.sin, self.cos, self.least = sin, cos, least


class Turns:
    """How the heads of qkv rotate, as pieces that move as they are: those of each head, then those of its partners.

    `table` [max_len + 1, 2, D] float32: by position, factors of each element and of its partner; the last row leaves a head as it
    is. `pattern` int32 [heads, 2 * D / width]: among the pieces of a row of qkv, of `width` elements each, what each head is made
    of; of all `heads` the last 2 * `kv_heads` are those of k and v."""

    def __init__(self, table: Tensor, pattern: Tensor, kv_heads: int, width: int) -> None:
        self.table, self.width = table, width
        self._pattern, self._q, self._kv = pattern, pattern.shape[0] - 2 * kv_heads, kv_heads
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, n: int) -> tuple[Tensor, Tensor]:
        """For n rows, of which all heads of q come before those of k and v, row by row: int32 [N * 2 * D / width], the pieces of
        each head; and int32 [N], which of n + 1 rows of factors it takes: its own, values the last."""
        found = self._kept.get(n)
        if found is None:
            found = self._index(n), self._rows(n)
            if found[0].size <= KEPT:
                self._kept[n] = found
        return found

    def _index(self, n: int) -> Tensor:
        per_row = self._pattern.shape[0] * self._pattern.shape[1] // 2
        begin = direct.unsqueeze(multiples(n, per_row, self._pattern), [1])
        pattern = direct.reshape(self._pattern, [1, -1])
        of_q = self._q * self._pattern.shape[1]
        return _joined(*(direct.add(begin, part) for part in (pattern[:, :of_q], pattern[:, of_q:])))

    def _rows(self, n: int) -> Tensor:
        rows = direct.unsqueeze(numbers(n, self._pattern), [1])
        keys = rows.expand([n, self._kv])
        return _joined(rows.expand([n, self._q]), direct.concat([keys, constant(n, keys)], 1))


def _joined(*parts: Tensor) -> Tensor:
    return direct.concat([direct.reshape(part, [-1]) for part in parts], 0)


class RowLayout:
    """Of rows with `row_slot` and `positions` [n] over `block_table` [B, MB], all int32. `before`: the layout of these rows when
    some that carry nothing now carried something still; what it has found holds for the others."""

    def __init__(
        self, row_slot: Tensor, positions: Tensor, block_table: Tensor, block_size: int, before: RowLayout | None = None,
        bounds: Bounds = UNKNOWN,
    ) -> None:  # fmt: skip
        self._slots, self._table, self._size = row_slot, block_table, block_size
        self._positions, self._before, self._bounds = positions, before, bounds
        self._found: dict[tuple[Any, ...], Any] = {}
        self.rotated: Tensor | None = None
        """Where the layer at hand has put its queries: there rows that carry nothing are zero."""

    @classmethod
    def of(cls, a: Any, n: int) -> RowLayout:
        """The pass's layout from its metadata, or one of the kernel's own rows when it is run without any."""
        layout = None if a.meta is None else a.meta.layout
        return layout if isinstance(layout, cls) else cls(a.row_slot[:n], a.positions[:n], a.block_table, a.block_size)

    @functools.cached_property
    def _carries(self) -> Tensor:
        return carried(self._slots)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Of rows that carry nothing any; int32 [n]."""
        return self._before.positions if self._before else choose(self._carries, self._positions, 0)

    def carries(self, width: int) -> Tensor:
        """Which rows carry something, bool [n, width]."""
        if (width,) not in self._found:
            self._found[width,] = direct.unsqueeze(self._carries, [1]).expand([self._slots.shape[0], width])
        found: Tensor = self._found[width,]
        return found

    def turns(self, turns: Turns) -> tuple[Tensor, Tensor]:
        """The pieces that heads are made of (`Turns.of`), and the factors of both elements and partners, [N, 2, D] float32."""
        if self._before:
            return self._before.turns(turns)
        index, rows = turns.of(self._slots.shape[0])
        key = id(turns.table), rows.shape[0], "turns"
        if key not in self._found:
            still = constant(turns.table.shape[0] - 1, self.positions[:1])
            self._found[key] = take(turns.table, take(direct.concat([self.positions, still], 0), rows))
        return index, self._found[key]

    def angles(self, angles: Angles) -> tuple[Tensor, Tensor]:
        """Sines and cosines of each head of the rows, [n * heads, D] float32 each."""
        if self._before:
            return self._before.angles(angles)
        key = id(angles), "angles"
        if key not in self._found:
            of = direct.reshape(direct.maximum(direct.unsqueeze(self.positions, [1]), angles.least), [-1])
            self._found[key] = take(angles.sin, of), take(angles.cos, of)
        found: tuple[Tensor, Tensor] = self._found[key]
        return found

    def queries(self, heads: int, per_row: int, zeros: int) -> Tensor:
        """Where the first `heads` heads of each row lie among `per_row` for each, int32 [n * heads]; from `zeros` on
        there are as many of zeros, which rows that carry nothing take."""
        key = "queries", heads, per_row, zeros
        if key not in self._found:
            first = choose(self._carries, multiples(self._slots.shape[0], per_row, self._slots), zeros)
            index = direct.add(direct.unsqueeze(first, [1]), direct.unsqueeze(numbers(heads, first), [0]))
            self._found[key] = direct.reshape(index, [-1])
        found: Tensor = self._found[key]
        return found

    # -- places ------------------------------------------------------------------------------------
    def _places(self, units: int) -> Tensor:
        """Places of the keys of each row's slot in a cache that is read in so many pieces a row, int32 [n, C]; negative where no
        block is granted, and of rows that carried nothing from the start."""
        if self._before:
            return self._before._places(units)
        key = "places", units
        if key not in self._found:
            slots = choose(self._carries, self._slots, self._table.shape[0])
            blocks = direct.multiply(take(and_behind(self._table), slots), number(self._size * units, self._slots))
            within = multiples(self._size, units, blocks)
            places = direct.add(direct.unsqueeze(blocks, [2]), within)
            self._found[key] = direct.reshape(places, [self._slots.shape[0], self._table.shape[1] * self._size])
        found: Tensor = self._found[key]
        return found

    def destinations(self, cache: CacheRows, spread: Spread) -> Tensor:
        """The pieces of `cache.whole` that keys and values of each row go to: int32 [n * (others + 2 * U), width]. Those of the
        key are before those of the value, and in front of them are the others of `spread`, which go nowhere."""
        key = "to", id(spread)
        if key not in self._found:
            pieces = direct.add(direct.unsqueeze(self._destination(cache.units), [1, 2]), spread.pieces)
            pieces = direct.maximum(pieces, spread.least)
            self._found[key] = direct.reshape(pieces, [-1, pieces.shape[2]])
        found: Tensor = self._found[key]
        return found

    def _destination(self, units: int) -> Tensor:
        """The place that each row goes to in a cache of so many pieces a row, int32 [n]; negative where it goes nowhere."""
        key = "at", units
        if key not in self._found:
            if self._before:
                self._found[key] = choose(self._carries, self._before._destination(units), -units)
            else:
                n, context = (places := self._places(units)).shape
                index = direct.add(multiples(n, context, self._slots), self.positions)
                self._found[key] = take(direct.reshape(places, [-1]), index)
        found: Tensor = self._found[key]
        return found

    # -- attention ---------------------------------------------------------------------------------
    def keys(self, cache: CacheRows, row_bytes: int, heads: tuple[int, int], reach: int) -> list[Keys]:
        """What rows attend to in `cache`, the last `reach` keys (0: all), so many rows at a time that the copies stay within
        `MOST_GATHERED`, where keys and values of one position take `row_bytes`. `heads`: those of k, and of q for each of
        them."""
        most = max(1, MOST_GATHERED // (self._table.shape[1] * self._size * row_bytes))
        key = most, reach, heads, cache.half, cache.units
        if key not in self._found:
            self._found[key] = list(self._keys(cache, most, heads, reach))
        found: list[Keys] = self._found[key]
        return found

    def _keys(self, cache: CacheRows, most: int, heads: tuple[int, int], reach: int) -> Iterator[Keys]:
        visible = self._visible(reach)
        places, (rows, context) = choose(visible, self._places(cache.units), cache.zeros), visible.shape
        for begin in range(0, rows, most):
            end = min(begin + most, rows)
            some = slice(begin, end) if (begin, end) != (0, rows) else slice(None)
            seen = direct.unsqueeze(visible[some], [1, 2]).expand([end - begin, *heads, context])
            pieces = direct.add(direct.unsqueeze(places[some], [0, 2]), direct.unsqueeze(cache.pieces, [1, 3]))
            yield Keys(begin, end, direct.reshape(pieces, [-1]), seen, self._hidden(seen))

    def places(self, cache: CacheRows, row_bytes: int, heads: int, reach: int, dtype: Any) -> list[Places]:
        """The same for attention of `heads` heads of q in one operation, with what scores get in `dtype`."""
        most = max(1, MOST_GATHERED // (self._table.shape[1] * self._size * row_bytes))
        key = "whole", most, reach, heads, cache.half, cache.units, dtype
        if key not in self._found:
            self._found[key] = list(self._whole(cache, most, heads, reach, dtype))
        found: list[Places] = self._found[key]
        return found

    def _whole(self, cache: CacheRows, most: int, heads: int, reach: int, dtype: Any) -> Iterator[Places]:
        visible = self._visible(reach)
        places, (rows, context) = choose(visible, self._places(cache.units), cache.zeros), visible.shape
        seen, hidden = (full(visible.shape, value, visible, dtype) for value in (0.0, HIDDEN))
        added = direct.where(visible, seen, hidden)
        for begin in range(0, rows, most):
            end = min(begin + most, rows)
            some = slice(begin, end) if (begin, end) != (0, rows) else slice(None)
            pieces = direct.add(direct.unsqueeze(places[some], [0, 3]), direct.unsqueeze(cache.pieces, [1, 2]))
            each = direct.unsqueeze(added[some], [1, 2]).expand([end - begin, heads, 1, context])
            yield Places(begin, end, direct.reshape(pieces, [-1]), each)

    def tiles(self, heads: Heads, reach: int, most: int) -> Tiles | None:
        """The rows in tiles, where one by one they copy more than `most` bytes of a layer and tiles are cheaper; else None, and
        where rows see the last `reach` keys alone (0: all), of which those of a tile see different ones at both ends."""
        key = "tiles", heads, reach, most
        if key not in self._found:
            rows, context, bounds = self._slots.shape[0], self._table.shape[1] * self._size, self._bounds
            shape = None
            if not reach and rows * context * 2 * heads.kv * heads.dim * 4 > most:
                slots = min(bounds.slots, self._table.shape[0])
                shape = shape_of(rows, slots, bounds.window, heads, windows_alone=bounds.windows_alone)
            self._found[key] = shape and self._tiled(shape)
        found: Tiles | None = self._found[key]
        return found

    def _tiled(self, shape: Shape) -> Tiles:
        if ("tiled", shape) not in self._found:
            self._found["tiled", shape] = Tiles(self._slots, self.positions, self._carries, self._table, self._size, shape)
        found: Tiles = self._found["tiled", shape]
        return found

    def _hidden(self, like: Tensor) -> Tensor:
        key = "hidden", *like.shape
        if key not in self._found:  # most passes have one shape, or two
            self._found[key] = constant(HIDDEN, like, "float32")
        found: Tensor = self._found[key]
        return found

    def _visible(self, reach: int) -> Tensor:
        """Which keys each row attends to, bool [n, C]; those that carry nothing to none."""
        key = "visible", reach
        if key not in self._found and self._before:
            self._found[key] = both(self._before._visible(reach), direct.unsqueeze(self._carries, [1]))
        if key not in self._found:
            place = direct.unsqueeze(numbers(self._table.shape[1] * self._size, self._slots), [0])
            position = direct.unsqueeze(self.positions, [1])
            visible = both(direct.less_equal(place, position), direct.unsqueeze(self._carries, [1]))
            if reach:
                visible = both(visible, direct.greater_than(place, direct.subtract(position, number(reach, position))))
            self._found[key] = visible
        found: Tensor = self._found[key]
        return found
