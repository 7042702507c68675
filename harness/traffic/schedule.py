"""The schedule: every request with its time and lengths as plain data, before anything is sent."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.errors import RequestError
from harness.traffic.arrivals import arrival_times
from harness.traffic.lengths import draw_lengths
from harness.traffic.scenario import ServeScenario
from harness.traffic.trace import TraceRow, scaled_tokens


@dataclass(frozen=True, kw_only=True)
class PlannedRequest:
    """One request to send."""

    request_id: str
    """serve-0, serve-1, ...; of later turns serve-0.1, serve-0.2, ..."""
    scheduled_s: float | None
    """When it arrives, seconds from the first arrival; None: `think_s` after `follows` ended."""
    num_prompt_tokens: int | None
    """Length of the whole prompt, earlier turns too; None until a text is encoded."""
    output_tokens: int
    """Tokens to generate."""
    place: int = 0
    """In the order in which lengths and tokens are drawn, whatever order requests are sent in."""
    own_tokens: int | None = None
    """Tokens that only this request has: without shared prefix and earlier turns."""
    prefix: int | None = None
    """Which shared prefix the prompt begins with."""
    hash_ids: tuple[int, ...] = ()
    """Which blocks of a trace the prompt is made of."""
    row: int | None = None
    """Which row of the file of prompts it is, from 0."""
    follows: str | None = None
    """The request before it in its conversation."""
    think_s: float = 0.0
    """Seconds between the end of that one and its own arrival."""
    is_ramp_up: bool = False
    """It arrives while the rate still rises, so it is not counted."""
    prompt_token_ids: tuple[int, ...] | None = None
    """Its tokens without those of earlier turns; None until they are drawn or encoded."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What one run sends, in order of arrival; later turns stand behind the turn they follow."""

    requests: tuple[PlannedRequest, ...]
    requested_per_s: float | None
    """The rate that was asked for; of a trace its own; None for all at once."""
    salt: str | None = None
    """Of the requests' prefixes in a cache; requests of another schedule share none with them."""

    @property
    def arrivals_s(self) -> list[float]:
        """Times of the counted requests whose arrival is planned."""
        return [
            request.scheduled_s
            for request in self.requests
            if request.scheduled_s is not None and not request.is_ramp_up
        ]

    @property
    def planned_per_s(self) -> float | None:
        """(n - 1) / (last - first planned arrival); None below two or for no span."""
        return mean_rate(self.arrivals_s)


def check_counted(schedule: Schedule, config: ServeScenario) -> None:
    """Refuse a schedule of whose requests none would be counted, before anything is sent.

    Raises:
        RequestError: all arrive in the ramp.
    """
    if all(request.is_ramp_up for request in schedule.requests):
        raise RequestError(
            f"serve: expected requests after scenario.serve.arrivals.ramp_up_s="
            f"{config.arrivals.ramp_up_s:g}, got all {len(schedule.requests)} before; none would "
            "be counted. Lower it, or raise num_requests."
        )


def mean_rate(times_s: Sequence[float]) -> float | None:
    """Return (n - 1) / (last - first) of times in any order; None below two or for no span."""
    span_s = max(times_s) - min(times_s) if len(times_s) > 1 else 0.0
    return (len(times_s) - 1) / span_s if span_s > 0 else None


def plan_requests(
    config: ServeScenario,
    trace: Sequence[TraceRow] = (),
    *,
    rate_per_s: float | None = None,
    name: str = "serve",
) -> Schedule:
    """Return the schedule of a scenario; the same for the same arguments. Draws no token ids.

    Args:
        config: what is asked.
        trace: rows of `read_trace`, for arrivals.process=trace.
        rate_per_s: in place of arrivals.rate_per_s, for a search.
        name: first part of the requests' ids.
    """
    if config.trace is not None:
        return _from_trace(config, trace, name)
    asked = config.arrivals.rate_per_s if rate_per_s is None else rate_per_s
    num_turns = config.turns.num
    num = int(config.num_requests or 0) // num_turns
    times = arrival_times(num, config.arrivals, rate_per_s=asked or 1.0, seed=config.seeds.arrivals)
    conversations = _draw_conversations(config, num)
    if config.seeds.order is not None:
        random.Random(f"tightfit/order/{config.seeds.order}").shuffle(conversations)
    ramp_up_s = config.arrivals.ramp_up_s or 0.0
    requests = []
    for index, (time_s, turns) in enumerate(zip(times, conversations, strict=True)):
        first = f"{name}-{index}"
        for number, turn in enumerate(turns):
            before = first if number == 1 else f"{first}.{number - 1}"
            requests.append(
                replace(
                    turn,
                    request_id=f"{first}.{number}" if number else first,
                    scheduled_s=None if number else time_s,
                    follows=before if number else None,
                    is_ramp_up=time_s < ramp_up_s,
                )
            )
    return Schedule(requests=tuple(requests), requested_per_s=asked)


def _draw_conversations(config: ServeScenario, num: int) -> list[list[PlannedRequest]]:
    """Return the turns of each conversation, without ids and times."""
    num_turns = config.turns.num
    draw = random.Random(f"tightfit/lengths/{config.seeds.prompts}")
    outputs = draw_lengths(num * num_turns, config.output, draw) if config.output else []
    own: list[int | None] = [None] * (num * num_turns)
    if config.prompt is not None:
        own[:] = draw_lengths(num * num_turns, config.prompt, draw)
    found = []
    for index in range(num):
        prefix = draw.randrange(config.prefixes.num) if config.prefixes.num else None
        before = config.prefixes.tokens
        turns = []
        for number in range(num_turns):
            at = index * num_turns + number
            tokens = own[at]
            if not number and config.turns.first_tokens is not None:
                tokens = config.turns.first_tokens
            whole = None if tokens is None else before + tokens
            turns.append(
                PlannedRequest(
                    request_id="",
                    scheduled_s=None,
                    num_prompt_tokens=whole,
                    output_tokens=outputs[at],
                    place=at,
                    own_tokens=tokens,
                    prefix=None if number else prefix,
                    row=at if tokens is None else None,
                    think_s=config.turns.think_s if number else 0.0,
                )
            )
            before = (whole or 0) + outputs[at]
        found.append(turns)
    return found


def _from_trace(config: ServeScenario, trace: Sequence[TraceRow], name: str) -> Schedule:
    source = config.trace
    if source is None or not trace:
        raise ValueError("plan_requests: expected the rows of the trace, got none.")
    requests = []
    for index, row in enumerate(trace):
        tokens = scaled_tokens(row.prompt_tokens, source.length_scale)
        requests.append(
            PlannedRequest(
                request_id=f"{name}-{index}",
                scheduled_s=row.time_s * source.time_scale,
                num_prompt_tokens=tokens,
                output_tokens=scaled_tokens(row.output_tokens, source.length_scale),
                place=index,
                own_tokens=None if row.hash_ids else tokens,
                hash_ids=row.hash_ids,
            )
        )
    schedule = Schedule(requests=tuple(requests), requested_per_s=None)
    return replace(schedule, requested_per_s=schedule.planned_per_s)
