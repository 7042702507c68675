"""Compose conf/ and a command line's overrides into RunConfigs, all of them before any runs."""

import functools
import itertools
import re
import secrets
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from hydra import initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.completion_plugin import DefaultCompletionPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from catalogue.cards import unknown_card
from catalogue.entry import is_hub_id
from catalogue.files import CONF, tightfit_home
from catalogue.models import find
from engine.asked.keywords import NOT_SUPPORTED
from engine.asked.offload import OffloadWarning
from engine.errors import ConfigError, closest, did_you_mean
from engine.sealed import comma_hint, describe_type, key_types, unit_hint, without_null
from harness.config.command import check_chosen, key_of
from harness.config.engine import check_settings
from harness.config.launchers import BASIC, check_launcher
from harness.config.schema import GROUPS, RunConfig
from harness.config.source import SCHEME, Loader, TextSource, copied, keep_texts, quoted, split


@functools.cache
def _known() -> Mapping[str, Any]:
    """Return the type of every key of a configuration."""
    return MappingProxyType(dict(key_types(RunConfig)))


@functools.cache
def _known_of_hydra() -> Mapping[str, Any]:
    return MappingProxyType(dict(key_types(HydraConf, "hydra.")))


def is_known_key(path: str, known: Mapping[str, Any]) -> bool:
    """Return whether a dotted path is a field, or lies in a free mapping such as rope_scaling."""
    return path in known or is_free_key(path, known)


def is_free_key(path: str, known: Mapping[str, Any]) -> bool:
    """Return whether a dotted path is a free mapping, or lies in one."""
    parts = path.split(".")
    above = (known.get(".".join(parts[:count])) for count in range(1, len(parts) + 1))
    return any(hint is Any or typing.get_origin(without_null(hint)) is dict for hint in above)


def unknown_key(path: str) -> ConfigError:
    """Return the error for a key that RunConfig does not have, with the closest one that it has."""
    if path == "experiment":  # is a group, and a key where a file lacks its first line
        return ConfigError(
            "experiment: expected a file that begins with the line # @package _global_, got one "
            "without it, whose settings would have no effect. Add the line."
        )
    known = list(_known())
    parent, _, last = path.rpartition(".")
    if why := NOT_SUPPORTED.get(last, ((), ""))[1]:
        return ConfigError(f"{path}: there is no such key: {why}")
    siblings = {name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent}
    # Of keys with the same last part the one nearest to the root, and in the same node if any.
    same = [name for name in known if name.rpartition(".")[2] == last]
    same = [name for name in same if not name.startswith("model.spec.")] or same
    same.sort(key=lambda name: (not name.startswith(f"{parent}."), name.count(".")))
    if parent and siblings:
        inside = [name for name in same if name.startswith(f"{parent}.")]
        found = inside or closest(last, siblings) or same
        listed = f"Keys of {parent}: {', '.join(sorted(siblings))}."
        return ConfigError(f"{path}: there is no such key.{_hint(found)} {listed}")
    roots = list(dict.fromkeys([*GROUPS, *(name for name in known if "." not in name)]))
    ends = [name for name in known if name.endswith(f".{path}")]
    found = ends or closest(path, known) or same if parent else same or closest(path, roots)
    if not found and not parent:
        leaf = closest(path, (name.rpartition(".")[2] for name in known))
        found = [name for name in known if leaf and name.rpartition(".")[2] == leaf[0]]
    listed = f"There are: {', '.join(roots)}."
    return ConfigError(f"{path}: there is no such key or group.{_hint(found)} {listed}")


def _hint(found: list[str]) -> str:
    return f" Did you mean {found[0]}?" if found else ""


def check_known_keys(content: dict[str, Any]) -> None:
    """Raise ConfigError for the first key of a composed configuration that RunConfig does not have.

    OmegaConf lets `+key=value` pass a schema.
    """
    known = _known()
    for path in _paths(content):
        if not is_known_key(path, known):
            raise unknown_key(path)


