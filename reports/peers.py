"""This project's engine against peers in one sweep: ratios of runs of the same work."""

from collections.abc import Sequence

from reports import facts
from reports.page import Kind, Section, Table
from reports.record.record import RunRecord
from reports.record.text import flatten, leaf
from reports.sweep import Row
from reports.versus import UnlikeError, check_alike, compared_metrics, ratio

NATIVE = "native"


def peers_section(rows: Sequence[Row]) -> Section | None:
    """Return ratios of a native point to each peer's point, None without peers.

    The native point is of the same work, and of these the one whose settings differ least.
    """
    done = [row for row in rows if row.record and row.record.status == "ok"]
    natives = [row for row in done if row.record and facts.system_name(row.record) == NATIVE]
    pairs = [
        (native, row)
        for row in done
        if row.record
        and facts.system_name(row.record) != NATIVE
        and (native := _nearest(natives, row)) is not None
    ]
    if not pairs:
        return None
    records = [row.record for pair in pairs for row in pair if row.record]
    metrics = [
        metric
        for metric in compared_metrics(records)
        if any(_ratio(native, peer, metric.name) is not None for native, peer in pairs)
    ]
    lines: list[tuple[str, ...]] = []
    kinds: dict[int, Kind] = {}
    for native, peer in pairs:
        values = [_ratio(native, peer, metric.name) for metric in metrics]
        cells = ["" if value is None else f"{value:.2f}" for value in values]
        systems = [facts.system_name(row.record) for row in (native, peer) if row.record]
        bad = [
            system
            for system, row in zip(systems, (native, peer), strict=True)
            if row.record and row.record.valid is False
        ]
        state = f"{' and '.join(bad)} not valid" if bad else "valid"
        kinds[len(lines)] = "warn" if bad else "plain"
        lines.append((f"{native.title} / {peer.title}", systems[1], state, *cells))
    table = Table(
        columns=("native / peer", "peer", "figures", *(metric.label for metric in metrics)),
        rows=lines,
        numeric=frozenset(range(3, len(metrics) + 3)),
        kinds=kinds,
    )
    text = (
        "Above 1 is more of the figure in this project's engine: better for a rate, worse for a"
        " time or a size."
    )
    return Section(title="Native against peers", text=(text,), tables=(table,))


def _ratio(native: Row, peer: Row, metric: str) -> float | None:
    if native.record is None or peer.record is None:
        return None
    return ratio(peer.record, native.record, metric)


def _nearest(natives: Sequence[Row], peer: Row) -> Row | None:
    """Return the native row of the same work with the fewest settings that differ."""
    alike = [row for row in natives if _is_alike(row, peer)]
    return min(alike, key=lambda row: _distance(row.record, peer.record), default=None)


def _is_alike(native: Row, peer: Row) -> bool:
    try:
        check_alike([native, peer])
    except UnlikeError:
        return False
    return True


def _distance(first: RunRecord | None, second: RunRecord | None) -> int:
    flat = [
        {key: leaf(value) for key, value in flatten(record.config)} if record else {}
        for record in (first, second)
    ]
    return sum(flat[0].get(key) != flat[1].get(key) for key in flat[0] | flat[1])
