"""The file form of recorded kernel calls: one safetensors file, with the calls as JSON in its metadata, and its way back.

`generate --record` writes it, `polydraft replay` reads it, and any reader of safetensors opens it. Nothing in it is ever
executed or unpickled. A tensor that several calls have in common is stored once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from polydraft.device import DTYPES, Array
from polydraft.errors import CheckpointError, ConfigError
from polydraft.instruments.output_file import writing
from polydraft.json_text import parsed
from polydraft.program.plan import StepWidth

SCHEMA: Final = "polydraft.record/1"
_STORED: Final[Mapping[str, str]] = {"i32": "I32", "u32": "U32", "f32": "F32", "f16": "F16", "bf16": "BF16", "u8": "U8"}
_NAMES: Final = {stored: name for name, stored in _STORED.items()}


@dataclass(frozen=True)
class Tensor:
    """One stored tensor: host representation `array` of dtype name `dtype` (bf16: its bits)."""

    array: Array
    dtype: str


class Tensors:
    """Stored tensors by key; equal ones have one key."""

    def __init__(self, found: Mapping[str, Tensor] | None = None) -> None:
        self._by_key: dict[str, Tensor] = dict(found or {})
        self._key_of: dict[bytes, str] = {}

    def add(self, array: Array, dtype: str) -> str:
        """File a tensor and return its key. `array` must not be changed afterwards."""
        whole = np.ascontiguousarray(array, DTYPES[dtype]).reshape(np.shape(array))
        digest = hashlib.sha256(f"{dtype}{whole.shape}".encode() + whole.tobytes()).digest()
        if digest not in self._key_of:
            self._key_of[digest] = f"t{len(self._by_key)}"
            self._by_key[self._key_of[digest]] = Tensor(whole, dtype)
        return self._key_of[digest]

    def __getitem__(self, key: str) -> Tensor:
        return self._by_key[key]

    def items(self) -> Sequence[tuple[str, Tensor]]:
        """Keys and tensors, in the order of filing."""
        return tuple(self._by_key.items())


@dataclass(frozen=True)
class RecordedCache:
    """What a call saw and left of a KV cache: keys of `blocks` [n] int32, the blocks that block tables named, and of their
    float32 rows [n, block_size, num_kv_heads, head_dim] before (`k`, `v`) and after (`k_after`, `v_after`)."""

    num_blocks: int
    blocks: str
    k: str
    v: str
    k_after: str
    v_after: str


@dataclass(frozen=True)
class Call:
    """One kernel call. Fields of its argument record by kind; what is in none of them was absent.

    `inputs`: key of each tensor that it may read (in, inout) as it was before; `outputs`: of each that it may write (out, inout)
    as it was afterwards; `weights`: canonical names; `params`: as bound; `metas`: what forward metadata was filled with."""

    number: int
    """From 0, over the whole file."""
    step: int
    part: str
    stage: str
    contract: str
    version: int
    n: int
    """Launch length."""
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    params: Mapping[str, Any]
    weights: Mapping[str, str]
    caches: Mapping[str, RecordedCache]
    metas: Mapping[str, Mapping[str, Any]]

    @property
    def place(self) -> str:
        """Where it stands, for people."""
        return f"call {self.number} (step {self.step}, {self.part}, stage {self.stage})"


@dataclass(frozen=True)
class RecordedWeight:
    """One canonical weight: SHA-256 of its float32 bytes, its shape, and the key of its values where they are included."""

    digest: str
    shape: tuple[int, ...]
    key: str = ""
    leaves: int = 0
    """As how many each matrix of it was given to the backend (`Tensor.leaves`)."""


@dataclass(frozen=True)
class Record:
    """The calls of some steps. `about`: who ran them on what; see `polydraft.instruments.record`."""

    about: Mapping[str, Any]
    calls: tuple[Call, ...]
    weights: Mapping[str, RecordedWeight] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=Tensors)
    widths: Mapping[int, StepWidth] = field(default_factory=dict)
    """How much each recorded step verified and drafted."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the recorded steps."""
        return tuple(dict.fromkeys(call.step for call in self.calls))


def digest_of(canonical: Array) -> str:
    """The digest by which a weight is referred to."""
    return hashlib.sha256(np.ascontiguousarray(canonical, np.float32).tobytes()).hexdigest()


# -- writing -----------------------------------------------------------------------------------------
def write(path: str | Path, record: Record) -> None:
    """Write a record. Raises `ConfigError` where the file cannot be written."""
    document = {
        "about": dict(record.about),
        "widths": {step: width._asdict() for step, width in record.widths.items()},
        "calls": [dataclasses.asdict(call) for call in record.calls],
        "weights": {name: dataclasses.asdict(weight) for name, weight in record.weights.items()},
    }
    header: dict[str, Any] = {"__metadata__": {"schema": SCHEMA, "record": json.dumps(document)}}
    end, stored = 0, record.tensors.items()
    for key, tensor in stored:
        begin, end = end, end + tensor.array.nbytes
        header[key] = {"dtype": _STORED[tensor.dtype], "shape": tensor.array.shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with writing(path), Path(path).open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for _, tensor in stored:
            file.write(tensor.array.tobytes())


# -- reading -----------------------------------------------------------------------------------------
def read(path: str | Path) -> Record:
    """Read a file that `write` wrote. Raises `ConfigError` for anything else."""
    from polydraft.models.safetensors_file import SafetensorsFile

    try:
        file = SafetensorsFile(Path(path))
        try:
            if file.metadata.get("schema") != SCHEMA:
                raise ValueError(f"its schema is {file.metadata.get('schema')!r}")
            tensors = Tensors({key: Tensor(file.array(key), _NAMES[stored.dtype]) for key, stored in file.tensors.items()})
            return _record(parsed(file.metadata["record"]), tensors)
        finally:
            file.close()
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no record of kernel calls ({type(error).__name__}: {error}), wanted a file of schema {SCHEMA}; make one "
            "with polydraft generate --record FILE"
        ) from error


def _record(document: Mapping[str, Any], tensors: Tensors) -> Record:
    calls = tuple(_call(one) for one in document["calls"])
    weights = {name: RecordedWeight(**{**one, "shape": tuple(one["shape"])}) for name, one in document["weights"].items()}
    widths = {int(step): StepWidth(**one) for step, one in document.get("widths", {}).items()}
    record = Record(document["about"], calls, weights, tensors, widths)
    if [call.number for call in calls] != list(range(len(calls))):
        raise ValueError("its calls are not numbered from 0")
    for call in calls:
        typed: list[tuple[Any, type]] = [(call.contract, str), (call.step, int), (call.n, int), (call.params, Mapping)]
        if not all(isinstance(value, kind) for value, kind in typed):
            raise TypeError(f"{call.place} has a contract, a step, a length or parameters of another type")
        named = [*call.inputs.values(), *call.outputs.values()]
        named += [key for cache in call.caches.values() for key in (cache.blocks, cache.k, cache.v, cache.k_after, cache.v_after)]
        for key in named:
            tensors[key]  # raises KeyError for one that is not there
        for name in call.weights.values():
            record.weights[name]
    for weight in weights.values():
        if weight.key:
            tensors[weight.key]
    if not isinstance(record.about["dtype"], str) or not isinstance(record.about["backend"]["name"], str):
        raise TypeError("it does not say who recorded it")
    return record


def _call(document: Mapping[str, Any]) -> Call:
    caches = {name: RecordedCache(**one) for name, one in document["caches"].items()}
    params = {name: tuple(one) if isinstance(one, list) else one for name, one in document["params"].items()}
    return Call(**{**document, "caches": caches, "params": params})
