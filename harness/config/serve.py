"""ServeScenario: the node scenario.serve, its parts checked against each other."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from engine.errors import ConfigError
from engine.sealed import Sealed, check_choice, check_number
from harness.observe.statistics import LEAST_REPEATS

MOST_REQUESTS: Final = 10**6
"""Most requests of one part, all repeats."""
MOST_PROMPT_TOKENS: Final = 250_000_000
"""Most prompt tokens of one part, all repeats: some 4 GiB of ids."""
MOST_LENGTH: Final = 10**8
"""Tokens of one prompt or one answer."""
MOST_S: Final = 1e7
"""Seconds: 115 days."""
MOST_FACTOR: Final = 1e6
LEAST_RATE: Final = 1e-4
MOST_RATE: Final = 1e6
LEAST_BURSTINESS: Final = 1e-3
MOST_BURSTINESS: Final = 1e6


def check_counts(node: str, settings: object, least: dict[str, int], most: int) -> None:
    """Check whole numbers of `settings`, from `least` of each to `most`; None is left out.

    Raises:
        ConfigError: A value is out of bounds.
    """
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None:
            check_number(f"{node}.{name}", value, low=low, high=most, integer=True)


def check_positive(name: str, value: float | None, *, high: float) -> None:
    """Raise ConfigError unless `value` is None or a number above 0 and at most `high`."""
    if value is not None:
        check_number(name, value, low=0, high=high, low_open=True)


def check_repeats(node: str, repeats: int, stop_share: float | None) -> None:
    """Check how often a part is measured.

    Raises:
        ConfigError: A value is out of bounds, or would have no effect.
    """
    check_number(f"{node}.repeats", repeats, low=1, high=MOST_REQUESTS, integer=True)
    if stop_share is None:
        return
    name = f"{node}.stop_share"
    check_number(name, stop_share, low=0, high=1, low_open=True)
    if repeats <= LEAST_REPEATS:
        raise ConfigError(
            f"{name}: expected null with repeats={repeats}: a series does not end before "
            f"{LEAST_REPEATS}. Raise {node}.repeats or remove it."
        )


def check_size(node: str, num_requests: float, prompt_tokens: float, settings: str) -> None:
    """Check how much a part builds before it sends anything.

    Args:
        node: the part, such as scenario.serve.
        num_requests: in all.
        prompt_tokens: of all of them; 0 where a file decides.
        settings: what to lower.

    Raises:
        ConfigError: It is more than MOST_REQUESTS or MOST_PROMPT_TOKENS.
    """
    for what, asked, most in (
        ("requests", num_requests, MOST_REQUESTS),
        ("prompt tokens", prompt_tokens, MOST_PROMPT_TOKENS),
    ):
        if asked > most:
            raise ConfigError(
                f"{node}: expected at most {most:,} {what} in all, got {asked:,.0f}. They are "
                f"built before anything is sent; lower {settings}."
            )


def check_used(node: str, values: dict[str, object], needed: set[str], why: str) -> None:
    """Check that exactly the needed settings have a value.

    Raises:
        ConfigError: One is null that is needed, or has a value that would have no effect.
    """
    for name, value in values.items():
        if name in needed and value is None:
            raise ConfigError(f"{node}.{name}: expected a value for {why}, got null. Set it.")
        if name not in needed and value is not None:
            raise ConfigError(
                f"{node}.{name}: expected null for {why}, got {value!r}. It would have no effect; "
                "remove it."
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


@dataclass(kw_only=True)
class ServeScenario(Sealed):
    """Requests that arrive by themselves, whatever the engine does (open loop)."""

    part: ClassVar[str] = "serve"
    num_requests: int | None = 64
    """Requests in all, later turns too; null with a trace: every row of it."""
    warmup_requests: int = 2
    """Requests before, one at a time, not counted, with prompts of their own."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """When requests arrive."""
    max_concurrency: int | None = None
    """Requests at the engine at once; later ones wait at the client, and the wait counts."""
    prompt: Lengths | None = None
    """Own tokens of each synthetic prompt; null with a trace or a file of prompts."""
    output: Lengths | None = None
    """Tokens generated for each request (the end token stops none); null with a trace."""
    prefixes: Prefixes = field(default_factory=Prefixes)
    """Shared beginnings of synthetic prompts."""
    turns: Turns = field(default_factory=Turns)
    """Conversations."""
    prompts_file: str | None = None
    """JSON lines, each with `prompt` (text) or `prompt_token_ids` (list); null: synthetic."""
    trace: TraceSource | None = None
    """A recorded trace; arrivals.process=trace goes with it."""
    seeds: Seeds = field(default_factory=Seeds)
    """What is drawn."""
    slo: Objectives = field(default_factory=Objectives)
    """What a good request keeps to."""
    drain_s: float = 60.0
    """Seconds after the last arrival until requests that still run are cancelled."""
    max_duration_s: float | None = None
    """Seconds after which the warm-up (at least one request), and each run at a rate, ends with
    what there is; the figures are then not valid. null: no limit."""
    min_duration_s: float | None = None
    """Least seconds from the first counted arrival to the last; shorter is not valid."""
    search: PeakSearch | None = None
    """Search the highest rate that keeps the SLO; null: one run at arrivals.rate_per_s."""
    repeats: int = 1
    """Measurements, each with draws of its own; above 1: means with 95 % intervals."""
    stop_share: float | None = None
    """End when the interval of the mean time of a request is at most this share of it to either
    side."""

    def check(self) -> None:
        """Raise ConfigError when settings are out of bounds or contradict each other."""
        counts = {"num_requests": 1, "warmup_requests": 0, "max_concurrency": 1}
        check_counts(NODE, self, counts, MOST_REQUESTS)
        check_number(f"{NODE}.drain_s", self.drain_s, low=0, high=MOST_S)
        for name in ("max_duration_s", "min_duration_s"):
            check_positive(f"{NODE}.{name}", getattr(self, name), high=MOST_S)
        if (self.min_duration_s or 0) >= (self.max_duration_s or math.inf):
            raise ConfigError(
                f"{NODE}.min_duration_s: expected below max_duration_s={self.max_duration_s:g}, "
                f"got {self.min_duration_s:g}. Lower it, or raise max_duration_s."
            )
        check_repeats(NODE, self.repeats, self.stop_share)
        if self.search is not None and self.repeats > 1:
            raise ConfigError(
                f"{NODE}.repeats: expected 1 with a search, got {self.repeats}. Remove it, or set "
                f"{NODE}.search=null."
            )
        self._check_source()
        self._check_arrivals()
        self._check_seeds()
        self._check_size()

    def _check_source(self) -> None:
        lengths = {"prompt": self.prompt, "output": self.output, "prompts_file": self.prompts_file}
        if self.trace is not None:
            check_used(NODE, dict(lengths), set(), "a trace")
        elif self.prompts_file is not None:
            check_used(NODE, dict(lengths), {"output", "prompts_file"}, "a prompts_file")
            if not self.prompts_file.strip():
                raise ConfigError(f"{NODE}.prompts_file: expected a JSONL file or null, got ''.")
        else:
            check_used(NODE, dict(lengths), {"prompt", "output"}, "synthetic prompts")
        if self.prompt is None and self.prefixes.num:
            raise ConfigError(
                f"{NODE}.prefixes: expected none beside a trace or a prompts_file, got "
                f"num={self.prefixes.num}. Remove it."
            )
        if self.prompt is None and self.turns.first_tokens is not None:
            raise ConfigError(
                f"{NODE}.turns.first_tokens: expected null beside a prompts_file, got "
                f"{self.turns.first_tokens}. Its rows have their own lengths; remove it."
            )
        if self.trace is None and self.num_requests is None:
            raise ConfigError(f"{NODE}.num_requests: expected a number without a trace, got null.")
        if self.trace is not None and self.turns.num > 1:
            raise ConfigError(
                f"{NODE}.turns.num: expected 1 with a trace, got {self.turns.num}. Its rows are "
                "requests of their own; remove it."
            )
        if (self.num_requests or 0) % self.turns.num:
            raise ConfigError(
                f"{NODE}.num_requests: expected a multiple of turns.num={self.turns.num}, got "
                f"{self.num_requests}. It counts every turn."
            )

    def _check_arrivals(self) -> None:
        process = self.arrivals.process
        if (process == "trace") != (self.trace is not None):
            raise ConfigError(
                f"{NODE}.arrivals.process: expected trace exactly where scenario.serve.trace is "
                f"set, got {process} with trace={'null' if self.trace is None else 'set'}. Choose "
                "scenario=serve_trace for a trace, or remove the trace."
            )
        rate = {"rate_per_s": self.arrivals.rate_per_s}
        if self.search is None:
            if self.arrivals.has_rate:
                check_used(f"{NODE}.arrivals", dict(rate), {"rate_per_s"}, f"process={process}")
            return
        if not self.arrivals.has_rate:
            raise ConfigError(
                f"{NODE}.search: expected arrivals.process of poisson, gamma or constant, got "
                f"{process}. It has no rate to search."
            )
        check_used(f"{NODE}.arrivals", dict(rate), set(), "a search of rates")
        if not self.slo.bounds():
            raise ConfigError(
                f"{NODE}.slo: expected at least one bound with a search, got none. Set "
                "scenario.serve.slo.ttft_ms, tpot_ms or e2e_ms."
            )

    def _check_seeds(self) -> None:
        if self.seeds.arrivals and not self.arrivals.is_random:
            raise ConfigError(
                f"{NODE}.seeds.arrivals: expected 0 with arrivals.process={self.arrivals.process}, "
                f"got {self.seeds.arrivals}. Nothing is drawn; remove it."
            )
        if self.seeds.order is not None and self.trace is not None:
            raise ConfigError(
                f"{NODE}.seeds.order: expected null with a trace, got {self.seeds.order}. Its rows "
                "have their own times; remove it."
            )

    def _check_size(self) -> None:
        """Refuse what is too much to build; the schedule of one repeat is there at a time."""
        most = self.num_rows
        each = self.prompt.mean_bound + self.prefixes.tokens if self.prompt is not None else 0
        lower = "num_requests, repeats or prompt"
        if self.search is not None:
            lower = "search.high_per_s, search.duration_s or prompt"
        check_size(NODE, most, most // self.repeats * each, f"its {lower}")

    @property
    def num_rows(self) -> int:
        """Rows of prompts_file that are read: of all repeats, or for the highest rate tried."""
        return self.repeats * self._num_at(self.search.high_per_s if self.search else 0.0)

    def for_rate(self, rate_per_s: float) -> "ServeScenario":
        """Return the scenario with as many requests as a search needs at a rate.

        Args:
            rate_per_s: that is tried.
        """
        if self.search is None or self.num_requests is None:
            return self
        return replace(self, num_requests=self._num_at(rate_per_s))

    def _num_at(self, rate_per_s: float) -> int:
        """Return how many requests a rate needs: those asked for, in a search at least."""
        asked = self.num_requests or 1
        if self.search is None:
            return asked
        seconds = self.search.duration_s + (self.arrivals.ramp_up_s or 0.0)
        return max(asked, self.turns.num * (math.ceil(rate_per_s * seconds) + 1))

    def for_repeat(self, number: int) -> "ServeScenario":
        """Return the scenario with draws of its own.

        Args:
            number: of the repeat, from 0, which keeps the seeds that were set.
        """
        seeds = Seeds(
            prompts=self.seeds.prompts + number,
            order=None if self.seeds.order is None else self.seeds.order + number,
            arrivals=self.seeds.arrivals + (number if self.arrivals.is_random else 0),
        )
        return replace(self, seeds=seeds)

    def longest_tokens(self) -> int | None:
        """Return the most tokens that prompt and output of a request can have; None: unknown."""
        if self.prompt is None or self.output is None:
            return None
        prompts = self.turns.num * self.prompt.most
        if self.turns.first_tokens is not None:
            prompts += self.turns.first_tokens - self.prompt.most
        return self.prefixes.tokens + prompts + self.turns.num * self.output.most
