"""OpenAI's request bodies as typed records, and their conversion into prompts and sampling parameters.

Routes decode a body with it. An unknown field is refused by name: nothing that was requested is dropped silently. It does not
talk to the engine.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

import msgspec

from polydraft.errors import ConfigError, RequestError
from polydraft.sampling_params import MAX_BAD_WORDS, MAX_BIASES, MAX_REPLY_STARTS, MAX_STOP_TOKENS, SamplingParams
from polydraft.serving.answers import shortened
from polydraft.serving.wire import Parameter

ID_PATTERN: Final = r"^[!-~]{1,128}(?![\s\S])"
"""What an id of a request may be: printable characters of ASCII, and not many of them. `$` would let a line end follow."""
MOST = 2**31 - 1
"""Numbers of the engine have 32 bits; what is sent to it must at least fit into 64."""
MOST_TOOLS = 128
"""Tools of one request (the limit of OpenAI's interface)."""
Whole = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
TokenIds = list[Whole]
FunctionIdentifier = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, each event has the usage of its choice so far."""
    include_obfuscation: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common; names and defaults are OpenAI's, the last group is vLLM's and ours.

    Of some fields only the values are taken that change nothing here (`NEUTRAL`); others are accepted since they only tell the
    operator of a service something, or route requests, and no text depends on them (`user`, `metadata`, `prompt_cache_key`,
    `safety_identifier`)."""

    model: str = ""
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_BIASES)] | None = None
    seed: int | None = None
    user: str | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)] | None = None
    """0, and -1 as vLLM has it, is no limit."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, msgspec.Meta(max_length=MAX_STOP_TOKENS)] | None = None
    bad_words: Annotated[list[str], msgspec.Meta(max_length=MAX_BAD_WORDS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: an object with json, regex, choice, grammar (EBNF or Lark) or json_object."""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    add_special_tokens: bool | None = None
    """vLLM's: with those that the tokenizer puts around a text; by default around a prompt, not around a conversation."""
    truncate_prompt_tokens: Count | None = None
    """vLLM's: keep this many tokens of the prompt, the last ones."""
    return_token_ids: bool | None = None
    """vLLM's: give the token ids of prompt and text as well."""
    request_id: Annotated[str, msgspec.Meta(pattern=ID_PATTERN)] | None = None
    """vLLM's: what the answer's id is made of, where no header names another."""
    skip_special_tokens: bool | None = None
    """vLLM's: with false, special tokens are text, but for those that end it."""
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[Any] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    thinking_limit: Whole | None = None
    thinking_token_budget: Whole | None = None
    """The same, by vLLM's name."""
    reply_budget: Whole | None = None
    reply_start_token_ids: Annotated[TokenIds, msgspec.Meta(max_length=MAX_REPLY_STARTS)] | None = None
    """Tokens that the reply may begin with, right behind the end of thinking."""
    max_drafts: Whole | None = None
    """Drafts verified in a round at most; 0: plain decoding."""
    num_speculative_tokens: Whole | None = None
    """The same, by the name that vLLM has for an engine's."""
    provenance: bool | None = None
    """Say of each token who proposed it."""
    weights_digests: bool | None = None
    """Give the digests of the weights that drew the tokens."""


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """`function` of a tool."""

    name: FunctionIdentifier
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Bind the arguments to `parameters`, a schema."""


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """One of `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """`function` of `tool_choice`."""

    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` where it names a function."""

    type: Literal["function"]
    function: FunctionName


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/completions`."""

    prompt: str | list[Any]
    """A text, token ids, or a list of either."""
    logprobs: Whole | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """With false, one call at most."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: variables of the chat template, such as `enable_thinking`."""
    reasoning_effort: Effort | None = None
    modalities: list[str] | None = None
    verbosity: str | None = None
    add_generation_prompt: bool | None = None
    """vLLM's: end the prompt with the header of an answer."""
    continue_final_message: bool | None = None
    """vLLM's: the answer goes on with the last message."""


