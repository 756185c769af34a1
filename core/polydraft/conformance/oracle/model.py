"""Target and MTP head by full recomputation: every call starts from token ids and computes all rows of all layers.

Follows the equations in `polydraft.models.description` literally. From polydraft it takes only the description and the
canonical weights; it shares no arithmetic with the reference backend or the goldens, save what a quantised KV row is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.contracts.kv_quant import quantise
from polydraft.contracts.packing import MADE, Matrix, unpacked
from polydraft.models import (
    Attention,
    Block,
    Checkpoint,
    FamilyRegistry,
    Mixer,
    ModelDescription,
    Rope,
    Routing,
    SparseMoe,
    load_weights,
)
from polydraft.models.weights import PackedAtLoad

Array = NDArray[Any]


class OracleModel:
    """One model, weights held in `dtype` (float64 unless told otherwise). Rows are positions: row p is token p."""

    def __init__(
        self, description: ModelDescription, weights: Mapping[str, Array], dtype: Any = np.float64, *, kv: str = ""
    ) -> None:
        self.description = description
        self.kept: Callable[[Array], Array] = partial(quantise, kv=kv) if kv else lambda rows: rows
        """What attention reads of rows of keys or values."""
        self.w = {name: weights[name].astype(dtype) for name in weights}
        self.dtype = dtype
        self.texts: dict[tuple[int, ...], Any] = {}  # memo of `rounds.py`, by prompt

    @classmethod
    def from_dir(
        cls, path: str | Path, dtype: Any = np.float64, *, kv: str = "", weights: str = "", **switches: Any
    ) -> OracleModel:
        """Load the checkpoint `path`, its matrices packed as `--weights` has them; `switches` replace fields of its `Mtp` record,
        e.g. recycle="post"."""
        with Checkpoint(path) as checkpoint:
            description, table = FamilyRegistry().describe(checkpoint)
            packed: Mapping[str, Matrix] = load_weights(checkpoint, description, table)
            if weights:
                packed = PackedAtLoad(packed, description, MADE[weights].packing, ())
            values = {name: unpacked(value, np.float64) for name, value in packed.items()}
        if switches:
            assert description.mtp is not None
            description = dataclasses.replace(description, mtp=dataclasses.replace(description.mtp, **switches))
        return cls(description, values, dtype, kv=kv)

    def target_states(self, token_ids: Sequence[int]) -> Array:
        """[n, H]: the residual stream behind the last block, before the final norm, of each of n tokens."""
        x: Array = self.w["embed"][np.asarray(token_ids)]
        for i, block in enumerate(self.description.blocks):
            x = self.block(x, block, f"layers.{i}.")
        return x

    def target_logits(self, states: Array) -> Array:
        """[n, V] from `target_states` rows: row p scores token p + 1."""
        return np.asarray(self._norm(states, "norm") @ self.w["lm_head"].T)

    def draft(self, token_ids: Sequence[int], states: Array, num_drafts: int) -> tuple[list[int], Array]:
        """Draft greedily behind `token_ids`: the draft ids and their logits [num_drafts, V], as `drafting` yields them."""
        logits = np.empty((num_drafts, self.description.vocab_size), self.dtype)
        drafts: list[int] = []
        for draft, row in self.drafting(token_ids, states, num_drafts):
            logits[len(drafts)] = row
            drafts.append(draft)
        return drafts, logits

    def drafting(self, token_ids: Sequence[int], states: Array, num_drafts: int) -> Iterator[tuple[int, Array]]:
        """Draft greedily behind `token_ids`, whose last token the target has not computed yet, as far as somebody asks.

        `states` [n - 1, H] are the target's states of the n - 1 tokens before it. Yields draft ids (ties: lowest) and
        their logits [V]. Each pass recomputes all MTP rows: the true ones, then the recycled ones.
        """
        mtp = self.description.mtp
        assert mtp is not None
        assert len(states) == len(token_ids) - 1
        next_ids = list(token_ids[1:])
        fed = states if mtp.feed == "pre" else self._norm(states, "norm")
        for _ in range(num_drafts):
            embedded = self.w["embed"][np.asarray(next_ids)].copy()
            if mtp.mask_first_position:
                embedded[0] = 0
            halves = [self._norm(fed, "mtp.0.hid_norm"), self._norm(embedded, "mtp.0.emb_norm")]
            if mtp.order == "embedding_first":
                halves.reverse()
            z = np.concatenate(halves, axis=1) @ self.w["mtp.0.proj"].T
            y = self.block(z, mtp.blocks[0], "mtp.0.")[-1:]
            normed = self._norm(y, "mtp.0.final_norm" if mtp.final_norm == "own" else "norm")
            logits = np.asarray((normed @ self.w["lm_head"].T)[0])
            next_ids.append(int(np.argmax(logits)))
            yield next_ids[-1], logits
            fed = np.concatenate([fed, y if mtp.recycle == "pre" else normed])

    def _norm(self, x: Array, name: str) -> Array:
        weight = self.w[name] + 1 if self.description.norm_plus_one else self.w[name]
        mean = np.add.reduce(x * x, axis=-1, keepdims=True) / x.shape[-1]  # of few numbers `np.mean` takes several times as long
        return np.asarray(x / np.sqrt(mean + self.dtype(self.description.eps)) * weight)

    def _linear(self, x: Array, name: str, bias: str) -> Array:
        y = x @ self.w[name].T
        return np.asarray(y + self.w[bias] if bias in self.w else y)

    def mix(self, x: Array, mixer: Mixer, prefix: str) -> Array:
        """[n, H]: what the mixer of a block adds to the residual stream, from rows behind the input norm. A model with mixers of
        its own overrides it; their weights are in `w`, under the prefix."""
        a = mixer
        assert isinstance(a, Attention)
        qkv = self._linear(x, prefix + "qkv", prefix + "qkv_bias")
        q, k, v = (part.reshape(len(x), -1, a.head_dim) for part in np.split(qkv, [a.q_size, a.q_size + a.kv_size], axis=1))
        if a.qk_norm:
            q, k = self._norm(q, prefix + "q_norm"), self._norm(k, prefix + "k_norm")
        mixed = _attention(_rotate(q, a.rope), self.kept(_rotate(k, a.rope)), self.kept(v), a.sliding_window)
        return self._linear(mixed, prefix + "o", prefix + "o_bias")

    def block(self, x: Array, block: Block, prefix: str) -> Array:
        """[n, H]: the residual stream behind a decoder block."""
        x = x + self.mix(self._norm(x, prefix + "input_norm"), block.mixer, prefix)
        normed = self._norm(x, prefix + "post_norm")
        if isinstance(block.feed_forward, SparseMoe):
            return x + self._experts(normed, block.feed_forward, prefix)
        return x + self._gated(normed, *(prefix + name for name in ("gate_up", "gate_up_bias", "down", "down_bias")))

    def _gated(self, x: Array, gate_up: str, gate_up_bias: str, down: str, down_bias: str) -> Array:
        gate, up = np.split(self._linear(x, gate_up, gate_up_bias), 2, axis=1)
        return self._linear(gate / (1 + np.exp(-gate)) * up, down, down_bias)

    def _experts(self, x: Array, moe: SparseMoe, prefix: str) -> Array:
        """[n, H]: all rows through each expert, times its weight in the row, which is 0 where it was not chosen, and through the
        shared ones."""
        out = np.zeros_like(x)
        weights = _weights(x @ self.w[prefix + "router"].T, moe.routing, self.w.get(prefix + "selection_bias"))
        for expert in np.flatnonzero(weights.any(axis=0)):
            gate, up = np.split(x @ self.w[prefix + "experts_gate_up"][expert].T, 2, axis=1)
            hidden = gate / (1 + np.exp(-gate)) * up
            out += weights[:, expert, None] * (hidden @ self.w[prefix + "experts_down"][expert].T)
        if moe.shared_size:
            shared = self._gated(x, prefix + "shared_gate_up", "", prefix + "shared_down", "")
            if moe.shared_gate:
                shared /= 1 + np.exp(-(x @ self.w[prefix + "shared_gate"].T))
            out += shared
        return out


def _weights(logits: Array, routing: Routing, bias: Array | None) -> Array:
    """[n, experts]: what each row multiplies each expert's output by, 0 where it is not chosen. Of equals it is the first."""
    if routing.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    ranked = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        grouped = ranked.reshape(len(ranked), routing.num_groups, -1)
        worth = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
        ranked = np.where(_best(worth, routing.top_groups)[:, :, None], grouped, -np.inf).reshape(ranked.shape)
    weights = np.where(_best(ranked, routing.top_k), scores, 0)
    total = weights.sum(axis=1, keepdims=True)
    divisor = {"none": 1.0, "sum": total + routing.floor, "clamp": np.maximum(total, routing.floor)}[routing.renormalize]
    return np.asarray(routing.scale * weights / divisor)


