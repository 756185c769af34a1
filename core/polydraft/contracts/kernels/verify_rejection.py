"""Defines `verify_rejection`: accepts drafts by chance, so that every token of a window is distributed as the target's own.

The runner launches it instead of `verify_match` where drafts were drawn with noise of their own. It never makes randomness:
uniforms and noise are given, one of each a logit row, keyed by the position that the row decides.

A draft x drawn from q is accepted with probability min(1, p(x) / q(x)); the first one that is not is replaced by a token
drawn from what p has more than q, and a window that is accepted whole gets one more token drawn from p (Leviathan et al.
2023, theorem 1). This holds whatever q is; how often drafts are accepted depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.kernels.draw_draft import clear, distribution, drawn, landmarks
from polydraft.contracts.kernels.verify_match import SCENES, VerifyMatchV1
from polydraft.contracts.scenes import Scene, Slot, random_scene
from polydraft.contracts.sizes import DRAFTS, MANY_TOKENS, SLOTS, SMALL, VOCABULARY, Sizes, fitted
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, Phase


class VerifyRejectionV1(Args):
    """Buffers of `verify_rejection`. Launch length: sequences.

    Outputs are by sequence index and mean what they mean in `verify_match`. Logit row j of a sequence decides draft j of its
    slot, the row behind the last draft has none. Where `draft_probs` is left out every draft is certain: q is 1 for it. Where p
    is certain (a greedy slot), q may be anything from 0 to 1: only the draft that p is certain of is accepted.
    """

    probs: Buffer = tensor("NL V", "f32", "p: filtered probabilities of each logit row; all 0: none could be chosen.")
    draft_probs: Buffer | None = tensor("B K V", "f32", "q: distribution that each draft was drawn from, by slot.", optional=True)
    uniforms: Buffer = tensor("NL", "f32", "Uniform number of each logit row, from 0 on and below 1.")
    noise: Buffer = tensor("NL V", "f32", "Standard Gumbel noise of each logit row, independent of the drafts' own.")
    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    phase: Buffer = tensor("B", "i32", "`Phase` by slot, as when the rows were packed.")
    logit_start: Buffer = tensor("B", "i32", "First logit row of each sequence.")
    logit_len: Buffer = tensor("B", "i32", "Logit rows of each sequence.")
    drafts: Buffer = tensor("B K", "i32", "Drafts by slot, as when the rows were packed.")
    window: Buffer = tensor("B W", "i32", "Tokens of the window, the rest NO_TOKEN.", access="out", pad=NO_TOKEN)
    window_len: Buffer = tensor("B", "i32", "Tokens in the window: accepted + 1; 0 without logit rows.", access="out", pad=0)
    accepted: Buffer = tensor("B", "i32", "Drafts accepted.", access="out", pad=0)
    drafted: Buffer = tensor("B", "i32", "Drafts this round verified; -1: no decode round.", access="out", pad=-1)


def draft_distribution(a: Any, slot: int, j: int) -> Array:
    """Return q of draft `j`."""
    if a.draft_probs is not None:
        return np.array(a.draft_probs[slot, j])
    certain = np.zeros(a.probs.shape[1])
    certain[a.drafts[slot, j]] = 1.0
    return certain


def leftover(p: Array, q: Array) -> Array:
    """Return what p has more than q; p itself where rounding left nothing, although the draft was rejected."""
    more = np.maximum(p - q, 0.0)
    return more if more.any() else p


def golden(a: Any, n: int) -> None:
    """Walk each window until a draft is rejected, then draw the token that ends it."""
    for i, slot in enumerate(a.slot_order[:n]):
        a.window[i], a.window_len[i], a.accepted[i], a.drafted[i] = NO_TOKEN, 0, 0, -1
        if slot < 0 or a.logit_len[i] == 0:
            continue
        if a.phase[slot] == Phase.DECODE:
            a.drafted[i] = a.logit_len[i] - 1
        row = a.logit_start[i]
        weights = a.probs[row]
        for j in range(max(a.drafted[i], 0)):
            p, q, draft = a.probs[row], draft_distribution(a, slot, j), a.drafts[slot, j]
            if not a.uniforms[row] * q[draft] < p[draft]:
                weights = leftover(p, q)
                break
            a.window[i, j] = draft
            a.accepted[i] += 1
            row += 1
            weights = a.probs[row]
        a.window[i, a.accepted[i]] = drawn(weights, a.noise[row])
        a.window_len[i] = a.accepted[i] + 1


VOCAB = 10
"""Drafts of scenes are below it; in a larger vocabulary they are its landmarks."""


class _Rows:
    """The numbers behind a scene: the scene's choices say which drafts are accepted (those that are chosen as well), which
    rows are broken, and nothing about the tokens that are drawn."""

    def __init__(
        self, scene: Scene, rng: np.random.Generator, greedy: Sequence[bool] = (False,), *, certain: bool = False,
        vocab: int = VOCAB,
    ) -> None:  # fmt: skip
        self.scene, self.rng, self.certain, self.vocab = scene, rng, certain, vocab
        self.base, self.tokens = scene.case("", VerifyMatchV1), landmarks(vocab)
        if vocab > VOCAB:  # the few tokens of a scene are late ones
            self.tokens.reverse()
        drafts = self.base.arrays["drafts"]
        drafts[drafts >= 0] = np.array(self.tokens, np.int32)[drafts[drafts >= 0]]
        self.greedy = np.resize(np.array(greedy), len(scene.slots))
        num_rows = len(self.base.arrays["choices"])
        self.probs = np.stack([distribution(rng, vocab) for _ in range(num_rows)])
        # Distributions of greedy slots, and of drafts that are not in this launch, are stale.
        self.draft_probs = rng.random((*drafts.shape, vocab), np.float32)
        self.uniforms = rng.integers(0, 1 << 24, num_rows).astype(np.float32) * np.float32(2.0**-24)
        self.noise = rng.gumbel(size=(num_rows, vocab)).astype(np.float32)
        for i, slot in enumerate(scene.order):
            for j in range(self.base.arrays["logit_len"][i]):
                self._row(slot, j, int(self.base.arrays["logit_start"][i]) + j)

    def _row(self, slot: int, j: int, row: int) -> None:
        """Redraw a row until it does what it should and no float32 error could change that."""
        chosen, drafts = int(self.base.arrays["choices"][row]), self.scene.slots[slot].drafts
        choice = self.tokens[chosen] if 0 <= chosen < VOCAB else chosen
        draft = self.tokens[drafts[j]] if self.scene.slots[slot].phase == Phase.DECODE and j < len(drafts) else None
        while True:
            p, q, u = distribution(self.rng, self.vocab), distribution(self.rng, self.vocab), float(self.uniforms[row])
            if self.greedy[slot]:
                p = self._certain(choice if choice in self.tokens else self.vocab - 1)
            if choice == NO_TOKEN:
                p = np.zeros(self.vocab, np.float32)
            stale = self.draft_probs[slot, j] if self.greedy[slot] and draft is not None else q
            held = self._certain(draft or 0) if self.certain else stale
            self.probs[row] = p
            if draft is not None:
                self.draft_probs[slot, j] = stale
                wanted, distance = choice == draft, float(p[draft]) - u * float(held[draft])
                if (distance > 0) != wanted or abs(distance) < 1e-4 * (choice != NO_TOKEN):
                    self.uniforms[row] = self.rng.integers(0, 1 << 24) * np.float32(2.0**-24)
                    continue
            self.noise[row] = self.rng.gumbel(size=self.vocab)
            if clear(p, self.noise[row]) and (draft is None or clear(leftover(p, held), self.noise[row])):
                return

    def _certain(self, token: int) -> Array:
        one = np.zeros(self.vocab, np.float32)
        one[token] = 1.0
        return one

    def case(self, name: str) -> Case:
        arrays = {key: value for key, value in self.base.arrays.items() if key != "choices"}
        arrays |= {"probs": self.probs, "uniforms": self.uniforms, "noise": self.noise}
        arrays["draft_probs"] = None if self.certain else self.draft_probs
        return Case(name, arrays, {}, self.base.n, self.base.outputs)


def _single(
    name: str, p: Sequence[float], q: Sequence[float], uniform: float, noise: Sequence[float], *, certain: bool = False
) -> Case:
    """One draft, token 0, in slot 1; its row has these numbers, the row behind it draws token 3."""
    scene = Scene(slots=(Slot(), Slot(drafts=(0,), choices=(0, 0))), order=(1,), num_drafts=1, tail=0, spare=0)
    base = scene.case(name, VerifyMatchV1)
    vocab, last = len(p), [float(v == 3) for v in range(len(p))]
    arrays = {key: value for key, value in base.arrays.items() if key != "choices"}
    arrays |= {"probs": np.array([p, last], np.float32), "noise": np.array([noise, [0.0] * vocab], np.float32)}
    arrays["uniforms"] = np.array([uniform, 0.5], np.float32)
    arrays["draft_probs"] = None if certain else np.array([[[0.5] * vocab], [q]], np.float32)
    return Case(name, arrays, {}, base.n, base.outputs)


def cases() -> Iterator[Case]:
    """Named cases of `verify_rejection`."""
    rng = np.random.default_rng(36)
    for name, scene in SCENES.items():
        yield _Rows(scene, rng).case(name)
    mixed = SCENES["all_phases_in_another_order_than_slots"]
    yield _Rows(mixed, rng, (False, True, False)).case("greedy_slots_between_others")
    yield _Rows(mixed, rng, (True, True, False)).case("another_slot_between_greedy_ones")
    for name in ("window_ends_where_the_next_one_agrees", "all_drafts_accepted", "nan_after_an_accepted_draft"):
        yield _Rows(SCENES[name], rng, (False, True), certain=True).case(f"certain_drafts.{name}")
        yield _Rows(SCENES[name], rng, (True,)).case(f"all_greedy.{name}")
    almost = 1 - 2.0**-24
    yield _single("equal_distributions_accept_everything", [0.75, 0.25, 0, 0], [0.75, 0.25, 0, 0], almost, [0, 9, 9, 9])
    yield _single("likelier_than_the_draft_thought", [0.5, 0.5, 0, 0], [0.25, 0.75, 0, 0], almost, [0, 9, 9, 9])
    yield _single("border_is_rejected", [0.25, 0.5, 0.25, 0], [0.5, 0.25, 0.25, 0], 0.5, [9, 0, 9, 9])
    yield _single("below_the_border", [0.25, 0.5, 0.25, 0], [0.5, 0.25, 0.25, 0], 0.5 - 2.0**-24, [9, 0, 9, 9])
    yield _single("impossible_draft_is_rejected_at_zero", [0, 0.5, 0.5, 0], [0.5, 0.25, 0.25, 0], 0.0, [9, 0, 1, 9])
    # p alone would draw 1, where it is largest; what it has more than q is at 2 and 3, and most at 3.
    yield _single("drawn_from_what_the_target_has_more", [0, 0.5, 0.25, 0.25], [0.375, 0.5, 0.125, 0], 0.5, [0, 0, 0, 0])
    yield _single("weights_of_what_is_left", [0, 0.5, 0.25, 0.25], [0.375, 0.5, 0.125, 0], 0.5, [9, 9, 0.7, 0])
    yield _single("noise_against_weight", [0, 0.5, 0.25, 0.25], [0.375, 0.5, 0.125, 0], 0.5, [9, 9, 0.68, 0])
    yield _single("nothing_is_left", [0.25, 0.5, 0.125, 0], [0.5, 0.5, 0.125, 0], 0.75, [0, 0, 2, 9])
    yield _single("certain_draft_leaves_the_others", [0.5, 0.25, 0.125, 0.125], [0, 0, 0, 1], 0.75, [9, 0, 0.5, 0], certain=True)
    yield _single("certain_draft_accepted", [0.5, 0.25, 0.125, 0.125], [0, 0, 0, 1], 0.25, [9, 0, 0.5, 0], certain=True)
    yield _single("lowest_id_of_equals", [0, 0.25, 0.5, 0.25], [0.75, 0, 0.25, 0], 0.5, [0, 0, 0, 0])


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """A random scene; slots greedy or not, drafts drawn or certain."""
    (vocab,) = fitted(sizes, V=VOCAB)
    scene = random_scene(rng, {**sizes, "B": 3, "K": 3} if vocab > MANY_TOKENS else sizes)
    greedy = [bool(g) for g in rng.random(len(scene.slots)) < 0.25]
    return _Rows(scene, rng, greedy, certain=bool(rng.random() < 0.2), vocab=max(vocab, VOCAB)).case("random")


CONTRACT = REGISTRY.add(
    Contract(
        name="verify_rejection",
        version=1,
        unit="seqs",
        args=VerifyRejectionV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Accept drafts with the chance that keeps the target's distribution, and draw the token that ends the window.",
        source="Speculative sampling: Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding; "
        "Chen et al. 2023, Accelerating Large Language Model Decoding with Speculative Sampling.",
        equivalent_mutants={
            "unpad(slot_order)": "a sequence past the end has no logit rows",
            "unpad(drafts)": "drafts below draft_len are tokens, the rest are not read",
        },
        constraints=("W == K + 1",),
        feature="rejection",
        grows={"B": SLOTS, "K": DRAFTS, "V": VOCABULARY},
    )
)
