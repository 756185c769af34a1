"""The draft model as its checkpoint describes it: its decoder layer and its tensors.

The factory reads it, the proposer launches what it says. It allocates nothing and launches nothing but its own half a block.

    x_p = W_fc [E[t_(p+1)] | g_p] + b                                            g: states of the target, behind its final norm
    h_p = x_p + attention(x)_p;   y_p = h_p + mlp(N_post_attention_layernorm(h_p));                       logits_p = W_lm_head y_p

Row p predicts token p + 2. E and W_lm_head are the target's. Where the target has not computed row p yet, g_p is y_(p-1), the
draft model's own output (Li et al. 2024, EAGLE, arXiv 2401.15077).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

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
)
from polydraft.proposers import DraftWeights

PREFIX = "eagle"
LAYER = f"{PREFIX}.layer"
FAMILY = Family(architecture="EagleLlamaForCausalLM")
"""Reads the keys that a dense layer has, and refuses those that it does not compute."""
FC = ("fc.embedding", "fc.state")
"""The columns of `fc` by input: no contract lays the two side by side, and W [a | b] = W_a a + W_b b."""


class UnnormedAttention(Attention):
    """Attention that sees the residual stream as it is. Its block has `input_norm=False`."""

    def keep(self, at: At) -> None:
        """As attention does, over the residual stream; `mix` begins with the same."""
        super().keep(replace(at, scratch={**at.scratch, "normed": at.x}))


@dataclass(frozen=True)
class DraftModel:
    """One draft model beside one target."""

    directory: Path
    hidden_size: int
    norm: Norm
    block: Block

    @classmethod
    def read(cls, directory: str, model: ModelDescription) -> DraftModel:
        """Read config.json in `directory` and check it against the target. Raises `ConfigError` where no directory was named,
        `CheckpointError`, or `CapabilityError` for settings that nobody computes."""
        if not directory:
            raise ConfigError(
                f"proposer eagle has no draft model, wanted one of {model.name}; give its directory by --draft-model"
            )
        with Checkpoint(directory) as checkpoint:
            config = ConfigFile(checkpoint.path / "config.json", checkpoint.config)
        FAMILY.refuse(config)
        if config.values.get("architectures") != [FAMILY.architecture]:
            raise CheckpointError(
                f"{config.path}: architectures is {config.values.get('architectures')!r}, wanted [{FAMILY.architecture!r}]; "
                "name the directory of an EAGLE draft model"
            )
        for key, wanted in {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}.items():
            if (got := config.integer(key)) != wanted:
                raise CheckpointError(
                    f"{config.path}: {key} is {got}, wanted {wanted} as the target {model.name} has it; use a draft model that "
                    "was trained for this target"
                )
        block = FAMILY.block(config)
        block = replace(block, mixer=UnnormedAttention(**vars(block.mixer)), input_norm=False)
        return cls(Path(directory), model.hidden_size, Norm(config.number("rms_norm_eps"), plus_one=False), block)

    def weights(self) -> DraftWeights:
        """The tensors that it reads, and their names in the checkpoint."""
        hidden, layer = self.hidden_size, self.block.weights(self.hidden_size)
        tensors = (
            *(Tensor(name, ((hidden, hidden),), stretch=Stretch(1, i * hidden, 2 * hidden)) for i, name in enumerate(FC)),
            Tensor("fc.bias", ((hidden,),), "bias"),
            *(replace(one, name=f"layer.{one.name}") for one in layer),
        )
        names = {f"layer.{one.name}": tuple(f"layers.0.{part}" for part in BLOCK_NAMES[one.name]) for one in layer}
        names |= {"fc.bias": ("fc.bias",)} | dict.fromkeys(FC, ("fc.weight",))
        return DraftWeights(self.directory, PREFIX, tensors, names, unread=("embed_tokens.weight",))  # the target's
