"""The configuration of an engine: one frozen record of options, most of them "auto".

The command line, `LLM` and the server build it; `resolve.py` turns it into values with reasons. It does not change after
construction and does not read the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polydraft.contracts.kv_quant import KV_DTYPES
from polydraft.contracts.layout import MAX_COLUMNS
from polydraft.contracts.packing import MADE, PARTS
from polydraft.errors import ConfigError
from polydraft.sampling_params import MAX_SEED, MOST_WHOLE

AUTO = "auto"
VERIFIERS = ("greedy", "coupled", "rejection")
GRAPH_MODES = ("off", "decode", "prefill")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_LISTS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("kernels", "plugins", "weights_ignore", "proposer_options", "mtp_options"), (str,)),
    **dict.fromkeys(("graph_sizes", "think_start_ids", "think_end_ids", "think_forced_ids"), (int,)),
    "accept_schedule": (int, float),
}
"""Options that are lists, and of what."""


@dataclass(frozen=True)
class EngineConfig:
    """Wishes for one engine. None and "auto" leave the choice to negotiation, which says what it chose and why."""

    model: str | None = None
    """Directory of the checkpoint; None is the embedded demo model."""
    backend: str = AUTO
    """Name of an installed backend; a plugin object, as tests have them, is taken as it is."""
    device: str = ""
    """Device of that backend, e.g. `cpu` or `cuda:0`; "" is its default."""
    draft_tokens: int | str = AUTO
    """K, drafts per round; 0 decodes plainly; "auto:K" lets each step make as many as pay, K at most; "auto" leaves the
    most to negotiation, and whether the number changes."""
    proposer: str = AUTO
    """mtp, eagle3, ngram, suffix, hybrid, none, or a name that a plugin registers."""
    proposer_options: tuple[str, ...] = ()
    """NAME=VALUE: numbers that adjust the proposer, by its own names; () for what it declares."""
    draft_model: str = ""
    """Directory of the draft model of a proposer that has one beside the target, as EAGLE-3 does; "" for the others."""
    draft_vocab: str = ""
    """FILE[:N]: the MTP head drafts among the N most frequent tokens that this file of counts names; "": among all of them."""
    mtp_options: tuple[str, ...] = ()
    """NAME=VALUE: conventions of the MTP head in place of those that the model's family is known for, `polydraft mtp-check` tells
    which accept most drafts; () for the family's."""
    verify: str = AUTO
    """greedy, coupled or rejection."""
    tensor_parallel: int = 1
    """Ranks that the model is split over, each on a device of its own."""
    expert_parallel: bool = False
    """Ranks keep experts whole, in place of a part of each."""
    max_num_seqs: int = 8
    """B, slots: requests decoded together."""
    max_model_len: int | str = AUTO
    """Most tokens of prompt and output together."""
    block_size: int | str = AUTO
    """Tokens of a KV block."""
    num_blocks: int | str = AUTO
    """KV blocks of the pool."""
    max_batched_tokens: int | str = AUTO
    """Rows of one step, windows and prefill chunks together."""
    overlap: int | str = AUTO
    """Steps launched before the last snapshot is read: 0, 1 or 2."""
    graph: str = AUTO
    """off, decode or prefill."""
    graph_sizes: tuple[int, ...] = ()
    """Buckets to capture: running sequences (decode) or rows (prefill); () takes the default spacing up to the largest."""
    dtype: str = AUTO
    """Activation dtype: f32, bf16 or f16."""
    kv_dtype: str = AUTO
    """How rows of keys and values are kept: auto in the activation dtype, or int8 with a scale for each row of a head."""
    weights: str = AUTO
    """How matrices are kept: auto as the checkpoint has them; int8, int4 or fp8 packs them when they are loaded."""
    weights_ignore: tuple[str, ...] = ()
    """What of them is not packed: head (the language-model head), mtp (the MTP head's matrices)."""
    invariant: bool = False
    """Ask for row-invariant arithmetic: text bit-equal for every K, batch, chunk and bucket."""
    kernels: tuple[str, ...] = ()
    """Kernel packs by name, first wins."""
    variants: str = AUTO
    """Variants of the backend's own kernels: auto adds those that the kit has passed on this device, off none."""
    plugins: tuple[str, ...] = ()
    """Plugin files or modules to load."""
    prefix_cache: bool = True
    """Share KV blocks between requests whose texts begin alike."""
    logprobs: int | None = None
    """Most likely tokens that a request may have reported beside each token, at most; 0: the token itself alone. None: this
    engine reports no log probabilities, and keeps no buffers for them."""
    logprobs_mode: str = "raw_logprobs"
    """Of which logits: raw_logprobs (the model's), or processed_logprobs (after penalties, biases, forbidden tokens, limits and
    grammars, and of requests that sample after temperature, top-k, top-p and min-p), as vLLM calls them."""
    draft_logprobs: bool = False
    """Report with the log probabilities of a request those of each draft that its rounds verify: its own, and as many most likely
    tokens of the distribution that it was chosen from. Each draft pass then computes all logits of its head."""
    constraints: bool = False
    """Serve requests whose output a grammar binds. Steps with such a request are launched in two halves, see
    `program/host_inputs.py`."""
    think_start_ids: tuple[int, ...] = ()
    """Token ids that begin thinking; () where a text thinks from its beginning on."""
    think_end_ids: tuple[int, ...] = ()
    """Token ids that end thinking; () for models that do not think."""
    think_forced_ids: tuple[int, ...] = ()
    """Token ids that are spelt out where thinking reaches its limit, with those that end it among them; () those alone."""
    weights_digest: bool = False
    """Digest weights as they are read, so that a text can be traced to them."""
    enable_sleep_mode: bool = False
    """The memory of weights and caches can be given back and taken again (`Engine.sleep`)."""
    seed: int = 0
    """Base of the seeds of requests that bring none."""
    allow_cpu_fallback: bool = False
    """Let a backend whose framework can do so run on the CPU what its device has no kernel for; off, that is an error."""
    check_draft_state: float = 0.0
    """Share of rounds behind which a request's rows are computed anew, and its drafts compared; 0: none."""
    check_texts: float = 0.0
    """Share of the requests that end whose last tokens are written once more without drafts, and compared; 0: none."""
    sanitize: bool = False
    """Wrap the device in the hazard checker."""
    accept_schedule: tuple[float, ...] = ()
    """Synthetic acceptance, to time rounds alone: the chance of each draft of a window to be accepted, given that those before
    it were. The text then means nothing. () verifies drafts."""

    def __post_init__(self) -> None:
        for name, kinds in _LISTS.items():
            object.__setattr__(self, name, self._list(name, kinds))
        self._flags()
        for name in ("device", "proposer", "draft_model", "draft_vocab", "dtype"):
            object.__setattr__(self, name, self._text(name))
        object.__setattr__(self, "model", self._directory())
        for name in ("tensor_parallel", "max_num_seqs", "max_model_len", "block_size", "num_blocks", "max_batched_tokens"):
            self._whole(name, minimum=1)
        self._drafts()
        self._whole("overlap", minimum=0, maximum=2)
        self._whole("seed", minimum=0, maximum=MAX_SEED)
        if self.logprobs is not None:
            self._whole("logprobs", minimum=0, maximum=MAX_COLUMNS - 1)
        self._one_of("logprobs_mode", LOGPROBS_MODES)
        for name, example in (("proposer_options", "max_ngram=5"), ("mtp_options", "order=hidden_first")):
            for option in getattr(self, name):
                if "=" not in option:
                    raise ConfigError(f"{name} has {option!r}, wanted texts NAME=VALUE, such as {example}; correct it")
        for chance in self.accept_schedule:
            if not 0 <= chance <= 1:
                raise ConfigError(f"accept_schedule has {chance!r}, wanted chances from 0 to 1, one for each draft; correct it")
        self._share("check_draft_state", "rounds")
        self._share("check_texts", "requests")
        self._one_of("variants", (AUTO, "off"))
        self._one_of("kv_dtype", (AUTO, *KV_DTYPES))
        self._one_of("weights", (AUTO, *MADE))
        if strange := sorted(set(self.weights_ignore) - set(PARTS)):
            raise ConfigError(f"weights_ignore has {strange[0]!r}, wanted {' or '.join(PARTS)}; correct it or leave it out")
        self._one_of("verify", (AUTO, *VERIFIERS))
        self._one_of("graph", (AUTO, *GRAPH_MODES))

    def _share(self, name: str, of: str) -> None:
        share: object = getattr(self, name)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ConfigError(f"{name} is {share!r}, wanted a share of {of} from 0 to 1; correct it")

    @property
    def adaptive(self) -> bool:
        """Whether each step may make as many drafts as pay."""
        return isinstance(self.draft_tokens, str)

    @property
    def most_drafts(self) -> int | None:
        """Drafts per round at most; None leaves it to negotiation."""
        if self.draft_tokens == AUTO:
            return None
        return int(self.draft_tokens[5:]) if isinstance(self.draft_tokens, str) else self.draft_tokens

    @property
    def mtp_conventions(self) -> dict[str, str]:
        """`mtp_options` by name."""
        return {name: value for name, _, value in (option.partition("=") for option in self.mtp_options)}

    def _text(self, name: str) -> str:
        """A text; of a path its text, and the default for None."""
        given = getattr(self, name)
        value = getattr(type(self), name) if given is None else os.fspath(given) if isinstance(given, os.PathLike) else given
        if not isinstance(value, str):
            raise ConfigError(f"{name} is {value!r}, wanted a text; correct it or leave it out")
        return value

    def _flags(self) -> None:
        for field in dataclasses.fields(self):
            if isinstance(field.default, bool) and not isinstance(given := getattr(self, field.name), bool):
                raise ConfigError(f"{field.name} is {given!r}, wanted True or False; correct it or leave it out")

    def _list(self, name: str, kinds: tuple[type, ...]) -> tuple[Any, ...]:
        """A tuple, of whatever can be gone through; of a path its text."""
        given = getattr(self, name)
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ConfigError(f"{name} is {given!r}, wanted a list; correct it or leave it out")
        found = tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in given)
        wrong = [one for one in found if not isinstance(one, kinds) or isinstance(one, bool)]
        if wrong:
            what = {str: "texts", int: "whole numbers", float: "numbers"}[kinds[-1]]
            raise ConfigError(f"{name} has {wrong[0]!r}, wanted a list of {what}; correct it or leave it out")
        return found

    def _directory(self) -> str | None:
        """That of the model."""
        directory = self._text("model") if self.model is not None else None
        if directory == "":  # such as of a shell variable that is not set
            raise ConfigError("model is '', wanted the directory of a checkpoint; name one, or leave it out for the demo model")
        return directory

    def _drafts(self) -> None:
        given = self.draft_tokens
        if given == AUTO:
            return
        if not isinstance(given, str):
            self._whole("draft_tokens", minimum=0)
        elif not re.fullmatch(r"auto:0*[1-9][0-9]{0,8}", given):
            wanted = "a whole number, auto, or auto:K with K of at least 1, such as auto:5"
            raise ConfigError(f"draft_tokens is {given!r}, wanted {wanted}; correct it")

    def _whole(self, name: str, *, minimum: int, maximum: int | None = None) -> None:
        value = getattr(self, name)
        if value == AUTO and name not in ("tensor_parallel", "max_num_seqs", "seed", "logprobs"):
            return
        whole, most = isinstance(value, int) and not isinstance(value, bool), MOST_WHOLE if maximum is None else maximum
        top = f" and at most {most}" if maximum is not None or (whole and value > most) else ""
        if not whole or not minimum <= value <= most:
            raise ConfigError(
                f"{name} is {value!r}, wanted a whole number of at least {minimum}{top}; correct it or leave it out"
            )

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}, wanted one of {', '.join(allowed)}; correct it or leave it out")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from a mapping; an unknown key is an error that names the nearest known one."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"engine options are {values!r}, wanted a mapping of names and values; correct the call")
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ConfigError(f"unknown engine option {key!r}; {hint}known: {', '.join(known)}")
        return cls(**values)
