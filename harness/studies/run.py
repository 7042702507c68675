"""A study, from its composition to its record: points in order, rows, and the documents' tables."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from catalogue.files import CONF, expanded
from catalogue.terminal import error_facts, say
from engine.errors import ConfigError
from harness.config.command import key_of
from harness.config.compose import Composer, Plan, Point, with_values
from harness.config.engine import require_package
from harness.config.schema import RunConfig
from harness.config.study import StudyConfig, StudyPoint
from harness.studies import (
    bench,
    bench_experts,
    bench_kv,
    bench_lossless,
    bench_quantised,
    bench_serve,
    validate,
)
from harness.studies.series import RunOne, Series
from harness.studies.table import BEFORE, Found, Judged, Result
from reports.record.record import RESULT_NAME, RecordError, RunRecord, write_text_atomic


def marks(name: str) -> tuple[str, str]:
    """Return the lines between which a study's section stands."""
    return f"<!-- study {name}: begin -->", f"<!-- study {name}: end -->"


def check_document(file: Path, name: str) -> tuple[str, str]:
    """Return what stands before and behind a study's section.

    Raises ConfigError unless the document holds each mark once, in order.
    """
    begin, end = marks(name)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"study.output: expected a document to rewrite, got {file}: {error.strerror}. Name one "
            f"that holds the lines {begin} and {end}."
        ) from error
    is_once = text.count(begin) == text.count(end) == 1
    if not is_once or text.index(begin) > text.index(end):
        raise ConfigError(
            f"study.output: expected the lines {begin} and {end} once each in {file}, in this "
            "order. Add them where the table shall stand."
        )
    return text.partition(begin)[0], text.partition(end)[2]


def write_section(file: Path, section: str, name: str) -> None:
    """Replace what stands between the marks of a study."""
    head, tail = check_document(file, name)
    begin, end = marks(name)
    file.write_text(f"{head}{begin}\n\n{section.rstrip()}\n\n{end}{tail}", encoding="utf-8")


ROOT: Final = CONF.parent
POINTS: Final = "points"
"""Folder of the points, below the study's own."""
TABLE_NAME: Final = "table.md"
NEUTRAL: Final = ("study", "tracking", "rerun", "timeout_s", "silence_s", "fail_fast", "hydra")
"""Overrides, groups or nodes that change nothing of what a study measures; not study.points."""
SAME_SHAPE: Final = (
    "study.rows",
    *(f"scenario.steps.{k}" for k in ("batches", "steps", "counter_s")),
)
"""Overrides that targets in seconds survive."""
SAME: Final = ("git", "driver", "host", "gpu.uuid", "torch")
"""Facts of the environment that all points of a study share."""
JUDGES: Final[Mapping[str, Callable[..., Judged]]] = {
    # The points, `card` (name of the GPU; None: it is emulated), and `is_default`: whether the
    # shape is that of the targets in seconds.
    "bench": bench.judge,
    "bench_experts": bench_experts.judge,
    "bench_kv": bench_kv.judge,
    "bench_lossless": bench_lossless.judge,
    "bench_quantised": bench_quantised.judge,
    "bench_serve": bench_serve.judge,
    "overhead": validate.judge_overhead,
    "validate": validate.judge,
    "validate_grid": validate.judge_grid,
}


Planned = Mapping[str, Point]
"""Points of a study by name, in order."""


def check_studies(plan: Plan, config_dir: Path | None = None) -> Planned:
    """Compose the points of the study that a command line asks for, before anything runs.

    Raises ConfigError where a point or a document cannot be had, or a sweep holds a study.
    """
    planned: Planned = {}
    for asked in plan.points:
        study = asked.config.study
        if study is None:
            continue
        if plan.multirun or asked.config.mode != "run":
            raise ConfigError(
                f"study={study.name}: expected one study with mode=run, got a sweep or another "
                "mode. Remove -m, values with commas and mode."
            )
        _read_before(study)
        planned = compose_points(asked.config, asked.overrides, config_dir)
        for found in planned.values():
            require_package(found.config.system.kind)
        if not changes_of(asked.overrides, study.rows):
            for file in filter(None, (study.output, study.readme)):
                check_document(ROOT / file, study.name)
    return planned


def _read_before(study: StudyConfig) -> RunRecord | None:
    """Return the record of the run that stands beside the points; None where none was given.

    Raises ConfigError where there is none in its folder, or it holds no single steps.
    """
    if study.before is None:
        return None
    file = expanded(study.before) / RESULT_NAME
    try:
        record = RunRecord.read(file)
    except RecordError as error:
        raise ConfigError(f"study.before: expected the folder of a run: {error}") from error
    if not record.samples.get("steps"):
        raise ConfigError(
            f"study.before: expected the folder of a run with scenario.steps, got {study.before}. "
            "Give a point of a study, such as RUN/points/resident."
        )
    return record


