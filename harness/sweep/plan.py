"""`mode=plan`: plan every point, print it, keep a sweep's table as CSV and figure."""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from catalogue.terminal import EXIT_OK, columns, show
from engine.device.gpu import open_gpu
from engine.errors import ConfigError
from engine.lines import WIDTH, by_words, indented, labelled, wrapped
from engine.plan.advise import CAN_MOVE, DEFAULT_TOKENS, off_gpu_bytes
from engine.plan.answer import rate
from engine.plan.cards import UNKNOWN_HOST_BYTES
from engine.plan.memory import MemoryPlan
from engine.plan.rates import rates_for
from engine.plan.sizes import kv_sizes
from engine.plan.times import CONTEXT_TOKENS
from engine.sealed import GIB
from harness.config.command import command_line
from harness.config.compose import Plan, Point
from harness.config.schema import SIDES, RunConfig
from harness.forecast.rows import (
    FOR_QUEUE,
    WITHOUT_HOST_KV,
    Forecast,
    Row,
    card_lines,
    forecast,
    lacks_card,
)
from harness.point.describe import what_varies
from harness.point.show import build_report, capacity_lines, weight_lines
from harness.studies.ab import Sides, steps
from harness.sweep.document import Document
from reports.record.text import number

_BAR: Final = 50
_ABSENT: Final = "-"


def point_lines(found: Forecast) -> list[str]:
    """Return one point as lines of text: the answer, and details where they are asked for."""
    lines, reported = [], found.config.plan.reported_kv_gib
    if reported is not None:
        lines += _other_lines(found, reported)
    if lacks_card(found.config):
        return [*lines, *card_lines(found)]
    lines += _answer(found)
    if found.config.plan.verbose:
        return [*lines, *_details(found)]
    return [
        *lines,
        *wrapped(f"Predicted from: {_rates(found)}. plan.verbose=true shows every way."),
    ]


def _other_lines(found: Forecast, reported_gib: float) -> list[str]:
    """Return what the engine that reported `reported_gib` would have to offload, as lines of text.

    Its figure is of its own memory: activations, graphs and context differ from this engine's.
    """
    spec, most = found.spec, found.spec.max_position_embeddings
    length = found.config.engine.max_model_len or min(most, DEFAULT_TOKENS)
    kv = kv_sizes(found.base, spec, spec.dtype, length)
    size, need = spec.weight_bytes() / GIB, kv.num_bytes(kv.blocks(length)) / GIB
    sequence = f"one sequence of {length:,} tokens needs {need:.2f} GiB"
    least = math.ceil(round((need - reported_gib) * 100, 6)) / 100
    reported = f"{round(reported_gib, 2) + 0.0:.2f} GiB"  # adding 0 makes -0 a 0
    head = f"Another engine reported {reported} for its KV cache; {sequence}"
    note = "The figure above describes that engine's memory, those below describe this engine's."
    if least <= 0:
        text = f"{head}. That fits, so no weights have to leave the GPU."
        return ["", *wrapped(text), *labelled("Note", note)]
    name = found.config.model.source.repo or found.config.model.name
    text = f"{head}. {least:.2f} GiB are missing. That engine has to offload at least as much:"
    if least > size:
        return [
            "",
            *wrapped(
                f"{head}. {least:.2f} GiB are missing, more than the {size:.2f} GiB of its "
                "weights, so offloading weights is not enough."
            ),
        ]
    vllm = f"vllm serve {name} --cpu-offload-gb {least:g} --max-model-len {length}"
    room = math.floor((size - least) * 100) / 100
    limits = f'{{0: "{room:g}GiB", "cpu": "{math.ceil(least + 1)}GiB"}}'
    accelerate = f'device_map="auto", max_memory={limits}'
    return [
        "",
        *wrapped(text),
        *labelled("vLLM", vllm, " \\"),
        *labelled("accelerate", accelerate),
        *labelled("Note", note),
    ]


def _answer(found: Forecast) -> list[str]:
    """Return the verdict, what fits or is faster, and the command that runs the best of it."""
    first, *rows = found.lines
    lines = ["", *wrapped(first), *rows]
    best: Any = found.best
    if best is not None or found.plan is not None:
        command = found.command_with(() if best is None else best["settings"])
        lines += labelled("Run it", command, " \\")
        if best is None:
            lines = _noted(lines, f"# about {found.minutes(found.plan):.1f} min")
    if best is not None and best["host_weights_bytes"]:
        lines += _host_need(found, best["host_total_bytes"])
    elif best is None and found.plan is not None and _takes_host(found.plan):
        lines += _host_need(found, found.plan.host_total_bytes)
    for note in _essential(found):
        lines += labelled("Note", note)
    return lines


