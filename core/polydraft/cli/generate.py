"""The command `polydraft generate`: turns options into an engine and requests, and their results into text or JSON.

On a terminal the text appears as it is generated, with accepted drafts coloured; with `--json` a program gets one JSON object.
Options that this engine cannot serve are refused before the model is loaded.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydraft import json_text
from polydraft.cli.options import FAILED, INTERRUPTED, common, parameter, token_bias
from polydraft.cli.options import engine as engine_options
from polydraft.errors import HazardError

if TYPE_CHECKING:
    from polydraft.cli.prompts import Job
    from polydraft.cli.run import Run
    from polydraft.engine import Engine
    from polydraft.host.draft_policy import DraftPolicy
    from polydraft.instruments.base import Instrument

EXAMPLE = 'polydraft generate "def fibonacci(n):"'
EXAMPLES = f"""\b
Examples:
  {EXAMPLE}
  polydraft generate "class Stack:" --draft-tokens 5 --temperature 0.8 --seed 7
  polydraft generate --model path/to/MiMo-7B --explain --json "Once upon a time"
  polydraft generate --prompts prompts.jsonl --max-num-seqs 16 --json

A line of --prompts is {{"prompt": "text"}} or {{"prompt_ids": [1, 2]}}, and may add an "id" and any sampling
parameter by its name, such as "max_new_tokens", "temperature", "seed", "stop", "logit_bias": {{"17": -2}} or
"bad_words": ["eval", [17, 4]].
"""
MAX_NUM_SEQS = 8
"""Texts decoded together, unless it is said; an engine for fewer is built sooner."""
SAMPLING = (
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "bad_words", "min_tokens", "stop", "ignore_eos", "logprobs", "prompt_logprobs",
    "max_drafts", "thinking_limit", "reply_budget", "constraint", "extra",
)  # fmt: skip
"""Options that belong to each request; the others configure the engine."""


@click.command("generate", epilog=EXAMPLES)
@click.argument("prompt", required=False)
@click.option("--prompts", metavar="FILE.jsonl", help="Read prompts, one JSON object a line; - is standard input.")
@engine_options(max_num_seqs=f"{MAX_NUM_SEQS}, or one a prompt where there are fewer")
@click.option("--max-new-tokens", type=int, metavar="N", help="Most tokens to generate for a prompt.  [default: 128]")
@click.option("--temperature", type=float, metavar="T", help="0 is greedy.  [default: 0]")
@click.option("--top-p", type=float, metavar="P", help="Sample from this probability mass.  [default: 1]")
@click.option("--top-k", type=int, metavar="N", help="Sample from this many tokens, 0 is all.  [default: 0]")
@click.option("--min-p", type=float, metavar="P", help="Least probability relative to the most likely token.  [default: 0]")
@click.option(
    "--presence-penalty",
    type=float,
    metavar="X",
    help="Subtracted from the logit of each token that is in the text.  [default: 0]",
)
@click.option(
    "--frequency-penalty", type=float, metavar="X", help="Subtracted from it for each time that the token occurs.  [default: 0]"
)
@click.option("--repetition-penalty", type=float, metavar="X", help="Divides logits of tokens in prompt or text.  [default: 1]")
@click.option(
    "--logit-bias", type=token_bias, multiple=True, metavar="ID=X", help="Add X to the logit of token ID; may be repeated."
)
@click.option("--bad-word", "bad_words", multiple=True, metavar="STR", help="Never write this; may be repeated.")
@click.option("--min-tokens", type=int, metavar="N", help="No end of any kind before N tokens.  [default: 0]")
@click.option("--max-drafts", type=int, metavar="N", help="Drafts verified in a round at most; 0: none.  [default: all]")
@click.option("--seed", type=int, metavar="S", help="Seed of the first prompt; the next ones count up from it.  [default: 0]")
@click.option("--stop", multiple=True, metavar="STR", help="End the text before this; may be repeated.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Continue after the model's own end of text.")
@click.option("--logprobs", type=int, metavar="N", help="Log probabilities: each token's, and the N most likely beside it.")
@click.option("--prompt-logprobs", type=int, metavar="N", help="Likewise of the prompt's tokens; with --json.")
@click.option("--regex", metavar="RE", help="Bind the text to a regular expression; needs the extra grammar.")
@click.option("--json-schema", metavar="FILE", help="Bind the text to a JSON schema; needs the extra grammar.")
@click.option("--grammar", metavar="FILE", help="Bind the text to a grammar in EBNF or Lark; needs the extra grammar.")
@click.option("--thinking-limit", type=int, metavar="N", help="Tokens of thinking at most; needs --think-end-ids.")
@click.option("--reply-budget", type=int, metavar="N", help="At most N tokens after thinking; needs --think-end-ids.")
@click.option(
    "--param", "extra", type=parameter, multiple=True, metavar="NAME=VALUE",
    help="A parameter that a plugin brings, JSON or text; may be repeated.",
)  # fmt: skip
@click.option("--provenance", is_flag=True, help="Say of each token who proposed it; with --json, or --logprobs.")
@click.option("--sanitize", is_flag=True, default=None, help="Check what runs for hazards, see docs/sanitize.md; slower.")
@click.option("--trace", metavar="FILE", help="Write the timeline of the run, for polydraft trace and Perfetto.")
@click.option("--record", metavar="FILE", help="Record the kernel calls of some steps, for polydraft replay.")
@click.option("--record-steps", metavar="1-4,9", help="Steps to record, from 1.  [default: 1-4]")
@click.option("--record-weights", is_flag=True, default=None, help="Include weights, so that a replay needs no model.")
@click.option("--record-drafts", metavar="FILE", help="Write how many drafts each step makes, for --replay-drafts.")
@click.option("--replay-drafts", metavar="FILE", help="Make as many drafts in each step as a run with --record-drafts.")
@click.option("--explain", is_flag=True, help="Show what was decided, and why, before generating.")
@click.option("--no-color", is_flag=True, help="Plain text on a terminal too.")
@common
def command(
    prompt: str | None, prompts: str | None, explain: bool, provenance: bool, no_color: bool, as_json: bool, **options: Any
) -> int:
    """Generate text for PROMPT (- reads it from standard input), or for every line of --prompts.

    On a terminal accepted drafts are coloured; the text is the same as without drafts.
    """
    from polydraft.cli import replay
    from polydraft.cli.run import Run
    from polydraft.cli.trace import recorded
    from polydraft.host.draft_decisions import ReplayedDrafts
    from polydraft.instruments.output_file import check_distinct, claim

    given = {name: value for name, value in options.items() if value is not None and value != ()}
    given |= _constraint(given) | _extra(given)
    sampling = {name: given.pop(name) for name in SAMPLING if name in given}
    trace, decisions, decided = given.pop("trace", None), given.pop("record_drafts", None), given.pop("replay_drafts", None)
    record = _recording(given)
    jobs = _jobs(prompt, prompts, sampling)
    if not as_json:
        _check_shown(jobs, provenance=provenance)
    fewest = max([len(jobs), *given.get("graph_sizes", ())])  # what is to be captured has to fit
    given.setdefault("max_num_seqs", min(MAX_NUM_SEQS, fewest))
    given |= _most_logprobs(jobs)
    given |= {"constraints": True} if any(job.params.constrained for job in jobs) else {}
    check_distinct({"--replay-drafts": decided, "--record-drafts": decisions})
    policy = ReplayedDrafts.read(Path(decided)) if decided else None
    claim({"--trace": trace, "--record": record["file"], "--record-drafts": decisions})
    engine = _engine(given, _instruments(trace, decisions, **record), policy)
    try:
        tell = functools.partial(click.echo, err=True)
        with recorded(engine, trace), replay.recorded(engine, record["file"], record["steps"], tell=tell) as never:
            run = Run(engine, jobs)
            if as_json:
                run.to_the_end(lambda output: None)
                click.echo(json.dumps(run.answer(explain=explain, provenance=provenance), allow_nan=False))
            else:
                _show(run, jobs, explain=explain, color=not no_color)
    finally:
        hazards = _close(engine)
    for output in run.outputs.values():
        if output.error:
            click.echo(f"polydraft: request {output.id!r}: {output.error}", err=True)
    if run.interrupted:
        return INTERRUPTED
    failed = any(output.finish_reason in ("error", "refused") for output in run.outputs.values())
    return FAILED if hazards or never or failed else 0


def _recording(given: dict[str, Any]) -> dict[str, Any]:
    """Take the options of --record out of `given`; no steps where none were named."""
    file, steps = given.pop("record", None), given.pop("record_steps", None)
    weights = given.pop("record_weights", False)
    if file is None and (steps or weights):
        raise click.UsageError("--record-steps and --record-weights belong to --record FILE; add that")
    asked: frozenset[int] = frozenset()
    if steps:
        from polydraft.instruments.record import steps_of

        asked = steps_of(steps)
    return {"file": file, "steps": asked, "weights": weights}


def _instruments(
    trace: str | None, decisions: str | None, *, file: str | None, steps: frozenset[int], weights: bool
) -> list[Instrument]:  # fmt: skip
    """Those of --trace, --record-drafts and --record; the configuration brings that of --sanitize."""
    from polydraft.host.draft_decisions import DraftRecorder
    from polydraft.instruments.record import DEFAULT_STEPS, CallRecorder
    from polydraft.instruments.trace import Trace

    recorder = [CallRecorder(steps or DEFAULT_STEPS, include_weights=weights)] if file else []
    return [*([Trace()] if trace else []), *([DraftRecorder(decisions)] if decisions else []), *recorder]


def _close(engine: Engine) -> bool:
    """Close the engine, tell what its hazard checker has found, and return whether that was something."""
    try:
        engine.close()
    except HazardError as error:
        click.echo(f"polydraft: {error}", err=True)
        return True
    return False


def _show(run: Run, jobs: Sequence[Job], *, explain: bool, color: bool) -> None:
    """Run for a person: decisions, texts, figures."""
    from polydraft.cli.show import Progress, Screen
    from polydraft.cli.tokens import Tokens, show
    from polydraft.cli.typewriter import OneText, TextsInOrder, figures, title

    screen, engine = Screen(color=color), run.engine
    if explain:
        screen.table(("decision", "asked", "chosen", "why"), _decisions(engine))
        screen.line()
        joined = _joined(engine)
        if joined:
            screen.table(("one launch", "of", "where", "why"), joined)
            screen.line()
        if engine.weights.packing_errors:
            screen.table(("layer", "what packing changed, root mean square over that of the weights"), _packed(engine))
            screen.line()
        captured = _captured(engine)
        if captured:
            screen.table(("drafts", "captured", "left out", "graphs", "bytes"), captured)
            screen.line()
    if len(jobs) == 1:
        prompt = jobs[0].prompt
        run.to_the_end(OneText(screen, engine.tokenizer, prompt if isinstance(prompt, str) else ""))
    else:
        titles = {request_id: title(job.prompt) for request_id, job in zip(run.ids, jobs, strict=True)}
        progress = Progress(len(jobs), lambda: engine.totals.new_tokens)
        texts = TextsInOrder(screen, engine.tokenizer, titles, progress)
        with progress.shown():
            run.to_the_end(texts)
    for output in run.outputs.values():
        if output.logprobs:
            screen.line()
            show(screen, Tokens(engine.tokenizer), output)
    screen.line(f"\n{figures(run.answer(explain=False))}")
    for note in engine.default.broken if engine.default else ():
        screen.line(note)


def _jobs(prompt: str | None, prompts: str | None, sampling: Mapping[str, Any]) -> list[Job]:
    from polydraft.cli.prompts import Job, read_jobs, read_text
    from polydraft.sampling_params import SamplingParams

    if prompt is None and prompts is None:
        raise click.UsageError(f"there is no prompt, wanted a text, - for standard input, or --prompts; for example: {EXAMPLE}")
    if prompts is not None:
        if prompt is not None:
            raise click.UsageError("got both PROMPT and --prompts, wanted one of them; put the prompt into the file")
        return read_jobs(prompts, sampling)
    assert prompt is not None
    return [Job(read_text() if prompt == "-" else prompt, SamplingParams.from_mapping(sampling))]


def _check_shown(jobs: Sequence[Job], *, provenance: bool) -> None:
    """Refuse what only the JSON would show."""
    if any(job.params.prompt_logprobs is not None for job in jobs):
        raise click.UsageError("log probabilities of a prompt are shown by --json alone; add it, or leave --prompt-logprobs out")
    if provenance and all(job.params.logprobs is None for job in jobs):
        raise click.UsageError("--provenance is shown by --json, or in the table of --logprobs N; add one of them")


def _constraint(given: dict[str, Any]) -> dict[str, Any]:
    """Take the options that bind text out of `given`; what they bind it to."""
    asked = {name: given.pop(name) for name in ("regex", "json_schema", "grammar") if name in given}
    if len(asked) > 1:
        both = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise click.UsageError(f"got both {both}, wanted one of them; drop the other")
    if "regex" in asked or not asked:
        return {"constraint": asked} if asked else {}
    ((kind, file),) = asked.items()
    if kind == "json_schema":
        fix = "give a file with one JSON schema"
        schema = json_text.read(Path(file), object, fix, what=f"--json-schema {file}", error=click.UsageError)
        return {"constraint": {kind: schema}}
    try:
        return {"constraint": {kind: Path(file).read_text(encoding="utf-8")}}
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--grammar {file} cannot be read: {error}; give a file with a grammar") from error


def _extra(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of plugins in `given`, by name; nothing where there are none."""
    pairs: Sequence[tuple[str, Any]] = given.get("extra", ())
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise click.UsageError(f"--param {twice} was given twice, wanted one value; drop the other")
    return {"extra": dict(pairs)} if pairs else {}


