"""ServeScenario: the node scenario.serve, its parts checked against each other."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Final

from engine.errors import ConfigError
from engine.sealed import Sealed, choice, number
from harness.observe.statistics import LEAST_REPEATS

MOST_REQUESTS: Final = 10**6
"""Most requests of one part, all repeats."""
MOST_PROMPT_TOKENS: Final = 250_000_000
"""Most prompt tokens of one part, all repeats: some 4 GiB of ids."""
MOST_LENGTH: Final = 10**8
"""Tokens of one prompt or one answer."""
MOST_S: Final = 1e7
"""Seconds: 115 days."""
LEAST_RATE: Final = 1e-4
MOST_RATE: Final = 1e6


def check_used(node: Sealed, names: Collection[str], needed: Collection[str], why: str) -> None:
    """Raise ConfigError unless exactly the needed ones of some settings of a node have a value."""
    for name in names:
        key, value = f"{node.section}.{name}", getattr(node, name)
        if name in needed and value is None:
            raise ConfigError(f"{key}: expected a value for {why}, got null. Set it.")
        if name not in needed and value is not None:
            raise ConfigError(
                f"{key}: expected null for {why}, got {value!r}. It would have no effect: set it "
                "to null, or remove it."
            )


TOKENS: Final[Mapping[str, Any]] = {"low": 1, "high": MOST_LENGTH}
REQUESTS: Final[Mapping[str, Any]] = {"low": 1, "high": MOST_REQUESTS}
SECONDS: Final[Mapping[str, Any]] = {"low": 0, "high": MOST_S, "low_open": True}
MILLISECONDS: Final[Mapping[str, Any]] = {"low": 0, "high": 1e3 * MOST_S, "low_open": True}
FACTOR: Final[Mapping[str, Any]] = {"low": 0, "high": 1e6, "low_open": True}
SHARE: Final[Mapping[str, Any]] = {"low": 0, "high": 1, "low_open": True}


def check_repeats(node: str, repeats: int, stop_share: float | None) -> None:
    """Raise ConfigError where `stop_share` has no effect on so many repeats."""
    if stop_share is not None and repeats <= LEAST_REPEATS:
        raise ConfigError(
            f"{node}.stop_share: expected null with repeats={repeats}: a series does not end "
            f"before {LEAST_REPEATS}. Raise {node}.repeats or remove it."
        )


def check_size(node: str, num_requests: float, prompt_tokens: float, settings: str) -> None:
    """Check how much a part builds before it sends anything; `settings`: what to lower.

    `prompt_tokens`, of all requests, is 0 where a file decides.
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


NODE: Final = "scenario.serve"
PROCESSES: Final = ("poisson", "gamma", "constant", "at_once", "trace")
DISTRIBUTIONS: Final = ("fixed", "uniform", "normal", "lognormal")
TRACE_FORMATS: Final = ("auto", "azure", "mooncake")