def _noted(lines: list[str], comment: str) -> list[str]:
    """Return lines with a comment behind the last, or below it where it is too long."""
    if len(lines[-1]) + 2 + len(comment) <= WIDTH:
        return [*lines[:-1], f"{lines[-1]}  {comment}"]
    return [*lines, *labelled("", comment)]


def _takes_host(plan: MemoryPlan) -> bool:
    return bool(off_gpu_bytes(plan)) or plan.host_kv is not None


def _host_need(found: Forecast, num_bytes: int) -> list[str]:
    """Say what host memory it takes, where nothing is known of the machine's."""
    if found.facts.host_available_bytes < UNKNOWN_HOST_BYTES or found.config.gpu.host_gib:
        return []
    reserve = found.config.engine.host_reserve_gib
    return labelled(
        "Host",
        f"Needs {num_bytes / GIB + reserve:.2f} GiB of free host memory, including a "
        f"{reserve:g} GiB reserve. Not checked: this card is not in this machine.",
    )


def _essential(found: Forecast) -> Iterator[str]:
    """Yield what must be known although no details are asked for."""
    yield from found.notes
    answer: Any = found.answer
    notes = (answer.plan or {}).get("notes", ()) if found.plan is None else found.plan.notes
    said = ("fallback", "swap_space", "torch")
    yield from (note for note in notes if note.startswith(said) or CAN_MOVE in note)
    if found.facts.kind == "cuda" and open_gpu() is None:
        yield "This machine has no GPU. A run here emulates the card on the CPU, in float32."


def _rates(found: Forecast) -> str:
    """Say where predicted rates are from."""
    probe = None if found.probed is None else found.probed.rates
    return f"{rates_for(found.config.gpu, found.facts, probe).source}{_probed(found)}"


def _details(found: Forecast) -> list[str]:
    """Return every way side by side, and the memory of the best of them by part."""
    best = found.recommended
    rows = _used([COLUMNS, *(_cells(row) for row in found.rows)])
    lines = ["", *wrapped(_title(found)), *columns(rows, left={0, 1})]
    text = (
        "GPU GiB, host GiB: weights. KV tokens: on the GPU. longest: one sequence over both tiers. "
        "at once: sequences of max_model_len tokens. tok/s: decode at batch 1, and at the largest "
        f"batch whose KV fits with {CONTEXT_TOKENS} tokens each. prefill, TTFT: of a prompt of "
        "(tokens)."
    )
    lines += indented([text, *_longest(found), *_queue(found)])
    for row in found.rows:
        if not row.fits:
            lines += indented([f"{row.label}: {row.error}"])
        lines += indented(_staging(row))
    lines += indented(_notes(found))
    if best is not None:
        choice = best.bytes.get("choice")
        what = f"{best.title}: {choice['chosen']} ({choice['why']})" if choice else best.title
        lines += indented([f"recommended: {what}"])
    shown = found.as_set if found.as_set.fits else best
    if shown is not None:
        lines += _memory(found, shown)
    return [*lines, *indented([f"rates: {_rates(found)}"])]


def _memory(found: Forecast, row: Row) -> Iterator[str]:
    """Yield the memory of a row by part: of what is set where it fits, else of the best."""
    yield from indented([f"memory of {row.title}:", *map(str.strip, weight_lines(row.bytes))])
    yield from capacity_lines(row.bytes["kv"])
    yield from indented(_host_kv(row))
    yield from _bar("GPU", row.bytes["gpu"]["items"], row.bytes["gpu"]["budget_bytes"])
    limit = row.bytes["host"]["limit_bytes"]
    is_known = limit < UNKNOWN_HOST_BYTES / 2
    yield from _bar("host", row.bytes["host"]["items"], limit if is_known else 0)
    yield from indented([f"a run takes about {found.minutes(row.plan):.1f} min"])


def _long_ms(row: Row, tokens: object) -> str:
    """Return the time of a row's longest sequence, whose length is said where it is another."""
    own = row.predicted["long_context_tokens"]
    at = "" if own == tokens else f" (at {own:,})"
    return f"{row.title} {row.predicted['decode_step_long_ms']:.4g}{at}"