def compose_points(
    config: RunConfig, overrides: Sequence[str], config_dir: Path | None = None
) -> dict[str, Point]:
    """Return the points that a study runs, by name, in order.

    Overrides of the command line hold over those of a point.
    """
    study = config.study
    assert study is not None
    composer, base = Composer(config_dir), _base(overrides)
    return {name: compose_point(composer, name, study.points[name], base) for name in study.chosen}


def compose_point(composer: Composer, name: str, point: StudyPoint, base: Sequence[str]) -> Point:
    """Compose one point; settings that it takes from another are known when that one has run.

    Settings of `base` within a node that the point leaves out are those of other points.
    """
    typed = {key_of(item) for item in base}
    own = [item for item in point.overrides if key_of(item) not in typed]
    if point.experiment is not None:  # without the study's own settings
        own = [f"+experiment={point.experiment}", "hydra.mode=RUN", *own]
        base = [item for item in base if key_of(item) != "study"]
    without = tuple(f"{key_of(item)}." for item in own if item.endswith("=null"))
    base = [item for item in base if not key_of(item).startswith(without)]
    try:
        (found,) = composer.plan([*own, *base], has_model=True).points
    except ConfigError as error:
        raise ConfigError(f"study.points.{name}: {error}") from error
    return replace(found, overrides=[*own, *base], config=replace(found.config, study=None))


class StudyRun(Series):
    """Runs the points of a study."""

    def __init__(self, point: Point, run_dir: Path, planned: Planned) -> None:
        assert point.config.study is not None
        self._study, self._planned = point.config.study, planned
        name, total = self._study.name, len(self._study.chosen)
        super().__init__(point, run_dir, kind=name, total=total)
        self._found: dict[str, Result] = {}
        self._section, self._headline = "", ""

    @property
    def question(self) -> str:
        """Return the study's name."""
        return f"study {self._study.name}, {len(self._study.chosen)} points"

    def run_points(self, run_one: RunOne) -> None:
        """Run the points in order, beside the run of an earlier version if one was given."""
        before = _read_before(self._study)
        if before is not None:
            self._found[BEFORE] = Result(title="the version before", record=before)
        for number, name in enumerate(self._study.chosen, start=1):
            title = self._study.points[name].title or name
            total = len(self._study.chosen)
            say(f"{self._study.name}: {number} of {total}: {title}")
            self._run_point(name, title, run_one)

    def _run_point(self, name: str, title: str, run_one: RunOne) -> None:
        taken: dict[str, Any] = {}
        for setting, (source, path, factor) in self._study.points[name].sources().items():
            record = self._found[source].record
            value = None if record is None else _at(vars(record), path)
            if value is None:
                why = f"{self._found[source].title} has no {path}."
                self._found[name] = Result(title=title, record=None, why=why)
                return
            taken[setting] = value if factor == 1 else value * factor
        typed = {key_of(item) for item in self.overrides}
        planned = with_values(
            self._planned[name], {key: taken[key] for key in taken if key not in typed}
        )
        folder = Path(POINTS, name)
        try:
            self.run_point(
                run_one,
                planned,
                folder,
                rerun=self.config.rerun or "all",
                label=name,
                shared=planned.overrides,
            )
        finally:  # what it measured before an interrupt counts
            if folder in self.by_folder:
                self._found[name] = Result(title=title, record=self.by_folder[folder])

    @property
    def _card(self) -> str | None:
        """Name of the GPU; None where figures are emulated."""
        environments = [
            record.environment
            for record in self.records
            if record.environment.get("emulated") is not None  # a server does not tell
        ]
        if not environments or any(found["emulated"] for found in environments):
            return None
        name: str | None = (environments[0].get("gpu") or {}).get("name")
        return name

    def judge(self, *, is_interrupted: bool) -> RunRecord:
        """Return what was missed, and what is not there although it was asked for."""
        changes = changes_of(self.overrides, self._study.rows)
        judged = JUDGES[self._study.judge](
            self._found, card=self._card, is_default=all(map(keeps_shape, changes))
        )
        if self._card is None:
            judged = judged.without_targets()
        judged = replace(judged, remarks=[*judged.remarks, *_doubts(self._found)])
        faults = [*differing(self._found), *(f"missed: {what}" for what in judged.missed)]
        faults += judged.lacks
        self._section = judged.section(self._about())
        self._headline = "\n".join(judged.headline)
        write_text_atomic(self.run_dir / TABLE_NAME, self._section)
        error = None
        if is_interrupted or faults:
            message = "interrupted" if is_interrupted else f"{len(faults)} faults: {faults[0]}"
            kind = "Interrupted" if is_interrupted else "NotAllMet"
            error = error_facts(kind, message)
        points = [_ended(name, result) for name, result in self._found.items()]
        return RunRecord(
            run_id="",
            name=f"study {self._study.name}",
            status="killed" if is_interrupted else "failed" if faults else "ok",
            error=error,
            valid=error is None,
            reasons=faults,
            samples={"study": {"rows": [asdict(row) for row in judged.rows], "points": points}},
        )

    def publish(self) -> list[str]:
        """Rewrite the marked sections where everything ran as usual; else say why not."""
        why = ", ".join(changes_of(self.overrides, self._study.rows))
        if self._card is None:
            why = "figures are emulated"
        elif differing(self._found):
            why = "its points ran in different surroundings"
        files = {self._study.output: self._section, self._study.readme: self._headline}
        for file, text in files.items():
            if file is None:
                continue
            words = f"stays as it is: {why or 'no rows'}"
            if text and not why:
                write_section(ROOT / file, text, self._study.name)
                words = "has the table"
            say(f"{self._study.name}: {file} {words}")
        return []

    def lines(self, record: RunRecord) -> list[str]:
        """Return the tables."""
        return ["", self._section, f"{record.name}: {record.status}, in {self.run_dir}"]

    def _about(self) -> str:
        """Return what ran, where and when."""
        environment, card = self.records[0].environment if self.records else {}, self._card
        command = shlex.join(["tightfit", "run", *self.overrides])
        git = environment.get("git") or {}
        commit = f"commit {git['sha'][:12]}" if git.get("sha") else "no commit"
        triton = (environment.get("packages") or {}).get("triton")
        parts = [
            card or "a CPU",
            f"host {environment.get('host')}",
            f"driver {environment.get('driver') or 'unknown'}" if card else "",
            f"torch {environment.get('torch')}",
            f"triton {triton}" if triton else "no triton",
            f"{commit}{' with changes' if git.get('dirty') else ''}",
            f"{self.started:%Y-%m-%d}",
        ]
        text = f"`{command}` on {', '.join(filter(None, parts))}."
        if not self.records:
            return f"`{command}`, {self.started:%Y-%m-%d}: no point ended."
        if card is None:
            return f"{text} **Emulated: these figures are a CPU's and say nothing of a GPU.**"
        return f"{text} Random weights, clocks not locked, medians."


