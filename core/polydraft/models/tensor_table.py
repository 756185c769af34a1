"""The table from canonical tensor names to those of a checkpoint, with the shapes that a description implies.

Families build it (`families.py`), the loader checks a checkpoint against it (`checkpoint.py`). It opens no file: it says what
must be there.

Canonical names, the only ones that core knows (weights are [out, in]; i counts layers from 0):

    embed [V, H]   norm [H]   lm_head [V, H]
    layers.{i}.input_norm [H]      layers.{i}.qkv [q + 2 kv, H]       layers.{i}.qkv_bias [q + 2 kv]  where there is one
    layers.{i}.q_norm, .k_norm [d] where there are any                layers.{i}.o [H, q]
    layers.{i}.post_norm [H]       layers.{i}.gate_up [2 I, H]        layers.{i}.down [H, I]
    layers.{i}.o_bias, .gate_up_bias, .down_bias  where there are any
    layers.{i}.router [X, H], .selection_bias [X], .experts_gate_up [X, 2 I, H], .experts_down [X, H, I], .shared_gate_up,
    .shared_down, .shared_gate [1, H]  in place of gate_up and down, in layers with X experts
    mtp.{i}.emb_norm, .hid_norm [H]   mtp.{i}.proj [H, 2 H]   mtp.{i}.final_norm [H] where it has its own
    mtp.{i}.<block>  as in layers.{i}.<block>

Those of a layer are what the kinds of its block declare (`Block.weights`); these are the built-in ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

from polydraft.device import Array
from polydraft.errors import PluginError
from polydraft.models.block import Stretch, Tensor

__all__ = ["BLOCK_NAMES", "Part", "TensorTable", "stored_parts"]


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint, or a stretch of one, that makes up a canonical tensor, or a stretch of one along axis 0."""

    name: str
    """Its name in the checkpoint."""
    shape: tuple[int, ...]
    """The shape that the description implies."""
    stretch: Stretch | None = None
    """Where it lies in the tensor of that name; None: it is all of it."""
    transposed: bool = False
    """The checkpoint's tensor has its two axes in the other order."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        shape = self.shape
        if self.stretch is not None:
            axis = self.stretch.axis
            shape = (*shape[:axis], self.stretch.size, *shape[axis + 1 :])
        return shape[::-1] if self.transposed else shape

    def look(self, stored: Array) -> Array:
        """The view of it in the checkpoint's tensor."""
        longer = stored.reshape(self.stored_shape)  # some exports keep a vector as one row
        return (longer.T if self.transposed else longer)[self.place]

    @property
    def place(self) -> tuple[slice, ...]:
        """What of the checkpoint's tensor it is, as an index."""
        if self.stretch is None:
            return ()
        axis, begin = self.stretch.axis, self.stretch.begin
        return (*(slice(None) for _ in range(axis)), slice(begin, begin + self.shape[axis]))


@dataclass(frozen=True)
class TensorTable:
    """What a checkpoint must hold, may hold, and what of it is left unread; everything else in it is a mismatch."""

    parts: Mapping[str, tuple[Part, ...]]
    """Canonical name to its parts, concatenated along axis 0 in this order."""
    stacks: Mapping[str, int] = field(default_factory=dict)
    """Canonical tensors that are this many equal pieces along an axis of their own (`Tensor.stack`)."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint tensors that some exports repeat, to the canonical tensor whose bytes they must equal if present."""
    unread: tuple[str, ...] = ()
    """Patterns (`fnmatch`) of checkpoint tensors that no computation needs."""
    mtp_key: str = ""
    """The key of config.json that promises MTP layers, for the advice in an error."""

    def is_known(self, name: str) -> bool:
        """Return whether the checkpoint tensor `name` is expected, an allowed copy, or deliberately unread."""
        return name in self._names or name in self.copies or any(fnmatchcase(name, glob) for glob in self.unread)

    @property
    def scope(self) -> str:
        """What is expected, in words of an error: the layers of a model, or the tensors of what has none."""
        layers = {name.split(".")[1] for name in self.parts if name.startswith("layers.")}
        return f"tensors of its {len(layers)} layers" if layers else f"its {len(self._names)} tensors"

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(part.name for parts in self.parts.values() for part in parts)


BLOCK_NAMES: Mapping[str, tuple[str, ...]] = {
    "input_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "o": ("self_attn.o_proj.weight",),
    "o_bias": ("self_attn.o_proj.bias",),
    "post_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
    "router": ("mlp.gate.weight",),
    "selection_bias": ("mlp.gate.e_score_correction_bias",),
    "experts_gate_up": ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
    "experts_down": ("mlp.experts.{e}.down_proj.weight",),
    "shared_gate_up": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "shared_down": ("mlp.shared_experts.down_proj.weight",),
    "shared_gate": ("mlp.shared_expert_gate.weight",),
}
"""Canonical block tensor to its tensors in the Llama layout, which Qwen, MiMo and GLM share; experts as GLM names them."""


def stored_parts(
    tensors: Iterable[Tensor], names: Mapping[str, tuple[str, ...]], prefix: str, *, whose: str = "a model family"
) -> dict[str, tuple[Part, ...]]:
    """Where a checkpoint keeps the tensors of a layer: by declared name, parts with names below `prefix`; "{e}" in a name
    counts the pieces of a stack. One name for a tensor of several parts: they are stored joined.

    Errors: `PluginError` where `names`, which `whose` supplies, does not name every part of a tensor."""
    wanted = {one.name: one for one in tensors}
    if missing := [name for name, one in wanted.items() if len(names.get(name, ())) not in (1, len(one.parts))]:
        raise PluginError(
            f"the tensor names of {whose} lack {', '.join(sorted(missing))}, got {', '.join(names)}, wanted a name for each "
            "part of its tensors; complete its table"
        )
    return {
        name: tuple(
            Part(prefix + stored.replace("{e}", str(e)), shape, one.stretch)
            for e in range(one.stack or 1)
            for stored, shape in zip(names[name], one.parts if len(names[name]) > 1 else (one.joined,), strict=True)
        )
        for name, one in wanted.items()
    }
