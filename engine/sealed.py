"""The base of configuration classes (checked once, then read-only); what settings they have."""

import ast
import dataclasses
import functools
import inspect
import math
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final

from engine.errors import ConfigError, did_you_mean

MIB, GIB = 2**20, 2**30


def number(default: Any = dataclasses.MISSING, *, keyword: str = "", **bounds: Any) -> Any:
    """Return a field of a Sealed class that must be a number within bounds (see `check_number`).

    A list of such numbers is a field of its own, with the bounds in its metadata.
    """
    metadata = {"bounds": bounds} | ({"keyword": keyword} if keyword else {})
    return dataclasses.field(default=default, metadata=metadata)


def choice(choices: tuple[str, ...], default: Any = dataclasses.MISSING) -> Any:
    """Return a field of a Sealed class that must be one of some texts.

    A list of such texts is a field of its own, with `choices` in its metadata.
    """
    return dataclasses.field(default=default, metadata={"choices": choices})


class Sealed:
    """A dataclass base that runs `check` after construction and refuses changes afterwards.

    Lists and dicts among its fields are copied and refuse changes too. Frozen dataclasses cannot be
    filled by OmegaConf, hence this class. Flags, and fields of `number` and `choice`, are checked
    before.
    """

    section: ClassVar[str] = ""
    """Path of the class in a configuration, which errors name; empty: its root."""

    def __post_init__(self) -> None:
        node: type = type(self)
        for name, kind, is_optional, rules in _checked(node):
            value, key = getattr(self, name), f"{self.section}.{name}".lstrip(".")
            if value is None and is_optional:
                continue
            if kind is bool:
                check_flag(key, value)
                continue
            is_list = typing.get_origin(kind) is list
            of = typing.get_args(kind)[0] if is_list else kind
            for each in value if is_list else [value]:
                if "choices" in rules:
                    check_choice(key, each, rules["choices"])
                else:
                    check_number(key, each, integer=of is int, **rules["bounds"])
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


@functools.cache
def _checked(node: type) -> list[tuple[str, Any, bool, Mapping[str, Any]]]:
    """Return name, type, whether it may be null, and rules of the fields that are checked."""
    hints = typing.get_type_hints(node)
    found: list[tuple[str, Any, bool, Mapping[str, Any]]] = []
    for item in fields(node):
        inner = without_null(hints[item.name])
        if inner is bool or {"bounds", "choices"} & item.metadata.keys():
            found.append((item.name, inner, inner is not hints[item.name], item.metadata))
    return found


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


def is_one_of(value: object, values: Iterable[object]) -> bool:
    """Return whether a value is, or equals, one of some."""
    return any(value is each or (each is not None and value == each) for each in values)


def number_fault(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = math.inf,
    integer: bool = False,
    low_open: bool = False,
    hint: str = "",
    kinds: tuple[type, type] = (int, float),
) -> str | None:
    """Return what is wrong unless `value` is a finite number (or an integer) in [low, high].

    With `low_open` in (low, high]. The message names the setting and ends in the hint. `kinds` are
    those of integers and of other numbers.
    """
    is_kind = isinstance(value, kinds[:1] if integer else kinds) and not isinstance(value, bool)
    # NaN, infinities and integers beyond every float compare false here.
    is_finite = is_kind and -sys.float_info.max <= value <= sys.float_info.max
    if is_finite and (value > low if low_open else value >= low) and value <= high:
        return None
    kind = (
        "an integer" if integer else "a finite number" if is_kind and not is_finite else "a number"
    )
    sign = ">" if low_open else ">="
    bounds = f"{sign} {low:g}" + ("" if math.isinf(high) else f" and <= {high:g}")
    tail = f"{unit_hint(value)}{f' {hint}' if hint else ''}"
    return f"{name}: expected {kind} {bounds}, got {value!r}.{tail}"


def comma_hint(typed: object) -> str:
    """Return how to write a number that has a comma, also behind a setting's name, else nothing."""
    found = re.fullmatch(r"(?:[^=]*=)?(-?\d+),(\d+)", str(typed))
    if found is None:
        return ""
    whole, part = found.groups()
    thousands = f" Write thousands without a comma: {whole}{part}." if len(part) == 3 else ""
    return f"{thousands} A decimal number has a point: {whole}.{part}."


def unit_hint(value: object) -> str:
    """Return how to write a number that has a comma, a printed minus or a unit, else nothing."""
    if hint := comma_hint(value):
        return hint
    if found := re.fullmatch("[\u2212\u2013](\\d[\\d.]*).*", str(value)):
        return f" Write the minus of the keyboard: -{found[1]}."
    found = re.fullmatch(r"(-?[\d.]+) ?([a-zA-Z]{1,6}|%)", str(value))
    if found is None:
        return ""
    size, unit = found[1], found[2].lower()
    if unit in {"g", "gb", "gib"}:
        return f" Write the number alone: {size}."
    if unit == "k" and size.isdecimal():
        return f" Write it out, such as {int(size) * 1024}."
    return " Write the number without a unit: the setting's name or its help says which it has."


