"""Ctrl-C while work is under way: the first press is noted, the second breaks off, and other people's handlers stay."""

from __future__ import annotations

import signal
import threading

import pytest

from polydraft.interrupt import noted_interrupts


def test_one_press_is_noted_and_nothing_breaks_off() -> None:
    with noted_interrupts() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_press_breaks_off_and_gives_the_handler_back() -> None:
    with noted_interrupts() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_interrupts_are_ignored_they_stay_ignored() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with noted_interrupts() as interrupted:
            signal.raise_signal(signal.SIGINT)
            assert not interrupted()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_another_thread_leaves_the_handler_alone() -> None:
    seen: list[bool] = []

    def work() -> None:
        with noted_interrupts() as interrupted:
            seen.append(interrupted())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
