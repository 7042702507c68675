"""Ctrl-C, SIGTERM and the end of the terminal: the same, and nothing that leaves work half done."""

import signal
import threading
import traceback
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


def _interrupt(number: int, frame: FrameType | None) -> KeyboardInterrupt:
    return KeyboardInterrupt(f"signal {number} at line {frame.f_lineno if frame else None}")


def _interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt that was being handled when an error came, None where none was."""
    behind = error.__context__
    while behind is not None and not isinstance(behind, KeyboardInterrupt):
        behind = behind.__context__
    return behind


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C meanwhile; does nothing outside the main thread.

    An error of what cleans up after an interrupt is printed, and does not take its place.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _interrupt(number, frame)

    before = _handle(_ENDINGS, interrupt)
    try:
        yield
    except Exception as error:
        came = _interrupt_behind(error)
        if came is None:
            raise
        traceback.print_exception(error)
        raise came from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupt_afterwards(earlier: KeyboardInterrupt | None = None) -> Iterator[None]:
    """Let a first Ctrl-C, SIGTERM or SIGHUP wait for what runs meanwhile; a second one does not.

    Args:
        earlier: one that came before, and that what runs meanwhile concludes.

    Raises:
        KeyboardInterrupt: afterwards, when one came, earlier or meanwhile; an error of what ran is
            printed then, and does not take its place.
    """
    came = [] if earlier is None else [earlier]
    num_waiting = len(came) + 1

    def keep(number: int, frame: FrameType | None) -> None:
        came.append(_interrupt(number, frame))
        if len(came) > num_waiting:
            raise came[-1]

    is_main = threading.current_thread() is threading.main_thread()
    before = _handle(_SIGNALS, keep) if is_main else {}
    try:
        yield
    except Exception as error:
        if not came:
            raise
        traceback.print_exception(error)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise came[0]
