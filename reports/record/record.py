"""The file format of one run, `result.json`, and the project's only statistics on samples.

Standard library only. The harness writes records through this module; everything else in `reports`
reads them.
"""

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

SCHEMA_VERSION: Final = 1
RESULT_NAME: Final = "result.json"
STATE_NAME: Final = "state.json"
"""File with what a run does now, and how it ended; written before the record."""
STATUSES: Final = ("ok", "partial", "no_fit", "oom", "failed", "timeout", "killed", "skipped")
MEASURED: Final = ("ok", "partial")
"""Statuses of runs that have figures: of all parts, or of those that `error` says."""
SAMPLE_FLOORS: Final[Mapping[int, int]] = MappingProxyType({50: 11, 90: 64, 95: 130, 99: 662})
"""Percentile -> number of samples below which it is None."""


class RecordError(ValueError):
    """A record that cannot be written or read; the message names the file or the key."""


@dataclass(kw_only=True)
class RunRecord:
    """Record of one run: what it asked for, what it ran on and what was measured.

    Every value must be strict JSON: no NaN, no infinity, text keys. A statistic of an empty
    sample is None, never 0.
    """

    run_id: str
    name: str
    status: str
    """One of STATUSES."""
    error: dict[str, Any] | None = None
    """Keys type, message, phase (or None), traceback (or None); of a partial run also status (how
    the part ended that could not be measured), measured and missing (names of parts)."""
    valid: bool | None = None
    """Whether the figures may be used; None where nothing was judged."""
    reasons: list[str] = field(default_factory=list)
    """Why the run is not valid, and what to change."""
    started_at: str | None = None
    """ISO 8601 with a time zone."""
    duration_s: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    """Keys gpu, host, kv, placements, bytes_per_step; any of them may be absent."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Key emulated is true where the tiers were emulated on the CPU."""
    effective: dict[str, Any] = field(default_factory=dict)
    """Settings that were really used; fallbacks and warnings are lists of text."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """`area/quantity_unit[/statistic]` -> value."""
    samples: dict[str, Any] = field(default_factory=dict)
    """Rows per scenario: latency and load are lists of objects, throughput and serve objects."""
    schema_version: int = SCHEMA_VERSION

    def check(self) -> None:
        """Check the record against the format.

        Raises:
            RecordError: naming the key, the rule and the value.
        """
        _check_version(self.schema_version)
        if self.status not in STATUSES:
            allowed = ", ".join(STATUSES)
            raise RecordError(f"status: expected one of {allowed}, got {self.status!r}.")
        for name, types in _FIELD_TYPES.items():
            if not isinstance(getattr(self, name), types):
                raise RecordError(f"{name}: expected {_names(types)}, got {getattr(self, name)!r}.")
        for item in (*self.reasons, *self.overrides):
            if not isinstance(item, str):
                raise RecordError(f"reasons, overrides: expected text items, got {item!r}.")
        for name, value in {"duration_s": self.duration_s, **self.metrics}.items():
            if value is not None and not _is_number(value):
                raise RecordError(f"{name}: expected a number or null, got {value!r}.")
        if self.error is not None and not {"type", "message"} <= self.error.keys():
            keys = sorted(self.error)
            raise RecordError(f"error: expected the keys type and message, got {keys}.")

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the status, why it is so, and what was measured."""
        rows = [("status", self.status), *(("reason", reason) for reason in self.reasons)]
        if self.error is not None:
            rows.append((str(self.error["type"]), str(self.error["message"])))
        rows += [
            (name, f"{value:.6g}") for name, value in self.metrics.items() if value is not None
        ]
        cells = (f"<tr><th>{escape(n)}</th><td>{escape(text)}</td></tr>" for n, text in rows)
        return f"<table><caption>{escape(self.name)}</caption>{''.join(cells)}</table>"

    def to_json(self) -> str:
        """Return the record as strict JSON text.

        Raises:
            RecordError: when a value is not strict JSON or breaks the format.
        """
        self.check()
        document = asdict(self)
        _check_json(document, "")
        ordered = {"schema_version": document.pop("schema_version"), **document}
        return json.dumps(ordered, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "RunRecord":
        """Return the record that `to_json` wrote.

        Raises:
            RecordError: when the text is no JSON object, names another schema_version, or has
                missing, unknown or wrong keys.
        """
        try:
            document = json.loads(text, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            raise RecordError(f"not valid JSON: {error}.") from error
        if not isinstance(document, dict):
            raise RecordError(f"expected a JSON object, got {type(document).__name__}.")
        _check_version(document.get("schema_version"))
        unknown = sorted(document.keys() - {item.name for item in fields(cls)})
        if unknown:
            raise RecordError(f"unknown keys {unknown} for schema_version {SCHEMA_VERSION}.")
        missing = [key for key in _REQUIRED if key not in document]
        if missing:
            raise RecordError(f"missing keys {missing}.")
        record = cls(**document)
        record.check()
        _check_json(document, "")
        return record

    def write(self, path: Path) -> None:
        """Write the record to `path` in one rename, so readers see a whole file or none.

        Raises:
            RecordError: when a value is not strict JSON or breaks the format.
        """
        write_text_atomic(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> "RunRecord":
        """Return the record in the file `path`.

        Raises:
            RecordError: when the file is absent, unreadable or not a record; names the file.
        """
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise RecordError(f"{path}: no such file.") from error
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"{path}: cannot be read: {error}.") from error
        except RecordError as error:
            raise RecordError(f"{path}: {error}") from error


def write_text_atomic(path: Path, text: str) -> None:
    """Write UTF-8 text to `path` through a temporary file beside it and one rename."""
    write_bytes_atomic(path, text.encode("utf-8"))


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write bytes to `path` through a temporary file beside it and one rename.

    Raises:
        OSError: it cannot be written; names `path` and the size.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        what = f"{error.strerror or error} for {len(data):,} bytes"
        raise OSError(error.errno, what, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def percentile(values: Sequence[float], q: float) -> float | None:
    """Return the q-th percentile by linear interpolation (numpy's default), None when empty.

    Args:
        values: samples in any order, finite.
        q: 0 to 100.

    Raises:
        ValueError: when q is out of range or a value is not finite.
    """
    if not 0 <= q <= 100:
        raise ValueError(f"q: expected 0 to 100, got {q!r}.")
    _require_finite(values)
    if not values:
        return None
    ordered = sorted(values)
    position = q / 100 * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    fraction = position - below
    low, high = float(ordered[below]), float(ordered[above])
    if fraction >= 0.5:
        return high - (high - low) * (1 - fraction)
    return low + (high - low) * fraction


def summarise(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean, p50, p90, p95, p99, min, max and std of samples, in the samples' unit.

    A statistic is None where there are too few samples: percentiles follow SAMPLE_FLOORS, std
    (ddof=1) needs 2, the others 1.

    Raises:
        ValueError: when a value is not finite.
    """
    _require_finite(values)
    count = len(values)
    mean = math.fsum(values) / count if count else None
    std = None
    if mean is not None and count >= 2:
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    summary: dict[str, float | None] = {"mean": mean}
    for q, floor in SAMPLE_FLOORS.items():
        summary[f"p{q}"] = percentile(values, q) if count >= floor else None
    summary["min"] = float(min(values)) if count else None
    summary["max"] = float(max(values)) if count else None
    summary["std"] = std
    return summary


_FIELD_TYPES: Final[Mapping[str, tuple[type, ...]]] = MappingProxyType(
    {
        "run_id": (str,),
        "name": (str,),
        "error": (dict, type(None)),
        "valid": (bool, type(None)),
        "reasons": (list,),
        "started_at": (str, type(None)),
        "config": (dict,),
        "overrides": (list,),
        "plan": (dict, type(None)),
        "environment": (dict,),
        "effective": (dict,),
        "metrics": (dict,),
        "samples": (dict,),
    }
)

_REQUIRED: Final = tuple(
    item.name
    for item in fields(RunRecord)
    if item.default is MISSING and item.default_factory is MISSING
)


def _check_version(version: object) -> None:
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise RecordError(
            f"schema_version: expected {SCHEMA_VERSION}, got {version!r}."
            " Read the file with the version of the project that wrote it."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _names(types: tuple[type, ...]) -> str:
    return " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)


def _require_finite(values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"values[{index}]: expected a finite number, got {value!r}.")


def _refuse_constant(name: str) -> float:
    raise RecordError(f"not strict JSON: found {name}; expected a number or null.")


def _check_json(value: object, where: str) -> None:
    """Refuse what strict JSON cannot carry.

    Raises:
        RecordError: naming the key and the value.
    """
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecordError(f"{where}: expected a finite number or null, got {value!r}.")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RecordError(f"{where or 'record'}: expected text keys, got {key!r}.")
            _check_json(item, f"{where}.{key}" if where else key)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    else:
        raise RecordError(
            f"{where}: expected text, number, bool, null, list or dict,"
            f" got {type(value).__name__}. Convert it before recording."
        )
