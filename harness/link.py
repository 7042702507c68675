"""The host link around the scenarios of one run: probed before and after.

The GPU's own counter of it is read by the sampler (harness.telemetry), not in this process.
"""

from dataclasses import asdict
from typing import Any, Final

from engine.config import EngineConfig
from harness.door import EngineDoor
from harness.measure.nvml import Gpu
from harness.measure.pcie import Calibration
from harness.scenarios.transfers import PROBED_AFTER

CALIBRATION_S: Final = 1.0
"""Seconds of copies for a calibration: ten rows of telemetry."""


class LinkWatch:
    """Probes of one worker, and copies of known size for the counter.

    Args:
        door: to the engine.
        config: of the engine; names the device.
    """

    def __init__(self, door: EngineDoor, config: EngineConfig) -> None:
        self._door, self._config = door, config
        self.calibration: dict[str, Any] | None = None
        """What was copied when, as plain data; None where nothing counts it."""

    def before(self, gpu: Gpu | None) -> dict[str, float | None]:
        """Probe, copy for the counter of `gpu`; return the rates by the probe's names."""
        rates = self._door.probe(self._config)
        # Without pinned memory nothing was probed, and nothing can be copied without a pause.
        if rates.get("h2d_gb_s") and gpu is not None and gpu.link_rx_gb_s() is not None:
            num_bytes, begin_s, end_s = self._door.stream(self._config, CALIBRATION_S)
            self.calibration = asdict(
                Calibration(num_bytes=num_bytes, begin_s=begin_s, end_s=end_s)
            )
        return rates

    def after(self) -> dict[str, float | None]:
        """Probe again, once the engine is closed; return metrics."""
        rates = self._door.probe(self._config)
        return {metric: rates.get(name) for name, metric in PROBED_AFTER.items()}
