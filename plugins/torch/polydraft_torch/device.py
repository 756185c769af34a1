"""The device: host memory, one queue, one thread that works it off. Launches and copies return before they have run.

Core opens it through the hook, kernels enqueue on it. What a piece of work raises is kept and raised by the next wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from polydraft.device import Array, Buffer, Stream
from polydraft.errors import DeviceError
from polydraft.reference.device import ReferenceDevice
from polydraft.reference.provider import NumpyProvider

Work = Callable[[], object]


class TorchEvent:
    """A point in the queue; one that was never recorded counts as reached."""

    def __init__(self, device: TorchDevice) -> None:
        self._device, self._reached = device, threading.Event()
        self._reached.set()

    def record(self, stream: Stream) -> None:
        """Stand for the point behind all work so far. An earlier point keeps its own flag: work that sets it may still run."""
        self._reached = threading.Event()
        self._device.enqueue(stream, self._reached.set)

    def query(self) -> bool:
        """Whether it has been reached."""
        return self._reached.is_set()

    def synchronize(self) -> None:
        """Block until it has been reached; raise what went wrong before it."""
        self._device.counters.host_syncs += 1
        self._reached.wait()
        self._device.raise_failure()


class TorchDevice(ReferenceDevice):
    """The reference's memory and copies, done by a thread."""

    provider = NumpyProvider  # enqueues, where the reference's own calls at once

    def __init__(self) -> None:
        super().__init__("cpu")
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="polydraft-torch", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with torch.inference_mode(), np.errstate(all="ignore"):
            while (work := self._queue.get()) is not None:
                try:
                    work()
                except Exception as error:  # noqa: BLE001  whatever it is, the host is told at its next wait
                    self._failure = self._failure or error

    def enqueue(self, stream: Stream, work: Work) -> None:
        """Have `work` done behind all that was enqueued before."""
        del stream
        self._queue.put(work)

    def raise_failure(self) -> None:
        """Raise what a piece of work has raised, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise DeviceError(f"a launch failed with {type(failure).__name__}: {failure}; open a new engine") from failure

    def event(self) -> TorchEvent:
        """As `Device.event`."""
        return TorchEvent(self)

    def load(self, target: Buffer, value: Array) -> None:
        """As `Device.load`: behind all work, for the host writes here itself."""
        self.settle()
        super().load(target, value)

    def settle(self) -> None:
        """Block until the queue is empty."""
        if self._open:
            done = threading.Event()
            self._queue.put(done.set)
            done.wait()

    def synchronize(self) -> None:
        """As `Device.synchronize`."""
        self.counters.host_syncs += 1
        self.settle()
        self.raise_failure()

    def close(self) -> None:
        """Finish, end the thread, and refuse further allocation."""
        if self._open:
            self._queue.put(None)
            self._thread.join()
        super().close()


def tensor_of(value: Any) -> Any:
    """The memory of a buffer or weight as a tensor; anything else as it is."""
    array = getattr(value, "host_array", getattr(value, "array", None))
    return value if array is None else torch.from_numpy(array)
