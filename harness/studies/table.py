"""Rows of a study: figures of points against the limits measured beside them, as Markdown."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from engine.sealed import GIB
from reports.record.record import RunRecord

BEFORE: Final = "before"
"""Name, among a study's points, of a run of an earlier version that stands beside them."""
Figures = Mapping[str, Any]
Value = tuple[str, float | None]
"""A figure in words, and what is held against bounds."""


class LackError(Exception):
    """What a row needs and is not there, in words."""


@dataclass(frozen=True)
class Row:
    """One line: what, the figure, what it is compared with and whether the target is met."""

    what: str
    figure: str
    share: float | None
    target: str = ""
    is_met: bool | None = None
    """None: no target here, or it was not measured."""


def make_row(
    what: str,
    value: Value | Callable[[], Value],
    *,
    least: float | None = None,
    most: float | None = None,
) -> Row:
    """Return a row that is held against the bounds that are given.

    Where `value` is called and raises LackError the row says so.
    """
    bounds = [f"at least {least:g}"] if least is not None else []
    bounds += [f"at most {most:g}"] if most is not None else []
    try:
        figure, share = value() if callable(value) else value
    except LackError as lack:
        figure, share = f"not measured: {lack}", None
    met = None
    if share is not None and bounds:
        met = (least is None or share >= least) and (most is None or share <= most)
    return Row(what, figure, share, ", ".join(bounds), met)


def known(value: float | None, what: str) -> float:
    """Return a value; LackError where it is None or 0."""
    if not value:
        raise LackError(f"{what} is not known")
    return value


def require(is_so: bool, otherwise: str) -> None:
    """Raise LackError with `otherwise` unless `is_so`."""
    if not is_so:
        raise LackError(otherwise)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One point of a study and how it ended."""

    title: str
    record: RunRecord | None
    """None: it did not run."""
    why: str = ""
    """Why it did not."""

    @property
    def lack(self) -> str | None:
        """Why there are no figures; None where there are."""
        record = self.record
        if record is None:
            return self.why
        if record.status == "ok":
            return None
        message = str((record.error or {}).get("message", "")).splitlines()
        return f"{record.status}: {message[0] if message else 'no message'}"

    def sample(self, part: str) -> Figures:
        """Return the figures of a part of the scenario; none where it has none."""
        found: Figures = self.record.samples.get(part, {}) if self.record is not None else {}
        return found

    def decodes(self) -> Iterator[tuple[int, Figures]]:
        """Yield batch and figures of each decode that had room."""
        for batch, figures in self.sample("steps").get("decode", {}).items():
            if "no_room" not in figures:
                yield int(batch), figures

    def rates(self, name: str) -> list[float]:
        """Return a rate of the link, GB/s, as probed before and after; those that are known."""
        metrics = self.record.metrics if self.record is not None else {}
        both = (metrics.get(f"link/{name}_gb_s"), metrics.get(f"link/{name}_after_gb_s"))
        return [rate for rate in both if rate]

    def rate(self, name: str) -> float | None:
        """Return the mean of a rate; None where it is not known."""
        found = self.rates(name)
        return sum(found) / len(found) if found else None


Found = Mapping[str, Result]
"""By the point's name, in order."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a study says."""

    rows: list[Row] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    """Lines of Markdown below the rows."""
    headline: list[str] = field(default_factory=list)
    """Rows of the few figures that matter most."""
    remarks: list[str] = field(default_factory=list)
    """What a reader should know of the points; the figures stand."""
    lacks: list[str] = field(default_factory=list)
    """Figures that are not there although they were asked for."""

    def without_targets(self) -> "Judged":
        """Return it with rows that are held against nothing: of an emulated card."""
        return replace(self, rows=[replace(row, target="", is_met=None) for row in self.rows])

    @property
    def missed(self) -> list[str]:
        """Names of the rows whose target was missed, or not measured."""
        return [row.what for row in self.rows if row.target and row.is_met is not True]

    def section(self, about: str) -> str:
        """Return the whole as Markdown, below `about`: the conditions, in words."""
        lines = [about]
        if self.rows:
            head = ("what", "measured", "share or ratio", "target", "")
            lines += ["", *grid(head, self._cells())]
        lines += self.tables
        for text in (*self.remarks, *self.lacks):
            lines += ["", text]
        return "\n".join(lines) + "\n"

    def _cells(self) -> Iterator[tuple[str, ...]]:
        verdicts = {True: "met", False: "**missed**", None: "**not measured**"}
        for row in self.rows:
            share = "" if row.share is None else f"{row.share:.3f}"
            verdict = verdicts[row.is_met] if row.target else ""
            yield row.what, row.figure, share, row.target, verdict