def _ended(name: str, result: Result) -> dict[str, Any]:
    """Return what the study's record says of a point."""
    record = result.record
    return {
        "name": name,
        "title": result.title,
        "folder": None if name == BEFORE else f"{POINTS}/{name}",
        "run_id": record and record.run_id,
        "status": record.status if record else "skipped",
    }


def _at(value: Any, path: str) -> Any:
    """Return what stands at a dotted path; None where nothing does."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _doubts(found: Found) -> list[str]:
    """Return in words what the points' own records say against their figures."""
    return [
        f"{result.title}: not valid: {reason}"
        for result in found.values()
        if result.record is not None and result.record.valid is False
        for reason in result.record.reasons
    ]


def differing(found: Found) -> list[str]:
    """Return in words which facts of the surroundings are not the same for all points."""
    records = {name: each.record for name, each in found.items() if each.record is not None}
    lines = []
    for fact in SAME:
        values = [
            str(_at(record.environment, fact))
            for name, record in records.items()
            if not (name == BEFORE and fact == "git")
        ]
        if len(set(values)) > 1:
            lines.append(
                f"{fact}: expected the same for all points, got {' and '.join(sorted({*values}))}."
                " Run the study anew with rerun=all."
            )
    return lines


def _base(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a command line that are for every point."""
    return [item for item in overrides if not key_of(item).startswith("study.")]


def changes_of(overrides: Sequence[str], rows: Sequence[str]) -> list[str]:
    """Return the overrides that make a study another than the one of its file."""
    found = [item for item in overrides if not _is_neutral(key_of(item))]
    return found + (["study.rows"] if rows and not found else [])


def _is_neutral(key: str) -> bool:
    if key in {"study.output", "study.readme", "study.before"}:
        return True
    node = re.split(r"[./]", key)[0]
    return key == "study" or (node != "study" and node in NEUTRAL)


def keeps_shape(override: str) -> bool:
    """Return whether targets in seconds survive an override."""
    return key_of(override) in SAME_SHAPE
