"""Serve: requests that arrive by themselves; their figures, accounts and what speaks against them.

One run at a rate, or a search of the highest rate that keeps the objectives.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from engine.async_llm import AsyncLLM
from harness.config.serve import PeakSearch, ServeScenario
from harness.observe.statistics import Quantile, trend
from harness.work.drive import (
    Clock,
    Engine,
    OnEnd,
    OnProgress,
    Outcome,
    StepTotals,
    failure_reasons,
    run_warm_up,
)
from harness.work.kv import Reuse, Sent, hit_tokens, note_reuse, reuse_since
from harness.work.offline import engine_prompts
from harness.work.open_loop import CUT_OFF, Door, OpenLoop, Wait, late
from harness.work.schedule import Load, PlannedRequest, Schedule, check_counted
from harness.work.times import (
    ServedRequest,
    arrival_window,
    count_requests,
    serving_metrics,
    serving_pools,
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One rate that was tried."""

    rate_per_s: float
    good_share: float
    """Share of the counted requests that were good."""
    has_passed: bool


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What a search found."""

    rate_per_s: float | None
    """The highest rate that passed; None if the lowest one failed."""
    trials: tuple[Trial, ...]
    ending: str
    """Why the search ended, in words."""


def search_peak(config: PeakSearch, measure: Callable[[float], float]) -> Peak:
    """Try rates and return the highest that passed; the middle of two rates is geometric.

    `measure` runs one rate and returns the share of good requests.
    """
    trials: list[Trial] = []

    def passes(rate_per_s: float) -> bool:
        share = measure(rate_per_s)
        has_passed = share >= config.good_share
        trials.append(Trial(rate_per_s=rate_per_s, good_share=share, has_passed=has_passed))
        return has_passed

    def ended(rate_per_s: float | None, ending: str) -> Peak:
        return Peak(rate_per_s=rate_per_s, trials=tuple(trials), ending=ending)

    low, high = config.low_per_s, config.high_per_s
    if not passes(low):
        return ended(None, f"the lowest rate, {low:g}/s, failed")
    if passes(high):
        return ended(high, f"the highest rate, {high:g}/s, passed; the peak may lie above")
    while high > low * (1 + config.tolerance):
        if len(trials) >= config.max_trials:
            return ended(low, f"{len(trials)} trials; {high:g}/s failed")
        middle = (low * high) ** 0.5
        if passes(middle):
            low = middle
        else:
            high = middle
    return ended(low, f"{high:g}/s failed")


LEAST_SENT_SHARE: Final = 0.95
"""Share of the planned rate below which the client did not keep its schedule."""


OpenDoor = Callable[..., Door]
"""Opens the asynchronous door of an engine: `engine.async_llm.AsyncLLM`, or one like it. It takes
the engine, `max_pending`, and `on_step`, which gets the counts of each step and its seconds."""
RunAsync = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine and returns its result; asyncio.run is one."""


def warm_up(llm: Engine, load: Load, *, clock: Clock) -> list[str]:
    """Run requests of the first planned lengths, one at a time; return what went wrong.

    Where more are asked for than are planned, the lengths begin again.
    """
    config = load.config
    lengths = itertools.cycle(load.first.requests)
    planned = list(itertools.islice(lengths, config.warmup_requests))
    prompts = [
        engine_prompts(
            llm,
            1,
            max(1, request.num_prompt_tokens or 1),
            seed=config.seeds.prompts,
            stream=f"serve/warm-up/{index}",
        )[0]
        for index, request in enumerate(planned)
    ]
    return run_warm_up(
        llm,
        "serve",
        prompts,
        [request.output_tokens for request in planned],
        clock=clock,
        limit_s=config.max_duration_s,
        salt=load.salt,
    )


def measure_serve(
    llm: Engine,
    load: Load,
    *,
    clock: Clock,
    wait: Wait = asyncio.sleep,
    on_progress: OnProgress | None = None,
    on_end: OnEnd | None = None,
    open_door: OpenDoor = AsyncLLM,
    run_async: RunAsync = asyncio.run,
    t: Quantile,
) -> tuple[Outcome, StepTotals]:
    """Run the scenario; return its figures and the sums over the steps.

    A thread of its own steps the engine until this returns. `wait` lets time pass on `clock`, the
    clock of the tokens' times, and on the event loop of `run_async`. `on_end` gets each request, of
    every rate of a search, when it has ended.
    """
    totals, config, plan = StepTotals(), load.config, llm.plan

    async def send(schedule: Schedule) -> list[ServedRequest]:
        door = open_door(
            llm,
            max_pending=len(schedule.requests),
            on_step=lambda step, duration_s: totals.add(step, duration_s, plan),
        )
        try:
            loop = OpenLoop(
                door,
                schedule,
                config,
                clock=clock,
                wait=wait,
                on_progress=on_progress,
                on_end=on_end,
                give_up=partial(is_lost, config) if config.search is not None else None,
            )
            return await loop.run()
        finally:
            door.release()

    def serve(schedule: Schedule) -> Run:
        check_counted(schedule, config)
        before = hit_tokens(llm.stats())
        served: list[ServedRequest] = run_async(send(schedule))
        sent = [request for request in served if request.sent_s is not None]
        reuse = reuse_since(before, llm.stats(), sent, lambda: sent_tokens(schedule, sent))
        return Run(schedule, served, reuse)

    if config.search is None:
        return _outcome(config, serve(load.first), t), totals
    return _search(load, config.search, serve, t), totals


