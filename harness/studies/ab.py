"""A comparison: both sides, their runs in pairs, and what these say: ratios and tokens."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from catalogue.terminal import columns, error_facts
from engine.errors import ConfigError
from engine.lines import indented
from harness.config.command import key_of
from harness.config.compose import Composer, Plan, Point
from harness.config.engine import require_package
from harness.config.schema import SIDES, AbConfig, RunConfig
from harness.observe.statistics import CONFIDENCE, interval
from harness.observe.student import student_t
from harness.point.show import build_report, verdict_text
from harness.studies.series import RunOne, Series
from reports.record.judging import UNRESOLVED, WITHIN_NOISE, answer_of
from reports.record.metrics import TOTAL, Better, Metric, Metrics, shown
from reports.record.record import RunRecord, percentile
from reports.record.text import flatten, number

COMPARED: Final[Mapping[str, Metric]] = {metric.mean.name: metric.mean for metric in shown("ab")}
"""What is compared, of samples their mean."""
PER_REQUEST: Final = ("ttft_ms", "tpot_ms", "e2e_ms")


def run_metrics(record: RunRecord) -> dict[str, float | None]:
    """Return the metrics of a run, and TOTAL: its load and its timed parts, one after another.

    Of a part that was repeated, which sides may do differently often, it holds the mean of once.
    """
    metrics = record.metrics
    times = [metrics.get(name) for name in ("load/total_s", "throughput/wall_s", "serve/wall_s")]
    alone = part_rows(record, "latency")
    num_repeats = len({row.get("repeat") for row in alone})
    alone_ms = [row.get("e2e_ms") for row in alone]
    times += [time_ms / 1e3 / num_repeats for time_ms in alone_ms if time_ms is not None]
    known = [time_s for time_s in times if time_s is not None]
    return dict(metrics) | {TOTAL.name: math.fsum(known) if known else None}


Rows = Sequence[Mapping[str, Any]]
"""Of the requests of one part of a run."""


def part_rows(record: RunRecord, part: str) -> Rows:
    """Return the rows of the requests of a part of the scenario, none where it did not run."""
    found = record.samples.get(part) or []
    rows = found if isinstance(found, list) else found.get("requests", [])
    return list(rows)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One metric of both sides."""

    metric: str
    label: str
    better: Better
    num_pairs: int
    """Pairs in which both sides have it."""
    a: float
    """Mean over the pairs."""
    b: float
    ratio: float | None
    """b / a, the geometric mean over the pairs; None where a side is 0."""
    low: float | None
    """Low end of its 95 % interval (Student's t on the logarithms of the ratios); None below 2."""
    high: float | None
    aa_ratio: float | None
    """The same of a against itself; None without such runs."""
    aa_low: float | None
    aa_high: float | None
    resolution: float | None
    """Share below which a difference could be noise: what a against itself would reach."""
    verdict: str


def compare(
    pairs: Sequence[tuple[Metrics, Metrics]], aa_pairs: Sequence[tuple[Metrics, Metrics]]
) -> list[Ratio]:
    """Return a ratio for every metric that at least one pair has on both sides.

    Pairs are metrics of a and b, of runs next to each other; in `aa_pairs` of a and a again.
    """
    return [
        _ratio(metric, values, _both(aa_pairs, name))
        for name, metric in COMPARED.items()
        if (values := _both(pairs, name))
    ]


def _both(pairs: Sequence[tuple[Metrics, Metrics]], metric: str) -> list[tuple[float, float]]:
    read = ((first.get(metric), second.get(metric)) for first, second in pairs)
    return [(one, other) for one, other in read if one is not None and other is not None]


def _ratio(
    metric: Metric, values: Sequence[tuple[float, float]], noise: Sequence[tuple[float, float]]
) -> Ratio:
    count = len(values)
    ratio, low, high = geometric(values)
    aa_ratio, aa_low, aa_high = geometric(noise)
    resolution = resolved_share(noise, count)
    return Ratio(
        metric=metric.name,
        label=metric.words,
        better=metric.better,
        num_pairs=count,
        a=math.fsum(one for one, _ in values) / count,
        b=math.fsum(other for _, other in values) / count,
        ratio=ratio,
        low=low,
        high=high,
        aa_ratio=aa_ratio,
        aa_low=aa_low,
        aa_high=aa_high,
        resolution=resolution,
        verdict=verdict_of(ratio, low, high, resolution),
    )


