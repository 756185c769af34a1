"""The command `polydraft mtp-check`: drafts with each plausible convention of an MTP head, and tables which drafts are accepted.

The conventions of a head (`models.description.CONVENTIONS`) cannot be seen in its weights, nor in the text, since the target
verifies: a wrong one only costs acceptance. The command runs the same requests once for each combination, on the model's own
text. It changes nothing; `--mtp-option` sets what it recommends.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.options import common, names
from polydraft.cli.options import engine as engine_options
from polydraft.errors import RequestError

if TYPE_CHECKING:
    from polydraft.cli.prompts import Job
    from polydraft.cli.run import Run
    from polydraft.config import EngineConfig

SCHEMA = "polydraft.mtp_check/1"
EXAMPLES = """\b
Examples:
  polydraft mtp-check --model path/to/GLM-4.5-Air
  polydraft mtp-check --model path/to/model --vary order,feed --prompts prompts.jsonl --json

Which combination is best shows on text like that which you serve: give it as --prompts, one {"prompt": "text"} or
{"prompt_ids": [1, 2]} a line.
"""
OPENINGS = (
    "The history of the city begins", "def read_lines(path):\n", "Dear Sir or Madam,\n\n", "1. Preheat the oven to",
    "In this paper, we", "Once upon a time,", '{"name": "', "Question: Why is the sky blue?\nAnswer:",
)  # fmt: skip
"""Prompts where none are given."""
SURE = 3.0
"""Standard errors of the difference by which one combination has to be ahead of another to be called better."""


@dataclass(frozen=True)
class Seen:
    """What one combination of conventions has shown. `by_position[j]`: share of drafts j + 1 that were accepted, of those that
    were verified; None where none was."""

    conventions: Mapping[str, str]
    configured: bool
    rounds: int
    tokens_per_round: float
    standard_error: float
    by_position: tuple[float | None, ...]

    @classmethod
    def of(cls, conventions: Mapping[str, str], configured: bool, run: Run) -> Seen:
        """Count the rounds of a run that has ended. Raises `RequestError` where nothing was measured, since a text ended in an
        error or no draft was verified."""
        broken = next((output for output in run.outputs.values() if output.finish_reason == "error"), None)
        if broken is not None:
            raise RequestError(f"{broken.id} ended in an error, {broken.error}; nothing can be said of the conventions")
        accepted = [count for output in run.outputs.values() for count in output.rounds]
        if not run.engine.totals.drafted:
            raise RequestError("no draft was verified, so that nothing was measured; let texts be longer, and have drafts")
        error = pstdev(accepted) / len(accepted) ** 0.5
        shares = run.answer(explain=False)["totals"]["acceptance_per_position"]
        return cls(conventions, configured, len(accepted), 1.0 + fmean(accepted), error, tuple(shares))

    def ahead_of(self, other: Seen) -> bool:
        """Whether the difference is more than chance."""
        error = math.hypot(self.standard_error, other.standard_error)
        return self.tokens_per_round - other.tokens_per_round > SURE * error


@click.command("mtp-check", epilog=EXAMPLES)
@engine_options(max_num_seqs=8)
@click.option("--prompts", metavar="FILE.jsonl", help="Texts to begin with; - is standard input.  [default: a few of its own]")
@click.option("--vary", type=names, metavar="NAME,...", help="Conventions to try both ways.  [default: all that the head has]")
@click.option("--max-new-tokens", type=int, default=64, show_default=True, metavar="N", help="Tokens of each text.")
@click.option(
    "--temperature", type=float, default=0.8, show_default=True, metavar="T",
    help="Of the text; 0 is greedy, which tends to repeat itself.",
)  # fmt: skip
@common
def command(
    prompts: str | None, vary: tuple[str, ...] | None, max_new_tokens: int, temperature: float, as_json: bool, **options: Any
) -> int:
    """Try the conventions of a model's MTP head, and table which accept most drafts."""
    from polydraft.config import AUTO, EngineConfig
    from polydraft.resolve import FIXED_DRAFTS

    given = {name: value for name, value in options.items() if value is not None and value != ()}
    if given.get("draft_tokens", AUTO) == AUTO:
        given["draft_tokens"] = FIXED_DRAFTS
    config = EngineConfig.from_mapping({"proposer": "mtp", **given})
    _refuse_other_drafts(config)
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": True, "seed": 0}
    found = sorted(_tried(config, vary, _jobs(prompts, sampling)), key=lambda seen: -seen.tokens_per_round)
    said = verdict(found)
    if as_json:
        click.echo(json.dumps(_answer(config, found, said), allow_nan=False))
    else:
        _show(found, said)
    return 0


def _refuse_other_drafts(config: EngineConfig) -> None:
    """Raise `UsageError` where not every round has drafts of the head alone: they are counted."""
    if config.proposer != "mtp":
        got = f"--proposer {config.proposer}"
    elif config.adaptive or config.draft_tokens == 0:
        got = f"--draft-tokens {config.draft_tokens}"
    else:
        return
    raise click.UsageError(f"got {got}, wanted the MTP head's own drafts, as many in every round; leave it out or correct it")


