"""Times of arrivals: drawn for a rate, or given by a trace."""

import math
import random

from harness.traffic.settings import Arrivals


def arrival_times(num: int, arrivals: Arrivals, *, rate_per_s: float, seed: int) -> list[float]:
    """Return `num` times in ascending order, seconds from the first; the first is 0.

    The gaps are drawn for a rate of one a second and then divided by the rate, so schedules of two
    rates differ by a factor alone.

    Args:
        num: how many.
        arrivals: the process; not trace.
        rate_per_s: mean arrivals a second once the ramp is over; no effect for at_once.
        seed: keys the draws.

    Raises:
        ValueError: the process is trace, whose times are those of its rows.
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
