"""The built-in model families, and the registry that finds the family of a checkpoint.

The engine asks a `FamilyRegistry` once for each checkpoint; plugins add families before that.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from polydraft.errors import CheckpointError, PluginError
from polydraft.models.checkpoint import Checkpoint
from polydraft.models.description import ModelDescription
from polydraft.models.family import Family, MtpLayout
from polydraft.models.sparse_families import ErnieMoe, Glm4Moe, Qwen3Moe
from polydraft.models.tensor_table import TensorTable
from polydraft.plugins.checks import check_result

__all__ = ["BUILT_IN", "FamilyRegistry"]

BUILT_IN: tuple[Family, ...] = (
    Family(
        architecture="MiMoForCausalLM",
        qkv_bias=True,
        sliding_window="use_sliding_window",
        max_window_layers=28,
        mtp=MtpLayout(
            prefix="model.mtp_layers.{i}.",
            emb_norm="token_layernorm.weight",
            hid_norm="hidden_layernorm.weight",
            proj="input_proj.weight",
            final_norm_name="final_layernorm.weight",
            order="hidden_first",
            feed="pre",
            final_norm="own",
            recycle="pre",
            copies={"embed_tokens.weight": "embed", "lm_head.weight": "lm_head"},
        ),
    ),
    Family(architecture="Qwen2ForCausalLM", qkv_bias=True, sliding_window="use_sliding_window", max_window_layers=28),
    Family(
        architecture="Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        sliding_window="use_sliding_window",
        max_window_layers=28,
    ),
    Family(architecture="MistralForCausalLM", sliding_window=True),
    Family(
        architecture="LlamaForCausalLM",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        feed_forward_bias="mlp_bias",
    ),
    Glm4Moe(architecture="Glm4MoeForCausalLM"),
    ErnieMoe(architecture="Ernie4_5_MoeForCausalLM"),
    ErnieMoe(architecture="Ernie4_5ForCausalLM"),
    Qwen3Moe(architecture="Qwen3MoeForCausalLM"),
)
"""MiMo, whose body and MTP block are Qwen2; dense targets without MTP layers; and the families in `sparse_families.py`."""


class FamilyRegistry:
    """The families of one engine: the built-in ones, and those that plugins register before a checkpoint is opened."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[Family, str]] = {family.architecture: (family, "polydraft") for family in BUILT_IN}

    def register(self, family: Family, *, plugin: str = "an unnamed plugin") -> None:
        """Add `family` on behalf of `plugin`. Errors: `PluginError` where it is none, or its architecture is taken."""
        check_result(plugin, "polydraft_models", family, Family)
        if family.architecture in self._families:
            raise PluginError(
                f"plugin {plugin} registers model family {family.architecture} in polydraft_models, got one already "
                f"from {self._families[family.architecture][1]}, wanted a new architecture; disable one of the two"
            )
        self._families[family.architecture] = (family, plugin)

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures that can be loaded, sorted."""
        return tuple(sorted(self._families))

    def describe(
        self, checkpoint: Checkpoint, conventions: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[ModelDescription, TensorTable]:
        """Return the description of `checkpoint` and its table, by the family that its config.json names; `conventions` are of
        its MTP layers.

        Errors: as `family_of` and `Family.describe`.
        """
        return self.family_of(checkpoint).describe(checkpoint, conventions)

    def family_of(self, checkpoint: Checkpoint) -> Family:
        """The family that config.json names. Errors: `CheckpointError` for an unknown one, with the nearest that is known."""
        path = checkpoint.path / "config.json"
        named = checkpoint.config.get("architectures")
        architecture = named[0] if isinstance(named, list) and named else named
        if not isinstance(architecture, str) or architecture not in self._families:
            nearest = difflib.get_close_matches(str(architecture), self.architectures, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]}" if nearest else "use one of those, or a plugin that adds this one"
            raise CheckpointError(f"{path}: architectures is {named!r}, wanted one of {', '.join(self.architectures)}; {hint}")
        return self._families[architecture][0]
