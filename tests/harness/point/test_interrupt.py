"""What ends a command ends it alike."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from harness.config.schema import CorrectnessConfig
from harness.point.point import run_point
from harness.point.streams import interrupt_afterwards, sigterm_as_interrupt
from tests.harness.cases import fake_command, run_config, scenario
from tests.harness.fakes import Script


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


def _end_and_fail(number: signal.Signals | None) -> None:
    """Get a signal, if one is named, and fail while cleaning up."""
    try:
        if number is not None:
            os.kill(os.getpid(), number)
    finally:
        raise OSError("the folder is gone")


def _guarded(guard: AbstractContextManager[None], number: signal.Signals | None) -> None:
    with guard:
        _end_and_fail(number)


@pytest.mark.parametrize("guard", [sigterm_as_interrupt, interrupt_afterwards])
def test_an_error_of_the_clean_up_takes_no_interrupt_s_place(
    capsys: pytest.CaptureFixture[str], guard: Callable[[], AbstractContextManager[None]]
) -> None:
    with pytest.raises(KeyboardInterrupt, match="signal"):
        _guarded(guard(), signal.SIGTERM)
    assert "the folder is gone" in capsys.readouterr().err
    with pytest.raises(OSError, match="gone"):
        _guarded(guard(), None)


def test_an_earlier_interrupt_comes_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    earlier = KeyboardInterrupt("before")
    with pytest.raises(KeyboardInterrupt, match="before"):
        _guarded(interrupt_afterwards(earlier), None)
    assert "the folder is gone" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt, match="before"):
        _guarded(interrupt_afterwards(earlier), signal.SIGINT)  # it waits as a first one does
    assert "the folder is gone" in capsys.readouterr().err


@pytest.mark.thorough
def test_ctrl_c_stands_where_the_point_s_folder_was_moved_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "hanging"
    script = Script(fail_at="step", failure="hang", touch=str(mark))

    def move_and_interrupt() -> None:
        while not mark.exists():
            time.sleep(0.02)
        (tmp_path / "run").rename(tmp_path / "away")
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=move_and_interrupt)
    watcher.start()
    config = run_config(scenario=scenario(correctness=CorrectnessConfig(enabled=False)))
    with pytest.raises(KeyboardInterrupt):
        run_point(config, tmp_path / "run", command=fake_command(tmp_path, script))
    watcher.join()
    assert "FileNotFoundError" in capsys.readouterr().err


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with sigterm_as_interrupt(), interrupt_afterwards():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
