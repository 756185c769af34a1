"""Families with mixture-of-experts layers: GLM-4.5, ERNIE-4.5 (also as Paddle stores it, also dense) and Qwen3-MoE.

Each says which layers have experts, how they are routed, and where a checkpoint keeps them. `docs/checkpoints.md` has the
conventions of their MTP heads and where they are known from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from polydraft.errors import CheckpointError
from polydraft.models.block import Block
from polydraft.models.checkpoint import Checkpoint
from polydraft.models.config_file import ConfigFile
from polydraft.models.family import Family, MtpLayout
from polydraft.models.feed_forward import Routing, SparseMoe
from polydraft.models.tensor_table import BLOCK_NAMES

__all__ = ["ErnieMoe", "Glm4Moe", "Qwen3Moe"]


@dataclass(frozen=True, kw_only=True)
class Sparse(Family):
    """A family of which some layers have experts in place of the gated network."""

    def blocks(self, config: ConfigFile) -> tuple[Block, ...]:
        """Dense and sparse blocks, as the configuration places them."""
        dense = super().blocks(config)
        if not any(self.is_sparse(config, layer) for layer in range(len(dense))):
            return dense
        experts = self.experts(config)
        pairs = enumerate(dense)
        return tuple(replace(one, feed_forward=experts) if self.is_sparse(config, layer) else one for layer, one in pairs)

    def is_sparse(self, config: ConfigFile, layer: int) -> bool:
        """Whether layer `layer` has experts."""
        raise NotImplementedError

    def experts(self, config: ConfigFile) -> SparseMoe:
        """The feed-forward half of those layers. Errors: `CheckpointError` for sizes that do not go together."""
        raise NotImplementedError


def _checked(config: ConfigFile, half: SparseMoe) -> SparseMoe:
    """Refuse a choice that no row could make."""
    routing = half.routing
    groups, size = routing.num_groups, routing.num_experts // routing.num_groups
    if routing.num_experts % groups or routing.top_groups > groups or routing.top_k > routing.top_groups * size:
        raise CheckpointError(
            f"{config.path}: {routing.top_k} of {routing.num_experts} experts a row, from {routing.top_groups} of {groups} "
            "groups, wanted groups of one size with enough experts in them; use the config.json of these weights"
        )
    return half


@dataclass(frozen=True, kw_only=True)
class Glm4Moe(Sparse):
    """GLM-4.5, GLM-4.5-Air, 4.6 and 4.7."""

    qkv_bias: bool | str = "attention_bias"
    qk_norm: bool | str = "use_qk_norm"
    partial_rotary_factor: float | None = 0.5
    mtp: MtpLayout | None = field(
        default_factory=lambda: MtpLayout(
            prefix="model.layers.{layer}.",
            emb_norm="enorm.weight",
            hid_norm="hnorm.weight",
            proj="eh_proj.weight",
            final_norm_name="shared_head.norm.weight",
            order="embedding_first",
            feed="post",
            final_norm="own",
            recycle="post",
            copies={"embed_tokens.weight": "embed", "shared_head.head.weight": "lm_head"},
        )
    )

    def is_sparse(self, config: ConfigFile, layer: int) -> bool:
        """All but the first layers."""
        return layer >= config.integer("first_k_dense_replace", 1, minimum=0)

    def mtp_block(self, config: ConfigFile, blocks: tuple[Block, ...]) -> Block:
        """A sparse one, whatever the target's layers are."""
        return replace(blocks[-1], feed_forward=self.experts(config))

    def experts(self, config: ConfigFile) -> SparseMoe:
        """Sigmoid scores, a bias for selection, groups, shared experts stored as one network."""
        width = config.integer("moe_intermediate_size")
        routing = Routing(
            num_experts=config.integer("n_routed_experts"),
            top_k=config.integer("num_experts_per_tok"),
            scoring="sigmoid",
            selection_bias=True,
            num_groups=config.integer("n_group", 1),
            top_groups=config.integer("topk_group", 1),
            renormalize="sum" if config.flag("norm_topk_prob", True) else "none",
            scale=config.number("routed_scaling_factor", 1.0),
        )
        return _checked(config, SparseMoe(width, routing, shared_size=width * config.integer("n_shared_experts", 1, minimum=0)))


