"""EAGLE-3 drafting by full recomputation, from a draft model's files: the second opinion on drafts and on rounds.

Written from the published description (Li et al. 2025, arXiv 2503.01840, and the norms of EAGLE-3.1), in float64, without a
cache: every draft computes all rows of all layers of both models. It takes the target from the kit's oracle, and shares no
arithmetic and no names with the proposer. The tests of `tests/step` call it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.conformance.oracle.coupled import CoupledRounds, Sampling, coupled_text
from polydraft.conformance.oracle.model import OracleModel
from polydraft.models import Checkpoint

Array = NDArray[Any]


class Eagle3Oracle:
    """A target and its draft model, both from directories."""

    def __init__(self, target: Path, draft_model: Path) -> None:
        self.target = OracleModel.from_dir(target)
        with Checkpoint(draft_model) as opened:
            config = opened.config
            self.w: dict[str, Array] = {}
            for name in opened.names():
                if name in ("d2t", "t2d"):
                    self.w[name] = opened.integers(name)
                else:
                    plain = name.removeprefix("model.").replace("midlayer.", "layers.0.")
                    self.w[plain.removesuffix(".weight")] = opened.tensor(name).astype(np.float64)
        self.keys: dict[str, Any] = {**config, **config.get("eagle_config", {})}
        self.layer: dict[str, Any] = config.get("transformer_layer_config", config)
        self.tapped = self._tapped(nested="transformer_layer_config" in config)

    def _tapped(self, *, nested: bool) -> list[int]:
        """The layers whose inputs are tapped; the last one of all is the output of the last layer."""
        n = self.target.description.num_layers
        ids = self.keys.get("eagle_aux_hidden_state_layer_ids")
        if ids is None:
            return [2, n // 2, n - 3]
        return [i + 1 for i in ids] if ids[0] == 1 and not nested else list(ids)

    def drafting(self, known: Sequence[int], sampling: Sampling) -> Iterator[tuple[int, bool]]:
        """Drafts behind a text whose last token the target has not computed, and whether each choice was clear."""
        w, target = self.w, self.target
        embed = w.get("embed_tokens", target.w["embed"])
        head = w.get("lm_head", embed if self.layer.get("tie_word_embeddings") else target.w["lm_head"])
        taps = [self._states(known[:-1])[i] for i in self.tapped]
        if self.keys.get("fc_norm"):
            taps = [self._norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps)]
        fed = np.concatenate(taps, axis=1) @ w["fc"].T + w.get("fc.bias", 0.0)
        following, position = list(known[1:]), len(known)
        while True:
            x = self._layers(fed, embed[following])[-1:]
            normed = self._norm(x, "norm")
            scores = (normed @ head.T)[0]
            if "d2t" in w:
                logits = np.full(target.description.vocab_size, -np.inf)
                logits[np.arange(len(scores)) + w["d2t"]] = scores
                scores = logits
            token, clear = sampling.choose(scores, position)
            yield token, clear
            following.append(token)
            fed = np.concatenate([fed, normed if self.keys.get("norm_output") else x])
            position += 1

    def drafts(self, known: Sequence[int], num_drafts: int) -> tuple[list[int], bool]:
        """Greedy drafts, and whether all were clear."""
        made = [draft for _, draft in zip(range(num_drafts), self.drafting(known, Sampling()), strict=False)]
        return [token for token, _ in made], all(clear for _, clear in made)

    def rounds(self, prompt_ids: Sequence[int], sampling: Sampling, num_drafts: int, max_new: int) -> CoupledRounds:
        """A text without stops, of rounds of at most so many drafts: as many as the text repeats are accepted."""
        token_ids, all_clear = coupled_text(self.target, prompt_ids, sampling, max_new, ())
        known, at, accepted = [*prompt_ids, *token_ids], len(prompt_ids) + 1, list[int]()
        while at < len(known):
            accepted.append(0)
            for _, (token, clear) in zip(range(min(num_drafts, len(known) - at - 1)), self.drafting(known[:at], sampling)):  # noqa: B905
                all_clear &= clear
                if token != known[at + accepted[-1]]:
                    break
                accepted[-1] += 1
            at += accepted[-1] + 1
        return CoupledRounds(token_ids, accepted, all_clear)

    def _states(self, token_ids: Sequence[int]) -> list[Array]:
        """[n, H] before each layer of the target, and behind the last."""
        found = [self.target.w["embed"][list(token_ids)]]
        for i, block in enumerate(self.target.description.blocks):
            found.append(self.target.block(found[-1], block, f"layers.{i}."))
        return found

    def _norm(self, x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.layer["rms_norm_eps"]) * self.w[name])

    def _linear(self, x: Array, name: str) -> Array:
        return np.asarray(x @ self.w[name].T + self.w.get(f"{name}.bias", 0.0))

    def _layers(self, x: Array, embedded: Array) -> Array:
        """All layers; the first sees the embeddings beside what is fed to it."""
        for i in range(sum(name.endswith(".input_layernorm") for name in self.w)):
            prefix = f"layers.{i}."
            if i:
                seen = self._norm(x, prefix + "input_layernorm")
            else:
                halves = [self._norm(embedded, prefix + "input_layernorm"), self._norm(x, prefix + "hidden_norm")]
                x = halves[1] if self.keys.get("norm_before_residual") else x
                seen = np.concatenate(halves[::-1] if self.keys.get("swap_h_and_emb") else halves, axis=1)
            x = x + self._attention(seen, prefix + "self_attn.")
            normed = self._norm(x, prefix + "post_attention_layernorm")
            gate, up = (self._linear(normed, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._linear(gate / (1 + np.exp(-gate)) * up, f"{prefix}mlp.down_proj")
        return x

    def _attention(self, seen: Array, prefix: str) -> Array:
        n, d = len(seen), self.layer["head_dim"]
        q, k, v = (self._linear(seen, f"{prefix}{name}_proj").reshape(n, -1, d) for name in "qkv")
        if f"{prefix}q_norm" in self.w:
            q, k = self._norm(q, f"{prefix}q_norm"), self._norm(k, f"{prefix}k_norm")
        turn = np.exp(1j * np.outer(np.arange(n), frequencies(self.layer)))[:, None]
        q, k = (_rotated(heads, turn) for heads in (q, k))
        k, v = (np.repeat(heads, q.shape[1] // heads.shape[1], axis=1) for heads in (k, v))
        mixed = np.empty_like(q)
        for head in range(q.shape[1]):
            scores = np.where(np.tri(n, dtype=bool), q[:, head] @ k[:, head].T / np.sqrt(d), -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, head]
        return self._linear(mixed.reshape(n, -1), f"{prefix}o_proj")


def frequencies(layer: Mapping[str, Any]) -> Array:
    """[d / 2]: radians from a position to the next; positions lie closer by the factor of a linear scaling."""
    section = {**(layer.get("rope_parameters") or {}), **(layer.get("rope_scaling") or {})}
    theta = section.get("rope_theta", layer.get("rope_theta", 10000.0))
    plain: Array = theta ** (-np.arange(0, layer["head_dim"], 2) / layer["head_dim"])
    return plain / (section["factor"] if section.get("rope_type") == "linear" else 1.0)


def _rotated(heads: Array, turn: Array) -> Array:
    """Element i of a head and element i + d/2 are a complex number, which turns with the position."""
    left, right = np.split(heads, 2, axis=2)
    turned = (left + 1j * right) * turn
    return np.concatenate([turned.real, turned.imag], axis=2)