def _most_logprobs(jobs: Sequence[Job]) -> dict[str, int]:
    """The engine's option for what its requests ask for; nothing where none asks."""
    asked = [n for job in jobs for n in (job.params.logprobs, job.params.prompt_logprobs) if n is not None]
    return {"logprobs": max(asked)} if asked else {}


def _engine(options: Mapping[str, Any], instruments: Sequence[Instrument], policy: DraftPolicy | None) -> Engine:
    from polydraft.cli.show import loading
    from polydraft.config import EngineConfig
    from polydraft.engine import Engine

    config = EngineConfig.from_mapping(options)
    with loading(config.model or "the demo model") as told:
        return Engine(config, instruments=instruments, draft_policy=policy, loading=told)


def _joined(engine: Engine) -> list[tuple[str, str, str, str]]:
    """Launches that have become one, whose kernel that is, and in how many of the engine's programs."""
    found = []
    for one, launches in engine.runner.joined():
        where = f"{len(launches)} programs" + (", where captured" if one.captured else "")
        found.append((one.contracts, one.by, where, one.why))
    return found


def _captured(engine: Engine) -> list[tuple[str, str, str, str, str]]:
    """Buckets with a graph for each number of drafts that a step may make, and those that the budget left out."""
    return [
        (
            str(number), ", ".join(map(str, held.buckets)), ", ".join(map(str, held.left_out)) or "none", str(held.graphs),
            f"{held.num_bytes:,}" if held.num_bytes else "not reported",
        )
        for number, held in engine.runner.captured().items()
    ]  # fmt: skip


def _packed(engine: Engine) -> list[tuple[str, str]]:
    """Of each layer, and of matrices outside of layers, how far its packed matrices are from those of the checkpoint."""
    layers: dict[str, list[str]] = {}
    for name, error in engine.weights.packing_errors.items():
        layer, _, matrix = name.rpartition(".")
        layers.setdefault(layer or name, []).append(f"{matrix} {error:.2%}" if layer else f"{error:.2%}")
    return [(layer, ", ".join(errors)) for layer, errors in layers.items()]


def _decisions(engine: Engine) -> list[tuple[str, str, str, str]]:
    def show(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

    return [(d.name, show(d.asked), show(d.chosen), d.reason) for d in engine.resolved.decisions]
