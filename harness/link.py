"""The host link around the scenarios of one run: probed before and after, counted in between."""

from collections.abc import Callable
from typing import Final, TypeVar

from engine.config import EngineConfig
from harness.door import EngineDoor
from harness.measure.nvml import Gpu
from harness.measure.pcie import LinkCounter, calibrate
from harness.scenarios.transfers import PROBED_AFTER

COUNTER_PAUSE_S: Final = 0.25
"""Between two readings of the GPU's counter, not to disturb what is timed."""
T = TypeVar("T")


class LinkWatch:
    """Probes and counter of one worker.

    Args:
        door: to the engine.
        config: of the engine; names the device.
    """

    def __init__(self, door: EngineDoor, config: EngineConfig) -> None:
        self._door, self._config = door, config
        self._counter = LinkCounter(lambda: None, None)

    def before(self, gpu: Gpu | None) -> dict[str, float | None]:
        """Probe, and calibrate the counter of `gpu`; return the rates by the probe's names."""
        rates = self._door.probe(self._config)
        if gpu is not None:
            read, clock = gpu.link_rx_gb_s, self._door.clock
            factor = calibrate(read, self._stream, clock=clock)
            self._counter = LinkCounter(read, factor, clock=clock)
        return rates

    def _stream(self, seconds: float) -> tuple[int, float, float]:
        return self._door.stream(self._config, seconds)

    def counted(self, work: Callable[[], T]) -> tuple[T, float | None]:
        """Do the work; return its result and the GB/s that the GPU received, None if unknown."""
        return self._counter.measured(work, pause_s=COUNTER_PAUSE_S)

    def after(self) -> dict[str, float | None]:
        """Probe again, once the engine is closed; return metrics."""
        rates = self._door.probe(self._config)
        return {metric: rates.get(name) for name, metric in PROBED_AFTER.items()}
