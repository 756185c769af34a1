"""The file of token counts, and which tokens it lets be drafted."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polydraft.contracts.kernels.spread_logits import NO_PLACE
from polydraft.errors import ConfigError
from polydraft.models.tokenizer import Tokenizer
from polydraft.sampling.draft_vocab import num_rows, own_rows, places_of, read
from tests.support import tiny
from tests.support.project import ROOT

COUNTS = {"5": 3, "1": 9, "7": 3, "2": 1, "0": 0}


@pytest.fixture
def file(tmp_path: Path) -> Callable[[object], str]:
    def write(held: object) -> str:
        path = tmp_path / "counts.json"
        path.write_text(held if isinstance(held, str) else json.dumps(held))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("number", "wanted"),
    [(":1", [1]), (":2", [1, 5]), (":3", [1, 5, 7]), (":4", [1, 2, 5, 7]), ("", [1, 2, 5, 7]), (":6", [0, 1, 2, 3, 5, 7])],
)
def test_the_most_frequent_tokens_in_ascending_order(file: Callable[[object], str], number: str, wanted: list[int]):
    """Ties, and what was never counted, go to the lowest ids; without a number everything that was counted."""
    found = read(file(COUNTS) + number, 8)
    assert found.tolist() == wanted
    assert found.dtype == np.int32


def test_ends_of_text_can_always_be_drafted(file: Callable[[object], str]):
    assert read(file(COUNTS) + ":2", 8, always=(6, 1, 99)).tolist() == [1, 5, 6]


def test_a_colon_in_a_file_name_is_no_number(tmp_path: Path):
    path = tmp_path / "a:b.json"
    path.write_text(json.dumps(COUNTS))
    assert len(read(str(path), 8)) == 4
    assert len(read(f"{path}:2", 8)) == 2


def test_places_are_columns():
    assert places_of(np.array([1, 5, 6], np.int32), 8).tolist() == [NO_PLACE, 0, NO_PLACE, NO_PLACE, NO_PLACE, 1, 2, NO_PLACE]


def test_ranks_have_the_rows_of_their_own_tokens():
    """Of seven tokens ranks 0 and 1 have four each, in whatever order a head scores them; one of these is padding."""
    ids = np.array([6, 0, 2, 1], np.int32)
    assert [own_rows(ids, 4, rank).tolist() for rank in (0, 1)] == [[1, 2, 3], [0]]
    assert num_rows(ids, 4) == 3
    assert [places_of(ids, 4, rank).tolist() for rank in (0, 1)] == [[0, 2, 1, NO_PLACE], [NO_PLACE, NO_PLACE, 0, NO_PLACE]]
    assert places_of(ids[1:], 4, 1).tolist() == [NO_PLACE] * 4


@pytest.mark.parametrize(
    ("held", "number", "said"),
    [
        (COUNTS, ":0", r"0 tokens to draft from, wanted 1 to 8"),
        (COUNTS, ":9", r"9 tokens to draft from, wanted 1 to 8"),
        ({"1": 0}, "", r"0 tokens to draft from"),
        ({}, "", r"got an empty object, wanted one of token ids and counts"),
        ({}, ":3", r"got an empty object"),
        ({"1": 2, "01": 3}, "", r"got '01': 3, wanted a token id"),
        ({"٣": 1}, "", r"got '٣': 1, wanted a token id"),
        ([3, 4], "", r"holds a JSON list, wanted a JSON object"),
        ("no json", "", r"is no valid JSON, got Expecting value"),
        ({"8": 1}, "", r"got '8': 1, wanted a token id below 8 and a count; was it made with this model's tokenizer\?"),
        ({"-1": 1}, "", r"got '-1': 1"),
        ({"a": 1}, "", r"got 'a': 1"),
        ({"1": -1}, "", r"got '1': -1"),
        ({"1": True}, "", r"got '1': True"),
        ({"1": 0.5}, "", r"got '1': 0\.5"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(file: Callable[[object], str], held: object, number: str, said: str):
    with pytest.raises(ConfigError, match=said) as raised:
        read(file(held) + number, 8)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--draft-vocab .*none\.json is missing, wanted a JSON file; give a file of token ids"):
        read(str(tmp_path / "none.json"), 8)


def test_the_tool_counts_what_the_tokenizer_makes_of_a_text(tmp_path: Path):
    text, out, model = tmp_path / "text", tmp_path / "counts.json", tiny.checkpoint("narrow")
    text.write_text("w3 w5 w3 w3 w9 w5")
    tool = [
        sys.executable,
        str(ROOT / "tools" / "count_tokens.py"),
        str(text),
        str(text),
        "--model",
        str(model),
        "--out",
        str(out),
    ]
    told = subprocess.run(tool, check=True, capture_output=True, text=True).stderr
    assert (told.strip(), json.loads(out.read_text())) == ("12 tokens, 3 different ones", {"3": 6, "5": 4, "9": 2})
    assert read(f"{out}:2", 64).tolist() == sorted(Tokenizer.from_dir(model).encode("w3 w5"))
