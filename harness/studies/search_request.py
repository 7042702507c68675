"""What a search is asked: what it may choose, for which goal; its command line and its file."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from catalogue.files import load_yaml, quote_texts
from catalogue.models import describe
from catalogue.terminal import CommandParser
from engine.errors import ConfigError, did_you_mean
from engine.model.spec import ModelSpec
from engine.plan.answer import GROUP
from engine.sealed import GIB, yaml_text
from harness.config.command import key_of
from harness.config.compose import Composer
from harness.config.schema import ScenarioConfig
from harness.config.source import is_text
from reports.record.metrics import METRICS, STATISTIC_DEFINITIONS, metric_of
from reports.record.record import SAMPLE_FLOORS

Value = str | int | float
Proposal = dict[str, Value]
"""Key -> value of every parameter that applies."""
BACKENDS: Final = ("uva", "prefetch")
DIGITS: Final = 12
STEPS: Final = 16
"""Values of cpu_offload_gb in the space that is taken where none is given."""


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
        return _backend(self.key)

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

    def suggest(self, trial: Any) -> Value:
        """Return the value that a trial of Optuna proposes."""
        found: Value
        if self.choices:
            found = trial.suggest_categorical(self.key, self.choices)
        elif self.is_integer:
            low, high, step = int(self.low), int(self.high), int(self.step or 1)
            found = trial.suggest_int(self.key, low, high, step=step, log=self.is_log)
        else:
            span = {"step": self.step, "log": self.is_log}
            found = trial.suggest_float(self.key, self.low, self.high, **span)
        return found


@dataclass(frozen=True, kw_only=True)
class Space:
    """The parameters of a search, those that decide on others first."""

    parameters: tuple[Parameter, ...]

    def __post_init__(self) -> None:
        """Raise ConfigError where there is nothing to choose."""
        if not self.parameters:
            raise ConfigError(
                "search: expected at least one setting with several values, got none."
            )

    def propose(self, trial: Any) -> Proposal:
        """Return the values that a trial of Optuna proposes, of the parameters that apply."""
        found: Proposal = {}
        for parameter in self.parameters:
            if _applies(parameter, found):
                found[parameter.key] = parameter.suggest(trial)
        return found

    def first(self) -> Proposal:
        """Return the first value of every parameter that applies."""
        return next(self._walk(0, {}))

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
        for value in parameter.values() or [parameter.low]:
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
    """Return the overrides of all trials without those of another offload than a trial chose."""
    words = (item.partition("=") for item in chosen)
    offload = next((value for key, _, value in words if key == "offload"), None)
    backends = ((item, _backend(key_of(item))) for item in base)
    return [item for item, backend in backends if offload is None or backend in {None, offload}]


def parameter_of(override: Override) -> Parameter:
    """Return the parameter that an override with several values means."""
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
    """Return the space that is taken where none is given: all backends, sizes by the model."""
    weights_gib = spec.weight_bytes() / GIB
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


_EXPRESSION: Final = re.compile(r"\s*(\S+?)\s*(<=|>=)\s*(\S+)\s*")
_PARTS: Final = ("load", "latency", "throughput", "serve")
"""Areas of metrics that a part of the scenario of the same name measures."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A metric that must not be above, or below, a bound."""

    metric: str
    is_upper: bool
    bound: float

    def excess(self, value: float) -> float:
        """Return by how much a value is beyond the bound; at most 0 where it is kept."""
        return value - self.bound if self.is_upper else self.bound - value

    def __str__(self) -> str:
        """Return it as it was written."""
        return f"{self.metric}{'<=' if self.is_upper else '>='}{self.bound:g}"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The metric that counts, its direction, and what must hold beside."""

    metric: str
    is_maximum: bool
    constraints: tuple[Constraint, ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric that a trial must have."""
        return (self.metric, *(item.metric for item in self.constraints))

    def missing(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Return the metrics that a trial must have and has not."""
        return [name for name in self.metrics if metrics.get(name) is None]

    def excesses(self, metrics: Mapping[str, float | None]) -> list[float]:
        """Return the excess over each constraint."""
        return [item.excess(float(metrics[item.metric] or 0.0)) for item in self.constraints]

    def broken(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Return the constraints that are not kept."""
        pairs = zip(self.constraints, self.excesses(metrics), strict=True)
        return [str(item) for item, excess in pairs if excess > 0]


def parse_goal(maximize: str | None, minimize: str | None, constraints: Sequence[str]) -> Goal:
    """Return the goal that a command line asks for."""
    if (maximize is None) == (minimize is None):
        raise ConfigError(
            "search: expected one objective, --maximize METRIC or --minimize METRIC, such as "
            "--maximize throughput/output_tok_s."
        )
    metric = str(maximize or minimize)
    _check_metric(metric)
    return Goal(
        metric=metric,
        is_maximum=maximize is not None,
        constraints=tuple(parse_constraint(text) for text in constraints),
    )


def parse_constraint(text: str) -> Constraint:
    """Return the constraint of a text such as latency/ttft_ms/p50<=500."""
    match = _EXPRESSION.fullmatch(text)
    try:
        bound = float(match[3]) if match else None
    except ValueError:
        bound = None
    if match is None or bound is None or not math.isfinite(bound):
        raise ConfigError(
            f"--subject-to: expected METRIC<=NUMBER or METRIC>=NUMBER, got {text!r}. Quote it: the "
            "shell takes < and > for redirections."
        )
    _check_metric(match[1])
    return Constraint(metric=match[1], is_upper=match[2] == "<=", bound=bound)


def check_measured(goal: Goal, scenario: ScenarioConfig) -> None:
    """Raise ConfigError where the part of the scenario that a metric comes from is null."""
    for metric in goal.metrics:
        part = metric.partition("/")[0]
        if part in _PARTS and getattr(scenario, part) is None:
            raise ConfigError(
                f"{metric}: the scenario {scenario.name} does not measure it: scenario.{part} is "
                f"null. Choose a scenario with {part}, or another metric."
            )
        _check_samples(metric, scenario)


def _check_samples(name: str, scenario: ScenarioConfig) -> None:
    """Raise ConfigError where too few requests are sent alone for a percentile over them."""
    part, _, rest = name.partition("/")
    if part != "latency" or scenario.latency is None or rest.startswith("itl_ms"):
        return  # gaps between tokens are more than requests
    needed = next((n for q, n in SAMPLE_FLOORS.items() if rest.endswith(f"/p{q}")), 0)
    if scenario.latency.num_rows < needed:
        raise ConfigError(
            f"{name}: expected at least {needed} requests, got {scenario.latency.num_rows}. Set "
            f"scenario.latency.num_requests={needed}, or take another statistic."
        )


def _check_metric(name: str) -> None:
    metric = metric_of(name)
    if metric is None:
        ending = " or ".join(each for each in METRICS if each.endswith(f"/{name}"))
        hint = f" Did you mean {ending}?" if ending else did_you_mean(name, list(METRICS))
        raise ConfigError(
            f"search: there is no metric {name!r}.{hint} Metrics are "
            "area/quantity_unit or area/quantity_unit/statistic, as in result.json."
        )
    last = name.removeprefix(metric.name).removeprefix("/")
    if metric.statistics and last not in STATISTIC_DEFINITIONS:
        raise ConfigError(
            f"search: {name}: expected a statistic of {metric.name}, such as "
            f"{metric.name}/{metric.statistics[-1]}; there are {', '.join(STATISTIC_DEFINITIONS)}."
        )


TRIALS: Final = 20
_FILE_KEYS: Final = (
    "base", "space", "maximize", "minimize", "subject_to", "trials", "minutes", "seed", "name",
)  # fmt: skip
HELP: Final = """\
usage: tightfit search [OPTION ...] [GROUP=FILE | KEY=VALUE ...]

Looks for the settings with the best value of a metric. Each trial is one point.
The search varies the settings with several values: a,b or choice(a,b),
range(start,stop,step), interval(low,high), tag(log,interval(low,high)),
int(interval(low,high)). Those of offload.uva and offload.prefetch apply to
trials with that offload. If no setting has several values, the search varies
the offload and its sizes. A plan that does not fit is refused before anything
is built.

options:
  --maximize METRIC, --minimize METRIC
                    the objective, such as throughput/output_tok_s
  --subject-to METRIC<=NUMBER
                    a constraint, also with >=; may be repeated
  --trials N        trials that are built (default 20); refused plans do not
                    count
  --minutes M       no trial begins later than this after the start
  --seed N          seed of the proposals (default 0)
  --name NAME       name of the search; the same search resumes
  --file FILE       YAML with base (list of overrides), space (key: values),
                    maximize or minimize, subject_to (list), trials, minutes,
                    seed, name; the command line overrides it
  --config-dir FOLDER
                    look for configuration files there too

If the space has no more combinations than trials, all of them are tried. A
trial fails, with a reason, if it does not fit, does not end ok, is not valid or
lacks a metric. Needs Optuna, which the extra `search` installs:
pip install '.[search]' in a checkout.

example:
  tightfit search +model=olmo7b gpu=rtx4080_16gb scenario=all \\
    offload=uva,prefetch 'offload.uva.cpu_offload_gb=range(4,12,0.5)' \\
    'offload.prefetch.offload_num_in_group=range(3,9)' \\
    offload.prefetch.offload_group_size=8 \\
    --maximize throughput/output_tok_s --subject-to 'latency/ttft_ms/p50<=500'

exit codes:
  0 a best trial was found           2 the request is wrong
  3 no trial meets the constraints, or the search ended early, because 50
    proposals in a row did not fit or were known
  130 interrupted
"""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What a search is asked to find, and how much it may spend."""

    base: tuple[str, ...]
    """Overrides of every trial."""
    space: Space
    goal: Goal
    trials: int = TRIALS
    minutes: float | None = None
    seed: int = 0
    name: str
    config_dir: Path | None = None

    def question(self) -> dict[str, Any]:
        """Return what makes two searches the same, as plain data."""
        return {
            "base": list(self.base),
            "space": self.space.describe(),
            "objective": f"{'maximize' if self.goal.is_maximum else 'minimize'} {self.goal.metric}",
            "subject_to": [str(item) for item in self.goal.constraints],
            "seed": self.seed,
        }


def parse_request(argv: Sequence[str]) -> SearchRequest | None:
    """Return what a command line asks for; None: the help."""
    typed = _parser().parse_intermixed_args(list(argv))
    if typed.help:
        return None
    options = _merged(vars(typed), _read(typed.file) if typed.file is not None else {})
    composer = Composer(typed.config_dir)
    overrides = composer.parse([*options["base"], *typed.overrides])
    latest = {item.key_or_group: item for item in overrides}  # of one key the later one
    swept = [item for item in latest.values() if item.is_sweep_override()]
    base = tuple(str(item.input_line) for item in latest.values() if item not in swept)
    goal = parse_goal(options["maximize"], options["minimize"], options["subject_to"])
    space = space_of(map(parameter_of, swept)) if swept else _default(composer, base)
    for parameter in space.parameters:
        values = parameter.choices or (parameter.low,)
        composer.check([f"{parameter.key}={value}" for value in values])
    composer.check(base)
    request = SearchRequest(
        base=base,
        space=space,
        goal=goal,
        trials=_integer("--trials", options["trials"], default=TRIALS, least=1),
        minutes=_minutes(options["minutes"]),
        seed=_integer("--seed", options["seed"], default=0, least=0),
        name=str(options["name"] or ""),
        config_dir=typed.config_dir,
    )
    if not request.name:
        known = json.dumps(request.question(), sort_keys=True)
        name = f"search-{hashlib.sha256(known.encode()).hexdigest()[:8]}"
        request = replace(request, name=name)
    if not re.sub("[-_.]", "", request.name).isalnum():
        raise ConfigError(f"--name: expected letters, digits, - _ and ., got {request.name!r}.")
    return request


def _default(composer: Composer, base: Sequence[str]) -> Space:
    """Return the space of a model that is given; its offload must not be."""
    given = [item for item in base if key_of(item).startswith("offload")]
    if given:
        raise ConfigError(
            f"search: expected a setting with several values, such as "
            f"'offload.uva.cpu_offload_gb=range(4,12,1)', got {given[0]} alone. Give one, or "
            "remove it: offload and its sizes are searched then."
        )
    points = composer.plan(base).points
    return default_space(describe(points[0].config.model).spec)


def _parser() -> CommandParser:
    parser = CommandParser(prog="tightfit search", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--maximize")
    parser.add_argument("--minimize")
    parser.add_argument("--subject-to", action="append")
    parser.add_argument("--trials", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--name")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--config-dir", type=Path)
    return parser


def _read(path: Path) -> dict[str, Any]:
    try:
        found = load_yaml(quote_texts(path.read_text(encoding="utf-8"), _is_text))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--file: expected a YAML file, got {path} ({error}).") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--file: expected a mapping in {path}, got {type(found).__name__}.")
    for key in found:
        if key not in _FILE_KEYS:
            hint, listed = did_you_mean(str(key), _FILE_KEYS), ", ".join(_FILE_KEYS)
            raise ConfigError(
                f"--file: {path}: there is no key {key!r}.{hint} There are: {listed}."
            )
    return found


def _merged(typed: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, of the command line where it gives one, else of the file."""
    found = {key: typed.get(key) for key in ("trials", "minutes", "seed", "name", "subject_to")}
    found = {key: file.get(key) if value is None else value for key, value in found.items()}
    source = typed if typed.get("maximize") or typed.get("minimize") else file
    found |= {key: source.get(key) for key in ("maximize", "minimize")}
    found["subject_to"] = _texts("subject_to", found["subject_to"])
    space = file.get("space") or {}
    if not isinstance(space, Mapping):
        raise ConfigError("--file: space: expected a mapping of keys to values.")
    base = _texts("base", file.get("base"))
    found["base"] = [*base, *(f"{key}={_spelled(value)}" for key, value in space.items())]
    return found


def _is_text(path: str) -> bool:
    """Whether a key of the file is a text: a search's name, or a text setting."""
    if path.startswith("space."):
        return is_text(path.removeprefix("space."))
    return path == "name"


def _spelled(value: object) -> str:
    """Return the values of a key in Hydra's syntax; a YAML list is a choice."""
    if isinstance(value, list):
        values = ",".join(map(yaml_text, value))
        return values if len(value) > 1 else f"choice({values})"
    return yaml_text(value)


def _texts(name: str, value: object) -> list[str]:
    """Return a list of texts; of the file a single one may stand without its dash."""
    items: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for item in items:
        if not isinstance(item, str):
            raise ConfigError(f"--file: {name}: expected a list of texts, got {item!r} in it.")
    return items


def _integer(name: str, value: object, *, default: int, least: int) -> int:
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}: expected an integer of {least} or more, got {value!r}.")
    return value


def _minutes(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not value > 0:  # nan too
        raise ConfigError(f"--minutes: expected a number above 0, got {value!r}.")
    return float(value)
