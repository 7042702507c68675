"""Compose conf/ and a command line's overrides into RunConfigs, all of them before any runs."""

import copy
import re
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from catalogue.files import CONF, tightfit_home
from engine.offload_config import OffloadWarning
from harness.ab_config import quote_sides
from harness.build import check_settings
from harness.chosen import check_chosen
from harness.complaints import explain
from harness.errors import ConfigError
from harness.keys import check_known_keys
from harness.launchers import BASIC, check_launcher
from harness.overrides import check_overrides, is_group, is_hydra, normalise
from harness.schema import RunConfig

__all__ = ["CONFIG_NAME", "DEMO_MODEL", "Composer", "Plan", "Point", "to_run_config"]

CONFIG_NAME: Final = "config"
DEMO_MODEL: Final = "smollm2_135m"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One composed and checked configuration."""

    overrides: list[str]
    composed: DictConfig
    config: RunConfig
    warnings: list[str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a command line asks for: the overrides in Hydra's spelling and every point."""

    overrides: list[str]
    multirun: bool
    points: list[Point]
    is_demo: bool
    """No model was chosen, so the demo model was taken."""


def _stamp() -> str:
    now = datetime.now(UTC).astimezone()
    return f"{now:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(3)}"


def _default_size(size: float, num_blocks: int | None, swap_space: float) -> float | None:
    """Return the size of a host tier of KV blocks, or null where another setting gives one."""
    return None if num_blocks is not None or swap_space else size