def geometric(
    values: Sequence[tuple[float, float]],
) -> tuple[float | None, float | None, float | None]:
    """Return the geometric mean of second / first and its 95 % interval.

    None for all without a pair or with a value that is not above 0; no interval below two pairs.
    """
    if not values or any(one <= 0 or other <= 0 for one, other in values):
        return None, None, None
    logs = [math.log(other / one) for one, other in values]
    known = interval(logs, student_t)
    if known is None:
        return math.exp(logs[0]), None, None
    return math.exp(known.mean), math.exp(known.low), math.exp(known.high)


def resolved_share(noise: Sequence[tuple[float, float]], count: int) -> float | None:
    """Return the share by which a mean of `count` pairs may differ from 1 by noise alone.

    The half width of the 95 % interval that pairs of one side against itself give: their root mean
    square about no difference, with as many degrees of freedom as there are pairs.
    """
    if len(noise) < 2 or any(one <= 0 or other <= 0 for one, other in noise):
        return None
    logs = [math.log(other / one) for one, other in noise]
    spread = math.sqrt(math.fsum(value**2 for value in logs) / len(logs))
    return math.expm1(student_t(CONFIDENCE, len(logs)) * spread / math.sqrt(count))


def verdict_of(
    ratio: float | None, low: float | None, high: float | None, resolution: float | None
) -> str:
    """Return in words what a ratio says."""
    if ratio is None:
        return "no ratio: a side is 0"
    if low is None or high is None:
        return "one pair: no interval"
    within = resolution is not None and abs(math.log(ratio)) <= math.log1p(resolution)
    if low <= 1 <= high or within:
        return UNRESOLVED if low <= 1 <= high else WITHIN_NOISE
    return "b is lower" if ratio < 1 else "b is higher"


def per_request(pairs: Sequence[tuple[Rows, Rows]]) -> list[dict[str, Any]]:
    """Return by quantity how the ratios of single requests of the latency part are spread."""
    found = []
    for quantity in PER_REQUEST:
        ratios = sorted(
            theirs[quantity] / ours[quantity]
            for one, other in pairs
            for ours, theirs in _matched(one, other)
            if ours.get(quantity) and theirs.get(quantity)
        )
        if ratios:
            found.append(
                {
                    "quantity": quantity,
                    "num": len(ratios),
                    "least": ratios[0],
                    "median": percentile(ratios, 50),
                    "most": ratios[-1],
                }
            )
    return found


def _matched(one: Rows, other: Rows) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the rows of the same request of the same repeat that completed on both sides."""
    theirs = _completed(other)
    return [(row, theirs[name]) for name, row in _completed(one).items() if name in theirs]


def _completed(rows: Rows) -> dict[tuple[Any, Any], Mapping[str, Any]]:
    ended = (row for row in rows if row.get("error") is None)
    return {(row.get("repeat"), row["request_id"]): row for row in ended}


def token_agreement(pairs: Sequence[tuple[Rows, Rows]]) -> dict[str, Any]:
    """Return how many requests gave the same tokens on both sides, and the first that did not."""
    matched = [pair for one, other in pairs for pair in _matched(one, other)]
    known = [(x, y) for x, y in matched if x.get("tokens_hash") and y.get("tokens_hash")]
    unequal = [x["request_id"] for x, y in known if x["tokens_hash"] != y["tokens_hash"]]
    return {
        "num_compared": len(known),
        "num_equal": len(known) - len(unequal),
        "first_unequal": unequal[0] if unequal else None,
    }


AGAINST_ITSELF: Final = "aa"
COMPARED_PHASE: Final = "ab"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One run of one side."""

    phase: str
    """aa: side a against itself | ab."""
    pair: int
    """From 1."""
    side: str
    """a or b."""

    @property
    def label(self) -> str:
        """Short name, such as aa1-a or ab2-b."""
        return f"{self.phase}{self.pair}-{self.side}"


def steps(ab: AbConfig) -> Iterator[Step]:
    """Yield the runs in order: side a against itself, then A B, B A, A B, ..."""
    for pair in range(1, ab.aa_pairs + 1):
        for _ in SIDES:
            yield Step(phase=AGAINST_ITSELF, pair=pair, side=SIDES[0])
    for pair in range(1, ab.pairs + 1):
        for side in SIDES if pair % 2 else reversed(SIDES):
            yield Step(phase=COMPARED_PHASE, pair=pair, side=side)


Done = Sequence[tuple[Step, RunRecord]]
"""Runs that ended, in order."""
Pairs = Sequence[tuple[RunRecord, RunRecord]]


def is_needed(step: Step, done: Done) -> bool:
    """Return whether a run can still say something.

    A side that ended otherwise than ok is not run again; the other one then runs once.
    """
    bad = {before.side for before, record in done if record.status != "ok"}
    good = {before.side for before, record in done if record.status == "ok"}
    if step.side in bad:
        return False
    return not bad or step.side not in good


