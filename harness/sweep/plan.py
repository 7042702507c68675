"""`mode=plan`: plan every point, print it, keep a sweep's table as CSV and figure."""

import csv
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine.errors import ConfigError
from engine.plan.memory import UNKNOWN_HOST_BYTES, MemoryPlan
from engine.plan.times import CONTEXT_TOKENS
from engine.plan.weight_format import LOSSLESS
from engine.sealed import GIB
from harness.config.compose import Plan, Point
from harness.config.engine import HOST_KV_FIELDS
from harness.config.schema import SIDES, RunConfig
from harness.console import EXIT_NOT_ALL_OK, EXIT_OK, columns, show
from harness.forecast.rows import FOR_QUEUE, WITHOUT_HOST_KV, Forecast, Row, forecast
from harness.point.describe import what_varies
from harness.point.show import build_report, capacity_lines, weight_lines
from harness.studies.ab import Sides, steps
from reports.record.text import number

_BAR: Final = 50
_ABSENT: Final = "-"


def point_lines(found: Forecast) -> list[str]:
    """Return one point as lines of text."""
    best = found.recommended
    rows = [COLUMNS, *(_cells(row) for row in found.rows)]
    lines = ["", *_title(found), *_lossless(found), *columns(rows, left={0, 1})]
    lines += [
        "  KV tokens: on the GPU. longest: one sequence over both tiers. at once: sequences of",
        "  max_model_len tokens. tok/s: decode at batch 1, and at as many as have room with",
        f"  {CONTEXT_TOKENS} tokens each. prefill, TTFT: of a prompt of (tokens).",
    ]
    lines += [*_longest(found), *_queue(found)]
    for row in found.rows:
        if not row.fits:
            lines.append(f"  {row.label} does not fit: {row.error}")
        lines += _staging(row)
    lines += _notes(found)
    if best is None:
        lines.append("  Nothing fits.")
        return lines
    choice = best.bytes.get("choice")
    what = f"{best.title}: {choice['chosen']} ({choice['why']})" if choice else best.title
    if best.is_lossless:
        placed = "" if best.moves_something else ", everything in GPU memory"
        some = "weights" if best.weights == LOSSLESS else "some weights"
        what += f"{';' if choice else ':'} {some} in 12-bit codes{placed}; the same tokens"
    lines += [f"  recommended: {what}", *weight_lines(best.bytes)]
    lines += [*capacity_lines(best.bytes["kv"]), *_host_kv(best)]
    lines += _bar("GPU", best.bytes["gpu"]["items"], best.bytes["gpu"]["budget_bytes"])
    lines += _host(best)
    lines.append(f"  rates: {best.predicted['rates']['source']}{_probed(found)}")
    lines.append(f"  run it: {_command(found, best)} (about {found.minutes(best):.1f} min)")
    return lines


def _host(row: Row) -> Iterator[str]:
    """Host memory by part, and what it takes where nothing is known of the machine's."""
    host = row.bytes["host"]
    if host["limit_bytes"] < UNKNOWN_HOST_BYTES / 2:
        yield from _bar("host", host["items"], host["limit_bytes"])
        return
    yield from _bar("host", host["items"], 0)
    reserve = UNKNOWN_HOST_BYTES - host["limit_bytes"]
    yield (
        f"       {(host['total_bytes'] + reserve) / GIB:.2f} GiB of host memory must be there, "
        f"{reserve / GIB:g} of it as a reserve: this card is in no machine that is known "
        "(gpu.host_gib says what it has)"
    )


def _command(found: Forecast, row: Row) -> str:
    """Return the command that runs a row: what was typed, less what the row has instead."""
    gone: tuple[str, ...] = () if row is found.chosen else ("offload", "planner.")
    if row.label == WITHOUT_HOST_KV:
        gone += ("kv=", *(f"kv.{name}=" for name in HOST_KV_FIELDS))
    kept = [item for item in found.overrides if not item.startswith(gone)]
    return command_line([*kept, *row.overrides])


def command_line(overrides: Sequence[str]) -> str:
    """Return the command that runs these overrides, as a shell takes it."""

    def quoted(item: str) -> str:
        if "'" in item and not {*item} & {*'"$`\\!'}:
            return f'"{item}"'
        return shlex.quote(item)

    kept = (quoted(item) for item in overrides if not item.startswith("mode="))
    return " ".join(["python -m harness", *kept])


