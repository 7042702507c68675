"""Settings of studies, and of the scenario parts that only they measure. Imports no torch."""

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final

from engine.errors import ConfigError
from engine.sealed import Sealed, choice, number
from harness.config.serve import MOST_LENGTH, MOST_S, REQUESTS, TOKENS

TIERS_PARTS: Final = (
    "fits",
    "ttft",
    "itl",
    "shared",
    "parked",
    "rounds",
    "long",
    "streamed",
    "together",
    "prefixed",
    "beside",
)
BARE_PARTS: Final = ("moves", "attention", "rates", "restore", "experts", "checkpoint")


@dataclass(kw_only=True)
class StepsScenario(Sealed):
    """Single steps: decodes of set batches, prefills, and short prompts one after another."""

    section: ClassVar = "scenario.steps"
    batches: list[int] = field(default_factory=list, metadata={"bounds": REQUESTS})
    """Batch sizes: sequences that decode at once, one batch after another."""
    prompt_tokens: int = number(128, **TOKENS)
    """Tokens of prompts before a decode."""
    steps: int = number(22, **TOKENS)
    """Timed decode steps of each batch."""
    warmup_tokens: int = number(0, low=0, high=MOST_LENGTH)
    """Tokens that the sequences of a batch decode in all before its timed steps."""
    prefills: list[int] = field(default_factory=list, metadata={"bounds": REQUESTS})
    """Numbers of prompts that are prefilled at once, one after another."""
    prefill_tokens: int = number(2048, **TOKENS)
    """Tokens of these prompts."""
    chunks: list[int] = field(default_factory=list, metadata={"bounds": TOKENS})
    """Lengths of prompts that are prefilled alone, one after another."""
    counter_s: float = number(0.0, low=0, high=MOST_S)
    """Seconds of decode during which NVML's counter of the link is read."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds or nothing is measured."""
        if not (self.batches or self.prefills or self.chunks or self.counter_s):
            raise ConfigError(
                "scenario.steps: expected batches, prefills, chunks or counter_s, got none. Set "
                "one, or scenario.steps=null."
            )


@dataclass(kw_only=True)
class TiersScenario(Sealed):
    """A KV cache over two tiers: what is kept, found, moved, read in place. Lengths in tokens."""

    section: ClassVar = "scenario.tiers"
    parts: list[str] = field(default_factory=list, metadata={"choices": TIERS_PARTS})
    """fits | ttft | itl | shared | parked | rounds | long | streamed | together |
    prefixed | beside; empty: none."""
    scale: float = number(1.0, low=0, low_open=True)
    """Factor for all lengths and counts below except `steps`; the results are at least 2."""
    prefix_tokens: int = number(8192, **TOKENS)
    """Tokens of the prefix whose first token is timed."""
    own_tokens: int = number(32, **TOKENS)
    """Tokens after a prefix, or new tokens of a turn."""
    shared_tokens: int = number(10_000, **TOKENS)
    """Tokens of the prefix that many requests share."""
    shared_requests: int = number(50, **TOKENS)
    """Requests that share the prefix of shared_tokens."""
    shared_output: int = number(128, **TOKENS)
    """Output tokens of each of these requests."""
    fit_requests: int = number(32, **TOKENS)
    """Requests that fit the GPU together."""
    fit_prompt: int = number(512, **TOKENS)
    """Prompt tokens of each of these requests."""
    fit_output: int = number(128, **TOKENS)
    """Output tokens of each of these requests."""
    rounds_output: int = number(512, **TOKENS)
    """Output tokens of each sequence, where sequences together exceed the GPU's KV tokens."""
    rounds_fill: int = number(10, **TOKENS)
    """Number of these sequences that fill the GPU's KV tokens."""
    rounds_excess: float = number(1.3, low=0, low_open=True)
    """Total of these sequences, in multiples of the GPU's KV tokens."""
    parked_tokens: int = number(4000, **TOKENS)
    """Tokens of a conversation before its timed turn."""
    parked_excess: float = number(52_000 / 39_344, low=0, low_open=True)
    """Total of all parked conversations, in multiples of the GPU's KV tokens."""
    turn_output: int = number(128, **TOKENS)
    """Output tokens of a timed turn."""
    running: int = number(8, **TOKENS)
    """Sequences that decode while a prefix loads."""
    loads: int = number(100, **TOKENS)
    """Number of times that the prefix is loaded."""
    alone_steps: int = number(700, **TOKENS)
    """Least number of steps of these sequences that are timed without a load; as many lie before
    each load."""
    beyond: list[float] = field(default_factory=lambda: [1.3, 3.0], metadata={"bounds": {"low": 1}})
    """Lengths of one sequence in multiples of the GPU's KV tokens; the longest possible sequence
    is measured for the last one."""
    streamed_tokens: int = number(34_000, **TOKENS)
    """Tokens by which one sequence exceeds the GPU's KV tokens, while weights are streamed too."""
    together_sequences: int = number(4, **TOKENS)
    """Sequences of the first of `beyond` that run at once, and one after another."""
    together_output: int = number(128, **TOKENS)
    """Output tokens of each of these sequences."""
    prefixed_sequences: int = number(16, **TOKENS)
    """Long sequences that share a prefix and run at once."""
    prefixed_tokens: int = number(40_000, **TOKENS)
    """Tokens of their prefix."""
    prefixed_total: int = number(52_000, **TOKENS)
    """Tokens of each at its end."""
    prefixed_output: int = number(24, **TOKENS)
    """Output tokens of each of these sequences."""
    beside_times: float = number(2.0, low=1)
    """Length of the sequence that decodes beside fit_requests, in multiples of the GPU's KV
    tokens."""
    steps: int = number(22, **TOKENS)
    """Decode steps that are timed."""
    counter_s: float = number(0.0, low=0, high=MOST_S)
    """Seconds of decode of the longest sequence during which NVML's counter of the link is read;
    for the part long."""

    def check(self) -> None:
        """Raise ConfigError for no lengths beyond the GPU's room."""
        if not self.beyond:
            raise ConfigError(f"{self.section}.beyond: expected some lengths, got none.")

    def scaled(self) -> "TiersScenario":
        """Return the work with `scale` applied."""
        numbers: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        if self.scale != 1:
            numbers |= {
                name: max(2, round(value * self.scale))
                for name, value in numbers.items()
                if isinstance(value, int) and name != "steps"
            }
        return TiersScenario(**numbers | {"scale": 1.0})

    @property
    def rounds_sequences(self) -> int:
        """Sequences that exceed the GPU's room together."""
        return math.ceil(self.rounds_excess * self.rounds_fill)


