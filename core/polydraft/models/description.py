"""Owns the description of a model: one decoder block with switches, the MTP head with its switches, and the sizes.

Families build it from a checkpoint (`families.py`); negotiation, the step program, the weight loader and tests read it.
It never holds a weight, never reads a file, and never asks which backend will run the model.

Equations, with x̂ = x / sqrt(mean(x²) + eps) and N_w(x) = w x̂ (or (1 + w) x̂ where `norm_plus_one`):

    block:  h = x + W_o attention(rope(q), rope(k), v) + b_o,   [q|k|v] = W_qkv N_input_norm(x) + b_qkv
            y = h + W_down(silu(gate) * up) + b_down,           [gate|up] = W_gate_up N_post_norm(h) + b_gate_up
    target: g_p = blocks(E[t_0..t_p])[p];                       logits_p = W_lm_head N_norm(g_p)
    MTP:    z_p = W_proj [N_hid_norm(s_p) | N_emb_norm(E[t_(p+1)])]       (the order is a switch)
            y_p = block(z_0..z_p)[p];                           logits_p = W_lm_head N_final_norm(y_p)

Row p of the MTP head has rotary position p, attends to its own rows 0..p and predicts token p + 2. `s_p` is `g_p`
("pre") or `N_norm(g_p)` ("post") while the target has computed row p; in later passes of a round it is the recycled
`y` ("pre") or `N_final_norm(y)` ("post") of the pass before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Attention", "Block", "FeedForward", "ModelDescription", "Mtp", "Rope"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: pair i of a head turns by the angle position * theta^(-2i / dims), in float32."""

    dims: int
    """Leading elements of each head that turn; even, at most `head_dim`. The others pass unchanged."""
    theta: float
    """Base of the frequencies."""
    style: Literal["half", "interleaved"] = "half"
    """Which elements form pair i: "half" (i, i + dims/2), "interleaved" (2i, 2i + 1)."""


@dataclass(frozen=True)
class Attention:
    """Causal grouped-query attention over all earlier positions; scores are scaled by head_dim^(-1/2)."""

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
    kind: Literal["gqa", "mla", "gdn"] = "gqa"
    """Grouped-query, multi-head latent, or gated delta net. The last two are names reserved for later versions."""

    @property
    def q_size(self) -> int:
        """Elements of all query heads of one row: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key (or value) heads of one row: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class FeedForward:
    """Gated feed-forward network with SiLU: down(silu(gate x) * up x)."""

    intermediate_size: int
    """Elements of gate and of up for one row."""
    bias: bool = False
    """Biases on gate, up and down."""
    kind: Literal["dense", "moe"] = "dense"
    """Dense, or mixture of experts: a name reserved for later versions."""


@dataclass(frozen=True)
class Block:
    """One pre-norm decoder block: attention, then feed-forward, each added to the residual stream."""

    attention: Attention
    feed_forward: FeedForward

    def unsupported(self) -> tuple[str, ...]:
        """Return what of this block no step program can compute yet, one phrase each; empty when all is well."""
        attention, feed_forward = self.attention, self.feed_forward
        reasons = {
            f"{attention.kind} attention is not built yet (only gqa is)": attention.kind != "gqa",
            f"{feed_forward.kind} feed-forward is not built yet (only dense is)": feed_forward.kind != "dense",
            "a bias on the attention output projection is not built yet": attention.output_bias,
            "biases in the feed-forward network are not built yet": feed_forward.bias,
        }
        return tuple(reason for reason, applies in reasons.items() if applies)


@dataclass(frozen=True)
class Mtp:
    """The multi-token-prediction head. A wrong switch never changes text, for the target verifies; drafts get worse."""

    block: Block
    order: Literal["hidden_first", "embedding_first"]
    """Halves of the input of `proj`: [hidden | embedding] or [embedding | hidden]."""
    feed: Literal["pre", "post"]
    """The target state that enters: before or after the target's final norm."""
    final_norm: Literal["own", "target"]
    """The norm between `block` and the shared `lm_head`: weights of the head's own, or the target's `norm`."""
    recycle: Literal["pre", "post"]
    """What one layer feeds to its next pass: the block's output before or after `final_norm`."""
    mask_first_position: bool = False
    """Row 0 sees a zero embedding instead of that of token 1."""
    num_layers: int = 1
    """Distinct MTP layers in the checkpoint. One layer drafts any number of tokens by recycling its output."""

    def unsupported(self) -> tuple[str, ...]:
        """Return what of this head no proposer can compute yet, one phrase each; empty when all is well."""
        several = f"{self.num_layers} distinct MTP layers are not built yet (only one, used K times, is)"
        return self.block.unsupported() + ((several,) if self.num_layers != 1 else ())


@dataclass(frozen=True)
class ModelDescription:
    """All that determines a model's computation besides its weights. Sizes count elements, lengths count tokens."""

    name: str
    """How reports call the model: the name of its directory."""
    architecture: str
    """The `architectures` entry of config.json, for example "MiMoForCausalLM"."""
    hidden_size: int
    """Elements of one row of the residual stream."""
    vocab_size: int
    """Rows of the embedding and of `lm_head`; token ids are 0 .. vocab_size - 1."""
    eps: float
    """Added to the mean square in every RMS norm of the model and its MTP head."""
    blocks: tuple[Block, ...]
    """The decoder blocks, first layer first. Equal layers share one `Block`."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    norm_plus_one: bool = False
    """Norm weights are stored as w - 1: the norms (the MTP head's too) multiply by 1 + weight."""
    tie_embeddings: bool = False
    """`lm_head` is the embedding. The canonical table still names both; they read the same tensor."""
    dtype: str = "float32"
    """How the checkpoint stores its embedding: "float32", "float16" or "bfloat16". Canonical weights are float32."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a text, ascending: the union of what config.json and generation_config.json name."""
    bos_token_id: int | None = None
    """Id that opens a text, if the model names one."""
    pad_token_id: int | None = None
    """Id of padding, if the model names one."""
    mtp: Mtp | None = None
    """The MTP head, or None where the checkpoint offers none; then `mtp_note` says why."""
    mtp_note: str = ""
    """Why `mtp` is None, as one sentence; empty where it is not None."""

    @property
    def num_layers(self) -> int:
        """Number of decoder blocks of the target."""
        return len(self.blocks)

    def unsupported(self) -> tuple[str, ...]:
        """Return what of the target no step program can compute yet, one phrase each, without repetition.

        Negotiation turns the phrases into one `CapabilityError` before weights load. The MTP head answers for itself
        (`Mtp.unsupported`), since a target can run without it.
        """
        return tuple(dict.fromkeys(reason for block in self.blocks for reason in block.unsupported()))
