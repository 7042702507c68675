"""Requests -> rates, latencies from the scheduled arrival, goodput, and their accounts."""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from reports.record.record import SAMPLE_FLOORS, summarise

CLOCK_S: Final = 1e-8
"""Differences of two times below this are rounding: a float of seconds since the machine's start
resolves 2 ns after three months."""


def has_passed(passed_s: float, limit_s: float) -> bool:
    """Return whether a measured time has reached a limit, whatever the clock's rounding."""
    return passed_s > limit_s - CLOCK_S


def mean_rate(times_s: Sequence[float]) -> float | None:
    """Return (n - 1) / (last - first) of times in any order; None below two or for no span."""
    span_s = max(times_s) - min(times_s) if len(times_s) > 1 else 0.0
    return (len(times_s) - 1) / span_s if span_s > 0 else None


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
        """Every gap between moments at which tokens arrived; the time to the first is not one.

        Tokens that arrive at one moment, as several in one part of a server's stream, have no gap.
        """
        pairs = itertools.pairwise(self.token_times_s)
        return [1e3 * (after - before) for before, after in pairs if after > before]

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


def floor_note(num_completed: int, num_asked: int, part: str = "latency") -> str | None:
    """Return which percentiles are null because requests did not complete, or None.

    Percentiles that the number of requests asked for cannot support are left out.
    """
    floors = SAMPLE_FLOORS.items()
    lacking = [f"p{q} needs {floor}" for q, floor in floors if num_completed < floor <= num_asked]
    if not lacking:
        return None
    return (
        f"{part}: {num_completed} of {num_asked} requests completed and {', '.join(lacking)}; "
        "these percentiles are null."
    )


CLOCK_MS: Final = 1e3 * CLOCK_S


@dataclass(kw_only=True)
class ServedRequest(RequestTimes):
    """One planned request and what came of it.

    `submit_s` is its scheduled arrival, NaN for a later turn that never arrived, so that all
    latencies hold what it waited at the client and in the queue.
    """

    output_tokens: int
    """Tokens that were planned."""
    is_ramp_up: bool = False
    """It arrived while the rate still rose, and is not counted."""
    is_later_turn: bool = False
    """It follows another one, so its arrival was not planned."""
    sent_s: float | None = None
    """When it was handed to the engine."""

    @property
    def lag_ms(self) -> float | None:
        """How long after its scheduled arrival it was sent; None if it was not."""
        if self.sent_s is None:
            return None
        # NaN stays NaN; what was sent CLOCK_S early was sent in time.
        return max(1e3 * (self.sent_s - self.submit_s), 0.0)

    @property
    def sent_ttft_ms(self) -> float | None:
        """Time from sending it to its first token; None without one."""
        if self.sent_s is None or not self.token_times_s:
            return None
        return 1e3 * (self.token_times_s[0] - self.sent_s)

    @property
    def is_short(self) -> bool:
        """Whether it completed with fewer tokens than were planned."""
        return self.is_complete and len(self.token_ids) < self.output_tokens

    def meets(self, bounds: Mapping[str, float]) -> bool:
        """Return whether it completed within all bounds; one without a TPOT keeps that bound."""
        found = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}
        values = [(found[name], bound) for name, bound in bounds.items()]
        return self.is_complete and all(
            value is None or value <= bound + CLOCK_MS for value, bound in values
        )

    def is_bad_by(self, now_s: float, bounds: Mapping[str, float]) -> bool:
        """Return whether it can no longer become a good request."""
        if self.is_complete:
            return not self.meets(bounds)
        if self.error is not None and not self.is_cancelled:
            return True
        passed_ms = 1e3 * (now_s - self.submit_s)  # NaN, and so never late, before it arrives
        passed_ms -= CLOCK_MS
        is_late = not self.token_times_s and passed_ms > bounds.get("ttft_ms", math.inf)
        return is_late or passed_ms > bounds.get("e2e_ms", math.inf)

    def to_row(self) -> dict[str, Any]:
        """Return the request as a row of the record's samples, without its gaps."""
        row = {key: value for key, value in super().to_row().items() if key != "itl_ms"}
        return row | {
            "scheduled_s": self.submit_s,
            "lag_ms": self.lag_ms,
            "sent_ttft_ms": self.sent_ttft_ms,
            "planned_output_tokens": self.output_tokens,
            "is_ramp_up": self.is_ramp_up,
            "is_later_turn": self.is_later_turn,
            "is_cancelled": self.is_cancelled,
        }


