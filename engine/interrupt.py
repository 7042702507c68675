"""Ctrl-C between two pieces of bookkeeping, never amid one."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Keeper:
    """Keeps the first Ctrl-C for later and hands others on."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler, self.came = handler, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            self.handler(number, frame)
        self.came = True


@contextmanager
def interrupt_afterwards() -> Iterator[None]:
    """Let a first Ctrl-C wait for what runs meanwhile; a second one does not wait.

    The handler of before gets it. Within another it does nothing, nor outside the main thread,
    which alone is interrupted, nor where SIGINT has no handler of Python's.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before) or isinstance(before, _Keeper):
        yield
        return
    keeper = _Keeper(before)
    signal.signal(signal.SIGINT, keeper)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if keeper.came:
            signal.raise_signal(signal.SIGINT)
