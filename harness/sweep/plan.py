"""mode=plan: plan every point, print, and keep a sweep's table as CSV and figure."""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from engine.errors import ConfigError
from harness.config.compose import Plan, Point
from harness.config.schema import AbConfig, RunConfig
from harness.errors import EXIT_NOT_ALL_OK, EXIT_OK
from harness.forecast.rows import Forecast, forecast
from harness.forecast.view import (
    CSV_COLUMNS,
    command_line,
    comparison_table,
    csv_row,
    point_lines,
    shown,
    sweep_table,
)
from harness.point.show import build_report
from harness.studies.ab import compose_sides
from harness.studies.ab_ratios import steps

CSV_NAME: Final = "plan.csv"


def show_plans(plan: Plan, config_dir: Path | None = None) -> int:
    """Print the plan of every point, or of both sides of a comparison; return the exit code.

    Args:
        plan: What a command line asks for.
        config_dir: A folder of the user's.

    Raises:
        ConfigError: A point's settings contradict each other, its model's sizes are not known, or
            nothing that is asked for is of this project's engine.
    """
    if plan.points[0].config.ab is not None:
        return _show_sides(plan.points[0], plan.points[0].config.ab, config_dir)
    names = point_names([point.overrides for point in plan.points])
    named = list(zip(plan.points, names, strict=True))
    peers = [name for point, name in named if point.config.system.kind != "native"]
    own = [(point, name) for point, name in named if point.config.system.kind == "native"]
    if not own:
        _refuse_peer(plan.points[0].config)
    found = [forecast(point.config, tuple(point.overrides)) for point, _ in own]
    if not plan.multirun:
        (only,) = found
        _print(point_lines(only))
        return EXIT_OK if only.recommended is not None else EXIT_NOT_ALL_OK
    path = Path(str(plan.points[0].composed.hydra.sweep.dir)) / CSV_NAME
    names = [name for _, name in own]
    write_csv(path, found, names)
    lines = [*sweep_table(found, names), *map(_unplanned, peers)]
    lines.append(f"  every way to place the weights: {path}")
    problems = build_report(path.parent)
    lines += problems or [f"  as a figure: {path.with_suffix('.png')}"]
    _print(lines)
    return EXIT_OK if all(shown(item).fits for item in found) else EXIT_NOT_ALL_OK


def _refuse_peer(config: RunConfig) -> None:
    """Refuse to plan what is not this project's engine."""
    if config.system.kind != "native":
        raise ConfigError(
            f"mode: expected run with system={config.system.kind}, got plan: plans and predicted "
            "times are of this project's engine. Choose system=native, or run it."
        )


def _unplanned(name: str) -> str:
    return f"  not planned: {name} (plans are of this project's engine, system=native)"


def _show_sides(point: Point, ab: AbConfig, config_dir: Path | None) -> int:
    both = compose_sides(ab, point.overrides, config_dir, mode="plan")
    for side in both:
        _refuse_peer(side.config)
    found = [forecast(side.config, tuple(side.overrides)) for side in both]
    titles = {side.name: f"{side.name}: {' '.join(side.own)}" for side in both}
    _print(
        comparison_table(
            dict(zip(titles.values(), found, strict=True)),
            [titles[step.side] for step in steps(ab)],
            command_line(point.overrides),
        )
    )
    return EXIT_OK if all(shown(item).fits for item in found) else EXIT_NOT_ALL_OK


def point_names(points: Sequence[Sequence[str]]) -> list[str]:
    """Return what sets points apart: their overrides without those that all have."""
    common = set.intersection(*map(set, points))
    return [
        " ".join(text.lstrip("+") for text in overrides if text not in common) or str(index)
        for index, overrides in enumerate(points)
    ]


def write_csv(path: Path, found: Sequence[Forecast], names: Sequence[str]) -> None:
    """Write every row of every point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS)
        writer.writeheader()
        for item, name in zip(found, names, strict=True):
            writer.writerows(csv_row(item, row, name) for row in item.rows)


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
