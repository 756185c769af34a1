"""Reads a checkpoint's JSON files: strict parsing, and typed access that names file, key and value.

The checkpoint reader, the families and the tokenizer call it. It does not guess: a key of the wrong type or range is a
`CheckpointError`, and defaults come from the caller only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydraft import json_text
from polydraft.errors import CheckpointError

__all__ = ["ConfigFile", "eos_token_ids", "read_json_object"]


def read_json_object(
    path: Path,
    *,
    missing: str = "complete the model directory or name another one",
    spoilt: str = "download the file again",
) -> dict[str, Any]:
    """Return the JSON object stored in the UTF-8 file `path`; reads the host's file system only. `missing`, `spoilt`: what to do
    where the file is not there, or holds something else.

    Errors: `CheckpointError` naming the file when it is missing, unreadable, no valid JSON, or no object.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # it may never say anything
        raise CheckpointError(f"{path} cannot be read, got a pipe or a device, wanted a readable file; {missing}")
    return json_text.read(path, dict, spoilt, missing=missing, error=CheckpointError)


@dataclass(frozen=True)
class ConfigFile:
    """Typed view of one JSON object. A key with the value null counts as absent, as transformers treats it."""

    path: Path
    values: Mapping[str, Any]

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int | None = None) -> int:
        """Return the integer at `key`; `default` where absent. Errors: `CheckpointError` (absent, type, range)."""
        wanted = f"an integer of at least {minimum}{'' if maximum is None else f' and at most {maximum}'}"
        value = self._get(key, default, wanted)
        if type(value) is not int or value < minimum or (maximum is not None and value > maximum):
            raise self._wrong(key, value, wanted)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the positive finite number at `key`; `default` where absent. Errors: `CheckpointError`."""
        value = self._get(key, default, "a positive number")
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean at `key`; `default` where absent. Errors: `CheckpointError`."""
        value = self._get(key, default, "true or false")
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """Return the string at `key`; `default` where absent. Errors: `CheckpointError`."""
        value = self._get(key, default, "a string")
        if type(value) is not str:
            raise self._wrong(key, value, "a string")
        return value

    def section(self, key: str) -> ConfigFile:
        """Return the object at `key`, an empty one where absent. Errors: `CheckpointError` for another type."""
        value = self._get(key, {}, "an object")
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return ConfigFile(self.path, value)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the id or ids at `key`, empty where absent; each must be within 0 .. vocab_size - 1.

        Errors: `CheckpointError` for another type or an id outside the vocabulary.
        """
        value = self._get(key, [], "token ids")
        ids = tuple(value) if isinstance(value, list) else (value,)
        if any(type(token_id) is not int or not 0 <= token_id < vocab_size for token_id in ids):
            raise self._wrong(key, value, f"token ids from 0 to {vocab_size - 1} (vocab_size)")
        return ids

    def _get(self, key: str, default: object, wanted: str) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.path} has no {key}, wanted {wanted}; use the config.json of these weights")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} is {value!r}, wanted {wanted}; use the config.json of these weights")


def eos_token_ids(directory: Path, config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text, ascending: the union of config.json and generation_config.json (where it exists).

    `config` is the parsed config.json of `directory`. Errors: `CheckpointError` for a malformed file or id.
    """
    ids = set(ConfigFile(directory / "config.json", config).token_ids("eos_token_id", vocab_size))
    path = directory / "generation_config.json"
    if path.is_file():
        ids.update(ConfigFile(path, read_json_object(path)).token_ids("eos_token_id", vocab_size))
    return tuple(sorted(ids))
