"""What a search wants: one metric as high or low as can be, others within bounds."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from harness.errors import ConfigError, did_you_mean
from harness.schema import ScenarioConfig
from reports.record.metrics import METRICS, metric_of

__all__ = ["Constraint", "Goal", "check_measured", "parse_constraint", "parse_goal"]

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