@dataclass(kw_only=True)
class BareScenario(Sealed):
    """What is measured without an engine."""

    section: ClassVar = "scenario.bare"
    parts: list[str] = field(default_factory=list, metadata={"choices": BARE_PARTS})
    """moves (of KV blocks) | attention (decode attention alone) | rates (all that plans use, kept
    for this machine) | restore (weights in codes, written as bf16) | experts (copies of experts
    and their products, in the shape of 30B-A3B) | checkpoint (one of random weights in the model's
    shape, kept in TIGHTFIT_HOME/bench); empty: none."""


@dataclass(kw_only=True)
class OverheadScenario(Sealed):
    """What the harness itself takes, with model=fake: scenarios against a bare loop in turn."""

    section: ClassVar = "scenario.overhead"
    num_requests: int = number(64, **TOKENS)
    """Requests of each measurement."""
    prompt_tokens: int = number(16, **TOKENS)
    """Prompt tokens of each request."""
    output_tokens: int = number(64, low=2, high=MOST_LENGTH)
    """Output tokens of each request; they are measured with one token too."""
    repeats: int = number(5, low=2, high=MOST_LENGTH)
    """Repeats of each figure."""


_SOURCE: Final = re.compile(r"(\w+):([\w./]+)(?:\*(\d+(?:\.\d+)?))?")
JUDGES: Final = (
    *("bench", "bench_experts", "bench_kv", "bench_lossless", "bench_quantised", "bench_serve"),
    *("overhead", "validate", "validate_grid"),
)


@dataclass(kw_only=True)
class StudyPoint(Sealed):
    """One point of a study."""

    title: str = ""
    """What tables call it."""
    experiment: str | None = None
    """An experiment that the point is, without the study's own settings. null: none."""
    overrides: list[str] = field(default_factory=list)
    """Overrides of this point; those of the command line hold over them."""
    take: dict[str, str] = field(default_factory=dict)
    """Setting -> POINT:PATH, where its value stands in the record of an earlier point, or
    POINT:PATH*FACTOR."""

    def sources(self) -> dict[str, tuple[str, str, float]]:
        """Return setting -> (point, path in its record, factor) of `take`."""
        found = {}
        for setting, source in self.take.items():
            parts = _SOURCE.fullmatch(source)
            if parts is None:
                raise ConfigError(
                    f"take.{setting}: expected POINT:PATH or POINT:PATH*FACTOR, got {source!r}."
                )
            found[setting] = (parts[1], parts[2], float(parts[3] or 1))
        return found


@dataclass(kw_only=True)
class StudyConfig(Sealed):
    """Points to run, each in a fresh process, and what their figures are held against."""

    section: ClassVar = "study"
    name: str
    """Name of the study in reports."""
    judge: str = choice(JUDGES)
    """Which judge makes rows from the records: bench | bench_experts | bench_kv | bench_lossless |
    bench_quantised | bench_serve |
    overhead | validate | validate_grid."""
    points: dict[str, StudyPoint] = field(default_factory=dict)
    """The points by name, in the order in which they run."""
    rows: list[str] = field(default_factory=list)
    """Names of the points to run; empty: all."""
    output: str | None = None
    """Document whose marked section is rewritten where all points ran on a GPU as they stand here;
    a path from the project's folder. null: none."""
    readme: str | None = None
    """The document whose marked section gets the few figures that matter most."""
    before: str | None = None
    """Folder of a run of an earlier version on this machine, whose figures stand beside those of
    the points; null: none."""

    def check(self) -> None:
        """Raise ConfigError when a point is not there, or takes what is not known before it."""
        unknown = [name for name in self.rows if name not in self.points]
        if unknown:
            raise ConfigError(
                f"study.rows: expected some of {', '.join(self.points)}, got {', '.join(unknown)}."
            )
        names = list(self.points)
        for name, point in self.points.items():
            for setting, (source, _, _) in point.sources().items():
                if source not in names[: names.index(name)]:
                    raise ConfigError(
                        f"study.points.{name}.take.{setting}: expected a value of an earlier "
                        f"point, got {point.take[setting]!r}."
                    )
                if self.rows and name in self.rows and source not in self.rows:
                    raise ConfigError(f"study.rows: {name} takes a value of {source}. Add it.")

    @property
    def chosen(self) -> list[str]:
        """Names of the points that run, in order."""
        return [name for name in self.points if not self.rows or name in self.rows]
