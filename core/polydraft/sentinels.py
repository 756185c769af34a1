"""The few magic numbers of the project: sentinels in device arrays, slot phases and finish reasons.

Every kernel, the runtime and the conformance kit read them from here, so a number has one name and one explanation. There is no
behaviour in this module.
"""

from enum import IntEnum
from typing import Final

PAD_SLOT: Final = -1
"""Slot index of a row that carries nothing: every kernel skips rows whose slot is negative."""

NO_TOKEN: Final = -1
"""Token id of an empty place in a window, a draft list or a history; also what a row of NaN logits chooses."""

NO_BLOCK: Final = -1
"""Block-table entry without a granted block: such an entry is never read or written through."""

NO_ROW: Final = -1
"""Row index of a sequence that has no such row in this launch (its output is zeroed)."""

NO_LIMIT: Final = -1
"""Length of thinking, or of a reply, that is not limited."""

THINKING: Final = -1
"""Place where the reply begins, of a text that thinks."""


class Phase(IntEnum):
    """What a slot is doing; stored as int32 in the device's slot state.

    ::

                 scatter                   last prompt row committed
        IDLE ------------------> PREFILL ----------------------------> DECODE <---+
         ^                          |                                 |  |  |     | blocks granted
         |                          | stop, length, error             |  |  |     | (reserve_blocks)
         |                          v                                 |  |  +-> PAUSED
         +----------------------- FINISHED <--------------------------+  +- one window a step
           slot given to the next request (its last in-flight snapshot has been applied)
    """

    IDLE = 0
    PREFILL = 1
    DECODE = 2
    PAUSED = 3
    FINISHED = 4


class Draw(IntEnum):
    """Which of a position's independent random draws: the counter of `gumbel_noise` and `uniform_noise` holds it."""

    TARGET = 0
    """The target's own token; with coupled verification drafts share it."""
    DRAFT = 1
    """A draft under rejection verification, which must not know the target's."""
    ACCEPT = 2
    """Whether that draft is accepted."""


class Finish(IntEnum):
    """Why a request ended; int32 on the device, the lower-case name in every public record."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REFUSED = 5
    """The host's alone: the request asked for what turned out not to be possible."""
