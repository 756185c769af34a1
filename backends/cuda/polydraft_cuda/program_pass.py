"""Which launches of a program become one on a GPU, and which may begin early: the pass over unbound programs that core runs.

Each rule looks at consecutive launches, at what stands in front of them, and at their shapes; kernels are in `kernels/`, and this
module binds none. Nothing is remembered from one program to the next, and no provider knows what another was bound to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from polydraft.contracts.base import Provider
from polydraft.plugins.program_pass import Entry, Node, OwnKernel, Rewritten, UnboundProgram
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import attention, collectives, leaves, linear, logprobs, norms, routed
from polydraft_cuda.kernels.provider import Kernel
from polydraft_cuda.ranks import MeetingPlace

Lend = Callable[[Any], Any]
"""An argument record as kernels of this package see it."""


def _of_projection(device: CudaDevice, args: Any, limits: Any) -> int:
    """Scratch of the projection that a run has first."""
    return linear.workspace_bytes(device, next(one for one in args.parts if hasattr(one, "bias")), limits)


_ROUTED: Final = {
    "routed_and_shared_experts": (*routed.ROUTED, *routed.SHARED, *routed.ADDED, "rms_norm"),
    "routed_experts": (*routed.ROUTED, *routed.ADDED, "rms_norm"),
    "last_routed_and_shared_experts": (*routed.ROUTED, *routed.SHARED, *routed.ADDED),
    "last_routed_experts": (*routed.ROUTED, *routed.ADDED),
}
"""Halves with experts, by what they have; those behind which no norm follows are the last of a model."""


def _of_rows(device: CudaDevice, args: Any, limits: Any) -> int:
    """Scratch of what a run begins with looking at."""
    return logprobs.survey_bytes(device, args.parts[0], limits)


_ROUNDED: Final = {
    f"{norm}_{product}": ((*front, *behind), early)
    for norm, front, early in (
        ("norm", ("rms_norm",), False),
        ("added_norm", ("residual_add", "rms_norm"), False),
        ("early_added_norm", ("residual_add", "rms_norm"), True),
    )
    for product, behind in (("and_projection", ("linear",)), ("and_gated", ("linear", "swiglu")))
}
"""Norms that round their rows for the projection behind, by name: the contracts, and whether the stream is read early."""

VERIFY: Final = "verify"
"""The stage in which texts are chosen. Other choices are of drafts, which change no text."""
CHOICE: Final = ("linear", "process_logits", "argmax")
"""A head and the greedy choice behind it."""
KERNELS: Final[Mapping[str, tuple[tuple[str, ...], Kernel]]] = {
    "reported": (("top_logprobs", "pack_logprobs"), Kernel(logprobs.reported, _of_rows)),
    "gated": (("linear", "swiglu"), Kernel(linear.gated, _of_projection)),
    "summed": (("linear_leaves", "sum_leaves"), Kernel(leaves.summed)),
    "chosen": (CHOICE, Kernel(linear.chosen, _of_projection)),
    "screened": (CHOICE, Kernel(linear.screened, _of_projection)),
    "kept": (CHOICE, Kernel(linear.kept, _of_projection)),
    "turned_attention": (("rope_kv_write", "paged_attention"), Kernel(attention.turned_attention)),
    "early_norm": (("residual_add", "rms_norm"), Kernel(norms.add_and_norm_early)),
    **{
        name: (parts, Kernel(partial(linear.behind_norm, early=early), _of_projection))
        for name, (parts, early) in _ROUNDED.items()
    },
    **{name: (parts, Kernel(routed.routed_experts, routed.workspace_bytes)) for name, parts in _ROUTED.items()},
}
"""Kernels of the pass by name: the contracts that each computes, and its binding."""


def kernels_of_ranks(place: MeetingPlace) -> Mapping[str, tuple[tuple[str, ...], Kernel]]:
    """The same of those that meet other ranks, at `place`."""
    summed = ("all_reduce", "residual_add", "rms_norm")
    return {
        "norm_of_sum": (summed, Kernel(partial(collectives.norm_of_sum, place, False))),
        "early_norm_of_sum": (summed, Kernel(partial(collectives.norm_of_sum, place, True))),
        "chosen_of_ranks": (("linear", "argmax_pair"), Kernel(partial(collectives.chosen, place), _of_projection)),
    }


class CudaPass:
    """The `ProgramPass` of one device. `provider` makes a provider of a kernel, `lend` says what it will see of a record, and
    `place` is where ranks meet, if there are several."""

    def __init__(
        self, device: CudaDevice, provider: Callable[[Kernel], Provider], lend: Lend = lambda record: record,
        place: MeetingPlace | None = None,
    ) -> None:  # fmt: skip
        self._device, self._lend, self._place = device, lend, place
        kernels = {**KERNELS, **(kernels_of_ranks(place) if place else {})}
        self.kernels: Mapping[str, OwnKernel] = {
            name: OwnKernel(parts, provider(kernel)) for name, (parts, kernel) in kernels.items()
        }

    def rewrite(self, program: UnboundProgram) -> Sequence[Entry]:
        """The program with the runs that some rule takes."""
        found: list[Entry] = []
        place = 0
        while place < len(program.entries):
            taken = next(filter(None, self._rules(program, place)), None)
            found.append(taken or program.entries[place])
            place += len(taken.nodes) if taken else 1
        return found

    def _rules(self, program: UnboundProgram, place: int) -> Iterator[Rewritten | None]:
        """What each rule makes of the launches from `place` on."""
        yield self._gated(program, place)
        yield self._summed(program, place)
        yield self._chosen(program, place)
        yield self._turned(program, place)
        yield self._routed(program, place)
        yield self._rounded(program, place)
        yield self._early(program, place)
        yield self._reported(program, place)
        if self._place is not None:
            yield self._norm_of_sum(program, place)
            yield self._chosen_of_ranks(program, place, self._place)

    def _gated(self, program: UnboundProgram, place: int) -> Rewritten | None:
        nodes = _run(program, place, ("linear", "swiglu"))
        if not nodes:
            return None
        project, activate = _args(nodes)
        if activate.gate_up is not project.out or not linear.is_gated(self._device, self._lend(project)):
            return None
        why = "gate and up are not stored, which nobody else reads"
        return _unless_read(program, place, Rewritten(nodes, "gated", why, (project.out,), beside_graphs=True))

    def _summed(self, program: UnboundProgram, place: int) -> Rewritten | None:
        nodes = _run(program, place, ("linear_leaves", "sum_leaves"))
        if not nodes:
            return None
        project, total = _args(nodes)
        if total.x is not project.out or total.leaves != project.leaves:
            return None
        if not leaves.is_summed(self._device, self._lend(project)):
            return None
        why = "leaves are added where they are computed, and not stored, which nobody else reads"
        return _unless_read(program, place, Rewritten(nodes, "summed", why, (project.out,)))

    def _chosen(self, program: UnboundProgram, place: int) -> Rewritten | None:
        nodes = _run(program, place, CHOICE)
        if not nodes:
            return None
        project, process, choice = _args(nodes)
        padded = process.num_valid < project.out.shape[1]
        if process.logits is not project.out or choice.logits is not project.out or padded:
            return None
        if not linear.is_chosen_from(self._device, self._lend(project)):
            return None
        found = "the highest logit of a row is found where logits are computed"
        judged = nodes[-1].stage == VERIFY
        kernel = "chosen" if judged and self._device.row_invariant else "screened"
        alone = Rewritten(nodes, kernel, f"{found}; they are not stored, and nobody else reads them", (project.out,))
        return _unless_read(program, place, alone) or Rewritten(nodes, "kept", found)

    def _turned(self, program: UnboundProgram, place: int) -> Rewritten | None:
        nodes = _run(program, place, ("rope_kv_write", "paged_attention"))
        if not nodes:
            return None
        turn, attend = _args(nodes)
        shared = ("row_slot", "positions", "block_table", "cache", "meta")
        if turn.q_out is not attend.q or any(getattr(turn, name) is not getattr(attend, name) for name in shared):
            return None
        behind = _is_written_in_front(program, place, turn.qkv)
        if not behind or not attention.turns_inside(self._device, self._lend(turn), self._lend(attend), program.limits):
            return None
        why = "attention turns and stores the rows that the projection in front writes"
        return _unless_read(program, place, Rewritten(nodes, "turned_attention", why, (turn.q_out,)))

    def _routed(self, program: UnboundProgram, place: int) -> Rewritten | None:
        for kernel, parts in _ROUTED.items():
            nodes = _run(program, place, parts if parts[-1] == "residual_add" else (*parts[:-2], "residual_add+rms_norm"))
            if not nodes:
                continue
            project, choice, *shared, experts, end = _args(nodes)
            same = choice.logits is project.out and experts.x is project.x and getattr(end, "parts", (end,))[0].y is experts.out
            same = same and all(getattr(experts, name) is getattr(choice, name) for name in ("expert_ids", "expert_weights"))
            shares: Any = None
            dead: tuple[Any, ...] = (experts.out,)
            if shared:
                up, activation, down = shared
                same = same and up.x is project.x and activation.gate_up is up.out and down.x is activation.out
                shares, dead = down.out, (up.out, experts.out)
            if shares is not experts.shared or not same:
                continue
            if routed.is_routed(self._device, self._lend(project), self._lend(experts)):
                why = "experts are chosen and listed before the shared ones run, and added to the stream where they are summed"
                return _unless_read(program, place, Rewritten(nodes, kernel, why, dead))
        return None

    def _rounded(self, program: UnboundProgram, place: int) -> Rewritten | None:
        nodes = _run(program, place, ("residual_add+rms_norm", "linear")) or _run(program, place, ("rms_norm", "linear"))
        if not nodes or self._chosen(program, place + 1):
            return None
        front, project = _args(nodes)
        normed = getattr(front, "parts", (front,))[-1]
        if project.x is not normed.out or not linear.is_rounded(self._device, self._lend(normed), self._lend(project)):
            return None
        gated = self._gated(program, place + 1)
        early = "early_" if self._early(program, place) else ""
        kernel = f"{early}{'added_' if normed is not front else ''}norm_and_{'gated' if gated else 'projection'}"
        why = "rows are rounded for the projection where they are normed, and not stored otherwise, which nobody else reads"
        whole, dead = (nodes[0], *gated.nodes) if gated else nodes, (normed.out, *(gated.dead if gated else ()))
        return _unless_read(program, place, Rewritten(whole, kernel, why, dead, beside_graphs=True))

    def _early(self, program: UnboundProgram, place: int) -> Rewritten | None:
        nodes = _run(program, place, ("residual_add+rms_norm",))
        if not nodes:
            return None
        added = _args(nodes)[0].parts[0].y
        by_leaf = self._summed(program, place - 2) if place > 1 else None
        if not _is_written_in_front(program, place, added) and not (by_leaf and _args(by_leaf.nodes)[-1].out is added):
            return None
        return Rewritten(nodes, "early_norm", "the stream is read while the projection in front still runs")

    def _reported(self, program: UnboundProgram, place: int) -> Rewritten | None:
        nodes = _run(program, place, ("top_logprobs", "pack_logprobs"))
        if not nodes:
            return None
        top, pack = _args(nodes)
        found = ("ids", "logprobs", "ranks")
        if any(getattr(top, name) is not getattr(pack, name) for name in (*found, "slot_order", "num_top")):
            return None
        why = "what is found of a token goes into the record at once"
        return _unless_read(program, place, Rewritten(nodes, "reported", why, tuple(getattr(top, name) for name in found)))

    def _norm_of_sum(self, program: UnboundProgram, place: int) -> Rewritten | None:
        nodes = _run(program, place, ("all_reduce", "residual_add+rms_norm"))
        if not nodes:
            return None
        summed, composite = _args(nodes)
        added, normed = composite.parts
        if added.y is not summed.x or not collectives.takes_norm(summed, added, normed):
            return None
        early = _is_written_in_front(program, place, summed.x)
        why = "a rank adds and norms the rows that it has summed, and does not store the sum, which nobody else reads"
        also = "; the stream is read while the projection in front still runs" if early else ""
        run = Rewritten(nodes, "early_norm_of_sum" if early else "norm_of_sum", why + also, (summed.x,))
        return _unless_read(program, place, run)

    def _chosen_of_ranks(self, program: UnboundProgram, place: int, meeting: MeetingPlace) -> Rewritten | None:
        nodes = _run(program, place, ("linear", "argmax_pair"))
        if not nodes:
            return None
        project, choice = _args(nodes)
        if choice.logits is not project.out or not collectives.takes_choice(meeting, self._device, project, choice):
            return None
        why = "ranks exchange the highest logit of a row as heads find it; logits are not stored, and nobody else reads them"
        return _unless_read(program, place, Rewritten(nodes, "chosen_of_ranks", why, (project.out,)))


def _run(program: UnboundProgram, place: int, contracts: Sequence[str]) -> tuple[Node, ...]:
    """The launches from `place` on, if they are of these contracts, all served by this package, and their lengths count the
    same."""
    nodes = [entry for entry in program.entries[place : place + len(contracts)] if isinstance(entry, Node)]
    same = [node.contract for node in nodes] == [*contracts] and len({node.unit for node in nodes}) == 1
    return tuple(nodes) if same and program.served.issuperset(contracts) else ()


def _args(nodes: Sequence[Node]) -> list[Any]:
    return [node.args for node in nodes]


def _is_written_in_front(program: UnboundProgram, place: int, buffer: Any) -> bool:
    """Whether the launch directly in front of `place` is a projection of this package that writes `buffer`."""
    front = program.entries[place - 1] if place else None
    ours = isinstance(front, Node) and front.contract == "linear" and "linear" in program.served
    return ours and front.args.out is buffer  # type: ignore[union-attr]


def _unless_read(program: UnboundProgram, place: int, run: Rewritten) -> Rewritten | None:
    """The run, where nobody reads what it does not write."""
    end = place + len(run.nodes)
    return None if any(program.is_read(buffer, end) for buffer in run.dead) else run
