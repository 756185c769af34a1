"""Reads matrices that a checkpoint stores in few bits: which they are, in which packing, and what its tensors mean.

`quantization_config` of config.json says how matrices are stored (`Quantization`); a `Layout` turns the tensors of one matrix
into the record that backends take (`PackedWeight`), without a float copy of it. `checkpoint.py` opens files, checks names and
shapes, and calls this. What the configuration says and nobody here reads is refused by name.

Layouts are those of their writers: compressed-tensors 0.20 (float-quantized, int-quantized, naive-quantized, pack-quantized),
AutoAWQ 0.2 ("gemm"), AutoGPTQ 0.7 and GPTQModel ("gptq", "gptq_v2"), and DeepSeek-V3's FP8 with a scale for each block of 128 x
128, as Qwen's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol

import numpy as np

from polydraft.contracts.packing import PACKINGS, PackedWeight, Packing, nibbles
from polydraft.device import Array
from polydraft.errors import CheckpointError
from polydraft.models.config_file import ConfigFile

FLOATS: Final = ("F32", "F16", "BF16")
BLOCK: Final = 128
"""Rows and columns of a block of FP8 weights."""
AWQ_NIBBLES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word of AutoAWQ hold each of its eight columns."""
UNREAD: Final = ("*.input_scale", "*.output_scale", "*.k_scale", "*.v_scale", "*.q_scale")
"""Tensors of a quantised checkpoint that nothing uses: stored scales of activations, which stay as they are, and of caches."""
KNOWN: Final = "compressed-tensors, fp8, awq, gptq"


class ModuleTensors(Protocol):
    """The tensors of one matrix's module, by the last part of their names."""

    def floats(self, name: str) -> Array:
        """As float32."""

    def stored(self, name: str) -> Array:
        """As it is stored: E4M3 as uint8."""

    def __contains__(self, name: object) -> bool: ...


