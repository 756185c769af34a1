"""The draft model as its checkpoint describes it: which layers of the target it taps, its decoder layer, its tensors.

The factory reads it, the proposer launches what it says. It allocates nothing and launches nothing but its own half a block.

    x_p = W_fc [low_p | middle_p | high_p]                                  states of the target, of three of its layers
    m_p = attention(W_qkv [N_input_layernorm(E[t_(p+1)]) | N_hidden_norm(x_p)])           over rows 0..p of its own cache
    h_p = x_p + W_o m_p;   y_p = h_p + mlp(N_post_attention_layernorm(h_p));           logits_p = W_lm_head N_norm(y_p)

Row p predicts token p + 2. Where the target has not computed row p yet, x_p is y_(p-1), the draft model's own output
(Li et al. 2025, EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polydraft.errors import CheckpointError, ConfigError
from polydraft.models import (
    BLOCK_NAMES,
    At,
    Attention,
    Block,
    Checkpoint,
    ConfigFile,
    Family,
    ModelDescription,
    Norm,
    Stretch,
    Tensor,
    Work,
)
from polydraft.proposers import DraftWeights

PREFIX = "eagle3"
TRAINED_FOR_IT = "use a draft model that was trained for this target"
LAYER = f"{PREFIX}.midlayer"
FAMILY = Family(architecture="LlamaForCausalLMEagle3")
"""Reads the keys that a dense layer has, and refuses those that it does not compute."""
FC = ("fc.low", "fc.middle", "fc.high")
"""The columns of `fc` by tap: no contract lays taps side by side, and W [a | b | c] = W_a a + W_b b + W_c c."""
NAMES: Mapping[str, tuple[str, ...]] = {
    **BLOCK_NAMES,
    "embed_norm": ("input_layernorm.weight",),
    "hidden_norm": ("hidden_norm.weight",),
}
"""Tensors of the layer by name, and what the checkpoint calls them below "midlayer."."""


class TwoInputAttention(Attention):
    """Attention whose queries, keys and values see the token's embedding beside the residual stream, each normalised.

    Expects the embedding in the scratch "embedded". It normalises itself: its block has `input_norm=False`."""

    contracts = ("combine_draft_inputs", *Attention.contracts)

    def scratch(self, hidden: int) -> tuple[Work, ...]:
        """The embedding, and both inputs side by side."""
        return (Work("embedded", hidden), Work("both", 2 * hidden), *super().scratch(hidden))

    def weights(self, hidden: int) -> tuple[Tensor, ...]:
        """Those of attention, with the projection of queries, keys and values twice as wide."""
        qkv, *others = super().weights(hidden)
        wide = replace(qkv, parts=tuple((rows, 2 * columns) for rows, columns in qkv.parts))
        return (*(Tensor(name, ((hidden,),), "norm") for name in ("embed_norm", "hidden_norm")), wide, *others)

    def keep(self, at: At) -> None:
        """Combine, then as attention does; `mix` begins with the same."""
        at.add(
            "combine_draft_inputs", embedding=at.scratch["embedded"], hidden=at.x, emb_norm=at.own("embed_norm"),
            hid_norm=at.own("hidden_norm"), positions=at.rows.positions, eps=at.norm.eps, plus_one=at.norm.plus_one,
            order="embedding_first", mask_first_position=False, out=at.scratch["both"],
        )  # fmt: skip
        super().keep(replace(at, scratch={**at.scratch, "normed": at.scratch["both"]}))


@dataclass(frozen=True)
class DraftModel:
    """One draft model beside one target."""

    directory: Path
    hidden_size: int
    vocab_size: int
    norm: Norm
    points: tuple[str, ...]
    """Where it taps the target: low, middle, high."""
    block: Block
    draft_ids: NDArray[np.int64] | None
    """[M]: the token that each row of its head scores; None: row i scores token i."""

    @classmethod
    def read(cls, directory: str, model: ModelDescription) -> DraftModel:
        """Read config.json in `directory` and check it against the target. Raises `ConfigError` where no directory was named,
        `CheckpointError`, or `CapabilityError` for settings that nobody computes."""
        if not directory:
            raise ConfigError(
                f"proposer eagle3 has no draft model, wanted one of {model.name}; give its directory by --draft-model"
            )
        with Checkpoint(directory) as checkpoint:
            config = ConfigFile(checkpoint.path / "config.json", checkpoint.config)
            return cls._read(checkpoint, config, model)

    @classmethod
    def _read(cls, checkpoint: Checkpoint, config: ConfigFile, model: ModelDescription) -> DraftModel:
        FAMILY.refuse(config)
        if config.values.get("architectures") != [FAMILY.architecture]:
            raise CheckpointError(
                f"{config.path}: architectures is {config.values.get('architectures')!r}, wanted [{FAMILY.architecture!r}]; "
                "name the directory of an EAGLE-3 draft model"
            )
        for key, wanted in {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}.items():
            if (got := config.integer(key)) != wanted:
                raise CheckpointError(
                    f"{config.path}: {key} is {got}, wanted {wanted} as the target {model.name} has it; {TRAINED_FOR_IT}"
                )
        block = FAMILY.block(config)
        block = replace(block, mixer=TwoInputAttention(**vars(block.mixer)), input_norm=False)
        norm = Norm(config.number("rms_norm_eps"), plus_one=False)
        points, draft_ids = _points(config, model), _draft_ids(checkpoint, config, model.vocab_size)
        return cls(checkpoint.path, model.hidden_size, model.vocab_size, norm, points, block, draft_ids)

    @property
    def head_size(self) -> int:
        """M: how many tokens its head scores."""
        return self.vocab_size if self.draft_ids is None else len(self.draft_ids)

    def weights(self) -> DraftWeights:
        """The tensors that it reads, and their names in the checkpoint."""
        hidden = self.hidden_size
        tensors = (
            *(Tensor(name, ((hidden, hidden),), stretch=Stretch(1, i * hidden, 3 * hidden)) for i, name in enumerate(FC)),
            *(replace(one, name=f"midlayer.{one.name}") for one in self.block.weights(hidden)),
            Tensor("norm", ((hidden,),), "norm"),
            Tensor("lm_head", ((self.head_size, hidden),)),
        )
        names = {f"midlayer.{name}": tuple(f"midlayer.{part}" for part in parts) for name, parts in NAMES.items()}
        names |= {name: (f"{name}.weight",) for name in ("norm", "lm_head")} | dict.fromkeys(FC, ("fc.weight",))
        return DraftWeights(self.directory, PREFIX, tensors, names, () if self.draft_ids is None else ("d2t", "t2d"))


def _points(config: ConfigFile, model: ModelDescription) -> tuple[str, ...]:
    """The taps. As elsewhere, layer i in the configuration means what enters layer i, which is what leaves the one before."""
    last = model.num_layers
    ids = config.section("eagle_config").values.get("eagle_aux_hidden_state_layer_ids", [2, last // 2, last - 3])
    if not isinstance(ids, list) or len(ids) != 3 or any(type(i) is not int or not 0 <= i <= last for i in ids):
        raise CheckpointError(
            f"{config.path}: eagle_aux_hidden_state_layer_ids is {ids!r}, wanted three layers from 0 to {last} of the target "
            f"{model.name}; {TRAINED_FOR_IT}"
        )
    return tuple(f"layer {i - 1}" if i else "embedding" for i in ids)


def _draft_ids(checkpoint: Checkpoint, config: ConfigFile, vocab_size: int) -> NDArray[np.int64] | None:
    """The tokens of a reduced vocabulary: row i of the head scores token i + d2t[i]. Where `t2d` says which tokens these are, it
    has to agree."""
    size = config.integer("draft_vocab_size", vocab_size)
    if size == vocab_size and "d2t" not in checkpoint.names():
        return None
    offsets = checkpoint.integers("d2t")
    ids = np.arange(size) + offsets if offsets.shape == (size,) else offsets[:0]
    known = np.isin(np.arange(vocab_size), ids)
    agrees = "t2d" not in checkpoint.names() or np.array_equal(checkpoint.integers("t2d"), known)
    if np.count_nonzero(known) != size or not agrees:
        raise CheckpointError(
            f"{checkpoint.file('d2t')}: tensor d2t does not name {size} (draft_vocab_size) of {vocab_size} tokens, each once and "
            f"as t2d has them, wanted offsets from rows of the head to tokens; {TRAINED_FOR_IT}"
        )
    return ids
