"""JSON lines of a run become a Parquet file at its end."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow


def replace_spool(
    spool: Path,
    target: Path,
    rows: Iterable[dict[str, Any]],
    schema: "Callable[[], pyarrow.Schema]",
    batch_rows: int,
) -> str | None:
    """Write rows as Parquet and remove the spool that they are from; return what kept it from that.

    The file appears in one rename; the spool stays until then, and where pyarrow is missing.

    Args:
        spool: what the rows are from.
        target: the Parquet file.
        rows: read once.
        schema: called once pyarrow is known to be there.
        batch_rows: rows that are held at once.
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
        columns = schema()
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
