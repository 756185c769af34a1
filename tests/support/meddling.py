"""A backend double: another backend's device and kernels, with logits that a test may spoil before a token is chosen.

It has the plugin object that `LLM(plugin=...)` takes, and the checkpoint whose tokens are single bytes. The tests of bad input
use it, on both devices of the reference. Only logits are changed: choice, verification and commit are the wrapped backend's.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polydraft import hookimpl, reference
from polydraft.backend import BackendInfo, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
from polydraft.contracts.base import Limits
from polydraft.device import Array, Device, GraphCapture
from polydraft.reference.table import kernels
from tests.support import tiny

Meddle = Callable[[str, int, Array, Array], None]
"""Gets "target" or "draft", how often that role has run before, logits [n, V] to change in place, and slots [n]."""


class MeddlingPlugin:
    """Wraps the NumPy backend `inner` (a plugin object; the reference by default) and lets `meddle` have the logits."""

    def __init__(self, meddle: Meddle, inner: Any = reference) -> None:
        self._meddle, self._inner = meddle, inner
        self._num_runs = {"target": 0, "draft": 0}

    @hookimpl
    def polydraft_backend_info(self, spec: str) -> BackendInfo:
        info: BackendInfo = self._inner.polydraft_backend_info(spec)
        return info

    @hookimpl
    def polydraft_open_device(self, spec: str, options: DeviceOptions) -> Device:
        device: Device = self._inner.polydraft_open_device(spec=spec, options=options)
        return device

    @hookimpl
    def polydraft_kernels(self, device: Any) -> KernelTable:
        table = self._inner.polydraft_kernels(device=device)
        table.providers = {**table.providers, "process_logits": device.bind_kernel(self._kernel(device.row_invariant))}
        return table  # type: ignore[no-any-return]

    @hookimpl
    def polydraft_graph_capture(self, device: Any) -> GraphCapture:
        capture: GraphCapture = self._inner.polydraft_graph_capture(device=device)
        return capture

    @hookimpl
    def polydraft_init_forward_meta(self, device: Any, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
        meta: ForwardMeta = self._inner.polydraft_init_forward_meta(device=device, buffers=buffers, limits=limits)
        return meta

    @hookimpl
    def polydraft_collectives(self, device: Any, group: Any) -> Any:
        return self._inner.polydraft_collectives(device=device, group=group)

    def _kernel(self, row_invariant: bool) -> Any:
        genuine = kernels(row_invariant)["process_logits"]

        def bind(a: Any, limits: Limits) -> Callable[[int], None]:
            run = genuine(a, limits)
            role = "target" if a.logits.shape[0] == limits.max_logit_rows else "draft"

            def meddled(n: int) -> None:
                run(n)
                self._meddle(role, self._num_runs[role], a.logits[:n], a.row_slot[:n])
                self._num_runs[role] += 1

            return meddled

        return bind


def byte_checkpoint(directory: Path, name: str = "narrow") -> Path:
    """Copy the tiny model `name` with a tokenizer of one or two bytes a token: its texts are invalid UTF-8 in most places, and
    whole characters of up to 4 bytes that span tokens in others."""
    shutil.copytree(tiny.checkpoint(name), directory)
    characters = [_BYTE_LEVEL[byte] for byte in sorted(set("aé€😀ü".encode() + b"\xff"))]
    tokens = [*characters, *map("".join, itertools.permutations(characters, 2))]
    random.Random(0).shuffle(tokens)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    ids = range(1, tiny.CONFIGS[name]["vocab_size"])
    tokenizer["model"]["vocab"] = {"<eos>": 0, **{token: i for i, token in zip(ids, tokens, strict=False)}}
    tokenizer["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return directory


def _byte_level() -> dict[int, str]:
    """Byte to the character that stands for it in byte-level vocabularies (GPT-2): itself where printable, else moved up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()