def _longest(found: Forecast) -> Iterator[str]:
    """What a token of one sequence of max_model_len tokens takes, for each way that fits."""
    fitting = [row for row in found.rows if row.fits]
    if fitting:
        times = (f"{row.title} {row.predicted['decode_step_long_ms']:.4g}" for row in fitting)
        tokens = fitting[0].predicted["long_context_tokens"]
        yield f"  ms a token of one sequence of {tokens:,} tokens: {'; '.join(times)}."
    other = next((row for row in fitting if row.label == WITHOUT_HOST_KV), None)
    if other is not None:
        least = min(row.predicted["decode_step_long_ms"] for row in fitting)
        if other.predicted["decode_step_long_ms"] == least:
            yield f"  Shortest for such a sequence, without kv=cpu: {_command(found, other)}"


def _queue(found: Forecast) -> Iterator[str]:
    """What a queue gets of each way that fits, where what is best for one is shown."""
    fitting = [row for row in found.rows if row.fits]
    best = next((row for row in fitting if row.label == FOR_QUEUE), None)
    if best is not None:
        queue = best.predicted["queue"]
        lengths = f"{queue['prompt_tokens']} + {queue['output_tokens']} tokens"
        rates = "; ".join(f"{row.title} {number(row.queue_tokens_s)}" for row in fitting)
        yield f"  output tokens/s of {queue['requests']} requests of {lengths}: {rates}."
        yield f"  Best for such a queue: {_command(found, best)}"


def _staging(row: Row) -> Iterator[str]:
    """What the slots for staged prompts take from KV, and the setting that gives it back."""
    plan = row.plan
    size = plan.gpu_items["staging_slots"] if plan is not None else 0
    if plan is not None and size:
        yield (
            f"  {row.label}: prompts are copied through slots of {size / GIB:.2f} GiB, which KV "
            f"lacks; engine.uva_stage_tokens={plan.max_num_batched_tokens + 1} reads prompts in "
            "place too, which is slower, and gives it to KV."
        )


def _notes(found: Forecast) -> Iterator[str]:
    """What a run would warn of: of the settings as they are, else of what is recommended."""
    yield from (f"  {note}" for note in found.notes)
    row = found.chosen or found.recommended
    if row is not None and row.plan is not None:
        yield from (f"  {row.label}: {note}" for note in row.plan.notes)


def _probed(found: Forecast) -> str:
    """Say how old a probe is, or how to make one where the card is here."""
    if found.probed is not None:
        return f" (probed {found.probed.age()}; anew: python -m harness scenario=probe)"
    is_here = found.facts.host_available_bytes < UNKNOWN_HOST_BYTES
    return " (measure this machine's: python -m harness scenario=probe)" if is_here else ""


def _title(found: Forecast) -> Iterator[str]:
    config, facts = found.config, found.facts
    budget = next((r.bytes["gpu"]["budget_bytes"] for r in found.rows if r.bytes), 0)
    settings = config.engine
    length = next((r.bytes["kv"]["max_model_len"] for r in found.rows if r.bytes), None)
    dtype = next((r.bytes["dtype"] for r in found.rows if r.bytes), None)
    yield (
        f"{config.model.name} on {facts.name}: budget {budget / GIB:.2f} GiB "
        f"({found.memory_gib:.2f} x {settings.gpu_memory_utilization:g}), weights "
        f"{number(found.spec.weight_bytes(dtype) / GIB)} GiB, {length} tokens, "
        f"{settings.max_num_seqs} sequences"
    )


def _lossless(found: Forecast) -> Iterator[str]:
    """Say so where only lossless weights fit the GPU whole, or leave it least."""
    rows = {row.label: row for row in found.rows}
    none, auto, coded = rows["none"], rows["auto"], rows.get(LOSSLESS)
    dtype = none.bytes.get("dtype")
    row = coded if coded is not None and coded.fits else auto
    if coded is None or none.fits or not row.is_lossless:
        return
    moved = f"{row.host_weights_bytes / GIB:.2f} GiB of weights leave"
    what = moved if row.moves_something else "no layer leaves"
    word = "lossless" if row.weights == LOSSLESS else "auto"
    how = "It does with" if coded.fits else "It needs least of the host with offload=auto and"
    yield (
        f"{found.config.model.name} does not fit {found.facts.name} in {dtype}. {how} "
        f"engine.weight_format={word}: {what} the GPU, the tokens are the same, about "
        f"{number(row.predicted['decode_step_ms'])} ms a token."
    )


