"""Requests through the engine, step by step: what came back, how long it took, in all repeats.

Tokens are counted from ids. Times of tokens are the engine's (when a token was on the host); times
of steps and submits are this module's, of the same clock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Required, TypedDict, Unpack

from engine.asked.request import TokenEvent
from engine.asked.sampling import SamplingParams
from engine.errors import RequestError
from harness.config.schema import RequestSet
from harness.config.serve import ServeScenario
from harness.observe.statistics import Quantile, interval, is_settled
from harness.work.times import RequestTimes, floor_note, has_passed, pool_metrics

Clock = Callable[[], float]
OnProgress = Callable[[int, int, int], None]
"""Called with requests done, requests in all, output tokens."""
OnEnd = Callable[[RequestTimes], None]
"""Called with each request when nothing more comes of it."""


class Engine(Protocol):
    """The part of `engine.LLM` that scenarios use."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""

    @property
    def spec(self) -> Any:
        """Sizes of the model."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, tokens."""

    @property
    def load_report(self) -> Any:
        """Phases of the load."""

    @property
    def plan(self) -> Any:
        """The memory plan."""

    @property
    def last_step(self) -> Any:
        """What the newest step did, with the fields of StepStats; None before the first."""

    def add_request(
        self, prompt: list[int], params: SamplingParams, request_id: str | None = None
    ) -> str:
        """Queue a request."""

    def step(self) -> list[TokenEvent]:
        """Run one step."""

    def has_unfinished(self) -> bool:
        """Return whether a step has work."""

    def abort(self, request_id: str) -> None:
        """Drop a request."""

    def stats(self) -> dict[str, Any]:
        """Return totals since the engine started."""

    def memory(self) -> dict[str, Any]:
        """Return bytes in use."""

    def effective(self) -> dict[str, Any]:
        """Return what is really used."""

    def close(self) -> None:
        """Free everything."""


@dataclass(kw_only=True)
class StepTotals:
    """Sums over steps, seconds of wall time, apart for steps with prefill work and without."""

    num_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """Steps that only decoded."""
    num_decode_steps: int = 0
    num_decode_tokens: int = 0
    """Tokens of the steps that only decoded."""
    decode_copied_bytes: int = 0
    """Bytes copied from host to device in the steps that only decoded."""
    decode_read_bytes: int = 0
    """Bytes that the device read in host memory in the steps that only decoded."""
    planned_copied_bytes: int = 0
    """What the plan says of decode_copied_bytes."""
    planned_read_bytes: int = 0
    """What the plan says of decode_read_bytes."""
    decode_expert_hits: int = 0
    """Experts found on the device in the steps that only decoded."""
    decode_expert_misses: int = 0
    """Experts that crossed the host link in the steps that only decoded."""
    decode_expert_bytes: int = 0
    """Bytes that crossed it for them."""

    @property
    def decode_moved_bytes(self) -> int:
        """Bytes that crossed from host to device in the steps that only decoded."""
        return self.decode_copied_bytes + self.decode_read_bytes + self.decode_expert_bytes

    @property
    def planned_moved_bytes(self) -> int:
        """What the plan says of decode_moved_bytes."""
        return self.planned_copied_bytes + self.planned_read_bytes

    def __iadd__(self, other: "StepTotals") -> "StepTotals":
        """Add the sums over other steps."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def add(self, step: Any, duration_s: float, plan: Any) -> None:
        """Count one step."""
        self.num_steps += 1
        if step.num_prefill_tokens:
            self.prefill_s += duration_s
        elif step.num_decode_tokens:
            self.decode_s += duration_s
            self.num_decode_steps += 1
            self.num_decode_tokens += step.num_decode_tokens
            self.decode_copied_bytes += step.h2d_bytes
            self.decode_read_bytes += step.in_place_bytes
            self.decode_expert_hits += step.expert_hits
            self.decode_expert_misses += step.expert_misses
            self.decode_expert_bytes += step.expert_bytes
            copied, read = plan.moved_per_step(step.num_decode_tokens)
            self.planned_copied_bytes += copied
            self.planned_read_bytes += read


@dataclass(frozen=True, kw_only=True)
class DrivenStep:
    """One call of the engine's `step`."""

    begin_s: float
    """End of the call before."""
    end_s: float
    events: list[TokenEvent]
    stats: Any
    """What the engine says of the step that ended; None where none did."""

    def only_decodes(self, batch: int) -> bool:
        """Return whether it decoded `batch` sequences and did nothing else."""
        stats = self.stats
        if stats is None or stats.num_prefill_tokens:
            return False
        return bool(stats.num_decode_tokens == batch)


