"""Content of a page, free of any markup: sections of tables and figures, and a verdict."""

import csv
import io
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from reports import facts
from reports.record.metrics import (
    CONVENTIONS,
    STATISTIC_DEFINITIONS,
    Metric,
    base_name,
    definition,
    interval,
    metric_number,
    metric_text,
    of_samples,
)
from reports.record.record import RunRecord, summarise
from reports.record.text import (
    ABSENT,
    LOCAL,
    SWEEPS,
    duration,
    experiment_page,
    flatten,
    gib,
    leaf,
    runs_search,
)

Kind = Literal["good", "warn", "bad", "plain", "better", "worse", "grey"]
STATISTICS: Final = tuple(summarise([]))


@dataclass(frozen=True, kw_only=True)
class Card:
    """One summary number."""

    label: str
    value: str
    unit: str = ""
    note: str = ""
    """What the number is to be seen against: its interval, what was predicted, its bound."""
    tip: str = ""
    """Its definition, shown on request."""
    kind: Kind = "plain"


@dataclass(frozen=True, kw_only=True)
class Link:
    """Address beside what it leads to, relative to the page."""

    label: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Command:
    """Command line to copy, beside what it is for."""

    label: str
    text: str
    is_address: bool = False
    """Whether the text is an address to open instead."""


def commands(
    record: RunRecord, again: str, *, tag: str = "harness.run_id", value: str | None = None
) -> tuple[Command, ...]:
    """Return the command that runs the same again, and the one that shows it in MLflow.

    Args:
        record: of the run, or of one of a sweep's points; without a configuration: nothing.
        again: the first command; empty: it is not known.
        tag: by which MLflow finds the runs, with the value in it.
        value: the run's id unless given.
    """
    found = [Command(label="Run it again", text=again)] if again and record.config else []
    if facts.dig_text(record.config, "tracking.backend") == "mlflow":
        store = facts.dig_text(record.config, "tracking.uri")
        number = facts.dig_text(record.effective, "mlflow_experiment_id")
        is_address = (store or "").startswith(("http://", "https://"))
        base = store if is_address and store else LOCAL
        search = runs_search(tag, value or record.run_id)
        page = experiment_page(base, number, search, is_chart=tag == SWEEPS)
        command = "tightfit ui" + (f" --store {shlex.quote(store)}" if store else "")
        text = page if is_address else f"{command}    # then {page}"
        if number is not None:
            found.append(Command(label="In MLflow", text=text, is_address=is_address))
    return tuple(found)


def run_again(record: RunRecord) -> str:
    """Return the command that makes the same run again."""
    config_dir = facts.dig_text(record.effective, "config_dir")
    folder = ["--config-dir", config_dir] if config_dir else []
    return " ".join(["tightfit", "run", *map(_quoted, [*folder, *record.overrides])])


