"""What core holds of the queue: streams, events, and the record of one unit of work.

The device makes streams and events, and its executor does what they ask; kernels, metadata and copies make work. Nothing runs
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from polydraft.device import Array
from polydraft_emulator.memory import Memory
from polydraft_emulator.schedule import Operation

if TYPE_CHECKING:
    from polydraft_emulator.execution import Executor


class Work:
    """What one operation does. `kind` and `name` are what triggers and costs match; `rows` its launch length; `uses`, memory and
    the arrays it was bound to; `spoils`, arrays that a failure poisons; `issued` runs on the host whenever this is issued.
    `operation`: the number under which it is observed, 0 for none."""

    __slots__ = ("issued", "kind", "name", "operation", "rows", "run", "spoils", "uses")

    def __init__(
        self,
        kind: str,
        name: str,
        rows: int,
        run: Callable[[], None],
        *,
        uses: tuple[tuple[Memory, Array], ...] = (),
        spoils: tuple[Array, ...] = (),
        issued: Callable[[], None] | None = None,
    ) -> None:
        self.kind, self.name, self.rows, self.run = kind, name, rows, run
        self.uses, self.spoils, self.issued = uses, spoils, issued
        self.operation = 0


class EmulatorStream:
    """A queue of work. `end_s`: when what was issued so far ends on the virtual clock."""

    def __init__(self, name: str, executor: Executor) -> None:
        self.name, self._executor = name, executor
        self.queue = executor.schedule.queue()
        self.end_s = 0.0

    def wait(self, event: EmulatorEvent) -> None:
        """Make later work wait for what `event` marks now; an event that marks nothing holds nothing up."""
        self._executor.hold(self, event)


class EmulatorEvent:
    """A point in a stream. Recording it again moves it; what waits for the old point still waits for that."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.mark: Operation | None = None
        self.end_s = 0.0

    def record(self, stream: EmulatorStream) -> None:
        """Move behind the work issued on `stream` so far."""
        self._executor.mark(self, stream)

    def query(self) -> bool:
        """True only when the marked point has been reached; asking may let the device make progress."""
        return self._executor.ask(self)

    def synchronize(self) -> None:
        """Wait; raises the `DeviceError` of whatever failed since the last wait."""
        self._executor.wait_for(self)
