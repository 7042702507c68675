"""The gate of GPU tests, one set of examples, and Triton's interpreter where there is no GPU."""

import ctypes
import functools
import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.conftest_models"]

NO_DEVICE = "no CUDA device"

# The same examples each time, however loaded the machine is; --hypothesis-profile=default draws
# others.
settings.register_profile(
    "same",
    derandomize=True,
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")


@functools.cache
def has_cuda_device() -> bool:
    """Tell whether torch can use a GPU; imports torch only where a driver is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


# Triton reads the variable when a kernel is decorated, its own library's included, and any test
# may be the first to import Triton; so it is set before the first test module is imported.
if not has_cuda_device():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure() -> None:
    """Heed Ctrl-C and the others where the tests were started with them ignored (nohup, &).

    Handlers that are ignored stay so in the harness and in its processes, which is meant.
    """
    # Without a handler, warnings would be written where tests read what a command wrote.
    logging.getLogger().addHandler(logging.NullHandler())
    # Torch and transformers leave a million objects that each pass would walk: a fifth of the time
    # of compositions.
    gc.set_threshold(50_000, 20, 100)
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, handler in defaults.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let tests find messages whole, in lines of any width; those of wrapping set another one."""
    if session.config.pluginmanager.has_plugin("terminalreporter"):
        writer = session.config.get_terminal_writer()
        writer.fullwidth = writer.fullwidth  # pytest's own lines stay as wide as they are
    os.environ["COLUMNS"] = "10000"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all of tests/server to one process: a server is started once for most of its files."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            together = "tests/server"
            return together if nodeid.startswith(f"{together}/") else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as thorough what a mark thorough_but does not name.

    It names tests of its file, or cases of its test by one or more of the parts of their ids.
    """
    asked: set[tuple[Path, str]] = set()
    found: set[tuple[Path, str]] = set()
    for item in items:
        mark = item.get_closest_marker("thorough_but")
        if mark is None or not isinstance(item, pytest.Function):
            continue
        case = item.callspec.id if hasattr(item, "callspec") else ""
        fast = {x for x in mark.args if x == item.originalname or f"-{x}-" in f"-{case}-"}
        asked |= {(item.path, name) for name in mark.args}
        found |= {(item.path, name) for name in fast}
        if not fast:
            item.add_marker(pytest.mark.thorough)
    if asked - found and not any("::" in argument for argument in config.args):
        lines = [f"{path}: no test or case {name!r}" for path, name in sorted(asked - found)]
        raise pytest.UsageError("thorough_but: " + "; ".join(lines))


def pytest_collection_finish() -> None:
    """Let no collection of garbage walk what was imported, in this process or in its forks."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """Return a list that gets what is logged, from INFO on.

    A server or a console that an earlier test ran in this process has its loggers write to a stderr
    of that test, and nowhere else.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            monkeypatch.setattr(logger, "propagate", True)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield records
    root.setLevel(level)
    root.removeHandler(handler)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Leave no handler of the root logger behind: Hydra sets it up for a run."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """Return a folder whose name wants quoting, as a user's may."""
    folder = tmp_path / "a b [c]{d}"
    folder.mkdir()
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail tests marked gpu where there is no CUDA device, instead of skipping them",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or has_cuda_device():
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail(NO_DEVICE, pytrace=False)
    pytest.skip(NO_DEVICE)
