"""The command `polydraft`: its group of commands, its exit statuses, and how errors are reported.

The entry point calls `main`; each command is a module beside this one that imports what it needs when it runs, so that `--help`
stays quick. Tracebacks are printed only if `--debug` or POLYDRAFT_DEBUG asks for them.

Exit statuses: 0 done, 1 the thing asked for failed, 2 bad usage (options, prompts, requirements that this engine cannot meet),
130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from polydraft import environment
from polydraft._version import __version__
from polydraft.cli.options import FAILED, INTERRUPTED, USAGE, Answered
from polydraft.errors import CapabilityError, ConfigError, PluginError, PolydraftError, RequestError, UnknownPluginError

COMMANDS = {
    "generate": "Generate text, with accepted drafts marked.",
    "serve": "Serve an OpenAI-compatible interface, metrics and a playground.",
    "doctor": "Show every installed backend and what it can do.",
    "contracts": "Show what a backend has to compute.",
    "conform": "Show that a backend keeps its contracts.",
    "new-backend": "Write a package with the smallest honest backend.",
    "bench": "Time rounds of a model or a shape, and the host.",
    "mtp-check": "Show which conventions of an MTP head accept most drafts.",
    "replay": "Run recorded kernel calls on another backend.",
    "trace": "Show where the time of a recorded run went.",
}
"""Command name to its line in `polydraft --help`; the command itself is in the module of that name (`-` as `_`)."""

EXAMPLES = """\b
Examples:
  polydraft generate "def fibonacci(n):"
  polydraft generate --prompts prompts.jsonl --json
  polydraft doctor
"""


class Program(click.Group):
    """The group: finds commands without importing the others, and turns every exception into a sentence and a status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Commands in the order of their explanation."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Import one command. Raises `click.UsageError` for one that there is not, naming what may have been meant."""
        del ctx
        if cmd_name not in COMMANDS:
            near = get_close_matches(cmd_name, COMMANDS, n=1)
            wanted = f"did you mean {near[0]}" if near else f"wanted one of {', '.join(COMMANDS)}"
            raise click.UsageError(f"there is no command {cmd_name!r}, {wanted}")
        command: click.Command = import_module(f"polydraft.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and exit with the status that the command returned; a closed pipe ends quietly with status 1."""
        del prog_name
        given = sys.argv[1:] if args is None else list(args)
        if sys.stdout is None:  # closed by who started this program, who wants to see nothing
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  for as long as the program runs
        try:
            status = super().main(
                given, "polydraft", complete_var, standalone_mode=False, windows_expand_args=windows_expand_args, **extra
            )
            sys.stdout.flush()
        except BrokenPipeError:
            status = FAILED
        except SystemExit as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            if place.filename == click.core.__file__:  # a closed pipe
                raise
            where = f"{place.filename}:{place.lineno}, in {place.name}"
            status = tell(PluginError(f"{where} ended the program with status {error.code}; raise an error there instead"), given)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the border of the program: whatever it is becomes a sentence
            status = tell(error, given)
        _leave_nothing_to_write()
        if not standalone_mode:
            return status
        sys.exit(status or 0)


def _leave_nothing_to_write() -> None:
    """Forget what cannot be written, which was told: at the exit Python would try again, show a traceback and exit with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(error: BaseException, args: Sequence[str]) -> int:
    """Print `error` as one sentence on standard error, and with --json as one object on standard output, unless the command has
    answered there; return the status."""
    answered = isinstance(error, Answered)
    error = error.reason if isinstance(error, Answered) else error
    options = args[: args.index("--")] if "--" in args else args
    if "--debug" in options or _debug_by_environment():
        traceback.print_exception(error)
    message, status = sentence(error, answered=answered), status_of(error)
    click.echo(f"polydraft: {message}", err=True)
    if "--json" in options and not answered:
        kind = "UsageError" if isinstance(error, click.ClickException) else type(error).__name__
        answer = {"schema": "polydraft.error/1", "error": {"type": kind, "message": message, "exit_code": status}}
        with contextlib.suppress(OSError):  # which may be what is told
            click.echo(json.dumps(answer))
    return status


def sentence(error: BaseException, *, answered: bool = False) -> str:
    """What went wrong, as one sentence. `answered`: behind what the command had by then."""
    if status_of(error) == INTERRUPTED:
        return "interrupted; the answer holds what was finished by then" if answered else "interrupted before there was a result"
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "polydraft"
        return f"{error.format_message().rstrip('.')}; see {where} --help"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, PolydraftError):
        return str(error)
    if isinstance(error, MemoryError):
        sizes = "--num-blocks, --max-num-seqs, --max-batched-tokens or --max-model-len"
        return f"this machine is out of memory ({error}); lower {sizes}"
    if isinstance(error, OSError):
        what = error.filename or "what is written or read"
        return f"the system refuses {what}: {error.strerror or error}; make room or choose another place, and try again"
    return f"unexpected {type(error).__name__}: {error}; this is a bug, please report it with the output of --debug"


def status_of(error: BaseException) -> int:
    """130 for Ctrl-C, 2 where another command line is the remedy, 1 otherwise."""
    if isinstance(error, (click.Abort, KeyboardInterrupt)):  # click makes the one of the other
        return INTERRUPTED
    usage = (click.UsageError, ConfigError, RequestError, CapabilityError, UnknownPluginError)
    return USAGE if isinstance(error, usage) else FAILED


def _debug_by_environment() -> bool:
    try:
        return environment.wants_debug()
    except ConfigError:
        return False  # that error is being reported


@click.command(cls=Program, invoke_without_command=True, epilog=EXAMPLES, context_settings={"max_content_width": 110})
@click.version_option(__version__, prog_name="polydraft", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> int | None:
    """Lossless speculative decoding with multi-token prediction.

    Every command takes --json, --debug and --help.
    """
    environment.check_environment()
    environment.wants_debug()
    if context.invoked_subcommand is not None:
        return None
    click.echo(context.get_help(), err=True)
    return USAGE
