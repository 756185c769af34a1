"""What commands share: exit statuses, common options, and small types of values.

The command modules use it as decorators. It imports nothing heavy and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from polydraft.json_text import parsed

FAILED, USAGE, INTERRUPTED = 1, 2, 130
"""Exit statuses besides 0: the thing asked for failed; bad usage; Ctrl-C."""

Number = TypeVar("Number", int, float)
Command = TypeVar("Command", bound=Callable[..., Any])
ENGINE = (
    "model", "backend", "device", "draft_tokens", "proposer", "proposer_options", "draft_model", "draft_vocab", "mtp_options",
    "check_draft_state", "check_texts", "verify", "tensor_parallel", "expert_parallel", "max_num_seqs", "max_model_len",
    "block_size", "num_blocks", "max_batched_tokens", "overlap", "graph", "graph_sizes", "dtype", "kv_dtype", "weights",
    "weights_ignore", "invariant", "kernels", "variants", "plugins", "allow_cpu_fallback", "logprobs_mode",
    "draft_logprobs", "think_start_ids",
    "think_end_ids", "think_forced_ids",
)  # fmt: skip
"""Fields of `EngineConfig` that `engine` gives a command options for."""


class Answered(Exception):  # noqa: N818  it carries the error that it stands for
    """Raised by a command that broke off and has printed what it had: `reason` is printed on standard error alone, and sets the
    status, since standard output has its answer."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


def common(command: Command) -> Command:
    """Give a command `--json` (as the argument `as_json`) and `--debug` (read where errors are reported)."""
    command = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")(command)
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object on standard output and nothing else there."
    )(command)


def whole_or_auto(value: str) -> int | str:
    """A whole number, or the word auto; the configuration checks the range."""
    return value if value == "auto" else _whole(value, "'auto'")


def drafts(value: str) -> int | str:
    """A number of drafts, auto or auto:K; the configuration checks it."""
    return value if value.startswith("auto") else _whole(value, "auto nor auto:K, such as auto:5")


