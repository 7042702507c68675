"""ServeScenario: the node scenario.serve, its parts checked against each other."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from engine.errors import ConfigError
from engine.sealed import Sealed, check_number
from harness.traffic.bounds import (
    MOST_REQUESTS,
    MOST_S,
    check_counts,
    check_positive,
    check_repeats,
    check_size,
    check_used,
)
from harness.traffic.settings import (
    NODE,
    Arrivals,
    Lengths,
    Objectives,
    PeakSearch,
    Prefixes,
    Seeds,
    TraceSource,
    Turns,
)


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
