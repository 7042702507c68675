"""Where Tightfit keeps its files. The only reader of TIGHTFIT_HOME."""

import os
from pathlib import Path


def tightfit_home() -> Path:
    """Return the absolute folder that holds the database, the runs and the models.

    TIGHTFIT_HOME when it is set and not empty, else `tightfit` in the user's data directory
    (XDG_DATA_HOME, else ~/.local/share). The folder is not created here.
    """
    chosen = os.environ.get("TIGHTFIT_HOME", "").strip()
    if chosen:
        return Path(chosen).expanduser().resolve()
    data = os.environ.get("XDG_DATA_HOME", "").strip()
    base = Path(data).expanduser() if data else Path.home() / ".local" / "share"
    return (base / "tightfit").resolve()


def models_folder() -> Path:
    """Return the folder of converted and downloaded checkpoints, inside tightfit_home()."""
    return tightfit_home() / "models"
