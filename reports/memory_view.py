"""The memory section of a run's page: the plan by part beside the measured figures."""

from reports import facts
from reports.page import Section, Table
from reports.record.record import RunRecord
from reports.record.text import ABSENT, gib, label_of
from reports.tables import metric_table, tree_table


def memory_section(record: RunRecord) -> Section | None:
    """Return what was planned by part and what was measured, None without either."""
    tables = [_parts_table(record, side) for side in ("gpu", "host")]
    plan = record.plan or {}
    names = ("kv", "placements", "bytes_per_step")
    first: dict[str, object] = {name: plan[name] for name in names if name in plan}
    if first:
        tables.append(tree_table(first, caption="KV cache and placements"))
    tables.append(metric_table(record, ["memory"]))
    rest = {key: value for key, value in plan.items() if key not in {"gpu", "host", *first}}
    if rest:
        tables.append(tree_table(rest, caption="Other figures of the plan", is_folded=True))
    kept = tuple(table for table in tables if table is not None)
    if not kept:
        return None
    budget = facts.budget_title(record)
    title = f"Memory: {budget}" if budget else "Memory"
    return Section(title=title, figures=("memory",), tables=kept)


def _parts_table(record: RunRecord, side: str) -> Table | None:
    parts = facts.items(record.plan, side)
    if not parts:
        return None
    key = "budget_bytes" if side == "gpu" else "limit_bytes"
    limit = facts.dig_number(record.plan, f"{side}.{key}")
    total = facts.total_bytes(record.plan, side)
    rows = [(label_of(name), gib(size), _share(size, limit)) for name, size in parts.items()]
    rows.append(("total", gib(total), _share(total, limit)))
    if limit is not None:
        rows.append(("usable" if side == "gpu" else "limit", gib(limit), "100.0 %"))
    is_over = total is not None and limit is not None and total > limit
    word = "GPU" if side == "gpu" else "Host"
    return Table(
        caption=f"{word} plan by part",
        columns=("part", "planned", "of usable" if side == "gpu" else "of limit"),
        rows=rows,
        numeric=frozenset({1, 2}),
        kinds={len(parts): "bad"} if is_over else {},
    )


def _share(size: float | None, whole: float | None) -> str:
    return ABSENT if size is None or not whole else f"{100 * size / whole:.1f} %"