@dataclass(frozen=True)
class Wanted:
    """A tensor that a layout needs: one of these shapes, in one of these dtypes of safetensors."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


class Layout(Protocol):
    """How the tensors of one matrix lie."""

    @property
    def packing(self) -> Packing:
        """What the matrix is packed as."""

    @property
    def marks(self) -> Mapping[str, tuple[str, ...]]:
        """The tensor that tells a packed matrix from one in floats, with the dtypes that it has then."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Tensors that may be there."""

    def wanted(self, shape: tuple[int, int]) -> Mapping[str, Wanted]:
        """The tensors of a matrix [outputs, inputs]. Raises `ValueError` for a shape that cannot be stored so."""

    def order(self, tensors: ModuleTensors) -> Array | None:
        """The group of each input, where groups are not stretches of inputs one after the other; else None."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> PackedWeight:
        """The matrix, its inputs in the order in which they are stored. Raises `ValueError` for contents that are no numbers."""


@dataclass(frozen=True)
class Bytes:
    """A number a byte, in `weight`: E4M3 or int8, with a scale a matrix, an output or a block."""

    packing: Packing
    scale: str = "weight_scale"
    optional: tuple[str, ...] = ()

    @property
    def marks(self) -> Mapping[str, tuple[str, ...]]:
        return {"weight": ("F8_E4M3",) if self.packing.number == "fp8" else ("I8",)}

    def wanted(self, shape: tuple[int, int]) -> Mapping[str, Wanted]:
        places = self.packing.scales_of(shape)
        of_outputs = () if self.packing.columns else ((shape[0],), (1,), (), (1, 1))
        return {"weight": Wanted((shape,), self.marks["weight"]), self.scale: Wanted((places, *of_outputs), FLOATS)}

    def order(self, tensors: ModuleTensors) -> Array | None:
        del tensors
        return None

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> PackedWeight:
        numbers, scales = tensors.stored("weight"), tensors.floats(self.scale)
        if self.packing.number == "fp8" and (numbers & 127 == 127).any():
            raise ValueError("weight holds NaN")
        places = self.packing.scales_of(shape)
        if scales.size == places[0] * places[1]:
            scales = scales.reshape(places)
        return PackedWeight(self.packing, shape, numbers, np.ascontiguousarray(np.broadcast_to(scales, places)))


class Grouped:
    """What layouts with groups of inputs share: the group of each input may be told by a tensor."""

    packing: Packing
    group_of: str

    @property
    def optional(self) -> tuple[str, ...]:
        return (self.group_of,) if self.group_of else ()

    def order(self, tensors: ModuleTensors) -> Array | None:
        if not self.group_of or self.group_of not in tensors:
            return None
        groups = np.asarray(tensors.stored(self.group_of)).reshape(-1).astype(np.int64)
        columns = self.packing.columns or len(groups)
        return None if np.array_equal(groups, np.arange(len(groups)) // columns) else groups


@dataclass(frozen=True)
class PackQuantized(Grouped):
    """compressed-tensors' words of int32 along the inputs, numbers counted from their middle, zero points along the outputs."""

    packing: Packing
    group_of: str = "weight_g_idx"

    @property
    def marks(self) -> Mapping[str, tuple[str, ...]]:
        return {"weight_packed": ("I32",)}

    @property
    def optional(self) -> tuple[str, ...]:
        return (*super().optional, "weight_shape")

    def wanted(self, shape: tuple[int, int]) -> Mapping[str, Wanted]:
        outputs, inputs = shape
        numbers = 8 if self.packing.number == "int4" else 4
        found = {"weight_packed": Wanted(((outputs, -(-inputs // numbers)),), ("I32",))}
        places = self.packing.scales_of(shape)
        found["weight_scale"] = Wanted((places, *(() if self.packing.columns else ((outputs,),))), FLOATS)
        if self.packing.zeros:
            found["weight_zero_point"] = Wanted(((-(-outputs // 8), places[1]),), ("I32",))
        return found

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> PackedWeight:
        outputs, inputs = shape
        stored = tensors.stored("weight_packed").view(np.uint8)
        places = self.packing.scales_of(shape)
        scales = tensors.floats("weight_scale").reshape(places)
        if self.packing.number == "int8":
            return PackedWeight(self.packing, shape, (stored[:, :inputs] ^ 128).view(np.int8), scales)
        numbers = np.ascontiguousarray(stored[:, : -(-inputs // 2)])
        if inputs % 2:
            numbers[:, -1] &= 15
        zeros = None
        if self.packing.zeros:
            words = np.ascontiguousarray(tensors.stored("weight_zero_point").T)
            zeros = np.ascontiguousarray(halves(words)[:, :outputs].T)
        return PackedWeight(self.packing, shape, numbers, scales, zeros)


@dataclass(frozen=True)
class Awq(Grouped):
    """AutoAWQ's words along the outputs, eight columns a word in an order of its own; scales and zero points by group."""

    packing: Packing
    group_of: str = ""

    @property
    def marks(self) -> Mapping[str, tuple[str, ...]]:
        return {"qweight": ("I32",)}

    def wanted(self, shape: tuple[int, int]) -> Mapping[str, Wanted]:
        outputs, inputs = _in_eights(shape, outputs=True)
        groups = self.packing.scales_of(shape)[1]
        return {
            "qweight": Wanted(((inputs, outputs // 8),), ("I32",)),
            "qzeros": Wanted(((groups, outputs // 8),), ("I32",)),
            "scales": Wanted(((groups, outputs),), FLOATS),
        }

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> PackedWeight:
        def columns(name: str) -> Array:
            return np.ascontiguousarray(halves(tensors.stored(name), AWQ_NIBBLES).T)

        scales = np.ascontiguousarray(tensors.floats("scales").T)
        return PackedWeight(self.packing, shape, nibbles(columns("qweight")), scales, columns("qzeros"))


@dataclass(frozen=True)
class Gptq(Grouped):
    """AutoGPTQ's words along the inputs. `stored_less`: zero points are stored as 1 less, as all but its second format do."""

    packing: Packing
    stored_less: bool = True
    group_of: str = "g_idx"

    @property
    def marks(self) -> Mapping[str, tuple[str, ...]]:
        return {"qweight": ("I32",)}

    def wanted(self, shape: tuple[int, int]) -> Mapping[str, Wanted]:
        outputs, inputs = _in_eights(shape, outputs=True, inputs=True)
        groups = self.packing.scales_of(shape)[1]
        return {
            "qweight": Wanted(((inputs // 8, outputs),), ("I32",)),
            "qzeros": Wanted(((groups, outputs // 8),), ("I32",)),
            "scales": Wanted(((groups, outputs),), FLOATS),
        }

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> PackedWeight:
        numbers = np.ascontiguousarray(tensors.stored("qweight").T).view(np.uint8)
        zeros = (halves(tensors.stored("qzeros")) + self.stored_less) & 15
        scales = np.ascontiguousarray(tensors.floats("scales").T)
        return PackedWeight(self.packing, shape, numbers, scales, np.ascontiguousarray(zeros.T.astype(np.uint8)))


def halves(words: Array, places: Sequence[int] = range(8)) -> Array:
    """uint8 [rows, 8 words]: the numbers of four bits in int32 words [rows, words], each eight in the order of their `places`;
    the lowest four bits are place 0."""
    stored = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    found = np.empty((*words.shape, 8), np.uint8)
    for number, place in enumerate(places):
        found[..., number] = stored[..., place // 2] >> 4 * (place % 2) & 15
    return found.reshape(len(words), -1)


def _in_eights(shape: tuple[int, int], *, outputs: bool = False, inputs: bool = False) -> tuple[int, int]:
    for what, size, asked in zip(("outputs", "inputs"), shape, (outputs, inputs), strict=True):
        if asked and size % 8:
            raise ValueError(f"{size} {what}, wanted a multiple of 8, which a word holds")
    return shape


def ungrouped(packed: PackedWeight, groups: Array) -> Array:
    """The matrix, float32, of a packed weight whose input i is in group `groups[i]`. Raises `ValueError` where a group is not as
    large as the packing says."""
    columns = packed.packing.columns or packed.shape[1]
    count = packed.scales.shape[1]
    if sorted(groups.tolist()) != (np.arange(packed.shape[1]) // columns).tolist():
        raise ValueError(f"its groups of inputs are not {count} of {columns} each")
    order = np.argsort(groups, kind="stable")
    both = packed.numbers
    numbers = np.stack([both & 15, both >> 4], axis=-1).reshape(packed.shape[0], -1)[:, order]
    together = PackedWeight(packed.packing, packed.shape, nibbles(numbers), packed.scales, packed.zeros)
    matrix = np.empty(packed.shape, np.float32)
    matrix[:, order] = together.read()
    return matrix


def joined(pieces: Sequence[PackedWeight]) -> PackedWeight:
    """Pieces of one packing, one below the other. All but the last must end with a block."""
    first = pieces[0]
    shape = (sum(piece.shape[0] for piece in pieces), first.shape[1])
    zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
    return PackedWeight(
        first.packing,
        shape,
        np.concatenate([piece.numbers for piece in pieces]),
        np.concatenate([piece.scales for piece in pieces]),
        np.concatenate(zeros) if zeros else None,
    )


# -- the configuration ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Group:
    """Modules that are stored alike: those that one of `targets` names, a class of modules, a module, or "re:" and a pattern."""

    targets: tuple[str, ...]
    layout: Layout

    def specific(self, module: str) -> int:
        """How closely the nearest of `targets` names a module: 3 by its name, 2 by a pattern, 1 by its class, 0 not at all."""
        return max((_specific(target, module) for target in self.targets), default=0)


def _specific(target: str, module: str) -> int:
    if _names(target, module):
        return 2 if target.startswith("re:") else 3
    return int(target == "Linear")


def _names(entry: str, module: str) -> bool:
    """Whether an entry of a list of compressed-tensors names a module."""
    return re.match(entry[3:], module) is not None if entry.startswith("re:") else entry == module


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint stores its matrices. A matrix that is stored in floats stays one, whatever the lists of a configuration
    say: many leave out heads and MTP layers that were never quantised."""

    method: str
    groups: tuple[Group, ...]
    ignored: tuple[str, ...] = ()
    """Modules that must not be packed."""

    def layout(self, module: str) -> Layout | None:
        """Of a module's matrix, where it is packed: that of the group which names it most closely, among equals the first."""
        group = max(self.groups, key=lambda group: group.specific(module))
        return group.layout if group.specific(module) else None

    def ignores(self, module: str) -> bool:
        return any(_names(entry, module) for entry in self.ignored)

    @property
    def packings(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(dict.fromkeys(group.layout.packing.name for group in self.groups))


def quantization(config: ConfigFile) -> Quantization | None:
    """What config.json says of packed matrices; None where it has no quantization_config. Raises `CheckpointError` for a method
    or a scheme that is not read, by name."""
    if config.values.get("quantization_config") is None:
        return None
    section = _Section(config, "quantization_config", config.section("quantization_config").values)
    method = section.text("quant_method")
    read = _METHODS.get(method)
    if read is None:
        section.refuse("quant_method", f"one of {KNOWN}")
    found = read(section)
    return Quantization(method, *found)


@dataclass(frozen=True)
class _Section:
    """A part of the configuration, and how to refuse what it says."""

    config: ConfigFile
    path: str
    values: Mapping[str, Any] = field(repr=False)

    def refuse(self, key: str, wanted: str) -> NoReturn:
        raise CheckpointError(
            f"{self.config.path}: {self.path}.{key} is {self.values.get(key)!r}, wanted {wanted}; use another export of the model"
        )

    def text(self, key: str) -> str:
        value = self.values.get(key)
        return value if isinstance(value, str) else self.refuse(key, "a name")

    def choice(self, key: str, *choices: Any) -> Any:
        """The value, which has to be one of these; the first where there is none."""
        value = self.values.get(key)
        if value is None:
            return choices[0]
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            self.refuse(key, f"one of {', '.join(map(repr, choices))}" if len(choices) > 1 else repr(choices[0]))
        return value

    def names(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self.refuse(key, "a list of names")
        return tuple(value)

    def modules(self, key: str) -> tuple[str, ...]:
        """Names of modules, or of classes of them, or "re:" and a pattern of names."""
        found = self.names(key)
        self._check_patterns(key, found)
        return found

    def left_out(self, key: str) -> tuple[str, ...]:
        """Modules that rules of GPTQModel leave in floats, as `modules` has them: "-:" and a pattern of names each. Its other
        rules are of modules with bits or groups of their own, which nothing reads."""
        rules = self.part(key)
        found = tuple("re:" + rule[2:] if rule.startswith("-:") else "" for rule in (rules.values if rules else ()))
        if not all(found):
            self.refuse(key, "rules '-:' of modules that are left in floats alone: the others are packed alike")
        self._check_patterns(key, found)
        return found

    def _check_patterns(self, key: str, entries: Sequence[str]) -> None:
        try:
            for entry in entries:
                if entry.startswith("re:"):
                    re.compile(entry[3:])
        except (re.error, OverflowError, RecursionError) as error:
            self.refuse(key, f"names, or 're:' with a regular expression ({error})")

    def part(self, key: str) -> _Section | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            self.refuse(key, "an object")
        return None if value is None else _Section(self.config, f"{self.path}.{key}", value)

    def packing(self, wanted: Packing, key: str) -> Packing:
        """The packing, which has to be one that there is."""
        if wanted.name not in PACKINGS:
            known = ", ".join(name for name in PACKINGS if name.startswith(wanted.number))
            self.refuse(key, f"one of the packings {known}, not {wanted.name}")
        return PACKINGS[wanted.name]

    def columns(self, key: str) -> int:
        """Inputs of a group; -1 stands for all of them."""
        value = self.values.get(key, -1)
        if type(value) is not int or value == 0 or value < -1:
            self.refuse(key, "a number of inputs, or -1 for all of them")
        return max(value, 0)


Read = tuple[tuple[Group, ...], tuple[str, ...]]


def _fp8(section: _Section) -> Read:
    section.choice("fmt", "e4m3")
    dynamic = section.choice("activation_scheme", "dynamic", "static") == "dynamic"
    if section.values.get("weight_block_size") is not None:
        section.choice("weight_block_size", [BLOCK, BLOCK])
        return (Group(("Linear",), Bytes(PACKINGS["fp8-block128" + "-a8" * dynamic], "weight_scale_inv")),), ()
    return (Group(("Linear",), Bytes(PACKINGS["fp8-channel"])),), ()


def _awq(section: _Section) -> Read:
    section.choice("bits", 4)
    section.choice("zero_point", True)
    section.choice("version", "gemm", "GEMM")
    columns = section.columns("group_size")
    packing = section.packing(Packing("int4", 1, columns, zeros=True), "group_size")
    return (Group(("Linear",), Awq(packing)),), ()


def _gptq(section: _Section) -> Read:
    section.choice("bits", 4)
    form = section.choice("checkpoint_format", "gptq", "gptq_v2")
    columns = section.columns("group_size")
    packing = section.packing(Packing("int4", 1, columns, zeros=True), "group_size")
    return (Group(("Linear",), Gptq(packing, stored_less=form == "gptq")),), section.left_out("dynamic")


def _compressed_tensors(section: _Section) -> Read:
    for key, what in (("sparsity_config", "dense"), ("transform_config", "")):
        part = section.part(key)
        if part is not None and part.values and part.values.get("format", None) != what:
            section.refuse(key, "none: nothing sparse or transformed is read")
    section.choice("quantization_status", "compressed", "frozen")  # older writers said the second of compressed files, too
    groups = section.part("config_groups")
    if groups is None or not groups.values:
        section.refuse("config_groups", "groups of modules")
    found = []
    for name in groups.values:
        group = groups.part(name)
        if group is None:
            groups.refuse(name, "how a group of modules is quantised")
        found.append(Group(group.modules("targets"), _compressed(group, section.values.get("format"))))
    return tuple(found), section.modules("ignore")


def _compressed(group: _Section, usual: Any) -> Layout:
    """The layout of a group of compressed-tensors; `usual` is the format of the whole file."""
    weights = group.part("weights")
    if weights is None:
        group.refuse("weights", "how they are quantised")
    form = group.values.get("format") or usual
    kind = weights.choice("type", "int", "float")
    formats = ("naive-quantized", *(("float-quantized",) if kind == "float" else ("int-quantized", "pack-quantized")))
    if form not in formats:
        group.refuse("format", f"one of {', '.join(formats)} for numbers of type {kind!r}, not {form!r}")
    bits = weights.choice("num_bits", 8, 4) if form == "pack-quantized" else weights.choice("num_bits", 8)
    symmetric = weights.choice("symmetric", True, False)
    strategy = weights.choice("strategy", "tensor", "channel", "group", "block")
    if not symmetric and bits != 4:
        weights.refuse("symmetric", "true for 8 bits")
    rows, columns = 1, 0
    if strategy == "group":
        columns = weights.columns("group_size")
    if strategy == "block":
        weights.choice("block_structure", [BLOCK, BLOCK])
        rows = columns = BLOCK
    number = "fp8" if kind == "float" else "int8" if bits == 8 else "int4"
    acts = form != "pack-quantized" and _by_row(group.part("input_activations"), kind, columns)
    wanted = Packing(number, rows, columns, zeros=not symmetric, activations=acts)  # type: ignore[arg-type]  # chosen above
    packing = weights.packing(wanted, "strategy")
    return PackQuantized(packing) if form == "pack-quantized" else Bytes(packing)


def _by_row(activations: _Section | None, kind: str, columns: int) -> bool:
    """Whether activations are rounded by scales of their own row, which a packing does. Those with stored scales, or one scale
    for a whole batch, stay as they are, which errs less and leaves rows alone with themselves."""
    if activations is None:
        return False
    activations.choice("num_bits", 8)
    activations.choice("type", kind)
    activations.choice("symmetric", True)
    strategy = activations.choice("strategy", "tensor", "token", "group")
    if strategy == "group":
        activations.choice("group_size", BLOCK)
    return bool(activations.values.get("dynamic")) and strategy == ("group" if columns else "token")


_METHODS: Final[Mapping[str, Callable[[_Section], Read]]] = {
    "compressed-tensors": _compressed_tensors, "fp8": _fp8, "awq": _awq, "gptq": _gptq,
}  # fmt: skip
