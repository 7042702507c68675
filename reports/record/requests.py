"""The file format of a run's requests: one row each, with the times of its tokens.

`requests.jsonl` grows as requests end; when the run ends the rows go to `requests.parquet`. A run
that was killed, or a machine without pyarrow, leaves the first. From these rows every latency and
rate can be worked out anew. Standard library only, but for pyarrow where a Parquet file is read.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from reports.record.telemetry import spool_rows

PARQUET_NAME: Final = "requests.parquet"
SPOOL_NAME: Final = "requests.jsonl"
COLUMNS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "part": ("text", "latency, throughput or serve"),
        "repeat": ("int", "number of the measurement, from 0"),
        "request_id": ("text", "as in result.json; in a search serve-TRIAL-NUMBER"),
        "num_prompt_tokens": ("int", "of the whole prompt, earlier turns too"),
        "arrival_s": ("float", "when it was sent, or its scheduled arrival (serve)"),
        "sent_s": ("float", "when it was handed to the engine (serve)"),
        "is_ramp_up": ("bool", "it arrived in the ramp and is not counted (serve)"),
        "is_cancelled": ("bool", "the harness took it back, or never sent it"),
        "finish_reason": ("text", "length or stop; null where it did not end by itself"),
        "error": ("text", "why it failed or was cancelled"),
        "token_times_s": ("floats", "when each output token was on the host"),
    }
)
"""Column -> its kind (text, int, float, bool, floats) and meaning; times on the clock of the
engine's tokens, CLOCK_MONOTONIC but for the scripted clock of model=fake."""


def request_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a spool; a line that is cut off, the last one after a kill, is left out.

    Raises:
        OSError: the file cannot be read.
    """
    for row in spool_rows(path):
        yield {name: row.get(name) for name in COLUMNS}


def read_requests(folder: Path) -> list[dict[str, Any]]:
    """Return the requests of a run's folder in the order in which they ended; none: empty.

    Raises:
        ImportError: there is a Parquet file and no pyarrow.
        OSError: a file cannot be read.
        ValueError: the Parquet file is broken.
    """
    parquet, spool = folder / PARQUET_NAME, folder / SPOOL_NAME
    if parquet.is_file():
        import pyarrow.parquet as pq  # noqa: PLC0415  takes a third of a second

        rows: list[dict[str, Any]] = pq.read_table(parquet).to_pylist()
        return rows
    return list(request_rows(spool)) if spool.is_file() else []
