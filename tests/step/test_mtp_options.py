"""Conventions of an MTP head as options: texts stay, rounds are those of an oracle with the same conventions, and
`polydraft mtp-check` finds those that a head was trained with."""

from __future__ import annotations

import json
import logging
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polydraft import LLM, SamplingParams
from polydraft.cli import main
from polydraft.cli.mtp_check import Seen, verdict
from polydraft.conformance.oracle.model import OracleModel
from polydraft.errors import CapabilityError, ConfigError, RequestError
from polydraft.models import Checkpoint, FamilyRegistry, load_weights
from polydraft.models.description import CONVENTIONS
from tests.oracle import greedy_rounds
from tests.support import tiny
from tests.support.depth import among, crossed, first
from tests.support.runs import Ask, drive
from tests.support.schemas import published

DATA = Path(__file__).parents[1] / "data"
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
TOKENS = 24


def rounds(model: str, *options: str, **more: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Text and rounds of one greedy request."""
    llm = LLM(model=str(tiny.checkpoint(model)), plugins=tiny.PLUGINS, backend="reference", mtp_options=options, **more)
    (output,) = drive(llm.engine, [Ask(PROMPT, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True), 0)])
    llm.engine.close()
    return output.token_ids, output.rounds


@pytest.mark.parametrize(
    ("option", "model"),
    crossed(2, [f"{name}={value}" for name, values in CONVENTIONS.items() for value in values], ["narrow", "sparse-glm"]),
)
def test_rounds_are_those_of_an_oracle_with_the_same_conventions(model: str, option: str):
    name, _, value = option.partition("=")
    with Checkpoint(tiny.checkpoint(model)) as opened:
        description, table = FamilyRegistry().describe(opened, {name: value})
        assert description.mtp is not None
        assert str(getattr(description.mtp, name)).lower() == value
        wanted = greedy_rounds(OracleModel(description, dict(load_weights(opened, description, table))), PROMPT, 3, TOKENS, ())
    assert rounds(model, option, draft_tokens=3) == (tuple(wanted.token_ids), tuple(wanted.rounds))


def test_another_convention_is_said_in_one_line(caplog: pytest.LogCaptureFixture):
    rounds("narrow", "order=embedding_first", "feed=pre", draft_tokens=1)
    said = [record.getMessage() for record in caplog.records if record.name == "polydraft.engine"]
    assert said == ["MTP layers: order is embedding_first instead of hidden_first, which MiMoForCausalLM is known for"]
    caplog.clear()
    rounds("narrow", "order=hidden_first", draft_tokens=1)
    assert not caplog.records


@pytest.mark.parametrize(
    ("model", "options", "error", "said"),
    [
        (
            "narrow",
            ("feed=behind",),
            ConfigError,
            "--mtp-option feed=behind is none of this model's MTP layers, wanted order=hidden",
        ),
        ("narrow", ("fed=pre",), ConfigError, "--mtp-option fed=pre is none"),
        ("narrow", ("feed",), ConfigError, "mtp_options has 'feed', wanted texts NAME=VALUE"),
        ("sparse-ernie", ("final_norm=own",), ConfigError, "final_norm=target; recycle"),
        ("narrow", ("feed=post",), CapabilityError, "--mtp-option is of the model's own MTP head, got proposer ngram"),
    ],
)
def test_what_cannot_be_set_is_refused(model: str, options: tuple[str, ...], error: type[Exception], said: str):
    with pytest.raises(error, match=said.replace("?", "\\?")):
        rounds(model, *options, draft_tokens=2, proposer="ngram" if error is CapabilityError else "mtp")


def command(*arguments: str) -> tuple[object, str, str]:
    """Exit status and what it printed."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err, pytest.raises(SystemExit) as end:
        main(["mtp-check", *arguments])
    return end.value.code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("vary", among(["order,feed,recycle"], ["order,feed,recycle", ",".join(CONVENTIONS)]))
@pytest.mark.parametrize("model", first(1, ["mtp-glm", "mtp-ernie"]))
def test_the_conventions_that_a_head_was_trained_with_come_first(model: str, vary: str):
    status, out, err = command(
        "--model", str(DATA / model), "--backend", "cpu", "--vary", vary, "--json", "--max-new-tokens", "160"
    )
    assert (status, err) == (0, "")
    answer = json.loads(out)
    published("polydraft.mtp_check/1").validate(answer)
    first, *others = answer["tried"]
    (true,) = (one for one in answer["tried"] if one["configured"])
    seen = {name: value for name, value in true["conventions"].items() if name != "mask_first_position"}
    assert first["conventions"].items() >= seen.items(), answer["tried"][:3]
    assert first["tokens_per_round"] < 1.02 * true["tokens_per_round"], "one row of a text hardly shows"
    assert answer["verdict"].startswith("the configured conventions are as good as any")
    assert len(others) == (8 if vary.count(",") == 2 else 32 if model == "mtp-glm" else 16) - 1
    assert first["tokens_per_round"] > 1.5 * others[-1]["tokens_per_round"]


def test_a_wrong_configuration_is_told_what_to_set():
    status, out, err = command(
        "--model", str(DATA / "mtp-glm"), "--backend", "cpu", "--vary", "order", "--mtp-option", "order=hidden_first"
    )
    assert status == 0, err
    assert "set --mtp-option order=embedding_first" in out
    assert out.startswith("configured: order=hidden_first feed=post")
    assert logging.getLogger("polydraft.engine").level == logging.NOTSET, "other engines of the process warn as before"


def test_where_nothing_was_measured_there_is_no_verdict():
    asked = "--model", str(DATA / "mtp-glm"), "--backend", "reference", "--vary", "order"
    status, out, err = command(*asked, "--max-new-tokens", "1")
    assert (status, out) == (2, "")
    assert err.startswith("polydraft: no draft was verified, so that nothing was measured")
    output = SimpleNamespace(id="request-0", finish_reason="error", error="the device failed", rounds=[3, 3])
    run: Any = SimpleNamespace(outputs={"request-0": output})
    with pytest.raises(RequestError, match="request-0 ended in an error, the device failed; nothing can be said of the conv"):
        Seen.of({}, configured=True, run=run)


def test_what_has_no_head_or_no_such_convention_is_refused():
    status, out, err = command("--vary", "order,fed")
    assert (status, out) == (2, "")
    assert err.startswith("polydraft: --vary fed: wanted some of order, feed, final_norm, recycle, mask_first_position")


@pytest.mark.parametrize(
    "options", [("--draft-tokens", "auto:3"), ("--draft-tokens", "0"), ("--proposer", "suffix"), ("--proposer", "hybrid")]
)
def test_what_the_head_does_not_draft_in_every_round_is_refused(options: tuple[str, ...]):
    """With auto:K the measured times would choose what is counted."""
    status, out, err = command("--backend", "reference", "--vary", "order", "--max-new-tokens", "4", *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"polydraft: got {' '.join(options)}, wanted the MTP head's own drafts, as many in every round")


def seen(tokens: float, error: float, *, configured: bool = False, order: str = "hidden_first") -> Seen:
    return Seen({"order": order}, configured, 100, tokens, error, (0.5,))


def test_a_verdict_names_what_is_more_than_chance():
    mine, better = seen(2.0, 0.1, configured=True), seen(2.6, 0.1, order="embedding_first")
    assert verdict([better, mine]).endswith("others 2.60; set --mtp-option order=embedding_first")
    near = seen(2.2, 0.1, order="embedding_first")
    assert verdict([near, mine]) == (
        "the configured conventions are as good as any of the 2 that were tried; 2 of them cannot be told from the best"
    )
