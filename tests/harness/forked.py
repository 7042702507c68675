"""Workers of the fake engine that are forked from the test's process: the imports are made."""

import functools
import gc
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

import harness.worker  # noqa: F401  once, not in each fork
from catalogue.processes import start_child
from harness.observe.environment import git_state
from reports.record.rows import TELEMETRY_SPOOL
from tests.harness import fakes

git_state_once = functools.cache(git_state)


class Forked:
    """What of a Popen the project uses."""

    def __init__(self, pid):
        self.pid = pid

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_child(command, *, stdin, stdout, stderr, environ=None):
    """Start a worker of the fake engine as start_child does, without a new interpreter."""
    if list(command[1:3]) != ["-m", "tests.harness.fakes"]:
        return start_child(command, stdin=stdin, stdout=stdout, stderr=stderr, environ=environ)
    ready, is_ready = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child lacks
        pid = os.fork()
    if pid:
        os.close(is_ready)
        os.read(ready, 1)  # it leads a group of its own now
        os.close(ready)
        return Forked(pid)
    code = 1
    gc.freeze()  # the worker collects garbage: its own, not that of the tests before it
    try:
        os.setsid()
        os.close(is_ready)
        _begin(stdout.fileno(), environ or {})
        code = fakes.main(list(command[3:]))
    except BaseException:  # noqa: BLE001  the child must not go on as the test
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


def start_idle_sampler(command, **options):
    """Start what stands in for a sampler: a spool without rows, until its input is closed."""
    assert "harness.observe.sampler" in command
    spool = Path(command[command.index("--parent") - 1]) / TELEMETRY_SPOOL
    code = f"import sys; open({str(spool)!r}, 'w').close(); sys.stdin.read()"
    return start_child([sys.executable, "-I", "-S", "-c", code], **options)


def _begin(log, environ):
    """Have what a new interpreter has: its handlers of signals, its streams, its environment."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False, buffering=1)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)
    os.environ.update(environ)
