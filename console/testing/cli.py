"""`tightfit models test`: runs a test of a model, shows how far it is and what it measured."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from catalogue.terminal import EXIT_NOT_ALL_OK, EXIT_OK, CommandParser, say
from console.registry.checks import FieldError
from console.registry.database import Database
from console.registry.models import Models, default_of
from console.registry.results import Results
from console.registry.tables import TestRun
from console.testing.export import as_csv, as_json, document_of
from console.testing.tests import AA_PAIRS, NUM_REQUESTS, PAIRS, Ask, Tests
from reports.record.metrics import found as found_metrics
from reports.record.metrics import metric_text
from reports.record.text import number


def main(arguments: Sequence[str]) -> int:
    """Run a test; return the exit code.

    Raises:
        ConfigError: There is no such model or profile, or it cannot be tested so.
    """
    options = _parser().parse_args(list(arguments))
    database = Database.open()
    try:
        return _run(options, database)
    finally:
        database.close()


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tightfit models test",
        description="Measure a model with a profile, or two profiles in turns.",
    )
    parser.add_argument("model", metavar="NAME", help="a model of the registry")
    parser.add_argument("--profile", metavar="P", help="its default one if none is named")
    parser.add_argument("--against", metavar="P2", help="compare it with this one, in turns")
    parser.add_argument("--sweep", action="store_true", help="every profile, one after another")
    parser.add_argument(
        "--requests", type=int, default=NUM_REQUESTS, metavar="N", help="(default %(default)s)"
    )
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, metavar="N", help="runs of each side (default 4)"
    )
    parser.add_argument(
        "--aa-pairs",
        type=int,
        default=AA_PAIRS,
        metavar="N",
        help="runs of side a against itself, which say what noise is (default 3)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="the model's last test, where it ended early"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one document at the end")
    output.add_argument("--csv", action="store_true", help="print the figures as CSV at the end")
    return parser


def _run(options: argparse.Namespace, database: Database) -> int:
    tests = Tests(database)
    tests.recover()
    test = (
        tests.resume(_last(options.model, database))
        if options.resume
        else tests.queue(options.model, _ask(options, database))
    )
    for note in test.settings["notes"]:
        say(f"note: {note}")
    test = tests.run(test.id, _Progress())
    if options.json:
        sys.stdout.write(as_json(database, test.id))
    elif options.csv:
        sys.stdout.write(as_csv(database, test.id))
    else:
        lines = _lines(test, document_of(database, test.id))
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return EXIT_OK if test.status == "finished" else EXIT_NOT_ALL_OK


def _ask(options: argparse.Namespace, database: Database) -> Ask:
    own = [] if options.profile is None else [options.profile]
    kind, profiles = "test", own
    if options.sweep:
        kind = "sweep"
    elif options.against is not None:
        kind, profiles = "ab", [*(own or [_default(options.model, database)]), options.against]
    return Ask(
        kind=kind,
        profiles=profiles,
        num_requests=options.requests,
        pairs=options.pairs,
        aa_pairs=options.aa_pairs,
    )


def _last(model: str, database: Database) -> int:
    """Return the last test of a model."""
    runs = Results(database).runs(Models(database).get(model).id, limit=1)
    if not runs:
        raise FieldError("resume", f"resume: expected a test of {model} before this one, got none.")
    return runs[0].id


def _default(model: str, database: Database) -> str:
    return default_of(Models(database).get(model)).name


class _Progress:
    """A line on stderr for each new phase."""

    def __init__(self) -> None:
        self._phase = ""

    def __call__(self, progress: Mapping[str, Any]) -> None:
        phase = str(progress["phase"])
        if phase != self._phase:
            self._phase = phase
            of = f" ({progress['done']}/{progress['total']} runs)"
            say(f"[{phase}]{of if progress['unit'] == 'runs' else ''}")


def _lines(test: TestRun, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"test {test.id} of {found['model']}: {test.status}"
    if test.reason:
        yield f"  {test.reason}"
    if (comparison := found["comparison"]) is not None:
        yield f"  {comparison['verdict']}"
        yield f"  a = {comparison['profile_a']}, b = {comparison['profile_b']}"
        yield from _table(comparison["rows"])
        if comparison["tokens_total"]:
            told = f"{comparison['tokens_equal']} of {comparison['tokens_total']}"
            yield f"  {told} requests gave equal tokens"
    elif isinstance(test.metrics, dict):
        sides = test.metrics.items() if test.kind == "sweep" else [("", test.metrics)]
        for name, metrics in sides:
            yield from _figures(name, metrics)
    if test.folder:
        yield f"  folder  {test.folder}"


def _table(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        ratio = "no ratio" if row["ratio"] is None else f"b / a {row['ratio']:.3f}"
        span = "" if row["low"] is None else f" ({row['low']:.3f} to {row['high']:.3f})"
        a, b = (number(row[side]) for side in "ab")
        of = f" {row['unit']}" if row["unit"] else ""
        yield f"  {row['label']}: {a} against {b}{of}, {ratio}{span}"


def _figures(name: str, metrics: Mapping[str, float]) -> Iterator[str]:
    words = [
        f"{metric.label} {metric_text(metric.name, metrics[metric.name])}"
        for metric in found_metrics("sweep", [metrics])
        if metric.name in metrics
    ]
    if words:
        yield f"  {name + ': ' if name else ''}{', '.join(words)}"
