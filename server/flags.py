"""From a command line and a YAML file to a model, the engine's keywords and ServerSettings.

Every flag is a setting's keyword with dashes; the settings' classes declare them all.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast, get_args, get_origin

import yaml

from catalogue.files import load_yaml
from catalogue.terminal import CommandParser, UsageError
from engine.asked.config import EngineConfig, ModelConfig
from engine.asked.keywords import (
    COMBINED,
    NOT_SUPPORTED,
    config_from_keywords,
    in_columns,
    keywords_of,
)
from engine.errors import ConfigError, did_you_mean
from engine.sealed import (
    Setting,
    check_choice,
    describe_type,
    from_plain,
    settings,
    unit_hint,
    without_null,
)
from server.settings import ListenSettings, ServerSettings

OFFLOAD: Final = ("none", "auto", "uva", "prefetch", "experts")
ALIASES: Final = {"kv-cpu-gib": "cpu_gib"}
"""Further names of flags -> the keyword."""
Settings = TypeVar("Settings", bound=ListenSettings)
NOT_FLAGS: Final = ("spec", "facts_folder", "kept_folder", "model_name", "emulated_kv_tokens")
"""Keywords that a program gives, not a command line."""
PROG: Final = "tightfit serve"
SHORT: Final = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}
"""Keyword -> the short flag that vllm serve has for it."""
FRONT_FLAGS: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "disable_log_requests": ((True,), "prompts are logged with --log-prompts alone."),
    "enable_log_requests": ((False,), "set --log-prompts to log prompts and answers."),
    "enable_auto_tool_choice": (
        (True,),
        "tools are called if a request has some. --tool-call-parser none leaves calls as text.",
    ),
    "uvicorn_log_level": (
        ("critical", "error", "warning", "info"),
        "the log has errors and a line for each request. --no-access-log leaves these out.",
    ),
}
"""Flags of vllm serve for its front -> values that mean what this server does, and why no other."""
TRUE: Final = ("true", "yes", "on", "1")
FALSE: Final = ("false", "no", "off", "0")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a command line asks for."""

    model: str
    """As the user wrote it: a folder, a name of the catalogue, or OWNER/NAME."""
    keywords: dict[str, Any]
    """Of the engine."""
    server: ServerSettings


@cache
def _settings() -> tuple[dict[str, Setting], dict[str, Setting]]:
    """Return the engine's settings and the server's, by keyword."""
    engine = {name: found for name, found in keywords_of().items() if name not in NOT_FLAGS}
    server = {found.path: found for found in settings(ServerSettings)}
    return engine, server


def parse(arguments: Sequence[str]) -> Asked:
    """Return what a command line asks for; `--help` prints and ends the process.

    Raises:
        UsageError: There is no such flag, or it lacks a value.
        ConfigError: A value is of the wrong type, or no model is named.
    """
    parser = _parser()
    known, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        hint = did_you_mean(unknown[0].partition("=")[0], flags())
        raise UsageError(f"{PROG}: expected flags of {PROG} --help, got {' '.join(unknown)}.{hint}")
    given = dict(vars(known))
    file = given.pop("config", None)
    if "model_flag" in given:
        flag = given.pop("model_flag")
        if given.setdefault("model", flag) != flag:
            raise UsageError(
                f"{PROG}: expected one model, got {given['model']!r} and --model {flag!r}."
            )
    values = (_read(Path(file)) if file else {}) | given
    return _asked(values)


