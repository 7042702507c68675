"""What the harness is asked for a test: the settings of profiles as its overrides."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import yaml

from catalogue.models import named, names
from console.registry.checks import FieldError, config_of, spec_of
from console.registry.tables import Model
from engine.asked.keywords import keywords_of
from engine.errors import ConfigError
from engine.model.loading import LoadConfig
from reports.record.record import write_text_atomic

MOST_TOKENS: Final = 128
"""Of a prompt, and of an answer; a quarter of the longest sequence where that is less."""
MOST_LATENCY: Final = 64
"""Requests that run alone; a percentile of 90 needs as many."""
MOST_LATENCY_AB: Final = 16
WARMUP: Final = 2
PROFILES: Final = ".profiles"
"""Folder of a sweep with a file for each profile."""
_OF_MODEL: Final = "model."
"""Keys of the model, which are chosen by its name but for those of LoadConfig."""
_SAID: Final = ("offload.offload_backend", "planner.choose", "facts_folder", "kept_folder")
"""Keys that a file of conf/offload sets, and those that are no choice."""
_OF_WAY: Final[Mapping[str, tuple[str, ...]]] = {
    "uva": ("offload.uva.cpu_offload_gb",),
    "prefetch": tuple(
        f"offload.prefetch.offload_{name}"
        for name in ("group_size", "num_in_group", "prefetch_step")
    ),
}
"""Way to offload -> keys to which its file gives other values than the engine does."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Choices of a configuration."""

    groups: Mapping[str, str]
    """Group -> its file."""
    values: Mapping[str, Any]
    """Key -> its value."""

    def overrides(self) -> list[str]:
        """Return them as words of a command line."""
        chosen = [f"{name}={value}" for name, value in self.groups.items()]
        return chosen + [f"{key}={as_hydra(value)}" for key, value in self.values.items()]

    def as_file(self) -> str:
        """Return them as a file of conf/experiment."""
        content: dict[str, Any] = {
            "defaults": [{f"override /{name}": value} for name, value in self.groups.items()]
        }
        for key, value in self.values.items():
            *nodes, last = key.split(".")
            into = content
            for node in nodes:
                into = into.setdefault(node, {})
            into[last] = value
        return f"# @package _global_\n{yaml.safe_dump(content, sort_keys=False)}"


def asked_of(settings: Mapping[str, Any], model: Model) -> Asked:
    """Return what a profile's settings are for the harness.

    Raises:
        ConfigError: The engine refuses them.
    """
    config = config_of(settings, spec_of(model), model.name)
    way = "auto" if config.planner.choose else config.offload.backend
    values: dict[str, Any] = {}
    for setting in keywords_of().values():
        value = attrgetter(setting.path)(config)
        is_said = setting.path in _SAID or setting.path.startswith(_OF_MODEL)
        if not is_said and (value != setting.default or setting.path in _OF_WAY.get(way, ())):
            values[setting.path] = list(value) if isinstance(value, list) else value
    loading = [field.name for field in fields(LoadConfig) if field.name in settings]
    values |= {f"{_OF_MODEL}{name}": settings[name] for name in loading}
    return Asked(groups={"offload": way}, values=values)


def model_of(model: Model, profiles: Iterable[Mapping[str, Any]]) -> Asked:
    """Return how the harness finds a model of the registry.

    Raises:
        ConfigError: Its weights are not on this machine.
    """
    is_named = model.kind != "folder" and model.source in names()
    is_made_up = is_named and (
        named(model.source).load_format == "dummy"
        or all(settings.get("load_format") == "dummy" for settings in profiles)
    )
    if model.path is None and not is_made_up:
        raise FieldError(
            "model",
            f"model: expected one whose weights are on this machine, got {model.name}, which is "
            f"{model.state}. Fetch it first.",
        )
    if is_named:
        return Asked(groups={"model": model.source}, values={})
    values = {"model.name": model.name, "model.path": model.path}
    return Asked(groups={"model": "local"}, values=values)


def sizes_of(kind: str, num_requests: int, longest_tokens: int | None) -> dict[str, Any]:
    """Return how much a test measures, by key of the scenario."""
    tokens = MOST_TOKENS if longest_tokens is None else min(MOST_TOKENS, longest_tokens // 4)
    most_alone = MOST_LATENCY_AB if kind == "ab" else MOST_LATENCY
    found: dict[str, Any] = {}
    for part, count in (
        ("throughput", num_requests),
        ("latency", min(num_requests, most_alone)),
    ):
        found |= {
            f"scenario.{part}.num_requests": count,
            f"scenario.{part}.warmup_requests": WARMUP,
            f"scenario.{part}.prompt_tokens": max(1, tokens),
            f"scenario.{part}.output_tokens": max(1, tokens),
        }
    return found


def test_command(base: Iterable[str], profile: Asked, folder: Path) -> list[str]:
    """Return the arguments of the harness for one profile."""
    return ["scenario=quick", *base, *profile.overrides(), _at("run", folder)]


def ab_command(
    base: Iterable[str], sides: Sequence[Asked], folder: Path, *, pairs: int, aa_pairs: int
) -> list[str]:
    """Return the arguments of the harness for two profiles; what both ask stands beside them."""
    a, b = (side.overrides() for side in sides)
    shared = [item for item in a if item in b]
    return [
        "scenario=ab",
        *base,
        *shared,
        f"ab.a={as_hydra([item for item in a if item not in shared])}",
        f"ab.b={as_hydra([item for item in b if item not in shared])}",
        f"ab.pairs={pairs}",
        f"ab.aa_pairs={aa_pairs}",
        _at("run", folder),
    ]


def sweep_command(base: Iterable[str], profiles: Mapping[str, Asked], folder: Path) -> list[str]:
    """Return the arguments of the harness for several profiles, and write a file for each.

    Args:
        base: What all of them ask.
        profiles: By name, of letters, digits, '.', '_' and '-'.
        folder: Of the sweep.
    """
    files = folder / PROFILES / "experiment"
    files.mkdir(parents=True)
    for name, profile in profiles.items():
        write_text_atomic(files / f"{name}.yaml", profile.as_file())
    words = ["scenario=quick", *base, f"+experiment={','.join(profiles)}", _at("sweep", folder)]
    return ["-m", "--config-dir", str(files.parent), *words]


def _at(verb: str, folder: Path) -> str:
    return f"hydra.{verb}.dir={as_hydra(str(folder))}"


def as_hydra(value: Any) -> str:
    """Return a value as the harness's command line takes it literally.

    Raises:
        ConfigError: It is a text with ${, which is a reference there.
    """
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{','.join(map(as_hydra, value))}]"
        case _:
            return _quoted(str(value))


def _quoted(text: str) -> str:
    if "${" in text:
        raise ConfigError(f"profile: expected texts without ${{, a reference, got {text!r}.")
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    tail = len(text) - len(text.rstrip("\\"))
    return f"'{text}{text[len(text) - tail :]}'"
