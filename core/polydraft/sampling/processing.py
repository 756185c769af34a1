"""Logits processing: the stages between the model's logits and the choice of a token, each with the columns it reads.

The runner appends the stages to every kind of step in which some request wants one; the input processor asks each what a request
needs. Stages of plugins (`polydraft_parameters`) come after those of core, in the order of registration, and are no different.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.errors import ConfigError, PluginError, RequestError
from polydraft.plugins.checks import check_result, named
from polydraft.program.columns import check_value
from polydraft.program.declare import Admission, Column, LogitRows, LogitsStage, Parameter, StepBuffer, wrong_declaration
from polydraft.sampling_params import MAX_BAD_WORDS, MAX_BIASES, SamplingParams
from polydraft.sentinels import NO_TOKEN

if TYPE_CHECKING:
    from polydraft.host.request import Request
    from polydraft.program.program import ProgramBuilder

Encode = Callable[[str], list[int]]


class Stage:
    """What most stages have: no parameters of their own, and nothing to check beyond `SamplingParams`."""

    name = ""
    columns: tuple[Column, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    contracts: tuple[str, ...] = ()

    def prepare(self, params: SamplingParams, encode: Encode, vocab_size: int) -> Any:
        """Nothing."""

    def emit(self, rows: LogitRows) -> None:
        """Launch the stage's contracts in order."""
        for contract in self.contracts:
            rows.add(contract)


class CommittedStage(LogitsStage, Protocol):
    """A stage of core that keeps a state of what was committed."""

    @property
    def buffers(self) -> tuple[StepBuffer, ...]:
        """What it works in, besides its columns."""

    def commit(self, program: ProgramBuilder) -> None:
        """Append launches behind the commit of a step, in steps of which some request wants processing."""


class Penalties(Stage):
    """Penalties for repetition, presence and frequency."""

    name = "penalties"
    contracts = ("penalise_logits",)
    columns = (
        Column(
            "repetition_penalty", "Factor on logits of tokens in the text; 1: off.", dtype="f32", empty=1,
            value=lambda a: a.params.repetition_penalty,
        ),
        Column(
            "presence_penalty", "Taken off tokens generated before.", dtype="f32", value=lambda a: a.params.presence_penalty
        ),
        Column(
            "frequency_penalty", "Taken off for each time a token was generated.", dtype="f32",
            value=lambda a: a.params.frequency_penalty,
        ),
    )  # fmt: skip

    def wants(self, params: SamplingParams) -> bool:
        """Whether one of them is on."""
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


class LogitBias(Stage):
    """Numbers added to the logits of single tokens."""

    name = "logit_bias"
    contracts = ("bias_logits",)
    columns = (
        Column("num_biases", "Entries of the slot's table that count.", value=lambda a: len(a.params.biases)),
        Column(
            "bias_ids", "Token of each entry.", f"B {MAX_BIASES}", value=lambda a: [token for token, _ in a.params.biases],
            resets=False,
        ),
        Column(
            "biases", "Bias of each entry.", f"B {MAX_BIASES}", "f32", value=lambda a: [bias for _, bias in a.params.biases],
            resets=False,
        ),
    )  # fmt: skip

    def wants(self, params: SamplingParams) -> bool:
        """Whether there is a bias."""
        return bool(params.logit_bias)

    def prepare(self, params: SamplingParams, encode: Encode, vocab_size: int) -> None:
        """Raises `RequestError` for tokens that the model does not have."""
        del encode
        refuse_unknown("logit_bias", (token for token, _ in params.biases), vocab_size)


def _bad_words(admission: Admission) -> tuple[int, ...]:
    words: tuple[int, ...] = admission.request.prepared.get(ForbiddenTokens.name, ())
    return words


class ForbiddenTokens(Stage):
    """Tokens that may not come: stop tokens before the least length, and the ends of bad words."""

    name = "forbidden_tokens"
    contracts = ("forbid_tokens",)
    columns = (
        Column("min_tokens", "Tokens to generate before a stop token may come.", value=lambda a: a.params.min_tokens),
        Column("bad_len", "Places of the slot's table of bad words in use.", value=lambda a: len(_bad_words(a))),
        Column(
            "bad_words",
            "Runs of tokens, NO_TOKEN behind each.",
            f"B {MAX_BAD_WORDS}",
            empty=NO_TOKEN,
            value=_bad_words,
            resets=False,
        ),
    )

    def wants(self, params: SamplingParams) -> bool:
        """Whether something is forbidden."""
        return bool(params.bad_words or params.min_tokens)

    def prepare(self, params: SamplingParams, encode: Encode, vocab_size: int) -> tuple[int, ...]:
        """The table of bad words: a text as its tokens alone and as its tokens after a space, which most vocabularies write
        differently. Raises `RequestError` where it does not fit into a slot or names tokens that the model does not have."""
        words: list[tuple[int, ...]] = []
        for word in params.bad_words:
            forms = [encode(word), encode(f" {word.lstrip()}")] if isinstance(word, str) else [word]
            words += [tuple(form) for form in forms]
        table = tuple(token for word in dict.fromkeys(words) if word for token in (*word, NO_TOKEN))
        if len(table) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words take {len(table)} places (one a token and one a word), wanted at most {MAX_BAD_WORDS}; name fewer",
                "bad_words",
            )
        refuse_unknown("bad_words", table, vocab_size)
        return table