@dataclass(kw_only=True)
class Arrivals(Sealed):
    """When requests arrive; with several turns, when conversations begin."""

    section: ClassVar = f"{NODE}.arrivals"
    process: str = choice(PROCESSES, "poisson")
    """poisson | gamma | constant | at_once | trace (the times of scenario.serve.trace)."""
    rate_per_s: float | None = number(None, low=LEAST_RATE, high=MOST_RATE)
    """Mean arrivals a second; null for at_once, trace and a search."""
    burstiness: float | None = number(None, low=1e-3, high=1e6)
    """Shape of the gamma process: 1 is Poisson, below it bursts, above it evens out."""
    ramp_up_s: float | None = number(None, **SECONDS)
    """Seconds in which the rate rises from 0 to rate_per_s; requests of that time do not count."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds or has no effect."""
        why, has_shape = f"process={self.process}", self.process == "gamma"
        check_used(self, ["burstiness"], ["burstiness"] if has_shape else [], why)
        if not self.has_rate:
            check_used(self, ["rate_per_s", "ramp_up_s"], [], why)

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

    section: ClassVar = f"{NODE}.lengths"
    distribution: str = choice(DISTRIBUTIONS, "fixed")
    """fixed | uniform | normal | lognormal."""
    tokens: int | None = number(None, **TOKENS)
    """The length (fixed) or the mean (normal, lognormal)."""
    std: float | None = number(None, low=0, high=MOST_LENGTH, low_open=True)
    """Standard deviation in tokens (normal, lognormal)."""
    low: int | None = number(None, **TOKENS)
    """Smallest length (uniform), or bound that shorter draws are raised to (default 1)."""
    high: int | None = number(None, **TOKENS)
    """Largest length (uniform), or bound that longer draws are lowered to."""

    def check(self) -> None:
        """Raise ConfigError when a field is absent, out of bounds or has no effect."""
        needed = {
            "fixed": {"tokens"},
            "uniform": {"low", "high"},
            "normal": {"tokens", "std", "high"},
            "lognormal": {"tokens", "std", "high"},
        }[self.distribution]
        names = ["tokens", "std", "low", "high"]
        if self.distribution in {"normal", "lognormal"}:
            names.remove("low")
        check_used(self, names, needed, f"distribution={self.distribution}")
        if self.high is not None and self.least > self.high:
            raise ConfigError(
                f"{self.section}.high: expected at least low={self.least}, got {self.high}. Raise "
                "high."
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
class PromptLengths(Lengths):
    """How many tokens each prompt has."""

    section: ClassVar = f"{NODE}.prompt"


@dataclass(kw_only=True)
class OutputLengths(Lengths):
    """How many tokens each answer has."""

    section: ClassVar = f"{NODE}.output"


@dataclass(kw_only=True)
class Prefixes(Sealed):
    """Beginnings of prompts that several requests share."""

    section: ClassVar = f"{NODE}.prefixes"
    num: int = number(0, low=0, high=MOST_LENGTH)
    """Number of different prefixes; each request or conversation draws one. 0: none."""
    tokens: int = number(0, low=0, high=MOST_LENGTH)
    """Tokens of each prefix, in addition to the request's own tokens."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds or has no effect."""
        if (self.num == 0) != (self.tokens == 0):
            raise ConfigError(
                f"{NODE}.prefixes: expected num and tokens both above 0 or both 0, got "
                f"num={self.num} and tokens={self.tokens}. Set both."
            )


@dataclass(kw_only=True)
class Turns(Sealed):
    """Conversations: each later turn holds all earlier prompts and answers."""

    section: ClassVar = f"{NODE}.turns"
    num: int = number(1, **TOKENS)
    """Requests of each conversation."""
    think_s: float = number(0.0, low=0, high=MOST_S)
    """Seconds from the last token of an answer to the arrival of the next turn."""
    first_tokens: int | None = number(None, **TOKENS)
    """Own tokens of a conversation's first prompt; null: drawn like those of later turns."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds or has no effect."""
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

    section: ClassVar = f"{NODE}.trace"
    path: str | None = None
    """File: Azure's CSV or Mooncake's JSON lines."""
    format: str = choice(TRACE_FORMATS, "auto")
    """auto (by the file's ending: .csv or .jsonl) | azure | mooncake."""
    time_scale: float = number(1.0, **FACTOR)
    """Factor of all times; 0.5 sends twice as fast."""
    length_scale: float = number(1.0, **FACTOR)
    """Factor of all lengths, prompts and outputs; each keeps at least one token."""

    def check(self) -> None:
        """Raise ConfigError when the file is not named or a factor is out of bounds."""
        if self.path is None or not self.path.strip():
            raise ConfigError(
                f"{NODE}.trace.path: expected a file, got {self.path or 'null'}. Name a trace in "
                "Azure's CSV or Mooncake's JSONL format."
            )

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

    section: ClassVar = f"{NODE}.seeds"
    prompts: int = number(0, low=0)
    """Lengths and token ids."""
    order: int | None = number(None, low=0)
    """Which request takes which arrival; null: in the order of the draws or of the file."""
    arrivals: int = number(0, low=0)
    """Gaps between arrivals."""


@dataclass(kw_only=True)
class Objectives(Sealed):
    """Bounds that a good request keeps; null: no bound."""

    section: ClassVar = f"{NODE}.slo"
    ttft_ms: float | None = number(None, **MILLISECONDS)
    """Time to first token, from the scheduled arrival."""
    tpot_ms: float | None = number(None, **MILLISECONDS)
    """Time per output token; a request of one token has none, and the bound does not apply."""
    e2e_ms: float | None = number(None, **MILLISECONDS)
    """Time to the last token, from the scheduled arrival."""

    def bounds(self) -> dict[str, float]:
        """Return the bounds that are set, in milliseconds."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(kw_only=True)
class PeakSearch(Sealed):
    """The highest rate at which enough requests are good, by bisection."""

    section: ClassVar = f"{NODE}.search"
    low_per_s: float = number(low=LEAST_RATE, high=MOST_RATE)
    """Rate that is tried first; if it fails, there is no answer."""
    high_per_s: float = number(low=LEAST_RATE, high=MOST_RATE)
    """Rate that is tried second; if it passes, it is the answer and the search ends."""
    good_share: float = number(0.95, **SHARE)
    """Share of requests that must be good at a rate."""
    tolerance: float = number(0.1, **SHARE)
    """End when the lowest failing rate is at most this share above the highest passing one."""
    max_trials: int = number(8, low=2, high=MOST_REQUESTS)
    """End after this many rates."""
    duration_s: float = number(10.0, **SECONDS)
    """Least seconds of arrivals at each rate; num_requests is raised to it. In a shorter time, a
    growing queue goes unnoticed, and the peak is too high."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds."""
        if self.high_per_s <= self.low_per_s:
            raise ConfigError(
                f"{self.section}.high_per_s: expected above low_per_s={self.low_per_s:g}, got "
                f"{self.high_per_s:g}. Raise it."
            )


@dataclass(kw_only=True)
class ServeScenario(Sealed):
    """Requests that arrive by themselves, whatever the engine does (open loop)."""

    part: ClassVar[str] = "serve"
    section: ClassVar = NODE
    num_requests: int | None = number(64, **REQUESTS)
    """Total number of requests, including later turns; null with a trace: all its rows."""
    warmup_requests: int = number(2, low=0, high=MOST_REQUESTS)
    """Requests before the timed ones, one at a time, not counted, with prompts of their own."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """When requests arrive."""
    max_concurrency: int | None = number(None, **REQUESTS)
    """Requests at the engine at once; later ones wait at the client, and the wait counts."""
    prompt: PromptLengths | None = None
    """Own tokens of each synthetic prompt; null with a trace or a file of prompts."""
    output: OutputLengths | None = None
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
    drain_s: float = number(60.0, low=0, high=MOST_S)
    """Seconds after the last arrival until requests that still run are cancelled."""
    max_duration_s: float | None = number(None, **SECONDS)
    """Limit in seconds of the warm-up (at least one request) and of each run at a rate. Figures
    then cover what was done and are not valid. null: no limit."""
    min_duration_s: float | None = number(None, **SECONDS)
    """Least seconds from the first counted arrival to the last; shorter is not valid."""
    search: PeakSearch | None = None
    """Search the highest rate that keeps the SLO; null: one run at arrivals.rate_per_s."""
    repeats: int = number(1, **REQUESTS)
    """Number of measurements, each with its own draws; above 1: means with 95 % intervals."""
    stop_share: float | None = number(None, **SHARE)
    """End when the interval of a request's mean time is at most this share of the mean to either
    side."""

    def check(self) -> None:
        """Raise ConfigError when settings are out of bounds or contradict each other."""
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
        lengths = ("prompt", "output", "prompts_file")
        if self.trace is not None:
            check_used(self, lengths, [], "a trace")
        elif self.prompts_file is not None:
            check_used(self, lengths, ["output", "prompts_file"], "a prompts_file")
            if not self.prompts_file.strip():
                raise ConfigError(f"{NODE}.prompts_file: expected a JSONL file or null, got ''.")
        else:
            check_used(self, lengths, ["prompt", "output"], "synthetic prompts")
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
        rate = ["rate_per_s"]
        if self.search is None:
            if self.arrivals.has_rate:
                check_used(self.arrivals, rate, rate, f"process={process}")
            return
        if not self.arrivals.has_rate:
            raise ConfigError(
                f"{NODE}.search: expected arrivals.process of poisson, gamma or constant, got "
                f"{process}. It has no rate to search."
            )
        check_used(self.arrivals, rate, [], "a search of rates")
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
        """Return the scenario with as many requests as a search needs at a rate."""
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
        """Return the scenario with draws of its own; repeat 0 keeps the seeds that were set."""
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
