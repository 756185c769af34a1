"""Reads a checkpoint directory: its config.json, its safetensors files, and, checked, its weights as float32.

`families.py` reads the configuration and the tensor names, the engine loads canonical weights by `load_weights`. Matrices that
are stored in few bits are read as `quantization.py` says, into floats or as they are packed. Nothing is unpickled or executed,
no tensor is read before it is needed, and nothing is repaired: every defect is one `CheckpointError` that names the file and the
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from polydraft.contracts.packing import PackedWeight, Packing, stacked
from polydraft.device import Array
from polydraft.errors import CheckpointError
from polydraft.models.block import PACKED_ROLES
from polydraft.models.config_file import ConfigFile, read_json_object
from polydraft.models.description import ModelDescription
from polydraft.models.quantization import UNREAD, Layout, Quantization, joined, quantization, ungrouped
from polydraft.models.safetensors_file import SafetensorsFile
from polydraft.models.tensor_table import Part, TensorTable

if TYPE_CHECKING:
    from polydraft.models.block import CustomBlock
    from polydraft.models.ranks import Share

__all__ = ["Checkpoint", "Weights", "load_weights"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class Checkpoint:
    """A model directory: `config` (the parsed config.json) and lazily read tensors. Close it, or use it in `with`.

    Opening checks the header of every shard, so a truncated or missing shard is found before any work is done.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the directory `path`. Errors: `CheckpointError` for whatever is missing, malformed or pickled in it."""
        self.path = Path(path)
        try:
            got = (
                "an empty name"
                if path == ""
                else ""
                if self.path.is_dir()
                else "a file"
                if self.path.exists()
                else "nothing there"
            )
        except OSError as error:  # the name is too long, or a folder above it may not be read
            got = f"an error ({error.strerror})"
        if got:
            raise CheckpointError(
                f"model {str(path)!r} is no directory, got {got}, wanted a local directory with config.json and "
                f"*.safetensors; download the model and pass its directory"
            )
        self.config = read_json_object(self.path / "config.json")
        self._files: dict[str, SafetensorsFile] = {}
        try:
            self._file_of = self._open()
        except CheckpointError:
            self.close()
            raise

    @cached_property
    def quantization(self) -> Quantization | None:
        """How matrices are stored in few bits; None where config.json says nothing of it. Errors: `CheckpointError` for what it
        says and nobody reads."""
        return quantization(ConfigFile(self.path / "config.json", self.config))

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, sorted."""
        return tuple(sorted(self._file_of))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.names())

    @property
    def most_tensors(self) -> int:
        """Tensors that its configuration may ask for: as many as there are."""
        return len(self.names())

    def file(self, name: str) -> Path:
        """Return the file that holds tensor `name`. Errors: `CheckpointError` where there is no such tensor."""
        return self._find(name).path

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`. Errors: `CheckpointError` where there is no such tensor."""
        return self._find(name).tensors[name].shape

    def dtype(self, name: str) -> str:
        """Return how tensor `name` is stored: "float32", "float16" or "bfloat16".

        Errors: `CheckpointError` where there is no such tensor or it is stored as anything else.
        """
        return self._find(name).dtype(name)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return tensor `name` as a fresh, C-contiguous float32 array; the conversion is exact. Synchronous host work.

        Errors: `CheckpointError` where there is no such tensor, its dtype is unsupported, or the checkpoint is closed.
        """
        out = np.empty(self.shape(name), np.float32)
        self.read_into(name, out)
        return out

    def integers(self, name: str) -> NDArray[np.int64]:
        """Return tensor `name` of whole numbers or truth values (1 and 0), such as a table of token ids, as a fresh int64 array.
        Such a tensor is no weight: who reads it here leaves it unread among the weights.

        Errors: `CheckpointError` where there is no such tensor, it is stored as floats, or the checkpoint is closed.
        """
        return self._find(name).integers(name)

    def stored(self, name: str) -> Array:
        """Return a copy of tensor `name` as it is stored; E4M3 and bfloat16 as their bits. Errors: as for `tensor`."""
        return self._find(name).array(name)

    def stored_as(self, name: str) -> str:
        """Return the format's own name of the dtype in which tensor `name` is stored, "F8_E4M3" for instance."""
        return self._find(name).tensors[name].dtype

    def read_into(self, name: str, out: NDArray[np.float32]) -> None:
        """Write tensor `name` into the C-contiguous float32 array `out` of its shape. Errors: as for `tensor`."""
        self._find(name).read_into(name, out)

    def piece(self, name: str, look: Callable[[Array], Array]) -> NDArray[np.float32]:
        """Return what `look` picks of tensor `name`, an index or a view of it, as a fresh float32 array; nothing else of it is
        read. Errors: as for `tensor`."""
        return self._find(name).piece(name, look)

    def whole(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
        """The canonical tensor `name` where the checkpoint has it in one piece already, finite; None to read its parts."""
        del name, shape
        return None

    def custom_blocks(self) -> dict[str, CustomBlock]:
        """Decoder blocks that compute themselves, by prefix ("layers.0", "mtp.0"); their tensors are not loaded."""
        return {}

    def same_bytes(self, name: str, other: str) -> bool:
        """Return whether two tensors agree in dtype, shape and every stored byte. Errors: as for `tensor`."""
        return self._find(name).same_bytes(name, self._find(other), other)

    @property
    def opening(self) -> tuple[str, str] | None:
        """How another process opens the same: a function or class, as "module:name", and the text that it is called with. None
        where that cannot be told; a directory is opened by its path."""
        return None

    def close(self) -> None:
        """Release all files; arrays that were read stay valid. Closing twice is fine."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Checkpoint:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _find(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.path} holds no tensor {name}, got {len(self._file_of)} others, wanted it in a *.safetensors "
                f"file; complete the checkpoint"
            )
        return self._file_of[name]

    def _open(self) -> dict[str, SafetensorsFile]:
        if (self.path / _INDEX).is_file():
            return self._open_sharded()
        single = self.path / _SINGLE
        found = [single] if single.is_file() else sorted(self.path.glob("*.safetensors"))
        if len(found) != 1:
            raise _no_weights(self.path, found)
        file = self._files[found[0].name] = SafetensorsFile(found[0])
        return dict.fromkeys(file.tensors, file)

    def _open_sharded(self) -> dict[str, SafetensorsFile]:
        """Open the shards that the index names. Tensors that it does not list are left alone, as other loaders do."""
        index = self.path / _INDEX
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map, wanted tensor names with their shards; download it again")
        file_of: dict[str, SafetensorsFile] = {}
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{index} puts tensor {name} into {shard!r}, wanted a file name in {self.path}")
            if not (self.path / shard).is_file():
                raise CheckpointError(f"{index} puts tensor {name} into {shard}, which is missing; download {shard}")
            if shard not in self._files:
                self._files[shard] = SafetensorsFile(self.path / shard)
            if name not in self._files[shard].tensors:
                raise CheckpointError(
                    f"{self.path / shard} lacks tensor {name}, which {_INDEX} promises there; download both files again"
                )
            file_of[name] = self._files[shard]
        return file_of


def _no_weights(directory: Path, found: list[Path]) -> CheckpointError:
    if found:
        names = ", ".join(path.name for path in found)
        return CheckpointError(f"{directory} holds {names} without {_INDEX}, wanted one file or an index; add the index")
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLED)
    if pickled:
        return CheckpointError(
            f"{directory} holds only pickled weights, got {pickled[0]}, wanted *.safetensors, because unpickling runs "
            f'code; convert what you trust with transformers: AutoModelForCausalLM.from_pretrained("{directory}")'
            f'.save_pretrained("NEW_DIRECTORY", safe_serialization=True)'
        )
    return CheckpointError(f"{directory} holds no weights, wanted {_SINGLE} or {_INDEX}; complete the model directory")


class Weights(Mapping[str, NDArray[np.float32]]):
    """Canonical name to a fresh, C-contiguous, finite float32 array, converted when it is asked for and never kept (or to what
    the checkpoint has of it as a whole).

    Iteration follows the table's order. Looking a tensor up is synchronous host work and raises `CheckpointError`
    naming file, tensor and index of the first NaN or infinite element. `shape` tells a shape without reading.

    A matrix that is stored in few bits is what it stands for; `packed` has it as it is, where `packing` says that it can be had.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        table: TensorTable,
        layouts: Mapping[str, Layout] = MappingProxyType({}),
        matrices: Collection[str] = (),
    ) -> None:
        """`layouts`: of the stored tensors that are packed, by name; `matrices`: canonical tensors that kernels take packed."""
        self._checkpoint = checkpoint
        self._table = table
        self._layouts = layouts
        self._matrices = frozenset(matrices)
        self._packings: dict[str, Packing | None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.parts)

    def __len__(self) -> int:
        return len(self._table.parts)

    def __contains__(self, name: object) -> bool:
        return name in self._table.parts

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of canonical tensor `name`: its parts joined along axis 0, or pieces of them on an axis before it."""
        stack, (rows, *rest) = self._table.stacks.get(name, 0), self._joined(name)
        return (stack, rows // stack, *rest) if stack else (rows, *rest)

    def _joined(self, name: str) -> tuple[int, ...]:
        parts = self._table.parts[name]
        return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        whole = self._checkpoint.whole(name, self.shape(name))
        if whole is not None:
            return whole
        out = np.empty(self._joined(name), np.float32)
        begin = 0
        for part in self._table.parts[name]:
            stretch = out[begin : begin + part.shape[0]]
            if part.name in self._layouts:
                stretch[...] = self._dequantised(part)
            elif part.stretch is None and not part.transposed:
                self._checkpoint.read_into(part.name, stretch)
                self._check_finite(part.name, stretch)
            else:
                longer = self._checkpoint.tensor(part.name)
                self._check_finite(part.name, longer)
                stretch[...] = (longer.T if part.transposed else longer)[part.place]
            begin += part.shape[0]
        return out.reshape(self.shape(name))

    def kept(self, name: str, share: Share) -> NDArray[np.float32]:
        """Return the share that one rank keeps of canonical tensor `name`, and read nothing else of it; of parts that are stored
        in few bits all that the share has some of. Synchronous host work. Errors: as for a look-up."""
        whole = self._checkpoint.whole(name, self.shape(name))
        if whole is not None:
            return share.of(whole)
        out, begin = np.zeros(share.shape, np.float32), 0
        rows = self._joined(name)[0] // max(self._table.stacks.get(name, 0), 1)
        for part in self._table.parts[name]:
            place, first = divmod(begin, rows)
            begin += part.shape[0]
            place -= share.first
            if share.stacked and not 0 <= place < len(out):
                continue
            taken = list(share.of_part(first, part.shape[0]))
            whole = self._dequantised(part) if taken and part.name in self._layouts else None
            for take, put in taken:
                if whole is not None:
                    stretch = whole[take]
                else:
                    stretch = self._checkpoint.piece(part.name, partial(_picked, part, take))
                    self._check_finite(part.name, stretch)
                (out[place] if share.stacked else out)[put] = stretch
        return out

    @property
    def stored_packed(self) -> list[str]:
        """Canonical tensors of which some part is stored in few bits."""
        return [name for name, parts in self._table.parts.items() if any(part.name in self._layouts for part in parts)]

    @property
    def packings(self) -> dict[str, Packing]:
        """What `packed` can have, by canonical name."""
        return {name: one for name in self.stored_packed if (one := self.packing(name)) is not None}

    def packing(self, name: str) -> Packing | None:
        """What `packed` has canonical tensor `name` in; None where that cannot be had: a part is stored in floats or in another
        packing, blocks of two parts would overlap, groups are not in the order of inputs, or no kernel takes it packed."""
        if name not in self._packings:
            self._packings[name] = self._common(name)
        return self._packings[name]

    def _common(self, name: str) -> Packing | None:
        parts = self._table.parts[name]
        layouts = [self._layouts.get(part.name) for part in parts]
        packings = {None if layout is None else layout.packing for layout in layouts}
        packing = packings.pop()
        overlap = packing is not None and any(part.shape[0] % packing.rows for one in self._pieces(name) for part in one[:-1])
        if name not in self._matrices or packings or packing is None or overlap:
            return None
        orders = (layout.order(self._module(part)) for part, layout in zip(parts, layouts, strict=True) if layout)
        return packing if all(order is None for order in orders) else None

    def packed(self, name: str, share: Share | None = None) -> PackedWeight:
        """Return canonical tensor `name` as it is stored, in `packing(name)`, or the share that a rank keeps of it. Synchronous
        host work without a float copy. Errors: as for a look-up."""
        pieces = self._pieces(name)
        if share is not None and share.stacked:
            pieces = pieces[share.first : share.first + share.shape[0]]
        matrices = (joined([self._read(part) for part in parts]) for parts in pieces)
        kept = list(matrices if share is None else map(share.of_packed, matrices))
        return stacked(kept) if self._table.stacks.get(name) else kept[0]

    def _pieces(self, name: str) -> list[tuple[Part, ...]]:
        """The parts of each matrix of a stack; of what is none, all of them."""
        parts, stack = self._table.parts[name], self._table.stacks.get(name) or 1
        each = len(parts) // stack
        return [parts[i * each : (i + 1) * each] for i in range(stack)]

    def _module(self, part: Part) -> _Module:
        return _Module(self._checkpoint, _module_of(part.name))

    def _read(self, part: Part) -> PackedWeight:
        module = self._module(part)
        try:
            found = self._layouts[part.name].read(module, _matrix(part))
        except ValueError as error:
            raise module.spoilt(error) from None
        if not np.isfinite(found.scales).all():
            raise module.spoilt(ValueError("a scale is NaN or infinite"))
        return found

    def _dequantised(self, part: Part) -> Array:
        module, found = self._module(part), self._read(part)
        order = self._layouts[part.name].order(module)
        try:
            return found.read() if order is None else ungrouped(found, order)
        except ValueError as error:
            raise module.spoilt(error) from None

    def _check_finite(self, name: str, array: NDArray[np.float32]) -> None:
        finite = np.isfinite(array)
        if not finite.all():
            where = np.unravel_index(int(np.argmin(finite)), array.shape)
            raise CheckpointError(
                f"{self._checkpoint.file(name)}: tensor {name} holds {array[where]} at {[int(i) for i in where]}, "
                f"wanted finite numbers; download or convert the checkpoint again"
            )


def _picked(part: Part, take: tuple[slice, ...], stored: Array) -> Array:
    return part.look(stored)[take]


def load_weights(checkpoint: Checkpoint, description: ModelDescription, table: TensorTable) -> Weights:
    """Check all names, shapes and dtypes of `checkpoint` against `table`; return its weights, read on demand.

    `description` and `table` come from `FamilyRegistry.describe`. Reads only headers, and stored bytes where a copy has
    to equal its original; values are checked when they are read. The checkpoint must stay open while weights are read.

    Errors: `CheckpointError` naming file and tensor where one is missing (each MTP tensor too: configuration alone
    never decides that there is an MTP head), has another shape, is stored in an unsupported dtype, repeats another
    tensor with different bytes, or is not accounted for by the configuration.
    """
    layouts: dict[str, Layout] = {}
    accounted: set[str] = set()
    for canonical, parts in table.parts.items():
        for part in parts:
            layout = _layout(checkpoint, part)
            if layout is not None:
                layouts[part.name] = layout
                accounted |= _check_packed(checkpoint, part, layout)
                continue
            if part.name not in checkpoint:
                raise _missing(checkpoint, description, table, canonical, part)
            _check_shape(checkpoint, part)
            checkpoint.dtype(part.name)
    for name in sorted(name for name in table.copies if name in checkpoint):
        _check_copy(checkpoint, table, name)
    unread = UNREAD if checkpoint.quantization else ()
    strangers = [
        name
        for name in checkpoint.names()
        if not table.is_known(name)
        and name not in accounted
        and not any(fnmatchcase(name, glob) for glob in unread)
        and not _is_zero_bias(checkpoint, name, layouts)
    ]
    if strangers:
        raise CheckpointError(
            f"{checkpoint.file(strangers[0])}: tensor {strangers[0]} (one of {len(strangers)}) does not belong to the "
            f"{description.architecture} that {checkpoint.path / 'config.json'} describes, wanted only "
            f"{table.scope}; use the config.json of these weights"
        )
    matrices = [name for name, one in description.weights().items() if one.role in PACKED_ROLES]
    return Weights(checkpoint, table, layouts, matrices)


class _Module:
    """The tensors of the module of one packed matrix."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __contains__(self, name: object) -> bool:
        return f"{self._name}.{name}" in self._checkpoint

    def floats(self, name: str) -> Array:
        return self._checkpoint.tensor(f"{self._name}.{name}")

    def stored(self, name: str) -> Array:
        return self._checkpoint.stored(f"{self._name}.{name}")

    def spoilt(self, why: ValueError) -> CheckpointError:
        return CheckpointError(
            f"{self._checkpoint.path}: the packed matrix of {self._name} cannot be read, got {why}, wanted finite numbers as "
            f"config.json describes them; download the checkpoint again"
        )


def _module_of(name: str) -> str:
    return name.removesuffix(".weight")


def _matrix(part: Part) -> tuple[int, int]:
    """The shape of a part that may be packed."""
    outputs, inputs = part.shape
    return outputs, inputs


def _layout(checkpoint: Checkpoint, part: Part) -> Layout | None:
    """How the checkpoint packs a part; None where it is stored in floats, or not at all."""
    if checkpoint.quantization is None or len(part.shape) != 2:
        return None
    module = _module_of(part.name)
    layout = checkpoint.quantization.layout(module)
    if layout is None:
        return None
    ((mark, dtypes),) = layout.marks.items()
    name = f"{module}.{mark}"
    if name not in checkpoint or checkpoint.stored_as(name) not in dtypes:
        return None
    said = f"{checkpoint.path / 'config.json'}: quantization_config"
    if checkpoint.quantization.ignores(module):
        raise CheckpointError(
            f"{said} leaves {module} out, but {checkpoint.file(name)} has {name} in {checkpoint.stored_as(name)}, wanted floats; "
            "use the config.json of these weights"
        )
    if part.transposed or part.stretch is not None:
        raise CheckpointError(
            f"{said} packs {module}, which this export joins or turns, wanted a matrix of its own [out, in]; use another export"
        )
    return layout


def _check_packed(checkpoint: Checkpoint, part: Part, layout: Layout) -> set[str]:
    """Check the tensors of a packed part; returns the names of all that belong to it."""
    module, shape = _module_of(part.name), _matrix(part)
    try:
        wanted = layout.wanted(shape)
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint.path}: {module} {list(shape)} is packed as {layout.packing.name}, got {error}; use another export"
        ) from None
    for last, one in wanted.items():
        name = f"{module}.{last}"
        if name not in checkpoint:
            raise CheckpointError(
                f"{checkpoint.path} holds no tensor {name}, wanted it with shape {list(one.shapes[0])} beside the packed matrix "
                f"of {module}; complete the checkpoint"
            )
        got, dtype = checkpoint.shape(name), checkpoint.stored_as(name)
        if got not in one.shapes or dtype not in one.dtypes:
            raise CheckpointError(
                f"{checkpoint.file(name)}: tensor {name} is {dtype} {list(got)}, wanted {' or '.join(one.dtypes)} "
                f"{list(one.shapes[0])} for {module} {list(shape)} packed as {layout.packing.name}; use the config.json of these "
                "weights"
            )
    return {f"{module}.{last}" for last in (*wanted, *layout.optional)}


def _is_zero_bias(checkpoint: Checkpoint, name: str, layouts: Mapping[str, Layout]) -> bool:
    """Whether a tensor is a bias of zeros beside a packed matrix, which some quantisers add to layers that have none."""
    return name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in layouts and not checkpoint.tensor(name).any()


def _missing(
    checkpoint: Checkpoint, description: ModelDescription, table: TensorTable, canonical: str, part: Part
) -> CheckpointError:
    advice = "complete the checkpoint or use the config.json of these weights"
    if canonical.startswith("mtp."):
        advice = f"add the shard with the MTP tensors, or set {table.mtp_key} to 0 in config.json to run without drafts"
    return CheckpointError(
        f"{checkpoint.path} holds no tensor {part.name}, wanted it with shape {list(part.stored_shape)} as {canonical} of "
        f"{description.architecture}; {advice}"
    )


def _check_shape(checkpoint: Checkpoint, part: Part) -> None:
    shape = checkpoint.shape(part.name)
    one_row = len(part.stored_shape) == 1 and shape == (1, *part.stored_shape)  # how some exports keep a vector
    if shape != part.stored_shape and not one_row:
        raise CheckpointError(
            f"{checkpoint.file(part.name)}: tensor {part.name} has shape {list(shape)}, wanted {list(part.stored_shape)} by "
            f"{checkpoint.path / 'config.json'}; use the config.json of these weights"
        )


def _check_copy(checkpoint: Checkpoint, table: TensorTable, name: str) -> None:
    (original,) = table.parts[table.copies[name]]
    if not checkpoint.same_bytes(name, original.name):
        raise CheckpointError(
            f"{checkpoint.file(name)}: tensor {name} differs from {original.name}, wanted the same bytes because the "
            f"model shares one tensor; use a checkpoint whose copies agree"
        )