_ERNIE_BLOCK = {**BLOCK_NAMES, "selection_bias": ("mlp.moe_statics.e_score_correction_bias",)}
_ERNIE_PADDLE_BLOCK = {
    **_ERNIE_BLOCK,
    "qkv": ("self_attn.qkv_proj.weight",),
    "qkv_bias": ("self_attn.qkv_proj.bias",),
    "gate_up": ("mlp.up_gate_proj.weight",),
    "gate_up_bias": ("mlp.up_gate_proj.bias",),
    "experts_gate_up": ("mlp.experts.{e}.up_gate_proj.weight",),
    "shared_gate_up": ("mlp.shared_experts.up_gate_proj.weight",),
}
"""Names of Paddle's export. "up_gate" notwithstanding, the gate comes first."""
_ERNIE_MTP = MtpLayout(
    prefix="model.mtp_",
    block="block.{i}.",
    emb_norm="emb_norm.{i}.weight",
    hid_norm="hidden_norm.{i}.weight",
    proj="linear_proj.{i}.weight",
    order="embedding_first",
    feed="pre",
    final_norm="target",
    recycle="pre",
)
_PADDLE = "ernie."
"""What the names of Paddle's export begin with, where others have "model."."""


@dataclass(frozen=True, kw_only=True)
class ErnieMoe(Sparse):
    """ERNIE-4.5, with experts or dense, as exported for PyTorch or by Paddle."""

    qkv_bias: bool | str = "use_bias"
    output_bias: bool | str = "use_bias"
    feed_forward_bias: bool | str = "use_bias"
    rope_style: str = "interleaved"  # type: ignore[assignment]
    rope_theta: float = 500000.0
    block_names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _ERNIE_BLOCK)
    mtp: MtpLayout | None = field(default_factory=lambda: _ERNIE_MTP)

    def as_stored(self, checkpoint: Checkpoint) -> Family:
        """Paddle's export has names of its own, joined projections, and matrices as [in, out]."""
        names = checkpoint.names()
        if not any(name.startswith(_PADDLE) for name in names):
            proj = "model.mtp_linear_proj.0.weight"  # one published checkpoint has it transposed
            if proj in names and checkpoint.shape(proj)[0] > checkpoint.shape(proj)[-1]:
                return replace(self, transposed=("proj",))
            return self
        return replace(
            self,
            embed=f"{_PADDLE}embed_tokens.weight",
            norm=f"{_PADDLE}norm.weight",
            layer_prefix=f"{_PADDLE}layers.{{i}}.",
            block_names=_ERNIE_PADDLE_BLOCK,
            mtp=replace(_ERNIE_MTP, prefix=f"{_PADDLE}mtp_"),
            transposed=("linear", "experts", "router"),
        )

    def is_sparse(self, config: ConfigFile, layer: int) -> bool:
        """Every `moe_layer_interval`-th layer from a first to a last one; none in the dense models."""
        if self.architecture == "Ernie4_5ForCausalLM" or config.values.get("moe_num_experts") in (None, 0):
            return False
        first, last = config.integer("moe_layer_start_index", 1, minimum=0), config.integer("moe_layer_end_index", -1, minimum=-1)
        last = config.integer("num_hidden_layers") - 1 if last == -1 else last
        return first <= layer <= last and (layer + 1) % config.integer("moe_layer_interval", 1) == 0

    def mtp_block(self, config: ConfigFile, blocks: tuple[Block, ...]) -> Block:
        """A dense one, also beside experts."""
        del blocks
        return self.block(config)

    def experts(self, config: ConfigFile) -> SparseMoe:
        """Softmax scores, a bias for selection, shared experts stored as one network."""
        width = config.integer("moe_intermediate_size")
        routing = Routing(
            num_experts=config.integer("moe_num_experts"),
            top_k=config.integer("moe_k", 6),
            selection_bias=True,
            renormalize="clamp",
            floor=config.number("moe_norm_min", 1e-12),
        )
        shared = width * config.integer("moe_num_shared_experts", 2, minimum=0)
        return _checked(config, SparseMoe(width, routing, shared_size=shared))


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Sparse):
    """Qwen3-30B-A3B, Qwen3-235B-A22B and their kind."""

    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    qk_norm: bool | str = True
    sliding_window: bool | str = "use_sliding_window"

    def is_sparse(self, config: ConfigFile, layer: int) -> bool:
        """Every `decoder_sparse_step`-th layer that `mlp_only_layers` does not list."""
        dense = config.values.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(type(one) is not int for one in dense):
            raise CheckpointError(
                f"{config.path}: mlp_only_layers is {dense!r}, wanted a list of layers; use the config.json of these weights"
            )
        return layer not in dense and (layer + 1) % config.integer("decoder_sparse_step", 1) == 0

    def experts(self, config: ConfigFile) -> SparseMoe:
        """Softmax scores, no bias, no shared experts."""
        key = "num_experts" if config.values.get("num_experts") is not None else "num_local_experts"
        routing = Routing(
            num_experts=config.integer(key),
            top_k=config.integer("num_experts_per_tok"),
            renormalize="sum" if config.flag("norm_topk_prob", False) else "none",
        )
        return _checked(config, SparseMoe(config.integer("moe_intermediate_size"), routing))
