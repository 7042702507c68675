"""The schedule: every request with its time and lengths as plain data, before anything is sent."""

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from engine.errors import RequestError
from harness.config.serve import Arrivals, Lengths, ServeScenario
from harness.work.prompts import PromptError
from harness.work.times import mean_rate
from harness.work.trace import TraceRow, block_lengths, scaled_tokens


def arrival_times(num: int, arrivals: Arrivals, *, rate_per_s: float, seed: int) -> list[float]:
    """Return `num` times in ascending order, seconds from the first; the first is 0.

    The gaps are drawn for a rate of one a second and then divided by the rate, so schedules of two
    rates differ by a factor alone. `rate_per_s` is the mean once the ramp is over; at_once has
    none, and trace has the times of its rows.
    """
    if arrivals.process == "trace":
        raise ValueError("arrivals.process=trace: the times are those of the rows.")
    if arrivals.process == "at_once":
        return [0.0] * num
    draw = random.Random(f"tightfit/arrivals/{seed}")
    times, expected = [], 0.0
    for _ in range(num):
        times.append(_time_of(expected, rate_per_s, arrivals.ramp_up_s or 0.0))
        expected += _unit_gap(draw, arrivals)
    return times


def _unit_gap(draw: random.Random, arrivals: Arrivals) -> float:
    """Return a gap of mean 1."""
    match arrivals.process:
        case "poisson":
            return draw.expovariate(1.0)
        case "gamma":
            shape = arrivals.burstiness or 1.0
            return draw.gammavariate(shape, 1.0 / shape)
        case _:
            return 1.0


def _time_of(expected: float, rate_per_s: float, ramp_up_s: float) -> float:
    """Return when `expected` arrivals are due, with a rate that rises linearly over the ramp."""
    in_ramp = rate_per_s * ramp_up_s / 2
    if expected < in_ramp:
        return math.sqrt(2 * ramp_up_s * expected / rate_per_s)
    return ramp_up_s + (expected - in_ramp) / rate_per_s


def draw_lengths(num: int, lengths: Lengths, draw: random.Random) -> list[int]:
    """Return `num` lengths in tokens, from `lengths.least` to `lengths.most`.

    Normal and lognormal draws are rounded, then moved to the nearer bound where they are outside.
    The lognormal's mean and deviation are those of the lengths, not of their logarithms.
    """
    return [_draw(lengths, draw) for _ in range(num)]


def _draw(lengths: Lengths, draw: random.Random) -> int:
    mean, std = float(lengths.tokens or 0), lengths.std or 0.0
    match lengths.distribution:
        case "uniform":
            return draw.randint(lengths.least, lengths.most)
        case "normal":
            found = draw.gauss(mean, std)
        case "lognormal":
            variance = math.log(1 + (std / mean) ** 2)
            found = draw.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
        case _:
            return lengths.most
    return min(max(round(found), lengths.least), lengths.most)


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
    """Salt of the requests' prefixes in a cache; requests of another schedule share none."""

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
    """Raise RequestError where all requests arrive in the ramp, so none would be counted."""
    if all(request.is_ramp_up for request in schedule.requests):
        raise RequestError(
            f"serve: expected requests after scenario.serve.arrivals.ramp_up_s="
            f"{config.arrivals.ramp_up_s:g}, got all {len(schedule.requests)} before; none would "
            "be counted. Lower it, or raise num_requests."
        )


