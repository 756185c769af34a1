"""Checks texts that were written with drafts against the same texts written without.

A share of the requests that end are written once more where nobody sees it: the last tokens of each are taken away, all rows
before them are computed anew, without blocks of the prefix cache, and plain decoding on the same weights says what comes. One at
a time, and none while requests wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from polydraft.host.differences import Differences
from polydraft.host.request import Request, Status
from polydraft.host.totals import EngineTotals

TAIL = 32
"""Tokens at the end of a text that are written once more."""


class TextCheck:
    """Checks so many of the requests that end (`share`, 0 to 1). `queue` lets a request wait; `tell` gets a sentence when a text
    differs, and more do than rounding explains unless arithmetic is `exact`."""

    def __init__(
        self, share: float, queue: Callable[[Request], None], totals: EngineTotals, tell: Callable[[str], None], *, exact: bool
    ) -> None:
        self.compared = Differences(exact=exact)
        self.shadow: Request | None = None
        """The request that writes a text once more."""
        self._share, self._queue, self._totals, self._tell = share, queue, totals, tell
        self._due, self._wanted, self._since = 0.0, [0], 0

    def weights_changed(self, number: int) -> None:
        """Texts of requests that arrived before this number may be of both weights: they are not checked."""
        self._since = number

    def offer(self, request: Request, number: int) -> bool:
        """A request has ended; returns whether it is written once more, under this number of arrival."""
        whole = request.finish_reason in ("stop", "length") and request.token_ids and request.binding is None
        whole = whole and request.number >= self._since
        self._due = min(self._due + self._share * bool(whole), 1.0)
        if not whole or self._due < 1.0 or self.shadow is not None:
            return False
        self._due, self._wanted = 0.0, request.token_ids
        self.shadow = replace(
            request, id=f"{request.id} without drafts", number=number, status=Status.WAITING, slot=-1, stream=False,
            params=replace(request.params, max_drafts=0, logprobs=None, prompt_logprobs=None, stop=()),
            token_ids=request.token_ids[:-TAIL], rounds=[], round_drafts=[], round_lookups=[], reported=(0, 0), drafted=0,
            max_total=len(request.prompt_ids) + len(request.token_ids), recompute=True, num_preemptions=0,
        )  # fmt: skip
        self._queue(self.shadow)
        return True

    def ended(self, request: Request) -> bool:
        """Whether a request that ended is the one that nobody sees: then its text is compared."""
        if self.shadow is None or request is not self.shadow:
            return False
        self.shadow = None
        begun = len(self._wanted[:-TAIL])
        self._totals.take_back(len(request.token_ids) - begun, request.rounds, [])
        if request.finish_reason not in ("abort", "error"):
            self._compare(request, begun)
        return True

    def _compare(self, request: Request, begun: int) -> None:
        found, wanted = request.token_ids, self._wanted
        if self.compared.count(found != wanted):
            place = next((i for i, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), len(found))
            was, comes = wanted[place : place + 1], found[place : place + 1]
            self._tell(
                f"token {place} of a text was {was}, and {comes} when its tokens from {begun} on were written without drafts "
                f"({self.compared}), wanted the same text: drafts changed it; run polydraft conform on "
                "this backend, and serve with --draft-tokens 0 until it holds"
            )