def verdict(found: Sequence[Seen]) -> str:
    """One sentence about the configured combination; `found` is sorted, the best first."""
    best, mine = found[0], next(seen for seen in found if seen.configured)
    if not best.ahead_of(mine):
        equal = sum(not best.ahead_of(seen) for seen in found)
        others = f"; {equal} of them cannot be told from the best" if equal > 1 else ""
        return f"the configured conventions are as good as any of the {len(found)} that were tried{others}"
    changed = [name for name, value in best.conventions.items() if mine.conventions[name] != value]
    wanted = " ".join(f"--mtp-option {name}={best.conventions[name]}" for name in changed)
    return (
        f"the configured conventions make {mine.tokens_per_round:.2f} tokens a round, others {best.tokens_per_round:.2f}; "
        f"set {wanted}"
    )


def _tried(config: EngineConfig, vary: tuple[str, ...] | None, jobs: Sequence[Job]) -> Iterator[Seen]:
    """One engine after another, each with its own combination."""
    from polydraft.cli.run import Run
    from polydraft.cli.show import busy
    from polydraft.engine import Engine

    configured, combinations = _combinations(config, vary)
    for number, conventions in enumerate(combinations, 1):
        texts = tuple(f"{name}={value}" for name, value in conventions.items())
        with busy(f"{number} of {len(combinations)}: {', '.join(texts)}"), _unwarned():
            engine = Engine(replace(config, mtp_options=texts))
            try:
                run = Run(engine, jobs)
                run.to_the_end(lambda output: None)
            finally:
                engine.close()
        if run.interrupted:
            raise KeyboardInterrupt
        yield Seen.of(conventions, conventions == configured, run)


@contextmanager
def _unwarned() -> Iterator[None]:
    """Without warnings of conventions that are unusual: they are what is tried."""
    logger = logging.getLogger("polydraft")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _combinations(config: EngineConfig, vary: tuple[str, ...] | None) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The configured conventions, and all combinations of those that vary. Raises `CapabilityError` where the model has no MTP
    head, `ConfigError` where none of them is called so."""
    from polydraft.engine import Engine
    from polydraft.errors import CapabilityError, ConfigError

    engine = Engine(config)
    engine.close()
    layout = engine.families.family_of(engine.checkpoint).mtp
    if layout is None:
        raise CapabilityError(
            f"{engine.model.architecture} has no MTP layers, wanted a model with an MTP head; name another --model"
        )
    configured, choices = layout.with_conventions(config.mtp_conventions).conventions, layout.choices
    for name in vary or ():
        if name not in choices:
            raise ConfigError(f"--vary {name}: wanted some of {', '.join(choices)}; correct it or leave it out")
    values = [choices[name] if vary is None or name in vary else (configured[name],) for name in choices]
    return configured, [dict(zip(choices, each, strict=True)) for each in itertools.product(*values)]


def _jobs(prompts: str | None, sampling: Mapping[str, Any]) -> list[Job]:
    """The requests of the file, or a few of its own."""
    from polydraft.cli.prompts import Job, read_jobs
    from polydraft.sampling_params import SamplingParams

    if prompts is not None:
        return read_jobs(prompts, sampling)
    params = SamplingParams.from_mapping(sampling)
    return [Job(text, replace(params, seed=place)) for place, text in enumerate(OPENINGS)]


def _show(found: Sequence[Seen], said: str) -> None:
    from polydraft.cli.show import Screen

    screen = Screen()
    drafts = [f"draft {place + 1}" for place in range(len(found[0].by_position))]
    (mine,) = (seen.conventions for seen in found if seen.configured)
    screen.line("configured: " + " ".join(f"{name}={value}" for name, value in mine.items()) + "\n")
    screen.table(
        ("conventions", *drafts, "tokens a round"),
        [
            (
                " ".join(f"{name}={value}" for name, value in seen.conventions.items() if mine[name] != value) or "as configured",
                *("" if share is None else f"{share:.2f}" for share in seen.by_position),
                f"{seen.tokens_per_round:.2f} ± {seen.standard_error:.2f}",
            )
            for seen in found
        ],
    )
    screen.line(f"\n{said}")


def _answer(config: EngineConfig, found: Sequence[Seen], said: str) -> dict[str, Any]:
    """The JSON answer, of schema polydraft.mtp_check/1."""
    return {
        "schema": SCHEMA,
        "model": config.model or "",
        "verdict": said,
        "tried": [
            {
                "conventions": dict(seen.conventions), "configured": seen.configured, "rounds": seen.rounds,
                "tokens_per_round": seen.tokens_per_round, "standard_error": seen.standard_error,
                "acceptance_per_position": list(seen.by_position),
            }
            for seen in found
        ],
    }  # fmt: skip
