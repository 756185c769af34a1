"""Messages of rank 0 to another rank in memory that both have: to put one there, or to look for one, takes no system call.

There are places for some short messages, used in turn. Whoever puts one counts it last, and whoever takes one counts that. A
processor may show the count before the message, so this is there once its checksum is right, and not while memory is still 0.
Both sides look as often as they want; one that looks no more says so (`asleep`), and the other one then has to wake it by other
means.
"""

from __future__ import annotations

from typing import Any, Final
from zlib import crc32

PLACES: Final = 32
ROOM: Final = 8192 - 8
"""Bytes of a message at most."""
_PUT, _TAKEN, _ASLEEP, _HEAD = 0, 8, 16, 24
"""Words in front of the places: each of the three has a cache line of its own."""
_LOW: Final = (1 << 32) - 1
NBYTES: Final = 8 * _HEAD + PLACES * (ROOM + 8)


class Mailbox:
    """One side's view. One thread puts messages, and one takes them."""

    def __init__(self, memory: Any) -> None:
        """`memory`: `NBYTES` writable bytes that begin at a multiple of 8, all 0 at first."""
        self._bytes = memoryview(memory).cast("B")
        self._words = self._bytes.cast("Q")

    def put(self, message: bytes) -> bool:
        """Put a message, and say whether there was a place for it. It has `ROOM` bytes at most."""
        words = self._words
        count = words[_PUT]
        if count - words[_TAKEN] == PLACES:
            return False
        size, begin = len(message), _begin(count)
        self._bytes[8 * (begin + 1) : 8 * (begin + 1) + size] = message
        words[begin] = crc32(message, count + 1 & _LOW) << 32 | size
        words[_PUT] = count + 1
        return True

    def take(self) -> bytes | None:
        """The next message; None where there is none yet."""
        words = self._words
        count = words[_TAKEN]
        if count == words[_PUT]:
            return None
        begin = _begin(count)
        said = words[begin]
        message = bytes(self._bytes[8 * (begin + 1) : 8 * (begin + 1) + min(said & _LOW, ROOM)])
        if crc32(message, count + 1 & _LOW) != said >> 32:
            return None
        words[_TAKEN] = count + 1
        return message

    @property
    def behind(self) -> int:
        """Messages that were put and not taken yet."""
        return self._words[_PUT] - self._words[_TAKEN]

    @property
    def asleep(self) -> bool:
        """Whether the side that takes messages does not look for them."""
        return self._words[_ASLEEP] != 0

    @asleep.setter
    def asleep(self, so: bool) -> None:
        self._words[_ASLEEP] = so


def _begin(count: int) -> int:
    """The first word of the place of a message: checksum and size, and the message behind it."""
    return _HEAD + count % PLACES * (ROOM // 8 + 1)
