"""Token times of requests -> TTFT, TPOT, ITL and end to end in milliseconds; empty is None."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from reports.record.record import SAMPLE_FLOORS, summarise

CLOCK_S: Final = 1e-8
"""Differences of two times below this are rounding: a float of seconds since the machine's start
resolves 2 ns after three months."""


def has_passed(passed_s: float, limit_s: float) -> bool:
    """Return whether a time that was measured has reached a limit, whatever the clock's rounding.

    Args:
        passed_s: a difference of two times.
        limit_s: as it was asked for.
    """
    return passed_s > limit_s - CLOCK_S


@dataclass(kw_only=True)
class RequestTimes:
    """When a request was sent and when each of its tokens was on the host, seconds of one clock."""

    request_id: str
    num_prompt_tokens: int
    submit_s: float
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    """Why the request failed; None if it did not."""
    is_cancelled: bool = False
    """The harness took it back, or never sent it."""

    @property
    def is_complete(self) -> bool:
        """Whether the request ended by itself and gave at least one token."""
        return (
            self.error is None
            and self.finish_reason in {"stop", "length"}
            and bool(self.token_times_s)
        )

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token; None without one."""
        return 1e3 * (self.token_times_s[0] - self.submit_s) if self.token_times_s else None

    @property
    def e2e_ms(self) -> float | None:
        """Time to the last token; None without one."""
        return 1e3 * (self.token_times_s[-1] - self.submit_s) if self.token_times_s else None

    @property
    def tpot_ms(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1); None below 2 output tokens."""
        times = self.token_times_s
        return 1e3 * (times[-1] - times[0]) / (len(times) - 1) if len(times) >= 2 else None

    @property
    def itl_ms(self) -> list[float]:
        """Every gap between consecutive tokens; the time to the first token is not one."""
        times = self.token_times_s
        return [1e3 * (after - before) for before, after in itertools.pairwise(times)]

    @property
    def tokens_hash(self) -> str | None:
        """Equal for equal tokens; None without one."""
        if not self.token_ids:
            return None
        text = ",".join(map(str, self.token_ids))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_row(self) -> dict[str, Any]:
        """Return the request as a row of the record's samples."""
        return {
            "request_id": self.request_id,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": len(self.token_ids),
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "e2e_ms": self.e2e_ms,
            "itl_ms": self.itl_ms,
            "tokens_hash": self.tokens_hash,
            "finish_reason": self.finish_reason,
            "error": self.error,
        }


def latency_pools(
    requests: Sequence[RequestTimes], area: str = "latency"
) -> dict[str, list[float]]:
    """Return the samples of `AREA/QUANTITY` over the requests that completed.

    ITL pools the gaps of all requests.
    """
    done = [request for request in requests if request.is_complete]
    return {
        f"{area}/ttft_ms": [value for r in done if (value := r.ttft_ms) is not None],
        f"{area}/tpot_ms": [value for r in done if (value := r.tpot_ms) is not None],
        f"{area}/itl_ms": [gap for r in done for gap in r.itl_ms],
        f"{area}/e2e_ms": [value for r in done if (value := r.e2e_ms) is not None],
    }


def pool_metrics(pools: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Return `AREA/QUANTITY/STATISTIC` of samples by `AREA/QUANTITY`.

    A statistic below its sample floor is None.
    """
    return {
        f"{base}/{statistic}": value
        for base, values in pools.items()
        for statistic, value in summarise(values).items()
    }


def floor_note(num_requests: int, part: str = "latency") -> str | None:
    """Return which percentiles of per-request latencies `num_requests` cannot support, or None."""
    lacking = [f"p{q} needs {floor}" for q, floor in SAMPLE_FLOORS.items() if num_requests < floor]
    if not lacking:
        return None
    return (
        f"{part}: {num_requests} requests completed and {', '.join(lacking)}; these percentiles "
        f"are null. Raise scenario.{part}.num_requests to get them."
    )