def refuse_unknown(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise `RequestError` for token ids of the parameter `name` that the model does not have."""
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise RequestError(f"{name} names token id {largest}, wanted at most {vocab_size - 1}; use this model's tokenizer", name)


def _accepts(parameter: Parameter, value: Any) -> bool:
    """Whether a parameter takes a value; one that cannot even be asked about is not taken."""
    try:
        return bool(parameter.accepts(value))
    except Exception:  # noqa: BLE001  a check that expects a number compares whatever a request brings
        return False


def _asked(stage: LogitsStage, question: Callable[[LogitsStage], Any]) -> Any:
    """What a stage answers of a request. Raises `RequestError`, also where it raises anything else."""
    try:
        return question(stage)
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"the stage {stage.name!r} cannot take the request ({type(error).__name__}: {error}); correct the request, or the "
            "plugin that brings the stage"
        ) from error


def _refuse_twins(what: str, names: Sequence[str]) -> None:
    twin = next((name for name in names if names.count(name) > 1), "")
    if twin:
        raise ConfigError(f"two {what} called {twin!r}, wanted names of their own; leave out one of the plugins, or rename one")


STAGES: tuple[LogitsStage, ...] = (Penalties(), LogitBias(), ForbiddenTokens())
"""Those of core, in the order in which they run."""


def checked_stages(brought: Iterable[tuple[str, Any]]) -> list[tuple[str, LogitsStage]]:
    """The stages that plugins bring, each with the name of its plugin. Raises `PluginError` for what is none."""
    stages: list[tuple[str, LogitsStage]] = []
    for plugin, stage in brought:
        check_result(plugin, "polydraft_parameters", stage, LogitsStage)
        wrong = wrong_declaration(stage, {"columns": Column, "parameters": Parameter, "contracts": str})
        if wrong:
            raise PluginError(f"plugin {plugin!r}: polydraft_parameters returned a stage with {wrong}; correct it")
        stages.append((plugin, stage))
    return stages


class Processing:
    """The stages of an engine: core's, those that plugins bring (`brought`, each with the name of its plugin), and core's that
    come `last` in this engine; and which of them its backend can run."""

    def __init__(
        self, provided: Collection[str], brought: Sequence[tuple[str, LogitsStage]] = (), last: Sequence[CommittedStage] = ()
    ) -> None:
        stages = (*STAGES, *(stage for _, stage in brought), *last)
        self.stages, self._plugins = stages, {stage.name: plugin for plugin, stage in brought}
        self._lacking = {
            stage.name: lacking
            for stage in stages
            if (lacking := tuple(name for name in stage.contracts if name not in provided))
        }
        _refuse_twins("stages of logits processing are", [stage.name for stage in stages])
        _refuse_twins("request parameters are", [one.name for stage in stages for one in stage.parameters])
        self.parameters = {parameter.name: parameter for stage in stages for parameter in stage.parameters}
        self.columns = tuple(column for stage in stages for column in stage.columns)
        self._committed = tuple(stage for stage in last if stage.name not in self._lacking)
        self.buffers = tuple(buffer for stage in last for buffer in stage.buffers)
        self._of_plugins = tuple(column for _, stage in brought for column in stage.columns)

    @property
    def possible(self) -> bool:
        """Whether any stage can run at all."""
        return len(self._lacking) < len(self.stages)

    def emit(self, rows: LogitRows) -> None:
        """Append every stage that the backend has the contracts for. Raises `PluginError` where one of a plugin raises."""
        for stage in self.stages:
            if stage.name not in self._lacking:
                with named(self._plugins.get(stage.name, "polydraft"), f"emit of the stage {stage.name!r}"):
                    stage.emit(rows)

    def commit(self, program: ProgramBuilder) -> None:
        """Append what the last stages do behind the commit of a step."""
        for stage in self._committed:
            stage.commit(program)

    def prepare(self, params: SamplingParams, encode: Encode, vocab_size: int) -> dict[str, Any]:
        """What the stages that a request wants keep of it, by stage; empty where it wants none. Raises `RequestError` where
        a stage refuses the request, the backend lacks a contract of it, or the request has a parameter that nobody brings."""
        self._check_extra(params)
        prepared: dict[str, Any] = {}
        for stage in self.stages:
            if not _asked(stage, lambda stage: bool(stage.wants(params))):
                continue
            if stage.name in self._lacking:
                raise RequestError(
                    f"the request wants {stage.name.replace('_', ' ')}, but this backend has no "
                    f"{', '.join(self._lacking[stage.name])}; leave it out, or use another backend"
                )
            prepared[stage.name] = _asked(stage, lambda stage: stage.prepare(params, encode, vocab_size))
        return prepared

    def check_columns(self, request: Request, limits: Limits) -> None:
        """Raise `RequestError` where a column of a plugin's stage cannot hold what the request puts there: when it is admitted,
        others are in the same step."""
        known = np.array(request.prompt_ids, np.int32)
        one = Admission(request, 0, 1, known, len(known), 0, np.empty(0, np.int32))
        for column in self._of_plugins:
            check_value(column, one, limits)

    def _check_extra(self, params: SamplingParams) -> None:
        for name, value in params.extra.items():
            parameter = self.parameters.get(name)
            if parameter is None:
                known = f"known: {', '.join(self.parameters)}" if self.parameters else "no plugin of this engine brings any"
                raise RequestError(f"the request has the parameter {name!r}, which no stage knows; {known}", name)
            if not _accepts(parameter, value):
                raise RequestError(f"{name} is {value!r}, wanted {parameter.wanted}; correct the request", name)
