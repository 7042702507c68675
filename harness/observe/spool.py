"""Rows while a run lasts and after it: the spool's tail for the live view, Parquet at the end."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from reports.record.rows import (
    TELEMETRY_COLUMNS,
    TELEMETRY_PARQUET,
    TELEMETRY_SPOOL,
    line_rows,
    spool_rows,
)


def replace_spool(
    spool: Path,
    target: Path,
    rows: Iterable[dict[str, Any]],
    kinds: Mapping[str, str],
    batch_rows: int,
) -> str | None:
    """Write rows as Parquet and remove the spool that they are from; return what kept it from that.

    The file appears in one rename; the spool stays until then, and where pyarrow is missing. Its
    columns are those of `kinds`, also where no row has them; `batch_rows` are held at once.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        import pyarrow as pa  # noqa: PLC0415  takes a third of a second
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        return (
            f"{target.name} was not written: {error}. The rows are in {spool.name}. Install "
            "pyarrow to get Parquet files."
        )
    try:
        types = {"floats": pa.list_(pa.float64()), "text": pa.string(), "bool": pa.bool_()}
        types |= {"float": pa.float64(), "int": pa.int64()}
        columns = pa.schema([(name, types[kind]) for name, kind in kinds.items()])
        with pq.ParquetWriter(temporary, columns, compression="zstd") as writer:
            batch: list[dict[str, Any]] = []
            for row in rows:
                batch.append(row)
                if len(batch) == batch_rows:
                    writer.write_table(pa.Table.from_pylist(batch, schema=columns))
                    batch = []
            writer.write_table(pa.Table.from_pylist(batch, schema=columns))
        temporary.replace(target)
    except (OSError, ValueError, TypeError) as error:  # pyarrow's errors are of these kinds
        temporary.unlink(missing_ok=True)
        return f"{target.name} was not written: {error}. The rows are in {spool.name}."
    spool.unlink()
    return None


class Background:
    """Writes in order on a thread of its own, so that timed loops wait for no disk.

    A write that failed raises its OSError from a later call.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._pending: deque[Future[None]] = deque()

    def submit(self, write: Callable[..., None], *arguments: Any) -> None:
        """Hand over a write; wait for nothing."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(write, *arguments))

    def wait(self) -> None:
        """Return when everything is written."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Wait; nothing can be written afterwards."""
        self._thread.shutdown()
        self.wait()


_BATCH_ROWS: Final = 6000
"""Rows that are held at once: ten minutes of them."""


class LineTail:
    """The rows that a file of JSON lines has grown by since the last look.

    The file need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of whole new lines; one that a kill cut short is passed over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(line_rows(whole.splitlines()))


def one_a_second(rows: list[dict[str, Any]], last_s: float) -> list[dict[str, Any]]:
    """Return the first row of each second of `time`, from the second after `last_s` on."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if int(row["time"]) > int(last_s):
            last_s = row["time"]
            kept.append(row)
    return kept


def write_parquet(run_dir: Path) -> str | None:
    """Turn the spool of a run into `telemetry.parquet` and remove it; return a warning if not.

    The file appears in one rename; the spool stays until then, and where pyarrow is missing.
    """
    spool, target = run_dir / TELEMETRY_SPOOL, run_dir / TELEMETRY_PARQUET
    if not spool.is_file():
        return "telemetry: the sampler wrote no row."
    kinds = {name: column.kind for name, column in TELEMETRY_COLUMNS.items()}
    lack = replace_spool(spool, target, spool_rows(spool), kinds, _BATCH_ROWS)
    return None if lack is None else f"telemetry: {lack}"
