"""An EAGLE-3 draft model as its checkpoint describes it: the layers of the target that it taps, its decoder layers, its tensors.

`eagle3.py` launches what is said here, the loader reads the tensors that are named here. All published layouts come to this one
description: the flat configuration of SafeAILab, SGLang and SpecForge (`midlayer.*`), that of vLLM, and the nested one of the
speculators library (`layers.0.*`). What is not computed is refused by name; nothing is guessed.

    x_p = W_fc [a_p | b_p | c_p]                   states of the target, of three of its layers; each normalised first (`fc_norm`)
    m_p = attention(W_qkv [N_input(E[t_(p+1)]) | N_hidden(x_p)])                      over rows 0..p of its own cache
    h_p = x_p + W_o m_p;   y_p = h_p + mlp(N_post(h_p));           logits_p = W_lm_head N(y_p)

Row p predicts token p + 2. Where the target has not computed row p yet, x_p is y_(p-1), the model's own output. With
`norm_before_residual` h_p adds to N_hidden(x_p) instead; with `norm_output` N(y_(p-1)) is fed back. (Li et al. 2025, EAGLE-3,
arXiv 2503.01840; the norms are those of EAGLE-3.1, arXiv 2605.09992.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from polydraft.errors import CapabilityError, CheckpointError, ConfigError
from polydraft.models.attention import Attention
from polydraft.models.block import At, Block, Norm, Stretch, Tensor, Work
from polydraft.models.checkpoint import Checkpoint
from polydraft.models.config_file import ConfigFile
from polydraft.models.description import ModelDescription
from polydraft.models.family import Family
from polydraft.models.ranks import alike
from polydraft.models.tensor_table import BLOCK_NAMES
from polydraft.proposers.base import DraftWeights
from polydraft.sampling.draft_vocab import num_rows

__all__ = ["PREFIX", "Eagle3Model"]

PREFIX: Final = "eagle3"
"""What the names of its weights, caches and buffers begin with."""
ARCHITECTURES: Final = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3ForCausalLMEagle3", "Eagle3Qwen3ForCausalLM", "LlamaForCausalLM",
)  # fmt: skip
"""What config.json may call a model with flat keys. The last is what EAGLE's own trainer writes; the tensor `fc.weight` tells it
from a language model."""
LAYER_IDS: Final = "eagle_aux_hidden_state_layer_ids"
TRAINED_FOR_IT: Final = "use a draft model that was trained for this target"
TABLES: Final = ("d2t", "t2d")
"""The tables of a reduced vocabulary: for row i of the head the token minus i, and for each token whether it is scored."""
UNREAD: Final = ("*.rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that are worked out from the configuration, or that the speculators library copied from the target to train with."""


@dataclass(frozen=True)
class TwoInputAttention(Attention):
    """Attention whose queries, keys and values see the token's embedding beside the residual stream, each normalised.

    Expects the embedding in the scratch "embedded". It normalises itself: its block has `input_norm=False`."""

    order: Literal["embedding_first", "hidden_first"] = "embedding_first"
    """Halves of what it sees."""
    normed_residual: bool = False
    """What enters lies in the scratch "entered", and the residual stream is made from it, normalised. False: what enters is the
    residual stream."""

    @property
    def contracts(self) -> tuple[str, ...]:
        """Those of attention, and what joins both inputs."""
        return ("combine_draft_inputs", *super().contracts)

    def scratch(self, hidden: int) -> tuple[Work, ...]:
        """The embedding, both inputs side by side, and what enters where that is not the residual stream."""
        entered = (Work("entered", hidden),) if self.normed_residual else ()
        return (Work("embedded", hidden), Work("both", 2 * hidden), *entered, *super().scratch(hidden))

    def weights(self, hidden: int) -> tuple[Tensor, ...]:
        """Those of attention, with the projection of queries, keys and values twice as wide."""
        qkv, *others = super().weights(hidden)
        wide = replace(qkv, parts=tuple((rows, 2 * columns) for rows, columns in qkv.parts))
        return (*(Tensor(name, ((hidden,),), "norm") for name in ("embed_norm", "hidden_norm")), wide, *others)

    def keep(self, at: At) -> None:
        """Combine, then as attention does; `mix` begins with the same."""
        entered = at.scratch["entered"] if self.normed_residual else at.x
        at.add(
            "combine_draft_inputs", embedding=at.scratch["embedded"], hidden=entered, emb_norm=at.own("embed_norm"),
            hid_norm=at.own("hidden_norm"), positions=at.rows.positions, eps=at.norm.eps, plus_one=at.norm.plus_one,
            order=self.order, mask_first_position=False, out=at.scratch["both"],
        )  # fmt: skip
        if self.normed_residual:
            at.norm.emit(at.program, at.own("hidden_norm"), x=entered, out=at.x, unit=at.unit, stage=at.stage)
        super().keep(replace(at, scratch={**at.scratch, "normed": at.scratch["both"]}))


