"""What the two processes of the server say to each other: commands down and events up, typed and without pickles.

The client of the engine encodes commands, the worker answers with events; both are msgpack of tagged records that msgspec checks
field by field. What steps brought is one packed message (`polydraft.output.request_delta`) inside an event.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polydraft.errors import RecordError

VERSION = 8
Span = tuple[str, str, float, float]
"""Of a step's timeline: "host" or "device", what it was, its start and length in milliseconds of the engine's clock."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first command: build this engine. `config`: fields of `EngineConfig`; `sleep_level`: as it then falls asleep at once,
    0 for not."""

    config: dict[str, Any]
    sleep_level: int = 0
    version: int = VERSION


class Add(msgspec.Struct, tag=True, frozen=True):
    """Queue a request. `handle` names it from now on; `params`: fields of `SamplingParams`; `grammar`: what binds its output."""

    handle: int
    prompt_ids: list[int]
    params: dict[str, Any]


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End a request; one that has ended already is left alone."""

    handle: int


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Replace the weights by those of a directory, or where `path` is "" by arrays that another process shares (`OpensShared`).
    Answered by `Done` with this number."""

    number: int
    path: str
    running: str
    shared: dict[str, dict[str, Any]] = {}


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Fall asleep. Answered by `Done` with this number."""

    number: int
    level: int
    running: str


class WakeUp(msgspec.Struct, tag=True, frozen=True):
    """Wake up, with other weights where some are named, as in `UpdateWeights`. Answered by `Done` with this number."""

    number: int
    path: str
    shared: dict[str, dict[str, Any]] = {}


class AskStats(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Stats`."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End everything and leave."""


class Parameter(msgspec.Struct, frozen=True):
    """A request parameter that a plugin brings: its name, what it does, and what a value has to be."""

    name: str
    doc: str
    wanted: str


class Loading(msgspec.Struct, tag=True, frozen=True):
    """How far the engine is that is being built (`polydraft.loading`)."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine stands. `decisions`: name to value; `parameters`: those of its plugins."""

    model: str
    model_dir: str
    backend: str
    max_model_len: int
    """Tokens of prompt and text at most: the model's, or as many as all KV blocks hold."""
    max_num_seqs: int
    max_logprobs: int
    vocab_size: int
    device_times: str
    """Where the device's spans come from."""
    decisions: dict[str, Any]
    parameters: list[Parameter]
    thinks: bool = False
    """Whether it knows what ends thinking, so that a constraint binds the reply alone."""
    weights_digest: str = ""
    sleep_level: int = 0
    version: int = VERSION


class Unready(msgspec.Struct, tag=True, frozen=True):
    """The engine could not be built, and why."""

    error: str


class Outputs(msgspec.Struct, tag=True, frozen=True):
    """What a step brought: packed deltas of requests (`polydraft.output.request_delta`), how long it took on the host, the time
    since the last, what went on where since the last outputs, and the digest of the weights that drew all of it."""

    deltas: bytes
    step_ms: float = 0.0
    host_gap_ms: float = 0.0
    spans: list[Span] = []
    weights_digest: str = ""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A request was not taken: it was wrong (`fault` "client", `param` as of `RequestError`), or the engine serves no more
    ("engine")."""

    handle: int
    error: str
    fault: str
    param: str = ""


class Done(msgspec.Struct, tag=True, frozen=True):
    """An administrative command has ended; `error` "" where it succeeded. Then how the engine sleeps, 0 where it is awake, the
    digest of its weights, whether others were put in place, and why those that it has are not whole, "" where they are."""

    number: int
    error: str
    sleep_level: int = 0
    weights_digest: str = ""
    given: bool = False
    torn: str = ""


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Counts of the engine since it was built; seconds are wall time of the worker."""

    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_free: int
    steps: int
    new_tokens: int
    rounds: int
    drafted: int
    accepted: int
    drafted_at: list[int]
    accepted_at: list[int]
    drafts_per_step: list[int]
    """Steps by the number of drafts that they made for a request at most."""
    alarms: dict[str, int]
    """By kind, how often something looked wrong about how many drafts were accepted."""
    alarms_said: dict[str, str]
    """By kind, what was said of it last."""
    preemptions: int
    step_s: float
    """In `Engine.step`."""
    host_gap_s: float
    """Between two steps while there was work: what the host did besides."""
    idle_s: float
    """Without any work, and so without anything for the device."""
    uptime_s: float
    failure: str
    device_busy_s: float
    """In which the device was at work; an upper bound where its times are."""
    prefix_queries: int
    """Tokens of admitted prompts that were looked up in the prefix cache."""
    prefix_hits: int
    """Of which so many were there."""
    behind: list[int]
    """Of each rank beside rank 0, messages that it has not taken yet."""


Command = Start | Add | Abort | UpdateWeights | Sleep | WakeUp | AskStats | Stop
Event = Loading | Ready | Unready | Outputs | Refused | Done | Stats
_encoder = msgspec.msgpack.Encoder()
_commands, _events = msgspec.msgpack.Decoder(Command), msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """One message."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Raises `RecordError` for anything that is no command."""
    try:
        command: Command = _commands.decode(data)
    except msgspec.MsgspecError as error:
        raise RecordError(f"a command to the engine cannot be read: {error}; both processes must be of one version") from error
    return command


def decode_event(data: bytes) -> Event:
    """Raises `RecordError` for anything that is no event."""
    try:
        event: Event = _events.decode(data)
    except msgspec.MsgspecError as error:
        raise RecordError(f"an event of the engine cannot be read: {error}; both processes must be of one version") from error
    return event
