"""The door to the engine of model=fake."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.config import EngineConfig
from harness.door import EngineDoor, Progress
from harness.fake_config import FakeScript
from harness.systems.base import no_prediction, no_probe
from harness.systems.fake.clock import FakeClock, RealClock, ScriptedClock
from harness.systems.fake.engine import FakeLLM, plan_of
from harness.systems.fake.server import ScriptedServer


class FakeFactory:
    """Stands in for the class engine.LLM.

    Args:
        script: what its engines pretend.
        clock: of their steps.
    """

    def __init__(self, script: FakeScript, clock: FakeClock) -> None:
        self._script, self._clock = script, clock

    def from_config(self, config: EngineConfig, *, progress: Progress, reference: bool) -> FakeLLM:
        """Return an engine; see FakeLLM."""
        return FakeLLM(self._script, config, self._clock, progress=progress, reference=reference)


def fake_door(script: FakeScript) -> EngineDoor:
    """Return a door to an engine that pretends what the script says."""
    plan = partial(plan_of, script, reference=False)
    if script.clock == "real":
        real = RealClock()
        return EngineDoor(
            load_code=lambda: FakeFactory(script, real),
            probe=no_probe,
            plan_for=plan,
            predict=no_prediction,
            clock=real,
        )
    clock = ScriptedClock()

    def open_async(
        llm: Any, /, *, max_pending: int, on_step: Callable[[Any, float], None]
    ) -> ScriptedServer:
        return ScriptedServer(llm, clock, max_pending=max_pending, on_step=on_step)

    return EngineDoor(
        load_code=lambda: FakeFactory(script, clock),
        probe=no_probe,
        plan_for=plan,
        predict=no_prediction,
        clock=clock,
        clock_zero_s=time.perf_counter() - clock(),
        wait=asyncio.sleep,
        open_async=open_async,
        run_async=clock.run,
    )