@dataclass(frozen=True)
class Stored:
    """What a checkpoint calls its tensors, and which of those that not every model has are there."""

    stem: str
    """Before every name but those of the head and the tables: "" or "model."."""
    first: str
    """Before the tensors of the first decoder layer, behind the stem."""
    names: Collection[str]

    @classmethod
    def of(cls, names: Collection[str]) -> Stored:
        """Those of a checkpoint with these tensors."""
        stem = "model." if "model.fc.weight" in names else ""
        mid = any(name.startswith(f"{stem}midlayer.") for name in names)
        return cls(stem, "midlayer." if mid else "layers.0.", names)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name behind the stem."""
        return self.stem + name in self.names

    @property
    def switches(self) -> dict[str, bool]:
        """What a family decides by configuration and these checkpoints show: their configurations are copied from targets."""
        shown = {
            "qkv_bias": "self_attn.q_proj.bias", "output_bias": "self_attn.o_proj.bias",
            "feed_forward_bias": "mlp.gate_proj.bias", "qk_norm": "self_attn.q_norm.weight",
        }  # fmt: skip
        return {switch: self.has(self.first + name) for switch, name in shown.items()}


@dataclass(frozen=True)
class Eagle3Model:
    """One draft model beside one target."""

    directory: Path
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    norm: Norm
    points: tuple[str, ...]
    """Where it taps the target, in the order of the columns of `fc`."""
    blocks: Mapping[str, Block]
    """Its decoder layers by prefix; the first has two inputs."""
    draft_ids: NDArray[np.int64] | None
    """[M]: the token that each row of its head scores; None: row i scores token i."""
    fc_bias: bool
    fc_norm: bool
    """Whether each tap is normalised by itself."""
    norm_output: bool
    """Whether what it feeds back is normalised."""
    head: Literal["own", "embedding", "target"]
    """Whose weights score tokens."""
    stored: Stored
    ranks: int = 1
    """Of how many shares this is one: sizes of blocks are the share's, those here are the draft model's."""

    @classmethod
    def read(cls, directory: str, model: ModelDescription) -> Eagle3Model:
        """Read config.json in `directory`, and the tables of its vocabulary, and check them against the target; no weight is
        read. Beside a share of the target it is a share as well. Raises `ConfigError` where no directory was named,
        `CheckpointError` for what is wrong or of another target, `CapabilityError` for settings that nobody computes, and for
        what ranks cannot share out."""
        if not directory:
            raise ConfigError(
                f"proposer eagle3 has no draft model, wanted one of {model.name}; give its directory by --draft-model"
            )
        with Checkpoint(directory) as checkpoint:
            return cls._read(checkpoint, _Config.of(checkpoint), model)._beside(model)

    @classmethod
    def _read(cls, checkpoint: Checkpoint, config: _Config, model: ModelDescription) -> Eagle3Model:
        stored = Stored.of(checkpoint.names())
        family = Family(architecture=config.architecture, **cast("dict[str, Any]", stored.switches))
        layer, own = config.layer, config.own
        family.refuse(layer)
        config.refuse()
        hidden = layer.integer("hidden_size")
        wide = own.integer("target_hidden_size", hidden)
        for key, got, wanted in (
            ("hidden_size" if wide == hidden else "target_hidden_size", wide, model.hidden_size),
            ("vocab_size", layer.integer("vocab_size"), model.vocab_size),
        ):
            if got != wanted:
                raise CheckpointError(
                    f"{own.path}: {key} is {got}, wanted {wanted} as the target {model.name} has it; {TRAINED_FOR_IT}"
                )
        if not stored.has("fc.weight"):
            raise CheckpointError(
                f"{checkpoint.path} holds no tensor fc.weight, which joins taps of the target, wanted one of an EAGLE-3 draft "
                "model; name the directory of one"
            )
        draft_ids = _draft_ids(checkpoint, own, model.vocab_size)
        plain = family.block(layer)
        assert isinstance(plain.mixer, Attention), "a family of core makes blocks of attention"
        attention = TwoInputAttention(
            **vars(plain.mixer), normed_residual=config.normed_residual,
            order="hidden_first" if own.flag("swap_h_and_emb", False) else "embedding_first",
        )  # fmt: skip
        first = replace(plain, mixer=attention, input_norm=False)
        count = layer.integer("num_hidden_layers", 1, maximum=checkpoint.most_tensors) if stored.first == "layers.0." else 1
        blocks = {f"{PREFIX}.layers.{i}": plain if i else first for i in range(count)}
        head: Literal["own", "embedding", "target"] = "own"
        if "lm_head.weight" not in checkpoint.names() and draft_ids is None:
            tied = layer.flag("tie_word_embeddings", False) and stored.has("embed_tokens.weight")
            head = "embedding" if tied or wide != hidden else "target"
        return cls(
            checkpoint.path, hidden, wide, model.vocab_size, Norm(layer.number("rms_norm_eps"), plus_one=False),
            _points(config, model), blocks, draft_ids, stored.has("fc.bias"),
            own.flag("fc_norm", False) or stored.has("fc_norm.0.weight"), own.flag("norm_output", False), head, stored,
        )  # fmt: skip

    def _beside(self, model: ModelDescription) -> Eagle3Model:
        """The same with sums by leaf and shared out as the target is."""
        try:
            if self.hidden_size % model.ranks:
                raise CapabilityError(f"{self.hidden_size} features of a hidden row cannot be shared out evenly")
            return replace(self, blocks=alike(model, self.blocks), ranks=model.ranks)
        except CapabilityError as error:
            raise CapabilityError(
                f"--draft-model {self.directory} with --tensor-parallel {model.ranks}: {error}; use another number"
            ) from None

    @property
    def vocab_share(self) -> int:
        """Tokens of the whole vocabulary that a rank has, as of the target."""
        return -(-self.vocab_size // self.ranks)

    @property
    def head_size(self) -> int:
        """Rows of its head, of several ranks those that each keeps."""
        return self.vocab_share if self.draft_ids is None else num_rows(self.draft_ids, self.vocab_share)

    @property
    def has_embedding(self) -> bool:
        """Whether the checkpoint has to have the embedding of tokens, or has one."""
        return self.stored.has("embed_tokens.weight") or self.hidden_size != self.target_hidden_size

    @property
    def note(self) -> str:
        """What it is in a line: where it taps the target, and how many tokens it drafts among."""
        part = "" if self.draft_ids is None else f", drafts {len(self.draft_ids)} of {self.vocab_size} tokens"
        return f"taps the target at {', '.join(self.points)}{part}"

    def weights(self) -> DraftWeights:
        """The tensors that it reads, and their names in the checkpoint."""
        hidden, wide, taps = self.hidden_size, self.target_hidden_size, len(self.points)
        found: list[tuple[Tensor, tuple[str, ...]]] = []

        def add(tensor: Tensor, *names: str) -> None:
            found.append((tensor, names))

        stem = self.stored.stem
        for i in range(taps):
            stretch = Stretch(1, i * wide, taps * wide)
            add(Tensor(f"fc.{i}", ((hidden, wide),), stretch=stretch), f"{stem}fc.weight")
            if self.fc_norm:
                add(Tensor(f"fc_norm.{i}", ((wide,),), "norm"), f"{stem}fc_norm.{i}.weight")
        if self.fc_bias:
            add(Tensor("fc_bias", ((hidden,),), "bias"), f"{stem}fc.bias")
        for i, block in enumerate(self.blocks.values()):
            prefix = f"{stem}layers.{i}." if i else stem + self.stored.first
            for one in block.weights(hidden):
                add(replace(one, name=f"layers.{i}.{one.name}"), *(prefix + part for part in _LAYER_NAMES[one.name]))
        add(Tensor("norm", ((hidden,),), "norm"), f"{stem}norm.weight")
        if self.head != "target":
            name = "lm_head.weight" if self.head == "own" else f"{stem}embed_tokens.weight"
            add(Tensor("lm_head", ((self.head_size, hidden),), split=0), name)
        if self.has_embedding:
            shape = self.vocab_size, hidden // self.ranks
            add(Tensor("embed", (shape,), "embedding", split=1), f"{stem}embed_tokens.weight")
        unread = UNREAD if self.draft_ids is None and not self.stored.has("d2t") else (*UNREAD, *TABLES)
        shared = {"embed": "embed"} if hidden == wide else {}
        tokens = {} if self.draft_ids is None else {"lm_head": self.draft_ids}
        return DraftWeights(
            self.directory, PREFIX, tuple(one for one, _ in found), {one.name: names for one, names in found}, unread, shared,
            tokens=tokens, hidden_size=hidden,
        )  # fmt: skip


_LAYER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    **BLOCK_NAMES,
    "embed_norm": ("input_layernorm.weight",),
    "hidden_norm": ("hidden_norm.weight",),
}
"""Tensors of a layer by name, and what the checkpoint calls them below the layer's prefix."""


