"""Hydra's launchers that points may run through, and the packages that bring them."""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from engine.errors import ConfigError, did_you_mean
from harness.folders import ROOT

BASIC: Final = "basic"
LOCAL_JOB_MINUTES: Final = 7 * 24 * 60
"""Minutes of hydra.launcher.timeout_min for local jobs, in the place of the plugin's hour."""


@dataclass(frozen=True, kw_only=True)
class _Plugin:
    module: str
    package: str
    extra: str


_SUBMITIT: Final = _Plugin(
    module="hydra_plugins.hydra_submitit_launcher",
    package="hydra-submitit-launcher",
    extra="submitit",
)
LAUNCHERS: Final = MappingProxyType(
    {
        BASIC: None,
        "joblib": _Plugin(
            module="hydra_plugins.hydra_joblib_launcher",
            package="hydra-joblib-launcher",
            extra="joblib",
        ),
        "submitit_local": _SUBMITIT,
        "submitit_slurm": _SUBMITIT,
        "ray": _Plugin(
            module="hydra_plugins.hydra_ray_launcher", package="hydra-ray-launcher", extra="ray"
        ),
    }
)
"""Name -> what brings it; basic is Hydra's own and runs points one after another."""


def check_launcher(name: object) -> None:
    """Check that a launcher is one of ours and that what it needs is installed.

    Raises:
        ConfigError: it is not; the message says what to install.
    """
    if name not in LAUNCHERS:
        listed = ", ".join(LAUNCHERS)
        hint = did_you_mean(str(name), LAUNCHERS)
        raise ConfigError(f"hydra/launcher: expected one of {listed}, got {name!r}.{hint}")
    plugin = LAUNCHERS[str(name)]
    if plugin is not None and not _is_installed(plugin.module):
        raise ConfigError(
            f"hydra/launcher={name}: expected the package {plugin.package}, which is not "
            f"installed. Install it: pip install 'tightfit[{plugin.extra}]'"
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
    root = str(ROOT)
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        environ["PYTHONPATH"] = os.pathsep.join([root, *paths])


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
