"""An executor that samples what a script says, and an EngineCore on it; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.asked.request import Request, SampledToken, Sequence, TokenEvent
from engine.asked.sampling import SamplingParams
from engine.clock import StepBytes
from engine.run.core import EngineCore
from engine.schedule.step import ScheduledSequence, StepPlan
from tests.engine.specs import plan_small

EOS = 1
MOVED = StepBytes(h2d_bytes=10, in_place_bytes=20, kv_in_place_bytes=30, kv_copied_bytes=40)


@dataclass
class ScriptedFlight:
    """A step that is done once it was asked for twice."""

    executor: "ScriptedExecutor"
    tokens: dict[int, list[int]]
    num_asked: int = 0
    moved: StepBytes = MOVED
    used_graph: bool = True

    def is_done(self) -> bool:
        self.num_asked += 1
        return self.num_asked > 1

    def wait(self) -> float:
        self.executor.now_s += 1.0
        return self.executor.now_s

    def collect(self) -> Mapping[int, list[SampledToken]]:
        return {i: [SampledToken(t, -0.5) for t in tokens] for i, tokens in self.tokens.items()}

    def expert_counts(self) -> tuple[int, int, int]:
        return 5, 2, 40


@dataclass
class ScriptedExecutor:
    """Gives each sequence the next tokens of its script whenever it samples.

    It knows the token at each position as a device does: from the plan, or from what the step
    before sampled. A step that runs another than the script's is found.
    """

    yields: tuple[int, int]
    scripts: dict[str, list[list[int]]]
    """By request the tokens of one part after the other."""
    now_s: float = 0.0
    shapes: list[tuple[int, int]] = field(default_factory=list)
    """Decodes and prefills of each step."""
    _rows: list[int] = field(default_factory=list)
    _given: dict[int, list[int]] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> ScriptedFlight:
        for item in plan.scheduled:
            self._check(item)
        self.shapes.append((len(plan.decodes), len(plan.prefills)))
        tokens, self._rows = {}, []
        for item in plan.sampling:
            seq_id, script = item.sequence.seq_id, self.scripts[item.sequence.request.request_id]
            new = script.pop(0) if script else [0] * self.yields[1]
            tokens[seq_id] = new
            self._given.setdefault(seq_id, []).extend(new)
            self._rows += new + [-1] * (self.yields[1] - len(new))
        return ScriptedFlight(self, tokens)

    def settle(self) -> None:
        """Nothing is enqueued."""

    def _check(self, item: ScheduledSequence) -> None:
        rows = item.token_rows
        run = [self._rows[row] for row in rows] if rows else item.token_ids
        known = item.sequence.prompt_token_ids + self._given.get(item.sequence.seq_id, [])
        assert run == known[item.start : item.stop]


def open_core(
    yields: tuple[int, int], scripts: Mapping[str, list[list[int]]], *, overlap: bool = True
) -> tuple[EngineCore, ScriptedExecutor]:
    """Return a core on a script of its own."""
    executor = ScriptedExecutor(yields, {name: list(parts) for name, parts in scripts.items()})
    core = EngineCore(plan_small(), executor, eos_token_ids=frozenset({EOS}))
    core.overlap = overlap
    return core, executor


def run(core: EngineCore, names: list[str], **params: int) -> list[TokenEvent]:
    """Return the events of a request of each name until all ended."""
    for seq_id, name in enumerate(names):
        request = Request(
            request_id=name, prompt_token_ids=[5, 6, 7], params=SamplingParams(**params)
        )
        core.scheduler.add(Sequence(seq_id=seq_id, request=request))
    events = []
    while core.scheduler.has_unfinished:
        events += core.step()
    return events
