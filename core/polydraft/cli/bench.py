"""The command `polydraft bench`: turns options into a suite, shows its progress, and prints its rows as a table or as JSON.

The caller chooses what is compared, and `polydraft.bench` measures it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.options import Answered, common, listed, names, whole_or_auto
from polydraft.errors import PolydraftError

if TYPE_CHECKING:
    from polydraft.bench.suite import Suite

EXAMPLES = """\b
Examples:
  polydraft bench
  polydraft bench --backend null --batch 1,64,256 --draft-tokens 3 --new-tokens 256
  polydraft bench --shape bench/shapes/tiny.json --draft-tokens 0,3 --accept-schedule 0.9,0.7,0.5
  polydraft bench --compare overlap --batch 8 --json --out result.json
"""
OWN = ("shape", "batch", "draft_tokens", "compare", "prompt_tokens", "new_tokens", "repeats")
"""Options of the suite; the others configure the engines."""


SILENCE_S = 10.0
"""Seconds behind which a line says how far it is where nobody watches."""
wholes = listed(int, "whole numbers between commas")
chances = listed(float, "numbers between commas")


@click.command("bench", epilog=EXAMPLES)
@click.option("--model", metavar="DIR", help="Checkpoint to run.  [default: the demo model]")
@click.option("--shape", metavar="FILE.json", help="Random weights of this shape instead; bench/shapes has some.")
@click.option("--backend", metavar="NAME", help="An installed backend, see polydraft doctor.  [default: auto]")
@click.option("--device", metavar="SPEC", help="A device of that backend.")
@click.option("--batch", type=wholes, default=(1,), metavar="B,...", help="Requests decoded together.  [default: 1]")
@click.option("--draft-tokens", type=wholes, default=(0, 3), metavar="K,...", help="Drafts per round; 0: none.  [default: 0,3]")
@click.option(
    "--accept-schedule", type=chances, metavar="P,...", help="SYNTHETIC: accept the draft at each place by this chance."
)
@click.option(
    "--compare", type=click.Choice(["off", "graph", "overlap", "all"]), default="off", help="Run with and without, in turn."
)
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), default=32, show_default=True, metavar="N", help="Tokens of a prompt."
)
@click.option("--new-tokens", type=click.IntRange(min=2), default=128, show_default=True, metavar="N", help="Tokens of a text.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, metavar="N", help="Measured runs of each.")
@click.option("--proposer", metavar="mtp|eagle3|ngram|suffix|hybrid|none|NAME", help="Where drafts come from.  [default: auto]")
@click.option("--draft-model", metavar="DIR", help="Model of a proposer that has one of its own.")
@click.option("--draft-vocab", metavar="FILE[:N]", help="Draft only the N tokens that FILE counts most often.")
@click.option("--overlap", type=whole_or_auto, metavar="auto|0|1|2", help="Steps launched ahead of results.  [default: auto]")
@click.option("--graph", metavar="auto|off|decode|prefill", help="Steps captured as device graphs.  [default: auto]")
@click.option("--dtype", metavar="f32|bf16|f16", help="Precision of activations.  [default: auto]")
@click.option("--kv-dtype", metavar="auto|int8|fp8", help="How KV rows are kept.  [default: auto, in that precision]")
@click.option(
    "--weights",
    metavar="auto|int8|int8-a8|int4|int4-a8|fp8|fp8-a8",
    help="Pack matrices in fewer bits.  [default: auto, as stored]",
)
@click.option("--weights-ignore", type=names, metavar="head,mtp", help="What --weights leaves in that precision.")
@click.option("--invariant", is_flag=True, default=None, help="Row-invariant arithmetic.")
@click.option("--kernels", type=names, metavar="PACK,...", help="Kernel packs to enable, first wins.")
@click.option("--variants", metavar="auto|off", help="Variants of its kernels that have passed here.  [default: auto]")
@click.option("--plugin", "plugins", multiple=True, metavar="NAME|FILE.py|MODULE", help="Load a plugin; may be repeated.")
@click.option("--out", metavar="FILE", help="Write the result as JSON, too.")
@click.option("--no-color", is_flag=True, help="Plain text on a terminal too.")
@common
def command(out: str | None, no_color: bool, as_json: bool, **options: Any) -> int:
    """Time rounds: milliseconds, tokens, host time by stage, idle share and memory, each as the median of several runs.

    With --accept-schedule the drafts are accepted by chance, to time shapes without trained weights: such a result is
    synthetic and says so. On the backend null every draft is accepted, so that it shows what the host takes alone.

    A run that breaks off, by Ctrl-C or by an error, shows the batch sizes that it has finished.
    """
    from polydraft.bench import report
    from polydraft.instruments.output_file import claim

    suite = _suite(options)
    claim({"--out": out})
    rows: list[dict[str, Any]] = []
    broken_off: BaseException | None = None
    try:
        with _progress() as progress:
            rows.extend(suite.run(progress))
    except (PolydraftError, KeyboardInterrupt) as error:
        if not rows:
            raise
        broken_off = error
    result = report.document(rows)
    if out:
        report.write(out, result)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _show(result, color=not no_color)
    if broken_off is not None:
        raise Answered(broken_off)
    return 0


def _suite(options: dict[str, Any]) -> Suite:
    from polydraft.bench.suite import Suite
    from polydraft.config import EngineConfig

    own = {name: options.pop(name) for name in OWN}
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    if own["shape"] and "model" in given:
        raise click.UsageError("got both --model and --shape, wanted one of them; leave one out")
    if not own["batch"] or min(own["batch"]) < 1 or min(own["draft_tokens"]) < 0:
        raise click.UsageError(
            f"got --batch {own['batch']} and --draft-tokens {own['draft_tokens']}, wanted whole numbers from 1 and from 0 on; "
            "correct them"
        )
    compared = {"graph": ("graph",), "overlap": ("overlap",), "all": ("graph", "overlap")}.get(own["compare"], ())
    fixed = next((name for name in compared if name in given), None)
    if fixed:
        raise click.UsageError(f"got both --compare {own['compare']} and --{fixed}, which sets what is compared; leave one out")
    shape = own.pop("shape")
    return Suite(
        EngineConfig.from_mapping({**given, "prefix_cache": False}), Path(shape) if shape else None, own.pop("batch"), **own
    )


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Tell what is being done: a line that changes where somebody watches, otherwise a line for each engine that is loaded or
    measured, and where it takes long one now and then."""
    from polydraft.cli.show import console, watched

    if watched():
        with console(stderr=True).status("loading") as status:
            yield status.update
        return
    named: set[str] = set()
    said = time.monotonic()

    def tell(what: str) -> None:
        nonlocal said
        name, now = what.partition(":")[0], time.monotonic()
        if name not in named or now - said >= SILENCE_S:
            named.add(name)
            said = now
            click.echo(what, err=True)

    yield tell


