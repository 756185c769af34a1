"""A backend double: the reference, with every row of logits that a token is chosen from kept for the test."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft import reference
from polydraft.demo import demo_model_path
from polydraft.hooks import hookimpl
from polydraft.llm import LLM
from polydraft.reference.table import NumpyTable
from polydraft.sampling_params import SamplingParams

Array = NDArray[Any]


@dataclass(eq=False)
class RecordingBackend:
    """Stands in for the reference backend; `logits` gets one array [rows, V] per launch of `argmax`, in launch order."""

    name: str = "reference"
    logits: list[Array] = field(default_factory=list)

    polydraft_backend_info = staticmethod(reference.polydraft_backend_info)
    polydraft_open_device = staticmethod(reference.polydraft_open_device)
    polydraft_init_forward_meta = staticmethod(reference.polydraft_init_forward_meta)
    polydraft_collectives = staticmethod(reference.polydraft_collectives)

    @hookimpl
    def polydraft_kernels(self, device: Any) -> NumpyTable:
        table = NumpyTable(device)
        table.providers = {**table.providers, "argmax": _Recorder(table.providers["argmax"], self.logits)}
        return table


@dataclass(frozen=True)
class _Recorder:
    provider: Any
    logits: list[Array]

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        launch = self.provider.bind(args, limits, workspace)

        def recorded(stream: Any, n: int) -> None:
            self.logits.append(args.logits.host_array[:n].copy())
            launch(stream, n)

        return recorded

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        return int(self.provider.workspace_bytes(args, limits))


def engine_logits(
    model_dir: Path, token_ids: Sequence[int], num_drafts: int, switches: Mapping[str, Any], **options: Any
) -> tuple[Array, Array]:
    """Logits of the real engine: each prefix prefilled as a request of its own, and the drafts behind the whole prompt."""
    if not (model_dir / "tokenizer.json").exists():
        shutil.copy(demo_model_path() / "tokenizer.json", model_dir)  # the engine wants one; ids are given, so any will do
    backend = RecordingBackend()
    conventions = tuple(f"{name}={str(value).lower()}" for name, value in switches.items())
    llm = LLM(plugin=backend, model=str(model_dir), draft_tokens=num_drafts, max_num_seqs=1, mtp_options=conventions, **options)
    target = []
    for end in range(1, len(token_ids) + 1):
        backend.logits.clear()
        llm.generate([list(token_ids[:end])], SamplingParams(max_new_tokens=num_drafts + 2, ignore_eos=True))
        target.append(backend.logits[0][-1])
    drafted = [rows[0] for rows in backend.logits[1 : 1 + num_drafts]]
    llm.close()
    return np.stack(target), np.array(drafted).reshape(num_drafts, target[0].size)
