"""Rows of `study=bench_serve`: what the server adds to the engine's asynchronous door."""

from functools import partial
from typing import Final

from harness.studies.table import (
    Found,
    Judged,
    LackError,
    Targets,
    Value,
    known,
    lacks,
    require,
)

LEAST_SHARE: Final = 0.95
"""Output tokens/s through HTTP over those of the engine alone, 64 requests at once."""
MOST_ADDED_MS: Final = {"p50": 3.0, "p99": 8.0}
"""TTFT through HTTP less that of the engine alone, at 50 requests a second."""
STREAMS: Final = 500
LEAST_STREAM_TOK_S: Final = 10.0
"""Output tokens/s of each of the streams."""


def judge(found: Found, **_: object) -> Judged:
    """Return the rows of the points that ran."""
    table = Targets(found, is_absolute=True)
    what = "output tokens/s, 64 at once: through HTTP / alone"
    table.add("full_alone full_http", what, _share, least=LEAST_SHARE)
    for name, most in MOST_ADDED_MS.items():
        what = f"TTFT {name} at 50 requests/s: ms that HTTP adds"
        table.add("rate_alone rate_http", what, partial(_added, name), most=most)
    what = f"{STREAMS} streams: output tokens/s of each"
    table.add("streams_http", what, _of_each, least=LEAST_STREAM_TOK_S)
    return Judged(rows=table.rows, lacks=lacks(found))


def _metric(found: Found, point: str, name: str) -> float:
    result = found[point]
    if result.lack is not None or result.record is None:
        raise LackError(f"{result.title}: {result.lack}")
    return known(result.record.metrics.get(name), f"{name} of {result.title}")


def _pair(found: Found, point: str, name: str) -> tuple[float, float]:
    """Return a metric of the engine alone and through HTTP."""
    return _metric(found, f"{point}_alone", name), _metric(found, f"{point}_http", name)


def _share(found: Found) -> Value:
    alone, http = _pair(found, "full", "serve/output_tok_s")
    return f"{http:,.0f} of {alone:,.0f} tokens/s", http / alone


def _added(statistic: str, found: Found) -> Value:
    alone, http = _pair(found, "rate", f"serve/ttft_ms/{statistic}")
    return f"{http:.2f} ms, alone {alone:.2f} ms", http - alone


def _of_each(found: Found) -> Value:
    tpot_ms = _metric(found, "streams_http", "serve/tpot_ms/mean")
    record = found["streams_http"].record
    require(record is not None and record.valid is not False, "not all requests were served")
    return f"{tpot_ms:.1f} ms a token", 1e3 / tpot_ms
