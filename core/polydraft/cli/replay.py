"""The command `polydraft replay`: runs recorded kernel calls on another backend and shows the first that differs. It also holds
`--record` of other commands.

It reads what `generate --record` wrote, and runs no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.options import common
from polydraft.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from polydraft.conformance.replay import Replay, Weights
    from polydraft.conformance.target import Target
    from polydraft.engine import Engine
    from polydraft.instruments.record_file import Record

MOST_SHOWN = 8
EXAMPLES = """\b
Examples:
  polydraft replay run.safetensors --backend mychip
  polydraft replay run.safetensors --backend mychip --against reference --json
  polydraft replay run.safetensors --backend mychip --call 41
  polydraft generate "def f(x):" --record run.safetensors    (makes the file)

Every call runs alone from its recorded inputs. The status is 0 where nothing
differs, 1 where a call differs or nothing could be compared.
"""


@click.command("replay", epilog=EXAMPLES)
@click.argument("file")
@click.option("--backend", required=True, metavar="NAME", help="The backend that runs the calls, see polydraft doctor.")
@click.option("--device", default="", metavar="SPEC", help="A device of that backend.")
@click.option(
    "--against", default="recorded", show_default=True, metavar="recorded|golden|NAME",
    help="What results are compared with; NAME is another backend, such as reference.",
)  # fmt: skip
@click.option("--call", "calls", type=click.IntRange(0), multiple=True, metavar="N", help="This call alone; repeatable.")
@click.option("--model", metavar="DIR", help="The recorded model, where the file only refers to its weights.")
@click.option("--plugin", "plugins", multiple=True, metavar="FILE", help="Load a plugin from a file or module; repeatable.")
@click.option("--kernels", default="", metavar="PACK,...", help="Kernel packs to enable, first wins.")
@common
def command(
    file: str,
    backend: str,
    device: str,
    against: str,
    calls: tuple[int, ...],
    model: str | None,
    plugins: tuple[str, ...],
    kernels: str,
    as_json: bool,
) -> int:
    """Run the kernel calls of FILE, recorded with --record, on a backend; show the first call and element that differ."""
    from polydraft.conformance.replay import GOLDEN, RECORDED, replay
    from polydraft.instruments.record_file import read

    record = read(file)
    with ExitStack() as stack:
        packs = tuple(name for name in kernels.split(",") if name)
        target = _target(stack, backend, device=device, files=plugins, packs=packs)
        other = against if against in (RECORDED, GOLDEN) else _target(stack, against, device="", files=())
        answer = replay(record, target, against=other, weights=stack.enter_context(_weights(record, model)), calls=calls)
    if as_json:
        click.echo(json.dumps(_json(file, record, answer)))
    else:
        click.echo(text(record, answer))
    return answer.status


def _target(stack: ExitStack, backend: str, *, device: str, files: tuple[str, ...], packs: tuple[str, ...] = ()) -> Target:
    """A backend that can be opened. What cannot be loaded, or is not there, is bad usage."""
    from polydraft.conformance.target import Target

    try:
        target = Target(backend, device=device, files=files, packs=packs)
    except PluginError as error:
        raise ConfigError(str(error)) from error
    if not target.info.available:
        raise ConfigError(f"backend {backend!r} is not available: {target.info.reason}")
    stack.callback(target.close)
    return target


@contextmanager
def _weights(record: Record, model: str | None) -> Iterator[Weights | None]:
    """Where weights come from that the file only names: `--model`, or the demo model where that was recorded."""
    directory: str | Path | None = model
    if model is None and record.about.get("demo"):
        from polydraft.demo import demo_model_path

        directory = demo_model_path()
    if directory is None:
        yield None
        return
    from polydraft.models.checkpoint import Checkpoint, load_weights
    from polydraft.models.families import FamilyRegistry

    with Checkpoint(directory) as checkpoint:
        canonical = load_weights(checkpoint, *FamilyRegistry().describe(checkpoint))
        yield canonical.__getitem__


def _json(file: str, record: Record, answer: Replay) -> dict[str, Any]:
    from polydraft.conformance.replay import SCHEMA

    about = record.about
    return {
        "schema": SCHEMA, "file": file, "backend": answer.backend, "against": answer.against, "steps": list(record.steps),
        "calls": len(record.calls), "compared": answer.compared, "elements": answer.elements, "status": answer.status,
        "differences": [difference.describe() for difference in answer.differences],
        "skipped": [{"call": call.number, "contract": call.contract, "reason": reason} for call, reason in answer.skipped],
        "recorded": {**about["backend"], "device": about["device"], "model": about["model"], "dtype": about["dtype"],
                     "widths": [{"step": step, **width._asdict()} for step, width in record.widths.items()]},
    }  # fmt: skip


def text(record: Record, answer: Replay) -> str:
    """What a replay came to, for people."""
    about = record.about["backend"]
    lines = [f"recorded on {about['name']} {about['version']}: {len(record.calls)} calls of {len(record.steps)} steps"]
    reasons = dict.fromkeys(reason for _, reason in answer.skipped)
    lines += [f"left out {sum(r == reason for _, r in answer.skipped)} calls: {reason}" for reason in reasons]
    seen = f"{answer.compared} calls, {answer.elements:,} elements, on {answer.backend} against {answer.against}"
    if not answer.compared:
        return "\n".join([*lines, f"nothing was compared: {seen}"])
    if not answer.differences:
        return "\n".join([*lines, f"no difference: {seen}"])
    first, *rest = answer.differences
    lines += [f"{len(answer.differences)} calls differ: {seen}", f"first difference: {first.sentence}"]
    lines += [f"then: {difference.call.place}: {difference.call.contract}" for difference in rest[:MOST_SHOWN]]
    lines += [f"and {len(rest) - MOST_SHOWN} more, see --json"] if len(rest) > MOST_SHOWN else []
    return "\n".join([*lines, f"run it alone with --call {first.call.number}"])


# -- --record of other commands ----------------------------------------------------------------------
@contextmanager
def recorded(engine: Engine, file: str | None, asked: frozenset[int], *, tell: Callable[[str], None]) -> Iterator[set[int]]:
    """Write the kernel calls of what the engine does inside, which was built with a `CallRecorder`, to `file`, also when it ends
    by an error; None writes nothing. Yields a set which holds, behind the block, those of the steps `asked` for that never
    came."""
    never: set[int] = set()
    if file is None:
        yield never
        return
    from polydraft.instruments.record import CallRecorder, text_of
    from polydraft.instruments.record_file import write

    recorder = engine.instruments[CallRecorder]
    try:
        yield never
    finally:
        recorder.stop()
        record = recorder.finish()
        write(file, record)
        tell(f"recorded {len(record.calls)} calls of {len(record.steps)} steps in {file}")
        never |= asked - set(record.steps)
        if never:
            tell(f"polydraft: steps {text_of(never)} never came, the run had {engine.totals.steps}; lower --record-steps")
