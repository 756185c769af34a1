"""Reads a checkpoint directory: its config.json, its safetensors files, and, checked, its weights as float32.

`families.py` reads the configuration and the tensor names, the engine loads canonical weights by `load_weights`. Nothing is
unpickled or executed, no tensor is read before it is needed, and nothing is repaired: every defect is one `CheckpointError` that
names the file and the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from polydraft.errors import CheckpointError
from polydraft.models.config_file import read_json_object
from polydraft.models.description import ModelDescription
from polydraft.models.safetensors_file import SafetensorsFile
from polydraft.models.tensor_table import Part, TensorTable

if TYPE_CHECKING:
    from polydraft.models.block import CustomBlock

__all__ = ["Checkpoint", "Weights", "load_weights"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class Checkpoint:
    """A model directory: `config` (the parsed config.json) and lazily read tensors. Close it, or use it in `with`.

    Opening maps every shard and checks its header, so a truncated or missing shard is found before any work is done.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the directory `path`. Errors: `CheckpointError` for whatever is missing, malformed or pickled in it."""
        self.path = Path(path)
        try:
            got = "" if self.path.is_dir() else "a file" if self.path.exists() else "nothing there"
        except OSError as error:  # the name is too long, or a folder above it may not be read
            got = f"an error ({error.strerror})"
        if got:
            raise CheckpointError(
                f"model {str(path)!r} is no directory, got {got}, wanted a local directory with config.json, "
                f"*.safetensors and tokenizer.json; download the model and pass its directory"
            )
        self.config = read_json_object(self.path / "config.json")
        self._files: dict[str, SafetensorsFile] = {}
        try:
            self._file_of = self._open()
        except CheckpointError:
            self.close()
            raise

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, sorted."""
        return tuple(sorted(self._file_of))

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

    def read_into(self, name: str, out: NDArray[np.float32]) -> None:
        """Write tensor `name` into the C-contiguous float32 array `out` of its shape. Errors: as for `tensor`."""
        self._find(name).read_into(name, out)

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

    def close(self) -> None:
        """Release all memory maps; arrays that were read stay valid. Closing twice is fine."""
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
    """

    def __init__(self, checkpoint: Checkpoint, table: TensorTable) -> None:
        self._checkpoint = checkpoint
        self._table = table

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
            if part.stretch is None and not part.transposed:
                self._checkpoint.read_into(part.name, stretch)
                self._check_finite(part.name, stretch)
            else:
                longer = self._checkpoint.tensor(part.name)
                self._check_finite(part.name, longer)
                stretch[...] = (longer.T if part.transposed else longer)[part.place]
            begin += part.shape[0]
        return out.reshape(self.shape(name))

    def _check_finite(self, name: str, array: NDArray[np.float32]) -> None:
        finite = np.isfinite(array)
        if not finite.all():
            where = np.unravel_index(int(np.argmin(finite)), array.shape)
            raise CheckpointError(
                f"{self._checkpoint.file(name)}: tensor {name} holds {array[where]} at {[int(i) for i in where]}, "
                f"wanted finite numbers; download or convert the checkpoint again"
            )


def load_weights(checkpoint: Checkpoint, description: ModelDescription, table: TensorTable) -> Weights:
    """Check all names, shapes and dtypes of `checkpoint` against `table`; return its weights, read on demand.

    `description` and `table` come from `FamilyRegistry.describe`. Reads only headers, and stored bytes where a copy has
    to equal its original; values are checked when they are read. The checkpoint must stay open while weights are read.

    Errors: `CheckpointError` naming file and tensor where one is missing (each MTP tensor too: configuration alone
    never decides that there is an MTP head), has another shape, is stored in an unsupported dtype, repeats another
    tensor with different bytes, or is not accounted for by the configuration.
    """
    present = frozenset(checkpoint.names())
    for canonical, parts in table.parts.items():
        for part in parts:
            if part.name not in present:
                raise _missing(checkpoint, description, table, canonical, part)
            _check_shape(checkpoint, part)
            checkpoint.dtype(part.name)
    for name in sorted(table.copies.keys() & present):
        _check_copy(checkpoint, table, name)
    strangers = [name for name in checkpoint.names() if not table.is_known(name)]
    if strangers:
        raise CheckpointError(
            f"{checkpoint.file(strangers[0])}: tensor {strangers[0]} (one of {len(strangers)}) does not belong to the "
            f"{description.architecture} that {checkpoint.path / 'config.json'} describes, wanted only "
            f"{table.scope}; use the config.json of these weights"
        )
    return Weights(checkpoint, table)


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