def _longest(found: Forecast) -> Iterator[str]:
    """What a token of one sequence of max_model_len tokens takes, for each way that fits."""
    fitting = [row for row in found.rows if row.fits]
    if fitting:
        tokens = fitting[0].predicted["long_context_tokens"]
        times = (_long_ms(row, tokens) for row in fitting)
        yield f"ms a token of one sequence of {tokens:,} tokens: {'; '.join(times)}."
        fitting = [row for row in fitting if row.predicted["long_context_tokens"] == tokens]
    other = next((row for row in fitting if row.label == WITHOUT_HOST_KV), None)
    if other is not None:
        least = min(row.predicted["decode_step_long_ms"] for row in fitting)
        if other.predicted["decode_step_long_ms"] == least:
            command = found.command_with(other.overrides)
            yield f"Shortest for such a sequence, without kv=cpu: {command}"


def _queue(found: Forecast) -> Iterator[str]:
    """What a queue gets of each way that fits, where what is best for one is shown."""
    fitting = [row for row in found.rows if row.fits]
    best = next((row for row in fitting if row.label == FOR_QUEUE), None)
    if best is not None:
        queue = best.predicted["queue"]
        lengths = f"{queue['prompt_tokens']} + {queue['output_tokens']} tokens"
        rates = "; ".join(f"{row.title} {number(row.queue_tokens_s)}" for row in fitting)
        yield f"output tokens/s of {queue['requests']} requests of {lengths}: {rates}."
        yield f"Best for such a queue: {found.command_with(best.overrides)}"


def _staging(row: Row) -> Iterator[str]:
    """What the slots for staged prompts take from KV, and the setting that gives it back."""
    plan = row.plan
    size = plan.gpu_items["staging_slots"] if plan is not None else 0
    if plan is not None and size:
        what = "weights are copied in every step" if plan.always_staged else "prompts are copied"
        how = "them in place" if plan.always_staged else "prompts in place too"
        yield (
            f"{row.label}: {what} through slots of {size / GIB:.2f} GiB, which KV "
            f"lacks; engine.uva_stage_tokens={plan.max_num_batched_tokens + 1} reads {how}, "
            "which is slower, and gives it to KV."
        )


def _notes(found: Forecast) -> Iterator[str]:
    """What a run would warn of: of the settings as they are, else of what is recommended."""
    row = found.chosen or found.recommended
    if row is not None and row.plan is not None:
        yield from (f"{row.label}: {note}" for note in row.plan.notes)


def _probed(found: Forecast) -> str:
    """Say how old a probe is, or how to make one where the card is here."""
    if found.probed is not None:
        return f" (probed {found.probed.age()}; anew: `tightfit run scenario=probe`)"
    is_here = found.facts.host_available_bytes < UNKNOWN_HOST_BYTES
    return " (measure this machine's: `tightfit run scenario=probe`)" if is_here else ""


def _title(found: Forecast) -> str:
    config, facts = found.config, found.facts
    budget = next((r.bytes["gpu"]["budget_bytes"] for r in found.rows if r.bytes), 0)
    settings = config.engine
    length = next((r.bytes["kv"]["max_model_len"] for r in found.rows if r.bytes), None)
    dtype = next((r.bytes["dtype"] for r in found.rows if r.bytes), None)
    return (
        f"{config.model.name} on {facts.name}: budget {budget / GIB:.2f} GiB "
        f"({found.memory_gib:.2f} x {settings.gpu_memory_utilization:g}), weights "
        f"{number(found.spec.weight_bytes(dtype) / GIB)} GiB, {length} tokens, "
        f"{settings.max_num_seqs} sequences"
    )


_IN_HOST: Final = "in host"
_CELLS: Final[Mapping[str, Callable[[Row, MemoryPlan], str]]] = {
    "host GiB": lambda row, _: f"{row.host_weights_bytes / GIB:.2f}",
    "KV tokens": lambda _, plan: str(plan.kv_tokens),
    _IN_HOST: lambda row, _: str(_host_kv_tokens(row)),
    "longest": lambda _, plan: str(plan.longest_tokens),
    "at once": lambda row, _: f"{row.bytes['kv']['max_concurrency']:.1f}",
    "tok/s, 1": lambda row, _: number(row.predicted["decode_tokens_s"]),
    "tok/s, full": lambda row, _: _predicted(row, "decode_tokens_full_s", "full_batch"),
    "prefill ms": lambda row, _: _predicted(row, "prefill_ms", "prefill_tokens"),
    "TTFT ms": lambda row, _: _predicted(row, "ttft_ms", "ttft_prompt_tokens"),
    "load s": lambda row, _: number(row.predicted["load_s"]),
}
"""Title of a column -> its cell of a plan that fits."""
COLUMNS: Final = ("offload", "fits", "GPU GiB", *_CELLS)