def parse_settings(
    kind: type[Settings], arguments: Sequence[str], prog: str, description: str
) -> Settings:
    """Return settings of a command without an engine, a flag for each of their fields.

    Raises:
        UsageError: There is no such flag, or it lacks a value.
        ConfigError: A value is refused.
    """
    parser = CommandParser(
        prog=prog, description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    known = {found.path: found for found in settings(kind)}
    for name, found in known.items():
        _add(parser, name, found)
    given = vars(parser.parse_args(list(arguments)))
    values = {name: _value(name, value, known[name].hint) for name, value in given.items()}
    return cast(Settings, from_plain(kind, values, kind.section))


def as_flags(text: str) -> str:
    """Return a message with flags in the place of a configuration's keys and of keywords."""
    return in_columns(text, _in_flags)


def _in_flags(text: str) -> str:
    text = re.sub(r"(?<![\w.])model\.path=", "", text)
    text = re.sub(r"(?<![\w.])model\.path\b", "MODEL", text)
    text = re.sub(r"(?<![\w.])offload=(?=\w)", "--offload ", text)
    for key, name in _spoken().items():
        if key not in text:
            continue  # patterns are many: most are never made
        flag = name.replace("_", "-")
        found = rf"(?<![\w./-]){re.escape(key)}"
        text = re.sub(rf"{found}=(?:true|True)\b", f"--{flag}", text)
        text = re.sub(rf"{found}=(?:false|False)\b", f"--no-{flag}", text)
        text = re.sub(rf"{found}=(?=[\w'])", f"--{flag} ", text)
        text = re.sub(rf"{found}(?![\w./]\w|\w)", f"--{flag}", text)
    return text


@cache
def _spoken() -> dict[str, str]:
    """Return what a message calls settings -> their keywords, the longest first.

    A keyword that is one word may be just that, and stays.
    """
    engine, server = _settings()
    found = {setting.path: name for name, setting in engine.items() if "." in setting.path}
    found |= {f"server.{name}": name for name in server}
    found |= {name: name for name in _names() if "_" in name}
    found |= {name: name for name in (*NOT_SUPPORTED, *FRONT_FLAGS) if "_" in name}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _asked(values: Mapping[str, Any]) -> Asked:
    _, server = _settings()
    texts = {name: value for name, value in values.items() if value is not None}
    for name, (inert, why) in FRONT_FLAGS.items():
        value = texts.pop(name, inert[0])
        if value not in inert:
            raise ConfigError(f"{name}={value!r}: not supported: {why}")
    model = texts.pop("model", None)
    if not isinstance(model, str) or not model:
        raise ConfigError(
            "model: expected a folder, a name of the catalogue or OWNER/NAME of a model hub, got "
            "none. Name it first: serve MODEL."
        )
    offload = texts.pop("offload", None)
    keywords = {
        name: _foreign(value) if name in NOT_SUPPORTED else _typed(name, value)
        for name, value in texts.items()
        if name not in server
    }
    asked = {
        name: _value(name, value, server[name].hint)
        for name, value in texts.items()
        if name in server
    }
    keywords |= _offload(offload, keywords)
    config_from_keywords(model, keywords)  # what is wrong is refused before a model is fetched
    return Asked(
        model=model,
        keywords=keywords,
        server=from_plain(ServerSettings, asked, "server"),
    )


def _offload(word: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that --offload stands for."""
    if word is None:
        return {}
    check_choice("offload", word, OFFLOAD)
    if word == "none":
        engine, _ = _settings()
        is_set = (
            name in engine and engine[name].path.startswith(("offload.", "kv.swap_space")) and value
            for name, value in keywords.items()
        )
        if name := next((name for name, given in zip(keywords, is_set, strict=True) if given), ""):
            raise ConfigError(
                f"offload: expected no {name} beside offload=none, got {keywords[name]!r}. Remove "
                "one of them."
            )
        return {}
    name = "choose" if word == "auto" else "offload_backend"
    if name in keywords:
        raise ConfigError(
            f"offload: expected either offload or {name}, got both. Remove one of them."
        )
    return {name: True if word == "auto" else word}


def _hint(name: str) -> Any:
    return int if name == "tensor_parallel_size" else dict


def _foreign(value: Any) -> Any:
    """Return the value of another engine's flag, which that of one here may be: 1, text, JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _read(file: Path) -> dict[str, Any]:
    """Return the settings of a YAML file with flat keys, named as the flags are."""
    try:
        content = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config: expected a YAML file, got {file} ({error}).") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config: {file}: expected a mapping of settings, got {content!r}.")
    names = _names()
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = keyword_of(key)
        if name not in names and name not in {**NOT_SUPPORTED, **FRONT_FLAGS}:
            raise ConfigError(
                f"config: {file}: there is no setting {key!r}.{did_you_mean(name, names)}"
            )
        if name in found:
            raise ConfigError(f"config: {file}: expected {name} once, got it twice. Remove one.")
        found[name] = value
    return found


def flags() -> list[str]:
    """Return every flag of the command line."""
    return [f"--{name.replace('_', '-')}" for name in [*dict.fromkeys(_names()), *ALIASES]]


def keyword_of(name: object) -> str:
    """Return the keyword that a flag, or its name with underscores, stands for."""
    text = str(name).replace("-", "_")
    return ALIASES.get(text.replace("_", "-"), text)


def engine_names() -> list[str]:
    """Return the keywords that flags of the engine set, and offload."""
    return ["offload", *(name for name in _settings()[0] if name != "model"), *COMBINED]


def engine_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the engine by their flags with underscores, values of their types.

    Args:
        values: by flag, with dashes or underscores; texts as a command line has them, or values.

    Raises:
        ConfigError: There is no such setting of the engine, or a value is of another type.
    """
    names = engine_names()
    spoken = {keyword: alias.replace("-", "_") for alias, keyword in ALIASES.items()}
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = keyword_of(key)
        if name not in names:
            raise ConfigError(
                f"{key}: there is no such setting of the engine.{did_you_mean(name, names)}"
            )
        found[spoken.get(name, name)] = value if name == "offload" else _typed(name, value)
    return found


def engine_config(model: str | ModelConfig, values: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration that settings of the engine, by their flags, ask for.

    Raises:
        ConfigError: A value is out of bounds, contradicts another or would have no effect.
    """
    given = {keyword_of(name): value for name, value in values.items()}
    word = given.pop("offload", None)
    return config_from_keywords(model, given | _offload(word, given))


def _typed(name: str, value: Any) -> Any:
    engine, _ = _settings()
    return _value(name, value, engine[name].hint if name in engine else _hint(name))


def _names() -> list[str]:
    engine, server = _settings()
    return ["model", "offload", *engine, *COMBINED, *server]


def _value(name: str, value: Any, hint: Any) -> Any:
    """Return a value of a setting's type from a command line's text; others as they are."""
    kind = without_null(hint)
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        items = value if isinstance(value, list) else [value]
        return [_value(name, item, inner) for item in items]
    if not isinstance(value, str) or kind is str:
        return str(value) if kind is str and type(value) in {int, float} else value
    try:
        return _parsed(value, kind)
    except ValueError:
        raise ConfigError(
            f"{name.replace('_', '-')}: expected {describe_type(kind)}, got {value!r}."
            f"{unit_hint(value) if kind in {int, float} else ''}"
        ) from None


def _parsed(text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in TRUE + FALSE:
            raise ValueError(text)
        return text.lower() in TRUE
    if kind in {int, float}:
        return kind(text)
    return json.loads(text)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=PROG,
        description="Serve a model behind the API of OpenAI's clients.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder, name, or OWNER/NAME")
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same, as a flag")
    parser.add_argument("--config", metavar="FILE", help="YAML with flat keys named as the flags")
    _, server = _settings()
    group = parser.add_argument_group("the server")
    for name, found in server.items():
        _add(group, name, found)
    group = add_engine_flags(parser)
    for name, (inert, _) in {**NOT_SUPPORTED, **FRONT_FLAGS}.items():
        if name not in server:  # taken where its value changes nothing; else the reason is told
            action = argparse.BooleanOptionalAction if bool in map(type, inert) else "store"
            group.add_argument(*_flags_of(name), dest=name, action=action, help=argparse.SUPPRESS)
    return parser


def _flags_of(name: str) -> list[str]:
    short = [SHORT[name]] if name in SHORT else []
    return [*short, f"--{name.replace('_', '-')}"]


def add_engine_flags(parser: argparse.ArgumentParser) -> Any:
    """Give a parser a flag for each setting of the engine; return their group.

    Values are texts, which `engine_settings` takes.
    """
    group = parser.add_argument_group("the engine (docs/settings.md)")
    group.add_argument("--offload", metavar="|".join(OFFLOAD), help="how weights are offloaded")
    for name, found in sorted(_settings()[0].items()):
        if name != "model":
            _add(group, name, found)
    for name, text in COMBINED.items():
        metavar = "N" if name == "tensor_parallel_size" else "JSON"
        group.add_argument(*_flags_of(name), metavar=metavar, dest=name, help=text)
    return group


def _add(group: Any, name: str, found: Setting) -> None:
    flags = [f"--{name.replace('_', '-')}"]
    flags += [f"--{alias}" for alias, keyword in ALIASES.items() if keyword == name]
    kind, text = without_null(found.hint), found.help.replace("%", "%%")
    if kind is bool:
        group.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(kind) is list:
        group.add_argument(*flags, dest=name, nargs="+", metavar="X", help=text)
    else:
        metavar = {int: "N", float: "X", str: "TEXT"}.get(kind, "JSON")
        group.add_argument(*flags, dest=name, metavar=metavar, help=text)
