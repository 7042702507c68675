"""The base of configuration classes: checked once, then read-only, and usable as Hydra schemas."""

import math
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from engine.errors import ConfigError


class Sealed:
    """A dataclass base that runs `check` after construction and refuses changes afterwards.

    Lists and dicts among its fields are copied and refuse changes too. Frozen dataclasses cannot be
    filled by OmegaConf, hence this class.
    """

    def __post_init__(self) -> None:
        self.check()
        for field in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, _freeze(getattr(self, field.name)))
        object.__setattr__(self, "_sealed", True)

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds."""

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "_sealed", False):
            raise AttributeError(f"{type(self).__name__} is sealed; cannot set {name!r}.")
        if name not in {field.name for field in fields(self)}:  # type: ignore[arg-type]
            raise AttributeError(f"{type(self).__name__} has no field {name!r}.")
        super().__setattr__(name, value)


def _refuse(self: object, *_: object, **__: object) -> Any:
    kind = "list" if isinstance(self, list) else "dict"
    raise TypeError(
        f"this {kind} belongs to a sealed configuration; cannot change {self!r}. Make another "
        "configuration with dataclasses.replace."
    )


class SealedList(list[Any]):
    """A list of a sealed configuration."""

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        return SealedList, (list(self),)


class SealedDict(dict[Any, Any]):
    """A dict of a sealed configuration."""

    update = setdefault = pop = popitem = clear = _refuse
    __setitem__ = __delitem__ = __ior__ = _refuse

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        return SealedDict, (dict(self),)


def _freeze(value: Any) -> Any:
    """Return a copy of a list, dict or set that refuses changes, and anything else as it is."""
    if isinstance(value, list):
        return SealedList(_freeze(item) for item in value)
    if isinstance(value, dict):
        return SealedDict((key, _freeze(item)) for key, item in value.items())
    return frozenset(value) if isinstance(value, set) else value


def check_number(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = math.inf,
    integer: bool = False,
    low_open: bool = False,
    hint: str = "",
) -> None:
    """Raise ConfigError unless `value` is a finite number (or an integer) in [low, high].

    Args:
        name: The setting's full name, for the message.
        value: What was given.
        low: Smallest value allowed (not allowed itself if `low_open`).
        high: Largest value allowed.
        integer: Require an int.
        low_open: The lower bound is exclusive.
        hint: What to change, appended to the message.

    Raises:
        ConfigError: The value has the wrong type or is out of bounds.
    """
    kinds = (int,) if integer else (int, float)
    kind = "an integer" if integer else "a number"
    sign = ">" if low_open else ">="
    bounds = f"{sign} {low:g}" + ("" if math.isinf(high) else f" and <= {high:g}")
    ok = isinstance(value, kinds) and not isinstance(value, bool)
    # NaN, infinities and integers beyond every float compare false here.
    ok = ok and -sys.float_info.max <= value <= sys.float_info.max
    ok = ok and (value > low if low_open else value >= low) and value <= high
    if not ok:
        tail = f" {hint}" if hint else ""
        raise ConfigError(f"{name}: expected {kind} {bounds}, got {value!r}.{tail}")


def check_flag(name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is True or False.

    Raises:
        ConfigError: It is anything else; a text such as "false" would count as true.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected true or false, got {value!r}.")


def check_choice(name: str, value: Any, choices: tuple[str, ...], hint: str = "") -> None:
    """Raise ConfigError unless `value` is one of `choices`.

    Raises:
        ConfigError: The value is not among the choices.
    """
    if value not in choices:
        tail = f" {hint}" if hint else ""
        raise ConfigError(f"{name}: expected one of {', '.join(choices)}, got {value!r}.{tail}")


def without_null(hint: Any) -> Any:
    """Return a type hint without its `| None`."""
    if typing.get_origin(hint) in {types.UnionType, typing.Union}:
        return next(item for item in typing.get_args(hint) if item is not type(None))
    return hint


def key_types(node: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, type hint) of every field of a dataclass and of those below it."""
    hints = typing.get_type_hints(node)
    for item in fields(node):
        path = f"{prefix}{item.name}"
        yield path, hints[item.name]
        inner = without_null(hints[item.name])
        if is_dataclass(inner) and isinstance(inner, type):
            yield from key_types(inner, f"{path}.")