def _paths(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")


def _causes(error: BaseException) -> list[BaseException]:
    chain = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _of_omegaconf(error: OmegaConfBaseException) -> ConfigError:
    key = getattr(error, "full_key", None) or ""
    hint = _known().get(key)
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and key and hint is None:
        if key.split(".")[0] == "hydra":
            return ConfigError(f"{key}: Hydra has no such key.")
        return unknown_key(key)
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{key}: expected a value, got none. Set {key}=...")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(".") if lines else type(error).__name__
    if isinstance(error, ValidationError) and hint is not None:
        words = r"Value ('.*') (?:of|is)|Invalid \w+ assigned: (\w+)|Cannot convert '(\w+)'"
        value = re.match(words, text)
        got = "null" if "is not Optional" in text else value and value[value.lastindex or 0]
        end = f", got {got}.{unit_hint(got.strip(chr(39)))}" if got else f". {text}."
        return ConfigError(f"{key}: expected {describe_type(hint)}{end}")
    return ConfigError(f"{key}: {text}." if key else f"{text}.")


def _of_missing_option(text: str) -> str | None:
    match = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    listed = re.search(r"Available options in '[^']+':\n((?:\s+\S+\n?)+)", text)
    if match is None or listed is None:
        return None
    options = listed[1].split()
    if match[1] == "gpu":
        return unknown_card(match[2], options)
    hint = did_you_mean(match[2], options)
    return f"{match[1]}: expected one of {', '.join(options)}, got {match[2]!r}.{hint}"


def _of_no_default(text: str) -> str | None:
    """Say what a file's choice of a group should be where the defaults list has none."""
    match = re.search(r"(?:In '([^']+)': )?Could not override '([^']+)'", text)
    if match is None:
        return None
    where = f"{match[1]}: " if match[1] else ""
    group = match[2].removeprefix("/")
    if group not in GROUPS:
        return (
            f"{where}{group}: there is no such group.{did_you_mean(group, GROUPS)} There are: "
            f"{', '.join(GROUPS)}."
        )
    return (
        f"{where}{group}: expected a choice to replace, got none, because conf/config.yaml makes "
        f"none. Write /{group} without override in a defaults list, +{group} in a sweep."
    )


def explain(error: Exception) -> ConfigError:
    """Return one message for an error of composing, without Hydra's own vocabulary."""
    chain = _causes(error)
    if own := next((item for item in chain if isinstance(item, ConfigError)), None):
        return own
    if wrong := next((item for item in chain if isinstance(item, OmegaConfBaseException)), None):
        return _of_omegaconf(wrong)
    for item in chain:
        if isinstance(item, YAMLError):
            return ConfigError("YAML: " + " ".join(str(item).split()))
        if isinstance(item, UnicodeDecodeError):
            return ConfigError(
                f"YAML: expected files in UTF-8, got the byte {item.object[item.start]:#x} at "
                f"position {item.start} of one. Save it as UTF-8."
            )
    text = str(error)
    found = _of_missing_option(text) or _of_no_default(text)
    return ConfigError(found or " ".join(text.split()))


APPENDED_GROUPS: Final = ("model", "experiment", "study")
"""Groups without an entry in the defaults list of conf/config.yaml: Hydra wants a + for them."""


def is_hydra(override: Override) -> bool:
    """Return whether an override is about Hydra itself (hydra.x=, hydra/x=)."""
    return override.key_or_group.split(".")[0].split("/")[0] == "hydra"


def is_group(override: Override) -> bool:
    """Return whether an override chooses a file of a group."""
    return override.key_or_group in GROUPS


def _values(override: Override) -> list[object]:
    if override.is_sweep_override() and override.is_discrete_sweep():
        return list(override.sweep_iterator())
    value = override.value()
    return list(value) if isinstance(value, list) else [value]


def _check_options(override: Override, options: Sequence[str]) -> None:
    group = override.key_or_group
    listed = ", ".join(options)
    values = _values(override)
    if not values:
        raise ConfigError(
            f"{override.input_line}: no option of {group} matches. There are: {listed}."
        )
    for value in values:
        if value not in options:
            if group == "gpu":
                raise ConfigError(unknown_card(str(value), options))
            if group == "model" and "/" in str(value):
                hint = _elsewhere(str(value))
                raise ConfigError(f"model: expected a name of conf/model, got {value!r}.{hint}")
            hint = did_you_mean(str(value), options)
            raise ConfigError(f"{group}: expected one of {listed}, got {value!r}.{hint}")


def _elsewhere(value: str) -> str:
    """Return what to write for a folder, or for OWNER/NAME of a model hub."""
    if not is_hub_id(value) or Path(value).exists():
        return f" A folder is +model=local model.path={value}."
    model = find(value)
    if model.spec is not None:
        return f" That is +model={model.name}."
    return (
        f" Another model of the hub: `hf download {value} --local-dir FOLDER`, then +model=local "
        "model.path=FOLDER."
    )


def _check_switch(override: Override) -> None:
    """Refuse a number for a switch: OmegaConf takes 0 as false and any other integer as true."""
    for value in _values(override):
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ConfigError(
                f"{override.key_or_group}: expected true or false, got {value!r}. Write one of the "
                "two."
            )


def check_overrides(overrides: Sequence[Override], options: Callable[[str], list[str]]) -> None:
    """Raise ConfigError for an unknown key, group or option, or a form that is not supported.

    `options` returns the names of a group's files.
    """
    known, hydra_keys = _known(), _known_of_hydra()
    for override in overrides:
        _check_form(override)
        key = override.key_or_group
        if key == "hydra/launcher":
            check_launcher(override.value())
        elif is_hydra(override):
            _check_hydra_key(key, hydra_keys)
        elif key in GROUPS:
            _check_options(override, options(key))
        elif not is_known_key(key, known):
            raise unknown_key(key)
        elif known.get(key) is bool:
            _check_switch(override)


def _check_form(override: Override) -> None:
    line = override.input_line
    if not override.key_or_group:
        raise ConfigError(f"{line}: expected key=value or group=option.")
    if override.is_sweep_override() and not override.is_discrete_sweep():
        raise ConfigError(f"{line}: expected a list of values or range(start,stop,step).")
    if override.is_delete():
        raise ConfigError(
            f"{line}: keys cannot be removed. Set a value, or choose another option of the group "
            "(offload=none, tracking=none)."
        )
    if override.package is not None:
        raise ConfigError(f"{line}: expected a group without @package. Remove @{override.package}.")


def _check_hydra_key(key: str, known: Mapping[str, Any]) -> None:
    if key.startswith(("hydra.searchpath", "hydra.callbacks")):
        hint = "" if "callbacks" in key else " Give --config-dir FOLDER."
        raise ConfigError(f"{key}: expected no such setting, which has no effect here.{hint}")
    if key.startswith("hydra.sweeper.params"):
        raise ConfigError(f"{key}: give the values with -m key=a,b, or in an experiment.")
    if "/" not in key and not is_known_key(key, known):
        raise ConfigError(f"{key}: Hydra has no such key.{did_you_mean(key, known)}")


def _spell(override: Override, known: Mapping[str, Any]) -> str:
    line = override.input_line or ""
    key = override.key_or_group
    value = line.partition("=")[2]
    if is_hydra(override):
        return line
    if key in APPENDED_GROUPS:
        return f"+{key}={value}"
    if key not in GROUPS and is_free_key(key, known):
        return f"++{key}={value}"
    return f"{key}={value}"


def _leaves(key: str, mapping: str) -> dict[str, str]:
    """Return the overrides of single keys that a mapping such as {a:1,b:{c:2}} stands for."""
    found: dict[str, str] = {}
    for item in split(mapping.strip()[1:-1]):
        name, _, value = item.strip().partition(":")
        path, value = f"{key}.{name.strip()}", value.strip()
        found |= _leaves(path, value) if value.startswith("{") else {path: f"{path}={value}"}
    return found


def expand(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the overrides of every point: each combination of the values given, as typed.

    Where a key is given twice, the later value holds.
    """
    parser = OverridesParser.create()
    values: dict[str, list[str]] = {}
    for item in overrides:
        key = item.get_key_element()
        if item.is_sweep_override():
            # A choice(...) has lost the quotes of its texts.
            lines = (f"{key}={value}" for value in item.sweep_string_iterator())
            values[key] = [keep_texts(line, parser) for line in lines]
        else:
            values[key] = [str(item.input_line)]
    return [list(batch) for batch in itertools.product(*values.values())]


def normalise(overrides: Sequence[Override]) -> list[str]:
    """Return the overrides in Hydra's spelling; of one key given twice, the later one.

    Appended groups get a +, other groups and known keys none. They stand first, model before
    experiment, so that an experiment's own values win over the model's file. Mappings given twice
    for one node both count, key by key.
    """
    known = _known()
    times = Counter(override.key_or_group for override in overrides)
    latest: dict[str, str] = {}
    for override in overrides:
        key, line = override.key_or_group, _spell(override, known)
        if times[key] > 1 and isinstance(override.value(), dict) and not is_free_key(key, known):
            latest |= _leaves(*line.split("=", 1))
        else:
            latest[key] = line
    order = {name: place for place, name in enumerate(APPENDED_GROUPS)}
    return [latest[key] for key in sorted(latest, key=lambda key: order.get(key, len(order)))]


CONFIG_NAME: Final = "config"
DEMO_MODEL: Final = "smollm2_135m"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One composed and checked configuration."""

    overrides: list[str]
    composed: DictConfig
    config: RunConfig
    warnings: list[str]
    config_dir: str | None = None
    """The user's folder of configurations, absolute; None: only conf/ was used."""


_Composed = tuple[DictConfig, list[tuple[list[str], DictConfig]], bool]
"""What a launcher is configured by, every point with its overrides, and whether -m."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a command line asks for: the overrides in Hydra's spelling and every point."""

    overrides: list[str]
    multirun: bool
    points: list[Point]
    is_demo: bool
    """No model was chosen, so the demo model was taken."""
    master: DictConfig
    """What Hydra's launcher of a sweep is configured by; of a single point that point itself."""


def _stamp() -> str:
    now = datetime.now(UTC).astimezone()
    return f"{now:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(3)}"


def _default_size(size: float, num_blocks: int | None, swap_space: float) -> float | None:
    """Return the size of a host tier of KV blocks, or null where another setting gives one."""
    return None if num_blocks is not None or swap_space else size


@functools.cache
def register() -> None:
    """Make the schema and the resolvers of conf/config.yaml known to Hydra; may be repeated."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig, provider="tightfit")
    OmegaConf.register_new_resolver(
        "tightfit_runs", lambda: str(tightfit_home() / "runs"), replace=True
    )
    OmegaConf.register_new_resolver("tightfit_stamp", _stamp, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("tightfit_default_size", _default_size, replace=True)
    OmegaConf.register_new_resolver("tightfit_sum", lambda *parts: sum(parts), replace=True)
    Plugins.instance().register(TextSource)
    setup_globals()


def to_run_config(composed: DictConfig) -> tuple[RunConfig, list[str]]:
    """Turn one composition (with or without Hydra's node) into a RunConfig and its warnings.

    Raises ConfigError for an unknown key, a wrong type, or a value out of bounds.
    """
    task = copied(composed)
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


def with_values(point: Point, values: Mapping[str, Any]) -> Point:
    """Return a point with settings that were not known when it was composed."""
    if not values:
        return point
    composed = copied(point.composed)
    for key, value in values.items():
        OmegaConf.update(composed, key, value)
    config, messages = to_run_config(composed)
    overrides = [*point.overrides, *(f"{key}={value}" for key, value in values.items())]
    return Point(overrides=overrides, composed=composed, config=config, warnings=messages)


@functools.cache
def _loader() -> Loader:
    """Return the loader of conf/; one a process, so that its files are read once."""
    with initialize_config_dir(str(CONF), job_name="harness", version_base="1.3"):
        path = GlobalHydra.instance().config_loader().get_search_path()
    # Before the folder that Hydra was given, which is the same, read by TextSource.
    path.prepend(provider=SCHEME, path=f"{SCHEME}://{CONF}", anchor="main")
    return Loader(path)


def complete(line: str) -> list[str]:
    """Return what the last word of a command line of settings may become, as Hydra completes it."""
    register()
    *typed, last = line.split(" ")
    before = [re.sub(r"^\+*model=", "+model=", word) for word in typed if "," not in word]
    plugin = DefaultCompletionPlugin(_loader())
    words = plugin._query("config", " ".join([*before, last]))  # noqa: SLF001  its door
    return [word for word in words if not word.startswith("hydra")]


class Composer:
    """Hydra's composition of conf/ and a user's folder; runs nothing and writes nothing."""

    def __init__(self, config_dir: Path | None = None) -> None:
        register()
        self._loader = _loader()
        self.config_dir = None if config_dir is None else str(config_dir.resolve())
        self._parser = OverridesParser.create()
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        """Compositions of the plan at hand, by overrides: each is made once."""

    def plan(
        self, typed: Sequence[str], *, multirun: bool = False, has_model: bool = False
    ) -> Plan:
        """Compose every point that a command line asks for, or say what is wrong first.

        `model=x`, `+model=x` and `++model=x` are the same here. `has_model`: it is known
        that the overrides choose one.
        """
        parsed = self.parse(typed)
        check_overrides(parsed, self.get_group_options)
        overrides = normalise(parsed)
        self._composed.clear()
        try:
            return self._plan_model(overrides, multirun=multirun, has_model=has_model)
        except ConfigError:
            raise
        except Exception as error:
            raise explain(error) from error

    def check(self, typed: Sequence[str]) -> None:
        """Raise ConfigError for a wrong key, group or option, without composing."""
        check_overrides(self.parse(typed), self.get_group_options)

    def parse(self, typed: Sequence[str]) -> list[Override]:
        """Return overrides as Hydra parses them; ConfigError for one of another form."""
        # Of the loader it asks for the names of a group's files alone.
        parser = OverridesParser.create(config_loader=cast("ConfigLoader", self))
        return [self._parse_one(text, parser) for text in typed]

    def _parse_one(self, text: str, parser: OverridesParser) -> Override:
        try:
            return parser.parse_overrides([keep_texts(text, self._parser)])[0]
        except HydraException as error:
            key = key_of(text)
            if "=" in text and "@" not in key and not re.fullmatch(r"[\w-]+([./][\w-]+)*", key):
                raise unknown_key(key) from error
            if (again := _quote_value(text)) is not None:
                return parser.parse_overrides([again])[0]
            groups = (group for group in GROUPS if text in self.get_group_options(group))
            hint = "Quote a value that holds brackets, commas or spaces."
            if group := next(groups, None):
                hint = f"Did you mean {group}={text}?"
            elif is_hub_id(text):
                hint = f"Did you mean model={text}?"
            elif found := re.search(r"(?i)KV cache memory\D*?(-?\d+(\.\d+)?)", text):
                hint = f"Did you mean plan.reported_kv_gib={found[1]}?"
            elif re.search(r"[=,],|,$", text):
                hint = "Remove the comma that has no value beside it."
            raise ConfigError(f"{text}: expected key=value or group=option. {hint}") from error

    def get_group_options(
        self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG
    ) -> list[str]:
        """Return the names of a group's files, those of the user's folder among them."""
        folder = None if self.config_dir is None else Path(self.config_dir, group_name)
        own = [] if folder is None else [path.stem for path in folder.glob("*.yaml")]
        return sorted({*self._loader.get_group_options(group_name, results_filter), *own})

    def _plan_model(self, overrides: list[str], *, multirun: bool, has_model: bool) -> Plan:
        """Find the spelling of the model that composes: appended, or in an experiment's place."""
        chosen = [item for item in overrides if item.startswith("+model=")]
        is_demo = not (chosen or has_model or self._chooses_model(overrides, multirun=multirun))
        if is_demo:
            overrides = [f"+model={DEMO_MODEL}", *overrides]
        try:
            master, points, multirun = self._compose_all(overrides, multirun=multirun)
        except ConfigCompositionException as error:
            # Hydra's words for an experiment that chooses another model, or the same one.
            twice = ("Multiple values for model", "model appears more than once")
            if not any(text in str(error) for text in twice):
                raise
            overrides = [item.removeprefix("+") if item in chosen else item for item in overrides]
            master, points, multirun = self._compose_replaced(overrides, multirun=multirun)
        checked = self._check_all(points, multirun=multirun)
        return Plan(
            overrides=overrides, multirun=multirun, points=checked, is_demo=is_demo, master=master
        )

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
        _, points, _ = self._compose_all(lines, multirun=multirun)
        have = ["model" in item[1].hydra.runtime.choices for item in points]
        if any(have) and not all(have):
            raise ConfigError(
                "model: some experiments of this sweep choose a model and others do not. Run them "
                "apart."
            )
        return any(have)

    def _compose_replaced(self, overrides: list[str], *, multirun: bool) -> _Composed:
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
        key = (mode.name, *overrides)
        if key not in self._composed:
            more = [] if self.config_dir is None else [f"{SCHEME}://{self.config_dir}"]
            self._composed[key] = self._loader.load_configuration(
                config_name=CONFIG_NAME,
                overrides=[*overrides, *(f"hydra.searchpath=[{quoted(path)}]" for path in more)],
                run_mode=mode,
                validate_sweep_overrides=False,
            )
        return self._composed[key]

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

    def _compose_all(self, overrides: list[str], *, multirun: bool) -> _Composed:
        """Compose every point; interpolations are left as they are: each resolves its own."""
        parsed = self.parse(overrides)
        several = [item for item in parsed if item.is_sweep_override()]
        mode = RunMode.MULTIRUN if multirun or several else RunMode.RUN
        master = self._load(overrides, mode)
        _check_hydra(master)
        if not multirun and not several and master.hydra.mode != RunMode.MULTIRUN:
            _check_single(master)
            return master, [(overrides, master)], False
        if not multirun and master.hydra.mode != RunMode.MULTIRUN:
            raise ConfigError(
                f"{several[0].input_line}: several values make a sweep. Add -m, or quote the value "
                f"if the comma belongs to it.{comma_hint(several[0].input_line)}"
            )
        swept = cast("dict[str, Any]", OmegaConf.to_container(master.hydra.sweeper)).get("params")
        swept = swept or {}
        if "model" in swept and any(item.startswith("+model=") for item in overrides):
            raise ConfigError(
                f"model: the experiment sweeps model={swept['model']} and makes no choice that "
                "these replace, so they would run in the place of the model that was typed. Write "
                "+model in its hydra.sweeper.params, or /model in its defaults list."
            )
        own = [str(item.input_line) for item in parsed if is_hydra(item)]
        params = self.parse([f"{key}={value}" for key, value in swept.items()])
        batches = expand([*params, *(item for item in parsed if not is_hydra(item))])
        folder = str(master.hydra.sweep.dir)
        points = []
        for batch in batches:
            point = self._load([*own, *batch], RunMode.RUN)
            OmegaConf.copy_cache(master, point)  # the same stamp in all of them
            OmegaConf.update(point, "hydra.sweep.dir", folder)
            points.append((batch, point))
        OmegaConf.update(master, "hydra.sweep.dir", folder)
        if not swept:
            _check_left_out(points)
        return master, points, True

    def _check_all(
        self, composed: list[tuple[list[str], DictConfig]], *, multirun: bool
    ) -> list[Point]:
        points: list[Point] = []
        for own, config in composed:
            try:
                run, messages = to_run_config(config)
                check_chosen(run, own, in_sweep=multirun)
            except ConfigError as error:
                where = f" (point {len(points)} of the sweep: {' '.join(own)})" if multirun else ""
                raise ConfigError(f"{error}{where}") from error
            points.append(
                Point(
                    overrides=own,
                    composed=config,
                    config=run,
                    warnings=messages,
                    config_dir=self.config_dir,
                )
            )
        if not points:
            raise ConfigError("sweep: expected at least one point, got none. Check the ranges.")
        return points


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
            f"{sweeper!r}. Remove it; tightfit search looks for the best values."
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