def _used(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return rows without the column of KV tokens in host memory where no row has any."""
    place = rows[0].index(_IN_HOST)
    if {row[place] for row in rows[1:]} <= {"0", _ABSENT}:
        return [[*row[:place], *row[place + 1 :]] for row in rows]
    return [list(row) for row in rows]


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
    way = "copied ahead" if found["is_copied"] else "read in place"
    far = f", {found['host_bytes'] / GIB:.2f} GiB of KV {way}"
    yield (
        f"a sequence of {found['context_tokens']:,} tokens: {number(found['decode_step_ms'])} ms "
        f"a token{far if found['host_bytes'] else ''}; a prefix of {found['prefix_tokens']:,} "
        f"comes from the host in {number(found['prefix_load_ms'])} ms, computed in "
        f"{number(found['prefix_compute_ms'])} ms"
    )
    together = found["together"] or []
    for first in together[:1]:
        yield (
            f"short ones beside it: {first['skipped_steps']} of their steps between two with it, "
            f"about {first['short_share']:.0%} of their rate without it"
        )
    yield from map(_together, together[1:])


def _together(found: Mapping[str, Any]) -> str:
    """Say what several sequences beyond the GPU's room do at once."""
    how = "each in every step"
    if found["in_turns"]:
        how = f"in turns of {found['turn_tokens']} tokens"
    return (
        f"{found['sequences']} of them at once, {how}: {number(found['tokens_s'])} tokens/s, at "
        f"most {number(found['wait_s'])} s between two tokens of each"
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
    yield from by_words(f"       {', '.join(legend)}", WIDTH, " " * 7)


def sweep_table(found: Sequence[Forecast], names: Sequence[str]) -> list[str]:
    """Return all points of a sweep as a table, one line each, with what is best for each."""
    if found[0].config.plan.verbose:
        lines = _points(found, names)
    else:
        rows: list[Sequence[str]] = [("point", "fits", "tok/s", "best settings", "tok/s")]
        rows += [_point(item, name) for item, name in zip(found, names, strict=True)]
        lines = ["", *columns(rows, left={0, 1, 3})]
    refused = sum(item.plan is None for item in found)
    total = sum(item.minutes(item.plan) for item in found)
    takes = f"takes about {total:.1f} min"
    what = f"all fit; running them {takes}"
    if refused:
        others = "" if refused == len(found) else f"; running the others {takes}"
        verb = "does" if refused == 1 else "do"
        what = (
            f"{refused} {verb} not fit with {'its' if refused == 1 else 'their'} settings{others}"
        )
    points = f"{len(found)} point{'s'[: len(found) != 1]}"
    return [*lines, *indented([f"{points}, {what}."])]


def _point(found: Forecast, name: str) -> Sequence[str]:
    """Return one line of a sweep: as it is set, and the best settings where those are others."""
    plan, best = found.plan, found.best
    now = _ABSENT if plan is None else rate((plan.predicted or {})["decode_tokens_s"])
    fits = "no" if plan is None else "yes"
    if best is None:
        return (name, fits, now, _ABSENT if plan is None else "as set", now)
    return (name, fits, now, " ".join(best["settings"]), rate(best["tokens_s"]))


def comparison_table(sides: Mapping[str, Forecast], runs: Sequence[str], command: str) -> list[str]:
    """Return both sides of a comparison as a table, with the minutes of all its runs.

    `runs` has the side of each; `command` runs the comparison.
    """
    lines = _points(list(sides.values()), list(sides))
    for name, item in sides.items():
        first, *others = item.lines if item.plan is None else [""]
        lines += [*wrapped(f"{name}: {first}"), *others] if item.plan is None else []
    if all(item.plan is not None for item in sides.values()):
        minutes = sum(sides[name].minutes(sides[name].plan) for name in runs)
        lines += labelled("Run it", command, " \\")
        lines = _noted(lines, f"# {len(runs)} runs, about {minutes:.0f} min")
    return lines


def _points(found: Sequence[Forecast], names: Sequence[str]) -> list[str]:
    rows: list[Sequence[str]] = [("point", *COLUMNS, "run min")]
    for item, name in zip(found, names, strict=True):
        row = item.as_set
        minutes = f"{item.minutes(row.plan):.1f}" if row.fits else _ABSENT
        rows.append((name, *_cells(row), minutes))
    return ["", *columns(_used(rows), left={0, 1})]


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
        "run_minutes": plan and found.minutes(plan),
        "rates": plan and predicted["rates"]["source"],
        "error": row.error,
    }


CSV_NAME: Final = "plan.csv"
_PREDICTED: Final = (
    *("bytes_per_step", "decode_tokens_s", "full_batch", "decode_tokens_full_s"),
    *("prefill_tokens", "prefill_ms", "ttft_ms"),
)


def show_plans(plan: Plan, sides: Sides | None = None, document: Document | None = None) -> int:
    """Print the plan of every point, or of both sides of a comparison; return the exit code.

    What was planned is put into `document` as data.
    Raises ConfigError where settings contradict each other, the model's sizes are not known, or
    nothing that is asked for is of this project's engine.
    """
    if sides is not None:
        found = _show_sides(plan.points[0], sides)
        _put(document, found)
        return EXIT_OK
    varying = what_varies([point.overrides for point in plan.points])
    names = [" ".join(own) or str(n) for n, own in enumerate(varying)]
    named = list(zip(plan.points, names, strict=True))
    peers = [name for point, name in named if point.config.system.kind != "native"]
    own = [(point, name) for point, name in named if point.config.system.kind == "native"]
    if not own:
        _refuse_peer(plan.points[0].config)
    if plan.multirun:
        _check_cards(own)
    found = [forecast(point.config, tuple(point.overrides), point.config_dir) for point, _ in own]
    _put(document, found)
    if not plan.multirun:
        (only,) = found
        show(point_lines(only))
        return EXIT_OK
    path = Path(str(plan.points[0].composed.hydra.sweep.dir)) / CSV_NAME
    names = [name for _, name in own]
    write_csv(path, found, names)
    lines = sweep_table(found, names)
    why = "plans are of this project's engine, system=native"
    lines += indented(f"not planned: {name} ({why})" for name in peers)
    lines.append(f"  every way to place the weights: {path}")
    problems = build_report(path.parent)
    lines += problems or [f"  as a figure: {path.with_suffix('.png')}"]
    show(lines)
    return EXIT_OK


def _put(document: Document | None, found: Sequence[Forecast]) -> None:
    """Put into a document, for each point, every way to place the weights, as plan.csv has them."""
    if document is None:
        return
    document["kind"] = "plan"
    document["points"] = [
        {
            "overrides": list(item.overrides),
            "fits": item.plan is not None,
            "says": item.lines[0],
            "best": item.best,
            "recommended": item.recommended and item.recommended.label,
            "ways": [csv_row(item, row, " ".join(item.overrides)) for row in item.rows],
        }
        for item in found
    ]


def _check_cards(own: Sequence[tuple[Point, str]]) -> None:
    """Refuse points of a sweep that have no card, and what is asked of one engine alone."""
    for point, name in own:
        if point.config.plan.reported_kv_gib is not None:
            raise ConfigError(
                "plan.reported_kv_gib: expected null in a sweep, as one engine reported it for one "
                "configuration. Remove it, or plan a single point."
            )
        if lacks_card(point.config):
            raise ConfigError(
                f"gpu: expected a card for each point of a planned sweep, got none for {name} and "
                "no GPU is here. Add gpu=NAME, or gpu=cpu to plan this CPU; a single point without "
                "a card shows all of them."
            )


def _refuse_peer(config: RunConfig) -> None:
    """Refuse to plan what is not this project's engine."""
    if config.system.kind != "native":
        raise ConfigError(
            f"mode: expected run with system={config.system.kind}, got plan: plans and predicted "
            "times are of this project's engine. Choose system=native, or run it."
        )


def _show_sides(point: Point, sides: Sides) -> list[Forecast]:
    ab = point.config.ab
    assert ab is not None
    for side in sides:
        _refuse_peer(side.config)
    found = [forecast(side.config, tuple(side.overrides), side.config_dir) for side in sides]
    titles = {name: f"{name}: {' '.join(getattr(ab, name))}" for name in SIDES}
    show(
        comparison_table(
            dict(zip(titles.values(), found, strict=True)),
            [titles[step.side] for step in steps(ab)],
            command_line(point.overrides, point.config_dir),
        )
    )
    return found


def write_csv(path: Path, found: Sequence[Forecast], names: Sequence[str]) -> None:
    """Write every row of every point."""
    named = zip(found, names, strict=True)
    rows = [csv_row(item, row, name) for item, name in named for row in item.rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