def pairs_of(done: Done, phase: str) -> Pairs:
    """Return the records of the complete pairs of a phase: a and b, or a and a in order of time."""
    found: dict[int, list[tuple[str, RunRecord]]] = {}
    for step, record in done:
        if step.phase == phase and record.status == "ok":
            found.setdefault(step.pair, []).append((step.side, record))
    whole = [sorted(runs, key=lambda run: run[0]) for runs in found.values() if len(runs) == 2]
    return [(first, second) for (_, first), (_, second) in whole]


STATUS_ORDER: Final = ("killed", "timeout", "failed", "oom", "no_fit", "partial", "skipped", "ok")
"""Statuses of a comparison: the first that a side has."""
TOKEN_PARTS: Final = ("latency", "throughput", "serve")
_MOST_REASONS: Final = 12
_HEADER: Final = ("", "a", "b", "b / a", "95 % interval", "a / a +-", "")


def comparison(ab: AbConfig, done: Done, *, is_interrupted: bool = False) -> RunRecord:
    """Return what the runs say."""
    pairs, noise = pairs_of(done, COMPARED_PHASE), pairs_of(done, AGAINST_ITSELF)
    ratios = compare(_metrics(pairs), _metrics(noise))
    tokens = {
        part: found
        for part in TOKEN_PARTS
        if (found := token_agreement(_rows(pairs, part)))["num_compared"]
    }
    unequal = _unequal_alone(tokens)
    nodes = (record.config.get("system") or {} for _, record in done)
    peers = {node.get("kind", "native") for node in nodes}
    # Another system rounds otherwise; the engine under another placement does not.
    reasons = [*_run_reasons(done), *(unequal if len(peers) < 2 else [])]
    status, error = _status(done, is_interrupted=is_interrupted)
    judged = [record.valid for _, record in done if record.status == "ok"]
    valid = False if reasons else (True if judged and all(judged) else None)
    notes = [*_notes(ab, pairs, tokens), *(unequal if len(peers) > 1 else [])]
    sides = (" ".join(own) or "as is" for own in (ab.a, ab.b))
    sample = {
        "a": _side(done, "a", ab.a),
        "b": _side(done, "b", ab.b),
        "runs": [_run(number, *run) for number, run in enumerate(done)],
        "rows": [asdict(ratio) for ratio in ratios],
        "per_request": per_request(_rows(pairs, "latency")),
        "tokens": tokens,
    }
    return RunRecord(
        run_id="",
        name=f"ab: {' against '.join(sides)}",
        status=status,
        error=error,
        valid=valid if pairs else None,
        reasons=reasons[:_MOST_REASONS],
        effective={"notes": notes},
        metrics=dict(_ratio_metrics(ratios)),
        samples={"ab": sample},
    )


def folder_of(number: int, step: Step) -> Path:
    """Return the folder of a run, below the comparison's own."""
    return Path("runs", f"{number:02d}-{step.label}")


def _run(number: int, step: Step, record: RunRecord) -> dict[str, Any]:
    facts = ("run_id", "status", "valid", "started_at", "duration_s")
    metrics = {name: value for name, value in run_metrics(record).items() if name in COMPARED}
    return {
        "folder": str(folder_of(number, step)),
        **asdict(step),
        **{name: getattr(record, name) for name in facts},
        "metrics": metrics,
    }


def _metrics(pairs: Pairs) -> list[tuple[Metrics, Metrics]]:
    return [(run_metrics(first), run_metrics(second)) for first, second in pairs]


def _rows(pairs: Pairs, part: str) -> list[tuple[Rows, Rows]]:
    return [(part_rows(first, part), part_rows(second, part)) for first, second in pairs]


def _side(done: Done, side: str, own: Sequence[str]) -> dict[str, Any]:
    """Return how a side ended, with the figures of its first good run."""
    records = [record for step, record in done if step.side == side]
    bad = next((record for record in records if record.status != "ok"), None)
    good = next((record for record in records if record.status == "ok"), None)
    found = run_metrics(good) if good is not None else {}
    return {
        "overrides": list(own),
        "status": bad.status if bad is not None else "ok" if good is not None else "skipped",
        "error": bad.error if bad is not None else None,
        "num_runs": len(records),
        "first_run": {name: found.get(name) for name in COMPARED if found.get(name) is not None},
    }


