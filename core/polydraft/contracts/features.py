"""The features that contracts make up: what a backend can offer, and claim, one by one.

A contract says which feature it belongs to (`Contract.feature`); the kit's claims and the lists of `polydraft contracts` follow
from that. A further feature is one line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from polydraft.errors import ConfigError


@dataclass(frozen=True)
class Feature:
    """What a backend can do that has all its contracts. `rests_on`: features without which it is of no use."""

    doc: str
    rests_on: tuple[str, ...] = ("dense",)


FEATURES: Final[Mapping[str, Feature]] = {
    "dense": Feature("greedy text of a dense model, with drafts of its MTP head", ()),
    "sampling": Feature("requests that sample"),
    "rejection": Feature("verification by rejection", ("sampling",)),
    "processing": Feature("penalties, biases and forbidden tokens of a request"),
    "logprobs": Feature("log probabilities of tokens, drafts and prompts"),
    "grammar": Feature("masks of a grammar, for each place of a window"),
    "thinking": Feature("limits of thinking and reply, and what a reply may begin with"),
    "experts": Feature("models with a mixture of experts"),
    "leaves": Feature("texts that do not depend on the number of ranks either, with `--invariant`", ("experts",)),
    "drafting": Feature("drafts of n-grams and of the host, and a reduced draft vocabulary"),
    "schedule": Feature("synthetic acceptance by a schedule, for benchmarks", ("rejection",)),
}
"""By name, in the order in which they are listed. `dense` is part of every claim."""


def with_base(names: Iterable[str]) -> tuple[str, ...]:
    """The features `names` with all that they rest on, in the order of `FEATURES`; `dense` where there are none. Raises
    `ConfigError` for an unknown one."""
    found, left = {"dense"}, list(names)
    while left:
        name = left.pop()
        if name not in FEATURES:
            raise ConfigError(f"feature is {name!r}, wanted some of {', '.join(FEATURES)}; choose among those")
        found.add(name)
        left += FEATURES[name].rests_on
    return tuple(name for name in FEATURES if name in found)
