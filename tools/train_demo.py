"""Train, export and judge the demo model: a small decoder with one multi-token-prediction (MTP) layer.

This file owns the demo model's corpus, recipe, on-disk export and comparison with an older checkpoint. A maintainer
calls it by hand on a machine with a GPU and PyTorch; nothing in the package imports it. It never downloads anything:
the corpus is the permissively licensed Python source that is already installed beside it.

    python tools/train_demo.py corpus   --tokenizer DEMO/tokenizer.json --out work/corpus
    python tools/train_demo.py train    --corpus work/corpus --out work/run --tokens 2.6e9
    python tools/train_demo.py train    --corpus work/corpus --out work/run --tokens 2.6e9 --resume   # after a break
    python tools/train_demo.py export   --run work/run --tokenizer DEMO/tokenizer.json --out work/export
    python tools/train_demo.py evaluate --model work/export --baseline DEMO --corpus work/corpus --run work/run

Needs: torch, numpy, safetensors, tokenizers; matplotlib for the loss plot.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import platform
import random
import re
import sys
import sysconfig
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

EOS = 0  # `<|endoftext|>`: separates files in the corpus and ends a text
SHARD_BYTES = 12 << 20

# ---------------------------------------------------------------------------------------------------------------------
# Model. Module names are the tensor names of the MiMo layout, so that export is `state_dict()` and nothing else.
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model, under the key names of `config.json` in the MiMo layout."""

    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 832
    vocab_size: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048

    @classmethod
    def read(cls, directory: Path) -> Shape:
        """Take the sizes from `directory/config.json`; keys that are not sizes are left to `config()`."""
        record = json.loads((directory / "config.json").read_text())
        return cls(**{field.name: record[field.name] for field in dataclasses.fields(cls)})

    def config(self) -> dict[str, Any]:
        """Return the full `config.json` record of a checkpoint of this shape."""
        return {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            **dataclasses.asdict(self),
            "num_nextn_predict_layers": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": EOS,
            "eos_token_id": EOS,
            "pad_token_id": 1,
        }


Mask: TypeAlias = Tensor | BlockMask | None


