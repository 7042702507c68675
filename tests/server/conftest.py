"""One server with a tiny model for all files of tests that only ask it."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.launch import Served, serving, write_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sizes, tokenizer and chat template; weights are made up."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny [1]")


@pytest.fixture(scope="session")
def served(tiny_model: Path) -> Iterator[Served]:
    """A server that is ready; at its end it is asked to stop, and does."""
    flags = ("--served-model-name", "tiny", "org/tiny", "--log-prompts")
    with serving(tiny_model, *flags) as found:
        yield found
        engine = found.engine
        found.process.send_signal(signal.SIGTERM)
        assert found.end() == 0
        assert not engine.is_running()
