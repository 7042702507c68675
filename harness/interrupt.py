"""Ctrl-C, SIGTERM and the end of the terminal: the same, and nothing that leaves work half done."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP)
_SIGNALS: Final = (signal.SIGINT, *_ENDINGS)
_Handler = Callable[[int, FrameType | None], None]


def _handle(numbers: Sequence[signal.Signals], handler: _Handler) -> dict[signal.Signals, Any]:
    """Handle signals but those that are ignored (nohup, a shell's &); return what did before."""
    before = {number: signal.getsignal(number) for number in numbers}
    heeded = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, handler)
    return heeded


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C meanwhile; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"signal {number} at line {frame.f_lineno if frame else None}")

    before = _handle(_ENDINGS, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupt_afterwards() -> Iterator[None]:
    """Let a first Ctrl-C, SIGTERM or SIGHUP wait for what runs meanwhile; a second one does not.

    Raises:
        KeyboardInterrupt: afterwards, when one came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt(f"signal {number} at line {frame.f_lineno if frame else None}")
        came.append(number)

    before = _handle(_SIGNALS, keep)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt(f"signal {came[0]}")
