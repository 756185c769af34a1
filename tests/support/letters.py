"""A tiny model of single characters, for tests that bind text to grammars.

`checkpoint` writes it: the weights are those of the tiny model "narrow", each token is a letter, a digit or a sign of JSON. Tests
of the step and of the server use it.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import string
import tempfile
from pathlib import Path

from polydraft.conformance.probe import tokenizer_json
from tests.support import tiny

CHARACTERS = '{}[]":,()' + string.digits + string.ascii_lowercase + " \n" + "<>/_-.P"


@functools.cache
def checkpoint(longest: int | None = None) -> str:
    """The directory, written at the first call of a process and removed at its end. `longest`: tokens of a text at most, by
    default those of the tiny model."""
    directory = Path(tempfile.mkdtemp(prefix="polydraft-letters-")) / "letters"
    atexit.register(shutil.rmtree, directory.parent, ignore_errors=True)
    shutil.copytree(tiny.checkpoint("narrow"), directory)
    if longest is not None:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": longest}), encoding="utf-8")
    tokenizer = tokenizer_json(64)
    letters = CHARACTERS.translate({ord(" "): "\u0120", ord("\n"): "\u010a"})
    vocab = {"<eos>": 0, **{letter: i for i, letter in enumerate(letters, 1)}}
    tokenizer["model"] = {"type": "BPE", "vocab": vocab, "merges": []}
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer["pre_tokenizer"] = tokenizer["decoder"] = by_byte
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(directory)