class Targets:
    """Rows of a study, of the points, batches and prompts that were chosen.

    Without `is_absolute` milliseconds, seconds and rates are held against nothing.
    """

    def __init__(self, found: Found, *, is_absolute: bool) -> None:
        self.found, self._is_absolute = found, is_absolute
        self.rows: list[Row] = []

    def title(self, name: str) -> str:
        """Return what tables call a point; its name where it was not chosen."""
        return self.found[name].title if name in self.found else name

    def add(
        self,
        points: str,
        what: str,
        value: Callable[[Found], Value],
        *,
        batch: int | None = None,
        prompt: int | None = None,
        is_ratio: bool = True,
        **bounds: float | None,
    ) -> None:
        """Add a row unless one of its points, or its batch or prompt, was not asked for."""
        for name in points.split():
            if name not in self.found:
                return
            steps = self.found[name].sample("steps")
            for part, wanted in (("decode", batch), ("chunk_s", prompt)):
                if wanted is not None and steps and str(wanted) not in steps.get(part, {}):
                    return
        held = bounds if is_ratio or self._is_absolute else {}
        self.rows.append(make_row(what, partial(value, self.found), **held))

    def judged(self, *, lacking: list[str]) -> Judged:
        """Return the rows, with how each engine was built and the rates beside it as tables."""
        tables = [*engine_table(self.found), *rate_table(self.found)]
        return Judged(rows=self.rows, tables=tables, lacks=lacking)


def sample_of(found: Found, name: str, part: str) -> Figures:
    """Return the figures of a part of a point's scenario; LackError where it has none."""
    figures = found[name].sample(part)
    if not figures:
        raise LackError(found[name].lack or "it did not run")
    return figures


def bare_of(found: Found, name: str, part: str) -> Figures:
    """Return what a point measured without an engine; LackError where it has no such figures."""
    figures: Figures | None = found[name].sample("bare").get(part)
    if figures is None:
        raise LackError(found[name].lack or "it did not run")
    require("no_room" not in figures, figures.get("no_room", ""))
    return figures


def decode_of(found: Found, name: str, batch: int) -> Figures:
    """Return the figures of a decode; LackError where it has none."""
    run: Figures = sample_of(found, name, "steps")["decode"][str(batch)]
    require("no_room" not in run, run.get("no_room", ""))
    return run


def moved_bytes(run: Figures) -> int:
    """Return the bytes that a decode step copies from the host and reads there."""
    return int(run["h2d_bytes"] + run["in_place_bytes"])


def moved_text(run: Figures) -> str:
    """Return in words the bytes that a decode step copies from the host and reads there."""
    kinds = (("h2d_bytes", "copied"), ("in_place_bytes", "in place"))
    parts = [f"{run[key] / 1e9:.3f} GB {how}" for key, how in kinds if run[key]]
    return ", ".join(parts) or "nothing moved"


def times_ratio(ours_s: float, theirs_s: float) -> Value:
    """Return what divides two times."""
    return f"{ours_s * 1e3:.2f} against {theirs_s * 1e3:.2f} ms", ours_s / theirs_s


def step_ms(name: str, batch: int, found: Found) -> Value:
    """Return a decode step in milliseconds."""
    found_ms = decode_of(found, name, batch)["step_s"] * 1e3
    return f"{found_ms:.2f} ms", found_ms


def step_ratio(name: str, base: str, batch: int, found: Found) -> Value:
    """Return what divides the steps of two points."""
    return times_ratio(*(decode_of(found, each, batch)["step_s"] for each in (name, base)))


def prompt_ratio(name: str, base: str, tokens: int, found: Found) -> Value:
    """Return what divides the times of a prompt of two points."""
    times = (sample_of(found, each, "steps")["chunk_s"][str(tokens)] for each in (name, base))
    return times_ratio(*(known(time_s, "the time of such a prompt") for time_s in times))


