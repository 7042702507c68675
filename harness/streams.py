"""Standard streams that outlive who reads them: a run does not end because `head` did."""

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["lasting", "outlive_readers"]

_GONE: Final = (errno.EPIPE, errno.EIO)
"""What a write ends with where a pipe's reader, or a terminal, is gone."""


class _LastingFile(io.FileIO):
    """A descriptor; once nobody is at its other end, what is written goes nowhere."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return memoryview(data).nbytes


def lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    """Return a text stream on a descriptor of which nobody need read.

    Args:
        stream: What Python made of the descriptor, whose encoding stays; None: it was closed.
        descriptor: An open one. It is not closed with the stream.
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
