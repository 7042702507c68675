"""Counters of a two-tier KV cache as the engine tells them, flat and as differences."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from engine.sealed import GIB
from harness.work.drive import Clock, Engine, ratio
from harness.work.times import has_passed

Counts = dict[str, float]
"""Numbers by the path of their keys, such as `moved.loaded_bytes`."""


def counts(stats: Mapping[str, Any]) -> Counts:
    """Return the numbers below `kv` of an engine's stats; none where it tells nothing of KV.

    Args:
        stats: of `LLM.stats()`.
    """
    found: Counts = {}

    def walk(tree: Mapping[str, Any], path: str) -> None:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                walk(value, f"{path}{key}.")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                found[f"{path}{key}"] = value

    walk(stats.get("kv") or {}, "")
    return found


def since(after: Counts, before: Counts) -> Counts:
    """Return by how much each counter rose; what was not there before began at 0."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


PERIOD_S: Final = 0.25
"""Seconds between rows."""
MOST_ROWS: Final = 2000
"""Beyond so many rows every second one is dropped and the period doubled."""
COLUMNS: Final = (
    "gpu.owned",
    "gpu.cached",
    "cpu.owned",
    "cpu.cached",
    "cpu.in_transit",
    "moved.stored_bytes",
    "moved.loaded_bytes",
    "in_place_bytes",
)
"""Columns of a row, behind its time."""
COUNTED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "kv/gpu_hit_tokens": ("prefix.hits_gpu_tokens",),
        "kv/cpu_hit_tokens": ("prefix.hits_cpu_tokens",),
        "kv/missed_tokens": ("prefix.missed_tokens",),
        "kv/gpu_evictions": ("evictions.gpu_kept", "evictions.gpu_lost"),
        "kv/gpu_evictions_lost": ("evictions.gpu_lost",),
        "kv/cpu_evictions": ("evictions.cpu",),
        "kv/swaps_out": ("swaps_out",),
        "kv/swaps_in": ("swaps_in",),
        "kv/recomputes": ("recomputes",),
        "kv/preemptions": ("preemptions",),
        "kv/stores_skipped": ("stores_skipped",),
    }
)
"""Metric -> the engine's counters that it is the sum of."""
MOVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kv/gpu_hit_gib": "prefix.hits_gpu_bytes",
        "kv/cpu_hit_gib": "prefix.hits_cpu_bytes",
        "kv/stored_gib": "moved.stored_bytes",
        "kv/loaded_gib": "moved.loaded_bytes",
        "kv/in_place_gib": "in_place_bytes",
        "kv/staged_prefill_gib": "staged_prefill_bytes",
    }
)
"""Metric -> the engine's counter of bytes."""
TO_DEVICE: Final = ("moved.loaded_bytes", "in_place_bytes", "staged_prefill_bytes")
"""Counters of bytes that cross the link from host to device."""


