"""The work of the server: bodies become jobs, jobs are served by the engine, and its deltas become answers.

The routes call it. It checks and shapes; it opens no socket, and no client can hold the engine up through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse

from polydraft._version import __version__
from polydraft.errors import CheckpointError, ConfigError, PolydraftError, RequestError
from polydraft.models.chat_template import ChatTemplate
from polydraft.models.tokenizer import Tokenizer
from polydraft.serving import protocol, reasoning, responses, tool_calls, tools, wire
from polydraft.serving.answers import Choice, Said, TokenTexts, usage
from polydraft.serving.connection import LIMITS, Connections
from polydraft.serving.engine_client import AnyClient, Busy, EngineGone, Overrun
from polydraft.serving.http import EventStream, Gone, HttpError, until_gone
from polydraft.serving.logs import Log
from polydraft.serving.markers import choose
from polydraft.serving.metrics import Metrics
from polydraft.serving.reasoning import ReasoningForm, ReasoningReader
from polydraft.serving.settings import ServerSettings
from polydraft.serving.tool_calls import Call, CallForm, CallReader

T = TypeVar("T")

STATES = ("starting", "ok", "stalled", "asleep", "lost", "restarting", "draining", "failed", "stopped")
LARGE_BYTES = 1 << 17
"""Of a body whose text may take some tenths of a second to become tokens."""
COMPLETION_TOKENS = 16
"""Of a completion that names no length, as OpenAI has it."""


@dataclass
class Job:
    """One request on its way: what to ask the engine, and what the answer looks like."""

    id: str
    kind: str
    """`text_completion`, `chat.completion` or `response`."""
    body: protocol.CompletionRequest | protocol.ChatRequest
    choices: list[Choice]
    asks: list[tuple[list[int], dict[str, Any]]]
    num_prompts: int
    top: int | None
    """Most likely tokens beside each in the answer's `logprobs`; None: no `logprobs`."""
    response: responses.ResponseAnswer | None = None
    """Of a `response`, what is made of the text."""
    created: int = field(default_factory=lambda: int(time.time()))
    begin: float = field(default_factory=time.monotonic)