def check_number(name: str, value: Any, **bounds: Any) -> None:
    """Raise ConfigError unless `value` is a number within the bounds, as number_fault takes."""
    if fault := number_fault(name, value, **bounds):
        raise ConfigError(fault)


def check_flag(name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is True or False; a text such as "false" would be true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected true or false, got {value!r}.")


def check_choice(name: str, value: Any, choices: tuple[str, ...], hint: str = "") -> None:
    """Raise ConfigError unless `value` is one of `choices`; without a hint it names the closest."""
    if value not in choices:
        tail = f" {hint}" if hint else did_you_mean(str(value), choices)
        raise ConfigError(f"{name}: expected one of {', '.join(choices)}, got {value!r}.{tail}")


def without_null(hint: Any) -> Any:
    """Return a type hint without its `| None`."""
    if typing.get_origin(hint) in {types.UnionType, typing.Union}:
        return next(item for item in typing.get_args(hint) if item is not type(None))
    return hint


_NAMES: Final = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def describe_type(hint: Any) -> str:
    """Return a type hint in words, such as "an integer or null"."""
    inner = without_null(hint)
    if is_dataclass(inner):
        words = "a mapping with the keys " + ", ".join(item.name for item in fields(inner))
    elif typing.get_origin(inner) is list:
        of_text = typing.get_args(inner) == (str,)
        words = f"a list of {'texts, such as [a, b]' if of_text else 'numbers, such as [1, 2]'}"
    else:
        words = _NAMES.get(inner, "a mapping")
    return words if inner is hint else f"{words} or null"


def yaml_text(value: object) -> str:
    """Return a value as a configuration file writes it."""
    if isinstance(value, list | dict):
        return str(value).replace("'", "")
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


@dataclass(frozen=True)
class Setting:
    """One field of a configuration class, which is all that declares a setting."""

    path: str
    """Dotted path from the class that was asked for, the key of a configuration."""
    hint: Any
    owner: type
    field: dataclasses.Field[Any]

    @property
    def node(self) -> type | None:
        """The class of its fields, None for a single value."""
        inner = without_null(self.hint)
        return inner if isinstance(inner, type) and is_dataclass(inner) else None

    @property
    def keyword(self) -> str:
        """Its name among the keywords of LLM: the field's own, or the one in its metadata."""
        return str(self.field.metadata.get("keyword", self.field.name))

    @property
    def default(self) -> Any:
        """The value where none is given; dataclasses.MISSING where one must be."""
        if self.field.default_factory is not dataclasses.MISSING:
            return self.field.default_factory()
        return self.field.default

    @property
    def help(self) -> str:
        """The docstring below the field, on one line; empty where there is none."""
        for kind in self.owner.__mro__:
            if self.field.name in vars(kind).get("__annotations__", {}):
                return _docstrings(kind).get(self.field.name, "")
        return ""


@functools.cache
def _hints(node: type) -> dict[str, Any]:
    return typing.get_type_hints(node)


def settings(node: type, prefix: str = "", whole: tuple[type, ...] = ()) -> Iterator[Setting]:
    """Yield every field of a configuration class and of the classes below it, in order.

    Fields of the classes in `whole` are left out: a value of them is one setting.
    """
    hints = _hints(node)
    for item in fields(node):
        found = Setting(f"{prefix}{item.name}", hints[item.name], node, item)
        yield found
        if found.node is not None and found.node not in whole:
            yield from settings(found.node, f"{found.path}.", whole)


def key_types(node: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, type hint) of every setting of a dataclass."""
    return ((found.path, found.hint) for found in settings(node, prefix))


@functools.cache
def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a class's own, on one line."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    found: dict[str, str] = {}
    for above, below in pairwise(tree.body if isinstance(tree, ast.ClassDef) else []):
        match above, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
            case _:
                pass
    return found


def from_plain(kind: type, content: Mapping[str, Any], name: str = "") -> Any:
    """Return an object of a configuration class from plain data, a dict for each of its nodes.

    Raises:
        ConfigError: An unknown key, named below `name`, or a value that the class refuses.
    """
    hints = _hints(kind)
    known = {item.name: Setting(item.name, hints[item.name], kind, item) for item in fields(kind)}
    prefix = f"{name}." if name else ""
    values = dict(content)
    for key, value in content.items():
        if key not in known:
            raise ConfigError(
                f"{prefix}{key}: there is no such key.{did_you_mean(str(key), known)} Keys: "
                f"{', '.join(known)}."
            )
        node = known[key].node
        if node is not None and isinstance(value, dict):
            values[key] = from_plain(node, value, f"{prefix}{key}")
    absent = [
        key
        for key, found in known.items()
        if key not in content and found.default is dataclasses.MISSING
    ]
    if absent:
        raise ConfigError(f"{prefix}{absent[0]}: expected a value, got none. Set it.")
    return kind(**values)