_CELLS: Final[Mapping[str, Callable[[Row, MemoryPlan], str]]] = {
    "host GiB": lambda row, _: f"{row.host_weights_bytes / GIB:.2f}",
    "KV tokens": lambda _, plan: str(plan.kv_tokens),
    "in host": lambda row, _: str(_host_kv_tokens(row)),
    "longest": lambda _, plan: str(plan.longest_tokens),
    "at once": lambda row, _: f"{row.bytes['kv']['max_concurrency']:.1f}",
    "tok/s, 1": lambda row, _: number(row.predicted["decode_tokens_s"]),
    "tok/s, full": lambda row, _: _predicted(row, "decode_tokens_full_s", "full_batch"),
    "prefill ms": lambda row, _: _predicted(row, "prefill_ms", "prefill_tokens"),
    "TTFT ms": lambda row, _: _predicted(row, "ttft_ms", "ttft_prompt_tokens"),
    "load s": lambda row, _: number(row.predicted["load_s"]),
}
"""Title of a column -> its cell of a plan that fits."""
COLUMNS: Final = ("offload", "fits", "GPU weights", *_CELLS)


def _predicted(row: Row, name: str, size: str) -> str:
    return f"{number(row.predicted[name])} ({row.predicted[size]})"


def _cells(row: Row) -> tuple[str, ...]:
    plan, weights = row.plan, row.bytes.get("gpu", {}).get("items", {}).get("weights")
    size = _ABSENT if weights is None else f"{weights / GIB:.2f}"
    cells = (_ABSENT if plan is None else cell(row, plan) for cell in _CELLS.values())
    return (row.title, "yes" if row.fits else "no", size, *cells)


def _host_kv(row: Row) -> Iterator[str]:
    """What the host tier is expected to cost and to save."""
    found = row.predicted["host_kv"]
    if found is None:
        return
    far = f", {found['in_place_bytes'] / GIB:.2f} GiB of KV read in place"
    yield (
        f"  a sequence of {found['context_tokens']:,} tokens: {number(found['decode_step_ms'])} ms "
        f"a token{far if found['in_place_bytes'] else ''}; a prefix of {found['prefix_tokens']:,} "
        f"comes from the host in {number(found['prefix_load_ms'])} ms, computed in "
        f"{number(found['prefix_compute_ms'])} ms"
    )


def _host_kv_tokens(row: Row) -> int:
    host = row.bytes["kv"]["host"]
    return 0 if host is None else int(host["tokens"])


def _bar(title: str, items: Mapping[str, int], limit: int) -> Iterator[str]:
    """One side's memory by part; each part is a letter of a bar that is the limit long."""
    parts = {name: size for name, size in items.items() if size}
    whole = max(limit, sum(parts.values()))
    letters, legend, total = "", [], 0
    for letter, (name, size) in zip("abcdefghijklmn", parts.items(), strict=False):
        total += size
        letters += letter * (round(_BAR * total / whole) - len(letters))
        legend.append(f"{letter} {name} {size / GIB:.2f}")
    yield f"  {title:<5}[{letters.ljust(_BAR, '.')}] {whole / GIB:.2f} GiB"
    yield f"       {', '.join(legend)}"


def sweep_table(found: Sequence[Forecast], names: Sequence[str]) -> list[str]:
    """Return all points of a sweep as a table, one line each, with the minutes of a run."""
    refused = sum(not shown(item).fits for item in found)
    total = sum(item.minutes(shown(item)) for item in found)
    takes = f"takes about {total:.0f} minutes"
    what = f"all fit; running them {takes}"
    if refused:
        others = "" if refused == len(found) else f"; running the others {takes}"
        what = f"without room: {refused} (plan.csv says why){others}"
    points = f"{len(found)} point{'s'[: len(found) != 1]}"
    return [*_points(found, names), f"  {points}, {what}."]


def comparison_table(sides: Mapping[str, Forecast], runs: Sequence[str], command: str) -> list[str]:
    """Return both sides of a comparison as a table, with the minutes of all its runs.

    `runs` has the side of each; `command` runs the comparison.
    """
    rows = {name: shown(item) for name, item in sides.items()}
    lines = _points(list(sides.values()), list(sides))
    lines += [f"  {name} does not fit: {row.error}" for name, row in rows.items() if not row.fits]
    if all(row.fits for row in rows.values()):
        minutes = sum(sides[name].minutes(rows[name]) for name in runs)
        lines.append(f"  run it: {command} ({len(runs)} runs, about {minutes:.0f} min)")
    return lines


def _points(found: Sequence[Forecast], names: Sequence[str]) -> list[str]:
    rows: list[Sequence[str]] = [("point", *COLUMNS, "run min")]
    for item, name in zip(found, names, strict=True):
        row = shown(item)
        minutes = f"{item.minutes(row):.1f}" if row.fits else _ABSENT
        rows.append((name, *_cells(row), minutes))
    return ["", *columns(rows, left={0, 1})]


def shown(found: Forecast) -> Row:
    """Return a point's row in a sweep: as it is set, or none where nothing is."""
    if found.config.planner.choose:
        return next(row for row in found.rows if row.label == "auto")
    return found.chosen or next(row for row in found.rows if row.label == "none")


