"""The host link around the scenarios of one run: probed before and after.

While requests are timed the GPU's own counter of it is read by the sampler (harness.telemetry), too
rarely for a calibration; that is read here, before the engine is built.
"""

from engine.config import EngineConfig
from harness.door import EngineDoor
from harness.measure.nvml import Gpu
from harness.measure.pcie import calibrate
from harness.scenarios.transfers import PROBED_AFTER


class LinkWatch:
    """Probes of one worker, and copies of known size for the counter.

    Args:
        door: to the engine.
        config: of the engine; names the device.
    """

    def __init__(self, door: EngineDoor, config: EngineConfig) -> None:
        self._door, self._config = door, config
        self.factor: float | None = None
        """Payload bytes per byte that the counter of the GPU tells; None where it is not known."""

    def before(self, gpu: Gpu | None) -> dict[str, float | None]:
        """Probe, copy for the counter of `gpu`; return the rates by the probe's names."""
        rates = self._door.probe(self._config)
        # Without pinned memory nothing was probed, and nothing can be copied without a pause.
        if rates.get("h2d_gb_s") and gpu is not None:
            self.factor = calibrate(
                gpu.link_rx_gb_s, lambda seconds: self._door.stream(self._config, seconds)
            )
        return rates

    def after(self) -> dict[str, float | None]:
        """Probe again, once the engine is closed; return metrics."""
        rates = self._door.probe(self._config)
        return {metric: rates.get(name) for name, metric in PROBED_AFTER.items()}
