"""Tables of `study=overhead`: what the harness itself takes."""

from collections.abc import Iterator, Mapping
from typing import Any

from harness.studies.table import Found, Judged, grid, lacks
from reports.record.text import number


def judge(found: Found, *, card: str | None, is_default: bool) -> Judged:
    """Return both tables.

    Args:
        found: points with scenario.overhead, and points of a known rate.
        card: as in other studies.
        is_default: likewise.
    """
    del card, is_default
    tables: list[str] = []
    for result in found.values():
        figures = result.sample("overhead")
        if figures:
            words = f"{figures['num_requests']} requests of {figures['output_tokens']} tokens to "
            words += f"an engine that takes no time; microseconds, mean of {figures['repeats']}, "
            words += "with half of its 95 % interval; own is what exceeds a bare loop of the same"
            head = ("", "per request", "per token", "own, request", "own, token")
            tables += ["", f"{result.title}: {words}:", "", *grid(head, _rows(figures))]
        elif result.record is not None and result.record.status == "ok":
            metrics = result.record.metrics
            names = ["latency/ttft_ms/mean", "latency/tpot_ms/mean", "latency/itl_ms/max"]
            names += ["serve/schedule_lag_ms/mean", "serve/sent_requests_s"]
            rows = [
                (name, "n/a" if metrics.get(name) is None else number(metrics[name]))
                for name in names
            ]
            tables += ["", f"{result.title}:", "", *grid(("metric", "measured"), rows)]
    return Judged(tables=tables, lacks=lacks(found))


def _rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, part in figures["parts"].items():
        own = figures["own"].get(name)
        cells = [part["request_us"], part["token_us"]]
        cells += [own["request_us"], own["token_us"]] if own else [None, None]
        shown = [f"{number(c['mean'])} +- {number(c['half'])}" if c else "" for c in cells]
        yield name if own else f"bare, {name}", *shown
