"""Finds out which operations leave a place for the CPU: runs every kernel once in a separate process and reads Paddle's log.

`polydraft_off_device` calls `leaving`; the separate process runs this module. The log of chosen kernels is the only reliable
source: a black list in the environment moves operations to the CPU even where falling back is off, so Paddle's flags do not tell.
`refuse_lacking` is for a start that may not end on the CPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, NoReturn

from polydraft.child_process import Written, ending, running
from polydraft.device import DeviceCounters
from polydraft.environment import dictate
from polydraft.errors import DeviceError, PolydraftError
from polydraft_paddle.device_name import take_apart
from polydraft_paddle.installation import first_line

MARK: Final = "polydraft-probe:"
"""Begins the lines on standard error that say whose operations follow; behind it a contract, or nothing for those of nobody."""
FALLEN: Final = re.compile(r"missing \S+ kernel: (\w+), (?:.*\(.*, (\w+)\))?.*fallbacking to CPU one")
"""What Paddle's `kernel_factory` logs at level 3 when it takes the CPU's kernel for another place."""
LIMIT_S: Final = 300.0
_COMPLETE: Final[set[tuple[str, str]]] = set()
"""Places and activation dtypes in which every kernel ran: what a place has stays while Paddle is loaded, and a kit opens
it hundreds of times."""


class Fallen(NamedTuple):
    """An operation that Paddle took from the CPU: whose launch it was in, its name, and its dtype where Paddle says that."""

    contract: str
    operation: str
    dtype: str


def leaving(spec: str) -> dict[str, tuple[str, ...]]:
    """Operations that leave the place `spec`, by contract, in the order in which they were met; {} for the CPU itself. Raises
    `DeviceError` where a kernel does not run at all, or the process dies."""
    return {} if spec in ("", "cpu") else by_contract(_tried(spec))


def refuse_lacking(device: Any) -> None:
    """`DeviceError` where the place of an open device, which may not fall back to the CPU, lacks something that a kernel of this
    backend needs: it names the first such operation, its dtype and the contract. Every kernel runs on its contract's named cases:
    on the device itself, or in a separate process where Paddle does not heed the flag of falling back."""
    place = (device.spec, device.dtype)
    if device.host_visible or place in _COMPLETE:
        return
    if take_apart(device.spec).kind != "xpu":
        run_every_kernel(device)
        device.counters = DeviceCounters()
        _COMPLETE.add(place)
        return
    for fallen in _tried(device.spec, device.dtype):
        dtype = f" in {fallen.dtype}" if fallen.dtype else ""
        raise DeviceError(
            f"Paddle runs {fallen.operation!r}{dtype} on the CPU instead of on device {device.spec}, "
            f"which {fallen.contract or 'loading'} needs; polydraft doctor --probe xpu={device.spec} lists all of them, and "
            "--allow-cpu-fallback allows them"
        )
    _COMPLETE.add(place)


def _tried(spec: str, *dtypes: str) -> list[Fallen]:
    """What a separate process that runs every kernel on the place `spec` took from the CPU, in its activation dtypes or these."""
    command = running("polydraft_paddle.probe", spec, *dtypes)
    try:
        done = subprocess.run(  # noqa: S603  this interpreter, this module
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"trying every operation on {spec} did not end within {LIMIT_S:g} s; look at the device") from None
    if done.returncode < 0:
        *_, contract = ("", *(line[len(MARK) :].strip() for line in done.stderr.splitlines() if line.startswith(MARK)))
        where = f" in {contract}" if contract else ""
        raise DeviceError(
            f"trying every operation on {spec} ended the process ({ending(done.returncode)}){where}; "
            "see that its runtime was built for the installed Paddle, then run polydraft conform --level L2 to find the kernel"
        ) from Written(done.stderr)
    if done.returncode:
        said = (done.stdout or done.stderr).strip().splitlines()
        why = said[-1] if said else ending(done.returncode)
        raise DeviceError(f"trying every operation on {spec} failed: {why}") from Written(done.stderr)
    return list(read(done.stderr.splitlines()))


def read(lines: Iterable[str]) -> Iterator[Fallen]:
    """What the lines of a run say was taken from the CPU, in order."""
    contract = ""
    for line in lines:
        if line.startswith(MARK):
            contract = line[len(MARK) :].strip()
        elif found := FALLEN.search(line):
            yield Fallen(contract, found[1], found[2] or "")


def by_contract(fallen: Iterable[Fallen]) -> dict[str, tuple[str, ...]]:
    """Their names, each once a contract."""
    found: dict[str, dict[str, None]] = {}
    for one in fallen:
        found.setdefault(one.contract, {})[one.operation] = None
    return {name: tuple(operations) for name, operations in found.items()}


class Marking:
    """A provider that says on standard error when its launch begins and ends."""

    def __init__(self, contract: str, provider: Any) -> None:
        self._contract, self._provider = contract, provider

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        """Bind, and mark each launch."""
        launch = self._provider.bind(args, limits, workspace)

        def marked(stream: Any, n: int) -> None:
            mark(self._contract)
            launch(stream, n)
            mark("")

        return marked

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        """As the provider says."""
        return int(self._provider.workspace_bytes(args, limits))


def mark(contract: str) -> None:
    """Say whose operations follow."""
    sys.stderr.write(f"{MARK} {contract}\n")
    sys.stderr.flush()


def run_every_kernel(device: Any, *, marked: bool = False) -> None:
    """Launch every kernel on each named case of what it serves, in the device's activation dtype, marking launches on
    standard error where that is asked for."""
    from polydraft.conformance.harness import run_kernel
    from polydraft.contracts import COMPOSITES, REGISTRY
    from polydraft.contracts.inputs import contract_of
    from polydraft_paddle import polydraft_init_forward_meta, polydraft_kernels

    table: Any = polydraft_kernels(device)
    init_meta: Any = polydraft_init_forward_meta
    if marked:
        table.providers = {name: Marking(name, provider) for name, provider in table.providers.items()}
    for name in table.providers:
        kernel = COMPOSITES.get(name) or REGISTRY[name]
        for case in contract_of(kernel).cases():
            run_kernel(kernel, case, device, table, act=device.dtype, init_meta=init_meta)


def probe(spec: str, *dtypes: str) -> None:
    """Open the place with falling back allowed, and launch every kernel in each activation dtype, those of the place unless some
    are given."""
    from polydraft.backend import DeviceOptions
    from polydraft_paddle import dtypes_of, open_place

    for dtype in dtypes or dtypes_of(spec):
        device = open_place(spec, DeviceOptions(dtype=dtype, allow_cpu_fallback=True))
        run_every_kernel(device, marked=True)
        device.close()


def leave(said: str = "") -> NoReturn:
    """End this process at once, with status 1 and `said` where there is something to say.

    Nothing is torn down: with this log on, Paddle 3.3 corrupts its heap on a busy machine, dies of it in its exit handlers
    ("double free or corruption"), and its handler of that signal then waits for itself.
    """
    if said:
        sys.stdout.write(f"{said}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if said else 0)


if __name__ == "__main__":
    dictate("GLOG_vmodule", "kernel_factory=3")
    dictate("GLOG_minloglevel", "0")
    dictate("GLOG_logtostderr", "1")
    try:
        probe(*sys.argv[1:])
    except PolydraftError as error:
        leave(f"{error}")
    except Exception as error:  # noqa: BLE001  whatever a framework raises becomes one line
        leave(f"{type(error).__name__}: {first_line(error)}")
    leave()