def _quoted(word: str) -> str:
    """Return a word as a shell takes it, with ' inside where that is possible."""
    return f'"{word}"' if "'" in word and not {*word} & {*'"$`!\\'} else shlex.quote(word)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text cells in rows; `numeric` columns are aligned right, `wide` ones hold sentences."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    caption: str = ""
    numeric: frozenset[int] = frozenset()
    wide: frozenset[int] = frozenset()
    links: dict[int, str] = field(default_factory=dict)
    """Row number -> address that the row's first cell leads to."""
    kinds: dict[int, Kind] = field(default_factory=dict)
    """Row number -> how the row is marked."""
    tips: dict[int, str] = field(default_factory=dict)
    """Row number -> definition of what its first cell names, shown on request."""
    is_folded: bool = False
    """Whether the table opens only on request; in print it is open."""
    is_printed: bool = True
    """Whether the table is in print."""

    @property
    def is_list(self) -> bool:
        """Whether rows are a name and a value, which stand in as many columns as there is room."""
        return len(self.columns) == 2 and not self.wide and not self.links

    @property
    def is_broad(self) -> bool:
        """Whether half of a printed page is too narrow for the table."""
        return len(self.columns) > 5


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with text, figures by name, and tables below them."""

    title: str
    text: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    is_printed: bool = True
    """Whether the section is in print."""

    @property
    def anchor(self) -> str:
        """Name by which the list of contents leads here: the title before any colon."""
        return re.sub(r"[^a-z0-9]+", "-", self.short.lower()).strip("-")

    @property
    def short(self) -> str:
        """Title as in the list of contents."""
        return self.title.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Answer of a run: its main figures or why there are none, how it ended, what to change."""

    kind: Kind
    answer: str
    label: str = ""
    lines: tuple[str, ...] = ()
    rest: str = ""
    """Further lines of the error, whose columns stay where they are."""
    advice: tuple[str, ...] = ()
    traceback: str | None = None


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report."""

    title: str
    subtitle: str = ""
    details: str = ""
    banners: tuple[str, ...] = ()
    verdict: Verdict | None = None
    cards: tuple[Card, ...] = ()
    links: tuple[Link, ...] = ()
    commands: tuple[Command, ...] = ()
    sections: tuple[Section, ...] = ()
    alt: dict[str, str] = field(default_factory=dict)
    """Figure name -> text for who cannot see it."""
    is_filtered: bool = False
    """Whether a field above the tables hides rows, and headings sort them."""


def metric_table(record: RunRecord, areas: list[str]) -> Table | None:
    """Return the metrics of some areas, None without any."""
    names = [name for name in record.metrics if name.split("/")[0] in areas]
    return named_table(record, names) if names else None


def value_tables(
    record: RunRecord, names: list[str], *, folds_zero: bool = False
) -> tuple[Table, ...]:
    """Return the named metrics that have a value, and the others as a table that is folded.

    Args:
        record: of the run.
        names: at least one.
        folds_zero: whether a value of 0 is folded as well.
    """
    absent = (None, 0) if folds_zero else (None,)
    found = [name for name in names if record.metrics[name] not in absent]
    rest = [name for name in names if record.metrics[name] in absent]
    tables = [named_table(record, found)] if found else []
    if rest:
        caption = "Counts of 0, and what was not measured" if folds_zero else "Not measured here"
        tables.append(replace(named_table(record, rest), caption=caption, is_folded=True))
    return tuple(tables)


def statistics_table(
    record: RunRecord, area: str, counts: Mapping[str, int] | None = None
) -> Table | None:
    """Return a row of statistics for each quantity that has some, None where none has.

    Args:
        record: of the run.
        area: latency or serve.
        counts: samples of each metric, a column of their own; None: without it.
    """
    values = record.metrics
    found = [
        metric
        for metric in of_samples(area)
        if (counts or {}).get(metric.name)
        or any(values.get(f"{metric.name}/{name}") is not None for name in STATISTICS)
    ]
    if not found:
        return None
    has_interval = any(interval(values, metric.name) for metric in found)
    rows = []
    for metric in found:
        name = metric.name
        mean, *others = (
            metric_number(name, values.get(f"{name}/{statistic}")) for statistic in STATISTICS
        )
        cells = [metric.heading, mean]
        cells += [interval(values, name) or ABSENT] if has_interval else []
        cells += others
        cells += [str(counts.get(name) or ABSENT)] if counts is not None else []
        rows.append(tuple(cells))
    titles = ["", STATISTICS[0], *(["95 % interval"] if has_interval else []), *STATISTICS[1:]]
    titles += ["samples"] if counts is not None else []
    return Table(
        columns=tuple(titles),
        rows=rows,
        numeric=frozenset(range(1, len(titles))),
        tips={place: metric.definition for place, metric in enumerate(found)},
    )


def named_table(record: RunRecord, names: list[str]) -> Table:
    """Return the named metrics, their definitions as tips."""
    kept = [name for name in names if not _is_of_another(name, names)]
    return Table(
        columns=("metric", "value"),
        rows=[(name, _with_interval(record, name)) for name in kept],
        numeric=frozenset({1}),
        tips={place: meaning(name) for place, name in enumerate(kept)},
    )


def definitions(metrics: Sequence[Metric]) -> Section:
    """Return what some metrics mean, with the conventions of all."""
    rows = [(metric.name, metric.label, metric.definition) for metric in metrics]
    table = Table(
        columns=("metric", "label", "definition"),
        rows=rows,
        caption="Figures of this page",
        wide=frozenset({2}),
        is_folded=True,
        is_printed=False,
    )
    return Section(title="Definitions", text=CONVENTIONS, tables=(table,) if rows else ())


def metrics_csv(record: RunRecord) -> str:
    """Return every metric with its definition as CSV; absent values are empty."""
    rows = [(name, value, meaning(name)) for name, value in record.metrics.items()]
    return csv_text([("metric", "value", "definition"), *rows])


def csv_text(rows: Sequence[Sequence[object]]) -> str:
    """Return rows as CSV, None as an empty cell.

    Text that a spreadsheet would take for a formula gets a leading apostrophe.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for row in rows:
        writer.writerow([f"'{cell}" if _is_formula(cell) else cell for cell in row])
    return buffer.getvalue()


