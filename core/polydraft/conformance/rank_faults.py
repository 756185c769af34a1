"""Faults of collectives: sums and choices that are wrong on some ranks, and ranks that do not take part.

Faulty backends apply them around the hook `polydraft_collectives` of any backend. A faulty collective computes a change of the
golden of all ranks on the host: each rank brings all its arguments to the place where ranks meet, and takes back its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from polydraft.backend import Collectives
from polydraft.conformance import fault_injection as by
from polydraft.conformance.target import bare, wrap
from polydraft.contracts import COLLECTIVES
from polydraft.contracts.base import ParamSpec
from polydraft.contracts.compare import from_host, to_host
from polydraft.sentinels import NO_TOKEN


def with_collectives(change: Callable[[Collectives, Any, Any], dict[str, Any]]) -> by.Break:
    """A backend with some collectives replaced: `change(collectives, device, group)`."""

    def changed(answer: Collectives, device: Any, group: Any) -> Collectives:
        # without its pass, whose kernels would be launched in the place of what is changed
        return Collectives({**answer.providers, **change(answer, bare(device), group)}, answer.versions)

    return lambda plugin: wrap(plugin, polydraft_collectives=changed)


def computed(contract: str, corrupt: by.Corrupt) -> by.Break:
    """Replace a collective by a change of its golden."""
    return with_collectives(lambda answer, device, group: {contract: Computed(contract, corrupt, device, group)})


def skipping(contract: str, rank: int) -> by.Break:
    """A rank does not take part in a collective."""
    return with_collectives(lambda answer, device, group: {contract: Absent()} if group.rank == rank else {})


class Absent:
    """A provider whose launches do nothing."""

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        """Take everything."""
        del args, limits, workspace
        return lambda stream, n: None

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        """None."""
        del args, limits
        return 0


class Computed:
    """A provider of one rank that computes a collective on the host, with a fault."""

    def __init__(self, contract: str, corrupt: by.Corrupt, device: Any, group: Any) -> None:
        self._contract, self._corrupt, self._device, self._group = COLLECTIVES[contract], corrupt, device, group

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        """Allocate the staging now; a launch waits, reads, exchanges, computes and writes."""
        del limits, workspace
        contract, device, group, specs = self._contract, self._device, self._group, self._contract.args.specs()
        buffers = {name: buffer for name, (buffer, _) in args.buffers().items()}
        with by.uncounted(device):
            pins = {n: device.staging(f"mutant.{n}", buffer.shape, buffer.dtype) for n, buffer in buffers.items()}
            event = device.event()
        fixed = {n: getattr(args, n) for n, spec in specs.items() if isinstance(spec, ParamSpec)}
        swap = group.swapper("all_gather", pins["step"].array if "step" in pins else np.zeros(1, np.int32))

        def brought(name: str, n: int) -> Any:
            return np.stack([from_host(one, buffers[name].dtype) for one in swap(n, pins[name].array)])

        def launch(stream: Any, n: int) -> None:
            with by.uncounted(device):
                for name, buffer in buffers.items():
                    device.download(stream, pins[name], buffer, buffer.shape[0])
                event.record(stream)
                event.synchronize()
                a = SimpleNamespace(**fixed, **{name: brought(name, n) for name in buffers}, rank=group.rank)
                self._corrupt(contract.golden, a, n)
                for name, buffer in buffers.items():
                    pins[name].array[...] = to_host(getattr(a, name)[group.rank], buffer.dtype)
                    device.upload(stream, buffer, pins[name], buffer.shape[0])
                event.record(stream)
                event.synchronize()

        return launch

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        """None."""
        del args, limits
        return 0


# -- changes of goldens ------------------------------------------------------------------------------
def own_first(golden: by.Golden, a: Any, n: int) -> None:
    """Each rank adds its own terms first, then those of the others as they arrive."""
    del golden
    terms = np.roll(a.x.astype(np.float32), -a.rank, axis=0)
    for other in terms[1:]:
        terms[0] = terms[0] + other
    a.x[a.rank, :n] = terms[0, :n]


def one_after_the_other(golden: by.Golden, a: Any, n: int) -> None:
    """Rank by rank: the same bits on all ranks, and other ones than those of the tree."""
    del golden
    terms = a.x.astype(np.float32)
    for other in terms[1:]:
        terms[0] = terms[0] + other
    a.x[:, :n] = terms[0, :n]


def last_of_equals(golden: by.Golden, a: Any, n: int) -> None:
    """Among ranks with the same highest logit the last one wins."""
    golden(a, n)
    ranks, width = len(a.logits), a.logits.shape[2]
    for r in range(n):
        if (token := int(a.tokens[0, r])) == NO_TOKEN:
            continue
        row = np.concatenate([share[r] for share in a.logits])[: a.num_valid]
        equal = [rank for rank in range(ranks) if (row[rank * width : (rank + 1) * width] == row[token]).any()]
        own = row[equal[-1] * width : (equal[-1] + 1) * width]
        a.tokens[:, r] = equal[-1] * width + int(np.argmax(own == row[token]))


def padding_takes_part(golden: by.Golden, a: Any, n: int) -> None:
    """Columns of padding are tokens like others."""
    a.num_valid = len(a.logits) * a.logits.shape[2]
    golden(a, n)


def padding_is_kept(golden: by.Golden, a: Any, n: int) -> None:
    """What does not fit is cut off at the front."""
    ranks, _, width = a.x.shape
    spare = ranks * width - a.out.shape[2]
    whole = np.concatenate(list(a.x[:, :n]), axis=1)
    golden(a, n)
    a.out[:, :n] = whole[:, spare:]


def own_choice(golden: by.Golden, a: Any, n: int) -> None:
    """Every rank goes on with the tokens that it has chosen itself."""


def rows_beyond(golden: by.Golden, a: Any, n: int) -> None:
    """The sum of a row more than was launched."""
    golden(a, min(n + 1, a.x.shape[1]))


def counted_among_all(golden: by.Golden, a: Any, n: int) -> None:
    """Experts of a rank keep the numbers that they have among all."""
    golden(a, n)
    for rank in range(len(a.own)):
        mine = a.own[rank, :n] >= 0
        a.own[rank, :n] = np.where(mine, a.expert_ids[rank, :n], a.own[rank, :n])


def dealt_in_turn(golden: by.Golden, a: Any, n: int) -> None:
    """Expert e is rank e mod N's."""
    del golden
    for rank in range(len(a.own)):
        ids = a.expert_ids[rank, :n]
        a.own[rank, :n] = np.where((ids >= 0) & (ids % len(a.own) == rank), ids // len(a.own), -1)