class Service:
    """What the routes share. `connections`: those of clients, where this process has them, and not a proxy in front of it.
    `replica`: what metrics call this one of several."""

    def __init__(
        self, settings: ServerSettings, client: AnyClient, connections: Connections | None, log: Log, *, replica: str = ""
    ) -> None:
        self.settings, self.client, self.connections, self.log, self._replica = settings, client, connections, log, replica
        self._large = asyncio.Lock()
        self.draining = self.opened = False
        """Whether the server ends; whether there is all that requests need."""
        self._tokenizer: Tokenizer | None = None
        self._template = _template(settings.chat_template)
        self._reasoning: ReasoningForm | None = None
        self._calls: CallForm | None = None
        self.chosen: Mapping[str, str] = {}
        """What was chosen by the chat template, or asked for, by the option's name; there once the server is open."""
        self.bodies: Mapping[type[protocol.Sampling], type[protocol.Sampling]] = {}
        """The bodies of the completions routes, with a field for each parameter that the engine's plugins bring."""

    @property
    def state(self) -> str:
        """`ok` where requests are served; else why not: `draining`, `asleep`, `lost`, `stalled`, or the state of the engine's
        client."""
        if self.draining:
            return "draining"
        if self.client.state != "ready":
            return self.client.state
        if self.client.asleep:
            return "asleep"
        if self.client.lost:
            return "lost"
        return "stalled" if self.client.stalled else "ok" if self.opened else "starting"

    async def open(self) -> None:
        """Start the engine and read what the HTTP side needs of the model."""
        await self.client.start()
        ready = self.ready
        self.device_times = ready.device_times
        self._tokenizer = await asyncio.to_thread(Tokenizer.from_dir, ready.model_dir)
        self.name = self.settings.served_model_name or ready.model
        self.metrics = self._metrics()
        self.bodies = {kind: protocol.with_parameters(kind, ready.parameters) for kind in protocol.TEXT_BODIES}
        self.texts = TokenTexts(self._tokenizer)
        self._template = self._template or self._tokenizer.chat_template
        if self._template is not None:
            self._template.compile()
        source = self._template.source if self._template is not None else ""
        self._reasoning, why = choose(self.settings.reasoning_parser, reasoning.FORMS, source)
        self._calls, how = choose(self.settings.tool_call_parser, tool_calls.FORMS, source)
        self.chosen = {"reasoning_parser": why, "tool_call_parser": how}
        self.opened = True
        digest = {"weights_digest": ready.weights_digest} if ready.weights_digest else {}
        self.log.tell("ready", model=self.name, backend=ready.backend, host=self.settings.host, **digest, **self.chosen)

    def _metrics(self) -> Metrics:
        """With the figures of the server itself."""
        made, connections = Metrics(self.name, self._replica), self.connections
        gauges = [*self.client.gauges(), ("log_lines_lost", "Lines that could not be written.", lambda: self.log.lost)]
        if connections is not None:
            gauges += [
                ("connections", "Connections of clients.", lambda: connections.open),
                ("connections_idle", "Those of them without a request.", lambda: len(connections.idle)),
            ]
            ended = {limit: partial(connections.ended.__getitem__, limit) for limit in LIMITS}
            made.gauge("polydraft:connections_ended", "Connections that a limit ended, by the limit.", ended, "limit")
        for name, text, read in gauges:
            made.gauge(f"polydraft:{name}", text, {"": read})
        states = {state: partial(self._is, state) for state in STATES}
        made.gauge("polydraft:server_state", "1 for the state that /ready tells.", states, "state")
        return made

    def _is(self, state: str) -> bool:
        return self.state == state

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model; there once the server is open."""
        assert self._tokenizer is not None, "routes are served behind `open` only"
        return self._tokenizer

    @property
    def ready(self) -> wire.Ready:
        """What the engine said of itself; there once the server is open."""
        assert self.client.ready is not None, "routes are served behind `open` only"
        return self.client.ready

    # -- from a body to a job ----------------------------------------------------------------------
    async def made(self, make: Callable[[Any], T], body: Any, size: int) -> T:
        """What `make` makes of a body of `size` bytes, on another thread. Large ones, whose texts may take long to become tokens,
        wait for each other, and nobody else for them."""
        async with self._large if size > LARGE_BYTES else contextlib.nullcontext():
            return await asyncio.to_thread(make, body)

    def completion(self, body: protocol.CompletionRequest) -> Job:
        """The job of a completion."""
        protocol.refuse_unsupported(body)
        self.check_model(body.model)
        given = protocol.prompts_of(body.prompt)
        self._check_count(len(given) * (body.n or 1))  # before any of them becomes tokens
        most = self.settings.max_new_tokens
        params = protocol.sampling_params(body, default_max=min(COMPLETION_TOKENS, most or COMPLETION_TOKENS), most=most)
        if body.logprobs is not None or body.provenance:
            params["logprobs"] = body.logprobs or 0
        if body.echo and body.logprobs is not None:
            params["prompt_logprobs"] = body.logprobs
        prompts = [self._encoded(body, one) if isinstance(one, str) else one for one in given]
        return self._job("text_completion", "cmpl", body, prompts, params, body.logprobs)

    def _encoded(self, body: protocol.Sampling, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text, `special` ones with it where the body does not say; as many as may be of use."""
        asked = special if body.add_special_tokens is None else body.add_special_tokens
        most = self.ready.max_model_len if body.truncate_prompt_tokens is None else None
        return self.tokenizer.encode(text, add_special_tokens=asked, most=most)

    def chat(self, body: protocol.ChatRequest) -> Job:
        """The job of a conversation."""
        protocol.refuse_unsupported(body)
        self.check_model(body.model)
        self._check_count(body.n or 1)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs was given without logprobs; add logprobs: true", "top_logprobs")
        offered = tools.offered(body, self._calls, self._template.variables if self._template is not None else ())
        rendered = self.rendered(body, offered)
        prompt = self._encoded(body, rendered, special=False)
        kept = min(len(prompt), body.truncate_prompt_tokens or len(prompt))
        room = max(self.ready.max_model_len - kept, 1)
        params = protocol.sampling_params(body, default_max=room, most=0)
        if self.settings.max_new_tokens:
            asked = body.max_completion_tokens or body.max_tokens
            params |= protocol.sampling_params(body, default_max=self.settings.max_new_tokens, most=self.settings.max_new_tokens)
            params["max_new_tokens"] = min(params["max_new_tokens"], room) if asked is None else params["max_new_tokens"]
        if body.logprobs or body.provenance:
            params["logprobs"] = body.top_logprobs or 0
        top = (body.top_logprobs or 0) if body.logprobs else None
        calls = self._calls if offered else None
        if calls is not None:
            answer = params.get("constraint")
            grammar = tools.bound(body, offered, calls, self.tokenizer.added_id, answer)
            if grammar is not None:
                params["constraint"] = {"lark": grammar}
        # A constraint binds a text from its first token on, where the engine does not know what ends reasoning.
        thinks = self._reasoning if self.ready.thinks or "constraint" not in params else None
        markers = (*(calls.markers if calls is not None else ()), *(thinks.markers if thinks is not None else ()))
        ids = map(self.tokenizer.added_id, markers)
        if body.skip_special_tokens is None and any(one is not None and self.tokenizer.is_special(one) for one in ids):
            params["skip_special_tokens"] = False
        job = self._job("chat.completion", "chatcmpl", body, [prompt], params, top)
        begun = thinks is not None and reasoning.begun(thinks, rendered, continued=bool(body.continue_final_message))
        for choice in job.choices:
            if thinks is not None:
                choice.reasoning = ReasoningReader(thinks, begun=begun)
            if calls is not None:
                most = 1 if body.parallel_tool_calls is False else None
                choice.calls = CallReader(calls, tools.schemas(offered), most=most)
        return job

    def response(self, body: protocol.ResponsesRequest) -> Job:
        """The job of a response."""
        protocol.refuse_unsupported(body)
        if body.weights_digests:
            raise RequestError(
                "weights_digests is true, and a response has no place for them; use /v1/chat/completions", "weights_digests"
            )
        kind: Any = self.bodies[protocol.ChatRequest]
        chat = responses.as_chat(body, kind)
        job = self.chat(chat)
        job.id, job.kind = f"resp_{body.request_id}", "response"
        job.response = responses.ResponseAnswer(body, chat, job.id, self.name, job.created)
        return job

    def rendered(self, body: protocol.ChatRequest | protocol.TokenizeRequest, offered: Sequence[protocol.Tool] = ()) -> str:
        """The text of a conversation, open at its end where its last message is to be gone on with."""
        if self._template is None:
            missing = "this model has no chat template; use /v1/completions, or start the server with --chat-template"
            raise RequestError(missing, "messages")
        plain = [_plain_message(message, self._calls) for message in body.messages or ()]
        for message in plain:
            if message.get("role") == "developer" and "developer" not in self._template.source:  # OpenAI's newer name
                message["role"] = "system"
        if not isinstance(body, protocol.ChatRequest):
            return self._template.render(plain)
        continues = bool(body.continue_final_message)
        header = not continues if body.add_generation_prompt is None else body.add_generation_prompt
        if continues and header:
            both = "continue_final_message and add_generation_prompt are both true, wanted one of them at most; leave one out"
            raise RequestError(both, "continue_final_message")
        variables = protocol.template_variables(body, self._template.variables)
        end = uuid.uuid4().hex if continues else ""
        """Stands where the last message ends: its own words may occur in what the template puts behind it."""
        if end and plain:
            plain[-1]["content"] = (plain[-1].get("content") or "") + end
        shown = tools.shown(offered)
        text = self._template.render(plain, tools=shown, add_generation_prompt=header, variables=variables)
        if end not in text:
            left_out = "the chat template leaves the last message out, so nothing can go on with it; leave this out"
            raise RequestError(f"continue_final_message is true, but {left_out}", "continue_final_message")
        return text.rpartition(end)[0].replace(end, "") if end else text

    def tokens(self, body: protocol.TokenizeRequest) -> list[int]:
        """Those of a prompt or a conversation."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("wanted either prompt or messages; give exactly one of them")
        if body.messages is not None:
            return self.tokenizer.encode(self.rendered(body), add_special_tokens=False)
        return self.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)

    def text(self, body: protocol.DetokenizeRequest) -> str:
        """That of token ids."""
        self.check_model(body.model)
        size = self.ready.vocab_size
        wrong = next((token for token in body.tokens if token >= size), None)
        if wrong is not None:
            raise RequestError(f"token {wrong} is none of this model, wanted at most {size - 1}; correct it", "tokens")
        return self.tokenizer.decode(body.tokens)

    def _job(
        self, kind: str, prefix: str, body: protocol.CompletionRequest | protocol.ChatRequest, prompts: list[list[int]],
        params: dict[str, Any], top: int | None,
    ) -> Job:  # fmt: skip
        if body.weights_digests and not self.ready.weights_digest:
            missing = "weights_digests is true, and this server digests no weights; start it with --weights-digest"
            raise RequestError(missing, "weights_digests")
        prompts = [prompt[-(body.truncate_prompt_tokens or len(prompt)) :] for prompt in prompts]
        longest, length = max(len(prompt) for prompt in prompts), self.ready.max_model_len
        if longest >= length:  # the engine would have to look at every token to say so
            raise RequestError(
                f"the prompt has {longest} tokens, wanted fewer than {length} (model length, or KV blocks); shorten it",
                "prompt",
            )
        asks = [(prompt, own) for prompt in prompts for own in protocol.with_seeds(params, body.seed, body.n or 1)]
        choices = [
            Choice(index, prompt, self.texts, skip_special_tokens=own.get("skip_special_tokens", True))
            for index, (prompt, own) in enumerate(asks)
        ]
        return Job(f"{prefix}-{body.request_id}", kind, body, choices, asks, len(prompts), top)

    def _check_count(self, count: int) -> None:
        most, admitted = self.settings.max_choices, self.settings.max_requests
        if count > most:
            raise RequestError(f"the request asks for {count} texts, wanted at most {most}; send several", "n")
        if count > admitted:  # `Busy` would say to try again, for ever
            raise RequestError(
                f"the request asks for {count} texts, wanted at most {admitted} (--max-requests); send several", "n"
            )

    def check_model(self, name: str) -> None:
        if name and name != self.name:
            said = f"model {name!r} is not served here, wanted {self.name!r}; see /v1/models"
            raise HttpError(404, said, "not_found_error", param="model")

    # -- serving a job -----------------------------------------------------------------------------
    async def updates(self, job: Job) -> AsyncGenerator[tuple[Choice, Said], None]:
        """(choice, what is new of it) as the engine brings it; counts as it goes."""
        last = dict.fromkeys(range(len(job.choices)), job.begin)
        admitted = sum(len(c.prompt_ids) for c in job.choices[:: max(len(job.choices) // job.num_prompts, 1)])
        async with contextlib.aclosing(self.client.generate(job.asks, first_s=self.settings.queue_s)) as stream:
            async for index, delta, event in stream:
                choice, now = job.choices[index], time.monotonic()
                if admitted:  # once: of a request that was not taken none are counted
                    self.metrics.prompt_tokens.inc(admitted)
                    admitted = 0
                if job.body.provenance:
                    choice.time(event.step_ms, event.host_gap_ms, event.spans)
                fresh, count = not choice.token_ids, len(delta.token_ids)
                said = choice.feed(delta, event.weights_digest)
                if count:
                    self.metrics.generation_tokens.inc(count)
                    if fresh:
                        self.metrics.ttft.observe(now - job.begin)
                    else:
                        self.metrics.itl.observe((now - last[index]) / count)
                    last[index] = now
                if delta.finish:
                    self.metrics.e2e.observe(now - job.begin)
                    self.metrics.ended(delta.finish, len(choice.prompt_ids), len(choice.token_ids))
                if delta.finish == "refused":
                    raise RequestError(delta.error, "constraint")
                if delta.finish == "error":
                    raise HttpError(500, f"the text ended with an error: {delta.error}", "server_error")
                yield choice, said

    async def whole(self, job: Job) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        answer = job.response
        async with contextlib.aclosing(self.updates(job)) as stream:
            async for _, said in stream:
                if answer is not None:
                    answer.take(said)
        if answer is not None:
            return answer.whole(job.choices[0])
        choices = [self._choice(job, choice) for choice in job.choices]
        return {**self._head(job), "choices": choices, "usage": self._usage(job), **self._prompt_ids(job)}

    def _usage(self, job: Job) -> dict[str, Any]:
        return usage(job.choices, job.num_prompts)

    def _head(self, job: Job, *, chunk: bool = False) -> dict[str, Any]:
        kind = f"{job.kind}.chunk" if chunk and job.kind == "chat.completion" else job.kind
        return {"id": job.id, "object": kind, "created": job.created, "model": self.name, "system_fingerprint": self._fingerprint}

    @property
    def _fingerprint(self) -> str:
        """What computes: the version, and the weights where they are digested."""
        digest = self.ready.weights_digest
        return f"{__version__}+{digest}" if digest else __version__

    def _choice(self, job: Job, choice: Choice) -> dict[str, Any]:
        places = choice.new_tokens()
        fields: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": None}
        if job.kind == "chat.completion":
            said = choice.said
            content = said.content or (None if said else "")
            fields["message"] = {"role": "assistant", "content": content, "refusal": None, **_beside(said)}
        else:
            fields["text"] = self._echo(job, choice) + choice.text
        return {**fields, **self._extras(job, choice, places, first=True)}

    def _extras(self, job: Job, choice: Choice, places: range, *, first: bool) -> dict[str, Any]:
        """Log probabilities and provenance of some tokens, where they were asked for."""
        fields: dict[str, Any] = {}
        if job.top is not None and job.kind == "chat.completion":
            fields["logprobs"] = choice.chat_logprobs(places, job.top)
        elif job.top is not None:
            echo = choice.prompt_logprobs(job.top) if first and getattr(job.body, "echo", None) else {}
            new = choice.completion_logprobs(places, job.top)
            fields["logprobs"] = {name: [*echo.get(name, ()), *values] for name, values in new.items()}
        if job.body.provenance:
            fields["provenance"] = choice.provenance(places)
        if job.body.weights_digests:
            fields["weights_digests"] = choice.weights_digests(places)
        if job.body.return_token_ids:
            fields["token_ids"] = [choice.token_ids[place] for place in places]
            if first and job.kind == "text_completion":
                fields["prompt_token_ids"] = choice.prompt_ids
        return fields

    @staticmethod
    def _prompt_ids(job: Job) -> dict[str, Any]:
        """Of a conversation, beside its choices, where vLLM has them; a completion's choices have their own."""
        asked = job.body.return_token_ids and job.kind == "chat.completion"
        return {"prompt_token_ids": job.choices[0].prompt_ids} if asked else {}

    def _echo(self, job: Job, choice: Choice) -> str:
        echo = bool(getattr(job.body, "echo", None))
        return choice.prompt_text() if echo else ""

    async def chunks(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream. An `echo` waits for its first delta; one that brings nothing to tell is left out."""
        head, chat = self._head(job, chunk=True), job.kind == "chat.completion"
        options = job.body.stream_options
        with_usage = options is not None and options.include_usage
        continuous = options is not None and options.include_usage and bool(options.continuous_usage_stats)
        rest: dict[str, Any] = {"usage": None} if with_usage else {}
        begun: set[int] = set()
        async with contextlib.aclosing(self.updates(job)) as stream:
            async for choice, said in stream:
                first, places = choice.index not in begun, choice.new_tokens()
                begun.add(choice.index)
                if not (said or places or choice.finish):
                    continue
                fields: dict[str, Any] = {"index": choice.index, "logprobs": None}
                fields["finish_reason"] = choice.finish_reason
                if chat:
                    content = {} if said and not said.content else {"content": said.content}
                    fields["delta"] = ({"role": "assistant"} if first else {}) | _beside(said, pieces=True) | content
                else:
                    fields["text"] = (self._echo(job, choice) if first else "") + said.content
                fields |= self._extras(job, choice, places, first=first)
                if job.body.provenance:
                    fields["timing"] = {**choice.take_timing(), "device_times": self.device_times}
                rest |= {"usage": usage([choice], 1)} if continuous else {}
                yield {**head, "choices": [fields], **rest, **(self._prompt_ids(job) if first else {})}
        if with_usage:
            yield {**head, "choices": [], "usage": self._usage(job)}
        self._ended(job, 200)

    async def _events(self, job: Job, answer: responses.ResponseAnswer) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a response, the first of which comes with its first text."""
        begun = False
        async with contextlib.aclosing(self.updates(job)) as stream:
            async for _, said in stream:
                for event in (*(() if begun else answer.begin()), *answer.feed(said)):
                    yield event
                begun = True
        for event in answer.end(job.choices[0]):
            yield event
        self._ended(job, 200)

    async def answer(self, request: Request, job: Job) -> Any:
        """Serve a job; the first delta (or error) is waited for, so that what goes wrong before it has its own status."""
        if not job.body.stream:
            answer = await self._while_wanted(request, job, self.whole(job))
            self._ended(job, 200)
            return JSONResponse(answer)
        events = self.chunks(job) if job.response is None else self._events(job, job.response)
        try:
            first = await self._while_wanted(request, job, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(
            _chained(first, events), describe=partial(self._describe, job),
            gone=lambda: self.log.tell("client_gone", path=request.url.path, **self._abandoned(job)),
            typed=job.response is not None,
        )  # fmt: skip

    async def _while_wanted(self, request: Request, job: Job, work: Awaitable[T]) -> T:
        """The result of work for a job, unless the client goes away."""
        try:
            return await until_gone(request, work)
        except Gone as gone:
            raise Gone(**self._abandoned(job)) from gone

    def _abandoned(self, job: Job) -> dict[str, Any]:
        """Count the texts that ended because their client went away; returns what the log says of the request."""
        for choice in job.choices:
            if not choice.finish:
                self.metrics.ended("abort", len(choice.prompt_ids), len(choice.token_ids))
        return {"id": job.id, "completion_tokens": sum(len(choice.token_ids) for choice in job.choices)}

    def _ended(self, job: Job, status: int, error: str = "") -> None:
        counts = usage(job.choices, job.num_prompts)
        self.log.tell(
            "request", id=job.id, kind=job.kind, status=status, ms=round(1000 * (time.monotonic() - job.begin)),
            prompt_tokens=counts["prompt_tokens"], completion_tokens=counts["completion_tokens"],
            accepted=counts["completion_tokens_details"]["accepted_prediction_tokens"],
            **({"error": error} if error else {}), **self.log.texts(texts=[c.text for c in job.choices]),
        )  # fmt: skip

    def _describe(self, job: Job, error: Exception) -> dict[str, Any]:
        """The last event of a stream that broke."""
        failure = as_http(error)
        failure.param = protocol.field(job.response.body if job.response is not None else job.body, failure.param)
        self._ended(job, failure.status, self.log.sentence(str(failure), failure.kind, failure.status))
        return failure.body() if job.response is None else job.response.error(failure.body()["error"])


async def _chained(first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
    try:
        yield first
        async for event in rest:
            yield event
    finally:
        await rest.aclose()


def _beside(said: Said, *, pieces: bool = False) -> dict[str, Any]:
    """The fields of a message, or a delta, beside its content. Reasoning has vLLM's name, and the one that most clients read."""
    fields: dict[str, Any] = {}
    if said.reasoning:
        fields = {"reasoning": said.reasoning, "reasoning_content": said.reasoning}
    if said.calls:
        fields["tool_calls"] = [({"index": call.index} if pieces else {}) | _call(call) for call in said.calls]
    return fields


def _call(call: Call) -> dict[str, Any]:
    """A call, or what is new of it."""
    known = {"id": call.id, "type": "function"} if call.id else {}
    return {**known, "function": {**({"name": call.name} if call.name else {}), "arguments": call.arguments}}


def _template(file: str) -> ChatTemplate | None:
    """The template that the settings name. Raises `ConfigError` where it cannot be read, before anything is started."""
    if not file:
        return None
    try:
        template = ChatTemplate(Path(file).read_text("utf-8"), Path(file), {})
        template.compile()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {file} cannot be read: {error}; give a file in UTF-8") from error
    except CheckpointError as error:
        raise ConfigError(f"--chat-template {error}") from error
    return template


def _plain_message(message: Mapping[str, Any], calls: CallForm | None) -> dict[str, Any]:
    """A message whose content is a list of texts as one text; anything else in it is refused. Rendering asks for one."""
    if message.get("tool_calls"):
        message = tools.with_calls(message, calls)
    if message.get("reasoning") is not None and message.get("reasoning_content") is None:  # templates read the older name
        message = {**message, "reasoning_content": message["reasoning"]}
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    parts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            wrong = "a message has content that is no text, and this server reads nothing else; send text"
            raise RequestError(wrong, "messages")
        parts.append(part["text"])
    return {**message, "content": "".join(parts)}


def as_http(error: Exception) -> HttpError:
    """What an error is over HTTP."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, Busy):
        return HttpError(429, str(error), "rate_limit_error", error.retry_s)
    if isinstance(error, RequestError):
        return HttpError(400, str(error), param=error.param)
    if isinstance(error, Overrun):
        return HttpError(408, str(error), "timeout_error")
    if isinstance(error, EngineGone):
        return HttpError(503, str(error), "server_error", 2)
    if isinstance(error, asyncio.TimeoutError):
        return HttpError(503, "the request waited too long for its first token; send it again in a while", "server_error", 5)
    if isinstance(error, PolydraftError):
        return HttpError(503, str(error), "server_error", 5)
    return HttpError(500, f"unexpected {type(error).__name__}; this is a bug of the server, see its log", "server_error")
