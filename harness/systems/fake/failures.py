"""How the engine of model=fake fails: raised, or done to its own process."""

import os
import signal
import threading
from typing import Any, NoReturn

from engine.errors import CapacityError

EXIT_CODE = 7


class OutOfMemoryError(RuntimeError):
    """Named as torch's, which the harness tells by its name."""


def strike(failure: str, plan: dict[str, Any] | None) -> NoReturn:
    """Fail in a way of `harness.fake_config.FAILURES`; does not return.

    Raises:
        CapacityError: no_fit.
        OutOfMemoryError: oom.
        MemoryError: host_oom.
        RuntimeError: error.
    """
    match failure:
        case "no_fit":
            raise CapacityError("GPU: scripted not to fit. Set model.fake.fail=none.", plan)
        case "oom":
            raise OutOfMemoryError("scripted: tried to allocate 2.00 GiB")
        case "host_oom":
            raise MemoryError("scripted: no host memory")
        case "error":
            raise RuntimeError("scripted: the engine broke down")
        case "exit":
            os._exit(EXIT_CODE)
        case "sigkill" | "sigsegv":
            os.kill(os.getpid(), signal.Signals[failure.upper()])
            threading.Event().wait()  # until the signal is here
        case "hang":
            threading.Event().wait()
        case _:
            pass
    raise ValueError(f"model.fake.fail: expected a failure, got {failure!r}.")