def _whole(value: str, others: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a whole number nor {others}") from None


def token_bias(value: str) -> tuple[int, float]:
    """A token id and what is added to its logit, as ID=X; the sampling parameters check the ranges."""
    token_id, _, bias = value.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no ID=X, wanted a token id and a number, such as 17=-2.5") from None


def parameter(value: str) -> tuple[str, Any]:
    """A name and its value, as NAME=VALUE: what JSON says, or a text where it is none."""
    name, given, text = value.partition("=")
    if not name or not given:
        raise click.BadParameter(f"{value!r} is no NAME=VALUE, wanted the name of a parameter and its value, such as scale=1.5")
    try:
        return name, parsed(text)
    except ValueError:
        return name, text


def names(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """Names between commas."""
    if isinstance(value, tuple):  # a default, which click converts too
        return value
    each = tuple(part.strip() for part in value.split(","))
    if not all(each):
        raise click.BadParameter(f"{value!r} has an empty name")
    return each


def listed(number: Callable[[str], Number], what: str) -> Callable[[str | tuple[Number, ...]], tuple[Number, ...]]:
    """The type of an option that takes numbers between commas; `what` they are is part of the error for other values."""

    def numbers(value: str | tuple[Number, ...]) -> tuple[Number, ...]:
        if isinstance(value, tuple):  # a default, which click converts too
            return value
        try:
            return tuple(number(part) for part in value.split(","))
        except ValueError:
            raise click.BadParameter(f"{value!r} is no list of {what}") from None

    return numbers


def engine(*, max_num_seqs: int | str) -> Callable[[Command], Command]:
    """Give a command the options that configure an engine, as arguments named in `ENGINE`, None or () where they are not given.
    `max_num_seqs`: the default of the command, or what to say of it."""
    auto: Any = {"type": whole_or_auto}
    flag: Any = {"is_flag": True, "default": None}
    sizes: Any = {"type": listed(int, "sizes, such as 1,2,4"), "metavar": "N,..."}
    ids: Any = {"type": listed(int, "token ids, such as 17,4"), "metavar": "ID,..."}
    options = (
        click.option("--model", metavar="DIR", help="Checkpoint directory, see docs/checkpoints.md.  [default: the demo model]"),
        click.option("--backend", metavar="NAME", help="An installed backend, see polydraft doctor.  [default: auto]"),
        click.option("--device", metavar="SPEC", help="A device of that backend."),
        click.option(
            "--draft-tokens", type=drafts, metavar="K|auto:K", help="Drafts per round, or at most; 0: none.  [default: auto]"
        ),
        click.option(
            "--proposer", metavar="mtp|eagle3|ngram|suffix|hybrid|none|NAME", help="Where drafts come from.  [default: auto]"
        ),
        click.option(
            "--proposer-option",
            "proposer_options",
            multiple=True,
            metavar="NAME=VALUE",
            help="A number that adjusts the proposer, such as max_ngram=5; may be repeated.",
        ),
        click.option("--draft-model", metavar="DIR", help="Model of a proposer that has one of its own, such as eagle3."),
        click.option("--draft-vocab", metavar="FILE[:N]", help="Draft only the N tokens that FILE counts most often."),
        click.option(
            "--mtp-option",
            "mtp_options",
            multiple=True,
            metavar="NAME=VALUE",
            help="A convention of the MTP head, see polydraft mtp-check; may be repeated.",
        ),
        click.option(
            "--check-draft-state",
            type=float,
            metavar="SHARE",
            help="Compute rows anew behind so many rounds, compare drafts.",
        ),
        click.option(
            "--check-texts", type=float, metavar="SHARE", help="Write the end of so many texts once more without drafts, compare."
        ),
        click.option("--verify", metavar="greedy|coupled|rejection", help="How drafts are verified.  [default: auto]"),
        click.option("--tensor-parallel", type=int, metavar="N", help="Split the model over N ranks.  [default: 1]"),
        click.option("--expert-parallel", **flag, help="Give each rank whole experts, not a part of each."),
        click.option("--max-num-seqs", type=int, metavar="B", help=f"Texts decoded together.  [default: {max_num_seqs}]"),
        click.option("--max-model-len", **auto, metavar="N", help="Most tokens of prompt and text.  [default: auto]"),
        click.option("--block-size", **auto, metavar="N", help="Tokens of a KV block.  [default: auto]"),
        click.option("--num-blocks", **auto, metavar="N", help="KV blocks in all.  [default: auto, what memory holds]"),
        click.option("--max-batched-tokens", **auto, metavar="N", help="Rows of one step.  [default: auto]"),
        click.option("--overlap", **auto, metavar="auto|0|1|2", help="Steps launched ahead of results.  [default: auto]"),
        click.option("--graph", metavar="auto|off|decode|prefill", help="Steps captured as device graphs.  [default: auto]"),
        click.option("--graph-sizes", **sizes, help="Sequences (decode) or rows (prefill) of those graphs."),
        click.option("--dtype", metavar="f32|bf16|f16", help="Precision of activations.  [default: auto]"),
        click.option("--kv-dtype", metavar="auto|int8|fp8", help="How KV rows are kept.  [default: auto, in that precision]"),
        click.option(
            "--weights",
            metavar="auto|int8|int8-a8|int4|int4-a8|fp8|fp8-a8",
            help="Pack matrices in fewer bits.  [default: auto, as stored]",
        ),
        click.option("--weights-ignore", type=names, metavar="head,mtp", help="What --weights leaves in that precision."),
        click.option("--invariant", **flag, help="Arithmetic that gives equal bits for every K, batch and chunk."),
        click.option("--kernels", type=names, metavar="PACK,...", help="Kernel packs to enable, first wins."),
        click.option("--variants", metavar="auto|off", help="Variants of its kernels that have passed here.  [default: auto]"),
        click.option("--plugin", "plugins", multiple=True, metavar="NAME|FILE.py|MODULE", help="Load a plugin; may be repeated."),
        click.option("--allow-cpu-fallback", **flag, help="Run on the CPU what the device has no kernel for."),
        click.option(
            "--logprobs-mode",
            metavar="raw_logprobs|processed_logprobs",
            help="Before or after penalties, temperature, filters.  [default: raw_logprobs]",
        ),
        click.option("--draft-logprobs", **flag, help="With --logprobs: likely tokens of each verified draft, too."),
        click.option("--think-start-ids", **ids, help="Token ids that begin thinking.  [default: at once]"),
        click.option("--think-end-ids", **ids, help="Token ids that end thinking."),
        click.option("--think-forced-ids", **ids, help="Token ids spelt out at a limit of thinking.  [default: its end]"),
    )

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
