"""Checks of what a user gives: names, sources and settings; a refusal names the field."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Final

from console.registry.tables import Model
from engine.asked.config import EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.model.spec import ModelSpec
from engine.plan.cards import resolve_max_model_len
from engine.sealed import from_plain
from server.flags import as_flags, engine_config, engine_settings

MOST_CHARACTERS: Final = 96
"""Of a name, as on the model hub."""
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.))*")


class FieldError(ConfigError):
    """What was given is refused.

    Attributes:
        field: what was wrong: name, source, a setting, ...
        is_busy: whether it may be done later, when what uses it has ended.
    """

    is_busy: ClassVar = False

    def __init__(self, field: str, message: str) -> None:
        """Make it of the field and a message, which begins with the field."""
        super().__init__(message)
        self.field = field


class BusyError(FieldError):
    """It cannot be done now, because something else uses what it changes."""

    is_busy = True


def check_name(field: str, name: object) -> str:
    """Return a name of a model, profile or service.

    Raises:
        FieldError: it has other characters than letters, digits, '.', '_' and '-', or too many.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or len(name) > MOST_CHARACTERS:
        raise FieldError(
            field,
            f"{field}: expected letters, digits, '_', '-' and single '.', a letter or digit first, "
            f"at most {MOST_CHARACTERS} characters, got {shown(name)}.",
        )
    return name


def check_source(source: object) -> str:
    """Return the source of a model.

    Raises:
        FieldError: it is empty, or has a character that neither names nor paths have.
    """
    if not isinstance(source, str) or not source.strip() or not source.isprintable():
        raise FieldError(
            "source",
            "source: expected a name of the catalogue, a hub's OWNER/NAME, or a folder, got "
            f"{shown(source)}.",
        )
    return source


def check_settings(settings: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return the settings of a profile, by flags with underscores and with values of their types.

    Raises:
        FieldError: the engine has no such setting, or refuses the value, alone or for this model.
    """
    with naming(settings):
        found = engine_settings(settings)
        resolve_max_model_len(config_of(found, spec), spec)
    return found


def config_of(settings: Mapping[str, Any], spec: ModelSpec, name: str = "model") -> EngineConfig:
    """Return the engine's configuration of a profile, for plans: its files are not looked at.

    Raises:
        ConfigError: the engine refuses a value.
    """
    load_format = settings.get("load_format", "auto")
    return engine_config(ModelConfig.of_sizes(name, spec, load_format=load_format), settings)


@contextmanager
def naming(settings: Mapping[str, Any]) -> Iterator[None]:
    """Word what the engine refuses with flags, and name the setting."""
    try:
        yield
    except ConfigError as error:
        message = as_flags(str(error))
        given = {name.replace("-", "_") for name in settings}
        words = re.findall(r"^\w[\w-]*|(?<=--)\w[\w-]*", message)
        named = (word.removeprefix("no-").replace("-", "_") for word in words)
        field = next((name for name in named if name in given), "settings")
        raise FieldError(field, message) from error


def spec_of(model: Model) -> ModelSpec:
    """Return the sizes of a model of the registry."""
    spec: ModelSpec = from_plain(ModelSpec, model.spec or {}, "model.spec")
    return spec


def shown(value: object) -> str:
    """Return what was given, as it stands in a message: one line, and no longer than a name."""
    text = repr(value)
    return text if len(text) <= 2 * MOST_CHARACTERS else f"{text[: 2 * MOST_CHARACTERS]}..."
