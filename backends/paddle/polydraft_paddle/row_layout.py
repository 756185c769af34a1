"""Lays out the rows of a pass on a place of its own memory: which carry something, where they turn, where their keys lie.

`forward_meta.py` makes one for each pass, and the kernels in `kernels/numeric.py` read it. Everything is computed on the device,
in shapes that the host knows, by the first layer that asks, and shared by the others. Every row reads its keys for itself: what
it must not see is replaced by its own key before anything is read, so that poison elsewhere never meets it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import paddle

from polydraft_paddle.ops import Tensor, both, carried, choose, clamp, constant, direct, numbers, pick, take

MOST_GATHERED = 1 << 28
"""Bytes of keys and values that are copied at a time."""
HIDDEN = 1e30
"""What is taken from scores that do not count."""


class Keys(NamedTuple):
    """What rows `begin` to `end` attend to: `places` [n, C] int32 of their keys in a cache's half, and `hidden` [n, 1, 1, C]
    float32 to add to scores, 0 or -HIDDEN."""

    begin: int
    end: int
    places: Tensor
    hidden: Tensor


class RowLayout:
    """Of rows with `row_slot` and `positions` [n] over `block_table` [B, MB], all int32."""

    def __init__(self, row_slot: Tensor, positions: Tensor, block_table: Tensor, block_size: int) -> None:
        self._slots, self._table, self._size = row_slot, block_table, block_size
        self._positions = positions
        self._found: dict[tuple[Any, ...], Any] = {}

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
        """Of rows that carry nothing 0; int32 [n]."""
        return choose(self._carries, self._positions, 0)

    def carries(self, width: int) -> Tensor:
        """Which rows carry something, bool [n, width]."""
        if (width,) not in self._found:
            self._found[width,] = direct.unsqueeze(self._carries, [1]).expand([self._slots.shape[0], width])
        found: Tensor = self._found[width,]
        return found

    def turns(self, own: Tensor, partner: Tensor, kv_heads: int, heads: int) -> tuple[Tensor, Tensor]:
        """Of tables [max_len, D] of rotation factors the rows of the positions for all of `heads`, [n, heads, D]; the last
        `kv_heads` of them, which hold values, keep what they are."""
        key = id(own), id(partner), kv_heads, heads
        if key not in self._found:
            self._found[key] = self._turns(own, kv_heads, heads, 1.0), self._turns(partner, kv_heads, heads, 0.0)
        found: tuple[Tensor, Tensor] = self._found[key]
        return found

    def _turns(self, table: Tensor, kv_heads: int, heads: int, of_values: float) -> Tensor:
        rows = direct.unsqueeze(take(table, self.positions), [1])
        rows = rows.expand([rows.shape[0], heads - kv_heads, rows.shape[2]])
        return direct.concat([rows, constant(of_values, rows[:, :1]).expand([rows.shape[0], kv_heads, rows.shape[2]])], 1)

    @functools.cached_property
    def _place(self) -> tuple[Tensor, Tensor]:
        """Where the row's own key lies in a cache's half, int32 [n], and whether its block is granted."""
        block = pick(self._table, clamp(self._slots), self.positions // self._size)
        return clamp(block) * self._size + self.positions % self._size, both(self._carries, carried(block))

    @property
    def granted(self) -> tuple[Tensor, Tensor]:
        """Place of each row's own key, and whether it is stored."""
        return self._place

    def destinations(self, half: int, width: int) -> Tensor:
        """Where keys and values of each row go in the rows of a cache with halves of `half` rows, which has one to spare behind
        them: int32 [2 * n, width], the key's place before the value's."""
        key = half, width
        if key not in self._found:
            place, granted = self._place
            k, v = choose(granted, place, 2 * half), choose(granted, place + half, 2 * half)
            self._found[key] = direct.reshape(direct.stack([k, v], 1), [-1, 1]).expand([2 * place.shape[0], width])
        found: Tensor = self._found[key]
        return found

    def keys(self, row_bytes: int, reach: int) -> list[Keys]:
        """What rows attend to, the last `reach` keys (0: all), so many rows at a time that the copies stay within
        `MOST_GATHERED`, where keys and values of one position take `row_bytes`."""
        context = self._table.shape[1] * self._size
        most = max(1, MOST_GATHERED // (context * row_bytes))
        key = most, reach, "keys"
        if key not in self._found:
            self._found[key] = list(self._keys(context, most, reach))
        found: list[Keys] = self._found[key]
        return found

    def _keys(self, context: int, most: int, reach: int) -> Iterator[Keys]:
        size, rows = self._size, self._slots.shape[0]
        table = direct.unsqueeze(clamp(take(self._table, clamp(self._slots))) * size, [2])
        for begin in range(0, rows, most):
            end = min(begin + most, rows)
            some = slice(begin, end) if (begin, end) != (0, rows) else slice(None)
            places = direct.reshape(table[some] + numbers(size, table), [-1, context])
            key, position = direct.unsqueeze(numbers(context, table), [0]), direct.unsqueeze(self.positions[some], [1])
            visible = direct.less_equal(key, position)
            if reach:
                visible = both(visible, key > position - reach)
            own = direct.unsqueeze(self._place[0][some], [1]).expand([end - begin, context])
            hidden = (direct.cast(visible, paddle.float32) - 1.0) * HIDDEN
            yield Keys(begin, end, direct.where(visible, places, own), direct.unsqueeze(hidden, [1, 2]))

    def heads(self, keys: Keys, kv_heads: int, half: int) -> Tensor:
        """Of the places of `keys` the heads of keys, then those of values, in the rows of a cache seen as one head a row: int32
        [2 * n * G * C], head before place."""
        key = id(keys), kv_heads, half
        if key not in self._found:
            head = direct.unsqueeze(numbers(kv_heads, keys.places), [0, 2])
            k = direct.unsqueeze(keys.places * kv_heads, [1]) + head
            self._found[key] = direct.reshape(direct.stack([k, k + half * kv_heads], 0), [-1])
        found: Tensor = self._found[key]
        return found
