"""The digests of the weights that drew a text: of each place the right one, in order, and only where weights are digested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from polydraft.models.tokenizer import Tokenizer
from polydraft.output.request_delta import RequestDelta
from polydraft.program.packed import NO_ROWS
from polydraft.serving.answers import Choice, TokenTexts
from tests.serving.conftest import MODEL, Served
from tests.support import tiny


def delta(*tokens: int) -> RequestDelta:
    none = np.empty(0, np.int32)
    return RequestDelta(1, "", np.array(tokens, np.int32), none, none, none, none, NO_ROWS, NO_ROWS, "", "")


def test_each_place_has_its_own() -> None:
    choice = Choice(0, [1], TokenTexts(Tokenizer.from_dir(Path(tiny.checkpoint(MODEL)))))
    assert choice.weights_digests(range(0)) == []
    for digest, tokens in (("a", (1, 2)), ("a", (3,)), ("b", ()), ("b", (4,)), ("a", (5, 6))):
        choice.feed(delta(*tokens), digest)
    found = {(i, j): choice.weights_digests(range(i, j)) for i, j in ((0, 6), (0, 3), (2, 4), (3, 4), (3, 6), (4, 6), (4, 4))}
    assert found == {
        (0, 6): ["a", "b"], (0, 3): ["a"], (2, 4): ["a", "b"], (3, 4): ["b"], (3, 6): ["b", "a"], (4, 6): ["a"], (4, 4): [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"prompt": "w2"}, "this server digests no weights; start it with --weights-digest"),
        ("/v1/responses", {"input": "w2"}, "a response has no place for them; use /v1/chat/completions"),
    ],
)
def test_who_has_none_says_so(server: Served, path: str, body: dict[str, Any], said: str) -> None:
    answer = httpx.post(server.url + path, json={**body, "weights_digests": True}, timeout=20)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "weights_digests")
    assert said in answer.json()["error"]["message"]