def _show(result: dict[str, Any], *, color: bool) -> None:
    from polydraft.cli.show import Screen

    screen, rows = Screen(color=color), result["rows"]
    first = rows[0]
    screen.line(f"{first['shape']} ({first['weights']} weights) on {first['backend']} {first['device']}, {first['dtype']}")
    screen.line(f"{first['prompt_tokens']} + {first['new_tokens']} tokens, {first['repeats']} runs each")
    screen.line(f"evidence: {first['evidence']}; clock: {first['clock']}")
    if any(row["acceptance"] == "synthetic" for row in rows):
        schedule = next((row["accept_schedule"] for row in rows if row["accept_schedule"]), None)
        rule = ", ".join(f"{chance:g}" for chance in schedule) if schedule else "by a backend that is a double"
        screen.line(f"SYNTHETIC acceptance, {rule}, in the rows that say so: their tokens mean nothing", "yellow")
    screen.line()
    shown = [_name(row, rows) for row in rows]
    head = ("run", "ms/round", "tok/round", "tok/s", "ttft ms", "host us", "idle", "MiB")
    screen.table(head, [(name, *_cells(row)) for name, row in zip(shown, rows, strict=True)])
    screen.line()
    stages = [stage for stage in first["host_us_by_stage"] if stage != "wait"]
    screen.table(
        ("host us a step", *stages),
        [(name, *(f"{row['host_us_by_stage'][stage]:.1f}" for stage in stages)) for name, row in zip(shown, rows, strict=True)],
    )
    screen.line("\nMedians, and half of the spread over the runs.")


def _name(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Batch and drafts, and whatever else differs between rows."""
    name = f"B={row['batch']} K={row['draft_tokens']}"
    for option in ("graph", "overlap"):
        if len({str(other[option]) for other in rows}) > 1:
            name += f" {option} {row[option]}"
    return f"{name} synthetic" if row["acceptance"] == "synthetic" else name


def _cells(row: dict[str, Any]) -> Sequence[str]:
    def figure(name: str, form: str) -> str:
        low, high = row["spread"][name]
        return f"{row[name]:{form}} ±{0.5 * (high - low) / row[name]:.0%}"

    idle = "unknown" if row["idle_share"] is None else f"{row['idle_share']:.1%}"
    rounds, tokens, host = figure("ms_per_round", ".2f"), figure("tokens_per_s", ".0f"), figure("host_us_per_step", ".0f")
    first = "unknown" if row["ttft_ms"] is None else figure("ttft_ms", ".1f")
    return rounds, f"{row['tokens_per_round']:.2f}", tokens, first, host, idle, f"{row['memory_bytes'] / 2**20:.0f}"
