"""Feed-forward halves of a block: one gated network for every row, or a few of many for each.

    gated:    W_down(silu(gate) * up) + b_down   with [gate|up] = W_gate_up x + b_gate_up
    experts:  sum over the chosen e of weight_e * gated_e(x), + gated_shared(x), with a gate of its own in some models

Which experts are chosen, and their weights, is defined by the contract `route_experts`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from polydraft.errors import CapabilityError
from polydraft.models.block import At, Tensor, Work


@dataclass(frozen=True)
class GatedMlp:
    """Gated feed-forward network with SiLU: down(silu(gate x) * up x)."""

    intermediate_size: int
    """Elements of gate and of up for one row."""
    bias: bool = False
    """Biases on gate, up and down."""

    contracts: ClassVar[tuple[str, ...]] = ("linear", "swiglu")

    def of_ranks(self, num_ranks: int) -> GatedMlp:
        """As many intermediate features on each rank."""
        return replace(self, intermediate_size=_even("intermediate features", self.intermediate_size, num_ranks))

    def scratch(self, hidden: int) -> tuple[Work, ...]:
        """Gate and up as projected, and their product."""
        del hidden
        return Work("gate_up", 2 * self.intermediate_size), Work("gated", self.intermediate_size)

    def weights(self, hidden: int) -> tuple[Tensor, ...]:
        """Projections, with biases where there are any."""
        width = self.intermediate_size
        tensors = [
            Tensor("gate_up", ((width, hidden), (width, hidden)), split=0),
            *([Tensor("gate_up_bias", ((width,), (width,)), "bias", split=0)] if self.bias else []),
            Tensor("down", ((hidden, width),), split=1),
            *([Tensor("down_bias", ((hidden,),), "bias", split="first")] if self.bias else []),
        ]
        return tuple(tensors)

    def emit(self, at: At) -> None:
        """Project, gate, project back."""
        at.linear("gate_up", x="normed", out="gate_up")
        at.add("swiglu", gate_up=at.scratch["gate_up"], out=at.scratch["gated"])
        at.linear("down", x="gated", out="branch")


@dataclass(frozen=True)
class Routing:
    """How a row's experts are chosen and weighed: the static arguments of `route_experts`, which explains them."""

    num_experts: int
    top_k: int
    """Experts of a row."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False
    """A bias on the scores that select; it never weighs."""
    num_groups: int = 1
    top_groups: int = 1
    renormalize: Literal["none", "sum", "clamp"] = "sum"
    floor: float = 1e-20
    scale: float = 1.0


@dataclass(frozen=True)
class SparseMoe:
    """Mixture of experts: gated networks of which each row is given to a few, beside shared ones that take every row."""

    intermediate_size: int
    """Elements of gate and of up of one expert, for one row."""
    routing: Routing
    shared_size: int = 0
    """The same of the shared experts, which are stored as one network; 0: there are none."""
    shared_gate: bool = False
    """The shared output is multiplied by the sigmoid of one more projection."""
    num_kept: int = 0
    """Experts that a rank keeps where ranks keep experts whole: rank r has those from r * num_kept on; 0: there are all."""

    def experts_of_ranks(self, num_ranks: int) -> SparseMoe:
        """As many whole experts on each rank; the shared ones are split as by `of_ranks`. Every rank routes all rows."""
        kept = _even("experts", self.routing.num_experts, num_ranks)
        shared = _even("intermediate features of the shared experts", self.shared_size, num_ranks)
        return replace(self, num_kept=kept, shared_size=shared)

    def of_ranks(self, num_ranks: int) -> SparseMoe:
        """As many intermediate features of each expert on each rank; every rank routes all rows."""
        width = _even("intermediate features of an expert", self.intermediate_size, num_ranks)
        shared = _even("intermediate features of the shared experts", self.shared_size, num_ranks)
        return replace(self, intermediate_size=width, shared_size=shared)

    @property
    def contracts(self) -> tuple[str, ...]:
        """Router, experts, and the shared network where there is one."""
        optional = (*(("swiglu",) if self.shared_size else ()), *(("own_experts",) if self.num_kept else ()))
        return ("linear", "route_experts", "expert_mlp", *optional)

    def scratch(self, hidden: int) -> tuple[Work, ...]:
        """Logits, ids and weights of the choice; what the shared network works in."""
        routing = self.routing
        works = [
            Work("router_logits", routing.num_experts, "f32"),
            Work("expert_ids", routing.top_k, "i32"),
            Work("expert_weights", routing.top_k, "f32"),
        ]
        if self.num_kept:
            works.append(Work("own_experts", routing.top_k, "i32"))
        if self.shared_size:
            works += [Work("gate_up", 2 * self.shared_size), Work("gated", self.shared_size), Work("shared", hidden)]
        if self.shared_gate:
            works.append(Work("shared_gate", 1, "f32"))
        return tuple(works)

    def weights(self, hidden: int) -> tuple[Tensor, ...]:
        """Router, its bias, experts stacked, the shared network."""
        experts, width, shared = self.routing.num_experts, self.intermediate_size, self.shared_size
        tensors = [Tensor("router", ((experts, hidden),), "router")]
        if self.routing.selection_bias:
            tensors.append(Tensor("selection_bias", ((experts,),), "router"))
        kept = self.num_kept or experts
        tensors += [
            Tensor("experts_gate_up", ((width, hidden), (width, hidden)), "experts", split=1, stack=kept),
            Tensor("experts_down", ((hidden, width),), "experts", split=2, stack=kept),
        ]
        if shared:
            tensors += [
                Tensor("shared_gate_up", ((shared, hidden), (shared, hidden)), split=0),
                Tensor("shared_down", ((hidden, shared),), split=1),
            ]
        if self.shared_gate:
            tensors.append(Tensor("shared_gate", ((1, hidden),)))
        return tuple(tensors)

    def emit(self, at: At) -> None:
        """Route; the shared network; then the experts, which add it."""
        routing, scratch = self.routing, at.scratch
        at.linear("router", x="normed", out="router_logits")
        chosen = {name: scratch[name] for name in ("expert_ids", "expert_weights")}
        at.add(
            "route_experts", logits=scratch["router_logits"], bias=at.optional("selection_bias"), row_slot=at.row_slot,
            scoring=routing.scoring, num_groups=routing.num_groups, top_groups=routing.top_groups,
            renormalize=routing.renormalize, floor=routing.floor, scale=routing.scale, **chosen,
        )  # fmt: skip
        if self.shared_size:
            at.linear("shared_gate_up", x="normed", out="gate_up")
            at.add("swiglu", gate_up=scratch["gate_up"], out=scratch["gated"])
            at.linear("shared_down", x="gated", out="shared")
        if self.shared_gate:
            at.linear("shared_gate", x="normed", out="shared_gate")
        if self.num_kept:
            at.add("own_experts", expert_ids=scratch["expert_ids"], own=scratch["own_experts"], num_kept=self.num_kept)
            chosen["expert_ids"] = scratch["own_experts"]
        at.add(
            "expert_mlp", x=scratch["normed"], gate_up=at.own("experts_gate_up"), down=at.own("experts_down"),
            shared=scratch.get("shared") if self.shared_size else None,
            shared_gate=scratch["shared_gate"] if self.shared_gate else None, out=scratch["branch"], **chosen,
        )  # fmt: skip


def _even(what: str, size: int, num_ranks: int) -> int:
    """A rank's share of `size`. Raises `CapabilityError` where shares would differ."""
    if size % num_ranks:
        raise CapabilityError(f"{size} {what} cannot be shared out evenly")
    return size // num_ranks