class Driver:
    """Sends requests and steps the engine until they are done, or are taken back."""

    def __init__(
        self, llm: Engine, clock: Clock, on_end: OnEnd | None = None, salt: str | None = None
    ) -> None:
        self._llm = llm
        self._clock = clock
        self._on_end = on_end
        self._salt = salt
        self._open: dict[str, RequestTimes] = {}
        self._cancelled: set[str] = set()
        self._end_s = clock()
        self.totals = StepTotals()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def offer(self, prompt: Sequence[int], output_tokens: int, request_id: str) -> RequestTimes:
        """Send one request for `output_tokens` greedy tokens; a refused one carries its error."""
        params = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, cache_salt=self._salt
        )
        times = RequestTimes(
            request_id=request_id, num_prompt_tokens=len(prompt), submit_s=self._clock()
        )
        try:
            self._llm.add_request(list(prompt), params, request_id)
        except RequestError as error:
            times.error = str(error)
            self._tell(times)
        else:
            self._open[request_id] = times
        return times

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has work."""
        return self._llm.has_unfinished()

    def step(self) -> DrivenStep:
        """Run one step.

        Its time is from the end of the one before it: the engine works on a step while the tokens
        of the one before are handled here.
        """
        before = self._llm.last_step
        events = self._llm.step()
        begin_s, self._end_s = self._end_s, self._clock()
        stats = self._llm.last_step
        if stats is before:
            stats = None
        if stats is not None:
            self.totals.add(stats, self._end_s - begin_s, self._llm.plan)
        for event in events:
            self._count(event)
        return DrivenStep(begin_s=begin_s, end_s=self._end_s, events=events, stats=stats)

    def drain(self, on_step: Callable[[int], None] | None = None) -> None:
        """Step until nothing is unfinished; `on_step` gets the number of new tokens."""
        self._end_s = self._clock()
        while self._llm.has_unfinished():
            step = self.step()
            if on_step is not None:
                on_step(len(step.events))
        for times in self._open.values():
            times.error = "the engine finished without ending this request"
            self._tell(times)
        self._open.clear()

    def cancel(self, why: str) -> None:
        """Take back all requests that have not ended; what comes of them later is ignored."""
        for name, times in list(self._open.items()):
            self._llm.abort(name)
            self._cancelled.add(name)
            times.is_cancelled, times.error = True, why
            self._end(times)

    def _count(self, event: TokenEvent) -> None:
        if event.request_id in self._cancelled:
            return
        times = self._open[event.request_id]
        if event.finish_reason == "error":  # no token comes with it
            times.error = str(event.stop_reason)
            self._end(times)
            return
        times.token_ids.append(event.token_id)
        times.token_times_s.append(event.time_s)
        if event.finish_reason is not None:
            times.finish_reason = event.finish_reason
            if event.finish_reason not in {"stop", "length"}:
                times.error = f"the engine ended it with {event.finish_reason}"
            self._end(times)

    def _end(self, times: RequestTimes) -> None:
        del self._open[times.request_id]
        self._tell(times)

    def _tell(self, times: RequestTimes) -> None:
        if self._on_end is not None:
            self._on_end(times)


class Conduct(TypedDict, total=False):
    """How requests are run, and who is told of it."""

    clock: Required[Clock]
    on_progress: OnProgress | None
    """Called after each step."""
    on_end: OnEnd | None
    """Called with each request that ended."""
    limit_s: float | None
    """Seconds after which what has not ended is taken back, once something has come."""
    salt: str | None
    """Salt of their prefixes in a cache; requests with another salt share none with them."""


def run_requests(
    llm: Engine,
    prompts: Sequence[Sequence[int]],
    output_tokens: int | Sequence[int],
    *,
    prefix: str,
    at_once: bool = False,
    **how: Unpack[Conduct],
) -> tuple[list[RequestTimes], StepTotals]:
    """Run the requests one at a time, or all at once; return times of those sent and step sums.

    `output_tokens` is the number of all, or a list with one of each; ids begin with `prefix`. Once
    the time is over and something has come, no other is sent and what runs is taken back.
    """
    clock, on_progress, limit_s = how["clock"], how.get("on_progress"), how.get("limit_s")
    begin_s = clock()
    driver = Driver(llm, clock, how.get("on_end"), how.get("salt"))
    requests: list[RequestTimes] = []
    num_tokens = num_ended = 0
    lengths = [output_tokens] * len(prompts) if isinstance(output_tokens, int) else output_tokens

    def is_over() -> bool:
        has_begun = num_tokens if at_once else num_ended
        return bool(has_begun) and limit_s is not None and has_passed(clock() - begin_s, limit_s)

    def on_step(new_tokens: int) -> None:
        nonlocal num_tokens
        num_tokens += new_tokens
        if on_progress is not None:
            done = len(requests) - driver.num_open if at_once else num_ended
            on_progress(done, len(prompts), num_tokens)
        if is_over():
            driver.cancel(_late(limit_s))

    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if is_over():
            break
        requests.append(driver.offer(prompt, length, f"{prefix}-{index}"))
        if not at_once:
            driver.drain(on_step)
            num_ended += 1
    driver.drain(on_step)
    if on_progress is not None and not at_once:
        on_progress(num_ended, len(prompts), num_tokens)
    return requests, driver.totals


def _late(limit_s: float | None) -> str:
    return f"taken back when max_duration_s={limit_s:g} had passed"


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
    num_asked: int = 0
    """Requests that they would be of, had all of them completed."""
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
        f"{first.request_id} after {len(first.token_ids)} of {output_tokens} tokens. They "
        "cannot be compared with another system's: lower the lengths, or ignore end tokens."
    ]


def cut_reasons(
    part: str, requests: Sequence[RequestTimes], planned: int, limit_s: float | None
) -> list[str]:
    """Return one reason when the time of `part` was over before all planned requests had ended.

    `part` is one of the scenario, or its warm-up.
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


