"""StudyConfig: points that are run one after another and judged together. Imports no torch."""

import re
from dataclasses import dataclass, field
from typing import Final

from engine.errors import ConfigError
from engine.sealed import Sealed, check_choice

_SOURCE: Final = re.compile(r"(\w+):([\w./]+)(?:\*(\d+(?:\.\d+)?))?")
JUDGES: Final = ("bench", "bench_kv", "overhead", "validate", "validate_grid")


@dataclass(kw_only=True)
class StudyPoint(Sealed):
    """One point of a study."""

    title: str = ""
    """What tables call it."""
    overrides: list[str] = field(default_factory=list)
    """Of this point; those of the command line hold over them."""
    take: dict[str, str] = field(default_factory=dict)
    """Setting -> POINT:PATH, where its value stands in the record of an earlier point, or
    POINT:PATH*FACTOR."""

    def sources(self) -> dict[str, tuple[str, str, float]]:
        """Return setting -> (point, path in its record, factor) of `take`.

        Raises:
            ConfigError: A source is of another form.
        """
        found = {}
        for setting, source in self.take.items():
            parts = _SOURCE.fullmatch(source)
            if parts is None:
                raise ConfigError(
                    f"take.{setting}: expected POINT:PATH or POINT:PATH*FACTOR, got {source!r}."
                )
            found[setting] = (parts[1], parts[2], float(parts[3] or 1))
        return found


@dataclass(kw_only=True)
class StudyConfig(Sealed):
    """Points to run, each in a fresh process, and what their figures are held against."""

    name: str
    """What reports call it."""
    judge: str
    """How rows are made of the records: bench | bench_kv | overhead | validate | validate_grid."""
    points: dict[str, StudyPoint] = field(default_factory=dict)
    """By name, in order."""
    rows: list[str] = field(default_factory=list)
    """Names of the points to run; empty: all."""
    output: str | None = None
    """Document whose marked section is rewritten where all points ran on a GPU as they stand here;
    a path from the project's folder. null: none."""
    readme: str | None = None
    """Likewise, for a table of the few figures that matter most."""

    def check(self) -> None:
        """Raise ConfigError when a point is not there, or takes what is not known before it."""
        check_choice("study.judge", self.judge, JUDGES)
        unknown = [name for name in self.rows if name not in self.points]
        if unknown:
            raise ConfigError(
                f"study.rows: expected some of {', '.join(self.points)}, got {', '.join(unknown)}."
            )
        names = list(self.points)
        for name, point in self.points.items():
            for setting, (source, _, _) in point.sources().items():
                if source not in names[: names.index(name)]:
                    raise ConfigError(
                        f"study.points.{name}.take.{setting}: expected a value of an earlier "
                        f"point, got {point.take[setting]!r}."
                    )
                if self.rows and name in self.rows and source not in self.rows:
                    raise ConfigError(f"study.rows: {name} takes a value of {source}. Add it.")

    @property
    def chosen(self) -> list[str]:
        """Names of the points that run, in order."""
        return [name for name in self.points if not self.rows or name in self.rows]
