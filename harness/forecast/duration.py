"""How long a run of one point will take, from the plan's predicted times."""

from engine.cost import Shape, decode_step_s, load_s, prefill_s
from engine.cost_queue import queue_s
from engine.rates import Rates
from harness.schema import LatencyScenario, ScenarioConfig
from harness.traffic.scenario import ServeScenario
from harness.traffic.settings import Lengths

UNKNOWN_TOKENS = 256
"""Length taken for prompts and outputs that come from a file or a trace."""


def run_s(shape: Shape, rates: Rates, scenario: ScenarioConfig) -> float:
    """Return seconds of a point: starts of processes, warm-ups and timed requests.

    Args:
        shape: of the plan.
        rates: of the machine.
        scenario: what is measured.
    """
    starts = int(scenario.correctness.enabled) + int(scenario.is_timed)
    if scenario.load is not None:
        starts += scenario.load.cold_starts + scenario.load.warm_starts
    seconds = starts * load_s(shape, rates)
    if scenario.latency is not None:
        seconds += scenario.latency.repeats * _latency_s(shape, rates, scenario.latency)
    if (many := scenario.throughput) is not None:
        each = queue_s(shape, rates, many.num_requests, many.prompt_tokens, many.output_tokens)
        seconds += many.repeats * each
    if scenario.serve is not None:
        seconds += scenario.serve.repeats * _serve_s(shape, rates, scenario.serve)
    return seconds


def _latency_s(shape: Shape, rates: Rates, one: LatencyScenario) -> float:
    step = decode_step_s(shape, rates, 1, one.prompt_tokens + one.output_tokens / 2)
    first = prefill_s(shape, rates, one.prompt_tokens)
    count = one.num_requests + one.warmup_requests
    return count * (first + (one.output_tokens - 1) * step)


def _serve_s(shape: Shape, rates: Rates, serve: ServeScenario) -> float:
    """The longer of arrivals and of the work they bring; a search tries every rate it may."""
    count = serve.num_requests or UNKNOWN_TOKENS
    work = queue_s(shape, rates, count, _mean(serve.prompt), _mean(serve.output))
    search = serve.search
    if search is not None:
        return search.max_trials * max(search.duration_s, work)
    rate = serve.arrivals.rate_per_s
    return max(work, count / rate if rate else 0.0) + (serve.arrivals.ramp_up_s or 0.0)


def _mean(lengths: Lengths | None) -> int:
    if lengths is None:
        return UNKNOWN_TOKENS
    if lengths.tokens is not None:
        return lengths.tokens
    return ((lengths.low or 1) + (lengths.high or 1)) // 2
