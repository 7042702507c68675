"""Load: from the start of a process to the first token, in phases that do not overlap."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from harness.work.drive import Clock, Engine, Outcome, run_requests
from harness.work.offline import engine_prompts

FIRST_PROMPT_TOKENS: Final = 32
"""Length of the prompt whose first token ends the load."""


def measure_load(
    build: Callable[[], Engine], *, spawned_s: float, clock: Clock
) -> tuple[dict[str, Any], Engine]:
    """Build the engine and take one token; return the start as a row and the engine.

    `import` runs from the start of the process to the engine's construction, `first_token` from its
    end to the token. Between them are the engine's own phases; what it left unnamed of its
    construction counts as `build`. The phases sum to `total_s`. The process was started at
    `spawned_s` on `clock`.
    """
    begin_s = clock()
    llm = build()
    built_s = clock()
    num_tokens = min(FIRST_PROMPT_TOKENS, llm.max_model_len - 1)
    prompts = engine_prompts(llm, 1, num_tokens, seed=0, stream="load")
    requests, _ = run_requests(llm, prompts, 1, clock=clock, prefix="load")
    (first,) = requests
    if not first.is_complete:
        raise RuntimeError(f"load: the first request gave no token: {first.error}")
    report = llm.load_report
    phases = {"import": begin_s - spawned_s}
    phases |= {str(name): float(seconds) for name, seconds in report.phases.items()}
    unnamed_s = (built_s - begin_s) - sum(report.phases.values())
    phases["build"] = phases.get("build", 0.0) + phases.pop("other", 0.0) + max(0.0, unnamed_s)
    end_s = first.token_times_s[0]
    phases["first_token"] = end_s - built_s
    row = {
        "total_s": end_s - spawned_s,
        "phases": phases,
        "busy": {str(name): float(seconds) for name, seconds in report.busy.items()},
        "moved_bytes": {str(name): int(size) for name, size in report.moved.items()},
    }
    return row, llm


def rates_gb_s(row: Mapping[str, Any]) -> dict[str, float]:
    """Return GB/s by kind: `weights` from their source into place, `pin` of host memory."""
    phases, moved = row["phases"], row.get("moved_bytes", {})
    weights = moved.get("read", moved.get("convert", 0))
    found = {}
    for kind, num_bytes, names in (
        ("weights", weights, ("read", "convert", "copy")),
        ("pin", moved.get("pin", 0), ("touch", "pin")),
    ):
        seconds = sum(phases.get(name, 0.0) for name in names)
        if num_bytes and seconds:
            found[kind] = num_bytes / seconds / 1e9
    return found


def summarise_loads(rows: Sequence[Mapping[str, Any]]) -> Outcome:
    """Return means over the warm starts as `load/...` and over the cold ones as `load/cold_...`.

    Rows are those of `measure_load` with `start` (a label) and `is_cold`.
    """
    metrics: dict[str, float | None] = {}
    for is_cold, prefix in ((False, "load/"), (True, "load/cold_")):
        starts = [row for row in rows if row["is_cold"] is is_cold]
        if not starts:
            continue
        metrics[f"{prefix}total_s"] = sum(row["total_s"] for row in starts) / len(starts)
        for part, infix in (("phases", ""), ("busy", "busy/")):
            for name in dict.fromkeys(key for row in starts for key in row[part]):
                seconds = sum(row[part].get(name, 0.0) for row in starts) / len(starts)
                metrics[_metric(prefix, infix, name)] = seconds
        for kind in ("weights", "pin"):
            rates = [rates[kind] for rates in map(rates_gb_s, starts) if kind in rates]
            if rates:
                metrics[f"{prefix}{kind}_gb_s"] = sum(rates) / len(rates)
    return Outcome(metrics=metrics, samples=list(rows))


def _metric(prefix: str, infix: str, phase: str) -> str:
    """Return the metric's name: load/read_s, load/busy/read_s, load/cold_read_s, ..."""
    if infix and prefix != "load/":
        return f"load/busy/cold_{phase}_s"
    return f"{prefix}{infix}{phase}_s"