class Run(NamedTuple):
    """What was sent at one rate, and what came of it."""

    schedule: Schedule
    served: list[ServedRequest]
    reuse: Reuse


def _outcome(config: ServeScenario, run: Run, t: Quantile) -> Outcome:
    outcome = judge(config, run.schedule, run.served, t)
    note_reuse(outcome, "serve", run.reuse)
    return outcome


def _search(
    load: Load, search: PeakSearch, serve: Callable[[Schedule], Run], t: Quantile
) -> Outcome:
    """Return the figures of the highest rate that passed; of the lowest where it failed."""
    runs: dict[float, Run] = {}

    def measure(rate_per_s: float) -> float:
        schedule = load.schedule(rate_per_s, len(runs) + 1) if runs else load.first
        runs[rate_per_s] = serve(schedule)
        return good_share(load.config, schedule, runs[rate_per_s].served)

    peak = search_peak(search, measure)
    shown = runs.pop(search.low_per_s if peak.rate_per_s is None else peak.rate_per_s)
    outcome = _outcome(load.config, shown, t)
    others = [request for run in runs.values() for request in run.served]
    outcome.num_unlisted_tokens = sum(len(request.token_ids) for request in others)
    _note_peak(outcome, peak)
    return outcome


def good_share(config: ServeScenario, schedule: Schedule, served: Sequence[ServedRequest]) -> float:
    """Return the share of the counted planned requests that kept the objectives."""
    counted = sum(not request.is_ramp_up for request in schedule.requests)
    bounds = config.slo.bounds()
    good = sum(request.meets(bounds) for request in served if not request.is_ramp_up)
    return good / counted if counted else 0.0


def is_lost(config: ServeScenario, served: Sequence[ServedRequest], now_s: float) -> bool:
    """Return whether so many requests are bad that the rate cannot pass any more."""
    if config.search is None:
        return False
    counted = [request for request in served if not request.is_ramp_up]
    bounds = config.slo.bounds()
    num_bad = sum(request.is_bad_by(now_s, bounds) for request in counted)
    # The quotient of good_share, which a rate must reach: 1 - share is not exact.
    return bool(counted) and (len(counted) - num_bad) / len(counted) < config.search.good_share


def sent_tokens(schedule: Schedule, served: Sequence[ServedRequest]) -> list[Sent]:
    """Return prompt and output of requests that were sent; a later turn holds the ones before."""
    own = {request.request_id: request for request in schedule.requests}
    outcomes = {request.request_id: request for request in served}

    def prompt(request: PlannedRequest) -> list[int]:
        before = own[request.follows] if request.follows is not None else None
        history = [*prompt(before), *outcomes[before.request_id].token_ids] if before else []
        return history + list(request.prompt_token_ids or ())

    return [(prompt(own[request.request_id]), request.token_ids) for request in served]


def judge(
    config: ServeScenario, schedule: Schedule, served: Sequence[ServedRequest], t: Quantile
) -> Outcome:
    """Return the figures of one run with what speaks against them."""
    accounts = count_requests(len(schedule.requests), served)
    metrics = {
        "serve/requested_requests_s": schedule.requested_per_s,
        "serve/planned_requests_s": schedule.planned_per_s,
        **serving_metrics(served, config.slo.bounds()),
    }
    counted = [request for request in served if not request.is_ramp_up]
    outcome = Outcome(
        metrics=metrics,
        pools=serving_pools(served),
        samples=_samples(accounts, served),
        num_measured=sum(request.is_complete for request in counted),
        num_asked=len(counted),
        is_cut=any(request.error == late(config) for request in served),
        reasons=[
            *_account_reasons(config, accounts, served),
            *_schedule_reasons(config, metrics, served),
        ],
    )
    unsteady = _drift(config, counted, t)
    if unsteady is not None:
        # A rate near the peak is where waiting begins to grow; a search reports it and goes on.
        (outcome.reasons if config.search is None else outcome.notes).append(unsteady)
    return outcome


