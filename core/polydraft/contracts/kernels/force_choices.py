"""Defines `force_choices`: makes the target agree with each draft by a given chance, whatever it would have chosen.

The step program launches it between choice and `verify_match`, only in engines with a synthetic acceptance schedule, which
exist to be timed: their text means nothing. It never runs where a text is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, param, tensor
from polydraft.contracts.scenes import Scene, Slot, random_scene
from polydraft.contracts.sizes import DRAFTS, SLOTS, SMALL, Sizes
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, Phase


class ForceChoicesV1(Args):
    """Arguments of `force_choices`. Launch length: sequences.

    A sequence with `logit_len` rows verifies `logit_len - 1` drafts; its last row, the target's own token, is left alone. Rows
    are forced each for itself: what stands behind the first disagreement does not matter to `verify_match`. Preconditions:
    num_valid >= 2, and drafts that are verified are tokens of the vocabulary.
    """

    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    logit_start: Buffer = tensor("B", "i32", "First logit row of each sequence.")
    logit_len: Buffer = tensor("B", "i32", "Logit rows of each sequence.")
    drafts: Buffer = tensor("B K", "i32", "Drafts by slot, as when the rows were packed.")
    uniforms: Buffer = tensor("NL", "f32", "A number from 0 on, below 1, for each logit row.")
    chances: Buffer = tensor("K", "f32", "Chance that the draft at each place of a window is accepted, from 0 to 1.")
    choices: Buffer = tensor(
        "NL", "i32", "Token the target chose in each logit row; NO_TOKEN, where none could be chosen, stays.", access="inout"
    )
    num_valid: int = param("Size of the true vocabulary.")


def golden(a: Any, n: int) -> None:
    """A draft is accepted where its row's uniform lies below its chance; elsewhere a choice that equals it becomes the next
    token of the vocabulary."""
    for i, slot in enumerate(a.slot_order[:n]):
        if slot < 0:
            continue
        for j in range(a.logit_len[i] - 1):
            row, draft = a.logit_start[i] + j, a.drafts[slot, j]
            if a.choices[row] == NO_TOKEN:
                continue
            if a.uniforms[row] < a.chances[j]:
                a.choices[row] = draft
            elif a.choices[row] == draft:
                a.choices[row] = (draft + 1) % a.num_valid


NUM_VALID = 1_000_000
"""More than any token of a scene."""
AT_RANDOM = tuple((np.random.default_rng(7).integers(0, 1 << 24, 64) * 2.0**-24).tolist())
"""Numbers for named cases that do not say any."""


def _case(name: str, scene: Scene, uniforms: Sequence[float], chances: Sequence[float] = (), num_valid: int = NUM_VALID) -> Case:
    """What `verify_match` sees of the scene; `uniforms` by logit row, repeated as often as there are rows."""
    from polydraft.contracts.kernels.verify_match import (
        VerifyMatchV1,  # which comes after this contract, in a step and in the registry
    )

    seen = scene.case(name, VerifyMatchV1)
    arrays = {key: seen.arrays[key] for key in ("slot_order", "logit_start", "logit_len", "drafts", "choices")}
    arrays["uniforms"] = np.resize(np.array(uniforms, np.float32), arrays["choices"].shape)
    arrays["chances"] = np.resize(np.array(chances or (0.9, 0.6, 0.3), np.float32), arrays["drafts"].shape[1])
    return Case(name, arrays, {"num_valid": num_valid}, seen.n)


_TWO = Scene(slots=(Slot(drafts=(1, 2, 3), choices=(1, 2, 3, 4)), Slot(drafts=(5, 6), choices=(7, 6, 5))), order=(1, 0))


def cases() -> Iterator[Case]:
    """Named cases of `force_choices`: those of `verify_match`, and the borders of the schedule."""
    from polydraft.contracts.kernels.verify_match import SCENES

    for name, scene in SCENES.items():
        yield _case(name, scene, AT_RANDOM)
    yield _case("all_accepted", _TWO, (1 - 2.0**-24,), (1.0, 1.0, 1.0))
    yield _case("none_accepted", _TWO, (0.0,), (0.0, 0.0, 0.0))
    yield _case("equal_to_the_chance_is_not_below_it", _TWO, (0.5,), (0.5, 0.5 + 2.0**-24, 0.5))
    yield _case("each_place_has_its_own_chance", _TWO, (0.5,), (0.4, 0.6, 0.4))
    yield _case("each_row_has_its_own_number", _TWO, (0.1, 0.9, 0.9, 0.9, 0.1, 0.9, 0.1), (0.5, 0.5, 0.5))
    last = Scene(slots=(Slot(drafts=(9, 0, 9), choices=(9, 0, 5, 4)), Slot(drafts=(9,), choices=(8, 9))), order=(0, 1))
    yield _case("behind_the_last_token_comes_the_first", last, (0.9,), (0.5, 0.5, 0.5), num_valid=10)
    failed = Scene(slots=(Slot(drafts=(1, 2), choices=(NO_TOKEN, NO_TOKEN, 3)), Slot(phase=Phase.PAUSED)), order=(0, 1))
    yield _case("nan_rows_stay", failed, (0.0, 0.9), (0.5, 0.5, 0.5))
    short = Scene(slots=(Slot(drafts=(1, 2, 3), choices=(4, 5), planned=2), Slot(drafts=(6,), choices=(6, 7))), order=(1, 0))
    yield _case("drafts_without_a_row_of_their_own", short, (0.0,), (0.5, 0.5, 0.5))
    two = (Slot(drafts=(1,), choices=(5, 2)), Slot(drafts=(3,), choices=(6, 4)))
    yield _case("drafts_beyond_the_launch_length", Scene(slots=two, order=(1, 0), length=1), (0.0,), (0.5, 0.5, 0.5))


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """A random scene and schedule; the few tokens of a scene make the wrap of the vocabulary likely."""
    scene = random_scene(rng, sizes)
    chances = tuple(rng.choice([0.25, 0.5, 0.75] if sizes else [0.0, 0.25, 0.5, 0.75, 1.0], scene.num_drafts).tolist())
    uniforms = (rng.integers(0, 1 << 24, 64) * 2.0**-24).tolist()
    return _case("random", scene, uniforms, chances, num_valid=7 if rng.random() < 0.5 else NUM_VALID)


CONTRACT = REGISTRY.add(
    Contract(
        name="force_choices",
        version=1,
        unit="seqs",
        args=ForceChoicesV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Force the target's choices to accept drafts by a synthetic schedule.",
        source="Synthetic acceptance, as used to time speculative decoding without trained weights.",
        equivalent_mutants={
            "unpad(slot_order)": "a sequence past the end has no logit rows",
            "unpad(drafts)": "drafts below draft_len are tokens, the rest are not read",
        },
        constraints=("num_valid >= 2",),
        feature="schedule",
        grows={"B": SLOTS, "K": DRAFTS},
    )
)
