"""The index behind the suffix proposer: a guess is what followed the longest run that occurred before, no row sees what it must
not, and its size is bounded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from polydraft.proposers.suffix_index import LONGEST, ORDERS, STRETCH, SuffixIndex

STEP, AHEAD = 3, 5


class Texts:
    """An index with the texts that it was shown."""

    def __init__(self, num_rows: int, max_len: int = 4000, *, kept: int = 0, step: int = STEP, least: float = 0.0) -> None:
        self.index = SuffixIndex(num_rows, max_len, step=step, ahead=AHEAD, kept=kept, least=least)
        self.tokens = np.full((num_rows, max_len + step), -1, np.int32)
        self.keys, self.step = np.arange(num_rows) + 100, step

    def show(self, texts: dict[int, Sequence[int]]) -> None:
        """Show each row its text, as a step does: `texts` are whole."""
        rows = np.array(sorted(texts))
        for row, text in texts.items():
            self.tokens[row, : len(text)] = text
        self.index.follow(rows, self.keys[rows], np.array([len(texts[row]) for row in sorted(texts)]), self.tokens)

    def grow(self, row: int, text: Sequence[int], *, first: int = 1) -> None:
        """Show a text that grows by as much as a step may add."""
        for known in (*range(first, len(text), self.step), len(text)):
            self.show({row: text[:known]})

    def guess(self, row: int) -> list[int]:
        tokens, length, *_ = self.index.guesses(np.array([row]))
        found: list[int] = tokens[0, : length[0]].tolist()
        return found


def followed(text: Sequence[int], guess: Sequence[int]) -> int:
    """Tokens of the longest run that the text ends with and behind which it once went on as guessed; itself runs on."""
    whole, best = [*text, *guess], 0
    for place in range(1, len(text)):
        if whole[place : place + len(guess)] == list(guess):
            same = 0
            while same < place and text[place - 1 - same] == text[-1 - same]:
                same += 1
            best = max(best, same)
    return best


def longest_run(text: Sequence[int]) -> int:
    """The longest of the lengths looked up whose run at the end occurred before; 0: none."""
    found = 0
    for order in ORDERS.tolist():
        end = list(text[-order:])
        if len(text) > order and any(list(text[i : i + order]) == end for i in range(len(text) - order)):
            found = order
    return found


@pytest.mark.parametrize("seed", range(6))
def test_a_guess_is_what_followed_a_run_as_long_as_any_that_is_looked_up(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, (3, 5, 40)[seed % 3], 400).tolist()
    text += text[50:250]
    texts, known, guessed, shorter = Texts(2), 1, 0, 0
    while known < len(text):
        texts.show({1: text[:known]})
        guess, longest = texts.guess(1), longest_run(text[:known])
        assert bool(guess) <= bool(longest), known
        if longest:
            same = followed(text[:known], guess) if guess else 0
            assert same >= 2 or not guess, known
            guessed, shorter = guessed + 1, shorter + (same < longest)
        known += int(rng.integers(1, STEP + 1))
    assert guessed > 100
    assert shorter < 0.1 * guessed, "of runs with the same entry the later one is remembered"


def test_a_text_that_repeats_itself_runs_on() -> None:
    texts = Texts(1)
    texts.grow(0, [7, 8, 9] * 4)
    assert texts.guess(0) == [7, 8, 9, 7, 8]


def test_a_guess_ends_where_it_is_unlikely_and_no_sooner() -> None:
    lengths = []
    for least in (0.0, 0.5, 0.9, 1.0):
        texts = Texts(1, least=least)
        texts.grow(0, [*range(50), *range(30)])
        guess = texts.guess(0)
        assert guess == [30, 31, 32, 33, 34][: len(guess)]
        lengths.append(len(guess))
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (AHEAD, 0)
    assert 0 < lengths[2] < AHEAD


def test_what_follows_is_trusted_as_much_as_it_was_right() -> None:
    rng = np.random.default_rng(1)
    right, wrong = Texts(1, least=0.8), Texts(1, least=0.8)
    right.grow(0, list(range(40)) * 30)
    known = [[3, 4, int(rng.integers(5, 4000))][i % 3] for i in range(1200)]  # after 3, 4 it is never as it was
    wrong.grow(0, known)
    assert len(right.guess(0)) == AHEAD
    assert not wrong.guess(0)


def test_rows_find_their_own_texts_alone() -> None:
    texts = Texts(3)
    one, other = list(range(100, 140)), [5, *range(100, 110)]
    for known in range(1, 41, STEP):
        texts.show({0: one[:known], 2: other[:known]})
    assert texts.guess(2) == []
    texts.show({2: [*other, 5, 100]})
    assert texts.guess(2) == [101, 102, 103, 104, 105]


def test_a_row_forgets_its_text_with_its_request() -> None:
    texts = Texts(1)
    texts.grow(0, list(range(60)))
    texts.keys[0] += 1
    texts.grow(0, list(range(10)))
    assert texts.guess(0) == []


def test_finished_texts_are_found_by_all_and_the_oldest_go_first() -> None:
    texts = Texts(2, kept=200)
    stories = [list(range(1000 * i, 1000 * i + 90)) for i in range(1, 4)]

    def found(story: Sequence[int]) -> list[int]:
        texts.keys[1] += 1
        texts.grow(1, [9, 9, *story[10:20]])
        return texts.guess(1)

    for story in stories[:2]:
        texts.grow(0, story)
        assert found(story) == [], "it has not ended"
        texts.keys[0] += 1
        texts.show({0: story[:1]})
        assert found(story) == story[20:25]
    texts.grow(0, stories[2])
    texts.keys[0] += 1
    texts.show({0: [1]})
    assert found(stories[2]) == stories[2][20:25]
    assert found(stories[0]) != stories[0][20:25], "three of them are more than are kept"
    assert found(stories[1]) == stories[1][20:25]


def test_the_end_of_a_finished_text_ends_a_guess() -> None:
    texts = Texts(1, kept=500)
    for story in (list(range(100, 150)), list(range(500, 550))):
        texts.grow(0, story)
        texts.keys[0] += 1
    texts.grow(0, list(range(140, 148)))
    assert texts.guess(0) == [148, 149]


def test_a_long_prompt_is_taken_in_over_several_steps() -> None:
    text = np.random.default_rng(3).integers(0, 30000, 3 * STRETCH).tolist()
    text += text[STRETCH + 5 : STRETCH + 45]
    texts = Texts(1, max_len=len(text) + 10)
    for step in range(5):
        texts.show({0: text})
        assert bool(texts.guess(0)) == (step >= 3), step
    assert texts.guess(0) == text[STRETCH + 45 : STRETCH + 50]


def test_memory_is_bounded_over_many_texts() -> None:
    texts, rng = Texts(4, max_len=200, kept=3000), np.random.default_rng(5)
    before = {name: value.nbytes for name, value in vars(texts.index).items() if isinstance(value, np.ndarray)}
    for i in range(600):
        texts.keys[i % 4] = 1000 + i
        length = int(rng.integers(LONGEST + 1, 200))
        texts.show({i % 4: rng.integers(0, 50, length).tolist()})
        assert len(texts.guess(i % 4)) <= AHEAD
    assert {name: value.nbytes for name, value in vars(texts.index).items() if isinstance(value, np.ndarray)} == before


def test_where_there_is_no_match_nobody_is_followed() -> None:
    """Memory that nothing was written to is full of token 0, as these texts are: who went along with it left it at its end."""
    texts = Texts(1, max_len=60)
    texts.tokens[:] = 0
    for key in range(STRETCH // 10):
        texts.keys[0] = key
        texts.show({0: [0] * 30})
        texts.show({0: [0] * 31})
        assert texts.guess(0) == [0] * AHEAD


def test_texts_longer_than_what_is_kept_leave_their_end() -> None:
    texts = Texts(1, kept=100)
    texts.grow(0, list(range(1000)))
    texts.keys[0] += 1
    texts.grow(0, [5, 6, 7, 8])
    assert texts.guess(0) == []
    texts.keys[0] += 1
    texts.grow(0, [950, 951, 952])
    assert texts.guess(0) == [953, 954, 955, 956, 957]