def _is_formula(cell: object) -> bool:
    return isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))


def banners(records: Sequence[RunRecord], mixed: str = "") -> tuple[str, ...]:
    """Return the notices that stand above everything else.

    Args:
        records: of the page.
        mixed: what to say where they are of different GPUs; CARDS stands for their names.
    """
    note = facts.figure_note(*records)
    cards = sorted({card for card in map(facts.gpu_name, records) if card})
    lines = (note, mixed.replace("CARDS", ", ".join(cards)) if len(cards) > 1 else "")
    return tuple(line for line in lines if line)


def meaning(name: str) -> str:
    """Return the definition of a metric, of a statistic with what that is."""
    text = definition(name) or "no definition is recorded for this name"
    statistic = STATISTIC_DEFINITIONS.get(name.removeprefix(base_name(name)).lstrip("/"))
    return f"{statistic} of: {text}" if statistic else text


def _is_of_another(name: str, names: Collection[str]) -> bool:
    """Return whether an end of an interval is shown beside its mean."""
    mean, _, last = name.rpartition("/")
    return last in {"ci95_low", "ci95_high"} and mean in names


def _with_interval(record: RunRecord, name: str) -> str:
    text, ends = metric_text(name, record.metrics[name]), interval(record.metrics, name)
    return f"{text} ({ends})" if ends else text


def tree_table(tree: Mapping[str, object], caption: str = "", *, is_printed: bool = True) -> Table:
    """Return nested settings as rows of dotted key and value, folded; bytes in GiB or MiB."""
    rows = [(key, _value(key, value)) for key, value in flatten(_numbered(tree))]
    return Table(
        columns=("key", "value"),
        rows=rows,
        caption=caption,
        is_folded=True,
        is_printed=is_printed,
    )


def _numbered(value: object) -> Any:
    """Return a tree with lists of settings as settings by number, so that each has a row."""
    if isinstance(value, Mapping):
        return {key: _numbered(item) for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {str(index): _numbered(item) for index, item in enumerate(value)}
    return value


def _value(key: str, value: object) -> str:
    if isinstance(value, float) and value != round(value, 4):
        value = float(f"{value:.5g}")
    is_bytes = "bytes" in key or key.startswith("placements.")
    if is_bytes and isinstance(value, int | float) and not isinstance(value, bool):
        return gib(value) + ("/s" if key.endswith("bytes_s") else "")
    return leaf(value)


def details(record: RunRecord, word: str) -> str:
    """Return the id of a record, when it was started and how long it took."""
    parts = [f"{word} {record.run_id}"]
    if record.started_at:
        parts.append(f"started {record.started_at}")
    if record.duration_s is not None:
        parts.append(f"took {duration(record.duration_s)}")
    return ", ".join(parts)
