"""Feed-forward halves of a block: one gated network for every row, or a few of many for each.

    gated:    W_down(silu(gate) * up) + b_down   with [gate|up] = W_gate_up x + b_gate_up
    experts:  sum over the chosen e of weight_e * gated_e(x), + gated_shared(x), with a gate of its own in some models

Which experts are chosen, and their weights, is defined by the contract `route_experts`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from polydraft.errors import CapabilityError
from polydraft.models.block import At, Tensor, Work, leaves_name, leaves_of


@dataclass(frozen=True)
class GatedMlp:
    """Gated feed-forward network with SiLU: down(silu(gate x) * up x)."""

    intermediate_size: int
    """Elements of gate and of up for one row."""
    bias: bool = False
    """Biases on gate, up and down."""

    leaves: int = 0
    """Stretches of features that the down projection sums over one by one (`Kind.in_leaves`); 0: it is one product."""

    @property
    def contracts(self) -> tuple[str, ...]:
        """What it launches."""
        return ("linear", "swiglu", *(("linear_leaves", "sum_leaves") if self.leaves else ()))

    def in_leaves(self, most: int) -> GatedMlp:
        """Leaves of intermediate features."""
        return replace(self, leaves=math.gcd(most, self.intermediate_size))

    def of_ranks(self, num_ranks: int) -> GatedMlp:
        """As many intermediate features on each rank."""
        width = _even("intermediate features", self.intermediate_size, num_ranks)
        return replace(self, intermediate_size=width, leaves=self.leaves // num_ranks)

    def scratch(self, hidden: int) -> tuple[Work, ...]:
        """Gate and up as projected, their product, and leaves of what comes of that."""
        works = (Work("gate_up", 2 * self.intermediate_size), Work("gated", self.intermediate_size))
        return (*works, *leaves_of(self.leaves, hidden))

    def weights(self, hidden: int) -> tuple[Tensor, ...]:
        """Projections, with biases where there are any."""
        width = self.intermediate_size
        tensors = [
            Tensor("gate_up", ((width, hidden), (width, hidden)), split=0),
            *([Tensor("gate_up_bias", ((width,), (width,)), "bias", split=0)] if self.bias else []),
            Tensor("down", ((hidden, width),), split=1, leaves=self.leaves),
            *([Tensor("down_bias", ((hidden,),), "bias", split="first")] if self.bias else []),
        ]
        return tuple(tensors)

    def emit(self, at: At) -> None:
        """Project, gate, project back."""
        at.linear("gate_up", x="normed", out="gate_up")
        at.add("swiglu", gate_up=at.scratch["gate_up"], out=at.scratch["gated"])
        at.project("down", x="gated", leaves=self.leaves)


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

    leaves: int = 0
    """Terms that the sum over experts is made of (`Kind.in_leaves`), those of the shared ones in them; 0: it is one sum."""
    leaf_split: Literal["features", "experts"] = "features"
    """What a leaf has: a stretch of every expert's intermediate features, or a run of experts."""

    def in_leaves(self, most: int) -> SparseMoe:
        """Leaves of intermediate features."""
        return replace(self, leaves=math.gcd(most, self.intermediate_size, self.shared_size))

    def experts_in_leaves(self, most: int) -> SparseMoe:
        """Leaves of whole experts, and of features of the shared ones."""
        return replace(self, leaves=math.gcd(most, self.routing.num_experts, self.shared_size), leaf_split="experts")

    def experts_of_ranks(self, num_ranks: int) -> SparseMoe:
        """As many whole experts on each rank; the shared ones are split as by `of_ranks`. Every rank routes all rows."""
        kept = _even("experts", self.routing.num_experts, num_ranks)
        shared = _even("intermediate features of the shared experts", self.shared_size, num_ranks)
        return replace(self, num_kept=kept, shared_size=shared, leaves=self.leaves // num_ranks)

    def of_ranks(self, num_ranks: int) -> SparseMoe:
        """As many intermediate features of each expert on each rank; every rank routes all rows."""
        width = _even("intermediate features of an expert", self.intermediate_size, num_ranks)
        shared = _even("intermediate features of the shared experts", self.shared_size, num_ranks)
        return replace(self, intermediate_size=width, shared_size=shared, leaves=self.leaves // num_ranks)

    @property
    def contracts(self) -> tuple[str, ...]:
        """Router, experts, and the shared network where there is one."""
        optional = (*(("swiglu",) if self.shared_size else ()), *(("own_experts",) if self.num_kept else ()))
        if not self.leaves:
            return ("linear", "route_experts", "expert_mlp", *optional)
        by_leaf = ("expert_leaves", *(("linear_leaves",) if self.shared_size else ()), "sum_leaves")
        return ("linear", "route_experts", *by_leaf, *optional)

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
        works += leaves_of(self.leaves, hidden)
        if self.shared_size:
            shared = Work("shared", self.leaves * hidden, "f32") if self.leaves else Work("shared", hidden)
            works += [Work("gate_up", 2 * self.shared_size), Work("gated", self.shared_size), shared]
        if self.shared_gate:
            works.append(Work("shared_gate", 1, "f32"))
        return tuple(works)

    def weights(self, hidden: int) -> tuple[Tensor, ...]:
        """Router, its bias, experts stacked, the shared network."""
        experts, width, shared = self.routing.num_experts, self.intermediate_size, self.shared_size
        tensors = [Tensor("router", ((experts, hidden),), "router")]
        if self.routing.selection_bias:
            tensors.append(Tensor("selection_bias", ((experts,),), "router"))
        kept, of_features = self.num_kept or experts, self.leaves if self.leaf_split == "features" else 0
        tensors += [
            Tensor("experts_gate_up", ((width, hidden), (width, hidden)), "experts", split=1, stack=kept),
            Tensor("experts_down", ((hidden, width),), "experts", split=2, stack=kept, leaves=of_features),
        ]
        if shared:
            tensors += [
                Tensor("shared_gate_up", ((shared, hidden), (shared, hidden)), split=0),
                Tensor("shared_down", ((hidden, shared),), split=1, leaves=self.leaves),
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
            if self.leaves:
                at.linear_leaves("shared_down", x="gated", out="shared", leaves=self.leaves)
            else:
                at.linear("shared_down", x="gated", out="shared")
        if self.shared_gate:
            at.linear("shared_gate", x="normed", out="shared_gate")
        if self.num_kept:
            at.add("own_experts", expert_ids=scratch["expert_ids"], own=scratch["own_experts"], num_kept=self.num_kept)
            chosen["expert_ids"] = scratch["own_experts"]
        fields = {
            "x": scratch["normed"], "gate_up": at.own("experts_gate_up"), "down": at.own("experts_down"),
            "shared": scratch["shared"] if self.shared_size else None,
            "shared_gate": scratch["shared_gate"] if self.shared_gate else None, **chosen,
        }  # fmt: skip
        if not self.leaves:
            at.add("expert_mlp", out=scratch["branch"], **fields)
            return
        at.add("expert_leaves", leaves=self.leaves, split=self.leaf_split, out=scratch[leaves_name(self.leaves)], **fields)
        at.sum_leaves(self.leaves)


def _even(what: str, size: int, num_ranks: int) -> int:
    """A rank's share of `size`. Raises `CapabilityError` where shares would differ."""
    if size % num_ranks:
        raise CapabilityError(f"{size} {what} cannot be shared out evenly")
    return size // num_ranks
