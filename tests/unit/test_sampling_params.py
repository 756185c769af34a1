"""Sampling parameters that change logits: what is accepted, how it is stored, what is refused.

The other fields of `SamplingParams` are covered where requests are tested. No engine is built.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from polydraft import SamplingParams
from polydraft.contracts import REGISTRY
from polydraft.errors import RequestError
from polydraft.sampling.processing import Processing


def prepared(params: SamplingParams) -> dict[str, Any]:
    """What the stages of core keep of a request; nothing where it has no logits processed."""
    return Processing(REGISTRY.names()).prepare(params, lambda text: [ord(c) for c in text], 128)


def test_defaults_process_nothing():
    assert prepared(SamplingParams()) == {}
    assert prepared(SamplingParams(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1, stop=("a",), stop_token_ids=(3,))) == {}


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 1.1}, {"repetition_penalty": 0.9}, {"presence_penalty": 2}, {"presence_penalty": -2},
        {"frequency_penalty": 0.1}, {"logit_bias": {0: 0.0}}, {"bad_words": "no"}, {"bad_words": ["no", (1, 2)]},
        {"min_tokens": 1},
    ],
    ids=str,
)  # fmt: skip
def test_each_of_them_processes(given: dict[str, Any]):
    params = SamplingParams(**given)
    stages = {"logit_bias": "logit_bias", "bad_words": "forbidden_tokens", "min_tokens": "forbidden_tokens"}
    assert list(prepared(params)) == [stages.get(next(iter(given)), "penalties")], "one stage, and the right one"
    assert SamplingParams.from_mapping(given) == params
    assert hash(params) == hash(SamplingParams(**given))


def test_a_bias_is_kept_as_sorted_pairs():
    """JSON turns the keys of a mapping into texts."""
    params = SamplingParams(logit_bias={"7": 1, 3: -2.5})  # type: ignore[dict-item]
    assert params.logit_bias == params.biases == ((3, -2.5), (7, 1))
    assert SamplingParams(logit_bias=params.biases) == params


def test_words_may_be_texts_or_ids():
    assert SamplingParams(bad_words="a b").bad_words == ("a b",)  # type: ignore[arg-type]
    assert SamplingParams(bad_words=["a", [1, 2], (3,)]).bad_words == ("a", (1, 2), (3,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0, wanted a number from 0.001 to 1000"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"repetition_penalty": 1e4}, "repetition_penalty is 10000.0"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5, wanted a number from -2 to 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty is '1', wanted a number from -2 to 2"),
        ({"frequency_penalty": True}, "frequency_penalty is True"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias is .*, wanted token ids of at least 0, each with a number from -100 to 100"),
        ({"logit_bias": {1: 101}}, "each with a number from -100 to 100"),
        ({"logit_bias": {1: math.inf}}, "each with a number from -100 to 100"),
        ({"logit_bias": {1.5: 1.0}}, "wanted token ids of at least 0"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias is {'x': 1.0}, wanted a mapping of token ids to numbers"),
        ({"logit_bias": 5}, "logit_bias is 5, wanted a mapping"),
        ({"logit_bias": {"1_0": 1.0}}, "wanted a mapping of token ids to numbers"),
        ({"logit_bias": {"\u0661": 1.0}}, "wanted a mapping of token ids to numbers"),
        ({"logit_bias": {" 1": 1.0}}, "wanted a mapping of token ids to numbers"),
        ({"logit_bias": {1: 1.0, "a": 2.0}}, "wanted a mapping"),
        ({"bad_words": 5}, "bad_words is 5, wanted a text, or a list of texts and lists of token ids"),
        ({"bad_words": [5]}, "bad_words is .5,., wanted texts that are not empty, or lists of token ids of at least 0"),
        ({"bad_words": [""]}, "texts that are not empty"),
        ({"bad_words": [()]}, "texts that are not empty"),
        ({"bad_words": [(1, -1)]}, "token ids of at least 0"),
        ({"min_tokens": -1}, "min_tokens is -1, wanted a whole number from 0 to max_new_tokens, here 128"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens is 9, wanted a whole number from 0 to max_new_tokens, here 8"),
        ({"min_tokens": 1, "max_new_tokens": "many"}, "max_new_tokens is 'many'"),
        ({"min_tokens": 2**31, "max_new_tokens": 2**31}, r"min_tokens is 2147483648, .* and at most 2\*\*31 - 1"),
        ({"thinking_limit": 10**10}, r"thinking_limit is 10000000000, wanted a whole number from 0 to 2\*\*31 - 1, or nothing"),
        ({"reply_budget": 2**31}, "reply_budget is 2147483648, wanted a whole number from 0"),
        ({"max_drafts": 2**31}, "max_drafts is 2147483648, wanted a whole number from 0"),
        ({"logprobs": 2**31}, "logprobs is 2147483648, wanted a whole number from 0"),
    ],
    ids=str,
)
def test_bad_values_are_named(given: dict[str, Any], message: str):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**given)


def test_an_error_does_not_repeat_what_nobody_reads() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(logit_bias={"x" * 1_000_000: 1.0})  # type: ignore[dict-item]
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logit_bias", {str(i): 1.0 for i in range(10_000)}, "logit_bias has 10000 token ids, wanted at most 300"),
        ("stop_token_ids", list(range(10_000)), "10000 stop token ids, wanted at most 16"),
        ("bad_words", ["x"] * 10_000, "bad_words has 10000 entries, wanted at most 512"),
    ],
    ids=["logit_bias", "stop_token_ids", "bad_words"],
)
def test_what_is_too_long_is_refused_before_it_is_read(name: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}; name fewer$"):
        SamplingParams(**{name: value})
