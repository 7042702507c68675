"""What an engine that is not this project's shows to the scenarios: plan, load, counts of steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from harness.work.drive import Clock


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """What the engine did in its last step; a harness.work.drive.StepStats."""

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    h2d_bytes: int = 0
    """Bytes copied from host to device."""
    in_place_bytes: int = 0
    """Bytes that the device read in host memory."""


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """What is known before a peer runs, in the place of the engine's memory plan."""

    max_model_len: int
    copied_bytes: int = 0
    """Copied from host to device by every step."""
    read_bytes: int = 0
    """Read by the device in host memory in every step."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """For the record."""

    def moved_per_step(self, num_tokens: int) -> tuple[int, int]:
        """Return bytes copied and bytes read in place by a step, whatever its tokens."""
        del num_tokens
        return self.copied_bytes, self.read_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for the record."""
        return {"max_model_len": self.max_model_len, **self.facts}


@dataclass(kw_only=True)
class PeerLoad:
    """Where the time of a load went; the part of engine.clock.LoadReport that is recorded."""

    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, none beside another."""
    busy: dict[str, float] = field(default_factory=dict)
    """Seconds of work by kind, over all threads."""
    moved: dict[str, int] = field(default_factory=dict)
    """Bytes by phase."""

    @contextmanager
    def phase(self, name: str, clock: Clock) -> Iterator[None]:
        """Count the time of a block as a phase."""
        begin_s = clock()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + clock() - begin_s


def no_probe(config: Any) -> dict[str, float | None]:
    """Measure no link: this system does not use the one of this machine, or hides how."""
    del config
    return {}


def no_prediction(plan: Any, spec: Any, scenario: Any) -> dict[str, float | None]:
    """Predict nothing: the cost model describes this project's engine."""
    del plan, spec, scenario
    return {}
