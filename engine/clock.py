"""What loads and steps took and moved: phases on the critical path, times and bytes beside them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter


@dataclass(frozen=True)
class LoadReport:
    """Where the time of a load went."""

    total_s: float
    phases: dict[str, float]
    """Seconds on the critical path by phase; they do not overlap and sum to total_s."""
    busy: dict[str, float]
    """Seconds of work in other threads by kind, summed over threads."""
    moved: dict[str, int] = field(default_factory=dict)
    """Bytes that a phase brought into place; phases without bytes are absent."""


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What steps brought over the host link to the GPU, but for experts."""

    h2d_bytes: int = 0
    """Weight bytes copied to the GPU."""
    in_place_bytes: int = 0
    """Weight bytes read in place from host memory."""
    kv_in_place_bytes: int = 0
    """Keys and values that decodes read in place from host memory."""
    kv_copied_bytes: int = 0
    """Keys and values that were copied to the GPU ahead of decodes."""

    def __sub__(self, before: "StepBytes") -> "StepBytes":
        """Return what came since `before`."""
        return StepBytes(**{name: now - getattr(before, name) for name, now in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class StepStats(StepBytes):
    """What one step did; 0 is also what an engine does not tell."""

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    used_graph: bool = False
    duration_s: float = 0.0
    """Seconds until the host found its tokens there, from its own plan or from the end of the step
    before, whichever was later: where steps overlap, the time that it adds."""
    is_overlapped: bool = False
    """Whether it was planned and launched before the step before it was collected."""
    launch_s: float = 0.0
    """Host time from its plan to the last of its work enqueued."""
    wait_s: float = 0.0
    """Host time until its tokens came, what the host did meanwhile included; zero where they were
    there before the step behind it was launched, and on a CPU, which computes as it launches."""
    expert_hits: int = 0
    """Experts that its tokens were routed to and that lay on the GPU, each counted once a layer."""
    expert_misses: int = 0
    """Experts that its tokens were routed to and that crossed the host link."""
    expert_bytes: int = 0
    """What crossed it for them, in none of the other counts."""


class PhaseClock:
    """Attributes every moment since construction to one phase; `other` where none is open.

    Phases are opened by one thread and may nest: an inner phase interrupts the outer one.
    """

    def __init__(self) -> None:
        self._start = self._mark = perf_counter()
        self._stack = ["other"]
        self._phases: dict[str, float] = {}
        self._busy: dict[str, float] = {}
        self._moved: dict[str, int] = {}
        self._lock = threading.Lock()

    def _settle(self) -> None:
        now = perf_counter()
        self._add(self._stack[-1], now - self._mark)
        self._mark = now

    def _add(self, name: str, seconds: float) -> None:
        self._phases[name] = self._phases.get(name, 0.0) + seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the time inside to a phase."""
        self._settle()
        self._stack.append(name)
        try:
            yield
        finally:
            self._settle()
            self._stack.pop()

    def part(self, name: str, seconds: float) -> None:
        """Attribute seconds that the open phase has had, measured by what ran in it, to another."""
        self._settle()
        taken = min(seconds, self._phases[self._stack[-1]])
        self._add(self._stack[-1], -taken)
        self._add(name, taken)

    def add_busy(self, name: str, seconds: float) -> None:
        """Add work done in any thread."""
        with self._lock:
            self._busy[name] = self._busy.get(name, 0.0) + seconds

    def add_bytes(self, name: str, num_bytes: int) -> None:
        """Add bytes that a phase brought into place."""
        self._moved[name] = self._moved.get(name, 0) + num_bytes

    def report(self) -> LoadReport:
        """Close the account."""
        self._settle()
        return LoadReport(
            self._mark - self._start, dict(self._phases), dict(self._busy), dict(self._moved)
        )
