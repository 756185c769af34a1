"""The kernels: PyTorch for what costs time, each `kernel(a, n)` on the tensors of one contract; the reference's for the rest.

The table binds them once to their buffers. A launch only enqueues; a temporary comes from PyTorch's own pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from polydraft.backend import CacheSpec
from polydraft.contracts.base import Limits, Provider, Workspace
from polydraft.device import Array, Launch, Stream
from polydraft.plugins.bring_up import contract_versions
from polydraft.reference.table import NumpyTable
from polydraft.sentinels import NO_TOKEN, Phase
from polydraft_torch.device import TorchDevice, tensor_of

Kernel = Callable[[Any, int], None]


# -- rows ----------------------------------------------------------------------------------------------
def embed(a: Any, n: int) -> None:
    """Rows of the table, zeros for no token."""
    a.out[:n] = picked(a.weight, a.ids[:n])


def gather_rows(a: Any, n: int) -> None:
    """Rows of x, zeros for no row."""
    a.out[:n] = picked(a.x, a.index[:n])


def select_last_rows(a: Any, n: int) -> None:
    """The row of each drafting sequence's newest position, zeros for the others."""
    start = a.seq_start[:n].clamp(0, len(a.positions) - 1)
    row = start + a.draft_position[:n] - a.positions[start]
    a.out[:n] = picked(a.hidden, torch.where(a.draft_slot[:n] >= 0, row, -1))


