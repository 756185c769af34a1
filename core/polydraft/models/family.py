"""A model family: how config.json and the tensor names of an architecture become a description and a table.

`families.py` has the built-in ones; plugins add others through the hook `polydraft_models`. A family is data. No weights are read
here, and nothing a configuration asks for is dropped silently: what cannot be computed as configured (another activation,
quantised weights, sliding windows of a family that was published without) is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from polydraft.errors import CapabilityError, CheckpointError, ConfigError
from polydraft.models.attention import Attention
from polydraft.models.block import Block, Tensor
from polydraft.models.checkpoint import Checkpoint
from polydraft.models.config_file import ConfigFile, eos_token_ids
from polydraft.models.description import CONVENTIONS, ModelDescription, Mtp
from polydraft.models.feed_forward import GatedMlp
from polydraft.models.rotary import Rotation
from polydraft.models.tensor_table import BLOCK_NAMES, Part, TensorTable, stored_parts

__all__ = ["Family", "MtpLayout"]


@dataclass(frozen=True, kw_only=True)
class MtpLayout:
    """Where a family keeps its MTP layers and which conventions they were trained with (see `Mtp`)."""

    prefix: str
    """What the names of MTP layer {i} begin with; the text before "{i}" belongs to MTP tensors alone. With "{layer}" instead they
    lie among the target's layers, after the last of them: MTP layer i of a target of N layers is layer N + i. Without braces the
    names below it have the "{i}"."""
    block: str = ""
    """What the names of its decoder block begin with, below `prefix`."""
    emb_norm: str
    hid_norm: str
    proj: str
    final_norm_name: str = ""
    """Name of the final norm below `prefix`; unused where `final_norm` is "target"."""
    order: Literal["hidden_first", "embedding_first"]
    feed: Literal["pre", "post"]
    final_norm: Literal["own", "target"]
    recycle: Literal["pre", "post"]
    mask_first_position: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names below `prefix` that some exports repeat, to the canonical tensor that they repeat."""
    count_keys: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers")
    """Keys of config.json that may hold the number of MTP layers; the first one present counts."""

    @property
    def conventions(self) -> dict[str, str]:
        """The switches of `CONVENTIONS`, as texts."""
        return {name: str(getattr(self, name)).lower() for name in CONVENTIONS}

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """The values, as texts, that each of `CONVENTIONS` can take: a norm of the head's own needs a name to be stored under."""
        return {**CONVENTIONS, "final_norm": CONVENTIONS["final_norm"] if self.final_norm_name else ("target",)}

    def with_conventions(self, chosen: Mapping[str, str]) -> MtpLayout:
        """The same layers computed by other conventions. Errors: `ConfigError` for a name or value that there is not."""
        for name, value in chosen.items():
            if value not in self.choices.get(name, ()):
                known = "; ".join(f"{one}={'|'.join(values)}" for one, values in self.choices.items())
                raise ConfigError(f"--mtp-option {name}={value} is none of this model's MTP layers, wanted {known}")
        values = {name: value == "true" if name == "mask_first_position" else value for name, value in chosen.items()}
        return replace(self, **values)  # type: ignore[arg-type]

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Canonical tensors that MTP layers have besides their block, to their names below the prefix."""
        own = {"final_norm": (self.final_norm_name,)} if self.final_norm == "own" else {}
        return {"emb_norm": (self.emb_norm,), "hid_norm": (self.hid_norm,), "proj": (self.proj,), **own}

    def prefix_of(self, index: int, num_layers: int) -> str:
        """What the names of one MTP layer begin with, beside a target of `num_layers`."""
        return self.prefix.format(i=index, layer=num_layers + index)

    def names_of(self, index: int, block_names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """Canonical tensors of one MTP layer to their names below its prefix."""
        block = {name: tuple(self.block + one for one in stored) for name, stored in block_names.items()}
        return {name: tuple(one.replace("{i}", str(index)) for one in stored) for name, stored in (block | self.names).items()}

    def stored(self, names: Iterable[str], num_layers: int) -> tuple[str, ...]:
        """Those of a checkpoint's tensors that belong to MTP layers."""
        stem, _, field_name = self.prefix.partition("{")
        first = num_layers if field_name.startswith("layer") else 0
        numbers = ((name, name[len(stem) :].partition(".")[0]) for name in names if name.startswith(stem))
        return tuple(name for name, number in numbers if not first or (number.isdigit() and int(number) >= first))


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture as data. A switch is a constant, or the config.json key (false where absent) that decides."""

    architecture: str
    """The entry of `architectures` in config.json that selects this family."""
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    feed_forward_bias: bool | str = False
    qk_norm: bool | str = False
    norm_plus_one: bool = False
    sliding_window: bool | str = False
    """Whether rows attend to the last `sliding_window` keys alone, where the configuration names a number; False where no such
    model was published, and a configuration that asks for it is refused."""
    max_window_layers: int | None = None
    """The key of this name of a configuration that does not say: the layers before this one attend to all keys. None: the family
    has no such key, and all layers are alike."""
    rope_style: Literal["half", "interleaved"] = "half"
    rope_theta: float = 10000.0
    """The rotary base of a configuration that names none."""
    partial_rotary_factor: float | None = None
    """The share of a head that rotates, of a configuration that does not say. None: heads rotate whole whatever it says, since
    transformers' models of the family do not read it."""
    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    layer_prefix: str = "model.layers.{i}."
    block_names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: BLOCK_NAMES)
    """Canonical block tensor to checkpoint names below the prefix of a layer."""
    transposed: tuple[str, ...] = ()
    """Roles, or canonical names, of matrices that are stored as [in, out]."""
    unread: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    """Patterns of tensors that are derived from the configuration and never read."""
    mtp: MtpLayout | None = None

    def describe(
        self, checkpoint: Checkpoint, conventions: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[ModelDescription, TensorTable]:
        """Return the description of `checkpoint` and the table to load it by; reads JSON and tensor headers only. `conventions`,
        as texts by name, take the place of those that the family has for its MTP layers.

        Errors: `CheckpointError` for a missing or malformed key, `CapabilityError` for a setting that is not built, `ConfigError`
        for a convention that there is not.
        """
        stored = self.as_stored(checkpoint)
        if not conventions:
            return stored._describe(checkpoint)
        if stored.mtp is None:
            raise ConfigError(f"--mtp-option: {self.architecture} has no MTP layers; leave it out")
        changed = replace(stored, mtp=stored.mtp.with_conventions(conventions))
        model, table = changed._describe(checkpoint)
        known, used = (family.mtp.conventions for family in (stored, changed) if family.mtp)
        others = [f"{name} is {used[name]} instead of {known[name]}" for name in known if used[name] != known[name]]
        note = f"MTP layers: {', '.join(others)}, which {self.architecture} is known for" if others else ""
        return replace(model, mtp_note=model.mtp_note or note), table

    def as_stored(self, checkpoint: Checkpoint) -> Family:
        """The family with the names and layouts of this checkpoint; a family of which several exports exist overrides this."""
        del checkpoint
        return self

    def _describe(self, checkpoint: Checkpoint) -> tuple[ModelDescription, TensorTable]:
        config = ConfigFile(checkpoint.path / "config.json", checkpoint.config)
        self.refuse(config)
        stored = checkpoint.most_tensors
        for key in ("num_hidden_layers", *(self.mtp.count_keys if self.mtp else ())):
            config.integer(key, 0, minimum=0, maximum=stored)  # each has tensors, and is gone through by itself
        blocks = self.blocks(config)
        mtp, note, unread = self._mtp(config, checkpoint, blocks)
        pieces = sum(one.stack for block in (*blocks, *(mtp.blocks if mtp else ())) for one in block.weights(1))
        if pieces > stored:
            raise CheckpointError(
                f"{config.path} describes {pieces} matrices of experts, wanted at most {stored}, as many as tensors are stored; "
                "use the config.json of these weights"
            )
        vocab_size = config.integer("vocab_size")
        bos, pad = (config.token_ids(key, vocab_size) for key in ("bos_token_id", "pad_token_id"))
        description = ModelDescription(
            name=checkpoint.path.resolve().name,
            architecture=self.architecture,
            hidden_size=config.integer("hidden_size"),
            vocab_size=vocab_size,
            eps=config.number("rms_norm_eps"),
            blocks=blocks,
            max_model_len=self.rotation(config).max_len,
            norm_plus_one=self.norm_plus_one,
            tie_embeddings=config.flag("tie_word_embeddings", self.lm_head not in checkpoint.names()),
            dtype=checkpoint.dtype(self.embed),
            packed_as=checkpoint.quantization.packings if checkpoint.quantization else (),
            eos_token_ids=eos_token_ids(checkpoint.path, checkpoint.config, vocab_size),
            bos_token_id=bos[0] if bos else None,
            pad_token_id=pad[0] if pad else None,
            mtp=mtp,
            mtp_note=note,
        )
        return description, self._table(description, unread)

    def refusals(self, config: ConfigFile) -> dict[str, str]:
        """Settings that would change the computation and that these blocks do not implement, each with what is wrong with it. A
        family that implements some of them overrides this and leaves those out of what `super()` returns."""
        found = _unbuilt(config)
        if self.sliding_window is not False:
            found.pop("layer_types", None)
        return found

    def refuse(self, config: ConfigFile) -> None:
        """Raise `CapabilityError` with every one of `refusals`."""
        if found := self.refusals(config):
            raise CapabilityError(f"{config.path}: {'; '.join(found.values())}")

    def blocks(self, config: ConfigFile) -> tuple[Block, ...]:
        """The decoder blocks, first layer first. A family whose layers differ, or are of kinds of its own, overrides this."""
        return tuple(self.block(config, sliding_window) for sliding_window in self.sliding_windows(config))

    def sliding_windows(self, config: ConfigFile) -> tuple[int, ...]:
        """The sliding window of each layer, 0 for none."""
        count, size, first = config.integer("num_hidden_layers"), 0, 0
        if _switch(config, self.sliding_window) and config.values.get("sliding_window") is not None:
            size = config.integer("sliding_window")
        if self.max_window_layers is not None:
            first = config.integer("max_window_layers", self.max_window_layers, minimum=0)
        usual = [_SLIDING if size and layer >= first else _FULL for layer in range(count)]
        kinds = config.values.get("layer_types")
        kinds = usual if kinds is None else kinds
        known = isinstance(kinds, list) and len(kinds) == count and all(k == _FULL or (k == _SLIDING and size) for k in kinds)
        if not known or (self.max_window_layers is None and kinds != usual):
            raise CheckpointError(
                f"{config.path}: layer_types is {kinds!r}, beside sliding_window {config.values.get('sliding_window')!r} and "
                f"use_sliding_window {config.values.get('use_sliding_window')!r}, wanted what these say of {count} layers, like "
                f"{usual!r}; use the config.json of these weights"
            )
        return tuple(size if kind == _SLIDING else 0 for kind in kinds)

    def mtp_block(self, config: ConfigFile, blocks: tuple[Block, ...]) -> Block:
        """The block of each MTP layer, beside those of the target: like the last of them, unless a family overrides this."""
        del config
        return blocks[-1]

    def block(self, config: ConfigFile, sliding_window: int = 0) -> Block:
        """A dense block as the configuration's keys have it, with this sliding window."""
        heads = config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", heads)
        head_dim = _head_dim(config)
        if heads % kv_heads or head_dim % 2:
            raise CheckpointError(
                f"{config.path}: num_attention_heads is {heads}, num_key_value_heads {kv_heads}, head_dim {head_dim}, "
                f"wanted a multiple of the second and an even head_dim; use the config.json of these weights"
            )
        attention = Attention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=self.rotation(config).rope(self.rope_style),
            qkv_bias=_switch(config, self.qkv_bias),
            output_bias=_switch(config, self.output_bias),
            qk_norm=_switch(config, self.qk_norm),
            sliding_window=sliding_window,
        )
        width = config.integer("intermediate_size")
        return Block(attention, GatedMlp(width, _switch(config, self.feed_forward_bias)))

    def rotation(self, config: ConfigFile) -> Rotation:
        """How queries and keys rotate. A family whose layers do not rotate alike makes its blocks itself."""
        return Rotation.read(config, _head_dim(config), theta=self.rope_theta, share=self.partial_rotary_factor)

    def _mtp(
        self, config: ConfigFile, checkpoint: Checkpoint, blocks: tuple[Block, ...]
    ) -> tuple[Mtp | None, str, tuple[str, ...]]:
        """Return the MTP head, the reason where there is none, and the patterns of its tensors where it is left out."""
        layout = self.mtp
        if layout is None:
            return None, f"{self.architecture} has no MTP layers", ()
        key = next((key for key in layout.count_keys if config.values.get(key) is not None), layout.count_keys[0])
        count = config.integer(key, 0, minimum=0)
        if count:
            switches = (layout.order, layout.feed, layout.final_norm, layout.recycle, layout.mask_first_position)
            return Mtp((self.mtp_block(config, blocks),) * count, *switches), "", ()
        stored = layout.stored(checkpoint.names(), len(blocks))
        said = "has no" if config.values.get(key) is None else "sets"
        note = f"{config.path} {said} {key}{'' if said == 'has no' else ' to 0'}"
        if stored:
            where = layout.prefix.split("{")[0]
            note += f", yet {len(stored)} tensors {where}* are stored; set it to the number of their layers to draft with them"
        return None, note, stored

    def _table(self, description: ModelDescription, unread: tuple[str, ...]) -> TensorTable:
        width, declared = description.hidden_size, description.weights()
        lm_head = self.embed if description.tie_embeddings else self.lm_head
        stored = {"embed": self.embed, "norm": self.norm, "lm_head": lm_head}
        named = stored_parts((declared[name] for name in stored), {name: (one,) for name, one in stored.items()}, "")
        if description.tie_embeddings:
            named["lm_head"] = named["embed"]
        parts = self._laid_out(named, {name: declared[name] for name in stored if not description.tie_embeddings})
        for i, (layer, block) in enumerate(description.layers.items()):
            weights = block.weights(width)
            named = stored_parts(weights, self.block_names, self.layer_prefix.format(i=i))
            laid_out = self._laid_out(named, {one.name: one for one in weights})
            parts |= {f"{layer}.{key}": value for key, value in laid_out.items()}
        copies = {self.lm_head: "embed"} if description.tie_embeddings else {}
        if self.mtp is not None and description.mtp is not None:
            for i, (layer, block) in enumerate(description.mtp.layers.items()):
                prefix = self.mtp.prefix_of(i, description.num_layers)
                if self.mtp.final_norm == "target" and self.mtp.final_norm_name:
                    unread = (*unread, prefix + self.mtp.final_norm_name)
                weights = (*description.mtp.own_weights(width), *block.weights(width))
                named = stored_parts(weights, self.mtp.names_of(i, self.block_names), prefix)
                laid_out = self._laid_out(named, {one.name: one for one in weights})
                parts |= {f"{layer}.{key}": value for key, value in laid_out.items()}
                copies |= {prefix + name: original for name, original in self.mtp.copies.items()}
        parts = {name: parts[name] for name in declared}
        key = self.mtp.count_keys[0] if self.mtp else ""
        stacks = {name: one.stack for name, one in declared.items() if one.stack}
        return TensorTable(parts, stacks, copies, (*self.unread, *unread), key)

    def _laid_out(self, parts: dict[str, tuple[Part, ...]], declared: Mapping[str, Tensor]) -> dict[str, tuple[Part, ...]]:
        """The same parts, those of matrices that this checkpoint keeps as [in, out] marked so."""
        marks = {name for name, one in declared.items() if one.name in self.transposed or one.role in self.transposed}
        return {
            name: tuple(replace(one, transposed=name in marks and len(one.shape) == 2) for one in those)
            for name, those in parts.items()
        }


_FULL, _SLIDING = "full_attention", "sliding_attention"


def _head_dim(config: ConfigFile) -> int:
    return config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))


def _switch(config: ConfigFile, switch: bool | str) -> bool:
    return config.flag(switch, False) if isinstance(switch, str) else switch


def _unbuilt(config: ConfigFile) -> dict[str, str]:
    """The settings of a configuration that no family here implements, by the key that says so."""
    layer_types = config.values.get("layer_types")
    uses_sliding_window = config.flag("use_sliding_window", False) and config.values.get("sliding_window") is not None
    if isinstance(layer_types, list):
        uses_sliding_window = any(kind != _FULL for kind in layer_types)
    activation = config.text("hidden_act", "silu")
    found = {}
    if uses_sliding_window:
        found["layer_types"] = (
            f"layer_types is {layer_types!r} with sliding_window {config.values.get('sliding_window')!r}, wanted full attention "
            "in all layers; use a model without sliding windows"
        )
    if activation != "silu":
        found["hidden_act"] = f"hidden_act is {activation!r}, wanted 'silu'; use a model with a SiLU feed-forward"
    return found
