"""Causal grouped-query attention with rotary positions: the mixer of most models.

    [q|k|v] = W_qkv x + b_qkv;   W_o attention(rope(q), rope(k), v) + b_o

Keys and values of all earlier positions lie in paged rows, which the backend lays out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.paged_attention import PagedAttentionV1
from polydraft.contracts.kernels.rope_kv_write import RopeKvWriteV1
from polydraft.device import Launch
from polydraft.errors import CapabilityError
from polydraft.models.block import At, BlockCall, Norm, Tensor, Work, leaves_of
from polydraft.models.rotary import Rope
from polydraft.program.caches import KvRows

if TYPE_CHECKING:
    from polydraft.program.declare import Pass


@dataclass(frozen=True)
class Attention:
    """Causal grouped-query attention over all earlier positions or the last of them; scores are scaled by head_dim^(-1/2)."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key-value heads; divides `num_heads`. Query head h reads key-value head h // (num_heads / num_kv_heads)."""
    head_dim: int
    """Elements of a head; not always hidden_size / num_heads."""
    rope: Rope
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    output_bias: bool = False
    """A bias on the output projection."""
    qk_norm: bool = False
    """RMS norms over each query and key head before the rotation; weights [head_dim], shared by all heads."""
    sliding_window: int = 0
    """Keys that a row attends to at most, its own the last of them; 0: all. The cache keeps every row all the same, so blocks are
    shared as without it."""

    leaves: int = 0
    """Stretches of heads that the output projection sums over one by one (`Kind.in_leaves`); 0: it is one product."""

    carried: ClassVar[tuple[str, ...]] = ("attended",)

    @property
    def q_size(self) -> int:
        """Elements of all query heads of one row: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key (or value) heads of one row: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def contracts(self) -> tuple[str, ...]:
        """What it launches."""
        return ("linear", "rope_kv_write", "paged_attention", *(("linear_leaves", "sum_leaves") if self.leaves else ()))

    def in_leaves(self, most: int) -> Attention:
        """Leaves of whole heads."""
        return replace(self, leaves=math.gcd(most, self.num_heads))

    def of_ranks(self, num_ranks: int) -> Attention:
        """Whole heads. Where there are fewer key-value heads than ranks, several ranks keep the same one."""
        heads, kv = self.num_heads, self.num_kv_heads
        if heads % num_ranks or (kv % num_ranks and num_ranks % kv):
            raise CapabilityError(f"{heads} query heads and {kv} key-value heads cannot be shared out evenly")
        leaves = self.leaves // num_ranks
        return replace(self, num_heads=heads // num_ranks, num_kv_heads=max(kv // num_ranks, 1), leaves=leaves)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """A window is one."""
        return ("sliding_window",) if self.sliding_window else ()

    @property
    def caches(self) -> tuple[KvRows, ...]:
        """Keys and values."""
        return (KvRows(self.num_kv_heads, self.head_dim),)

    def scratch(self, hidden: int) -> tuple[Work, ...]:
        """Queries, keys and values as projected; queries rotated; what they attended to; leaves of what comes of that."""
        works = (Work("qkv", self.q_size + 2 * self.kv_size), Work("q", self.q_size), Work("attended", self.q_size))
        return (*works, *leaves_of(self.leaves, hidden))

    def weights(self, hidden: int) -> tuple[Tensor, ...]:
        """Projections, with biases and norms of heads where there are any."""
        rows = (self.q_size, self.kv_size, self.kv_size)
        tensors = [
            Tensor("qkv", tuple((size, hidden) for size in rows), split=0),
            *([Tensor("qkv_bias", tuple((size,) for size in rows), "bias", split=0)] if self.qkv_bias else []),
            Tensor("o", ((hidden, self.q_size),), split=1, leaves=self.leaves),
            *([Tensor("o_bias", ((hidden,),), "bias", split="first")] if self.output_bias else []),
            *([Tensor(name, ((self.head_dim,),), "norm") for name in ("q_norm", "k_norm")] if self.qk_norm else []),
        ]
        return tuple(tensors)

    def keep(self, at: At) -> None:
        """Project, rotate, store."""
        at.linear("qkv", x="normed", out="qkv")
        at.add(
            "rope_kv_write", qkv=at.scratch["qkv"], q_out=at.scratch["q"], q_norm=at.optional("q_norm"),
            k_norm=at.optional("k_norm"), **self._turn(at.norm), **self._shared(at.rows, at.prefix, at.program.limits),
        )  # fmt: skip

    def mix(self, at: At) -> None:
        """Project, rotate, store, attend."""
        self.keep(at)
        shared = self._shared(at.rows, at.prefix, at.program.limits)
        at.add("paged_attention", q=at.scratch["q"], out=at.scratch["attended"], **self._attend, **shared)

    def finish(self, at: At) -> None:
        """Project what was attended to."""
        at.project("o", x="attended", leaves=self.leaves)

    def bind(self, call: BlockCall) -> tuple[Launch, Launch]:
        """The two launches around the cache, bound for a block that computes the rest itself."""
        memory = call.program.memory
        shared = self._shared(call.rows, call.prefix, memory.limits)
        shared |= {name: memory.buffers[shared[name]] for name in ("row_slot", "positions")}
        shared |= {"cache": memory.caches[call.prefix], "meta": memory.metas[call.rows.name]}
        shared["block_table"] = memory.buffers["block_table"]
        scratch = call.scratch
        rope = RopeKvWriteV1(qkv=scratch.qkv, q_out=scratch.q, q_norm=None, k_norm=None, **self._turn(call.norm), **shared)
        attend = PagedAttentionV1(q=scratch.q, out=scratch.attended, **self._attend, **shared)
        bind = call.program.table.bind
        return bind("rope_kv_write", rope, memory.limits), bind("paged_attention", attend, memory.limits)

    def _shared(self, rows: Pass, prefix: str, limits: Limits) -> dict[str, Any]:
        """What both contracts are bound to."""
        return {
            "row_slot": rows.row_slot, "positions": rows.positions, "cache": prefix, "meta": rows.name,
            "num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim,
            "block_size": limits.block_size,
        }  # fmt: skip

    @property
    def _attend(self) -> dict[str, Any]:
        """How rows attend."""
        return {"softmax_scale": self.head_dim**-0.5, "sliding_window": self.sliding_window}

    def _turn(self, norm: Norm) -> dict[str, Any]:
        """How queries and keys are rotated."""
        rope = self.rope
        return {
            "frequencies": rope.frequencies, "attention_factor": rope.attention_factor, "style": rope.style, "eps": norm.eps,
        }  # fmt: skip
