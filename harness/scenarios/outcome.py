"""What a scenario hands back: metrics, samples, and what speaks against them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.measure.latency import RequestTimes


@dataclass(kw_only=True)
class Outcome:
    """Figures of one part of the scenario."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    samples: Any = None
    pools: dict[str, list[float]] = field(default_factory=dict)
    """`area/quantity` -> the samples that its statistics in `metrics` are of."""
    repeats: list[dict[str, float | None]] = field(default_factory=list)
    """Metrics of each repeat, where there were several."""
    num_measured: int = 0
    """Requests that the figures are of; without any, nothing was measured."""
    reasons: list[str] = field(default_factory=list)
    """Why the figures may not be used, and what to change."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know; the figures stand."""
    is_cut: bool = False
    """Its time was over before all requests had ended."""

    num_unlisted_tokens: int = 0
    """Output tokens of requests that are not in the samples: of the other rates of a search."""

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests that ran."""
        rows = self.samples if isinstance(self.samples, list) else self.samples["requests"]
        return self.num_unlisted_tokens + sum(int(row["num_output_tokens"]) for row in rows)


def failure_reasons(part: str, requests: Sequence[RequestTimes]) -> list[str]:
    """Return one reason when requests of `part` failed, naming how many and the first error."""
    failed = [r for r in requests if not r.is_complete and not r.is_cancelled]
    if not failed:
        return []
    first = failed[0]
    why = first.error or f"it ended with {first.finish_reason} after {len(first.token_ids)} tokens"
    return [
        f"{part}: {len(failed)} of {len(requests)} requests failed; {first.request_id}: {why}"
        f"{'' if why.endswith('.') else '.'}"
    ]


def short_reasons(part: str, requests: Sequence[RequestTimes], output_tokens: int) -> list[str]:
    """Return one reason when requests of `part` completed with fewer tokens than were asked for."""
    short = [r for r in requests if r.is_complete and len(r.token_ids) < output_tokens]
    if not short:
        return []
    first = short[0]
    return [
        f"{part}: {len(short)} of {len(requests)} requests ended before their length; "
        f"{first.request_id} after {len(first.token_ids)} of {output_tokens} tokens. Another "
        "system's figures would be of other work: lower the lengths, or have end tokens ignored."
    ]


def cut_reasons(
    part: str, requests: Sequence[RequestTimes], planned: int, limit_s: float | None
) -> list[str]:
    """Return one reason when the time of `part` was over before all planned requests had ended.

    Args:
        part: of the scenario, or its warm-up.
        requests: those that were sent.
        planned: how many were to be sent.
        limit_s: max_duration_s.
    """
    ended = sum(not request.is_cancelled for request in requests)
    if ended == planned or limit_s is None:
        return []
    node, _, rest = part.partition(" ")
    effect = "it was shorter than asked" if rest else "the figures are of what was done until then"
    setting = "warmup_requests" if rest else "num_requests"
    outputs = "output" if node == "serve" else "output_tokens"
    return [
        f"{part}: scenario.{node}.max_duration_s={limit_s:g} had passed when {ended} of {planned} "
        f"requests had ended; {effect}. Raise it, or lower {setting} or {outputs} of "
        f"scenario.{node}."
    ]


def ratio(amount: float, seconds: float) -> float | None:
    """Return amount / seconds, None where either is zero: nothing was measured."""
    return amount / seconds if amount > 0 and seconds > 0 else None
