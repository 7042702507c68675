"""Ctrl-C and SIGTERM: the same thing, and nothing that leaves work half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C meanwhile; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"signal {number} at line {frame.f_lineno if frame else None}")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interrupt_afterwards() -> Iterator[None]:
    """Let a first Ctrl-C or SIGTERM wait for what runs meanwhile; a second one does not wait.

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

    before = {number: signal.signal(number, keep) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt(f"signal {came[0]}")
