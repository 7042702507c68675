"""From a profile of the registry to the arguments of `tightfit serve`."""

import json
from collections.abc import Mapping
from typing import Any, Final

from console.registry.checks import FieldError, shown
from console.registry.database import Database
from console.registry.models import Models, profile_of
from console.registry.tables import Model

ADDRESS: Final = "MODEL or MODEL/PROFILE"
"""How commands name a profile; without its name it is the model's default one."""


def arguments_of(name: str, database: Database) -> list[str]:
    """Return the arguments of `tightfit serve` for a profile, the model first.

    Args:
        name: MODEL or MODEL/PROFILE.
        database: of the registry.

    Raises:
        FieldError: there is no such model or profile, or its files are not here.
    """
    model, has_profile, profile = name.partition("/")
    if not model or (has_profile and not profile):
        raise FieldError("profile", f"profile: expected {ADDRESS}, got {shown(name)}.")
    row = Models(database).get(model)
    settings = profile_of(row, profile or None).settings
    return [source_of(row), "--served-model-name", row.name, *flags_of(settings)]


def source_of(model: Model) -> str:
    """Return a model of the registry as `tightfit serve` takes it: a name or a folder.

    Raises:
        FieldError: only a certain revision is meant, and its files are not here.
    """
    if model.kind != "folder" and "/" not in model.source:
        return model.source  # the catalogue knows its files
    if model.path is not None:
        return model.path
    if model.kind == "hub" and model.revision is None:
        return model.source  # it is fetched when it is served
    raise FieldError(
        "model",
        f"model: expected the files of {model.name}, found none on this machine. Download it "
        "first, or remove it.",
    )


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings, by flags with underscores, as words of a command line; null ones are open.

    A value stands in one word with its flag, so that none can be taken for another flag.
    """
    words: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        match value:
            case None:
                pass
            case bool():
                words.append(flag if value else f"--no-{flag.removeprefix('--')}")
            case list():
                words += [flag, *map(str, value)]
            case dict():
                words.append(f"{flag}={json.dumps(value)}")
            case _:
                words.append(f"{flag}={value}")
    return words
