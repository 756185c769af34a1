"""The offline Python interface: load once, generate many texts, optionally streaming.

Scripts and the command line use it; it drives one `Engine` to the end of the requests it was given. It does not keep finished
requests or hide an error of the engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from numbers import Integral
from typing import Any

import numpy as np

from polydraft.config import EngineConfig
from polydraft.engine import Engine, Running, SleepLevel
from polydraft.errors import ConfigError, RequestError
from polydraft.instruments.base import Instrument
from polydraft.interrupt import noted_interrupts
from polydraft.loading import Loading, unheard
from polydraft.models.checkpoint import Checkpoint
from polydraft.models.memory_checkpoint import WeightSource
from polydraft.output.request_output import RequestOutput
from polydraft.sampling_params import SamplingParams

Prompt = str | Sequence[int]


class LLM:
    """A model on a device. Keyword arguments are the fields of `EngineConfig`; an unknown one is an error. `checkpoint` stands in
    for a directory where a model is something else, such as a layer of a framework; `instruments` look at what it runs, and
    `loading` is told how far it is with weights and graphs (`polydraft.loading`). Several threads may call it, unlike an
    `Engine`: their requests are generated beside each other, and each thread takes steps in turn.

    >>> llm = LLM(draft_tokens=3)
    >>> [out.finish_reason for out in llm.generate(["def f(x):"], SamplingParams(max_new_tokens=4))]
    ['length']
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        plugin: object | None = None,
        checkpoint: Checkpoint | None = None,
        instruments: Sequence[Instrument] = (),
        loading: Loading = unheard,
        **options: Any,
    ) -> None:
        if config is not None and (options or not isinstance(config, EngineConfig)):
            raise ConfigError(
                f"LLM got {type(config).__name__} and options {sorted(options)}, wanted an EngineConfig or keyword options; "
                "give one of the two, a directory as model="
            )
        self._serve_from(
            Engine(
                config or EngineConfig.from_mapping(options),
                backend=plugin,
                checkpoint=checkpoint,
                instruments=instruments,
                loading=loading,
            )
        )

    def _serve_from(self, engine: Engine) -> None:
        self.engine = engine
        self._calls: dict[str, deque[RequestOutput]] = {}
        """By request, the outputs that its call has not handed on yet: another call may be the one that polls them."""
        self._next, self._uses = threading.Lock(), threading.Lock()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Use the engine, which one thread may at a time. Who waits for that holds `_next`, so that a thread which takes one step
        after the other has to let it in between."""
        with self._next:
            self._uses.acquire()
        try:
            yield
        finally:
            self._uses.release()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts; results in their order. A bad prompt raises `RequestError` before anything runs.

        `progress(done, total)` is called as requests end; what it raises aborts the others and is passed on. Interrupting
        (Ctrl-C) ends every request with what it has; a second time it does not wait for the end of the step."""
        many = _as_prompts(prompts)
        if progress is not None and not callable(progress):
            raise RequestError(f"progress is {progress!r}, wanted a function of requests done and of all; correct the call")
        mine: deque[RequestOutput] = deque()
        ids = self._add_all(many, params, mine, stream=False)
        done: dict[str, RequestOutput] = {}
        with closing(self._run(ids, mine)) as outputs:
            for output in outputs:
                if output.finished:
                    done[output.id] = output
                    if progress:
                        progress(len(done), len(ids))
        return [done[i] for i in ids]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Yield outputs as they come, in whole characters; the last one of each request is `finished`. Other calls may be made
        meanwhile: their requests are generated beside these."""
        mine: deque[RequestOutput] = deque()
        ids = self._add_all(_as_prompts(prompts), params, mine, stream=True)
        yield from self._run(ids, mine)

    def _add_all(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, mine: deque[RequestOutput], *,
        stream: bool,
    ) -> list[str]:  # fmt: skip
        """Have all of them generated, whose outputs then come to `mine`, or none."""
        each = list(params) if isinstance(params, Sequence) else [SamplingParams() if params is None else params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(each)} sampling parameters for {len(prompts)} prompts, wanted one for all or one each; correct the call"
            )
        ids: list[str] = []
        with self._in_turn():
            others = set(self.engine.requests)
            try:
                for prompt, own in zip(prompts, each, strict=True):
                    ids.append(self.engine.add(prompt, own, stream=stream))
            except BaseException:  # Ctrl-C as well: what stays would be generated for nobody
                for request_id in self.engine.requests.keys() - others:
                    self.engine.abort(request_id)
                self._poll(deque())
                raise
            self._calls |= dict.fromkeys(ids, mine)
        return ids

    def _run(self, all_ids: list[str], mine: deque[RequestOutput]) -> Generator[RequestOutput, None, None]:
        ids = set(all_ids)
        try:
            while ids or self.engine.checks_text:
                with noted_interrupts() as interrupted, self._in_turn():  # a step that broke off would spoil the engine
                    self.engine.refuse_resting("a text was to go on")
                    if not mine:
                        self.engine.step()
                        self._poll(mine)
                while mine:
                    output = mine.popleft()
                    if output.finished:
                        ids.discard(output.id)
                    yield output
                if interrupted():
                    yield from self._interrupt(ids, mine)
                    break
        except KeyboardInterrupt:
            yield from self._interrupt(ids, mine)
        finally:
            with self._in_turn():
                self._drop(ids)
                for request_id in all_ids:
                    del self._calls[request_id]

    def _poll(self, mine: deque[RequestOutput]) -> None:
        """Hand what the engine has to the calls that wait for it; what none waits for is `mine`."""
        for output in self.engine.poll():
            self._calls.get(output.id, mine).append(output)

    def _interrupt(self, ids: set[str], mine: deque[RequestOutput]) -> Iterator[RequestOutput]:
        """End what is left with what it has."""
        with self._in_turn():
            for request_id in sorted(ids & set(self.engine.requests)):  # others have ended, and lie in `mine`
                self.engine.abort(request_id)
            self._poll(mine)
        while mine:
            output = mine.popleft()
            ids.discard(output.id)
            yield output

    def _drop(self, ids: set[str]) -> None:
        """A caller that stops listening leaves no request behind."""
        for request_id in ids & set(self.engine.requests):
            self.engine.abort(request_id)
        if ids:
            self._poll(deque())

    def update_weights(self, source: WeightSource, *, draft: WeightSource | None = None, running: Running = "finish") -> None:
        """Replace the weights in place, as `Engine.update_weights`; results of running requests come with the next call."""
        with self._in_turn():
            self.engine.update_weights(source, draft=draft, running=running)

    def sleep(self, level: SleepLevel = 1, *, running: Running = "finish") -> None:
        """Give memory back, as `Engine.sleep`; a call of `generate` or `stream` raises `DeviceError` meanwhile."""
        with self._in_turn():
            self.engine.sleep(level, running=running)

    def wake_up(self, source: WeightSource | None = None, *, draft: WeightSource | None = None) -> None:
        """Take it again, as `Engine.wake_up`."""
        with self._in_turn():
            self.engine.wake_up(source, draft=draft)

    def close(self) -> None:
        """Give the device back; a later call of `generate` or `stream` raises `DeviceError`."""
        with self._in_turn():
            self.engine.close()

    def __enter__(self) -> LLM:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    given: object = prompts
    if not isinstance(given, Sequence) and not (isinstance(given, np.ndarray) and given.ndim):
        raise RequestError(
            f"prompts are {type(prompts).__name__}, wanted a text, a list of token ids, or a list of either; correct the call"
        )
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
