"""Stop strings: where a text ends, whatever there are of them, and what looking for them costs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydraft import SamplingParams
from polydraft.demo import demo_model_path
from polydraft.errors import RequestError
from polydraft.models.tokenizer import Tokenizer
from polydraft.output.detokenizer import Detokenizer
from polydraft.sampling_params import MAX_STOP_CHARACTERS, MAX_STOPS

TOKENIZER = Tokenizer.from_dir(demo_model_path())


class Pieces:
    """A tokenizer whose tokens are given texts."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def kind(self, token: int) -> str:
        del token
        return "text"

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        del skip_special_tokens
        return "".join(self.pieces[token] for token in token_ids)


def ended(pieces: Sequence[str], stops: Sequence[str], min_tokens: int) -> tuple[str, int | None]:
    """Text and tokens, by definition: of the first token that completes a stop string, cut where the leftmost such begins."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        before, text = len(text), text + piece
        starts = [
            start for stop in stops for start in range(len(text)) if text.startswith(stop, start) and start + len(stop) > before
        ]
        if starts and count > min_tokens:
            return text[: min(starts)], count
    return text, None


@given(
    pieces=st.lists(st.text("abé", min_size=1, max_size=3), max_size=12),
    stops=st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4),
    min_tokens=st.integers(0, 4),
)
def test_a_text_ends_where_the_first_stop_string_begins(pieces: list[str], stops: list[str], min_tokens: int) -> None:
    text = Detokenizer(Pieces(pieces), tuple(stops), min_tokens)  # type: ignore[arg-type]
    wanted, count = ended(pieces, stops, min_tokens)
    for token in range(len(pieces)):
        text.push([token])
        assert wanted.startswith(text.text), "nothing is told that a stop string may still take back"
    text.end()
    assert (text.text, text.decoded if text.stopped else None) == (wanted, count)


def calls_of(stops: Sequence[str]) -> int:
    """Calls, of C and of Python, that the tokens of a text cost."""
    text, seen = Detokenizer(TOKENIZER, tuple(stops)), 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal seen
        del frame, arg
        seen += event in ("call", "c_call")

    token_ids = TOKENIZER.encode("x = (y + z) * 7\n")
    for token in token_ids:
        TOKENIZER.kind(token)  # remembered from now on
    sys.setprofile(count)
    try:
        text.push(token_ids)
    finally:
        sys.setprofile(None)
    return seen


def test_a_token_costs_the_same_whatever_the_number_of_stop_strings() -> None:
    assert calls_of([f"never{i}" for i in range(MAX_STOPS)]) == calls_of(["never0"])


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ([f"#{i}" for i in range(50_000)], "^stop has 50000 texts, wanted at most 1000; name fewer$"),
        (["x" * 20_000], "^stop has 20000 characters, wanted at most 16384; name fewer$"),
        (["x" * 100] * 200, "^stop has 20000 characters, wanted at most 16384; name fewer$"),
    ],
    ids=["many", "long", "both"],
)
def test_there_is_a_limit(stop: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(stop=stop)  # type: ignore[arg-type]


def test_the_most_are_taken() -> None:
    SamplingParams(stop=tuple(f"{i:x}" for i in range(MAX_STOPS)))
    SamplingParams(stop=("x" * MAX_STOP_CHARACTERS,))
