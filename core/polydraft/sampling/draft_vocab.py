"""The reduced draft vocabulary: which tokens an MTP head may draft, ranked by how often a corpus has them.

The head's product is the largest part of a draft pass, and most of it scores tokens that are hardly ever drafted. The engine
reads the file before it negotiates; the proposer scores only those tokens. Verification is not affected and goes over the whole
vocabulary: the text stays the same, only fewer drafts may be accepted.

The file is JSON, an object of token ids and counts: {"13": 90210, "262": 77, ...}. `tools/count_tokens.py` writes one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from polydraft import json_text
from polydraft.contracts.kernels.spread_logits import NO_PLACE
from polydraft.device import Array
from polydraft.errors import ConfigError
from polydraft.models.decoder import few_of, places_in
from polydraft.program.declare import StepBuffer


def own_rows(ids: Array, share: int, rank: int) -> Array:
    """Where in `ids` the tokens of `rank` are, which has the `share` tokens from rank * share on."""
    found: Array = np.flatnonzero(ids // share == rank)
    return found


def num_rows(ids: Array, share: int) -> int:
    """Rows of a head that scores `ids`: as many as the rank needs that has most of them. Those of the others end in padding."""
    return int(np.bincount(ids // share).max())


def places_of(ids: Array, share: int, rank: int = 0) -> Array:
    """[share] int32: where each token of `rank` (`own_rows`) stands among its own of `ids`, NO_PLACE where it is not there. One
    rank has the whole vocabulary."""
    own = ids[own_rows(ids, share, rank)] - rank * share
    found: Array = np.full(share, NO_PLACE, np.int32)
    found[own] = np.arange(len(own), dtype=np.int32)
    return found


def few_buffers(logits: str, ids: Array, share: int, rank: int) -> list[StepBuffer]:
    """What `emit_head` works in beside the buffer `logits`, of sequences, where the head scores `ids` alone."""
    return [
        StepBuffer(few_of(logits), f"B {num_rows(ids, share)}", "f32"),
        StepBuffer(places_in(logits), str(share), initial=places_of(ids, share, rank)),
    ]


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
    held = json_text.read(path, dict, "give a file of token ids and their counts", what=f"--draft-vocab {path}")
    if not held:
        raise ConfigError(f"--draft-vocab {path}: got an empty object, wanted one of token ids and counts; count some text")
    ids = {str(token): token for token in range(vocab_size)}
    counts = {}
    for token, count in held.items():
        if token not in ids or type(count) is not int or count < 0:
            raise ConfigError(
                f"--draft-vocab {path}: got {token!r}: {count!r}, wanted a token id below {vocab_size} and a count; was it made "
                "with this model's tokenizer?"
            )
        counts[ids[token]] = count
    return counts
