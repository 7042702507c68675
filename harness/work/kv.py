"""A KV cache's counters while a part runs, and what its requests found in a prefix cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from engine.sealed import GIB
from harness.work.drive import Clock, Engine, Outcome
from harness.work.times import RequestTimes
from harness.work.watch import Watch
from reports.record.text import flatten

Counts = dict[str, float]
"""Numbers by the path of their keys, such as `moved.loaded_bytes`."""


def counts(stats: Mapping[str, Any]) -> Counts:
    """Return the numbers below `kv` of an engine's stats; none where it tells nothing of KV."""
    return {
        path: value
        for path, value in flatten(stats.get("kv") or {})
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def since(after: Counts, before: Counts) -> Counts:
    """Return by how much each counter rose; what was not there before began at 0."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


COLUMNS: Final = (
    "gpu.owned",
    "gpu.cached",
    "cpu.owned",
    "cpu.cached",
    "cpu.in_transit",
    "moved.stored_bytes",
    "moved.loaded_bytes",
    "in_place_bytes",
    "copied_ahead_bytes",
)
"""Columns of a row, behind its time."""
HELD: Final[Mapping[str, tuple[str, ...]]] = {
    "gpu": ("gpu.owned", "gpu.cached"),
    "cpu": ("cpu.owned", "cpu.cached", "cpu.in_transit"),
}
"""Tier -> columns of the blocks that hold content in it."""
COUNTED: Final[Mapping[str, tuple[str, ...]]] = {
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
"""Metric -> the engine's counters that it is the sum of."""
MOVED: Final[Mapping[str, str]] = {
    "kv/gpu_hit_gib": "prefix.hits_gpu_bytes",
    "kv/cpu_hit_gib": "prefix.hits_cpu_bytes",
    "kv/stored_gib": "moved.stored_bytes",
    "kv/loaded_gib": "moved.loaded_bytes",
    "kv/in_place_gib": "in_place_bytes",
    "kv/copied_ahead_gib": "copied_ahead_bytes",
    "kv/staged_prefill_gib": "staged_prefill_bytes",
}
"""Metric -> the engine's counter of bytes."""
TO_DEVICE: Final = (
    "moved.loaded_bytes",
    "in_place_bytes",
    "copied_ahead_bytes",
    "staged_prefill_bytes",
)
"""Counters of bytes that cross the link from host to device."""


class KVWatch(Watch):
    """An engine that notes the use of its KV cache between steps."""

    def __init__(self, llm: Engine, clock: Clock) -> None:
        super().__init__(llm, clock)
        self._before = counts(llm.stats())
        self._look(self._begin_s)
        self._next_s = self._begin_s  # the first step is noted, however short the part is

    def _row(self) -> list[float] | None:
        now = counts(self._llm.stats())
        return [now.get(name, 0) for name in COLUMNS] if now else None

    def note(self, part: str, result: dict[str, Any]) -> None:
        """Add metrics and rows to a job's result; those of the last part stay."""
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
            "rows": self._rows,
            "gpu_blocks": now.get("gpu.blocks", 0),
            "cpu_blocks": now.get("cpu.blocks", 0),
            "block_bytes": now.get("block_bytes", 0),
        }

    def _use(self, now: Counts) -> dict[str, float | None]:
        """Return mean and highest share of each tier that held content after a step.

        The first and the last row are of before and after the requests.
        """
        found: dict[str, float | None] = {}
        rows = self._rows[1:-1]
        for tier, names in HELD.items():
            blocks = now.get(f"{tier}.blocks", 0) if rows else 0
            places = [1 + COLUMNS.index(name) for name in names]
            used = [sum(row[place] for place in places) for row in rows]
            found[f"kv/{tier}_used_share"] = sum(used) / len(used) / blocks if blocks else None
            found[f"kv/{tier}_used_peak_share"] = max(used) / blocks if blocks else None
        owned = [row[1] for row in rows]
        blocks = now.get("gpu.blocks", 0) if rows else 0
        found["kv/gpu_owned_share"] = sum(owned) / len(owned) / blocks if blocks else None
        return found


def kv_metrics(rose: Counts, wall_s: float) -> dict[str, float | None]:
    """Return what was counted in a part, as metrics."""

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


SERIES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("kv_gpu_owned_gib", ("gpu.owned",)),
    ("kv_gpu_used_gib", HELD["gpu"]),
    ("kv_cpu_used_gib", HELD["cpu"]),
)
"""Name of a series -> columns of blocks that it is the sum of."""


