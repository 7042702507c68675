"""Energy of one timed part, from the GPU's counter."""

from harness.measure.nvml import Gpu


class EnergyMeter:
    """Reads the counter when it is made and when it is asked.

    Args:
        gpu: the run's own; None where there is none.
    """

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu = gpu
        self._before_j = gpu.energy_j() if gpu else None

    def total_j(self) -> float | None:
        """Return the joules since it was made.

        None without a counter, or where the counter was started anew meanwhile.
        """
        after_j = self._gpu.energy_j() if self._gpu else None
        if self._before_j is None or after_j is None or after_j < self._before_j:
            return None
        return after_j - self._before_j


def energy_metrics(total_j: float | None, num_tokens: int) -> dict[str, float | None]:
    """Return the metrics of `total_j` joules for `num_tokens` output tokens."""
    return {
        "energy/total_j": total_j,
        "energy/j_per_token": total_j / num_tokens if total_j and num_tokens else None,
    }
