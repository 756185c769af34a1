"""Train two tiny models with their MTP heads, one in the layout of GLM-4.5 and one in that of ERNIE-4.5: data of the tests of
`polydraft mtp-check`, by which a head whose conventions are known is told from the same head computed otherwise.

    python tools/train_heads.py --out tests/data

The target comes from transformers, and is trained first. The head is trained behind it, several steps deep, with the conventions
that `LAYOUTS` has. Tokens are bytes; the text is this repository's own Python source (Apache-2.0). Minutes a model on two
cores. Needs: torch, transformers, numpy, safetensors, tokenizers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeDecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer

ROOT = Path(__file__).parents[1]
LENGTH, BATCH, STEPS = 96, 24, 3
"""Tokens of a text, texts of a batch, and steps that the head learns to look ahead."""
SPREAD = 1.0
"""Of the logarithm of norm weights at the beginning. Were they all 1, a state before its norm would be that behind it."""
COMMON = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A family's sizes, conventions, and names of what a head has beside its block."""

    model_type: str
    config: dict[str, Any]
    layer: type[nn.Module]
    layer_index: int
    """As which layer of the target the head's block is made: it decides whether it has experts."""
    feed: str
    final_norm: str
    recycle: str
    block: str
    emb_norm: str
    hid_norm: str
    proj: str
    norm: str
    stored: dict[str, Any]
    """What config.json says of the head."""


LAYOUTS = {
    "mtp-glm": Layout(
        "glm4_moe",
        {
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "attention_bias": True, "use_qk_norm": True, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0,
        },
        Glm4MoeDecoderLayer, 1, "post", "own", "post", "model.layers.2.", "model.layers.2.enorm.weight",
        "model.layers.2.hnorm.weight", "model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight",
        {"num_nextn_predict_layers": 1},
    ),
    "mtp-ernie": Layout(
        "ernie4_5_moe",
        {
            "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1,
            "moe_layer_interval": 1,
        },
        Ernie4_5_MoeDecoderLayer, 0, "pre", "target", "pre", "model.mtp_block.0.", "model.mtp_emb_norm.0.weight",
        "model.mtp_hidden_norm.0.weight", "model.mtp_linear_proj.0.weight", "", {"num_nextn_predict_layers": 1},
    ),
}  # fmt: skip


def texts() -> np.ndarray:
    """The repository's source as one string of bytes."""
    files = sorted((ROOT / "core" / "polydraft").rglob("*.py"))
    return np.frombuffer(b"\0".join(path.read_bytes() for path in files), np.uint8)


def batches(data: np.ndarray, steps: int, seed: int) -> Iterator[Tensor]:
    """Random stretches [BATCH, LENGTH + 1] of the text."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(data) - LENGTH - 1, BATCH)
        yield torch.from_numpy(np.stack([data[start : start + LENGTH + 1] for start in starts]).astype(np.int64))


def spread_norms(module: nn.Module, seed: int) -> None:
    """Norm weights that differ from one another, as those of published models do."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            parameter.data.copy_(torch.exp(SPREAD * torch.randn(parameter.shape, generator=generator)))


class Head(nn.Module):
    """One MTP layer behind a frozen target: [norm(embedding) | norm(state)], projected, through a block."""

    def __init__(self, layout: Layout, model: Any) -> None:
        super().__init__()
        size, norm = model.config.hidden_size, type(model.model.norm)
        eps = model.config.rms_norm_eps
        self.layout, self.block = layout, layout.layer(model.config, layout.layer_index)
        self.enorm, self.hnorm, self.norm = norm(size, eps), norm(size, eps), norm(size, eps)
        self.proj = nn.Linear(2 * size, size, bias=False)

    def forward(self, model: Any, tokens: Tensor) -> Iterator[Tensor]:
        """Logits of each step, [B, LENGTH - step, V]: of row `step` and those behind it. Row p predicts token p + 2."""
        base = model.model
        embedded = base.embed_tokens(tokens)
        with torch.no_grad():
            state = before_norm(base, tokens)
        final = base.norm if self.layout.final_norm == "target" else self.norm
        state = base.norm(state) if self.layout.feed == "post" else state
        positions = torch.arange(tokens.shape[1] - 1)[None]
        rope = base.rotary_emb(state, positions)
        causal = torch.full((1, 1, positions.shape[1], positions.shape[1]), float("-inf")).triu(1)
        rows, following = state[:, :-1], embedded[:, 1:]
        for step in range(STEPS):
            joined = self.proj(torch.cat((self.enorm(following), self.hnorm(rows)), dim=-1))
            made = self.block(joined, attention_mask=causal, position_ids=positions, position_embeddings=rope)
            made = made[0] if isinstance(made, tuple) else made
            normed = final(made)
            yield model.lm_head(normed)[:, step:]
            recycled = normed if self.layout.recycle == "post" else made
            rows = F.pad(recycled[:, :-1], (0, 0, 1, 0))  # row p of the next step is fed what row p - 1 made

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name."""
        own = {self.layout.emb_norm: self.enorm.weight, self.layout.hid_norm: self.hnorm.weight}
        own[self.layout.proj] = self.proj.weight
        if self.layout.norm:
            own[self.layout.norm] = self.norm.weight
        block = {self.layout.block + name: value for name, value in self.block.state_dict().items()}
        return {name: value.detach() for name, value in (own | block).items()}


def before_norm(base: Any, tokens: Tensor) -> Tensor:
    """The target's states in front of its final norm [B, T, H]."""
    kept: list[Tensor] = []
    hook = base.norm.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    base(tokens, use_cache=False)
    hook.remove()
    return kept[0]


