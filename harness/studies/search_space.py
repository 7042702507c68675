"""What a search may choose: parameters with their values, in Hydra's override syntax."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from engine.errors import ConfigError
from engine.model.spec import ModelSpec

Value = str | int | float
Proposal = dict[str, Value]
"""Key -> value of every parameter that applies."""
BACKENDS: Final = ("uva", "prefetch")
DIGITS: Final = 12
STEPS: Final = 16
"""Values of cpu_offload_gb in the space that is taken where none is given."""
GROUP: Final = 8


class Suggest(Protocol):
    """What proposes a value: an Optuna trial."""

    def suggest_categorical(self, name: str, choices: Sequence[str]) -> str:
        """Return one of the choices."""
        ...

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Return an integer between two."""
        ...

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a number between two."""
        ...


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One key and the values that it may take."""

    key: str
    choices: tuple[str, ...] = ()
    """In Hydra's spelling; empty: a number between two bounds."""
    low: float = 0
    high: float = 0
    """The greatest value, included."""
    step: float | None = None
    """None: any number between the bounds."""
    is_log: bool = False
    """Proposed on a logarithmic scale."""

    @property
    def is_integer(self) -> bool:
        """Whether every value is an integer."""
        numbers = (self.low, self.high, 1 if self.step is None else self.step)
        return not self.choices and all(isinstance(number, int) for number in numbers)

    @property
    def backend(self) -> str | None:
        """The offload backend that the key belongs to, None for other keys."""
        parts = self.key.split(".")
        return (
            parts[1] if len(parts) > 2 and parts[0] == "offload" and parts[1] in BACKENDS else None
        )

    def values(self) -> list[Value] | None:
        """Return all values, None where any number between the bounds is one."""
        if self.choices:
            return list(self.choices)
        if self.is_integer:
            return list(range(int(self.low), int(self.high) + 1, int(self.step or 1)))
        if self.step is None:
            return None
        count = round((self.high - self.low) / self.step) + 1
        return [round(self.low + index * self.step, DIGITS) for index in range(count)]

    def suggest(self, trial: Suggest) -> Value:
        """Return the value that a trial proposes."""
        if self.choices:
            return trial.suggest_categorical(self.key, self.choices)
        if self.is_integer:
            low, high, step = int(self.low), int(self.high), int(self.step or 1)
            return trial.suggest_int(self.key, low, high, step=step, log=self.is_log)
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.is_log)


@dataclass(frozen=True, kw_only=True)
class Space:
    """The parameters of a search, those that decide on others first."""

    parameters: tuple[Parameter, ...]

    def __post_init__(self) -> None:
        """Check that there is something to choose.

        Raises:
            ConfigError: there is no parameter.
        """
        if not self.parameters:
            raise ConfigError(
                "search: expected at least one setting with several values, got none."
            )

    def propose(self, trial: Suggest) -> Proposal:
        """Return the values that a trial proposes, of the parameters that apply."""
        found: Proposal = {}
        for parameter in self.parameters:
            if _applies(parameter, found):
                found[parameter.key] = parameter.suggest(trial)
        return found

    def first(self) -> Proposal:
        """Return the first value of every parameter that applies."""
        found: Proposal = {}
        for item in self.parameters:
            if _applies(item, found):
                found[item.key] = item.choices[0] if item.choices else item.low
        return found

    def combinations(self, at_most: int) -> list[Proposal] | None:
        """Return all combinations; None where there are more than `at_most`."""
        found = list(itertools.islice(self._walk(0, {}), at_most + 1))
        is_finite = all(parameter.values() is not None for parameter in self.parameters)
        return found if is_finite and len(found) <= at_most else None

    def _walk(self, index: int, chosen: Proposal) -> Iterator[Proposal]:
        if index == len(self.parameters):
            yield dict(chosen)
            return
        parameter = self.parameters[index]
        if not _applies(parameter, chosen):
            yield from self._walk(index + 1, chosen)
            return
        for value in parameter.values() or ():
            yield from self._walk(index + 1, {**chosen, parameter.key: value})

    def describe(self) -> dict[str, str]:
        """Return the parameters as text, the same in every process."""
        return {item.key: _text(item) for item in self.parameters}


