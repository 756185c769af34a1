"""Proposers that need no model: the built-in n-gram proposer, and the example plugin, which must stay as short as it claims.

Whoever drafts, the text is the one of plain decoding; only the rounds differ.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from polydraft import LLM, SamplingParams
from polydraft.errors import CapabilityError, PluginError, PolydraftError
from polydraft.program.declare import StepBuffer
from polydraft.proposers.ngram import NgramProposer
from tests.support import tiny
from tests.support.plugin_doubles import backend
from tests.support.project import ROOT

EXAMPLE = ROOT / "plugins" / "lookup_proposer.py"
PROMPTS = ["def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n", "for i in range(10):\n    print(i)\n", "x = [1, 2, 3, 1, 2"]
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=3)


def generate(params: SamplingParams, **options: Any) -> list[Any]:
    llm = LLM(**{"backend": "reference", "invariant": True, "max_num_seqs": 2, **options})
    try:
        return llm.generate(PROMPTS, params)
    finally:
        llm.close()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    "options",
    [
        {"proposer": "ngram", "draft_tokens": 1},
        {"proposer": "ngram", "draft_tokens": 4, "overlap": 1, "block_size": 4},
        {"proposer": "ngram", "draft_tokens": 3, "proposer_options": ("min_ngram=1", "max_ngram=9")},
        {"proposer": "suffix", "draft_tokens": 1},
        {"proposer": "suffix", "draft_tokens": 4, "block_size": 4, "proposer_options": ("min_token_prob=0",)},
        {"proposer": "lookup", "draft_tokens": 4, "plugins": (str(EXAMPLE),)},
    ],
    ids=["ngram-1", "ngram-4", "ngram-options", "suffix-1", "suffix-4", "example"],
)
def test_text_is_that_of_plain_decoding(params: SamplingParams, options: dict[str, Any]) -> None:
    plain = generate(params, draft_tokens=0)
    drafted = generate(params, **options)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert sum(o.accepted for o in drafted) > 0, "nothing was ever accepted, so this shows nothing"


def test_the_example_accepts_drafts_that_a_longer_run_would_not_make() -> None:
    short = generate(GREEDY, proposer="lookup", draft_tokens=4, plugins=(str(EXAMPLE),))
    long = generate(GREEDY, proposer="ngram", draft_tokens=4)
    assert sum(o.drafted for o in short) > sum(o.drafted for o in long)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"proposer": "ngram", "proposer_options": ("max=9",)},
            "--proposer-option max=9: proposer ngram knows min_ngram, max_ngram",
        ),
        (
            {"proposer": "ngram", "proposer_options": ("max_ngram=2.5",)},
            "max_ngram=2.5: wanted a whole number from 0 to 2147483647",
        ),
        (
            {"proposer": "suffix", "proposer_options": ("min_token_prob=-1",)},
            "min_token_prob=-1: wanted a number from 0 to 2147483647",
        ),
        ({"proposer": "suffix", "proposer_options": ("min_token_prob=nan",)}, "min_token_prob=nan: wanted a number from 0 to"),
        (
            {"proposer": "suffix", "proposer_options": ("min_token_prob=2",)},
            "suffix: min_token_prob is 2, wanted a chance, 0 to 1",
        ),
        (
            {"proposer": "hybrid", "proposer_options": ("min_token_prob=9",)},
            "hybrid: min_token_prob is 9, wanted a chance, 0 to 1",
        ),
        ({"proposer": "suffix", "proposer_options": ("cached_tokens=9876543210",)}, "a whole number from 0 to 2147483647"),
        ({"proposer": "mtp", "proposer_options": ("feed=1",)}, "proposer mtp has no options"),
        ({"proposer": "ngram", "proposer_options": ("min_ngram=5",)}, "min_ngram is 5 and max_ngram 4, wanted 1 <= min_ngram"),
        (
            {"proposer": "ngram", "proposer_options": ("5",)},
            "proposer_options has '5', wanted texts NAME=VALUE, such as max_ngram=5",
        ),
    ],
    ids=str,
)
def test_options_that_a_proposer_does_not_have(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PolydraftError, match=re.escape(says)):
        LLM(backend="reference", **options)


def test_options_say_what_the_proposer_runs_with() -> None:
    with LLM(backend="reference", proposer="ngram", proposer_options=("max_ngram=7",)) as llm:
        assert llm.engine.resolved.proposer_options == {"min_ngram": 2, "max_ngram": 7}
        decision = next(d for d in llm.engine.resolved.decisions if d.name == "proposer_options")
        assert decision.chosen == "min_ngram=2,max_ngram=7"


def test_finished_texts_are_drafted_from_unless_none_are_kept() -> None:
    """The second of two equal requests, each alone, drafts what the first has written."""
    accepted: dict[int, list[int]] = {}
    for kept in (0, 4096):
        options: dict[str, Any] = {"proposer": "suffix", "draft_tokens": 4, "proposer_options": (f"cached_tokens={kept}",)}
        with LLM(backend="reference", max_num_seqs=1, **options) as llm:
            accepted[kept] = [llm.generate(PROMPTS[:1], GREEDY)[0].accepted for _ in range(2)]
    first, second = accepted[4096]
    assert accepted[0] == [first, first]
    assert second > first


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 100


class Own(NgramProposer):
    """As the n-gram proposer, under a name of its own."""

    name = "own"


def factory(**attributes: Any) -> Any:
    """A factory of such proposers with these attributes; functions are methods."""
    return type("Changed", (Own,), attributes)


def fails(*given: Any) -> Any:
    raise KeyError("not there")


RAISED = "raised KeyError: 'not there'; repair the plugin, or raise a polydraft error with the next step"
WRONG: dict[str, tuple[Any, str, str]] = {
    "nothing": (lambda context: None, "factory", "returned None, wanted a Proposer; return it"),
    "another thing": (lambda context: 3, "factory", "returned an int, wanted a Proposer: it has no name; add it"),
    "an error": (fails, "factory", RAISED),
    "an error in append": (factory(append=fails), "append", RAISED),
    "an error in layers": (factory(layers=staticmethod(fails)), "layers", RAISED),
    "no layers": (factory(layers=lambda model, draft_model: None), "layers", "raised TypeError: 'NoneType' object is not"),
    "an error in weights": (factory(weights=staticmethod(fails)), "weights", RAISED),
    "no append": (factory(append=None), "factory", "returned a Changed, wanted a Proposer: its append does not take (program, "),
    "no buffers": (factory(buffers=None), "factory", "returned one with the buffers None, wanted a tuple of StepBuffer; correct"),
    "a buffer of no dtype": (
        factory(buffers=(*Own.buffers, StepBuffer("own.x", "R", "f64"))), "factory",
        "returned one with a StepBuffer with the dtype 'f64', wanted one of i32, u32, f32, f16, bf16, u8, act; correct it",
    ),
    "a buffer of no shape": (
        factory(buffers=(StepBuffer("own.x", 3),)), "factory",  # type: ignore[arg-type]
        "returned one with a StepBuffer with the shape 3, wanted a text; correct it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_plugin_does_wrong_about_its_proposer_is_told_with_its_name(wrong: str) -> None:
    made, part, said = WRONG[wrong]
    plugin = backend(polydraft_proposers=lambda: [("own", made)])
    with pytest.raises(PluginError, match=f"^plugin 'double': {part} of the proposer 'own' {re.escape(said)}"):
        LLM(plugin=plugin, model=str(tiny.checkpoint("narrow")), draft_tokens=2, proposer="own")


def test_an_error_of_polydraft_that_a_factory_raises_stays_what_it_is() -> None:
    def refuses(context: Any) -> Any:
        raise CapabilityError("this proposer wants another model; use one")

    plugin = backend(polydraft_proposers=lambda: [("own", refuses)])
    with pytest.raises(CapabilityError, match=r"^this proposer wants another model"):
        LLM(plugin=plugin, model=str(tiny.checkpoint("narrow")), draft_tokens=2, proposer="own")
