"""The KV cache's rows of a record as time series: what each tier held, one row a second."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

GIB: Final = 2**30
TIERS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("kv_gpu_owned_gib", ("gpu.owned",)),
    ("kv_gpu_used_gib", ("gpu.owned", "gpu.cached")),
    ("kv_cpu_used_gib", ("cpu.owned", "cpu.cached", "cpu.in_transit")),
)
"""Name of a series -> columns of blocks that it is the sum of."""


def kv_series(samples: Mapping[str, Any] | None) -> Iterator[tuple[str, float, float]]:
    """Yield (name, seconds since the part began, GiB), at most one row a second.

    Args:
        samples: `samples.kv` of a record; None: there are none.
    """
    if not samples:
        return
    places = {name: place for place, name in enumerate(samples["columns"])}
    due_s = 0.0
    for row in samples["rows"]:
        time_s = row[places["time_s"]]
        if time_s < due_s:
            continue
        due_s = time_s + 1
        for name, columns in TIERS:
            blocks = sum(row[places[column]] for column in columns)
            yield name, time_s, blocks * samples["block_bytes"] / GIB
