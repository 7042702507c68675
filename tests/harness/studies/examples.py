"""Results of points by hand: 8 GB a step in 0.2 s is 40 GB/s."""

from harness.studies.table import Result
from reports.record.record import RunRecord

BENCH_RATES = {"h2d": (41.0, 39.0), "in_place": (36.0, 34.0), "hbm_copy": (2100.0, 1900.0)}
KV_RATES = {"h2d": 50.0, "d2h": 40.0, "two_way": 100.0, "in_place": 50.0}
GIB = 2**30


def decode(step_s, copied=0, read=0, **changes):
    fields = {
        "step_s": step_s,
        "h2d_bytes": copied,
        "in_place_bytes": read,
        "planned_h2d_bytes": copied,
        "planned_in_place_bytes": read,
        "kv_bytes": 0,
        "replay_s": None,
        "tokens": [1, 2, 3],
    }
    return fields | changes


def record(samples, rates=None, *, status="ok", metrics=None, plan=None, environment=None, **spec):
    pairs = (
        {name: pair if isinstance(pair, tuple) else (pair, pair) for name, pair in rates.items()}
        if rates
        else {}
    )
    metrics = dict(metrics or {})
    for name, (before, after) in pairs.items():
        metrics |= {f"link/{name}_gb_s": before, f"link/{name}_after_gb_s": after}
    sizes = {"tie_word_embeddings": False, "num_hidden_layers": 32}
    return RunRecord(
        run_id="r",
        name="r",
        status=status,
        error=None if status == "ok" else {"type": "E", "message": f"{status} it is\nmore"},
        config={"engine": {"gpu_memory_utilization": 0.9}, "model": {"spec": sizes | spec}},
        environment=environment or {"emulated": False, "gpu": {"name": "NVIDIA H200"}},
        plan=plan,
        metrics=metrics,
        samples=samples,
    )


def case(title, decodes=(), *, prefills=None, chunks=None, counter=None, chosen=None, **spec):
    """A point with single steps."""
    memory = {"host_pinned_bytes": 8 * GIB, "gpu_peak_bytes": 13 * GIB}
    phases = {"touch": 1.0, "pin": 1.0, "allocate": 0.5, "convert": 1.5, "plan": 9.0}
    samples = {
        "build": {"seconds": 7.25, "phases": phases},
        "steps": {
            "decode": {str(batch): figures for batch, figures in dict(decodes).items()},
            "prefill": {num: {"seconds": value} for num, value in (prefills or {}).items()},
            "prefill_tokens": 2048,
            "chunk_s": chunks or {},
            "counter": counter,
            "read_bytes": 6_000_000_000,
            "memory": memory,
        },
    }
    plan = {
        "gpu": {"total_bytes": 14 * GIB},
        "host": {"total_bytes": 9 * GIB},
        "num_slots": 3,
        "slot_bytes": GIB // 2,
        "kv": {"tokens": 9000},
        "choice": {"chosen": chosen},
        "placements": {"resident": 6 * GIB, "prefetch": 8 * GIB},
    }
    return Result(title=title, record=record(samples, BENCH_RATES, plan=plan, **spec))


def kv_case(title="x", rates=KV_RATES, **parts):
    """A point with parts of the KV cache."""
    return Result(title=title, record=record({"tiers": {"parts": parts}}, rates))


def bare_case(rates=KV_RATES, **parts):
    """A point without an engine."""
    return Result(title="no engine", record=record({"bare": parts}, rates))


def failed(title, status="no_fit"):
    """A point that ended otherwise than ok."""
    return Result(title=title, record=record({}, status=status))
