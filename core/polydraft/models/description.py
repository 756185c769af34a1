"""What a model is besides its weights: a sequence of decoder blocks of any kinds, the MTP head with its switches, sizes.

Families build a description from a checkpoint (`families.py`); negotiation, the step program, the weight loader and tests read
it. Blocks and their kinds are in `block.py`.

    target: g_p = blocks(E[t_0..t_p])[p];                       logits_p = W_lm_head N_norm(g_p)
    MTP:    z_p = W_proj [N_hid_norm(s_p) | N_emb_norm(E[t_(p+1)])]       (the order is a switch)
            y_p = block(z_0..z_p)[p];                           logits_p = W_lm_head N_final_norm(y_p)

with N_w(x) = w x / sqrt(mean(x^2) + eps), or (1 + w) x / ... where `norm_plus_one`.

Row p of the MTP head has rotary position p, attends to its own rows 0..p and predicts token p + 2. `s_p` is `g_p`
("pre") or `N_norm(g_p)` ("post") while the target has computed row p; in later passes of a round it is the recycled
`y` ("pre") or `N_final_norm(y)` ("post") of the pass before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from polydraft.models.block import Block, Tensor

__all__ = ["CONVENTIONS", "ModelDescription", "Mtp"]

CONVENTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "order": ("hidden_first", "embedding_first"),
    "feed": ("pre", "post"),
    "final_norm": ("own", "target"),
    "recycle": ("pre", "post"),
    "mask_first_position": ("false", "true"),
}
"""The switches of an MTP head that its weights do not show, each with the texts of its values: `--mtp-option NAME=VALUE`."""


@dataclass(frozen=True)
class Mtp:
    """The multi-token-prediction head. A wrong switch never changes text, for the target verifies; drafts get worse."""

    blocks: tuple[Block, ...]
    """One decoder block for each distinct MTP layer. One layer drafts any number of tokens by recycling its output."""
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

    @property
    def layers(self) -> dict[str, Block]:
        """The blocks by prefix of their canonical names."""
        return {f"mtp.{i}": block for i, block in enumerate(self.blocks)}

    def own_weights(self, hidden: int) -> tuple[Tensor, ...]:
        """What each MTP layer has besides its block."""
        norms = ("emb_norm", "hid_norm", *(("final_norm",) if self.final_norm == "own" else ()))
        return (*(Tensor(name, ((hidden,),), "norm") for name in norms), Tensor("proj", ((hidden, 2 * hidden),)))

    def unsupported(self) -> tuple[str, ...]:
        """Return what of this head no proposer can compute yet, one phrase each; empty when all is well.

        Of several layers, layer j makes draft j. Its rows in turn need the tokens j ahead of them, which the newest rows of a
        step do not have yet, so its cache would have to be written again after every round."""
        several = f"{len(self.blocks)} distinct MTP layers are not built yet (only one, used K times, is)"
        return (several,) if len(self.blocks) != 1 else ()


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
    packed_as: tuple[str, ...] = ()
    """Names of the packings in which the checkpoint stores matrices; those in none of them are stored in floats."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a text, ascending: the union of what config.json and generation_config.json name."""
    bos_token_id: int | None = None
    """Id that opens a text, if the model names one."""
    pad_token_id: int | None = None
    """Id of padding, if the model names one."""
    mtp: Mtp | None = None
    """The MTP head, or None where the checkpoint offers none; then `mtp_note` says why."""
    mtp_note: str = ""
    """Why `mtp` is None, or how its conventions differ from those that its family is known for, as one sentence; else empty."""
    ranks: int = 1
    """Of how many shares of a model this is one (`polydraft.models.ranks`): sizes of blocks are the share's, those here are the
    model's."""
    leaves: bool = False
    """Whether its sums are taken by leaf (`polydraft.models.ranks.in_leaves`)."""

    @property
    def vocab_share(self) -> int:
        """Rows of `lm_head` that a rank keeps; of the last ones some may be padding."""
        return -(-self.vocab_size // self.ranks)

    @property
    def num_layers(self) -> int:
        """Number of decoder blocks of the target."""
        return len(self.blocks)

    @property
    def layers(self) -> dict[str, Block]:
        """The decoder blocks by prefix of their canonical names."""
        return {f"layers.{i}": block for i, block in enumerate(self.blocks)}

    def weights(self) -> dict[str, Tensor]:
        """Every canonical tensor of the target and its MTP head, in the order in which they are loaded."""
        hidden, vocab = self.hidden_size, self.vocab_size
        found = {"embed": Tensor("embed", ((vocab, hidden // self.ranks),), "embedding", split=1)}  # any rank looks any token up
        found |= block_weights(self.layers, hidden)
        head = Tensor("lm_head", ((self.vocab_share, hidden),), split=0)
        found |= {"norm": Tensor("norm", ((hidden,),), "norm"), "lm_head": head}
        for prefix, block in self.mtp.layers.items() if self.mtp else ():
            found |= {f"{prefix}.{one.name}": one for one in self.mtp.own_weights(hidden)}  # type: ignore[union-attr]
            found |= block_weights({prefix: block}, hidden)
        return found


def block_weights(layers: Mapping[str, Block], hidden: int) -> dict[str, Tensor]:
    """Canonical tensors of these blocks, by full name."""
    return {f"{prefix}.{one.name}": one for prefix, block in layers.items() for one in block.weights(hidden)}
