"""A signal ends what runs, but tears nothing apart while a program is being started."""

from __future__ import annotations

import os
import signal

import pytest

from polarq.cli.interrupts import SIGNALS, Interrupts
from polarq.cli.outcome import Signalled


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_at_once(number: signal.Signals) -> None:
    with Interrupts().caught(), pytest.raises(Signalled) as caught:
        os.kill(os.getpid(), number)
    assert caught.value.number == number


def test_a_signal_in_a_held_block_raises_when_the_outermost_one_ends() -> None:
    interrupts, done = Interrupts(), []
    with interrupts.caught(), pytest.raises(Signalled), interrupts.held():
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_an_error_of_the_held_block_is_not_hidden_by_the_signal() -> None:
    interrupts = Interrupts()
    with interrupts.caught(), pytest.raises(ZeroDivisionError), interrupts.held():
        os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError


def test_afterwards_the_signals_are_as_they_were() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupts().caught():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in SIGNALS] == before
