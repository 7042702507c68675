"""FakeScript: what the engine of model=fake pretends. Imports no torch."""

from dataclasses import dataclass, field
from typing import Final

from engine.errors import ConfigError
from engine.sealed import Sealed, check_choice, check_number

CLOCKS: Final = ("scripted", "real")
FAILURES: Final = (
    "none",
    "no_fit",
    "oom",
    "host_oom",
    "error",
    "exit",
    "sigkill",
    "sigsegv",
    "hang",
)
_MOST: Final = 1e6
"""Of every time in its unit, and of GiB: sums of them stay exact enough to be held against."""
PLACES: Final = ("plan", "build", "reference", "step")


@dataclass(kw_only=True)
class FakeScript(Sealed):
    """What the engine of model=fake pretends; nothing is computed.

    A step gives every waiting prompt its first token, or else every running sequence its next one.
    """

    clock: str = "scripted"
    """scripted: steps take no real time and figures are exact | real: steps are waited for."""
    load_s: float = 0.5
    """Seconds of the load, as its phase read."""
    prefill_ms: list[float] = field(default_factory=lambda: [20.0])
    """Times of steps with prompts: the first takes the first of them, then in turn."""
    prefill_ms_per_token: float = 0.0
    """Added to such a step for each of its prompt tokens."""
    decode_ms: list[float] = field(default_factory=lambda: [5.0])
    """Times of steps that give next tokens, in turn."""
    ms_per_offloaded_gib: float = 0.0
    """Added to every step for each GiB of weights in host memory."""
    weights_gib: float = 2.0
    """Weights; offload moves a part of them to the host."""
    kv_gib: float = 1.0
    """KV cache, on the GPU."""
    gpu_gib: float = 16.0
    """What the card has where gpu.memory_gib is null."""
    gpu_peak_gib: float | None = None
    """Highest GPU memory in use; null: what was planned."""
    host_touched_gib: float = 0.0
    """Host memory that the worker really takes while it builds, for figures of memory."""
    fail: str = "none"
    """none | no_fit | oom | host_oom | error | exit | sigkill | sigsegv | hang."""
    fail_at: str = "step"
    """plan | build | reference | step (of warm-ups and timed requests)."""
    fail_after_steps: int = 0
    """Steps of warm-ups and timed requests before a failure at step."""
    refuse_every: int | None = None
    """Of timed requests every one whose number it divides is refused; null: none."""
    break_every: int | None = None
    """Of timed requests every one whose number it divides ends with an error in the step after that
    of its first token; null: none."""
    stop_after: int | None = None
    """Tokens after which an answer stops by itself, if it is longer; null: at its full length."""
    wrong_token_at: int | None = None
    """Output position at which the engine under test differs from the reference; null: none."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds or has no effect."""
        check_choice("model.fake.clock", self.clock, CLOCKS)
        check_choice("model.fake.fail", self.fail, FAILURES)
        check_choice("model.fake.fail_at", self.fail_at, PLACES)
        for name in ("prefill_ms", "decode_ms"):
            times = getattr(self, name)
            if not times:
                raise ConfigError(f"model.fake.{name}: expected at least one time, got none.")
            for time_ms in times:
                check_number(f"model.fake.{name}", time_ms, low=0, high=_MOST)
        for name in ("load_s", "prefill_ms_per_token", "ms_per_offloaded_gib", "kv_gib"):
            check_number(f"model.fake.{name}", getattr(self, name), low=0, high=_MOST)
        check_number("model.fake.host_touched_gib", self.host_touched_gib, low=0, high=_MOST)
        for name in ("weights_gib", "gpu_gib"):
            check_number(
                f"model.fake.{name}", getattr(self, name), low=0, high=_MOST, low_open=True
            )
        if self.gpu_peak_gib is not None:
            check_number("model.fake.gpu_peak_gib", self.gpu_peak_gib, low=0, high=_MOST)
        self._check_counts()

    def fails_at(self, place: str) -> bool:
        """Return whether a failure is scripted at one of PLACES."""
        return self.fail != "none" and self.fail_at == place

    def _check_counts(self) -> None:
        check_number("model.fake.fail_after_steps", self.fail_after_steps, low=0, integer=True)
        if self.fail_after_steps and not self.fails_at("step"):
            raise ConfigError(
                f"model.fake.fail_after_steps: expected 0 with fail={self.fail} and "
                f"fail_at={self.fail_at}, got {self.fail_after_steps}. Set model.fake.fail, and "
                "fail_at=step."
            )
        for name, low in (
            ("refuse_every", 1),
            ("break_every", 1),
            ("stop_after", 1),
            ("wrong_token_at", 0),
        ):
            value = getattr(self, name)
            if value is not None:
                check_number(f"model.fake.{name}", value, low=low, integer=True)
