"""Who proposed each token of a text, for whoever asks.

Results carry what says it: the drafts that each round verified and accepted, and the places that a constraint left no choice
for. `provenance` is the only function that knows how; nothing is computed for requests that nobody asks about.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

from polydraft.errors import RecordError

SourceName = Literal["target", "draft", "lookup", "corrected", "forced", "prompt"]
"""Who chose a token. `target`: the target with no draft to hold it against: the prefill's token, or the one after a window that
was accepted whole. `draft`: a draft that the target agreed with. `lookup`: such a draft that was found in what texts said before,
where the proposer has a model as well (`hybrid`) and that had made another one, or none. `corrected`: the target, in the place of
a draft that it rejected. `forced`: a constraint that left no choice, wherever the token came from. `prompt`: nobody; it was
given."""


class Origin(NamedTuple):
    """Of one token: `draft_position` counts drafts of the round from 1, 0: no draft. `round` counts decode rounds from 0, -1: the
    token that the prefill chose."""

    source: SourceName
    draft_position: int
    round: int


def provenance(
    num_tokens: int,
    rounds: Sequence[int],
    round_drafts: Sequence[int],
    round_lookups: Sequence[int],
    forced: Collection[int] = (),
    start: int = 0,
) -> Iterator[Origin]:
    """Of each token of a text from place `start` on, in order; the time is that of its rounds and of those tokens.

    `num_tokens`: of the text so far. `rounds`, `round_drafts`: drafts that each of its rounds accepted and verified, and
    `round_lookups` those of the latter, the last ones, that were looked up. `forced`: places that a constraint left no choice
    for. A round brings the drafts that it accepted and one token of the target; an end of the text may have cut the last
    one short."""
    if start < 1 <= num_tokens:
        yield Origin("forced" if 0 in forced else "target", 0, -1)
    end = 1
    for number, (accepted, verified, looked_up) in enumerate(zip(rounds, round_drafts, round_lookups, strict=True)):
        begin, end = end, end + accepted + 1
        for place in range(max(begin, start), min(end, num_tokens)):
            is_draft = place + 1 < end
            source: SourceName = "corrected" if accepted < verified else "target"
            if is_draft:
                source = "draft" if place - begin < verified - looked_up else "lookup"
            yield Origin("forced" if place in forced else source, place - begin + 1 if is_draft else 0, number)


def check_rounds(num_tokens: int, rounds: Sequence[int], *, prefill: bool, ended: bool) -> None:
    """Raises `RecordError` where new rounds cannot have brought so many new tokens of a request: the device reported other rounds
    than it ran. `prefill`: the token that the prefill chose is among them. Only the last round of a text that `ended` may have
    been cut short, to nothing where the model produced NaN."""
    brought = sum(rounds) + len(rounds) + prefill
    if num_tokens != brought and not (ended and rounds and brought - rounds[-1] - 1 <= num_tokens < brought):
        raise RecordError(
            f"rounds that bring {brought} tokens came with {num_tokens}, wanted as many; what the device says of its rounds is "
            "wrong"
        )


def rounds_within(rounds: Sequence[int], num_tokens: int) -> list[int]:
    """Drafts that the rounds of a text put into its first `num_tokens`; those that only brought later tokens are left out."""
    produced, kept = 1, []
    for accepted in rounds:
        if produced >= num_tokens:
            break
        kept.append(min(accepted, num_tokens - produced))
        produced += accepted + 1
    return kept
