"""What ends a command ends it alike."""

import os
import signal

import pytest

from harness.interrupt import interrupt_afterwards, sigterm_as_interrupt


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_ending_is_an_interrupt(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match="signal"), sigterm_as_interrupt():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def _is_ended(*numbers: signal.Signals) -> bool:
    """Return whether what is guarded ends before it is done."""
    done = False
    try:
        with interrupt_afterwards():
            for number in numbers:
                os.kill(os.getpid(), number)
            done = True
    except KeyboardInterrupt:
        return not done
    raise AssertionError("expected an interrupt, afterwards at the latest.")


def test_the_first_one_waits_and_the_second_does_not() -> None:
    assert not _is_ended(signal.SIGHUP)
    assert _is_ended(signal.SIGHUP, signal.SIGTERM)


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with sigterm_as_interrupt(), interrupt_afterwards():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
