"""The best trial as a composition: a file of conf/experiment and the command that runs it."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from omegaconf import OmegaConf

from catalogue.files import tightfit_home
from harness.composition import Composer
from harness.keys import GROUPS
from harness.schema import RunConfig
from reports.record.record import write_text_atomic

__all__ = ["experiment_text", "write_best"]

NAME: Final = "best"


def write_best(
    folder: Path,
    overrides: Sequence[str],
    config: RunConfig,
    *,
    why: str,
    config_dir: Path | None,
) -> str:
    """Write the best trial as an experiment; return the command that runs it.

    Args:
        folder: of the search.
        overrides: of the trial, in Hydra's spelling.
        config: of the trial, which the file must compose to.
        why: a line for the top of the file.
        config_dir: the user's configuration files, which the experiment may need.

    Raises:
        RuntimeError: the file composes to something else.
    """
    conf = folder / "conf"
    if config_dir is not None:
        shutil.copytree(config_dir, conf, dirs_exist_ok=True)
    file = conf / "experiment" / f"{NAME}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, experiment_text(Composer(conf), overrides, why))
    (point,) = Composer(conf).plan([f"+experiment={NAME}"]).points
    if point.config.to_dict() != config.to_dict():
        raise RuntimeError(f"{file}: it composes to another configuration than the trial's.")
    return f"python -m harness --config-dir {conf} +experiment={NAME}"


def experiment_text(composer: Composer, overrides: Sequence[str], why: str) -> str:
    """Return overrides as the text of an experiment file.

    Args:
        composer: that knows their syntax.
        overrides: in Hydra's spelling.
        why: a line for the top.
    """
    defaults: list[Any] = []
    values = OmegaConf.create({})
    for item in composer.parse(overrides):
        key = item.key_or_group
        if key == "experiment":
            defaults.insert(0, item.value())
        elif key == "model":
            defaults.append({"/model": item.value()})
        elif key in GROUPS:
            defaults.append({f"override /{key}": item.value()})
        elif key == "hydra.mode" or not key.startswith("hydra"):  # an experiment's own sweep
            OmegaConf.update(values, key, item.value(), force_add=True)
    content = {"defaults": defaults, **OmegaConf.to_container(values)}  # type: ignore[dict-item]
    body = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return f"# @package _global_\n# {why}\n{body}"


def searches_folder() -> Path:
    """Return the folder of all searches."""
    return tightfit_home() / "searches"