def _status(done: Done, *, is_interrupted: bool) -> tuple[str, dict[str, Any] | None]:
    if is_interrupted:
        text = "the harness was interrupted; the runs before it are compared."
        return "killed", error_facts("Interrupted", text)
    found = {record.status: (step, record) for step, record in reversed(done)}
    status = next((status for status in STATUS_ORDER if status in found), "failed")
    if status == "ok":
        return status, None
    step, record = found[status]
    error = record.error or {"type": "Unknown", "message": "it has no error"}
    text = f"side {step.side}: {error['message']}"
    return status, error_facts(error["type"], text, error.get("phase"))


def _run_reasons(done: Done) -> list[str]:
    """Return the reasons of the runs, each once, with the runs that have it."""
    found: dict[str, list[str]] = {}
    for step, record in done:
        for reason in record.reasons:
            found.setdefault(reason, []).append(step.label)
    return [f"{', '.join(labels)}: {reason}" for reason, labels in found.items()]


def _unequal_alone(tokens: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line where requests that ran alone gave other tokens on the two sides."""
    found = tokens.get("latency")
    if found is None or found["num_equal"] == found["num_compared"]:
        return []
    count = found["num_compared"]
    return [
        f"latency: {count - found['num_equal']} of {count} requests gave other tokens on side b "
        f"than on side a, the first {found['first_unequal']}. Compare their settings of dtype and "
        "kernels; of one engine under two placements report this."
    ]


def _notes(ab: AbConfig, pairs: Pairs, tokens: Mapping[str, Mapping[str, Any]]) -> list[str]:
    notes = []
    if len(pairs) < ab.pairs:
        notes.append(f"ab: {len(pairs)} of {ab.pairs} pairs ran on both sides.")
    if ab.aa_pairs == 0:
        notes.append(
            "ab: side a was not run against itself (ab.aa_pairs=0), so nothing says which "
            "differences this machine can resolve."
        )
    for part, found in tokens.items():
        if part != "latency" and found["num_equal"] < found["num_compared"]:
            notes.append(
                f"{part}: {found['num_compared'] - found['num_equal']} of {found['num_compared']} "
                "requests gave other tokens on side b: requests that run together round otherwise "
                "where their steps are composed otherwise."
            )
    return notes


def _ratio_metrics(ratios: Sequence[Ratio]) -> Iterator[tuple[str, float | None]]:
    for item in ratios:
        name = "ab/" + item.metric.removesuffix("/mean").replace("/", "_")
        yield f"{name}_ratio", item.ratio
        yield f"{name}_ratio/ci95_low", item.low
        yield f"{name}_ratio/ci95_high", item.high
        yield f"{name}_noise_share", item.resolution


def result_lines(record: RunRecord, folder: Path) -> list[str]:
    """Return the comparison as lines of text."""
    sample = record.samples["ab"]
    lines = ["", f"{record.name}: {record.status}{verdict_text(record)}"]
    if sample["rows"]:
        lines += indented([answer_of(sample["rows"])])
    for side in SIDES:
        found = sample[side]
        lines.append(f"  {side} = {' '.join(found['overrides']) or 'as is'}: {found['status']}")
    if record.error is not None:
        lines += indented([f"{record.error['type']}: {record.error['message'].splitlines()[0]}"])
    lines += indented(record.reasons)
    if not sample["rows"]:
        lines += _single_lines(sample)
    else:
        rows = [_HEADER, *(_cells(row) for row in sample["rows"])]
        lines += columns(rows, left={0, len(_HEADER) - 1})
    for part, found in sample["tokens"].items():
        lines.append(
            f"  {part}: {found['num_equal']} of {found['num_compared']} requests gave equal tokens"
        )
    lines += indented(f"note: {text}" for text in record.effective.get("notes") or [])
    lines.append(f"  run folder  {folder}")
    if (folder / "report.html").is_file():
        lines.append(f"  report      {folder / 'report.html'}")
    return lines


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    """Cells of one metric of both sides."""
    return (
        _title(row["metric"]),
        _text(row["a"]),
        _text(row["b"]),
        "n/a" if row["ratio"] is None else f"{row['ratio']:.3f}",
        "" if row["low"] is None else f"{row['low']:.3f} .. {row['high']:.3f}",
        "" if row["resolution"] is None else f"{number(100 * row['resolution'])} %",
        row["verdict"],
    )


def _single_lines(sample: Mapping[str, Any]) -> list[str]:
    """Figures of the side that ran where the other did not."""
    return columns(
        [
            (f"{side}: {_title(name)}", _text(value))
            for side in SIDES
            for name, value in sample[side]["first_run"].items()
        ]
    )


def _title(name: str) -> str:
    """Return what a metric is called in a table, with its unit."""
    metric = COMPARED[name]
    return metric.heading if metric.label else f"{metric.words} ({metric.unit})"


def _text(value: float | None) -> str:
    return "n/a" if value is None else number(value)


SAME_WORK: Final = ("scenario", "model", "tracking")
"""Nodes that both sides must have the same; what answers, and with which memory, may differ."""
HINT: Final = (
    "Sides may differ in system, offload, kv, engine, planner and gpu; put everything else beside "
    "ab.a and ab.b."
)


Sides = tuple[Point, Point]
"""a and b, with everything that was asked of them, ready to run."""


def compose_sides(
    ab: AbConfig, overrides: Sequence[str], config_dir: Path | None = None, *, mode: str = "run"
) -> Sides:
    """Compose both sides.

    Raises ConfigError where a side cannot be composed, does other work than the other, or
    equals it.
    """
    base = [item for item in overrides if not key_of(item).startswith("ab.")]
    a, b = (_compose(name, list(getattr(ab, name)), base, config_dir, mode) for name in SIDES)
    _check_same_work(a.config, b.config)
    if a.config == b.config:
        raise ConfigError(
            "ab: expected two sides that differ, got equal configurations. Change ab.a or ab.b."
        )
    return a, b


def check_comparisons(plan: Plan, config_dir: Path | None = None) -> Sides | None:
    """Compose the sides of the comparison that a command line asks for, before anything runs."""
    if plan.multirun and any(point.config.ab is not None for point in plan.points):
        raise ConfigError(
            "scenario=ab: expected one comparison, got a sweep. Remove -m and values with "
            "commas, or run the comparisons one after another."
        )
    point = plan.points[0]
    if point.config.ab is None:
        return None
    return compose_sides(point.config.ab, point.overrides, config_dir, mode=point.config.mode)


def _compose(
    name: str, own: list[str], base: list[str], config_dir: Path | None, mode: str
) -> Point:
    keys = {key_of(item) for item in own}
    kept = [item for item in base if key_of(item) not in keys]
    try:
        plan = Composer(config_dir).plan([*kept, *own])
        (point,) = plan.points
        if mode == "run":
            require_package(point.config.system.kind)
    except ConfigError as error:
        raise ConfigError(f"ab.{name}: {error}") from error
    if point.config.mode != mode:
        raise ConfigError(f"ab.{name}: expected mode={mode}, got mode={point.config.mode}.")
    return replace(point, overrides=[*kept, *own], config=replace(point.config, ab=None))


def _check_same_work(a: RunConfig, b: RunConfig) -> None:
    for node in SAME_WORK:
        ours, theirs = _work(a, node), _work(b, node)
        for key in {**ours, **theirs}:
            one, other = ours.get(key), theirs.get(key)
            if one != other:
                raise ConfigError(
                    f"ab: expected the same {node} on both sides, but {key} is {one!r} in a and "
                    f"{other!r} in b: figures of different work cannot be compared. {HINT}"
                )


def _work(config: RunConfig, node: str) -> dict[str, Any]:
    found = dict(config.to_dict()[node])
    found.pop("fake", None)  # what a scripted engine pretends is no work
    return dict(flatten(found, node))


class Comparison(Series):
    """Runs both sides in pairs."""

    def __init__(self, point: Point, run_dir: Path, sides: Sides) -> None:
        assert point.config.ab is not None
        self._ab, self._steps = point.config.ab, list(steps(point.config.ab))
        super().__init__(point, run_dir, kind="ab", total=len(self._steps))
        self._sides = dict(zip(SIDES, sides, strict=True))
        shared = set(sides[0].overrides) & set(sides[1].overrides)
        self._shared = [item for item in sides[0].overrides if item in shared]
        self._done: list[tuple[Step, RunRecord]] = []

    @property
    def question(self) -> str:
        """Return the sides."""
        sides = (" ".join(own) or "as is" for own in (self._ab.a, self._ab.b))
        return f"ab, {' against '.join(sides)}"

    def run_points(self, run_one: RunOne) -> None:
        """Run what can still say something, in order."""
        for step in self._steps:
            if not is_needed(step, self._done):
                continue
            number = len(self._done)
            record = self.run_point(
                run_one,
                self._sides[step.side],
                folder_of(number, step),
                rerun="all",
                label=step.label,
                shared=self._shared,
            )
            self._done.append((step, record))

    def judge(self, *, is_interrupted: bool) -> RunRecord:
        """Return status, ratios and what speaks against them."""
        return comparison(self._ab, self._done, is_interrupted=is_interrupted)

    def publish(self) -> list[str]:
        """Make the page."""
        return build_report(self.run_dir)

    def lines(self, record: RunRecord) -> list[str]:
        """Return the ratios as lines of text."""
        return result_lines(record, self.run_dir)