def picked(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[index], with zeros where the index is negative."""
    return x[index.clamp(min=0)].masked_fill_((index < 0).unsqueeze(1), 0.0)


# -- arithmetic ----------------------------------------------------------------------------------------
def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
    """RMSNorm over the last axis."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight if plus_one else weight)


def rms_norm(a: Any, n: int) -> None:
    """RMSNorm of rows."""
    a.out[:n] = normed(a.x[:n], a.weight, a.eps, a.plus_one)


def linear(a: Any, n: int) -> None:
    """x @ weight.T + bias."""
    a.out[:n] = torch.nn.functional.linear(a.x[:n], a.weight, a.bias)


def residual_add(a: Any, n: int) -> None:
    """x := x + y."""
    a.x[:n] += a.y[:n]


def swiglu(a: Any, n: int) -> None:
    """silu(gate) * up."""
    gate, up = a.gate_up[:n].chunk(2, dim=1)
    a.out[:n] = torch.nn.functional.silu(gate) * up


def combine_draft_inputs(a: Any, n: int) -> None:
    """Both halves normalised, side by side."""
    embedding = a.embedding[:n]
    if a.mask_first_position:
        embedding = embedding.masked_fill((a.positions[:n] == 0).unsqueeze(1), 0.0)
    halves = [normed(a.hidden[:n], a.hid_norm, a.eps, a.plus_one), normed(embedding, a.emb_norm, a.eps, a.plus_one)]
    a.out[:n] = torch.cat(halves if a.order == "hidden_first" else halves[::-1], dim=1)


def argmax(a: Any, n: int) -> None:
    """The lowest id of the highest logits."""
    highest = a.logits[:n].amax(1)
    first = (a.logits[:n] == highest.unsqueeze(1)).to(torch.uint8).argmax(1).int()
    a.tokens[:n] = torch.where(highest.isfinite() & (a.row_slot[:n] >= 0), first, NO_TOKEN)


# -- attention -----------------------------------------------------------------------------------------
def rope_kv_write(a: Any, n: int) -> None:
    """Norm, rotate, store; the cache is [2, num_blocks, block_size, num_kv_heads, head_dim]."""
    heads, kv_heads, half = a.num_heads, a.num_kv_heads, len(a.frequencies)
    q, k, v = a.qkv[:n].view(n, heads + 2 * kv_heads, a.head_dim).split((heads, kv_heads, kv_heads), dim=1)
    if a.q_norm is not None:
        q, k = normed(q, a.q_norm, a.eps, False), normed(k, a.k_norm, a.eps, False)
    positions = a.positions[:n].long()
    angle = positions.view(n, 1, 1) * torch.tensor(a.frequencies, dtype=torch.float64)
    cos, sin = (angle.cos() * a.attention_factor).float(), (angle.sin() * a.attention_factor).float()
    first, second = (slice(half), slice(half, 2 * half)) if a.style == "half" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    qk = torch.cat((q, k), dim=1)
    turned = qk.clone()
    turned[..., first] = qk[..., first] * cos - qk[..., second] * sin
    turned[..., second] = qk[..., second] * cos + qk[..., first] * sin
    slots = a.row_slot[:n].long()
    a.q_out[:n] = turned[:, :heads].flatten(1).masked_fill((slots < 0).unsqueeze(1), 0.0)
    blocks = a.block_table[slots.clamp(min=0), positions.clamp(min=0) // a.block_size]
    rows = ((slots >= 0) & (blocks >= 0)).nonzero().squeeze(1)
    place = blocks[rows].long(), positions[rows] % a.block_size
    a.cache[0][place] = turned[rows, heads:]
    a.cache[1][place] = v[rows]


def paged_attention(a: Any, n: int) -> None:
    """Row by row over the slot's own keys, so that what lies behind a row's position is never touched."""
    a.out[:n] = 0.0
    q = a.q[:n].view(n, a.num_kv_heads, a.num_heads // a.num_kv_heads, a.head_dim)
    slots, positions = a.row_slot[:n].tolist(), a.positions[:n].tolist()
    for row in range(n):
        if slots[row] < 0:
            continue
        length = positions[row] + 1
        blocks = a.block_table[slots[row], : -(-length // a.block_size)].long()
        first = max(length - a.sliding_window, 0) if a.sliding_window else 0
        k, v = a.cache[:, blocks].flatten(1, 2)[:, first:length].permute(0, 2, 1, 3)
        weights = torch.softmax(q[row] @ k.transpose(1, 2) * a.softmax_scale, dim=-1)
        a.out[row] = (weights @ v).flatten()


# -- verification --------------------------------------------------------------------------------------
def verify_match(a: Any, n: int) -> None:
    """Accept drafts up to the first that differs from the target's choice."""
    slots, lengths = a.slot_order[:n].long(), a.logit_len[:n].long()
    places = torch.arange(a.window.shape[1])
    live = (slots >= 0) & (lengths > 0)
    rows = (a.logit_start[:n].long().unsqueeze(1) + places).clamp(0, max(len(a.choices) - 1, 0))
    choices = a.choices[rows]
    decodes = live & (a.phase[slots.clamp(min=0)] == int(Phase.DECODE))
    same = choices[:, :-1] == a.drafts[slots.clamp(min=0)]
    same &= decodes.unsqueeze(1) & (places[:-1] < (lengths - 1).unsqueeze(1))
    accepted = same.int().cumprod(1).sum(1)
    kept = live.unsqueeze(1) & (places <= accepted.unsqueeze(1))
    a.window[:n] = torch.where(kept, choices, NO_TOKEN)
    a.window_len[:n] = torch.where(live, accepted + 1, 0).int()
    a.accepted[:n] = accepted.int()
    a.drafted[:n] = torch.where(decodes, lengths - 1, -1).int()


OWN: Final[Mapping[str, Kernel]] = {
    kernel.__name__: kernel
    for kernel in (
        embed, gather_rows, select_last_rows, rms_norm, linear, residual_add, swiglu, combine_draft_inputs, argmax,
        rope_kv_write, paged_attention, verify_match,
    )
}  # fmt: skip


# -- binding -------------------------------------------------------------------------------------------
class TorchCache:
    """One layer's keys and values. What was never written is NaN."""

    def __init__(self, device: TorchDevice, spec: CacheSpec) -> None:
        self._device = device
        shape = (2, spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.array: Array = device.empty("cache", shape, "f32").host_array
        self.array.fill(np.nan)
        self.nbytes = self.array.nbytes

    def read_logical(self) -> tuple[Array, Array]:
        """As `Cache.read_logical`."""
        self._device.settle()
        return self.array[0].copy(), self.array[1].copy()

    def write_logical(self, k: Array, v: Array) -> None:
        """As `Cache.write_logical`."""
        self._device.settle()
        self.array[...] = np.stack((k, v))


@dataclass(frozen=True)
class TorchProvider:
    """One own kernel."""

    device: TorchDevice
    kernel: Kernel

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Take the tensors out of the record, once."""
        del limits, workspace
        a = SimpleNamespace(**{field.name: tensor_of(getattr(args, field.name)) for field in fields(args)})
        device, kernel = self.device, self.kernel

        def launch(stream: Stream, n: int) -> None:
            device.counters.launches += 1
            device.enqueue(stream, partial(kernel, a, n))

        return launch

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """None: PyTorch's pool has temporaries."""
        del args, limits
        return 0


class TorchTable(NumpyTable):
    """The reference's table, with own kernels, an own cache, and refills that wait for what still reads the weight."""

    def __init__(self, device: TorchDevice) -> None:
        super().__init__(device)
        self._torch = device
        self.versions: Mapping[str, int] = contract_versions()
        own = {name: TorchProvider(device, kernel) for name, kernel in OWN.items()}
        self.providers: Mapping[str, Provider] = {name: own.get(name, self.providers[name]) for name in self.versions}

    def allocate_cache(self, spec: CacheSpec) -> TorchCache:  # type: ignore[override]  # own attention reads it
        """As `KernelTable.allocate_cache`."""
        return TorchCache(self._torch, spec)
