"""A process that ends with its parent. Imports little: the sampler starts with it."""

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel end this process when its parent ends (Linux); called in the child."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call above
        os._exit(1)