def space_of(parameters: Iterable[Parameter]) -> Space:
    """Return a space; the choice of the offload comes first, because others depend on it."""
    return Space(parameters=tuple(sorted(parameters, key=lambda item: item.key != "offload")))


def overrides_of(proposal: Mapping[str, Value]) -> list[str]:
    """Return a proposal as overrides."""
    return [
        f"{key}={round(value, DIGITS) if isinstance(value, float) else value}"
        for key, value in proposal.items()
    ]


def beside(base: Iterable[str], chosen: Sequence[str]) -> list[str]:
    """Return the overrides of all trials without those of another offload than the chosen one.

    Args:
        base: of all trials.
        chosen: of one trial.
    """
    words = (item.partition("=") for item in chosen)
    offload = next((value for key, _, value in words if key == "offload"), None)
    backends = ((item, _backend(item.lstrip("+").partition("=")[0])) for item in base)
    return [item for item, backend in backends if offload is None or backend in {None, offload}]


def parameter_of(override: Override) -> Parameter:
    """Return the parameter that an override with several values means.

    Raises:
        ConfigError: bounds or steps that hold no value.
    """
    key, line = override.key_or_group, override.input_line
    values = override.value()
    tags: set[str] = getattr(values, "tags", None) or set()
    if isinstance(values, ChoiceSweep):
        texts = [Override._get_value_element_as_str(item) for item in values.list]  # noqa: SLF001
        return Parameter(key=key, choices=tuple(dict.fromkeys(texts)))
    if isinstance(values, IntervalSweep):
        low, high = values.start, values.end
        if low is None or high is None or low > high:
            raise ConfigError(f"{line}: expected interval(low, high), got no value between.")
        return Parameter(key=key, low=low, high=high, is_log="log" in tags)
    if isinstance(values, RangeSweep):
        return _of_range(key, str(line), values)
    raise ConfigError(f"{line}: expected a,b or choice(a,b), range(a,b,step) or interval(a,b).")


def default_space(spec: ModelSpec) -> Space:
    """Return the space that is taken where none is given: all backends, sizes by the model.

    Args:
        spec: sizes of the model.
    """
    weights_gib = spec.weight_bytes() / 2**30
    step = float(f"{weights_gib / STEPS:.2g}")
    group = min(GROUP, spec.num_hidden_layers)
    return space_of(
        (
            Parameter(key="offload", choices=("none", *BACKENDS)),
            Parameter(
                key="offload.uva.cpu_offload_gb", low=step, high=round(step * STEPS, 6), step=step
            ),
            Parameter(key="offload.prefetch.offload_group_size", choices=(str(group),)),
            Parameter(key="offload.prefetch.offload_num_in_group", low=1, high=group, step=1),
            Parameter(key="offload.prefetch.offload_prefetch_step", low=1, high=3, step=1),
        )
    )


def _of_range(key: str, line: str, values: RangeSweep) -> Parameter:
    low, stop, step = values.start, values.stop, values.step
    if low is None or stop is None or step <= 0 or low >= stop:
        raise ConfigError(f"{line}: expected range(start, stop, step) upwards, got no value in it.")
    count = math.ceil(round((stop - low) / step, 9))
    high = low + (count - 1) * step
    if all(isinstance(number, int) for number in (low, stop, step)):
        return Parameter(key=key, low=low, high=high, step=step)
    return Parameter(key=key, low=float(low), high=round(float(high), DIGITS), step=float(step))


def _applies(parameter: Parameter, chosen: Mapping[str, Value]) -> bool:
    """Return whether a parameter has a meaning beside the offload that is chosen."""
    offload = chosen.get("offload")
    return parameter.backend is None or offload is None or offload == parameter.backend


def _backend(key: str) -> str | None:
    """Return the offload backend whose node a key is in, None for other keys."""
    node, _, rest = key.partition(".")
    backend = rest.partition(".")[0]
    return backend if node == "offload" and backend in BACKENDS else None


def _text(parameter: Parameter) -> str:
    if parameter.choices:
        return ",".join(parameter.choices)
    bounds = f"{parameter.low}..{parameter.high}"
    step = "" if parameter.step is None else f" step {parameter.step}"
    return f"{bounds}{step}{' log' if parameter.is_log else ''}"
