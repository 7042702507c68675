"""The highest rate that keeps the objectives: bisection between a rate that does and one not."""

from collections.abc import Callable
from dataclasses import dataclass

from harness.traffic.settings import PeakSearch


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One rate that was tried."""

    rate_per_s: float
    good_share: float
    """Of the counted requests, those that were good."""
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

    Args:
        config: bounds, what passes, and when to end.
        measure: runs one rate and returns the share of good requests.
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
