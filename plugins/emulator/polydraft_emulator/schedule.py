"""Chooses the order in which queued work runs: one of the linear extensions of stream order and event edges, chosen by a seed.

The device submits operations and says what the host waits for. Operations run one at a time, each after everything it must come
after. What an operation does is not looked at.

Issue order is always a legal order, because an event is recorded before something waits for it. The policies:

* `random`: at each wait a coin decides between the fewest operations that must run and any that may; more may follow, and some
  run without being asked for, seldom or often, as the seed says.
* `lazy`: nothing but what the wait needs.
* `fifo`: issue order, up to what is waited for.
* `reversed`: of the operations that may run, always the one issued last.
* `eager`: everything at once when it is issued.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

QUEUED, DONE, DROPPED = range(3)
EAGERNESS = (0.0, 0.02, 0.2, 0.7)
"""Chances of which the policy `random` draws one a device: that work is done when something is issued."""


class Operation:
    """One unit of device work. `work` is the device's business; `after`: operations of other streams that come
    first; `delay_s`: not None when it is put off while anything else may run. `state` is QUEUED, then DONE, or DROPPED when an
    earlier failure made it void."""

    __slots__ = ("after", "delay_s", "index", "name", "queue", "state", "work")

    def __init__(
        self,
        name: str,
        queue: deque[Operation],
        work: Sequence[Any] = (),
        *,
        after: tuple[Operation, ...] = (),
        delay_s: float | None = None,
    ) -> None:
        self.name, self.queue, self.work, self.after, self.delay_s = name, queue, work, after, delay_s
        self.index = -1
        self.state = QUEUED

    def ready(self) -> bool:
        """Whether what comes first on other streams is done."""
        return all(operation.state == DONE for operation in self.after)


class Schedule:
    """Queues, one a stream, and the policy that empties them. `run` executes one operation."""

    def __init__(self, policy: str, seed: int, run: Callable[[Operation], None]) -> None:
        self.policy, self._run = policy, run
        self._draw = random.Random(seed).random  # noqa: S311  no secret: its sequence is the same on every Python
        self._queues: list[deque[Operation]] = []
        self._issued = 0
        self._eagerness = EAGERNESS[int(self._draw() * len(EAGERNESS))] if policy == "random" else 0.0

    def queue(self) -> deque[Operation]:
        """A new stream's queue."""
        self._queues.append(deque())
        return self._queues[-1]

    @property
    def outstanding(self) -> int:
        """Operations that have not run."""
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[Operation]:
        """What has not run, stream by stream."""
        for queue in self._queues:
            yield from queue

    # -- what the host does ------------------------------------------------------------------------
    def submit(self, operation: Operation) -> None:
        """Queue an operation; the policy may run something now."""
        operation.index = self._issued
        self._issued += 1
        operation.queue.append(operation)
        if self.policy == "eager":
            while self._step():
                pass
        elif self._eagerness and self._draw() < self._eagerness:
            self._advance(3)

    def reach(self, target: Operation) -> None:
        """The host waits for `target`: run until it is done or dropped."""
        fewest = self.policy == "lazy" or (self.policy == "random" and self._draw() < 0.5)
        while target.state == QUEUED:
            if fewest or not self._step():
                self._run_ancestors(target)
        if self.policy == "random" and self._draw() < 0.3:
            self._advance(200)

    def drain(self) -> None:
        """Run everything."""
        while self._step(even_delayed=True):
            pass

    def query(self) -> None:
        """The host asks whether something is done: now and then the device makes progress, so that no host asks for ever."""
        if self._draw() < 0.5:
            self._advance(8, even_delayed=self._draw() < 0.25)

    def coin(self) -> bool:
        """One seeded choice of something else than order."""
        return self._draw() < 0.5

    def drop(self) -> None:
        """Make everything void that has not run."""
        for queue in self._queues:
            for operation in queue:
                operation.state = DROPPED
            queue.clear()

    # -- order -------------------------------------------------------------------------------------
    def _advance(self, most: int, *, even_delayed: bool = False) -> None:
        """Run up to `most` operations, how many being one more choice."""
        for _ in range(1 + int(self._draw() * most)):
            if not self._step(even_delayed=even_delayed):
                return

    def _step(self, *, even_delayed: bool = False) -> bool:
        """Run one operation that may run now; False when there is none, or only such as are put off."""
        heads = [queue[0] for queue in self._queues if queue and queue[0].ready()]
        prompt = [head for head in heads if head.delay_s is None]
        if not prompt and not (even_delayed and heads):
            return False
        self._execute(self._choose(prompt or heads))
        return True

    def _choose(self, heads: list[Operation]) -> Operation:
        if len(heads) == 1:
            return heads[0]
        if self.policy in ("random", "lazy"):
            return heads[int(self._draw() * len(heads))]
        return (max if self.policy == "reversed" else min)(heads, key=lambda operation: operation.index)

    def _run_ancestors(self, target: Operation) -> None:
        """Run what `target` comes after, and it, and nothing else."""
        wanted = [target]
        while wanted:
            if wanted[-1].state != QUEUED:
                wanted.pop()
                continue
            head = wanted[-1].queue[0]
            first = next((operation for operation in head.after if operation.state == QUEUED), None)
            if first is None:
                self._execute(head)
            else:
                wanted.append(first)

    def _execute(self, operation: Operation) -> None:
        operation.queue.popleft()
        operation.state = DONE
        if operation.work:
            self._run(operation)
