"""Messages of rank 0 to another rank in memory that both have: to put one there, or to look for one, takes no system call.

There are places for some short messages, used in turn. In front of each is a word with the size and the checksum of what lies
there; 0 says that there is nothing, and whoever takes a message writes that. A processor may show the word before the message,
so this is there once its checksum is right. A message that is a number is the word itself, and nothing lies behind it: the
message of most steps, which are short. What the other side has in its cache takes long to reach: a message of up to 56 bytes is
one line of it with its word, and to put such a message there is to reach for no other.

Both sides look as often as they want; one that looks no more says so (`asleep`), and the other one then has to wake it by other
means.
"""

from __future__ import annotations

from typing import Any, Final
from zlib import crc32

PLACES: Final = 32
ROOM: Final = 8192 - 8
"""Bytes of a message at most."""
_ASLEEP, _HEAD = 0, 8
"""Words in front of the places: a line of the cache."""
_PLACE: Final = ROOM // 8 + 1
"""Words of a place: checksum and size, and the message behind it."""
_LOW: Final = (1 << 32) - 1
NUMBERS: Final = 1 << 63
"""How many numbers can be messages."""
Message = bytes | int
"""At most `ROOM` bytes, or one of `NUMBERS`."""
NBYTES: Final = 8 * (_HEAD + PLACES * _PLACE)


class Mailbox:
    """One side's view, from the first message on. One thread puts messages, and one takes them."""

    def __init__(self, memory: Any) -> None:
        """`memory`: `NBYTES` writable bytes that begin at a multiple of 8, all 0 at first."""
        self._bytes = memoryview(memory).cast("B")
        self._words = self._bytes.cast("Q")
        self._count = 0
        """Messages that were put, on the side that takes them taken."""

    def put(self, message: Message) -> bool | None:
        """Put a message. Returns whether the side that takes messages sleeps and has to be woken, None without a place for it."""
        words, count = self._words, self._count
        place = _HEAD + count % PLACES * _PLACE
        if words[place]:
            return None
        self._count = count + 1
        if isinstance(message, int):
            words[place] = message << 1 | 1
        else:
            size, begin = len(message), 8 * (place + 1)
            self._bytes[begin : begin + size] = message
            words[place] = crc32(message, count + 1 & _LOW) << 32 | size << 1
        return words[_ASLEEP] != 0

    def take(self) -> Message | None:
        """The next message; None where there is none yet."""
        words, count = self._words, self._count
        place = _HEAD + count % PLACES * _PLACE
        said = words[place]
        if not said:
            return None
        message: Message
        if said & 1:
            message = said >> 1
        else:
            begin = 8 * (place + 1)
            message = bytes(self._bytes[begin : begin + min((said & _LOW) >> 1, ROOM)])
            if crc32(message, count + 1 & _LOW) != said >> 32:
                return None
        words[place] = 0
        self._count = count + 1
        return message

    @property
    def behind(self) -> int:
        """Messages that were put and not taken yet."""
        return sum(self._words[place] != 0 for place in range(_HEAD, _HEAD + PLACES * _PLACE, _PLACE))

    @property
    def asleep(self) -> bool:
        """Whether the side that takes messages does not look for them."""
        return self._words[_ASLEEP] != 0

    @asleep.setter
    def asleep(self, so: bool) -> None:
        if so != self.asleep:  # else the other side would have to reach for it anew
            self._words[_ASLEEP] = so
