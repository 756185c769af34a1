"""Checks a new request completely and turns it into one that the engine can serve.

`Engine.add` calls `make_request`. Every refusal is one `RequestError`; nothing after this check fails because of a bad request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.errors import RequestError
from polydraft.host.request import Request
from polydraft.models.description import ModelDescription
from polydraft.models.tokenizer import Tokenizer
from polydraft.sampling.constraints import Constraints
from polydraft.sampling.processing import Processing
from polydraft.sampling.thinking_stage import ThinkingLimits
from polydraft.sampling_params import SamplingParams


@dataclass(frozen=True)
class InputProcessor:
    """What a request is measured against: the model, its tokenizer, the engine's limits and choices."""

    model: ModelDescription
    tokenizer: Tokenizer
    limits: Limits
    verify: str
    seed: int
    """Base of the seeds of requests that bring none."""
    processing: Processing
    """The stages of logits processing, and what of them the backend cannot run."""
    constraints: Constraints | None = None
    """Binds the output of requests; None in an engine that was not built for constraints."""

    def make_request(
        self, prompt: str | Sequence[int], params: SamplingParams, *, request_id: str, number: int, stream: bool
    ) -> Request:
        """Check everything and build the request. Raises `RequestError`."""
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"the parameters of a request are {params!r}, wanted SamplingParams; write SamplingParams(max_new_tokens=...), "
                "or SamplingParams.from_mapping(...) of a dictionary"
            )
        self._check_logprobs(params)
        if params.constrained and self.constraints is None:
            raise RequestError(
                "the request binds its output, but this engine was not built for it; build it with constraints=True, or serve "
                "with --constraints",
                "constraint",
            )
        stop_token_ids = self._stop_token_ids(params)
        self._check_thinking(params, stop_token_ids)
        prompt_ids = self._checked_ids(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        request = Request(
            id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            number=number,
            seed=self._seed(params, number),
            stop_token_ids=stop_token_ids,
            max_total=self._max_total(prompt_ids, params),
            prepared=self.processing.prepare(params, self.tokenizer.encode, self.limits.vocab_size),
            stream=stream,
            arrival_s=time.perf_counter(),
        )
        self.processing.check_columns(request, self.limits)
        if self.constraints is not None:  # last of all: whatever is refused has begun no work
            request.binding = self.constraints.bind(params, prompt_ids)
        return request

    def _check_logprobs(self, params: SamplingParams) -> None:
        most = self.limits.max_logprobs
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and most < 0:
                raise RequestError(
                    f"{name} is {count}, but this engine reports no log probabilities; build it with logprobs={count} or more",
                    name,
                )
            if count is not None and count > most:
                raise RequestError(
                    f"{name} is {count}, wanted at most {most} in this engine; ask for fewer, or build it with more",
                    name,
                )

    def _check_thinking(self, params: SamplingParams, stop_token_ids: Sequence[int]) -> None:
        if not params.limits_thinking:
            return
        names = "thinking_limit", "reply_budget", "reply_start_token_ids"
        name = next(name for name in names if getattr(params, name) not in (None, ()))
        if ThinkingLimits.name not in {stage.name for stage in self.processing.stages}:
            raise RequestError(f"{name} was given, but the engine does not know what ends thinking; give it think_end_ids", name)
        if params.reply_budget is not None and not stop_token_ids:
            raise RequestError(
                f"reply_budget is {params.reply_budget}, but no token ends the request; leave out ignore_eos, or name one in "
                "stop_token_ids",
                "reply_budget",
            )

    def _checked_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        try:
            ids = np.asarray(prompt)
        except ValueError:  # lists of different lengths
            ids = np.array(None)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise RequestError(
                f"prompt_ids are {type(prompt).__name__} of dtype {ids.dtype}, wanted a list of token ids; correct the request",
                "prompt",
            )
        vocab = self.model.vocab_size
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
        if wrong.size:
            raise RequestError(
                f"prompt token {int(wrong[0])} is {int(ids[wrong[0]])}, wanted an id from 0 to {vocab - 1}; use this model's "
                "tokenizer",
                "prompt",
            )
        return tuple(int(i) for i in ids)

    def _max_total(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> int:
        limits = self.limits
        if not prompt_ids:
            raise RequestError("the prompt is empty, wanted at least one token; add text or a beginning-of-text token", "prompt")
        if len(prompt_ids) >= limits.max_len:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, wanted fewer than {limits.max_len} (model length, one token of "
                "output included); shorten it",
                "prompt",
            )
        total = min(len(prompt_ids) + params.max_new_tokens, limits.max_len)
        need = -(-total // limits.block_size)
        if need > limits.num_blocks:
            raise RequestError(
                f"the request may grow to {total} tokens = {need} KV blocks, the pool has {limits.num_blocks}; raise "
                "--num-blocks or ask for fewer tokens",
                "max_new_tokens",
            )
        return total

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self.model.eos_token_ids
        ids = tuple(dict.fromkeys((*own, *params.stop_token_ids)))
        if max(ids, default=0) >= self.model.vocab_size:
            raise RequestError(
                f"stop token id {max(ids)} is none of this model, wanted at most {self.model.vocab_size - 1}; correct the "
                "request",
                "stop_token_ids",
            )
        if self.verify == "greedy" and params.temperature > 0:
            wanted = "wanted 0 under --verify greedy; use --verify coupled"
            raise RequestError(f"temperature is {params.temperature}, {wanted}", "temperature")
        return ids

    def _seed(self, params: SamplingParams, number: int) -> tuple[int, int]:
        seed = params.seed if params.seed is not None else self.seed + number
        return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