def plan_requests(
    config: ServeScenario,
    trace: Sequence[TraceRow] = (),
    *,
    rate_per_s: float | None = None,
    name: str = "serve",
) -> Schedule:
    """Return the schedule of a scenario; the same for the same arguments. Draws no token ids.

    `trace` has the rows for arrivals.process=trace. `rate_per_s` stands in for arrivals.rate_per_s
    in a search; the requests' ids begin with `name`.
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


def fill_tokens(
    schedule: Schedule,
    config: ServeScenario,
    *,
    vocab_size: int,
    avoid: Collection[int] = (),
    rows: Sequence[Sequence[int]] = (),
    stream: str = "serve",
) -> Schedule:
    """Return the schedule with the token ids of every request; the same for the same arguments.

    No two synthetic prompts are equal. Prompts of a trace are equal as far as its hash_ids are. Ids
    are below `vocab_size` and not in `avoid`, or PromptError where these are too few; `rows` are
    those of the file of prompts, encoded. Two streams share no prompt in practice.
    """
    if config.prompts_file is not None:
        return replace(schedule, requests=tuple(_of_file(item, rows) for item in schedule.requests))
    allowed = sorted(set(range(vocab_size)) - set(avoid))
    if not allowed:
        raise PromptError(f"prompts: expected usable token ids, got none of {vocab_size}.")
    source = _Source(allowed, f"tightfit/{stream}/{config.seeds.prompts}")
    scale = config.trace.length_scale if config.trace is not None else 1.0
    filled = {}
    for request in sorted(schedule.requests, key=lambda request: request.place):
        if request.hash_ids:
            ids = source.of_blocks(request, scale)
        else:
            ids = source.prefix(request.prefix, config.prefixes.tokens)
            ids += source.new(request.own_tokens or 0)
        filled[request.request_id] = replace(request, prompt_token_ids=tuple(ids))
    return replace(schedule, requests=tuple(filled[r.request_id] for r in schedule.requests))


def _of_file(request: PlannedRequest, rows: Sequence[Sequence[int]]) -> PlannedRequest:
    ids = tuple(rows[request.row or 0])
    return replace(
        request,
        prompt_token_ids=ids,
        own_tokens=len(ids),
        num_prompt_tokens=None if request.follows else len(ids),
    )


class _Source:
    """Draws token ids; what is asked for by a number is the same each time."""

    def __init__(self, allowed: list[int], key: str) -> None:
        self._allowed, self._key = allowed, key
        self._draw = random.Random(f"{key}/own")
        self._seen: set[tuple[int, ...]] = set()
        self._counts: dict[int, int] = {}

    def new(self, num_tokens: int) -> list[int]:
        """Return tokens that were not returned before; refuse where every sequence is used."""
        count = self._counts[num_tokens] = self._counts.get(num_tokens, 0) + 1
        if len(self._allowed) ** min(num_tokens, 64) < count:
            raise PromptError(
                f"prompts: expected room for {count} different prompts of {num_tokens} tokens, got "
                f"{len(self._allowed)} usable token ids. Raise the length of the prompts or ask "
                "for fewer requests."
            )
        while True:
            ids = self._draw.choices(self._allowed, k=num_tokens)
            if tuple(ids) not in self._seen:
                self._seen.add(tuple(ids))
                return ids

    def prefix(self, number: int | None, num_tokens: int) -> list[int]:
        """Return the shared prefix of that number."""
        if number is None:
            return []
        return self._keyed(f"prefix/{number}", num_tokens)

    def of_blocks(self, request: PlannedRequest, scale: float) -> list[int]:
        """Return a prompt made of the blocks of a trace, and of new tokens where they end."""
        total = request.num_prompt_tokens or 0
        lengths = block_lengths(total, len(request.hash_ids), scale)
        ids: list[int] = []
        for number, length in zip(request.hash_ids, lengths, strict=True):
            ids += self._keyed(f"block/{number}", length)
        lacking = total - len(ids)
        return ids + self.new(lacking) if lacking else ids

    def _keyed(self, name: str, num_tokens: int) -> list[int]:
        """Return the first tokens of an endless draw of that name."""
        return random.Random(f"{self._key}/{name}").choices(self._allowed, k=num_tokens)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent: the scenario and what was read for it."""

    config: ServeScenario
    rows: Sequence[Sequence[int]] = ()
    """Encoded rows of the file of prompts."""
    trace: Sequence[TraceRow] = ()
    """Rows of the trace."""
    vocab_size: int
    avoid: Collection[int] = ()
    """Ids that synthetic prompts do not hold."""
    salt: str | None = None
    """Begins the salts of all schedules; None: their prefixes are shared."""

    def of_repeat(self, number: int) -> "Load":
        """Return what one repeat sends: draws, and rows of the file, of its own."""
        if not number:
            return self  # with its schedule
        count = self.config.num_rows // self.config.repeats
        return replace(
            self,
            config=self.config.for_repeat(number),
            rows=self.rows[number * count : (number + 1) * count],
            salt=self.salt and f"{self.salt}/{number}",
        )

    @cached_property
    def first(self) -> Schedule:
        """What is sent first; drawn once, before anything is timed where the warm-up asks for it.

        Long prompts take a minute for 150 million tokens.
        """
        search = self.config.search
        return self.schedule() if search is None else self.schedule(search.low_per_s, trial=1)

    def schedule(self, rate_per_s: float | None = None, trial: int = 0) -> Schedule:
        """Return what to send, with token ids; each trial has prompts, or a salt, of its own."""
        name = f"serve-{trial}" if trial else "serve"
        config = self.config if rate_per_s is None else self.config.for_rate(rate_per_s)
        planned = plan_requests(config, self.trace, rate_per_s=rate_per_s, name=name)
        planned = replace(planned, salt=self.salt and f"{self.salt}/{name}")
        return fill_tokens(
            planned,
            config,
            vocab_size=self.vocab_size,
            avoid=self.avoid,
            rows=self.rows,
            stream=name,
        )