def csv_row(found: Forecast, row: Row, name: str) -> dict[str, Any]:
    """Return one row of the CSV file; None for what is not known of a plan that does not fit."""
    config, plan, predicted = found.config, row.plan, row.predicted
    kv = row.bytes.get("kv", {})
    return {
        "point": name,
        "model": config.model.name,
        "gpu": found.facts.name,
        "memory_gib": found.memory_gib,
        "max_model_len": kv.get("max_model_len"),
        "max_num_seqs": config.engine.max_num_seqs,
        "offload": row.label,
        "weight_format": plan and row.weights,
        "overrides": " ".join(row.overrides),
        "fits": row.fits,
        "recommended": row is found.recommended,
        "gpu_weights_gib": plan and row.bytes["gpu"]["items"]["weights"] / GIB,
        "host_weights_gib": plan and row.host_weights_bytes / GIB,
        "kv_tokens": plan and plan.kv_tokens,
        "host_kv_tokens": plan and _host_kv_tokens(row),
        "longest_tokens": plan and plan.longest_tokens,
        "max_concurrency": plan and kv["max_concurrency"],
        "max_kept": plan and kv["max_kept"],
        **{name: predicted.get(name) for name in _PREDICTED},
        "queue_output_tokens_s": plan and predicted["queue"]["output_tokens_s"],
        "load_s": predicted.get("load_s"),
        "run_minutes": plan and found.minutes(row),
        "rates": plan and predicted["rates"]["source"],
        "error": row.error,
    }


CSV_NAME: Final = "plan.csv"
_PREDICTED: Final = (
    *("bytes_per_step", "decode_tokens_s", "full_batch", "decode_tokens_full_s"),
    *("prefill_tokens", "prefill_ms", "ttft_ms"),
)


def show_plans(plan: Plan, sides: Sides | None = None) -> int:
    """Print the plan of every point, or of both sides of a comparison; return the exit code.

    Raises ConfigError where settings contradict each other, the model's sizes are not known, or
    nothing that is asked for is of this project's engine.
    """
    if sides is not None:
        return _show_sides(plan.points[0], sides)
    varying = what_varies([point.overrides for point in plan.points])
    names = [" ".join(text.lstrip("+") for text in own) or str(n) for n, own in enumerate(varying)]
    named = list(zip(plan.points, names, strict=True))
    peers = [name for point, name in named if point.config.system.kind != "native"]
    own = [(point, name) for point, name in named if point.config.system.kind == "native"]
    if not own:
        _refuse_peer(plan.points[0].config)
    found = [forecast(point.config, tuple(point.overrides)) for point, _ in own]
    if not plan.multirun:
        (only,) = found
        show(point_lines(only))
        return EXIT_OK if only.recommended is not None else EXIT_NOT_ALL_OK
    path = Path(str(plan.points[0].composed.hydra.sweep.dir)) / CSV_NAME
    names = [name for _, name in own]
    write_csv(path, found, names)
    lines = sweep_table(found, names)
    why = "plans are of this project's engine, system=native"
    lines += [f"  not planned: {name} ({why})" for name in peers]
    lines.append(f"  every way to place the weights: {path}")
    problems = build_report(path.parent)
    lines += problems or [f"  as a figure: {path.with_suffix('.png')}"]
    show(lines)
    return EXIT_OK if all(shown(item).fits for item in found) else EXIT_NOT_ALL_OK


def _refuse_peer(config: RunConfig) -> None:
    """Refuse to plan what is not this project's engine."""
    if config.system.kind != "native":
        raise ConfigError(
            f"mode: expected run with system={config.system.kind}, got plan: plans and predicted "
            "times are of this project's engine. Choose system=native, or run it."
        )


def _show_sides(point: Point, sides: Sides) -> int:
    ab = point.config.ab
    assert ab is not None
    for side in sides:
        _refuse_peer(side.config)
    found = [forecast(side.config, tuple(side.overrides)) for side in sides]
    titles = {name: f"{name}: {' '.join(getattr(ab, name))}" for name in SIDES}
    show(
        comparison_table(
            dict(zip(titles.values(), found, strict=True)),
            [titles[step.side] for step in steps(ab)],
            command_line(point.overrides),
        )
    )
    return EXIT_OK if all(shown(item).fits for item in found) else EXIT_NOT_ALL_OK


def write_csv(path: Path, found: Sequence[Forecast], names: Sequence[str]) -> None:
    """Write every row of every point."""
    named = zip(found, names, strict=True)
    rows = [csv_row(item, row, name) for item, name in named for row in item.rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
