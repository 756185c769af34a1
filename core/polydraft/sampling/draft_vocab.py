"""The reduced draft vocabulary: which tokens an MTP head may draft, ranked by how often a corpus has them.

The head's product is the largest part of a draft pass, and most of it scores tokens that are hardly ever drafted. The engine
reads the file before it negotiates; the proposer scores only those tokens. Verification is not affected and goes over the whole
vocabulary: the text stays the same, only fewer drafts may be accepted.

The file is JSON, an object of token ids and counts: {"13": 90210, "262": 77, ...}. `tools/count_tokens.py` writes one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.contracts.kernels.spread_logits import NO_PLACE
from polydraft.device import Array
from polydraft.errors import ConfigError


def places_of(ids: Array, vocab_size: int) -> Array:
    """[V] int32: where each token stands among `ids`, NO_PLACE where it is not there."""
    found: Array = np.full(vocab_size, NO_PLACE, np.int32)
    found[ids] = np.arange(len(ids), dtype=np.int32)
    return found


def read(option: str, vocab_size: int, always: Collection[int] = ()) -> Array:
    """The token ids that `--draft-vocab FILE[:N]` names, [M] int32, ascending, so that ties fall as over the whole vocabulary:
    the N most frequent of the file, without N all that it counts, and those of `always` (ends of text) in any case. Places after
    the last counted token go to the lowest ids. Raises `ConfigError`."""
    path, _, number = option.rpartition(":")
    if not (path and number.isdecimal()):
        path, number = option, ""
    counts = _counts(Path(path), vocab_size)
    wanted = int(number) if number else sum(count > 0 for count in counts.values())
    if not 1 <= wanted <= vocab_size:
        raise ConfigError(
            f"--draft-vocab {option}: {wanted} tokens to draft from, wanted 1 to {vocab_size}, the model's vocabulary; give "
            "another number behind the file's name"
        )
    ranked = sorted(range(vocab_size), key=lambda token: -counts.get(token, 0))
    return np.array(sorted({*ranked[:wanted], *(token for token in always if 0 <= token < vocab_size)}), np.int32)


def _counts(path: Path, vocab_size: int) -> Mapping[int, int]:
    """Counts by token id, checked."""
    try:
        held: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--draft-vocab {path}: the token counts cannot be read ({error}); give a file of JSON, token ids and their counts"
        ) from error
    if not isinstance(held, dict) or not held:
        raise ConfigError(f"--draft-vocab {path}: got {type(held).__name__}, wanted an object of token ids and counts; mend it")
    counts = {}
    for token, count in held.items():
        if not token.isdecimal() or int(token) >= vocab_size or type(count) is not int or count < 0:
            raise ConfigError(
                f"--draft-vocab {path}: got {token!r}: {count!r}, wanted a token id below {vocab_size} and a count; was it made "
                "with this model's tokenizer?"
            )
        counts[int(token)] = count
    return counts
