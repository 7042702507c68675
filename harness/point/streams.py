"""Standard streams that outlive who reads them: a run does not end because `head` did."""

import errno
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TextIO

from catalogue.terminal import EXIT_NOT_ALL_OK

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

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

    `earlier` came before, and what runs meanwhile concludes it. Afterwards the interrupt is raised;
    an error of what ran is printed then, and does not take its place.
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


_GONE: Final = (errno.EPIPE, errno.EIO)
"""What a write ends with where a pipe's reader, or a terminal, is gone."""


_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write ends with where a file can take no more."""


class _LastingFile(io.FileIO):
    """A descriptor; once nobody is at its other end, what is written goes nowhere.

    A file that can take no more ends the command.
    """

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (*_GONE, *_FULL):
                raise
            failed = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if failed.errno in _FULL:
            with suppress(OSError):  # of an stderr in the same file
                os.write(2, f"error: writing the output failed: {failed.strerror}.\n".encode())
            raise SystemExit(EXIT_NOT_ALL_OK)
        return memoryview(data).nbytes


def lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    """Return a text stream on a descriptor of which nobody need read.

    The descriptor is open, and is not closed with the stream. `stream` is what Python made of it,
    whose encoding stays; None: it was closed.
    """
    errors = "backslashreplace"  # of a path that the locale's encoding lacks, as stderr has it
    if stream is not None and stream.errors not in (None, "strict"):
        errors = stream.errors
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingFile(descriptor, "w", closefd=False)),
        encoding="utf-8" if stream is None else stream.encoding,
        errors=errors,
        line_buffering=True,
    )


def outlive_readers() -> None:
    """Make stdout and stderr of this process last, and open what is closed of 0, 1 and 2.

    A file that is opened later would take a closed one's number, and what is printed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the least free number, which is this one
    sys.stdout, sys.stderr = lasting(sys.stdout, 1), lasting(sys.stderr, 2)
