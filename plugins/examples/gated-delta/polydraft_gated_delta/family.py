"""The family: gated delta layers with attention in between, as data and launches.

Owns the cache kind `DeltaState`, the mixer `GatedDelta` and the family `GATED_DELTA`. polydraft calls their members while an
engine is built; nothing here runs in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polydraft.contracts.base import Limits
from polydraft.contracts.kv_quant import Kv
from polydraft.models import Block, Family, MtpLayout, Tensor
from polydraft.models.block import At, Work
from polydraft.models.config_file import ConfigFile
from polydraft.models.tensor_table import BLOCK_NAMES
from polydraft.program.caches import ITEM_BYTES, CacheKind, Hit
from polydraft.program.declare import StepBuffer
from polydraft_gated_delta.contract import CONTRACT


@dataclass(frozen=True)
class DeltaState(CacheKind):
    """A state of each slot, the rows of a window that it has not seen, and the state at the end of each block."""

    hit: ClassVar[Hit] = "border"
    heads: int
    key_dim: int
    value_dim: int

    @property
    def _state(self) -> int:
        """Numbers of one state."""
        return self.heads * self.value_dim * self.key_dim

    @property
    def _row(self) -> int:
        """Numbers of one row of the ring: key, value and the two gates."""
        return self.heads * (self.key_dim + self.value_dim + 2)

    def block_bytes(self, block_size: int, dtype: str, kv: Kv) -> int:
        """One state."""
        del block_size, dtype, kv
        return self._state * ITEM_BYTES["f32"]

    def slot_bytes(self, limits: Limits, dtype: str) -> int:
        """One state with its length, and the ring."""
        return (self._state + 1) * ITEM_BYTES["f32"] + limits.window * self._row * ITEM_BYTES[dtype]

    def buffers(self, prefix: str, limits: Limits) -> tuple[StepBuffer, ...]:
        """All zeros; nothing is read before it was written."""
        state = f"{self.heads} {self.value_dim} {self.key_dim}"
        return (
            StepBuffer(f"{prefix}.state", f"B {state}", "f32", initial=0),
            StepBuffer(f"{prefix}.state_len", "B", initial=0),
            StepBuffer(f"{prefix}.ring", f"B W {self._row}", "act", initial=0),
            StepBuffer(f"{prefix}.borders", f"{limits.num_blocks} {state}", "f32", initial=0),
        )


@dataclass(frozen=True)
class GatedDelta:
    """A mixer: the gated delta rule, between a projection in and one out."""

    heads: int
    key_dim: int
    value_dim: int

    contracts: ClassVar[tuple[str, ...]] = ("linear", CONTRACT.name)
    carried: ClassVar[tuple[str, ...]] = ("recalled",)

    @property
    def caches(self) -> tuple[CacheKind, ...]:
        """The state."""
        return (DeltaState(self.heads, self.key_dim, self.value_dim),)

    @property
    def _parts(self) -> tuple[int, int, int]:
        """Features of queries, keys and values."""
        return self.heads * self.key_dim, self.heads * self.key_dim, self.heads * self.value_dim

    def scratch(self, hidden: int) -> tuple[Work, ...]:
        """Rows as projected, and what the state recalled for them."""
        del hidden
        return Work("delta_qkv", sum(self._parts)), Work("delta_gates", 2 * self.heads), Work("recalled", self._parts[2])

    def weights(self, hidden: int) -> tuple[Tensor, ...]:
        """Projections; only the gates have biases."""
        gates = (self.heads, self.heads)
        return (
            Tensor("delta_qkv", tuple((size, hidden) for size in self._parts)),
            Tensor("delta_gates", tuple((size, hidden) for size in gates)),
            Tensor("delta_gates_bias", tuple((size,) for size in gates), "bias"),
            Tensor("delta_o", ((hidden, self._parts[2]),)),
        )

    def keep(self, at: At) -> None:
        """One contract writes the cache and recalls, so this is all of `mix`."""
        self.mix(at)

    def mix(self, at: At) -> None:
        """Project, write, recall."""
        at.linear("delta_qkv", x="normed", out="delta_qkv")
        at.linear("delta_gates", x="normed", out="delta_gates")
        at.add(
            CONTRACT.name, qkv=at.scratch["delta_qkv"], gates=at.scratch["delta_gates"], row_slot=at.rows.row_slot,
            positions=at.rows.positions, state=at.own("state"), state_len=at.own("state_len"), ring=at.own("ring"),
            borders=at.own("borders"), out=at.scratch["recalled"], block_size=at.program.limits.block_size,
        )  # fmt: skip

    def finish(self, at: At) -> None:
        """Project what was recalled."""
        at.linear("delta_o", x="recalled", out="branch")


@dataclass(frozen=True, kw_only=True)
class GatedDeltaFamily(Family):
    """Every `full_attention_interval`-th layer is attention, the others are gated delta; all have the same feed-forward."""

    def blocks(self, config: ConfigFile) -> tuple[Block, ...]:
        """The target's blocks; the MTP layer's is like the last of them."""
        attention = self.block(config)
        sizes = (config.integer(f"linear_{name}") for name in ("num_heads", "key_head_dim", "value_head_dim"))
        delta = Block(GatedDelta(*sizes), attention.feed_forward)
        every = config.integer("full_attention_interval")
        return tuple(delta if i % every else attention for i in range(1, config.integer("num_hidden_layers") + 1))


GATED_DELTA = GatedDeltaFamily(
    architecture="GatedDeltaForCausalLM",
    block_names={
        **BLOCK_NAMES,
        "delta_qkv": ("linear_attn.q_proj.weight", "linear_attn.k_proj.weight", "linear_attn.v_proj.weight"),
        "delta_gates": ("linear_attn.a_proj.weight", "linear_attn.b_proj.weight"),
        "delta_gates_bias": ("linear_attn.a_proj.bias", "linear_attn.b_proj.bias"),
        "delta_o": ("linear_attn.o_proj.weight",),
    },
    mtp=MtpLayout(
        prefix="model.mtp_layers.{i}.", emb_norm="token_layernorm.weight", hid_norm="hidden_layernorm.weight",
        proj="input_proj.weight", final_norm_name="final_layernorm.weight", order="hidden_first", feed="pre", final_norm="own",
        recycle="pre",
    ),
)  # fmt: skip