def kv_series(samples: Mapping[str, Any] | None) -> Iterator[tuple[str, float, float]]:
    """Yield (name, seconds since the part began, GiB), at most one row a second.

    `samples` is `samples.kv` of a record.
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
        for name, columns in SERIES:
            blocks = sum(row[places[column]] for column in columns)
            yield name, time_s, blocks * samples["block_bytes"] / GIB


LEAST_EXCESS_SHARE: Final = 0.01
"""Share of the prompt tokens up to which more hits than prompts share are taken for another way of
counting: of blocks, of a template, of a text that a server encodes itself."""

Sent = tuple[Sequence[int], Sequence[int]]
"""Prompt and output tokens of a request."""


def hit_tokens(stats: Mapping[str, Any]) -> float | None:
    """Return the prompt tokens found in a prefix cache since the start; None where it is not told.

    An engine tells it of its KV cache, a peer as `prefix_hit_tokens`.
    """
    known = counts(stats)
    names = [name for name in known if name in {"prefix.hits_gpu_tokens", "prefix.hits_cpu_tokens"}]
    if names:
        return sum(known[name] for name in names)
    told: float | None = stats.get("prefix_hit_tokens")
    return told


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """What one part, repeat or trial found in a prefix cache."""

    prompt_tokens: int
    """Prompt tokens of all requests that were sent."""
    hit_tokens: float | None
    """Number of these that were found; None: the engine does not tell."""
    shared_tokens: int
    """Number of these that another request of the part has before the same tokens."""

    @property
    def share(self) -> float | None:
        """Found / prompt tokens; None where either is not known."""
        if self.hit_tokens is None or not self.prompt_tokens:
            return None
        return self.hit_tokens / self.prompt_tokens

    @property
    def is_foreign(self) -> bool:
        """Whether more was found than requests of this part can have left."""
        excess = (self.hit_tokens or 0.0) - self.shared_tokens
        return excess > LEAST_EXCESS_SHARE * self.prompt_tokens


def reuse_since(
    before: float | None,
    stats: Mapping[str, Any],
    requests: Sequence[RequestTimes],
    sent: Callable[[], list[Sent]],
) -> Reuse:
    """Return what requests found.

    `before` is hit_tokens before them; `sent` returns their tokens, and is called only where
    something was found.
    """
    after = hit_tokens(stats)
    hits = None if after is None else after - (before or 0.0)
    return Reuse(
        prompt_tokens=sum(request.num_prompt_tokens for request in requests),
        hit_tokens=hits,
        shared_tokens=_shared_tokens(sent()) if hits else 0,
    )


def with_outputs(prompts: Sequence[Sequence[int]], requests: Sequence[RequestTimes]) -> list[Sent]:
    """Return the tokens of requests of these prompts, as far as they were sent."""
    pairs = zip(prompts, requests, strict=False)
    return [(prompt, request.token_ids) for prompt, request in pairs]


def _shared_tokens(sent: Sequence[Sent]) -> int:
    """Return how many tokens of prompts another request leaves, in whatever order they run.

    In sorted order each neighbour has the longest common beginning, and the sum over neighbours
    counts a beginning once less than requests have it. A later turn begins with outputs too.
    """
    ordered = sorted(((*prompt, *output), len(prompt)) for prompt, output in sent)
    return sum(
        min(num_common(first, second), max(num_first, num_second))
        for (first, num_first), (second, num_second) in pairwise(ordered)
    )


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    pairs = zip(first, second, strict=False)
    least = min(len(first), len(second))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), least)


def note_reuse(outcome: Outcome, part: str, found: Reuse) -> None:
    """Add the share to an outcome, and a reason where prompts were not computed as was meant."""
    outcome.metrics[f"{part}/hit_share"] = found.share if outcome.num_measured else None
    if not found.hit_tokens:
        return
    what = (
        f"{part}: {found.hit_tokens:,.0f} of {found.prompt_tokens:,} prompt tokens were found in a "
        "prefix cache"
    )
    if found.is_foreign:
        outcome.reasons.append(
            f"{what}, where requests of this part share {found.shared_tokens:,}: earlier requests "
            "had left them there, and the figures are not of computing these prompts. Restart the "
            "server, turn its prefix cache off, or send other prompts (a seed, a prompts_file)."
        )
    elif part != "serve":
        outcome.notes.append(f"{what}, because the prompts begin alike: they were computed once.")