def run_warm_up(
    llm: Engine,
    part: str,
    prompts: Sequence[Sequence[int]],
    output_tokens: int | Sequence[int],
    *,
    clock: Clock,
    limit_s: float | None,
    salt: str | None,
) -> list[str]:
    """Run the requests before a part, one at a time; return what went wrong."""
    requests, _ = run_requests(
        llm,
        prompts,
        output_tokens,
        prefix=f"{part}-warm-up",
        clock=clock,
        limit_s=limit_s,
        salt=salt and f"{salt}/warm-up",
    )
    name = f"{part} warm-up"
    return [*cut_reasons(name, requests, len(prompts), limit_s), *failure_reasons(name, requests)]


def ratio(amount: float, seconds: float) -> float | None:
    """Return amount / seconds, None where either is zero: nothing was measured."""
    return amount / seconds if amount > 0 and seconds > 0 else None


SETTLES: Final[Mapping[str, str]] = {
    "throughput": "throughput/output_tok_s",
    "latency": "latency/e2e_ms/mean",
    "serve": "serve/e2e_ms/mean",
}
"""Part -> the metric whose interval ends a series early."""
_POSITION: Final = "window_"
"""Beginning of the names of samples that are times of one repeat, which have no sum."""

Repeated = RequestSet | ServeScenario
"""Parts of the scenario that may be measured several times."""


