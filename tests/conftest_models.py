"""Fixtures for real checkpoints. They look on the disk and never download."""

from pathlib import Path

import pytest

from catalogue.files import models_folder

# Read before any test changes TIGHTFIT_HOME.
_MODELS = models_folder()


def _model_dir(name: str) -> Path:
    folder = _MODELS / name
    if not (folder / "provenance.json").is_file():
        pytest.fail(
            f"{folder} is not there. Run `make test`, or `python -m tightfit models fetch {name}`.",
            pytrace=False,
        )
    return folder


@pytest.fixture(scope="session")
def glass_model_dir() -> Path:
    """Folder of the 852,608-parameter test model (context 128, float32, no end token)."""
    return _model_dir("glass")


@pytest.fixture(scope="session")
def smollm2_model_dir() -> Path:
    """Folder of SmolLM2-135M-Instruct (bfloat16); only for tests marked `weights`."""
    return _model_dir("smollm2_135m")