def count_requests(num_planned: int, served: Sequence[ServedRequest]) -> dict[str, int]:
    """Return how many requests were planned, and what became of them: each is in one place."""
    return {
        "planned": num_planned,
        "completed": sum(request.is_complete for request in served),
        "failed": sum(request.error is not None and not request.is_cancelled for request in served),
        "cancelled": sum(request.is_cancelled for request in served),
    }


@dataclass(frozen=True, kw_only=True)
class ArrivalWindow:
    """The time from the first counted arrival to the last one, seconds of the clock."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it is; 0 where all arrived at once."""
        return self.end_s - self.begin_s


def arrival_window(served: Sequence[ServedRequest]) -> ArrivalWindow | None:
    """Return the window of the counted requests; None without any that arrived."""
    arrived = [r.submit_s for r in served if not r.is_ramp_up and math.isfinite(r.submit_s)]
    return ArrivalWindow(begin_s=min(arrived), end_s=max(arrived)) if arrived else None


def serving_metrics(
    served: Sequence[ServedRequest], bounds: Mapping[str, float]
) -> dict[str, float | None]:
    """Return the `serve/...` metrics of the counted requests.

    The wall runs from the first counted arrival to the last token. In the window, which ends with
    the last arrival, tokens are counted by their own times, whichever request they belong to.
    `bounds` are those of a good request, milliseconds by quantity; none: no goodput.
    """
    counted = [request for request in served if not request.is_ramp_up]
    done = [request for request in counted if request.is_complete]
    window = arrival_window(served)
    wall_s = _wall_s(done, window)
    num_output = sum(len(request.token_ids) for request in done)
    num_prompt = sum(request.num_prompt_tokens for request in done)
    good = sum(request.meets(bounds) for request in counted)
    has_bounds = bool(bounds and counted)
    planned = (request.sent_s for request in counted if not request.is_later_turn)
    sent = [time_s for time_s in planned if time_s is not None]
    return {
        "serve/sent_requests_s": mean_rate(sent),
        "serve/requests_s": _rate(len(done), wall_s),
        "serve/output_tok_s": _rate(num_output, wall_s),
        "serve/total_tok_s": _rate(num_prompt + num_output, wall_s),
        "serve/wall_s": wall_s,
        "serve/window_s": window.length_s if window is not None else None,
        "serve/window_output_tok_s": _window_rate(served, window),
        "serve/good_requests_s": _rate(good, wall_s) if has_bounds else None,
        "serve/good_share": good / len(counted) if has_bounds else None,
        **pool_metrics(serving_pools(served)),
    }


def serving_pools(served: Sequence[ServedRequest]) -> dict[str, list[float]]:
    """Return the samples of the quantities of the counted requests, by `serve/QUANTITY`."""
    counted = [request for request in served if not request.is_ramp_up]
    lags = [lag for request in counted if (lag := request.lag_ms) is not None]
    done = [request for request in counted if request.is_complete]
    later = [request for request in done if request.is_later_turn]
    return {
        "serve/schedule_lag_ms": lags,
        "serve/sent_ttft_ms": [ms for r in done if (ms := r.sent_ttft_ms) is not None],
        "serve/turn_ttft_ms": [ms for r in later if (ms := r.sent_ttft_ms) is not None],
        **latency_pools(counted, area="serve"),
    }


def _wall_s(done: Sequence[RequestTimes], window: ArrivalWindow | None) -> float | None:
    if not done or window is None:
        return None
    wall_s = max(request.token_times_s[-1] for request in done) - window.begin_s
    return wall_s if wall_s > 0 else None


def _rate(amount: float, seconds: float | None) -> float | None:
    """Return amount / seconds; an amount of 0 is a measurement, a time that is absent is none."""
    return None if seconds is None else amount / seconds


def _window_rate(served: Sequence[ServedRequest], window: ArrivalWindow | None) -> float | None:
    if window is None or window.length_s <= 0:
        return None
    times = (time_s for request in served for time_s in request.token_times_s)
    begin_s, end_s = window.begin_s + CLOCK_S, window.end_s + CLOCK_S
    inside = sum(begin_s < time_s <= end_s for time_s in times)
    return inside / window.length_s
