"""One generation request as the host sees it: its prompt and parameters, its state, and what it has produced.

The engine makes it, the scheduler places it in a slot, commit ends it. It holds no device words and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from polydraft.program.declare import Prepared
from polydraft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from polydraft.sampling.grammars import Binding


class Status(Enum):
    """Where a request stands.

    ::

        WAITING --admitted--> RUNNING --finished, aborted, failed--> FINISHED
           ^                     |
           +-----preempted-------+      (blocks ran out; known tokens are kept and prefilled again)
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A request and its results. `token_ids` and `rounds` are complete once it is finished; while it runs the slot table
    has them."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    number: int
    """Order of arrival; smaller is served first."""
    seed: tuple[int, int]
    """Two 32-bit words."""
    stop_token_ids: tuple[int, ...]
    max_total: int
    """Prompt and generated tokens allowed."""
    prepared: Prepared = field(default_factory=dict)
    """What the stages of logits processing that it wants keep of it, by stage."""
    stream: bool = False
    status: Status = Status.WAITING
    slot: int = -1
    token_ids: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    """Accepted drafts of each decode round."""
    round_drafts: list[int] = field(default_factory=list)
    """Drafts that each of them verified."""
    round_lookups: list[int] = field(default_factory=list)
    """Those of them, the last ones, that were looked up beside a model's."""
    binding: Binding | None = None
    """What binds its output."""
    forced: set[int] = field(default_factory=set)
    """Places of output tokens that a constraint left no choice for; those after the text so far are guesses."""
    drafted: int = 0
    """Drafts verified."""
    reported: tuple[int, int] = (0, 0)
    """Tokens and rounds that were reported so far; while it is in a slot the slot table has them."""
    finish_reason: str | None = None
    error: str = ""
    num_preemptions: int = 0
    recompute: bool = False
    """Whether all its rows are computed anew when it is admitted, without shared blocks."""
    arrival_s: float = 0.0
    first_token_s: float | None = None
    finish_s: float | None = None

    @property
    def processed(self) -> bool:
        """Whether its logits change before a token is chosen."""
        return bool(self.prepared)

    @property
    def ready(self) -> bool:
        """Whether it may be admitted, when it waits: what its first step needs of its grammar is there."""
        return self.binding is None or self.binding.ready

    @property
    def begun(self) -> bool:
        """Whether it has been in a slot, when it waits: then it was preempted there."""
        return self.num_preemptions > 0

    @property
    def num_known(self) -> int:
        """Tokens known when the request is not in a slot: prompt and what it had generated before it was preempted."""
        return len(self.prompt_ids) + len(self.token_ids)
