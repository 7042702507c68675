"""The gate of GPU tests, one set of examples, and Triton's interpreter where there is no GPU."""

import ctypes
import functools
import gc
import os
import signal
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all of tests/server to one process: a server is started once for most of its files."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            together = "tests/server"
            return together if nodeid.startswith(f"{together}/") else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Let no collection of garbage walk what was imported, in this process or in its forks."""
    gc.collect()
    gc.freeze()


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
