"""Lists of operations that the device can be narrowed to: a chip's, as read from public source, and that of a poor device.

`?ops=NAME` in the device's name chooses one (`configure` of this package). A list says which kernels of Paddle there are for
which dtypes and what is different about the chip; it says nothing of a chip's speed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

FOLDER: Final = Path(__file__).parent / "lists"
NAMES: Final = tuple(sorted(file.stem for file in FOLDER.glob("*.json")))
"""The lists there are."""
DTYPES: Final = MappingProxyType({
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64", "i8": "int8", "i16": "int16", "i32": "int32",
    "i64": "int64", "u8": "uint8", "bool": "bool",
})  # fmt: skip
"""Names of dtypes in the files to those of Paddle."""


@dataclass(frozen=True)
class OperationList:
    """One list. `kernels`: name of a Paddle kernel to the dtypes, in Paddle's names, that are both listed and registered.
    `is_custom`: besides, there is what Paddle registers for every custom device. `waits`: kernels that make the host wait.
    `f32_matmul`: what float32 products round their factors to. `last_maximum`: of equal maxima `argmax` takes the last.
    `graphs`: work can be captured."""

    name: str
    kernels: Mapping[str, frozenset[str]]
    is_custom: bool
    waits: frozenset[str]
    f32_matmul: str
    last_maximum: bool
    graphs: bool

    @property
    def activations(self) -> tuple[str, ...]:
        """Dtypes, by their short names, in which it multiplies matrices."""
        return tuple(short for short in ("f32", "bf16", "f16") if DTYPES[short] in self.kernels["matmul"])


@cache
def read(name: str) -> OperationList:
    """The list called `name`, one of `NAMES`. In its file the dtypes that are listed and those that are registered stand on two
    sides of a bar, or once where they are the same."""
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return OperationList(
        name,
        MappingProxyType({kernel: _offered(dtypes) for kernel, dtypes in content["kernels"].items()}),
        content["is_custom"],
        frozenset(content["waits"]),
        content["f32_matmul"],
        content["equal_maxima"] == "last",
        content["graphs"],
    )


def _offered(dtypes: str) -> frozenset[str]:
    listed, bar, registered = dtypes.partition("|")
    both = set(listed.split()) & set((registered if bar else listed).split())
    return frozenset(DTYPES[dtype] for dtype in both)