class Linear(nn.Linear):
    """A linear layer with float32 master weights that computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x^2) + eps), statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding of `x` [B, T, heads, d] with float32 `cos`, `sin` [T, d/2]."""
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with biases on q, k and v."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, query)
        self.k_proj = Linear(shape.hidden_size, key)
        self.v_proj = Linear(shape.hidden_size, key)
        self.o_proj = Linear(query, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend over the rows in `cache` followed by the rows of `x`, and append the latter to `cache`.

        `mask` None means causal over `x` alone (an empty cache); a bool tensor or a BlockMask is [T, cached + T].
        """
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        q = rotate(self.q_proj(x).view(heads), *rope).transpose(1, 2)
        k = rotate(self.k_proj(x).view(heads), *rope).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        cache.append((k, v))
        if mask is not None:
            k, v = (torch.cat(parts, dim=2) for parts in zip(*cache, strict=True))
        if isinstance(mask, BlockMask):
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm Qwen2 decoder block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Mask, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class MTPBlock(Block):
    """Row p joins the state of position p with the embedding of token p + 1 and predicts token p + 2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.token_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_proj = Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.final_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def join(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Project [hidden, embedding] (MiMo's order) to the block's input; all [B, T, H]."""
        return self.input_proj(torch.cat((self.hidden_layernorm(state), self.token_layernorm(embedded)), dim=-1))


class Body(nn.Module):
    """Everything under the `model.` prefix of the checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mtp_layers = nn.ModuleList([MTPBlock(shape)])


class Mimo(nn.Module):
    """Target and MTP layer; MTP is fed and recycled the state before the final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.model = shape, Body(shape)
        self.lm_head = Linear(shape.hidden_size, shape.vocab_size, bias=False)
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        angles = torch.arange(shape.max_position_embeddings + 8)[:, None] * shape.rope_theta**-half
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def initialise(self, seed: int) -> None:
        """Normal weights of variance 1/(3 fan-in), zero biases; zero output projections make blocks the identity."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 1:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                elif name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.zero_()
                else:
                    deviation = {"model.embed_tokens.weight": 0.2, "lm_head.weight": 0.01}.get(
                        name, (3 * parameter.shape[1]) ** -0.5
                    )
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings [B, T, H] of token ids [B, T]."""
        return F.embedding(ids, self.model.embed_tokens.weight).to(dtype)

    def trunk(self, embedded: Tensor) -> Tensor:
        """States before the final norm, [B, T, H], causal from position 0."""
        rope = self.cos[: embedded.shape[1]], self.sin[: embedded.shape[1]]
        for layer in self.model.layers:
            embedded = layer(embedded, rope, None, [])
        return embedded

    def target_logits(self, state: Tensor) -> Tensor:
        """Target logits [B, T, V] of states [B, T, H]."""
        return self.lm_head(self.model.norm(state))

    def mtp(self, state: Tensor, embedded: Tensor, mask: Mask, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One MTP pass over rows 0..T-1: [B, T, H] states and next-token embeddings to [B, T, H] states."""
        block, length = self.model.mtp_layers[0], embedded.shape[1]
        return block(block.join(state, embedded), (self.cos[:length], self.sin[:length]), mask, cache)

    def draft_logits(self, state: Tensor) -> Tensor:
        """Draft logits [B, T, V] of MTP states [B, T, H]: the layer's own norm, the target's head."""
        return self.lm_head(self.model.mtp_layers[0].final_layernorm(state))


# ---------------------------------------------------------------------------------------------------------------------
# MTP over many steps, teacher-forced.
# ---------------------------------------------------------------------------------------------------------------------


def visible(step: int, length: int, mode: str) -> Callable[[Any, Any, Any, Any], Any]:
    """Return the mask function of MTP step `step` >= 0: keys are the rows of steps 0..step, `length` rows each.

    `decode` is what a decoder sees: row q of step j attends to the rows of step 0 (true states) at positions <= q - j,
    and to the one temporary row that each later step wrote before it (the training-time test of EAGLE-3, Li et al.
    2025). `chain` lets row q of step j see all rows <= q of its own step instead, as DeepSeek-V3's training does.
    A row always sees itself: rows before `step` carry no loss, but they must not be NaN.
    """

    def decode(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        wave, position = key // length, key % length
        return ((wave == 0) & (position <= query - step)) | ((wave > 0) & (position == query - (step - wave)))

    def chain(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        wave, position = key // length, key % length
        return (wave == step) & (((position <= query) & (position >= step)) | (position == query))

    return {"decode": decode, "chain": chain}[mode]


def make_masks(steps: int, length: int, mode: str, device: torch.device, block: bool) -> list[Mask]:
    """Masks of MTP steps 0..steps-1; step 0 is plainly causal. `block` picks FlexAttention, else dense bool masks."""
    masks: list[Mask] = [None]
    for step in range(1, steps):
        function, keys = visible(step, length, mode), (step + 1) * length
        if block:
            masks.append(create_block_mask(function, None, None, length, keys, device=str(device)))
        else:
            query, key = torch.arange(length, device=device), torch.arange(keys, device=device)
            masks.append(function(0, 0, query[:, None], key[None]))
    return masks


def mtp_states(model: Mimo, state: Tensor, embedded: Tensor, masks: Sequence[Mask]) -> Iterator[Tensor]:
    """Yield the MTP states [B, T, H] of each step; step j's row p was fed step j - 1's output of row p - 1."""
    cache: list[tuple[Tensor, Tensor]] = []
    for mask in masks:
        state = model.mtp(state, embedded, mask, cache)
        yield state
        state = F.pad(state[:, :-1], (0, 0, 1, 0))


def losses(model: Mimo, tokens: Tensor, masks: Sequence[Mask], soft: float, dtype: torch.dtype) -> Tensor:
    """Mean losses [1 + steps] in nats of the target and of each MTP step, for token ids [B, T + 1].

    An MTP step's loss is (1 - soft) * cross-entropy with the text + soft * cross-entropy with the target's own
    distribution of the same token (no gradient through it): a draft is accepted when it agrees with the target.
    """
    embedded = model.embed(tokens, dtype)
    state = model.trunk(embedded[:, :-1])
    logits = model.target_logits(state)
    result = [F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())]
    for step, drafted in enumerate(mtp_states(model, state, embedded[:, 1:], masks)):
        student = model.draft_logits(drafted)[:, step:-1].float()
        teacher = logits[:, step + 1 :].detach().float()
        total = student.logsumexp(-1)
        text = student.gather(-1, tokens[:, step + 2 :, None])[..., 0]
        target = (teacher.softmax(-1) * student).sum(-1) if soft else 0.0
        result.append((total - (1 - soft) * text - soft * target).mean())
    return torch.stack(result)


# ---------------------------------------------------------------------------------------------------------------------
# Corpus.
# ---------------------------------------------------------------------------------------------------------------------

PERMISSIVE = {"MIT", "MIT-0", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "Apache-2.0", "PSF-2.0", "Python-2.0", "ISC"}
# Terms that appear beside a permissive one for bundled native parts; a package that names only these is skipped.
COMPANIONS = {"Zlib", "CC0-1.0", "BSL-1.0", "Apache-2.0 WITH LLVM-exception"}
CLASSIFIERS = {
    "MIT License": "MIT",
    "BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
}
LICENCE_FIELD = re.compile(
    r"(the )?(MIT|(new |modified |simplified |[23][- ]clause )?BSD([- ][23][- ]clause)?|PSF|ISC|Apache[- ]2(\.0)?"
    r"|Apache(( software)? licen[sc]e)?[-, ]*(version |v)?2(\.0)?|[23]-clause BSD)( licen[sc]e)?"
    r"( \(?(version )?(2\.0|[23][- ]clause)\)?)?",
    re.IGNORECASE,
)
FOREIGN = re.compile(
    r"\b[AL]?GPL|General Public Licen|Mozilla Public|\bMPL\b|proprietary|Creative Commons|\bCC[- ]BY|non-?commercial"
    r"|Eclipse Public|\bCDDL\b|\bEUPL\b|trade secret",
    re.IGNORECASE,
)
HEADER = re.compile(r"copyright|licen[sc]e|\bSPDX\b|all rights reserved", re.IGNORECASE)
GENERATED = re.compile(r"generated (by|from|using|with)|auto(-?|matically )generated|do not edit", re.IGNORECASE)
SKIPPED_FOLDERS = {"_vendor", "vendor", "_vendored", "vendored", "third_party", "thirdparty", "extern", "_extern",
                   "external", "externals", "testdata", "test_data", "fixtures", "locale", "locales", "node_modules",
                   "site-packages", "dist-packages"}  # fmt: skip
SKIPPED_NAMES = re.compile(r"(_pb2(_grpc)?|_generated|_tables?|lextab|yacctab|_tab|_data|idnadata|uts46data)\.py$")


@dataclasses.dataclass(frozen=True)
class Package:
    """One installed distribution: its files and the licence that its metadata states."""

    name: str
    version: str
    licence: str
    files: tuple[Path, ...]


def stated_licence(metadata: Any) -> tuple[str, bool]:
    """Return (licence as stated, whether every stated term is permissive) for a distribution's metadata."""
    expression = metadata.get("License-Expression")
    if expression:
        terms = re.split(r"\s+(AND|OR)\s+", re.sub(r"[()]", "", expression))
        names, operators = terms[::2], set(terms[1::2])
        if operators == {"OR"}:
            return expression, any(name in PERMISSIVE for name in names)
        known = all(name in PERMISSIVE | COMPANIONS for name in names)
        return expression, known and any(name in PERMISSIVE for name in names)
    prefix = "License :: OSI Approved :: "
    stated = [line for line in metadata.get_all("Classifier") or [] if line.startswith("License ::")]
    named = [line.removeprefix(prefix) for line in stated if line != prefix.rstrip(": ")]
    if named:
        return " AND ".join(CLASSIFIERS.get(name, name) for name in named), all(name in CLASSIFIERS for name in named)
    field = (metadata.get("License") or "").strip()
    return field.splitlines()[0][:60] if field else "none stated", bool(LICENCE_FIELD.fullmatch(field))


def installed_packages() -> tuple[list[Package], list[dict[str, str]]]:
    """Return the usable packages of this interpreter, standard library first, and those skipped with their licence."""
    root = Path(sysconfig.get_paths()["stdlib"])
    standard = sorted(path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    kept = [Package("python-standard-library", platform.python_version(), "PSF-2.0", tuple(standard))]
    skipped: list[dict[str, str]] = []
    found = {(dist.metadata["Name"] or "").lower(): dist for dist in importlib.metadata.distributions()}
    for name, dist in sorted(found.items()):
        licence, allowed = stated_licence(dist.metadata)
        files = [
            Path(str(dist.locate_file(file)))
            for file in dist.files or ()
            if file.suffix == ".py" and ".." not in file.parts and not SKIPPED_FOLDERS & set(file.parts)
        ]
        if allowed and files:
            kept.append(Package(name, dist.version, licence, tuple(sorted(files))))
        elif files:
            skipped.append({"name": name, "version": dist.version, "licence": licence})
    return kept, skipped


def without_header(text: str) -> str:
    """Drop a leading comment block that is a shebang, an encoding line or a copyright notice."""
    lines = text.split("\n")
    end = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    head = "\n".join(lines[:end])
    if HEADER.search(head):
        return "\n".join(lines[end:])
    while lines and (lines[0].startswith("#!") or "coding:" in lines[0][:40] or not lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines)


def read_source(path: Path) -> tuple[str, bytes, list[int]] | str:
    """Return (text, SHA-256, sampled hashes of four-line runs) of a source file, or the reason why it is left out."""
    if SKIPPED_NAMES.search(path.name):
        return "generated or table, by name"
    try:
        if not 128 <= path.stat().st_size <= 400_000:
            return "too small or too large"
        raw = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return "not readable as UTF-8"
    if FOREIGN.search(raw[:4000]):
        return "names another licence"
    if GENERATED.search(raw[:1000]):
        return "says it is generated"
    text = "\n".join(line.rstrip() for line in without_header(raw).split("\n")).strip("\n") + "\n"
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if len(lines) < 8 or len(text) < 128:
        return "too small or too large"
    if max(map(len, lines)) > 400 or len(text) / len(lines) > 90:
        return "long lines"
    if sum(map(str.isdigit, text)) > 0.12 * len(text) or sum(c > "\x7f" for c in text) > 0.03 * len(text):
        return "mostly digits or not ASCII"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "does not parse"
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    runs = ("\n".join(lines[i : i + 4]).encode() for i in range(len(lines) - 3))
    hashes = (int.from_bytes(hashlib.blake2b(run, digest_size=8).digest(), "little") for run in runs)
    return text, digest, [value for value in hashes if value % 4 == 0]


def collect(packages: Sequence[Package], held_out: int, limit: int | None) -> tuple[list[str], list[str], dict[str, Any]]:
    """Read, filter, de-duplicate and split the files of `packages`: (training texts, held-out texts, manifest).

    A file's hash decides on which side it lies, whatever else is installed. Of near-duplicates the first is kept.
    """
    sources = [(package.name, path) for package in packages for path in package.files][:limit]
    seen_files: set[bytes] = set()
    seen_runs: set[int] = set()
    reasons: Counter[str] = Counter()
    used: dict[str, list[int]] = {}
    train: list[tuple[bytes, str]] = []
    validation: list[tuple[bytes, str]] = []
    context = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    with context.Pool() as pool:
        read = pool.imap(read_source, [path for _, path in sources], chunksize=32)
        for (name, _), result in zip(sources, read, strict=True):
            if isinstance(result, str):
                reasons[result] += 1
                continue
            text, digest, runs = result
            if digest in seen_files or sum(run in seen_runs for run in runs) > 0.5 * max(1, len(runs)):
                reasons["duplicate or near-duplicate"] += 1
                continue
            seen_files.add(digest)
            seen_runs.update(runs)
            count = used.setdefault(name, [0, 0])
            count[0], count[1] = count[0] + 1, count[1] + len(text.encode())
            side = validation if int.from_bytes(digest[:4], "little") % 1000 < held_out else train
            side.append((digest, text))
    listed = [
        {"name": p.name, "version": p.version, "licence": p.licence, "files": used[p.name][0], "bytes": used[p.name][1]}
        for p in packages
        if p.name in used
    ]
    manifest = {"packages": listed, "files_left_out": dict(reasons.most_common())}
    # The digest order is a shuffle that depends on content alone.
    return [text for _, text in sorted(train)], [text for _, text in sorted(validation)], manifest


def encode(texts: Sequence[str], tokenizer: Any) -> np.ndarray:
    """Encode `texts` to one uint16 array, each text followed by EOS."""
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), 2000):
        encodings = tokenizer.encode_batch_fast(list(texts[start : start + 2000]), add_special_tokens=False)
        parts += [np.asarray([*encoding.ids, EOS], dtype=np.uint16) for encoding in encodings]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def command_corpus(args: argparse.Namespace) -> None:
    """Write `train.npy`, `validation.npy` (uint16 ids) and `manifest.json` under `args.out`."""
    from tokenizers import Tokenizer

    packages, skipped = installed_packages()
    train, validation, manifest = collect(packages, args.held_out, args.limit_files)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    args.out.mkdir(parents=True, exist_ok=True)
    for side, texts in (("train", train), ("validation", validation)):
        ids = encode(texts, tokenizer)
        np.save(args.out / f"{side}.npy", ids)
        size = sum(len(text.encode()) for text in texts)
        manifest[side] = {"files": len(texts), "bytes": size, "tokens": len(ids)}
    manifest |= {"skipped_packages": skipped, "held_out_per_mille": args.held_out}
    manifest["tokenizer_sha256"] = hashlib.sha256(args.tokenizer.read_bytes()).hexdigest()
    write_json(args.out / "manifest.json", manifest)
    for row in sorted(manifest["packages"], key=lambda row: -row["bytes"])[: args.show]:
        print(f"{row['bytes'] / 1e6:8.2f} MB {row['files']:6d} files  {row['name']} {row['version']}  {row['licence']}")
    print("left out:", manifest["files_left_out"])
    print("skipped:", ", ".join(f"{row['name']} ({row['licence']})" for row in skipped))
    print("train:", manifest["train"], "validation:", manifest["validation"])


# ---------------------------------------------------------------------------------------------------------------------
# Training.
# ---------------------------------------------------------------------------------------------------------------------


def orthogonalise(matrices: Tensor) -> Tensor:
    """Replace each [r, c] matrix (r <= c) of a bfloat16 stack by nearly its closest semi-orthogonal matrix.

    Five Newton-Schulz iterations with the quintic of Muon (Jordan et al. 2024).
    """
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon:
    """Muon for the matrices inside blocks, one stacked momentum buffer per shape.

    Update RMS is matched to AdamW's by 0.2 * sqrt(max(r, c)) (Liu et al. 2025, "Muon is scalable"), so that both
    optimisers share one schedule.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            rows, columns = sorted(parameter.shape)
            self.groups.setdefault((rows, columns), []).append(parameter)
        self.momenta = {key: torch.zeros(len(group), *key, device=group[0].device) for key, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float, momentum: float, decay: float) -> None:
        """Apply one Nesterov-momentum update at learning rate `rate` with decoupled weight decay."""
        for key, group in self.groups.items():
            tall = [parameter.shape[0] > parameter.shape[1] for parameter in group]
            gradients = [p.grad.mT if t else p.grad for p, t in zip(group, tall, strict=True) if p.grad is not None]
            stacked, buffer = torch.stack(gradients), self.momenta[key]
            buffer.lerp_(stacked, 1 - momentum)
            update = orthogonalise(stacked.lerp_(buffer, momentum)).float() * (0.2 * math.sqrt(key[1]))
            torch._foreach_mul_(group, 1 - rate * decay)
            torch._foreach_add_(group, [u.mT if t else u for u, t in zip(update, tall, strict=True)], alpha=-rate)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run computes; stored in the checkpoint and checked on `--resume`."""

    tokens: float = 2.6e9
    context: int = 1024
    long_context: int = 2048
    long_share: float = 0.15
    batch_tokens: int = 131072
    warmup_steps: int = 300
    decay: float = 0.8
    muon_rate: float = 8e-3
    embed_rate: float = 1.2e-2
    head_rate: float = 5e-3
    vector_rate: float = 6e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    mtp_weights: tuple[float, ...] = (0.4, 0.3, 0.2)
    soft: float = 0.5
    ema: float = 0.998
    seed: int = 0

    @property
    def steps(self) -> int:
        return max(1, int(self.tokens) // self.batch_tokens)

    def context_at(self, step: int) -> int:
        """Window length: the last `long_share` of the run is trained at `long_context`."""
        return self.context if step < (1 - self.long_share) * self.steps else self.long_context

    def scale(self, step: int) -> float:
        """Learning-rate factor: linear warm-up, constant, then linear to zero over the last `decay` of the run."""
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return min(1.0, (step + 1) / max(1, self.warmup_steps), left)


class Batches:
    """Windows of T + 1 tokens by step number: a pure function of (seed, step), so that a resumed run sees the same."""

    def __init__(self, ids: Tensor, rows: int, context: int, seed: int) -> None:
        self.ids = ids
        self.rows, self.context, self.seed = rows, context, seed
        self.per_epoch = max(1, ((len(ids) - 1) // context - 1) // rows)
        self.epoch, self.order = -1, torch.zeros(0, dtype=torch.int64)

    def get(self, step: int) -> Tensor:
        """Token ids [rows, context + 1], int64 on the device."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed((self.seed * 1009 + self.context) * 1_000_003 + epoch)
            windows = (len(self.ids) - 1) // self.context - 1
            offset = int(torch.randint(self.context, (), generator=generator))
            self.order = torch.randperm(windows, generator=generator) * self.context + offset
            self.epoch = epoch
        starts = self.order[index * self.rows : (index + 1) * self.rows].to(self.ids.device)
        return self.ids[starts[:, None] + torch.arange(self.context + 1, device=self.ids.device)].long()


class Trainer:
    """One run: model, optimisers, average weights and the step counter, saved and loaded together."""

    def __init__(self, shape: Shape, recipe: Recipe, device: torch.device, compiled: bool, block_masks: bool) -> None:
        self.recipe, self.device, self.step, self.seconds = recipe, device, 0, 0.0
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = Mimo(shape)
        self.model.initialise(recipe.seed)
        self.model.to(device)
        self.average = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        named = list(self.model.named_parameters())
        tables = ("model.embed_tokens.weight", "lm_head.weight")
        self.muon = Muon([p for n, p in named if p.ndim == 2 and n not in tables])
        rates = {tables[0]: recipe.embed_rate, tables[1]: recipe.head_rate}
        others = [(n, p) for n, p in named if p.ndim == 1 or n in tables]
        groups = [{"params": [p], "base": rates.get(n, recipe.vector_rate)} for n, p in others]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0, fused=device.type == "cuda")
        self.block_masks, self.masks = block_masks, dict[int, list[Mask]]()
        self.weights = torch.tensor([1.0, *recipe.mtp_weights], device=device)
        self.losses = torch.compile(losses, dynamic=False) if compiled else losses

    def update(self, tokens: Tensor) -> Tensor:
        """One optimiser step on token ids [B, T + 1]; returns the detached losses [1 + steps] on the device."""
        length, steps = tokens.shape[1] - 1, len(self.recipe.mtp_weights)
        if length not in self.masks:
            self.masks[length] = make_masks(steps, length, "decode", self.device, self.block_masks)
        values: Tensor = self.losses(self.model, tokens, self.masks[length], self.recipe.soft, self.dtype)
        (values * self.weights).sum().backward()
        scale = self.recipe.scale(self.step)
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * scale
        self.adam.step()
        momentum = 0.85 + (self.recipe.momentum - 0.85) * min(1.0, self.step / 300)
        self.muon.step(self.recipe.muon_rate * scale, momentum, self.recipe.weight_decay)
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            keep = min(self.recipe.ema, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(list(self.average.values()), list(self.model.parameters()), 1 - keep)
        self.step += 1
        return values.detach()

    @torch.no_grad()
    def validate(self, tokens: Tensor) -> list[float]:
        """Losses of the present weights on held-out ids [B, T + 1] against the text alone, not compiled."""
        masks = make_masks(len(self.recipe.mtp_weights), tokens.shape[1] - 1, "decode", self.device, block=False)
        parts = [losses(self.model, part, masks, 0.0, self.dtype) for part in tokens.split(16)]
        return torch.stack(parts).mean(0).tolist()

    def save(self, path: Path) -> None:
        """Write the whole state to `path` atomically, and how far it is to `run.json` beside it."""
        record = {
            "recipe": dataclasses.asdict(self.recipe),
            "shape": dataclasses.asdict(self.model.shape),
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "average": self.average,
            "adam": self.adam.state_dict(),
            "momenta": self.muon.momenta,
        }
        temporary = path.with_suffix(".tmp")
        torch.save(record, temporary)
        temporary.replace(path)
        seen = {"steps": self.step, "tokens": self.step * self.recipe.batch_tokens, "seconds": round(self.seconds)}
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        write_json(path.with_name("run.json"), {**seen, "recipe": record["recipe"], "versions": versions})

    def load(self, path: Path) -> None:
        """Take up the state in `path`; refuses a checkpoint of another recipe."""
        record = torch.load(path, map_location=self.device, weights_only=True)
        ours = {"recipe": dataclasses.asdict(self.recipe), "shape": dataclasses.asdict(self.model.shape)}
        if any(record[key] != value for key, value in ours.items()):
            raise SystemExit(f"{path} has another recipe or shape: pass the flags of that run, or a new --out")
        self.model.load_state_dict(record["model"])
        self.adam.load_state_dict(record["adam"])
        for name, value in record["average"].items():
            self.average[name].copy_(value)
        for key, value in record["momenta"].items():
            self.muon.momenta[key].copy_(value)
        self.step, self.seconds = record["step"], record["seconds"]


def command_train(args: argparse.Namespace) -> None:
    """Train to `args.tokens`; `args.out` gets `checkpoint.pt`, `run.json` and `log.jsonl` (one object a logged step)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Recipe)})
    shape = Shape(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)})
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(shape, recipe, device, not args.no_compile, args.attention == "flex" and not args.no_compile)
    checkpoint, log_path = args.out / "checkpoint.pt", args.out / "log.jsonl"
    if args.resume and checkpoint.exists():
        trainer.load(checkpoint)
        print(f"resumed at step {trainer.step}", flush=True)
    elif checkpoint.exists():
        raise SystemExit(f"{checkpoint} exists: pass --resume to go on with that run, or another --out")
    ids = {
        side: torch.from_numpy(np.load(args.corpus / f"{side}.npy").astype(np.int32)).to(device)
        for side in ("train", "validation")
    }
    train = {
        context: Batches(ids["train"], recipe.batch_tokens // context, context, recipe.seed)
        for context in {recipe.context, recipe.long_context}
    }
    held = Batches(ids["validation"], 64, recipe.context, 1).get(0)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    epochs = recipe.steps * recipe.batch_tokens / len(ids["train"])
    print(
        f"{count / 1e6:.2f} M parameters, {recipe.steps} steps, {epochs:.1f} epochs of {len(ids['train'])} tokens",
        flush=True,
    )
    old = log_path.read_text().splitlines() if args.resume and log_path.exists() else []
    log_path.write_text("".join(line + "\n" for line in old if json.loads(line)["step"] <= trainer.step))
    begun = marked = saved = time.monotonic()
    before, marked_step, window = trainer.seconds, trainer.step, torch.zeros(1 + len(recipe.mtp_weights), device=device)
    stop = min(recipe.steps, args.stop_step or recipe.steps)
    while trainer.step < stop:
        window += trainer.update(train[recipe.context_at(trainer.step)].get(trainer.step))
        if trainer.step % args.log_every and trainer.step != stop:
            continue
        values = (window / (trainer.step - marked_step)).tolist()
        if not all(map(math.isfinite, values)):
            raise SystemExit(f"loss is not finite at step {trainer.step}: lower the learning rates")
        now = time.monotonic()
        speed = (trainer.step - marked_step) * recipe.batch_tokens / (now - marked)
        record = {"step": trainer.step, "tokens": trainer.step * recipe.batch_tokens, "train": values,
                  "tokens_per_s": round(speed), "rate": recipe.scale(trainer.step)}  # fmt: skip
        if trainer.step % (args.log_every * 10) == 0 or trainer.step == stop:
            record["validation"] = trainer.validate(held)
        with log_path.open("a") as log:
            log.write(json.dumps(record) + "\n")
        left = (recipe.steps - trainer.step) * recipe.batch_tokens / speed
        shown = [" ".join(f"{value:.4f}" for value in row) for row in (values, record.get("validation", []))]
        print(f"step {trainer.step}/{recipe.steps} loss {shown[0]} {speed / 1e6:.3f} Mtok/s ETA {left / 60:.1f} min"
              + (f" validation {shown[1]}" if shown[1] else ""), flush=True)  # fmt: skip
        window.zero_()
        marked, marked_step = time.monotonic(), trainer.step
        trainer.seconds = before + marked - begun
        if marked - saved > args.save_seconds:
            trainer.save(checkpoint)
            saved = time.monotonic()
    trainer.save(checkpoint)
    print(f"saved step {trainer.step} after {trainer.seconds:.0f} s", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Export and load.
# ---------------------------------------------------------------------------------------------------------------------


def write_json(path: Path, record: Any) -> None:
    """Write `record` as indented JSON, atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(path)


def write_model(directory: Path, shape: Shape, tensors: dict[str, Tensor], tokenizer: Path) -> None:
    """Write config, bfloat16 shards with their index, and the tokenizer, to `directory`."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        if filled + value.nbytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = value
        filled += value.nbytes
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, directory / name, metadata={"format": "pt"})
        (directory / name).chmod(0o644)
    total = sum(value.nbytes for shard in shards for value in shard.values())
    where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    write_json(directory / "config.json", shape.config())
    (directory / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def read_model(directory: Path, device: torch.device) -> Mimo:
    """Load a checkpoint in the MiMo layout as float32 (every tensor named, none left over)."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    model = Mimo(Shape.read(directory))
    model.load_state_dict({name: value.float() for name, value in tensors.items()}, strict=True)
    return model.to(device).eval()


def command_export(args: argparse.Namespace) -> None:
    """Write the run's weights, averaged unless `--raw`, as a checkpoint directory."""
    record = torch.load(args.run / "checkpoint.pt", map_location="cpu", weights_only=True)
    tensors = record["model"] if args.raw else record["average"]
    write_model(args.out, Shape(**record["shape"]), tensors, args.tokenizer)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"exported step {record['step']} to {args.out}: {size / 1e6:.2f} MB")


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation.
# ---------------------------------------------------------------------------------------------------------------------

PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    'def read_json(path):\n    """Read a JSON file and return its content."""\n',
    "for i in range(10):\n",
)
DRAFTS = (1, 2, 3, 5)


@torch.no_grad()
def held_out_losses(model: Mimo, ids: np.ndarray, context: int, token_bytes: Tensor, limit: int) -> dict[str, Any]:
    """Losses over consecutive windows of the validation ids, in float32.

    Returns nats per token of the target and of MTP steps 1..3 (`decode` and `chain`, see `visible`), how often the
    draft's argmax is the target's (`agreement`), the chance that a token drawn from the draft's distribution passes
    rejection sampling at temperature 1 (`overlap`), and bits per byte of the target.
    """
    device = next(model.parameters()).device
    windows = min((len(ids) - 1) // context, max(1, limit // context))
    starts = torch.arange(windows) * context
    data = torch.from_numpy(ids.astype(np.int64))
    sums: dict[str, Tensor] = {}
    size = nats = torch.zeros((), dtype=torch.float64, device=device)
    masks = {mode: make_masks(3, context, mode, device, block=False) for mode in ("decode", "chain")}
    for batch in starts.split(8):
        tokens = data[batch[:, None] + torch.arange(context + 1)].to(device)
        embedded = model.embed(tokens, torch.float32)
        state = model.trunk(embedded[:, :-1])
        logits = model.target_logits(state)
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").double()
        nats, size = nats + each.sum(), size + token_bytes.to(device)[tokens[:, 1:]].sum()
        best, chances = logits.argmax(-1), logits.softmax(-1)
        for mode, mode_masks in masks.items():
            found: list[Tensor] = []
            same: list[Tensor] = []
            shared: list[Tensor] = []
            for step, drafted in enumerate(mtp_states(model, state, embedded[:, 1:], mode_masks)):
                student = model.draft_logits(drafted)[:, step:-1]
                found.append(F.cross_entropy(student.flatten(0, 1), tokens[:, step + 2 :].flatten()))
                same.append((student.argmax(-1) == best[:, step + 1 :]).double().mean())
                shared.append(torch.minimum(student.softmax(-1), chances[:, step + 1 :]).sum(-1).mean())
            for key, values in ((mode, found), (f"agreement_{mode}", same), (f"overlap_{mode}", shared)):
                total = torch.stack(values).double() * len(batch)
                sums[key] = sums[key] + total if key in sums else total
    result: dict[str, Any] = {"target": (nats / (windows * context)).item(), "windows": windows, "context": context}
    result["bits_per_byte"] = (nats / math.log(2) / size).item()
    return result | {key: (value / windows).tolist() for key, value in sums.items()}


@torch.no_grad()
def greedy(model: Mimo, prompts: Tensor, count: int) -> Tensor:
    """Continue prompts [B, P] by `count` argmax tokens, the whole forward recomputed for each; EOS does not stop it."""
    for _ in range(count):
        logits = model.target_logits(model.trunk(model.embed(prompts, torch.float32))[:, -1:])
        prompts = torch.cat((prompts, logits.argmax(-1)), dim=1)
    return prompts


@torch.no_grad()
def recompute_drafts(model: Mimo, known: Tensor, count: int) -> list[int]:
    """The oracle: `count` greedy drafts after the tokens `known` [n], every row of every pass computed anew.

    The target has seen all of `known` but its last token; each draft appends one MTP row with the recycled state.
    """
    state = model.trunk(model.embed(known[None, :-1], torch.float32))
    ids, drafts = known[None, 1:], []
    for _ in range(count):
        out = model.mtp(state, model.embed(ids, torch.float32), None, [])[:, -1:]
        draft = model.draft_logits(out).argmax(-1)
        drafts.append(int(draft))
        state, ids = torch.cat((state, out), dim=1), torch.cat((ids, draft), dim=1)
    return drafts


@torch.no_grad()
def leading_hits(model: Mimo, texts: Tensor, count: int) -> Tensor:
    """For every row p of greedy texts [B, n]: how many of `count` drafts made from it agree with the text. [B, n - 2]

    All rows at once by teacher forcing: a draft only counts when those before it were right, and then the ids that it
    was fed are the text's own. Rows whose drafts pass the end of the text count only the drafts inside it.
    """
    embedded = model.embed(texts, torch.float32)
    state = model.trunk(embedded[:, :-1])
    length = state.shape[1]
    masks = make_masks(count, length, "decode", texts.device, block=False)
    alive = torch.ones(texts.shape[0], length - 1, dtype=torch.bool, device=texts.device)
    hits = torch.zeros_like(alive, dtype=torch.int64)
    for step, drafted in enumerate(mtp_states(model, state, embedded[:, 1:], masks)):
        right = model.draft_logits(drafted)[:, step:-1].argmax(-1) == texts[:, step + 2 :]
        alive = alive & F.pad(right, (0, step))
        hits += alive
    return hits


def count_rounds(accepted: Sequence[int], prompt: int, count: int, drafts: int) -> int:
    """Rounds needed for tokens 2..`count` after a prompt of `prompt` tokens; the prefill gives token 1.

    `accepted[i]` is how many leading drafts are right when `prompt` + 1 + i tokens are known.
    """
    known, rounds = prompt + 1, 0
    while known < prompt + count:
        known += min(drafts, accepted[known - prompt - 1]) + 1
        rounds += 1
    return rounds


def matching(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def distinct_share(texts: Sequence[Sequence[int]]) -> float:
    """Different runs of eight tokens over all runs of eight, averaged over texts: low where a text repeats itself."""
    runs = [[tuple(text[i : i + 8]) for i in range(len(text) - 7)] for text in texts]
    return sum(len(set(row)) / len(row) for row in runs) / len(runs)


def tokens_per_round(model: Mimo, tokenizer: Any, prompts: Sequence[str], count: int) -> dict[str, Any]:
    """Greedy tokens per round on `prompts`, from the recompute oracle: (count - 1) / rounds, by K."""
    device = next(model.parameters()).device
    rounds, texts = dict.fromkeys(DRAFTS, 0), []
    each: dict[int, list[float]] = {drafts: [] for drafts in DRAFTS}
    written: list[list[int]] = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        text = greedy(model, torch.tensor([ids], device=device), count)[0]
        found = [
            matching(recompute_drafts(model, text[:known], max(DRAFTS)), text[known:].tolist())
            for known in range(len(ids) + 1, len(text))
        ]
        for drafts in DRAFTS:
            used = count_rounds(found, len(ids), count, drafts)
            rounds[drafts] += used
            each[drafts].append(round((count - 1) / used, 3))
        texts.append(tokenizer.decode(text.tolist()))
        written.append(text[len(ids) :].tolist())
    mean = {str(drafts): len(prompts) * (count - 1) / used for drafts, used in rounds.items()}
    by_prompt = {str(drafts): values for drafts, values in each.items()}
    return {"tokens_per_round": mean, "by_prompt": by_prompt, "distinct": distinct_share(written), "texts": texts}


def held_out_tokens_per_round(model: Mimo, ids: np.ndarray, prompts: int, length: int, count: int) -> dict[str, Any]:
    """The same figure over `prompts` stretches of `length` validation tokens, by teacher forcing (`leading_hits`)."""
    device = next(model.parameters()).device
    starts = np.linspace(0, len(ids) - length - 1, prompts).astype(np.int64)
    texts = greedy(model, torch.from_numpy(ids.astype(np.int64)[starts[:, None] + np.arange(length)]).to(device), count)
    hits = leading_hits(model, texts, max(DRAFTS)).tolist()
    rounds = {drafts: sum(count_rounds(row[length - 1 :], length, count, drafts) for row in hits) for drafts in DRAFTS}
    mean = {str(drafts): prompts * (count - 1) / used for drafts, used in rounds.items()}
    distinct = distinct_share([row[length:] for row in texts.tolist()])
    return {"tokens_per_round": mean, "distinct": distinct, "prompts": prompts, "prompt_tokens": length}


def evaluate(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one checkpoint directory."""
    from tokenizers import Tokenizer

    torch.set_float32_matmul_precision("highest")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = read_model(directory, device)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = np.load(args.corpus / "validation.npy")
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    token_bytes = torch.zeros(model.shape.vocab_size, dtype=torch.float64)
    for text, index in vocabulary.items():  # byte-level BPE: one character of a token stands for one byte
        token_bytes[index] = 0 if text.startswith("<|") and text.endswith("|>") else len(text)
    result = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(path.stat().st_size for path in directory.iterdir()),
        "shape": dataclasses.asdict(model.shape),
        "validation": [held_out_losses(model, ids, n, token_bytes, args.limit_tokens) for n in args.contexts],
        "held_out_prompts": held_out_tokens_per_round(model, ids, args.prompts, 64, args.new_tokens),
        "prompts": tokens_per_round(model, tokenizer, PROMPTS, args.new_tokens),
    }
    bare = [prompt.removesuffix("\n") for prompt in PROMPTS]
    result["prompts_without_newline"] = tokens_per_round(model, tokenizer, bare, args.new_tokens)
    if args.source:
        files = sorted(path for root in args.source for path in root.rglob("*.py"))
        own = encode([path.read_text(encoding="utf-8") for path in files], tokenizer)
        result["source"] = held_out_losses(model, own, args.contexts[0], token_bytes, args.limit_tokens)
    return result


def verdict(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Say whether `new` replaces `old`, and every figure in which it is behind.

    It must have the lower losses as decoded, the higher tokens per round on held-out code and on the prompts with and
    without their last newline, and fit into 20 MB. The `chain` losses (another attention pattern than a decoder's) are
    reported and do not decide.
    """
    deciding: dict[str, bool] = {"at most 20 MB": new["bytes"] <= 20_000_000}
    others: dict[str, bool] = {}
    for mine, theirs in zip(new["validation"], old["validation"], strict=True):
        at = f"at context {mine['context']}"
        deciding[f"target loss {at}"] = mine["target"] < theirs["target"]
        for mode, answers in (("decode", deciding), ("chain", others)):
            for step, (a, b) in enumerate(zip(mine[mode], theirs[mode], strict=True), 1):
                answers[f"MTP step {step} loss ({mode}) {at}"] = a < b
    for kind in ("prompts", "held_out_prompts", "prompts_without_newline"):
        for drafts, value in new[kind]["tokens_per_round"].items():
            deciding[f"tokens per round, {kind}, K={drafts}"] = value > old[kind]["tokens_per_round"][drafts]
    behind = [name for name, better in (deciding | others).items() if not better]
    return {"ship": all(deciding.values()), "behind_in": behind}


def command_evaluate(args: argparse.Namespace) -> None:
    """Measure `--model` and `--baseline` alike; write `summary.json`, `README.md` and `loss.png` into `--model`."""
    summary: dict[str, Any] = {
        "schema": "polydraft.demo-model/1",
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "prompts": list(PROMPTS),
        "new_tokens": args.new_tokens,
        "corpus": json.loads((args.corpus / "manifest.json").read_text()),
        "model": evaluate(args.model, args),
    }
    if args.run:
        summary["training"] = json.loads((args.run / "run.json").read_text())
        plot(args.run / "log.jsonl", args.plot or args.model / "loss.png")
    if args.baseline:
        summary["baseline"] = evaluate(args.baseline, args)
        summary["baseline_note"] = (
            "The baseline's own training data is not known: it may have been trained on files that are held out here, "
            "which favours it, and without packages that the new model knows, which does not."
        )
        summary["verdict"] = verdict(summary["model"], summary["baseline"])
    write_json(args.model / "summary.json", summary)
    (args.model / "README.md").write_text(model_card(summary))
    for name in ("model", "baseline"):
        if name in summary:
            shown = {key: value for key, value in summary[name].items() if key != "shape"}
            for kind in ("prompts", "prompts_without_newline"):
                shown[kind] = {key: value for key, value in shown[kind].items() if key != "texts"}
            print(name, json.dumps(shown))
    print("verdict:", json.dumps(summary.get("verdict")))


def plot(log: Path, target: Path) -> None:
    """Draw training and validation losses over tokens as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for index in range(len(records[0]["train"])):
        label = "target" if index == 0 else f"MTP step {index}"
        held = [record for record in records if "validation" in record]
        axes.plot([r["tokens"] / 1e6 for r in held], [r["validation"][index] for r in held], f"C{index}", label=label)
        if index == 0:  # MTP training losses hold the soft term and would not compare
            curve = [r["tokens"] / 1e6 for r in records], [r["train"][0] for r in records]
            axes.plot(*curve, "C0", alpha=0.3, lw=0.8, label="target, training")
    axes.set(xlabel="million tokens", ylabel="nats per token", title="Held-out loss")
    axes.set_ylim(0.85 * records[-1]["train"][0], 2.5)
    axes.grid(alpha=0.3)
    axes.legend()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def model_card(summary: dict[str, Any]) -> str:
    """The checkpoint's README: what it is, what it was trained on, figures."""
    model, corpus, shape = summary["model"], summary["corpus"], summary["model"]["shape"]
    held = model["validation"][0]
    by_licence: dict[str, list[Any]] = {}
    for row in corpus["packages"]:
        by_licence.setdefault(row["licence"], []).append(row)
    rounds = {
        kind: ", ".join(f"K={drafts} {value:.2f}" for drafts, value in model[kind]["tokens_per_round"].items())
        for kind in ("prompts", "held_out_prompts")
    }
    about = f"""A small decoder for Python text with one multi-token-prediction layer, MiMo layout,
{model["parameters"] / 1e6:.2f} M parameters, bf16: {shape["num_hidden_layers"]} layers, hidden {shape["hidden_size"]},
{shape["num_attention_heads"]} query and {shape["num_key_value_heads"]} key-value heads of {shape["head_dim"]},
feed-forward {shape["intermediate_size"]}, vocabulary {shape["vocab_size"]}. Weights: Apache-2.0.
Made by `tools/train_demo.py` on {summary["date"]}.

Conventions: concat order [hidden, embedding]; MTP is fed and recycled the state before the final norm; its own
`final_layernorm` comes before the shared `lm_head`; RoPE half-split. `tokenizer.json` is byte-level BPE, id 0 is
`<|endoftext|>` (EOS), id 1 is `<|pad|>`. End a prompt without a newline: the tokenizer joins a newline with the
indentation that follows it. The model writes plausible code, not correct code: it exists to show and to test drafts.

Held-out loss, nats per token, context {held["context"]}: target {held["target"]:.3f} ({held["bits_per_byte"]:.3f} bits
per byte), MTP step 1/2/3 {" / ".join(f"{value:.3f}" for value in held["decode"])}. Greedy tokens per round:
{rounds["prompts"]} on five prompts; {rounds["held_out_prompts"]} on held-out code. All figures, and those of the model
before it on the same data, are in `summary.json`."""
    data = f"""{corpus["train"]["tokens"] / 1e6:.1f} M tokens of Python source ({corpus["train"]["files"]} files) from the
packages below, filtered, de-duplicated and split by file hash; no file of them is part of this checkpoint."""
    wrapped = [textwrap.fill(" ".join(part.split()), 110) for part in (*about.split("\n\n"), data)]
    lines = "\n\n".join(("# Demo model", *wrapped[:-1], "## Data", wrapped[-1])).split("\n")
    if "training" in summary:
        lines.append(f"Seen in training: {summary['training']['tokens'] / 1e9:.2f} G tokens.")
    lines += ["", "| licence as stated | packages |", "|---|---|"]
    for licence, rows in sorted(by_licence.items(), key=lambda item: -sum(row["bytes"] for row in item[1])):
        lines.append(f"| {licence} | {', '.join(row['name'] + ' ' + row['version'] for row in rows)} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Self-test and command line.
# ---------------------------------------------------------------------------------------------------------------------


def command_selftest(args: argparse.Namespace) -> None:
    """Check the parallel forms against row-by-row recomputation and, on a GPU, FlexAttention against dense masks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest")
    generator = torch.Generator().manual_seed(args.seed)
    model = read_model(args.model, device) if args.model else random_model(generator).to(device)
    size = model.shape.vocab_size
    text = greedy(model, torch.randint(size, (1, 9), generator=generator).to(device), 30)
    hits = leading_hits(model, text, 5)[0].tolist()
    drafts = [recompute_drafts(model, text[0, :known], 5) for known in range(2, text.shape[1])]
    oracle = [matching(row, text[0, known:].tolist()) for known, row in enumerate(drafts, 2)]
    if hits != oracle or max(oracle) == 0:
        raise SystemExit(f"teacher-forced hits {hits} are not the oracle's {oracle}")
    print(f"hits by teacher forcing equal those of the recompute oracle: {oracle}")
    with torch.no_grad():
        embedded = model.embed(text, torch.float32)
        state = model.trunk(embedded[:, :-1])
        masks = make_masks(4, state.shape[1], "decode", device, block=False)
        waves = list(mtp_states(model, state, embedded[:, 1:], masks))
        gap = 0.0
        for row in range(state.shape[1] - len(waves)):
            rows = state[:, : row + 1]
            for step, wave in enumerate(waves):
                out = model.mtp(rows, embedded[:, 1 : row + 2 + step], None, [])[:, -1]
                gap = max(gap, ((wave[:, row + step] - out).norm() / out.norm()).item())
                rows = torch.cat((rows, out[:, None]), dim=1)
    if not gap < 1e-4:
        raise SystemExit(f"an MTP state differs from its recomputed row by {gap:.2e} of its norm")
    print(f"all MTP states of four steps equal recomputed rows within {gap:.1e}")
    if device.type != "cuda":
        return
    ids = torch.randint(size, (4, 257), generator=generator).to(device)
    values, gradients = [], []
    for block, function in ((False, losses), (True, torch.compile(losses, dynamic=False))):
        model.zero_grad()
        values.append(function(model, ids, make_masks(3, 256, "decode", device, block), 0.5, torch.float32))
        values[-1].sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    gap = max(((a - b).norm() / a.norm()).item() for a, b in zip(*gradients, strict=True))
    if not (gap < 1e-2 and torch.allclose(values[0], values[1], rtol=1e-4)):
        raise SystemExit(f"FlexAttention differs from dense masks: {values[0]}, {values[1]}, gradients {gap:.2e}")
    print(f"compiled FlexAttention equals dense masks, gradients within {gap:.1e}")


def random_model(generator: torch.Generator) -> Mimo:
    """A two-layer model whose weights are all random, biases and norms included."""
    model = Mimo(Shape(num_hidden_layers=2, vocab_size=64, intermediate_size=128))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.7 * parameter.shape[-1] ** -0.5)
    return model


def floats(text: str) -> tuple[float, ...]:
    """Parse '0.4,0.3,0.2'."""
    return tuple(float(part) for part in text.split(","))


def parser() -> argparse.ArgumentParser:
    """Build the command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, function: Callable[[argparse.Namespace], None], example: str) -> argparse.ArgumentParser:
        about = function.__doc__ or ""
        epilog = f"example: python tools/train_demo.py {name} {example}"
        sub = commands.add_parser(name, help=about.split(";")[0].rstrip("."), description=about, epilog=epilog)
        sub.set_defaults(function=function)
        return sub

    sub = add("corpus", command_corpus, "--tokenizer DEMO/tokenizer.json --out work/corpus")
    sub.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json to reuse")
    sub.add_argument("--out", type=Path, required=True)
    sub.add_argument("--held-out", type=int, default=15, help="files of a thousand that are held out (default 15)")
    sub.add_argument("--limit-files", type=int, help="read only the first N files, for a try")
    sub.add_argument("--show", type=int, default=60, help="packages to print")

    sub = add("train", command_train, "--corpus work/corpus --out work/run --tokens 2.6e9 --resume")
    sub.add_argument("--corpus", type=Path, required=True)
    sub.add_argument("--out", type=Path, required=True)
    sub.add_argument("--resume", action="store_true", help="go on from --out/checkpoint.pt if it is there")
    sub.add_argument("--no-compile", action="store_true", help="plain PyTorch, for a CPU")
    sub.add_argument("--attention", choices=("flex", "dense"), default="flex", help="how MTP steps 2 and 3 are masked")
    sub.add_argument("--log-every", type=int, default=50, help="steps a log line; every tenth line validates")
    sub.add_argument("--save-seconds", type=float, default=120.0)
    sub.add_argument("--stop-step", type=int, help="save and stop here, without changing the schedule")
    for record in (Recipe(), Shape()):
        for field in dataclasses.fields(record):
            default = getattr(record, field.name)
            kind = floats if isinstance(default, tuple) else type(default)
            sub.add_argument("--" + field.name.replace("_", "-"), type=kind, default=default, help=f"default {default}")

    sub = add("export", command_export, "--run work/run --tokenizer DEMO/tokenizer.json --out work/export")
    sub.add_argument("--run", type=Path, required=True)
    sub.add_argument("--tokenizer", type=Path, required=True)
    sub.add_argument("--out", type=Path, required=True)
    sub.add_argument("--raw", action="store_true", help="the last weights instead of their moving average")

    sub = add("evaluate", command_evaluate, "--model work/export --baseline DEMO --corpus work/corpus --run work/run")
    sub.add_argument("--model", type=Path, required=True)
    sub.add_argument("--baseline", type=Path, help="checkpoint to compare with")
    sub.add_argument("--corpus", type=Path, required=True)
    sub.add_argument("--run", type=Path, help="the run, for its recipe and loss plot")
    sub.add_argument("--plot", type=Path, help="where the plot goes (default: --model/loss.png)")
    sub.add_argument("--source", type=Path, nargs="*", help="also measure on the Python files under these folders")
    sub.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048])
    sub.add_argument("--limit-tokens", type=int, default=2_000_000)
    sub.add_argument("--new-tokens", type=int, default=128)
    sub.add_argument("--prompts", type=int, default=128, help="held-out prompts for tokens per round")

    sub = add("selftest", command_selftest, "--seed 0")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--model", type=Path, help="a checkpoint directory (default: random weights)")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 on failure, 2 on bad usage."""
    args = parser().parse_args(arguments)
    args.function(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