def _samples(accounts: dict[str, int], served: Sequence[ServedRequest]) -> dict[str, Any]:
    """Return the accounts and one row a request; times from the first arrival of all."""
    window = arrival_window(served)
    rows = [request.to_row() for request in served]
    begin_s = min((r.submit_s for r in served if r.sent_s is not None), default=0.0)
    for row in rows:
        row["scheduled_s"] -= begin_s  # NaN stays NaN, which a record holds as null
    return {
        **{f"num_{name}": count for name, count in accounts.items()},
        "window_begin_s": None if window is None else window.begin_s - begin_s,
        "window_end_s": None if window is None else window.end_s - begin_s,
        "requests": rows,
    }


def _account_reasons(
    config: ServeScenario, accounts: dict[str, int], served: Sequence[ServedRequest]
) -> list[str]:
    planned, *others = accounts.values()
    reasons = failure_reasons("serve", [r for r in served if not r.is_cancelled])
    cancelled = [request for request in served if request.is_cancelled]
    if cancelled:
        first = cancelled[0]
        remedy = f"Lower the rate, or raise scenario.serve.drain_s (now {config.drain_s:g})."
        if first.error == CUT_OFF:
            remedy = "Lower the rate, or relax scenario.serve.slo."
        elif first.error == late(config):
            remedy = "Raise scenario.serve.max_duration_s, or lower num_requests."
        reasons.append(
            f"serve: {len(cancelled)} of {planned} requests were cancelled; "
            f"{first.request_id}: {first.error}. {remedy}"
        )
    lost = planned - sum(others)
    if lost:
        reasons.append(
            f"serve: {planned} requests were planned, but {others[0]} completed, {others[1]} "
            f"failed and {others[2]} were cancelled. The figures lack {lost}; report this."
        )
    short = [request for request in served if request.is_short]
    if short:
        first = short[0]
        reasons.append(
            f"serve: {len(short)} requests ended before their planned length; {first.request_id} "
            f"after {len(first.token_ids)} of {first.output_tokens} tokens. Raise "
            "engine.max_model_len, or ask for shorter prompts or outputs."
        )
    return reasons


def _schedule_reasons(
    config: ServeScenario, metrics: dict[str, float | None], served: Sequence[ServedRequest]
) -> list[str]:
    reasons = []
    planned, sent = metrics["serve/planned_requests_s"], metrics["serve/sent_requests_s"]
    is_free = config.max_concurrency is None
    if is_free and planned and sent and sent < LEAST_SENT_SHARE * planned:
        reasons.append(
            f"serve: {planned:.4g} requests/s were planned and {sent:.4g}/s sent: the client could "
            "not keep its schedule. Lower the rate, or give the run more CPU cores."
        )
    window = arrival_window(served)
    length_s = window.length_s if window is not None else 0.0
    took, asked = f"{length_s:.4g}", f"{config.min_duration_s or 0.0:.4g}"
    if float(took) < float(asked):  # as they are printed
        reasons.append(
            f"serve: the arrivals took {took} s where min_duration_s={asked} was asked. Raise "
            "scenario.serve.num_requests."
        )
    return reasons


def _drift(config: ServeScenario, counted: Sequence[ServedRequest], t: Quantile) -> str | None:
    """Return in words how waiting grew or shrank over the run, where the rate was steady."""
    if not config.arrivals.has_rate:
        return None
    done = sorted((r for r in counted if r.is_complete), key=lambda request: request.submit_s)
    found = trend([request.ttft_ms for request in done if request.ttft_ms is not None], t)
    if found is None or not found.is_drift:
        return None
    remedy = (
        "Lower the rate, or raise warmup_requests, ramp_up_s or num_requests of scenario.serve."
        if config.search is None
        else "Raise scenario.serve.search.duration_s."
    )
    return (
        f"serve: the mean time to first token went from {found.first:.4g} ms in the first third to "
        f"{found.last:.4g} ms in the last: the load is not steady, and the figures depend on its "
        f"length. {remedy}"
    )


def _note_peak(outcome: Outcome, peak: Peak) -> None:
    outcome.metrics["serve/peak_requests_s"] = peak.rate_per_s
    outcome.samples["trials"] = [asdict(trial) for trial in peak.trials]
    if peak.rate_per_s is None:
        outcome.reasons.append(
            f"serve: no rate was found: {peak.ending}, with {peak.trials[0].good_share:.0%} good "
            "requests. Lower scenario.serve.search.low_per_s, or relax scenario.serve.slo."
        )
    else:
        outcome.notes.append(
            f"serve: the peak is {peak.rate_per_s:.4g} requests/s after {len(peak.trials)} rates; "
            f"{peak.ending}. The other figures of serve are those at this rate."
        )
