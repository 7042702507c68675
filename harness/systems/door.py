"""What the worker takes from the engine: its class, the link probe, and the clock of its times."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.asked.config import EngineConfig
from engine.async_llm import AsyncLLM
from engine.device.gpu import Gpu, open_gpu
from harness.config.schema import ScenarioConfig
from harness.observe.link import LinkFactors, calibrate
from harness.observe.machine_rates import read_rates, watched, write_rates
from harness.systems.base import nothing
from harness.work.drive import Engine
from harness.work.open_loop import Wait
from harness.work.predicted import PROBED_AFTER, predicted_times
from harness.work.serve import OpenDoor, RunAsync

Progress = Callable[[str, int, int], None]
"""Called with phase, bytes done and bytes in all.

The same type as in engine.build, which brings torch.
"""


BuildEngine = Callable[..., Engine]
"""`LLM.from_config`, or one like it: takes an EngineConfig and `progress`; of an exact door also
`reference`, which asks for every layer on demand, eager."""


def _plan_engine(config: EngineConfig) -> Any:
    """Plan the project's engine without allocating anything, or refuse what does not fit."""
    from engine import LLM  # noqa: PLC0415  imports torch

    return LLM.plan_for(config)


def _stream_engine_link(
    config: EngineConfig, seconds: float, *, in_place: bool = False
) -> tuple[int, float, float]:
    """Move host memory to the device that the engine will use, by copies or by a kernel's reads."""
    from harness.observe.probe import stream_link  # noqa: PLC0415  imports torch

    return stream_link(seconds, config.gpu.device, in_place=in_place)


@dataclass(frozen=True, kw_only=True)
class EngineDoor:
    """What the worker takes from the engine; tests put another one here."""

    load_code: Callable[[], BuildEngine]
    """Imports the engine; returns what builds it."""
    probe: Callable[[EngineConfig], dict[str, float | None]]
    """Measures the link: h2d_gb_s, d2h_gb_s, two_way_gb_s, ..."""
    stream: Callable[..., tuple[int, float, float]] = _stream_engine_link
    """Moves host memory to the device for so many seconds; returns bytes, begin and end on `clock`.
    With in_place=True a kernel reads it."""
    plan_for: Callable[[EngineConfig], Any] = _plan_engine
    """Plans an engine without allocating anything; raises CapacityError where it does not fit."""
    predict: Callable[[Any, Any, ScenarioConfig], dict[str, float | None]] = predicted_times
    """Returns what a plan of a model predicts of a scenario, by metric."""
    machine: Callable[[EngineConfig], Mapping[str, float | None]] = lambda _: {}
    """Returns more rates of the machine to plan with, by the names of engine.plan.rates."""
    clock: Callable[[], float] = time.perf_counter
    """The clock of the engine's token times."""
    clock_zero_s: float = 0.0
    """The machine's monotonic time at which `clock` reads 0."""
    wait: Wait = asyncio.sleep
    """Lets seconds of that clock pass."""
    is_exact: bool = True
    """Its greedy tokens must be the reference's; a peer's are compared and counted."""
    open_async: OpenDoor = AsyncLLM
    """Opens the asynchronous door of an engine that `load_code` gave."""
    run_async: RunAsync = asyncio.run
    """Runs a coroutine on an event loop in which `wait` lets time pass."""


def load_engine_code() -> BuildEngine:
    """Import the project's engine, and torch with it."""
    from engine import LLM  # noqa: PLC0415  takes seconds, and is measured

    return LLM.from_config


def probe_engine_link(config: EngineConfig) -> dict[str, float | None]:
    """Measure the host link of the device that the engine will use."""
    from harness.observe.probe import probe_link  # noqa: PLC0415  imports torch

    return probe_link(config.gpu.device)


def rates_of_cpu(config: EngineConfig) -> Mapping[str, float | None]:
    """Return what a CPU carries: kept, else measured and kept now, in a second or two.

    Rates that other processes disturbed are made again when they are ten minutes old.

    Of a GPU nothing: `tightfit run scenario=probe` measures it.
    """
    if config.gpu.device == "cuda" or (config.gpu.device == "auto" and open_gpu() is not None):
        return {}
    kept = read_rates(None)
    if kept is None or "sequence_overhead_s" not in kept.rates or kept.is_outdated():
        from harness.observe.probe import probe_rates  # noqa: PLC0415  imports torch

        write_rates(None, *watched(lambda: probe_rates("cpu")))
        kept = read_rates(None)
    return {} if kept is None else kept.rates


def engine_door() -> EngineDoor:
    """Return the door to the project's engine."""
    return EngineDoor(load_code=load_engine_code, probe=probe_engine_link, machine=rates_of_cpu)


def peer_door(load_code: Callable[[], BuildEngine]) -> EngineDoor:
    """Return the door to a peer that is stepped in this process."""
    return EngineDoor(load_code=load_code, probe=probe_engine_link, predict=nothing, is_exact=False)


class LinkWatch:
    """Probes of one worker, and traffic of known size for the counter."""

    def __init__(self, door: EngineDoor, config: EngineConfig) -> None:
        self._door, self._config = door, config
        self.factors = LinkFactors()
        """Factors of the GPU's counter."""

    def before(self, gpu: Gpu | None) -> dict[str, float | None]:
        """Probe, calibrate the counter of `gpu`; return the rates by the probe's names."""
        rates = self._door.probe(self._config)
        # Without pinned memory nothing was probed, and nothing can be copied without a pause.
        if rates.get("h2d_gb_s") and gpu is not None:
            read, stream = gpu.link_rx_gb_s, partial(self._door.stream, self._config)
            reads = partial(stream, in_place=True)
            self.factors = LinkFactors(
                copied=calibrate(read, stream),
                in_place=calibrate(read, reads) if rates.get("in_place_gb_s") else None,
            )
        return rates

    def after(self) -> dict[str, float | None]:
        """Probe again, once the engine is closed; return metrics."""
        rates = self._door.probe(self._config)
        return {metric: rates.get(name) for name, metric in PROBED_AFTER.items()}