def train(parameters: list[nn.Parameter], loss_of: Any, data: np.ndarray, steps: int, seed: int, what: str) -> None:
    """AdamW with a warm-up and a cosine down to a tenth."""
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01, betas=(0.9, 0.98))
    shape = [lambda step: min((step + 1) / 50, 0.1 + 0.45 * (1 + np.cos(np.pi * step / steps)))]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    start = time.perf_counter()
    for step, tokens in enumerate(batches(data, steps, seed)):
        loss = loss_of(tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"{what}: step {step}, loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)


def make(name: str, out: Path, steps: int) -> None:
    """Train one model and write it."""
    layout, data = LAYOUTS[name], texts()
    torch.manual_seed(0)
    config = AutoConfig.for_model(layout.model_type, **COMMON, **layout.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    spread_norms(model, 1)
    model.train()
    train(
        list(model.parameters()),
        lambda tokens: F.cross_entropy(model(tokens[:, :-1], use_cache=False).logits.flatten(0, 1), tokens[:, 1:].flatten()),
        data, steps, 2, f"{name} target",
    )  # fmt: skip
    model.requires_grad_(requires_grad=False)
    head = Head(layout, model)
    for parameter in head.block.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05)
    spread_norms(head, 3)

    def loss_of(tokens: Tensor) -> Tensor:
        """Agreement with the target's own choice counts: that is what accepts a draft."""
        with torch.no_grad():
            choices = model(tokens, use_cache=False).logits.softmax(-1)
        losses = []
        for step, logits in enumerate(head(model, tokens)):
            wanted = choices[:, step + 1 :]
            losses.append(-(wanted[:, : logits.shape[1]] * logits[:, : wanted.shape[1]].log_softmax(-1)).sum(-1).mean())
        return torch.stack(losses).sum()

    train(list(head.parameters()), loss_of, data, steps, 4, f"{name} head")
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    stored = as_published(model.state_dict() | head.tensors())
    save_file({one: value.to(torch.bfloat16).contiguous() for one, value in stored.items()}, folder / "model.safetensors")
    alphabet = dict(zip(bytes_in_order(), range(256), strict=True))
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    written = {**config.to_dict(), **layout.stored, "torch_dtype": "bfloat16", "architectures": [type(model).__name__]}
    keep = {
        *COMMON,
        *layout.config,
        *layout.stored,
        "architectures",
        "torch_dtype",
        "rope_parameters",
        "use_bias",
        "moe_norm_min",
    }
    (folder / "config.json").write_text(json.dumps({k: written[k] for k in sorted(keep) if k in written}, indent=1) + "\n")


def as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, which transformers keeps in one tensor, and the name that ERNIE's selection bias has in files."""
    found: dict[str, Tensor] = {}
    for given, value in tensors.items():
        name = given.replace(".gate.moe_statics.", ".moe_statics.")
        stem, _, last = name.rpartition(".")
        for expert in range(len(value)) if stem.endswith(".experts") else ():
            if last == "gate_up_proj":
                gate, up = value[expert].chunk(2)
                found |= {f"{stem}.{expert}.gate_proj.weight": gate, f"{stem}.{expert}.up_proj.weight": up}
            else:
                found[f"{stem}.{expert}.{last}.weight"] = value[expert]
        if not stem.endswith(".experts"):
            found[name] = value
    return found


def bytes_in_order() -> list[str]:
    """The character by which a byte-level tokenizer writes each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("names", nargs="*", default=[*LAYOUTS])
    given = parser.parse_args()
    for each in given.names or LAYOUTS:
        make(each, given.out, given.steps)