class ResponseTool(msgspec.Struct, forbid_unknown_fields=True):
    """One of the `tools` of a response."""

    type: Literal["function"]
    name: FunctionIdentifier
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` of a response where it names a function."""

    type: Literal["function"]
    name: str


class ResponseTextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`text.format` of a response."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseText(msgspec.Struct, forbid_unknown_fields=True):
    """`text` of a response."""

    format: ResponseTextFormat | None = None
    verbosity: str | None = None


class ResponseReasoning(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning` of a response. There are no summaries: items have the reasoning itself."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponsesRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    tools: Annotated[list[ResponseTool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    truncation: str | None = None
    include: list[str] | None = None
    max_tool_calls: int | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/tokenize`: a prompt, or messages."""

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/detokenize`."""

    tokens: TokenIds
    model: str = ""


class UpdateWeightsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/admin/update_weights`: a directory, or arrays that another process on the same device shares, as its library
    describes them (`polydraft_cuda.ipc.share`)."""

    path: str = ""
    shared: dict[str, dict[str, Any]] = {}
    running: Literal["finish", "recompute"] = "finish"


class SleepRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/admin/sleep`."""

    level: Literal[1, 2] = 1
    running: Literal["finish", "recompute"] = "finish"


class WakeUpRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/admin/wake_up`: weights to wake up with, as in `/admin/update_weights`, or none."""

    path: str = ""
    shared: dict[str, dict[str, Any]] = {}


TEXT_BODIES: Final = (CompletionRequest, ChatRequest, ResponsesRequest)
"""Bodies that a text is the answer of."""
S = TypeVar("S", bound=Sampling)
OF_PLUGINS: Final = "plugin_"
"""How attributes for parameters of plugins begin, whose names in a body may be any text."""
MOST_COMPARED: Final = 64
"""Characters of a name that is compared with those that there are: it takes time with the square of them."""
LONE_SURROGATE: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]..)"
)
"""In JSON: one escape of a pair that makes a character, without the other."""
MOST_NESTED: Final = 16
"""Lists and objects within each other in a parameter of a plugin at most."""


def with_parameters(kind: type[S], parameters: Sequence[Parameter]) -> type[S]:
    """The body `kind` with a field for each parameter that plugins of the engine bring."""
    if not parameters:
        return kind
    names = {f"{OF_PLUGINS}{place}": one.name for place, one in enumerate(parameters)}
    described = [msgspec.Meta(description=f"{one.doc} Wanted: {one.wanted}.") for one in parameters]
    fields = [(name, Annotated[Any, meta], None) for name, meta in zip(names, described, strict=True)]
    made: Any = msgspec.defstruct(
        kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True, rename=names, module=__name__
    )
    return made  # type: ignore[no-any-return]


def refuse_taken(names: Iterable[str]) -> None:
    """Raise `ConfigError` where a parameter of a plugin is called like a field of a body, and could not be given."""
    taken = {field.encode_name for kind in TEXT_BODIES for field in msgspec.structs.fields(kind)}
    both = sorted(taken.intersection(names))
    if both:
        raise ConfigError(
            f"plugins bring request parameters called {', '.join(both)}, as fields of HTTP bodies are; rename them in the plugins"
        )


def _extra(body: Sampling) -> dict[str, Any]:
    """What a body gives of plugins' parameters, by name; null is nothing. The engine, which knows its plugins, checks values."""
    found: dict[str, Any] = {}
    for attribute, name in zip(body.__struct_fields__, body.__struct_encode_fields__, strict=True):
        value = getattr(body, attribute) if attribute.startswith(OF_PLUGINS) else None
        if value is None:
            continue
        if not _fits(value, MOST_NESTED):
            raise RequestError(
                f"{name} has a number of more than 64 bits, or more than {MOST_NESTED} lists and objects within each other; "
                "correct the request",
                name,
            )
        found[name] = value
    return found