class KVWatch:
    """An engine that notes the use of its KV cache between steps, a few times a second.

    Everything but `step` is the engine's own.

    Args:
        llm: the engine.
        clock: seconds.
    """

    def __init__(self, llm: Engine, clock: Clock) -> None:
        self._llm, self._clock = llm, clock
        self._begin_s = self._next_s = clock()
        self._period_s = PERIOD_S
        self._before = counts(llm.stats())
        self._rows: list[tuple[float, ...]] = []
        self._look(self._begin_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def step(self) -> list[Any]:
        """Run one step of the engine."""
        events: list[Any] = self._llm.step()
        now_s = self._clock()
        if has_passed(now_s, self._next_s):
            self._look(now_s)
        return events

    def _look(self, now_s: float) -> None:
        self._next_s = now_s + self._period_s
        now = counts(self._llm.stats())
        if not now:
            return
        self._rows.append((now_s - self._begin_s, *(now.get(name, 0) for name in COLUMNS)))
        if len(self._rows) > MOST_ROWS:
            self._rows = self._rows[::2]
            self._period_s *= 2

    def note(self, part: str, result: dict[str, Any]) -> None:
        """Add metrics and rows to a job's result; those of the last part stay.

        Args:
            part: of the scenario.
            result: with `metrics` and `samples`.
        """
        metrics, samples = self.figures()
        result["metrics"] |= metrics
        if samples is not None:
            result["samples"]["kv"] = {"part": part} | samples

    def figures(self) -> tuple[dict[str, float | None], dict[str, Any] | None]:
        """Return the metrics since it was made, and the rows; none where nothing is told of KV."""
        end_s = self._clock()
        self._look(end_s)
        now = counts(self._llm.stats())
        if not now:
            return {}, None
        rose = since(now, self._before)
        metrics = kv_metrics(rose, end_s - self._begin_s)
        metrics |= self._use(now)
        return metrics, {
            "columns": ["time_s", *COLUMNS],
            "rows": [list(row) for row in self._rows],
            "gpu_blocks": now.get("gpu.blocks", 0),
            "cpu_blocks": now.get("cpu.blocks", 0),
            "block_bytes": now.get("block_bytes", 0),
        }

    def _use(self, now: Counts) -> dict[str, float | None]:
        """Return mean and highest share of each tier that held content over the rows."""
        found: dict[str, float | None] = {}
        for tier, names in (
            ("gpu", ("gpu.owned", "gpu.cached")),
            ("cpu", ("cpu.owned", "cpu.cached", "cpu.in_transit")),
        ):
            blocks = now.get(f"{tier}.blocks", 0)
            places = [1 + COLUMNS.index(name) for name in names]
            used = [sum(row[place] for place in places) for row in self._rows]
            found[f"kv/{tier}_used_share"] = sum(used) / len(used) / blocks if blocks else None
            found[f"kv/{tier}_used_peak_share"] = max(used) / blocks if blocks else None
        owned = [row[1] for row in self._rows]
        blocks = now.get("gpu.blocks", 0)
        found["kv/gpu_owned_share"] = sum(owned) / len(owned) / blocks if blocks else None
        return found


def kv_metrics(rose: Counts, wall_s: float) -> dict[str, float | None]:
    """Return what was counted in a part, as metrics.

    Args:
        rose: by how much each counter rose.
        wall_s: of the part.
    """

    def total(names: tuple[str, ...]) -> float:
        return sum(rose.get(name, 0) for name in names)

    metrics: dict[str, float | None] = {name: total(parts) for name, parts in COUNTED.items()}
    metrics |= {name: rose.get(part, 0) / GIB for name, part in MOVED.items()}
    asked = total(("prefix.hits_gpu_tokens", "prefix.hits_cpu_tokens", "prefix.missed_tokens"))
    hits = asked - rose.get("prefix.missed_tokens", 0)
    metrics["kv/hit_share"] = hits / asked if asked else None
    moved = total(("moved.stored_bytes", *TO_DEVICE))
    metrics["kv/transfer_gb_s"] = moved / wall_s / 1e9 if wall_s > 0 else None
    metrics["kv/h2d_gb_s"] = total(TO_DEVICE) / wall_s / 1e9 if wall_s > 0 else None
    return metrics


def kv_link_share(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the share of the link that KV took, where both are known.

    Args:
        metrics: with the rates of the probes.
    """
    if "kv/h2d_gb_s" not in metrics:
        return {}
    probed = (metrics.get("link/h2d_gb_s"), metrics.get("link/h2d_after_gb_s"))
    rates = [rate for rate in probed if rate]
    mean = sum(rates) / len(rates) if rates else 0.0
    return {"kv/link_share": ratio(metrics["kv/h2d_gb_s"] or 0.0, mean)}


TIERS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("kv_gpu_owned_gib", ("gpu.owned",)),
    ("kv_gpu_used_gib", ("gpu.owned", "gpu.cached")),
    ("kv_cpu_used_gib", ("cpu.owned", "cpu.cached", "cpu.in_transit")),
)
"""Name of a series -> columns of blocks that it is the sum of."""


def kv_series(samples: Mapping[str, Any] | None) -> Iterator[tuple[str, float, float]]:
    """Yield (name, seconds since the part began, GiB), at most one row a second.

    Args:
        samples: `samples.kv` of a record; None: there are none.
    """
    if not samples:
        return
    places = {name: place for place, name in enumerate(samples["columns"])}
    due_s = 0.0
    for row in samples["rows"]:
        time_s = row[places["time_s"]]
        if time_s < due_s:
            continue
        due_s = time_s + 1
        for name, columns in TIERS:
            blocks = sum(row[places[column]] for column in columns)
            yield name, time_s, blocks * samples["block_bytes"] / GIB