def measure_repeats(
    measure: Callable[[int], tuple[Outcome, StepTotals]], asked: Repeated, t: Quantile
) -> tuple[Outcome, StepTotals]:
    """Measure a part several times; return means with their intervals, and the sums over steps.

    One repeat is returned as it is. `measure` gets the number of the repeat, from 0. With
    stop_share a series ends when the 95 % interval of the part's metric in SETTLES reaches at most
    that share of its mean to either side, without only where the time of one was over.
    """
    found: list[Outcome] = []
    totals = StepTotals()
    while len(found) < asked.repeats:
        outcome, steps = measure(len(found))
        found.append(outcome)
        totals += steps
        if outcome.is_cut:
            break
        values = _values(found, SETTLES[asked.part])
        if asked.stop_share is not None and is_settled(values, asked.stop_share, t):
            break
    whole = found[0] if asked.repeats == 1 else merge(found, asked, t)
    if whole.pools:
        counts = (sum(one.num_measured for one in found), sum(one.num_asked for one in found))
        whole.notes += filter(None, [floor_note(*counts, asked.part)])
    return whole, totals


def merge(found: Sequence[Outcome], asked: Repeated, t: Quantile) -> Outcome:
    """Return one outcome of several: means, deviations and intervals, and all samples.

    The statistics of a quantity of requests are those of all requests of all repeats; its interval
    is that of the repeats' means. A metric that a repeat did not measure is left out of its mean;
    that repeat has a reason.
    """
    pools = {
        base: [value for outcome in found for value in outcome.pools.get(base, ())]
        for base in found[0].pools
    }
    metrics: dict[str, float | None] = {}
    for name in found[0].metrics:
        if name.rpartition("/")[0] not in pools:
            metrics |= _of_repeats(name, _values(found, name), t)
    metrics |= pool_metrics(pools)
    for base in pools:
        spread = _of_repeats(base, _values(found, f"{base}/mean"), t)
        metrics |= {
            f"{base}/repeat_std": spread[f"{base}/std"],
            f"{base}/ci95_low": spread[f"{base}/ci95_low"],
            f"{base}/ci95_high": spread[f"{base}/ci95_high"],
        }
    return Outcome(
        metrics=metrics,
        pools=pools,
        repeats=[dict(outcome.metrics) for outcome in found],
        samples=_samples(found),
        num_measured=min(outcome.num_measured for outcome in found),
        num_unlisted_tokens=sum(outcome.num_unlisted_tokens for outcome in found),
        reasons=list(dict.fromkeys(reason for outcome in found for reason in outcome.reasons)),
        notes=_notes(found, asked.part, asked.repeats, is_pooled=bool(pools)),
        is_cut=found[-1].is_cut,
    )


def _of_repeats(name: str, values: Sequence[float], t: Quantile) -> dict[str, float | None]:
    known = interval(values, t)
    single = values[0] if values else None
    return {
        name: single if known is None else known.mean,
        f"{name}/std": None if known is None else known.std,
        f"{name}/ci95_low": None if known is None else known.low,
        f"{name}/ci95_high": None if known is None else known.high,
    }


def _notes(found: Sequence[Outcome], part: str, repeats: int, *, is_pooled: bool) -> list[str]:
    """Return the repeats' notes, each once, and how many there were."""
    notes = [note for outcome in found for note in outcome.notes]
    why = "cut short" if found[-1].is_cut else "settled early"
    ended = "" if len(found) == repeats else f" of {repeats}, {why}"
    pooled = "statistics of all requests, intervals of the means of"
    what = pooled if is_pooled else "means over"
    return [*dict.fromkeys(notes), f"{part}: {what} {len(found)} repeats{ended}."]


def _values(found: Sequence[Outcome], name: str) -> list[float]:
    values = (outcome.metrics.get(name) for outcome in found)
    return [value for value in values if value is not None]


def _samples(found: Sequence[Outcome]) -> Any:
    """Return every request with the number of its repeat, and sums of the counts."""
    if isinstance(found[0].samples, list):
        return _numbered([outcome.samples for outcome in found])
    merged: dict[str, Any] = {}
    for name in found[0].samples:
        if name == "requests" or name.startswith(_POSITION):
            continue
        values = [outcome.samples[name] for outcome in found]
        known = [value for value in values if value is not None]
        merged[name] = sum(known) if known else None
    merged["requests"] = _numbered([outcome.samples["requests"] for outcome in found])
    return merged


def _numbered(rows: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    return [{"repeat": number, **row} for number, found in enumerate(rows) for row in found]
