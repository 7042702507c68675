"""Hydra's launchers that points may run through, and the packages that bring them."""

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Final

from catalogue.processes import python_path
from engine.errors import ConfigError, did_you_mean
from harness.folders import install_extra

BASIC: Final = "basic"
LOCAL_JOB_MINUTES: Final = 7 * 24 * 60
"""Minutes of hydra.launcher.timeout_min for local jobs, in the place of the plugin's hour."""


LAUNCHERS: Final[Mapping[str, str | None]] = {
    BASIC: None,
    "joblib": "joblib",
    "submitit_local": "submitit",
    "submitit_slurm": "submitit",
    "ray": "ray",
}
"""Name -> the extra that brings it; basic is Hydra's own and runs points one after another."""


def check_launcher(name: object) -> None:
    """Raise ConfigError unless a launcher is one of ours and what it needs is installed."""
    if name not in LAUNCHERS:
        listed = ", ".join(LAUNCHERS)
        hint = did_you_mean(str(name), LAUNCHERS)
        raise ConfigError(f"hydra/launcher: expected one of {listed}, got {name!r}.{hint}")
    extra = LAUNCHERS[str(name)]
    if extra is not None and not _is_installed(f"hydra_plugins.hydra_{extra}_launcher"):
        raise ConfigError(
            f"hydra/launcher={name}: expected the package hydra-{extra}-launcher, which is not "
            f"installed. Install it: {install_extra(extra)}"
        )
    if name == "submitit_slurm" and shutil.which("srun") is None:
        raise ConfigError(
            "hydra/launcher=submitit_slurm: expected Slurm's commands (srun, sbatch) on this "
            "machine, found none. Run it on a login node, or choose submitit_local."
        )


def default_settings(launcher: str, given: Sequence[str]) -> dict[str, int]:
    """Return settings of Hydra that a launcher needs beside those that were given."""
    key = "hydra.launcher.timeout_min"
    if launcher == "submitit_local" and not any(item.lstrip("+").startswith(key) for item in given):
        return {key: LOCAL_JOB_MINUTES}
    return {}


def make_importable(environ: Any = os.environ) -> None:
    """Let processes that a launcher starts import this code, wherever they start."""
    environ["PYTHONPATH"] = python_path(environ.get("PYTHONPATH", ""))


def keep_gpus_visible(launcher: str, environ: Any = os.environ) -> None:
    """Let Ray's processes see the GPUs: a task that reserves none would get an empty list of them.

    Points find a free GPU by its lock. What the user set stays.
    """
    if launcher == "ray":
        environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