def _fits(value: Any, depth: int) -> bool:
    """Whether a value of JSON can be sent to the engine and told of in a sentence."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return within is None or (depth > 0 and all(_fits(one, depth - 1) for one in within))


Body = CompletionRequest | ChatRequest | ResponsesRequest | TokenizeRequest | DetokenizeRequest | UpdateWeightsRequest


def decode(data: bytes, kind: type[Any]) -> Any:
    """A body as a record of `kind`. Raises `RequestError` for anything else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(*_sentence(str(error), kind)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        alone = _lone_surrogate(data, str(error))
        if alone:
            raise RequestError(
                f"the body has the lone surrogate {alone}, which is half of a character, wanted both halves; send both, or UTF-8"
            ) from error
        raise RequestError(f"the body is no JSON: {error}; send one JSON object") from error


def _lone_surrogate(data: bytes, message: str) -> str:
    """The escape that msgspec's message is about, where it is half of a character: it says so of some with the place behind it,
    and of one at the very end that the body was cut off."""
    place = re.search(r"surrogate.* \(byte (\d+)\)", message)
    if place is None and "truncated" not in message:
        return ""
    end = int(place[1]) if place else len(data)
    found = LONE_SURROGATE.search(data, max(end - 32, 0), end + 6)
    return found[1].decode(errors="replace") if found else ""


WHERE: Final = re.compile(r" - at `\$\.?([^`]*)`$")
"""At the end of msgspec's message: where in a body it is."""
MISSING: Final = re.compile(r"^Object missing required field `([^`]*)`")


def _sentence(message: str, kind: type[Any]) -> tuple[str, str]:
    """What is wrong with a body, and with which field of it."""
    mark, end = "unknown field `", message.rfind("`")
    start = message.find(mark) + len(mark)
    if start < len(mark):
        found = WHERE.search(message), MISSING.match(message)
        path = [part[1] for part in found if part is not None and part[1]]
        return f"the request is wrong: {message}; correct it", ".".join(path).replace("[...]", "")
    # Where the field is: behind it stands " - at `$.stream_options`", or nothing.
    whole, _, place = message[start:end].rpartition("` - at `$.")
    unknown, within = (whole, _named(kind, place)) if whole and _named(kind, place) else (message[start:end], kind)
    known = [field.encode_name for field in msgspec.structs.fields(within)]
    near = difflib.get_close_matches(unknown, known, 1) if len(unknown) <= MOST_COMPARED else []
    hint = f"did you mean {near[0]!r}? " if near else ""
    where = f" of {place}" if within is not kind else ""
    said = f"unknown parameter {shortened(unknown, MOST_COMPARED)!r}{where}; {hint}known: {', '.join(known)}"
    return said, shortened(f"{place}.{unknown}" if within is not kind else unknown, MOST_COMPARED)


def _named(kind: type[Any], name: str) -> Any:
    """The record at the place `name` of a body, such as `tools[0].function`; None where there is none."""
    found: Any = kind
    for part in re.sub(r"\[[^]]*\]", "", name).split("."):
        types = [one for field in msgspec.structs.fields(found) if field.encode_name == part for one in _within(field.type)]
        found = next((one for one in types if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)
        if found is None:
            return None
    return found


def _within(kind: Any) -> list[Any]:
    """A type and all types that it is made of."""
    return [kind, *(one for part in get_args(kind) for one in _within(part))]


def sampling_params(body: Sampling, *, default_max: int, most: int) -> dict[str, Any]:
    """Fields of `SamplingParams` for a body. `default_max`: tokens where it names none; `most`: what the server allows, 0 for
    no limit of its own. OpenAI's default temperature is 1."""
    newer = getattr(body, "max_completion_tokens", None)
    if newer and body.max_tokens and newer != body.max_tokens:
        raise RequestError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {newer}, wanted one length; leave out max_tokens, "
            "which is the older name",
            "max_tokens",
        )
    asked = newer or body.max_tokens or default_max
    if most and asked > most:
        raise RequestError(f"max_tokens is {asked}, wanted at most {most} on this server; ask for fewer", "max_new_tokens")
    params: dict[str, Any] = {"max_new_tokens": asked, "temperature": 1.0 if body.temperature is None else body.temperature}
    for name in (
        "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p", "repetition_penalty", "min_tokens",
        "ignore_eos", "stop_token_ids", "bad_words", "reply_budget", "reply_start_token_ids", "skip_special_tokens",
    ):  # fmt: skip
        value = getattr(body, name)
        if value is not None:
            params[name] = value
    if body.top_k == -1:
        params["top_k"] = 0
    for ours, theirs in TWO_NAMES.items():
        limit = _of_two_names(body, ours, theirs)
        if limit is not None:
            params[ours] = limit
    if body.stop is not None:
        params["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    extra = _extra(body)
    if extra:
        params["extra"] = extra
    constraint = _constraint(body)
    if constraint:
        params["constraint"] = constraint
    SamplingParams.from_mapping(params)  # refused here, what is wrong costs the engine nothing
    return params


TWO_NAMES: Final[Mapping[str, str]] = {"max_drafts": "num_speculative_tokens", "thinking_limit": "thinking_token_budget"}
"""Limits that vLLM has under another name."""


def _of_two_names(body: Sampling, our: str, their: str) -> int | None:
    """A limit by either of its names."""
    ours: int | None = getattr(body, our)
    theirs: int | None = getattr(body, their)
    if ours is not None and theirs is not None and ours != theirs:
        raise RequestError(
            f"{our} is {ours} and {their} is {theirs}, two names of one limit, wanted one number; leave out one of them", their
        )
    return theirs if ours is None else ours


STRUCTURED: Final = ("json", "regex", "choice", "grammar", "json_object")
"""Keys of `structured_outputs`; all but the last have an older name, too: `guided_json`."""


def _constraint(body: Sampling) -> dict[str, Any] | None:
    """What `response_format`, `structured_outputs` or a `guided_` field binds the output to."""
    asked: dict[str, dict[str, Any]] = {}
    """Keys of `structured_outputs` and their values, by the field that brings them."""
    for kind in STRUCTURED:
        value = getattr(body, f"guided_{kind}", None)
        if value is not None:
            asked[f"guided_{kind}"] = {kind: value}
    if body.structured_outputs is not None:
        asked["structured_outputs"] = body.structured_outputs
    form = body.response_format
    bound = ["response_format"] if form is not None and form.type != "text" else []
    if len(asked) + len(bound) > 1:
        names = [*asked, *bound]
        raise RequestError(f"{' and '.join(names)} bind one text, wanted one of them; leave out the others", names[0])
    for name, structured in asked.items():
        return _structured(name, structured)
    if form is None or not bound:
        return None
    if form.type == "json_object":
        return {"json_object": True}
    schema = (form.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise RequestError(
            "response_format is json_schema without a schema, wanted json_schema.schema; add it", "response_format.json_schema"
        )
    return {"json_schema": _text(schema)}


def _structured(name: str, structured: Mapping[str, Any]) -> dict[str, Any]:
    """What an object like `structured_outputs`, which the field `name` brings, binds the output to."""
    if len(structured) != 1 or not set(structured) <= set(STRUCTURED):
        raise RequestError(
            f"{name} is {structured!r}, wanted an object with one of {', '.join(STRUCTURED)}; correct the request", name
        )
    ((kind, value),) = structured.items()
    if kind == "json" and isinstance(value, dict):
        return {"json_schema": _text(value)}
    if kind == "json_object" and value is True:
        return {"json_object": True}
    if kind == "choice" and isinstance(value, list) and value and all(isinstance(one, str) and one for one in value):
        return {"lark": "start: " + " | ".join(map(json.dumps, value))}
    if kind in ("json", "regex", "grammar") and isinstance(value, str):
        return {"json_schema" if kind == "json" else kind: value}
    wanted = {"json": "a schema as an object or a text", "choice": "texts that are not empty", "json_object": "true"}
    raise RequestError(f"the {kind} of {name} is {value!r}, wanted {wanted.get(kind, 'a text')}; correct the request", name)


def _text(schema: dict[str, Any]) -> str:
    """A schema as it goes to the engine: its numbers may be larger than any that the wire has. Its properties keep their order,
    in which they are then written."""
    return json.dumps(schema)


NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "suffix": ("",),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "truncation": ("disabled",),
    "include": ([],),
    "max_tool_calls": (),
    "include_stop_str_in_output": (False,),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "priority": (0,),
}
"""Values, besides null, of fields that this server knows the names of alone: those that ask for what it does anyway."""


def refuse_unsupported(body: CompletionRequest | ChatRequest | ResponsesRequest) -> None:
    """Raises `RequestError` for what OpenAI's and vLLM's interfaces know and this server does not."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise RequestError("stream_options was given without stream; add stream: true", "stream_options")
    given = [(name, getattr(body, name, None), values) for name, values in NEUTRAL.items()]
    given.append(("best_of", getattr(body, "best_of", None), (body.n or 1,)))
    given.append(("stream_options.include_obfuscation", options.include_obfuscation if options else None, (False,)))
    for name, value, values in given:
        if value is not None and value not in values:
            wanted = " or ".join(map(json.dumps, values))
            wanted = f"wanted {wanted}, or nothing" if values else "wanted nothing"
            raise RequestError(f"{name} is {value!r}, which this server does not do, {wanted}; leave it out", name)


SPELLED: Final[Mapping[str, tuple[str, ...]]] = {
    "max_new_tokens": ("max_output_tokens", "max_completion_tokens", "max_tokens"),
    **{ours: (ours, theirs) for ours, theirs in TWO_NAMES.items()},
    "constraint": (
        "structured_outputs",
        *(f"guided_{kind}" for kind in STRUCTURED[:-1]),
        "response_format",
        "text",
        "tool_choice",
        "tools",
    ),
    "logprobs": ("top_logprobs", "logprobs"),
    "prompt_logprobs": ("prompt_logprobs", "logprobs"),
    "prompt": ("messages", "input", "prompt"),
    "messages": ("input", "messages"),
    "reasoning_effort": ("reasoning", "reasoning_effort"),
    "verbosity": ("text", "verbosity"),
    "response_format": ("text", "response_format"),
    "response_format.json_schema": ("text", "response_format.json_schema"),
    "n": ("n", "prompt"),
}
"""Fields of bodies, by what `SamplingParams` and the engine call them."""


def field(body: Any, param: str) -> str:
    """The field of a body that brought the engine's parameter `param`: the first that it has, else the last."""
    names = SPELLED.get(param, (param,))
    return next((name for name in names if getattr(body, name, None) is not None), names[-1])


@contextlib.contextmanager
def named(body: Any) -> Iterator[None]:
    """Have a `RequestError` from inside name the field of the body that it is about."""
    try:
        yield
    except RequestError as error:
        error.param = field(body, error.param)
        raise


def template_variables(body: ChatRequest, known: Collection[str]) -> dict[str, Any]:
    """What a body gives the chat template, which reads the variables `known`; `RequestError` for what it would not read."""
    given = dict(body.chat_template_kwargs or {})
    for name in given:
        if name not in known or name in OF_TEMPLATES:
            wanted = ", ".join(name for name in SWITCHES if name in known) or "none"
            raise RequestError(
                f"chat_template_kwargs has {shortened(name, MOST_COMPARED)!r}, which the model's chat template does not read, "
                f"wanted variables of it (switches of reasoning that it has: {wanted}); leave it out",
                "chat_template_kwargs",
            )
    effort = body.reasoning_effort
    if effort is None:
        return given
    if EFFORT in known:
        return {EFFORT: effort, **given}
    switches = [name for name in SWITCHES if name in known and name != EFFORT]
    if effort == "none" and switches:
        return {**dict.fromkeys(switches, False), **given}
    switched = f', wanted "none", which {switches[0]}: false stands for' if switches else ", wanted nothing"
    raise RequestError(
        f"reasoning_effort is {effort!r}, and the model's chat template does not read it{switched}; leave it out", EFFORT
    )


EFFORT: Final = "reasoning_effort"
SWITCHES: Final = ("enable_thinking", "thinking", EFFORT)
"""Variables by which chat templates switch reasoning."""
OF_TEMPLATES: Final = frozenset({"messages", "tools", "add_generation_prompt"})
"""Variables that fields of a body have."""


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    """One prompt a text: a string, ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list, wanted a text, token ids, or a list of either; add one", "prompt")
    if all(isinstance(one, str) for one in prompt):
        return list(prompt)
    several: list[Any] = prompt if all(isinstance(one, list) for one in prompt) else [prompt]
    for ids in several:
        if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in ids):
            raise RequestError("prompt is a list of neither texts nor token ids; correct it", "prompt")
    return [list(ids) for ids in several]


def with_seeds(params: Mapping[str, Any], seed: int | None, count: int) -> list[dict[str, Any]]:
    """The parameters of `count` texts of one prompt: their seeds count up from the given one. The engine's seeds are the numbers
    of 64 bits from 0 on; OpenAI's interface has those with a sign, and a negative one is taken for the one with the same bits."""
    if seed is None:
        return [dict(params) for _ in range(count)]
    if not -(2**63) <= seed < 2**64:
        raise RequestError(f"seed is {seed}, wanted a whole number from -2**63 to 2**64 - 1; correct the request", "seed")
    return [{**params, "seed": (seed + i) % 2**64} for i in range(count)]
