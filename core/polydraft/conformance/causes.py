"""Guesses the cause of a failure: the two mutants whose symptoms it resembles most.

The report and `check_kernel` append it to a failure's sentence. It reads ids and sentences, runs nothing and decides no outcome:
a guess is where to look first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

MOST: Final = 2
UNWRITTEN: Final = (" is -24576,", " is 1515870810,", " is 90,")
"""What the harness's poison (`contracts.inputs.POISON`) reads like in a sentence, by dtype."""
SYMPTOMS: Final = {
    "may not be written": ("M09", "M44"),
    "any finite number": ("M51", "M03"),
    "synchronised": ("M24", "M22"),
    "allocated": ("M22", "M24"),
    "does not end": ("M31", "M52"),
    "hangs": ("M31", "M24"),
    "acceptance trace": ("M18", "M38"),
    "a block is lost": ("M33", "M35"),
    "free blocks of an engine at rest": ("M35", "M33"),
    "allocations in each": ("M22", "M24"),
    "waits in each": ("M24", "M22"),
    "replays or more": ("M20", "M52"),
}
"""Words of a failure's sentence, and the mutants that leave them."""
TELLTALE: Final = {
    "M22": ("allocated", "allocations in"), "M24": ("synchronised", "waits in"), "M44": ("may not be written",),
    "M15": ("may not be written",), "M60": ("a refusal that names",),
}  # fmt: skip
"""Mutants that always leave one of these words; without them, something else is behind the failure."""
LEVELS: Final = {
    "L0": ("M46", "M42"), "L1": ("M30", "M31"), "L2": ("M51", "M02"), "L3": ("M21", "M26"), "L4": ("M29", "M28"),
    "L5": ("M18", "M38"), "L6": ("M18", "M20"),
}  # fmt: skip
"""Where nothing better is known: what a level is there to catch."""


def causes(check_id: str, kernel: str = "", message: str = "") -> str:
    """`M08 (first mismatch counted as accepted) or M07 (...)`: what the check `check_id` failing with `message` looks like;
    "" for an exception or a kernel that is not there, whose sentence says more than a guess."""
    from polydraft.conformance.faulty_backends import CORES, MUTANTS

    raised = " (raised in " in message and not any(words in message for words in SYMPTOMS)
    if raised or " is not offered, " in message:
        return ""

    titles = {mutant.id: mutant.title for mutant in MUTANTS}
    fits = (id_ for id_ in _ranked(check_id, kernel, message) if not message or _may_be(id_, message))
    found = list(dict.fromkeys(id_ for id_ in fits if id_ in titles and id_ not in CORES))
    return " or ".join(f"{id_} ({titles[id_]})" for id_ in found[:MOST])


def _may_be(id_: str, message: str) -> bool:
    return id_ not in TELLTALE or any(words in message for words in TELLTALE[id_])


def _ranked(check_id: str, kernel: str, message: str) -> Iterator[str]:
    """Ids of mutants, likeliest first: killed by this very check, of this symptom, of this kernel, of this level."""
    from polydraft.conformance.faulty_backends import MUTANTS

    yield from (mutant.id for mutant in MUTANTS if mutant.killer == check_id)
    if any(poison in message for poison in UNWRITTEN):
        yield from ("M43", "M51")
    for words, ids in SYMPTOMS.items():
        if words in message:
            yield from ids
    yield from (mutant.id for mutant in MUTANTS if kernel and mutant.killer.split("/")[1] == kernel)
    yield from LEVELS.get(check_id.partition("/")[0], ())
