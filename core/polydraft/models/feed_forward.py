"""The gated feed-forward network of dense models: W_down(silu(gate) * up) + b_down with [gate|up] = W_gate_up x + b_gate_up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polydraft.models.block import At, Tensor, Work


@dataclass(frozen=True)
class GatedMlp:
    """Gated feed-forward network with SiLU: down(silu(gate x) * up x)."""

    intermediate_size: int
    """Elements of gate and of up for one row."""
    bias: bool = False
    """Biases on gate, up and down."""

    contracts: ClassVar[tuple[str, ...]] = ("linear", "swiglu")

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
            *([Tensor("down_bias", ((hidden,),), "bias")] if self.bias else []),
        ]
        return tuple(tensors)

    def emit(self, at: At) -> None:
        """Project, gate, project back."""
        at.linear("gate_up", x="normed", out="gate_up")
        at.add("swiglu", gate_up=at.scratch["gate_up"], out=at.scratch["gated"])
        at.linear("down", x="gated", out="branch")