def register() -> None:
    """Make the schema and the resolvers of conf/config.yaml known to Hydra; may be repeated."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig, provider="tightfit")
    OmegaConf.register_new_resolver(
        "tightfit_runs", lambda: str(tightfit_home() / "runs"), replace=True
    )
    OmegaConf.register_new_resolver("tightfit_stamp", _stamp, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("tightfit_default_size", _default_size, replace=True)
    OmegaConf.register_new_resolver("tightfit_sum", lambda *parts: sum(parts), replace=True)
    setup_globals()


def to_run_config(composed: DictConfig) -> tuple[RunConfig, list[str]]:
    """Turn one composition (with or without Hydra's node) into a RunConfig and its warnings.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value out of bounds.
    """
    task = copy.deepcopy(composed)
    with read_write(task), open_dict(task):
        task.pop("hydra", None)
    try:
        check_known_keys(cast("dict[str, Any]", OmegaConf.to_container(task)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", OffloadWarning)
            config = OmegaConf.to_object(task)
    except ConfigError:
        raise
    except Exception as error:
        raise explain(error) from error
    if not isinstance(config, RunConfig):
        raise TypeError(f"expected a RunConfig, got {type(config).__name__}")
    check_settings(config)
    messages = [str(item.message) for item in caught if issubclass(item.category, OffloadWarning)]
    return config, list(dict.fromkeys(messages))


class Composer:
    """Hydra's composition of conf/ and a user's folder; runs nothing and writes nothing."""

    def __init__(self, config_dir: Path | None = None) -> None:
        register()
        search_path = create_config_search_path(str(CONF))
        if config_dir is not None:
            search_path.prepend(
                provider="command-line",
                path=f"file://{config_dir.resolve()}",
                anchor=SearchPathQuery(provider="schema"),
            )
        self._loader = ConfigLoaderImpl(config_search_path=search_path)

    def plan(
        self, typed: Sequence[str], *, multirun: bool = False, has_model: bool = False
    ) -> Plan:
        """Compose and check every point that a command line asks for.

        Args:
            typed: Overrides; `model=x`, `+model=x` and `++model=x` are the same here.
            multirun: -m was given.
            has_model: It is known that they choose a model.

        Raises:
            ConfigError: the first thing that is wrong, in any point.
        """
        parsed = self.parse(typed)
        check_overrides(parsed, self._loader.get_group_options)
        overrides = normalise(parsed)
        try:
            return self._plan_model(overrides, multirun=multirun, has_model=has_model)
        except ConfigError:
            raise
        except Exception as error:
            raise explain(error) from error

    def check(self, typed: Sequence[str]) -> None:
        """Check keys, groups and options of overrides without composing.

        Raises:
            ConfigError: the first thing that is wrong.
        """
        check_overrides(self.parse(typed), self._loader.get_group_options)

    def parse(self, typed: Sequence[str]) -> list[Override]:
        """Return overrides as Hydra parses them.

        Raises:
            ConfigError: one is of another form.
        """
        parser = OverridesParser.create(config_loader=self._loader)
        parsed = []
        for text in typed:
            try:
                parsed.extend(parser.parse_overrides([quote_sides(text)]))
            except HydraException as error:
                quoted = _quote_value(text)
                if quoted is None:
                    raise ConfigError(
                        f"{text}: expected key=value or group=option. Quote a value that holds "
                        "brackets, commas or spaces."
                    ) from error
                parsed.extend(parser.parse_overrides([quoted]))
        return parsed

    def _plan_model(self, overrides: list[str], *, multirun: bool, has_model: bool) -> Plan:
        """Find the spelling of the model that composes: appended, or in an experiment's place."""
        chosen = [item for item in overrides if item.startswith("+model=")]
        is_demo = not (chosen or has_model or self._chooses_model(overrides, multirun=multirun))
        if is_demo:
            overrides = [f"+model={DEMO_MODEL}", *overrides]
        try:
            points, multirun = self._compose_all(overrides, multirun=multirun)
        except ConfigCompositionException as error:
            # Hydra's words for an experiment that chooses another model, or the same one.
            twice = ("Multiple values for model", "model appears more than once")
            if not any(text in str(error) for text in twice):
                raise
            overrides = [item.removeprefix("+") if item in chosen else item for item in overrides]
            points, multirun = self._compose_replaced(overrides, multirun=multirun)
        return self._check_all(overrides, points, multirun=multirun, is_demo=is_demo)

    def _chooses_model(self, overrides: list[str], *, multirun: bool) -> bool:
        """Return whether the experiment (or the sweep in it) or the study chooses a model."""
        parsed = self.parse(overrides)
        experiments = [item for item in parsed if item.key_or_group in {"experiment", "study"}]
        if not experiments:
            return False
        lines = [str(item.input_line) for item in parsed if is_hydra(item) or is_group(item)]
        if not experiments[0].is_sweep_override():
            master = self._load(lines, RunMode.MULTIRUN)
            swept = {str(key).lstrip("+") for key in master.hydra.sweeper.params or {}}
            return "model" in swept or "model" in master.hydra.runtime.choices
        points, _ = self._compose_all(lines, multirun=multirun)
        have = ["model" in item[1].hydra.runtime.choices for item in points]
        if any(have) and not all(have):
            raise ConfigError(
                "model: some experiments of this sweep choose a model and others do not. Run them "
                "apart."
            )
        return any(have)

    def _compose_replaced(
        self, overrides: list[str], *, multirun: bool
    ) -> tuple[list[tuple[list[str], DictConfig]], bool]:
        try:
            return self._compose_all(overrides, multirun=multirun)
        except ConfigCompositionException as error:
            if "Could not override 'model'" not in str(error):
                raise
            raise ConfigError(
                "model: some experiments of this sweep choose a model and others do not, so one "
                "model=NAME cannot hold for all. Run them apart."
            ) from error

    def _load(self, overrides: list[str], mode: RunMode) -> DictConfig:
        try:
            return self._load_raw(overrides, mode)
        except Exception:
            self._check_parents(overrides)
            raise

    def _load_raw(self, overrides: list[str], mode: RunMode) -> DictConfig:
        return self._loader.load_configuration(
            config_name=CONFIG_NAME,
            overrides=overrides,
            run_mode=mode,
            validate_sweep_overrides=False,
        )

    def _check_parents(self, overrides: list[str]) -> None:
        """Refuse a value below a node that is null, which OmegaConf reports without its name."""
        parsed = self.parse(overrides)
        groups = [str(item.input_line) for item in parsed if is_hydra(item) or is_group(item)]
        base = self._load_raw(groups, RunMode.MULTIRUN)
        for item in parsed:
            key = item.key_or_group
            node = key if isinstance(item.value(), dict) else key.rpartition(".")[0]
            if node and not is_hydra(item) and OmegaConf.select(base, node) is None:
                root = node.split(".")[0]
                remedy = "scenario=ab" if root == "ab" else f"an option of {root} that sets it"
                raise ConfigError(
                    f"{key}: {node} is null in this configuration, so it has no keys. Choose "
                    f"{remedy}."
                )

    def _compose_all(
        self, overrides: list[str], *, multirun: bool
    ) -> tuple[list[tuple[list[str], DictConfig]], bool]:
        several = [item for item in self.parse(overrides) if item.is_sweep_override()]
        mode = RunMode.MULTIRUN if multirun or several else RunMode.RUN
        master = self._load(overrides, mode)
        _check_hydra(master)
        if not multirun and not several and master.hydra.mode != RunMode.MULTIRUN:
            _check_single(master)
            return [(overrides, master)], False
        if not multirun and master.hydra.mode != RunMode.MULTIRUN:
            raise ConfigError(
                f"{several[0].input_line}: several values make a sweep. Add -m, or quote the value "
                "if the comma belongs to it."
            )
        swept = master.hydra.sweeper.params or {}
        if "model" in swept and any(item.startswith("+model=") for item in overrides):
            raise ConfigError(
                f"model: the experiment sweeps model={swept['model']} and makes no choice that "
                "these replace, so they would run in the place of the model that was typed. Write "
                "+model in its hydra.sweeper.params, or /model in its defaults list."
            )
        params = [f"{key}={value}" for key, value in swept.items()]
        task = params + list(master.hydra.overrides.task)
        batches = BasicSweeper.split_arguments(self.parse(task), None)
        own = list(master.hydra.overrides.hydra)
        points = [(batch, self._load(own + batch, RunMode.RUN)) for batch in batches[0]]
        if not swept:
            _check_left_out(points)
        return points, True

    def _check_all(
        self,
        overrides: list[str],
        composed: list[tuple[list[str], DictConfig]],
        *,
        multirun: bool,
        is_demo: bool,
    ) -> Plan:
        points: list[Point] = []
        for own, config in composed:
            try:
                run, messages = to_run_config(config)
                check_chosen(run, own)
            except ConfigError as error:
                where = f" (point {len(points)} of the sweep: {' '.join(own)})" if multirun else ""
                raise ConfigError(f"{error}{where}") from error
            points.append(Point(overrides=own, composed=config, config=run, warnings=messages))
        if not points:
            raise ConfigError("sweep: expected at least one point, got none. Check the ranges.")
        return Plan(overrides=overrides, multirun=multirun, points=points, is_demo=is_demo)


def _quote_value(text: str) -> str | None:
    """Quote a value that Hydra's grammar has no letters for, such as ~ or an umlaut of a path."""
    key, _, value = text.partition("=")
    if not re.fullmatch(r"[+\w./]+", key) or not value or {*value} & {*"'\"[]{}(),\\$"}:
        return None
    return f"{key}='{value}'"


def _check_hydra(master: DictConfig) -> None:
    choices = master.hydra.runtime.choices
    check_launcher(choices.get("hydra/launcher"))
    sweeper = choices.get("hydra/sweeper")
    if sweeper != "basic":
        raise ConfigError(
            f"hydra/sweeper: expected basic (every combination of the values given), got "
            f"{sweeper!r}. Remove it; python -m harness.search looks for the best values."
        )


def _check_left_out(points: Sequence[tuple[list[str], DictConfig]]) -> None:
    """Refuse a sweep over experiments with sweeps of their own, which Hydra leaves out."""
    for batch, point in points:
        if point.hydra.sweeper.params:
            raise ConfigError(
                f"experiment: expected one experiment, got several ({' '.join(batch)}), and it has "
                f"a sweep of its own ({', '.join(point.hydra.sweeper.params)}), which would be "
                "left out. Run them one after another."
            )


def _check_single(master: DictConfig) -> None:
    """Refuse a launcher for a single point, which would not use it."""
    launcher = master.hydra.runtime.choices.get("hydra/launcher")
    if launcher != BASIC:
        raise ConfigError(
            f"hydra/launcher: {launcher} has an effect only on a sweep. Add -m, or remove it."
        )