def link_share(name: str, rate: str, batch: int, found: Found) -> Value:
    """Return the bytes of a decode step over its time and a rate of the link: h2d or in_place.

    Those that are copied, or, over the rate in place, all that cross the link.
    """
    run = decode_of(found, name, batch)
    moved, step_s = run["h2d_bytes"] if rate == "h2d" else moved_bytes(run), run["step_s"]
    require(moved > 0, "nothing was moved")
    gb_s = known(found[name].rate(rate), "the rate of the link")
    text = f"{step_s * 1e3:.2f} ms ({moved_text(run)})"
    return text, moved / step_s / 1e9 / gb_s


def counter_text(counter: Figures) -> str:
    """Return the engine's rate and that of NVML's counter in words."""
    ours, theirs = counter["engine_gb_s"], counter["nvml_gb_s"]
    span = f"in {counter['wall_s']:.0f} s (x {counter['factor']:.3f})"
    return f"{ours:.2f} against {theirs:.2f} GB/s {span}"


def grid(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table as lines."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return [*lines, *(f"| {' | '.join(cells)} |" for cells in rows)]


def lacks(found: Found) -> list[str]:
    """Return in words which points, batches, prefills and parts have no figures."""
    lines = []
    for result in found.values():
        if result.lack is not None:
            lines.append(f"{result.title}: no figures: {result.lack}")
        steps = result.sample("steps")
        runs = {f"batch {batch}": run for batch, run in steps.get("decode", {}).items()}
        for num, run in steps.get("prefill", {}).items():
            runs[f"prefill of {num} prompts"] = run
        runs |= result.sample("tiers").get("parts", {}) | result.sample("bare")
        for name, run in runs.items():
            why = run.get("no_room") or run.get("failed")
            if why:
                lines.append(f"{result.title}, {name}: no figures: {why}.")
    return lines


def engine_table(found: Found) -> list[str]:
    """Return how each engine was built, as lines of Markdown."""
    head = "engine|share of the card|load, s|weights ready, s|pinned, GiB|pinning, GiB/s|slots"
    head += "|of GiB|GPU peak, GiB|KV tokens"
    rows = []
    for result in found.values():
        memory = (result.sample("steps") or result.sample("tiers")).get("memory")
        if result.record is None or result.record.plan is None or not memory:
            continue
        plan, build = result.record.plan, result.sample("build")
        pinned = memory["host_pinned_bytes"] / GIB
        pin_s = touched_s(build)
        ready_s = pin_s + sum(build["phases"].get(name, 0.0) for name in ("allocate", "convert"))
        rows.append(
            (
                result.title,
                f"{result.record.config['engine']['gpu_memory_utilization']:g}",
                f"{build['seconds']:.1f}",
                f"{ready_s:.1f}",
                f"{pinned:.2f}" if pinned else "",
                f"{pinned / pin_s:.1f}" if pinned and pin_s else "",
                str(plan["num_slots"]),
                f"{plan['num_slots'] * plan['slot_bytes'] / GIB:.2f}",
                f"{memory['gpu_peak_bytes'] / GIB:.2f}",
                str(plan["kv"]["tokens"]),
            )
        )
    return ["", *grid(head.split("|"), rows)] if rows else []


def touched_s(build: Figures) -> float:
    """Return the seconds in which host memory was made present and registered."""
    return float(sum(build["phases"].get(name, 0.0) for name in ("touch", "pin")))


def rate_table(found: Found) -> list[str]:
    """Return the rates probed beside each engine, as lines of Markdown."""
    names = ("h2d", "d2h", "two_way", "in_place", "hbm_copy")
    head = "engine|host to device|back|both ways|in place|device memory, read + write"
    rows = []
    for result in found.values():
        cells = [" / ".join(f"{rate:.1f}" for rate in result.rates(name)) for name in names]
        if any(cells):
            rows.append((result.title, *cells))
    return [
        "",
        "Rates in the process of each engine, before it was built / after it was closed, GB/s; "
        "shares are of the mean:",
        "",
        *grid(head.split("|"), rows),
    ]
