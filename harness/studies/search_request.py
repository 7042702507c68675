"""The command line of `python -m harness.search`, and a file that says the same."""

import argparse
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from catalogue.files import load_yaml, quote_texts
from catalogue.models import describe
from engine.errors import ConfigError, did_you_mean
from engine.sealed import yaml_text
from harness.config.compose import Composer
from harness.config.schema import ScenarioConfig
from harness.config.source import is_text
from harness.studies.search_space import Space, default_space, parameter_of, space_of
from reports.record.metrics import METRICS, metric_of

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
    """Return the goal that a command line asks for.

    Raises:
        ConfigError: not exactly one objective, an unknown metric, or a constraint of another form.
    """
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
    """Return the constraint of a text such as latency/ttft_ms/p50<=500.

    Raises:
        ConfigError: another form, or an unknown metric.
    """
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
    """Check that the scenario measures what the goal is about, before anything runs.

    Raises:
        ConfigError: a part that a metric comes from is null.
    """
    for metric in goal.metrics:
        part = metric.partition("/")[0]
        if part in _PARTS and getattr(scenario, part) is None:
            raise ConfigError(
                f"{metric}: the scenario {scenario.name} does not measure it: scenario.{part} is "
                f"null. Choose a scenario with {part}, or another metric."
            )


def _check_metric(name: str) -> None:
    if metric_of(name) is None:
        known = list(METRICS)
        raise ConfigError(
            f"search: there is no metric {name!r}.{did_you_mean(name, known)} Metrics are "
            "area/quantity_unit or area/quantity_unit/statistic, as in result.json."
        )


TRIALS: Final = 20
_FILE_KEYS: Final = (
    "base", "space", "maximize", "minimize", "subject_to", "trials", "minutes", "seed", "name",
)  # fmt: skip
HELP: Final = """\
usage: python -m harness.search [OPTION ...] [GROUP=FILE | KEY=VALUE ...]

Looks for the settings with the best value of a metric: each trial is one point of the harness.
Settings with several values are what is searched: a,b or choice(a,b), range(start,stop,step),
interval(low,high), tag(log,interval(low,high)), int(interval(low,high)). Those below offload.uva
and offload.prefetch belong to trials with that offload. Where none has several values, offload and
its sizes are searched. A plan that does not fit is refused before anything is built.

options:
  --maximize METRIC, --minimize METRIC   what counts, such as throughput/output_tok_s
  --subject-to METRIC<=NUMBER            must hold; may be repeated; also >=
  --trials N        trials that are built (default 20); refused plans do not count
  --minutes M       no trial begins later than this after the start
  --seed N          of the proposals (default 0)
  --name NAME       of the search; the same search goes on where it stopped
  --file FILE       YAML with base (list of overrides), space (key: values), maximize or minimize,
                    subject_to (list), trials, minutes, seed, name; the command line wins
  --config-dir FOLDER   look for configuration files there too

A space with no more combinations than trials is tried completely. A trial that does not fit, fails,
is not valid or lacks a metric is a failed trial with its reason. Needs: pip install
'tightfit[search]'

example:
  python -m harness.search +model=olmo7b gpu=rtx4080_16gb scenario=all offload=uva,prefetch \\
    'offload.uva.cpu_offload_gb=range(4,12,0.5)' \\
    'offload.prefetch.offload_num_in_group=range(3,9)' offload.prefetch.offload_group_size=8 \\
    --maximize throughput/output_tok_s --subject-to 'latency/ttft_ms/p50<=500'

exit codes: 0 a best trial was found, 2 the request is wrong, 3 no trial meets the constraints,
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
        return _question(self.base, self.space, self.goal, self.seed)


def parse_request(argv: Sequence[str]) -> SearchRequest | None:
    """Return what a command line asks for; None: the help.

    Raises:
        ConfigError: an unknown option, key, metric or form.
    """
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
    seed = _integer("--seed", options["seed"], default=0, least=0)
    known = json.dumps(_question(base, space, goal, seed), sort_keys=True)
    name = options["name"] or f"search-{hashlib.sha256(known.encode()).hexdigest()[:8]}"
    if not str(name).replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(f"--name: expected letters, digits, - _ and ., got {name!r}.")
    return SearchRequest(
        base=base,
        space=space,
        goal=goal,
        trials=_integer("--trials", options["trials"], default=TRIALS, least=1),
        minutes=_minutes(options["minutes"]),
        seed=seed,
        name=str(name),
        config_dir=typed.config_dir,
    )


def _question(base: tuple[str, ...], space: Space, goal: Goal, seed: int) -> dict[str, Any]:
    return {
        "base": list(base),
        "space": space.describe(),
        "objective": f"{'maximize' if goal.is_maximum else 'minimize'} {goal.metric}",
        "subject_to": [str(item) for item in goal.constraints],
        "seed": seed,
    }


def _default(composer: Composer, base: Sequence[str]) -> Space:
    """Return the space of a model that is given; its offload must not be."""
    given = [item for item in base if item.lstrip("+").startswith("offload")]
    if given:
        raise ConfigError(
            f"search: expected a setting with several values, such as "
            f"'offload.uva.cpu_offload_gb=range(4,12,1)', got {given[0]} alone. Give one, or "
            "remove it: offload and its sizes are searched then."
        )
    points = composer.plan(base).points
    return default_space(describe(points[0].config.model).spec)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}. See python -m harness.search --help.")


def _parser() -> _Parser:
    parser = _Parser(prog="python -m harness.search", add_help=False, allow_abbrev=False)
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
