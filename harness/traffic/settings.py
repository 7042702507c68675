"""Settings below the node scenario.serve: arrivals, lengths, traces, bounds. Imports no torch.

A setting that would have no effect is an error, as everywhere.
"""

from dataclasses import dataclass
from typing import Final

from engine.errors import ConfigError
from engine.sealed import Sealed, check_choice, check_number
from harness.traffic.bounds import (
    LEAST_BURSTINESS,
    LEAST_RATE,
    MOST_BURSTINESS,
    MOST_FACTOR,
    MOST_LENGTH,
    MOST_RATE,
    MOST_REQUESTS,
    MOST_S,
    check_counts,
    check_positive,
    check_used,
)

NODE: Final = "scenario.serve"
PROCESSES: Final = ("poisson", "gamma", "constant", "at_once", "trace")
DISTRIBUTIONS: Final = ("fixed", "uniform", "normal", "lognormal")
TRACE_FORMATS: Final = ("auto", "azure", "mooncake")


@dataclass(kw_only=True)
class Arrivals(Sealed):
    """When requests arrive; with several turns, when conversations begin."""

    process: str = "poisson"
    """poisson | gamma | constant | at_once | trace (the times of scenario.serve.trace)."""
    rate_per_s: float | None = None
    """Mean arrivals a second; null for at_once, trace and a search."""
    burstiness: float | None = None
    """Shape of the gamma process: 1 is Poisson, below it bursts, above it evens out."""
    ramp_up_s: float | None = None
    """Seconds in which the rate rises from 0 to rate_per_s; what arrives then is not counted."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds or has no effect."""
        check_choice(f"{NODE}.arrivals.process", self.process, PROCESSES)
        bounds = {
            "rate_per_s": (LEAST_RATE, MOST_RATE),
            "burstiness": (LEAST_BURSTINESS, MOST_BURSTINESS),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None:
                check_number(f"{NODE}.arrivals.{name}", value, low=low, high=high)
        check_positive(f"{NODE}.arrivals.ramp_up_s", self.ramp_up_s, high=MOST_S)
        why = f"process={self.process}"
        is_gamma = self.process == "gamma"
        check_used(
            f"{NODE}.arrivals",
            {"burstiness": self.burstiness},
            {"burstiness"} if is_gamma else set(),
            why,
        )
        if not self.has_rate:
            given = {"rate_per_s": self.rate_per_s, "ramp_up_s": self.ramp_up_s}
            check_used(f"{NODE}.arrivals", dict(given), set(), why)

    @property
    def has_rate(self) -> bool:
        """Whether the process has a rate that can be set."""
        return self.process in {"poisson", "gamma", "constant"}

    @property
    def is_random(self) -> bool:
        """Whether the seed of the arrivals changes anything."""
        return self.process in {"poisson", "gamma"}


@dataclass(kw_only=True)
class Lengths(Sealed):
    """How many tokens each request has."""

    distribution: str = "fixed"
    """fixed | uniform | normal | lognormal."""
    tokens: int | None = None
    """The length (fixed) or the mean (normal, lognormal)."""
    std: float | None = None
    """Standard deviation in tokens (normal, lognormal)."""
    low: int | None = None
    """Smallest length (uniform), or bound that shorter draws are raised to (default 1)."""
    high: int | None = None
    """Largest length (uniform), or bound that longer draws are lowered to."""

    def check(self) -> None:
        """Raise ConfigError when a field is absent, out of bounds or has no effect."""
        node = f"{NODE}.(prompt|output)"
        check_choice(f"{node}.distribution", self.distribution, DISTRIBUTIONS)
        check_counts(node, self, {"tokens": 1, "low": 1, "high": 1}, MOST_LENGTH)
        check_positive(f"{node}.std", self.std, high=MOST_LENGTH)
        needed = {
            "fixed": {"tokens"},
            "uniform": {"low", "high"},
            "normal": {"tokens", "std", "high"},
            "lognormal": {"tokens", "std", "high"},
        }[self.distribution]
        values = {name: getattr(self, name) for name in ("tokens", "std", "low", "high")}
        if self.distribution in {"normal", "lognormal"}:
            del values["low"]
        check_used(node, values, needed, f"distribution={self.distribution}")
        if self.high is not None and self.least > self.high:
            raise ConfigError(
                f"{node}.high: expected at least low={self.least}, got {self.high}. Raise high."
            )

    @property
    def least(self) -> int:
        """The shortest length that can be drawn."""
        return int(self.tokens or 0) if self.distribution == "fixed" else self.low or 1

    @property
    def most(self) -> int:
        """The longest length that can be drawn."""
        return int(self.high or self.tokens or 0)

    @property
    def mean_bound(self) -> float:
        """What the mean of many lengths is at most."""
        if self.distribution == "uniform":
            return (self.least + self.most) / 2
        # Draws below the least are moved up to it, which adds less than a deviation.
        return min(self.most, max(self.least, self.tokens or 0) + (self.std or 0.0))


@dataclass(kw_only=True)
class Prefixes(Sealed):
    """Beginnings of prompts that several requests share."""

    num: int = 0
    """How many different ones; each request or conversation draws one. 0: none."""
    tokens: int = 0
    """Length of each, beside the request's own tokens."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds or has no effect."""
        check_counts(f"{NODE}.prefixes", self, {"num": 0, "tokens": 0}, MOST_LENGTH)
        if (self.num == 0) != (self.tokens == 0):
            raise ConfigError(
                f"{NODE}.prefixes: expected num and tokens both above 0 or both 0, got "
                f"num={self.num} and tokens={self.tokens}. Set both."
            )


@dataclass(kw_only=True)
class Turns(Sealed):
    """Conversations: each later turn holds all earlier prompts and answers."""

    num: int = 1
    """Requests of each conversation."""
    think_s: float = 0.0
    """Seconds from the last token of an answer to the arrival of the next turn."""
    first_tokens: int | None = None
    """Own tokens of the first prompt of a conversation; null: drawn as those of the others."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds or has no effect."""
        check_counts(f"{NODE}.turns", self, {"num": 1, "first_tokens": 1}, MOST_LENGTH)
        check_number(f"{NODE}.turns.think_s", self.think_s, low=0, high=MOST_S)
        if self.num == 1 and self.think_s:
            raise ConfigError(
                f"{NODE}.turns.think_s: expected 0 with one turn, got {self.think_s}. Raise "
                "turns.num or remove it."
            )
        if self.num == 1 and self.first_tokens is not None:
            raise ConfigError(
                f"{NODE}.turns.first_tokens: expected null with one turn, got "
                f"{self.first_tokens}. Set prompt.tokens, raise turns.num, or remove it."
            )


@dataclass(kw_only=True)
class TraceSource(Sealed):
    """Arrivals and lengths that were recorded elsewhere."""

    path: str | None = None
    """File: Azure's CSV or Mooncake's JSON lines."""
    format: str = "auto"
    """auto (by the file's ending: .csv or .jsonl) | azure | mooncake."""
    time_scale: float = 1.0
    """Factor of all times; 0.5 sends twice as fast."""
    length_scale: float = 1.0
    """Factor of all lengths, prompts and outputs; each keeps at least one token."""

    def check(self) -> None:
        """Raise ConfigError when the file is not named or a factor is out of bounds."""
        if self.path is None or not self.path.strip():
            raise ConfigError(
                f"{NODE}.trace.path: expected a file, got {self.path or 'null'}. Name a trace in "
                "Azure's CSV or Mooncake's JSONL format."
            )
        check_choice(f"{NODE}.trace.format", self.format, TRACE_FORMATS)
        for name in ("time_scale", "length_scale"):
            check_positive(f"{NODE}.trace.{name}", getattr(self, name), high=MOST_FACTOR)

    def check_ending(self) -> None:
        """Raise ConfigError where the file's ending does not tell the format.

        Not part of check(): that the file is absent is to be said first.
        """
        if self.format == "auto" and not str(self.path).lower().endswith((".csv", ".jsonl")):
            raise ConfigError(
                f"{NODE}.trace.format: expected azure or mooncake for a file that ends neither in "
                f".csv nor in .jsonl, got auto for {self.path}. Set it."
            )

    @property
    def kind(self) -> str:
        """The format that is read: azure or mooncake."""
        if self.format != "auto":
            return self.format
        return "azure" if str(self.path).lower().endswith(".csv") else "mooncake"


@dataclass(kw_only=True)
class Seeds(Sealed):
    """What is drawn, apart: each of the three can change while the others stay."""

    prompts: int = 0
    """Lengths and token ids."""
    order: int | None = None
    """Which request takes which arrival; null: in the order of the draws or of the file."""
    arrivals: int = 0
    """Gaps between arrivals."""

    def check(self) -> None:
        """Raise ConfigError when a seed is not a whole number from 0."""
        for name in ("prompts", "order", "arrivals"):
            value = getattr(self, name)
            if value is not None:
                check_number(f"{NODE}.seeds.{name}", value, low=0, integer=True)


@dataclass(kw_only=True)
class Objectives(Sealed):
    """Bounds that a good request keeps; null: no bound."""

    ttft_ms: float | None = None
    """Time to first token, from the scheduled arrival."""
    tpot_ms: float | None = None
    """Time per output token; a request of one token has none, and the bound does not apply."""
    e2e_ms: float | None = None
    """Time to the last token, from the scheduled arrival."""

    def check(self) -> None:
        """Raise ConfigError when a bound is not above 0."""
        for name, value in self.bounds().items():
            check_positive(f"{NODE}.slo.{name}", value, high=1e3 * MOST_S)

    def bounds(self) -> dict[str, float]:
        """Return the bounds that are set, in milliseconds."""
        names = ("ttft_ms", "tpot_ms", "e2e_ms")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(kw_only=True)
class PeakSearch(Sealed):
    """The highest rate at which enough requests are good, by bisection."""

    low_per_s: float
    """Rate that is tried first; if it fails, there is no answer."""
    high_per_s: float
    """Rate that is tried second; if it passes, it is the answer and the search ends."""
    good_share: float = 0.95
    """Share of requests that must be good at a rate."""
    tolerance: float = 0.1
    """End when the lowest failing rate is at most this share above the highest passing one."""
    max_trials: int = 8
    """End after this many rates."""
    duration_s: float = 10.0
    """Least seconds of arrivals at each rate; num_requests is raised to it. In a shorter time a
    queue that grows does not show, and the peak comes out too high."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds."""
        node = f"{NODE}.search"
        for name in ("low_per_s", "high_per_s"):
            check_number(f"{node}.{name}", getattr(self, name), low=LEAST_RATE, high=MOST_RATE)
        if self.high_per_s <= self.low_per_s:
            raise ConfigError(
                f"{node}.high_per_s: expected above low_per_s={self.low_per_s:g}, got "
                f"{self.high_per_s:g}. Raise it."
            )
        for name in ("good_share", "tolerance"):
            check_number(f"{node}.{name}", getattr(self, name), low=0, high=1, low_open=True)
        check_counts(node, self, {"max_trials": 2}, MOST_REQUESTS)
        check_positive(f"{node}.duration_s", self.duration_s, high=MOST_S)
