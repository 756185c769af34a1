"""An engine of the CUDA backend on a device of paper: what each of its programs launches, kernel by kernel, with arguments."""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import polydraft_cuda.device
import polydraft_cuda.probe
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.config import EngineConfig
from polydraft.engine import Engine
from polydraft.program.program import lengths
from polydraft.reference.device import ReferenceDevice
from polydraft_cuda import cublaslt
from polydraft_cuda.compiler import ROWS
from polydraft_cuda.kernels.projections import TensorMap
from tests.device.paper import Buffer, PaperDevice

LOOKED_AT = ("linear", "mlp", "route", "experts", "rope", "attention", "norms", "screen", "sampling")
"""Beginnings of the sources whose arguments are noted, too: all that one launch can be made of."""
SEQS = (1, 8, 64)
"""Sequences of the steps that are looked at, each with a whole window of rows."""
WINDOW = 4
BLOCK = {
    "architectures": ["MiMoForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 69632, "max_position_embeddings": 4096,
    "rope_theta": 640000, "rms_norm_eps": 1e-05, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
"""Two blocks and a head that are large enough for every way in which kernels become one launch."""
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "all joined": ({}, {}, {}),
    "windows of two tiles": ({"num_attention_heads": 32}, {}, {}),
    "wide windows": ({"num_attention_heads": 64}, {}, {}),
    "small head": ({"vocab_size": 4096}, {}, {}),
    "biases": ({"architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0}, {"proposer": "ngram"}, {}),
    "log probabilities": ({}, {"logprobs": 2, "draft_logprobs": True}, {}),
    "constraints": ({}, {"constraints": True}, {}),
    "rejection": ({}, {"verify": "rejection"}, {}),
    "quantised rows": ({}, {"kv_dtype": "fp8"}, {}),
    "invariant": ({}, {"invariant": True}, {}),
    "rounded rows": ({}, {"weights": "fp8-a8"}, {}),
    "experts": (
        {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "moe_intermediate_size": 512,
            "moe_num_experts": 16,
            "moe_k": 4,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "num_nextn_predict_layers": 0,
            "num_hidden_layers": 3,
            "use_bias": False,
        },
        {"proposer": "ngram"},
        {},
    ),
    "float32": ({"vocab_size": 4096}, {"dtype": "f32"}, {}),
    "sm_80": ({}, {}, {"arch": "sm_80", "num_sms": 108}),
}
"""Name to what differs from `BLOCK`, to options of the engine, and to properties of the device."""


class TracedDevice(PaperDevice):
    """Notes what is launched; whatever else an engine asks goes to `host`. A buffer among the arguments is known by its shape and
    by when it came first in what was noted so far, so that neither its name nor the order of allocation matters."""

    def __init__(self, host: Any, **properties: Any) -> None:
        super().__init__(**properties)
        self.host, self.spec = host, "cuda:0"
        self.trace: list[str] = []
        self._shapes: dict[int, str] = {}
        self._starts: list[int] = []
        self._seen: dict[int, int] = {}
        self._maps: list[tuple[int, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["host"], name)

    def restart(self) -> None:
        """Forget what was noted."""
        self.trace, self._seen = [], {}

    def free_memory(self) -> int:
        return 1 << 40

    def empty(self, name: str, shape: Any, dtype: str) -> Buffer:
        made = super().empty(name, shape, dtype)
        self._shapes[made.pointer] = f"{list(made.shape)} {dtype}"
        self._starts.append(made.pointer)
        return made

    def call(self, name: str, *arguments: Any, doing: str = "") -> Any:
        assert name == "cuTensorMapEncodeTiled", "the only call of binding"
        _, dims, pointer, *numbers = arguments[:6]
        self._maps.append((int(pointer), f"{dims} {[[int(n) for n in part] for part in numbers]}"))
        return SimpleNamespace(opaque=[len(self._maps) - 1] + [0] * 15)

    def _place(self, pointer: int) -> str:
        if not pointer:
            return "null"
        start = self._starts[bisect.bisect_right(self._starts, pointer) - 1]
        return f"{self._seen.setdefault(start, len(self._seen))} {self._shapes[start]} +{pointer - start}"

    def word(self, argument: Any, n: int) -> Any:
        """An argument in words; `n` where it is the launch length."""
        if argument is ROWS:
            return n
        if isinstance(argument, TensorMap):
            pointer, form = self._maps[argument.words[0]]
            return f"{self._place(pointer)} {form}"
        if isinstance(argument, ctypes.Array):
            return [self._place(pointer or 0) for pointer in argument]
        pointer = argument if isinstance(argument, int) else getattr(argument, "pointer", None)
        return argument if argument is pointer or pointer is None else self._place(pointer)

    def function(self, source: Path, name: str, **defines: Any) -> Any:
        def bind(grid: Any, block: Any, *arguments: Any, **options: Any) -> Callable[[Any, int], None]:
            def launch(stream: Any, n: int) -> None:
                size = grid(n) if callable(grid) else grid
                if all(size) if isinstance(size, tuple) else size:
                    words = [self.word(one, n) for one in arguments] if source.name.startswith(LOOKED_AT) else []
                    self.note(f"{source.name}:{name}", size, block, sorted(defines.items()), sorted(options.items()), words)

            return launch

        return SimpleNamespace(bind=bind, name=name, most_clusters=lambda block, shared, cluster: self.num_sms // cluster)

    def note(self, name: str, *rest: Any) -> None:
        """A launch: its name, its grid, and a digest of everything that it is launched with."""
        self.trace.append(f"{name} {rest[0]} {hashlib.sha256(repr(rest).encode()).hexdigest()[:12]}")


def library(device: TracedDevice, x: Any, weight: Any, bias: Any, out: Any, scratch: int) -> Any:
    """Stands for products by cuBLASLt."""
    del scratch
    return lambda stream, n: device.note("cuBLASLt", n, *(device.word(one, n) for one in (x, weight, bias, out)))


def engine_of(name: str, folder: Path, patch: pytest.MonkeyPatch, **more: Any) -> Engine:
    """The engine called `name` in `ENGINES`, with `more` options."""
    shape, options, properties = ENGINES[name]
    file = folder / "shape.json"
    file.write_text(json.dumps(BLOCK | shape), encoding="utf-8")

    def opened(index: int, dtype: str, row_invariant: bool, can_sleep: bool, meets: Any) -> Any:
        assert (index, can_sleep, meets) == (0, False, None)
        return TracedDevice(ReferenceDevice("cpu"), dtype=dtype, row_invariant=row_invariant, **properties)

    patch.setattr(polydraft_cuda.probe, "look", lambda: SimpleNamespace(reason="", devices=("cuda:0",)))
    patch.setattr(polydraft_cuda.device, "CudaDevice", opened)
    patch.setattr(cublaslt, "library", lambda: True)
    patch.setattr(cublaslt, "bind", library)
    own = {
        "backend": "cuda", "graph": "off", "overlap": 0, "dtype": "bf16", "max_num_seqs": 64, "max_model_len": 64,
        "draft_tokens": WINDOW - 1,
    }  # fmt: skip
    return Engine(EngineConfig.from_mapping({**own, **options, **more}), checkpoint=RandomCheckpoint(file))


def steps(seqs: Sequence[int] = SEQS) -> Iterator[tuple[int, Any]]:
    """Launch lengths by number of sequences."""
    for count in seqs:
        rows = WINDOW * count
        yield count, lengths(rows=rows, logit_rows=rows, seqs=count, prompt_rows=1)


def launches(engine: Engine, *, captured: bool) -> dict[str, list[str]]:
    """What each program launches for each number of sequences: what a graph is made from, or one by one, with prompts as well."""
    device, context, found = engine.device, engine.runner.context, {}
    for (kind, parts), (seqs, size), prefill in itertools.product(
        engine.runner.programs.items(), steps(), (False,) if captured else (False, True)
    ):
        context.real_slots, context.has_prefill = seqs, prefill
        for part, program in parts.items():
            device.restart()  # type: ignore[attr-defined]
            entries = [call[1:] for call in program.recorded()] if captured else program.calls
            for launch, unit in entries:
                launch(device.stream, size[unit])
            found[f"{kind} {part} {seqs}{' prefill' if prefill else ''}"] = list(device.trace)  # type: ignore[attr-defined]
    return found


RECORDED = Path(__file__).parent / "launches.json"
"""What was launched when providers still joined what had been bound before them (commit cbba46d; written anew when slot columns
became buffers of their own and this device gave each buffer bytes of its own, kernels, grids and all else being the same, when
prompts got kernels for their attention and turns, and windows beside them theirs, and when rows of activations and sums became
the first axis of grids): digests of all programs, and every launch of one engine's steps of 8 sequences.
`python -m tests.device.traced` rewrites it where other launches are wanted."""
IN_FULL = "all joined"


def digest(traces: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Digests of the launches of programs."""
    return {key: hashlib.sha256("\n".join(trace).encode()).hexdigest()[:12] for key, trace in traces.items()}


def record() -> None:
    """Write `RECORDED`."""
    digests: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    for name in ENGINES:
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            engine = engine_of(name, Path(folder), patch)
            found = {way: launches(engine, captured=way == "captured") for way in ("eager", "captured")}
        digests[name] = {way: digest(traces) for way, traces in found.items()}
        if name == IN_FULL:
            shown = {way: {key: trace for key, trace in t.items() if key.endswith(" 8")} for way, t in found.items()}
    RECORDED.write_text(json.dumps({"digests": digests, "launches": shown}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