@dataclass(frozen=True)
class _Config:
    """config.json of a draft model in any layout: the keys of its decoder layers, and those of EAGLE-3."""

    layer: ConfigFile
    own: ConfigFile
    nested: bool
    """Of the speculators library."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Config:
        """That of a checkpoint. Raises `CheckpointError` for that of another kind of model."""
        config = ConfigFile(checkpoint.path / "config.json", checkpoint.config)
        kind = config.values.get("speculators_model_type")
        if kind is not None:
            if kind != "eagle3":
                raise CheckpointError(
                    f"{config.path}: speculators_model_type is {kind!r}, wanted 'eagle3'; name the directory of an EAGLE-3 draft "
                    "model"
                )
            return cls(config.section("transformer_layer_config"), config, nested=True)
        named = config.values.get("architectures")
        if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
            raise CheckpointError(
                f"{config.path}: architectures is {named!r}, wanted one of {', '.join(ARCHITECTURES)}, or the "
                "speculators_model_type 'eagle3'; name the directory of an EAGLE-3 draft model"
            )
        own = ConfigFile(config.path, {**config.section("eagle_config").values, **config.values})
        return cls(config, own, nested=False)

    @property
    def architecture(self) -> str:
        """What errors call it."""
        return "eagle3 of the speculators library" if self.nested else str(self.own.values["architectures"][0])

    @property
    def normed_residual(self) -> bool:
        """`norm_before_residual`. Raises `CheckpointError` where a configuration of the speculators library does not say: its
        readers do not agree on what that means."""
        key = "norm_before_residual"
        if self.nested and self.own.values.get(key) is None:
            raise CheckpointError(
                f"{self.own.path} has no {key}, wanted true or false: the speculators library takes it for false, vLLM for true; "
                "add what the model was trained with"
            )
        return self.own.flag(key, False)

    @property
    def layer_ids(self) -> Any:
        """The layers that are tapped, as stored; None where it is not said."""
        return self.own.values.get(LAYER_IDS)

    def refuse(self) -> None:
        """Raise `CapabilityError` with every setting that would change the computation and is not built."""
        own, wrong = self.own, []
        if not own.flag("use_aux_hidden_state", True):
            wrong.append("use_aux_hidden_state is false, wanted taps of the target's layers")
        if own.flag("norm_before_fc", False):
            wrong.append("norm_before_fc is true, wanted no norm over all taps together (fc_norm, a norm for each tap, is built)")
        if own.number("logit_scale", 1.0) != 1.0:
            wrong.append(f"logit_scale is {own.values['logit_scale']}, wanted 1")
        if wrong:
            raise CapabilityError(f"{own.path}: {'; '.join(wrong)}; use another draft model")


def _points(config: _Config, model: ModelDescription) -> tuple[str, ...]:
    """The taps. Layer i means what enters layer i, which is what leaves the one before; but in flat configurations whose first
    layer is 1 it means what leaves layer i, as SGLang and SpecForge have it."""
    last, ids = model.num_layers, config.layer_ids
    named = isinstance(ids, list) and bool(ids) and all(type(i) is int for i in ids)
    if ids is None:
        wanted = [2, last // 2, last - 3]
    elif named and not config.nested and ids[0] == 1:
        wanted = [i + 1 for i in ids]
    else:
        wanted = ids if named else []
    if not wanted or any(not 0 <= i <= last for i in wanted):
        told = f"{LAYER_IDS} is {ids!r}" if ids is not None else f"no {LAYER_IDS} is given, which means {wanted}"
        raise CheckpointError(
            f"{config.own.path}: {told}, wanted layers that the target {model.name} with its {last} layers has; {TRAINED_FOR_IT}"
        )
    return tuple(f"layer {i - 1}" if i else "embedding" for i in wanted)


def _draft_ids(checkpoint: Checkpoint, config: ConfigFile, vocab_size: int) -> NDArray[np.int64] | None:
    """The tokens of a reduced vocabulary: row i of the head scores token i + d2t[i]. Where `t2d` says which tokens these are, it
    has to agree."""
    size = config.integer("draft_vocab_size", vocab_size)
    if size == vocab_size and "d2t" not in checkpoint.names():
        return None
    offsets = checkpoint.integers("d2t")
    ids = np.arange(size) + offsets if offsets.shape == (size,) else None
    if ids is None:
        wrong = f"has shape {list(offsets.shape)}, wanted [{size}] as draft_vocab_size has it"
    elif (outside := np.flatnonzero((ids < 0) | (ids >= vocab_size))).size:
        at = int(outside[0])
        wrong = f"maps row {at} of the head to token {ids[at]}, wanted tokens from 0 to {vocab_size - 1} of the target"
    elif np.unique(ids).size != size:
        wrong = f"names {np.unique(ids).size} tokens, wanted {size} (draft_vocab_size), each once"
    elif "t2d" in checkpoint.names() and not np.array_equal(checkpoint.integers("t2d"), np.isin(np.arange(vocab_size), ids)):
        wrong = "names other tokens than t2d does, wanted the same"
    else:
        return None if np.array_equal(ids, np.arange(vocab_size)) else ids
    raise CheckpointError(f"{checkpoint.file('d2t')}: tensor d2t {wrong}; {TRAINED_FOR_IT}")