def _best(values: Array, count: int) -> Array:
    """Whether each of values [n, m] is among the `count` largest of its row."""
    found = np.zeros(values.shape, bool)
    np.put_along_axis(found, np.argsort(-values, axis=1, kind="stable")[:, :count], True, axis=1)
    return found


def _rotate(x: Array, rope: Rope) -> Array:
    """[n, heads, d]: turn the pairs of each head of row p by p * frequencies[i]."""
    half = rope.dims // 2
    cos, sin = _turns(len(x), rope, x.dtype)
    halves = slice(half), slice(half, 2 * half)
    first, second = halves if rope.style == "half" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


@cache
def _turns(n: int, rope: Rope, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Cosine and sine of the angles of n rows, times the attention factor, [n, 1, dims / 2] each."""
    angle = np.outer(np.arange(n), rope.frequencies)
    cos, sin = (rope.attention_factor * turn for turn in (np.cos(angle), np.sin(angle)))
    return cos.astype(dtype)[:, None, :], sin.astype(dtype)[:, None, :]


def _attention(q: Array, k: Array, v: Array, window: int) -> Array:
    """[n, heads * d] causal attention of q [n, heads, d] over k and v [n, kv_heads, d], of row p over the tokens in
    (p - window, p]; a window of 0 has no border."""
    n, num_heads, head_dim = q.shape
    kv_head = np.arange(num_heads) * k.shape[1] // num_heads
    queries, keys, values = (part.transpose(1, 0, 2) for part in (q, k[:, kv_head], v[:, kv_head]))
    scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(head_dim).astype(q.dtype)
    scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf  # tokens to come
    if window:
        scores[:, np.tril(np.ones((n, n), bool), -window)] = -np.inf  # tokens that have gone
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return np.asarray(weights / weights.sum(axis=2, keepdims=True) @ values).transpose(1, 0, 2).reshape(n, -1)
