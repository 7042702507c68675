"""Hold predicted times against measured ones: `python -m harness.forecast.validate`.

By default: cuts of 8 layers of two models, resident, uva, prefetch and auto, decode steps and
prefills at two batches, each engine in a process of its own. `--full` adds models of full size.
`--grid` builds 12 splits by hand and auto on one budget, one after another in one process, and
holds auto against the best of them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from engine.errors import ConfigError
from harness.errors import EXIT_BAD_CONFIG, EXIT_NOT_ALL_OK, EXIT_OK
from harness.forecast.validate_cases import EngineCase, Scale, cut_cases, full_cases, grid_cases
from harness.forecast.validate_worker import Workers
from harness.observe.gpu import open_gpu
from harness.observe.machine_rates import write_rates
from reports.record.record import write_text_atomic
from reports.record.text import number

TOLERANCE: Final = 0.15
"""Share by which a predicted decode step may differ from the measured one."""
LEAST_SHARE: Final = 0.95
"""Of the best split by hand, what auto has to reach."""
GIVE_UP: Final = 1.25
"""A queue that takes so many times the best one's time so far is given up."""
Figures = dict[str, Any]
Run = Callable[[EngineCase | str], Figures]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the engines, print the tables; return the exit code.

    Returns:
        0, 2 for a bad command line, 3 where a decode step is not within 15 %, auto does not reach
        0.95 of the best split, or an engine failed.
    """
    workers = Workers()
    try:
        return validate(sys.argv[1:] if arguments is None else arguments, workers.run)
    finally:
        workers.close()


def validate(arguments: Sequence[str], run: Run) -> int:
    """As `main`, with another way to run an engine."""
    options = _parser().parse_args(arguments)
    try:
        cases = _cases(options)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_CONFIG
    rates = run(options.device)
    if "failed" in rates:
        sys.stderr.write(f"error: the probe failed: {rates['failed']}\n")
        return EXIT_NOT_ALL_OK
    write_rates(None if options.device == "cpu" else open_gpu(), rates)
    found = _measure(cases, rates, run, options)
    lines, is_good = (grid_lines if options.grid else point_lines)(cases, found)
    sys.stdout.write("\n".join(lines) + "\n")
    return EXIT_OK if is_good else EXIT_NOT_ALL_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.forecast.validate",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--models", default="olmo7b,mistral_7b", help="models of conf/model, by commas")
    add("--layers", type=int, default=8, help="of the cuts")
    add("--batches", default="1,16", help="decode batches, by commas")
    add("--prompt-tokens", type=int, default=256, help="of every prompt but the queue's")
    add("--max-model-len", type=int, default=512, help="tokens")
    add("--kv-sequences", type=int, default=16, help="that have room beside the weights")
    add("--full", action="store_true", help="add four engines of full size")
    add("--grid", action="store_true", help="auto against 12 splits instead")
    add("--freed", default="2,4", help="layers that the budgets of the grid lack, by commas")
    add("--requests", type=int, default=200, help="of the grid's queue; 0: latency alone")
    add("--queue-tokens", type=int, default=64, help="prompt and output of each of its requests")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: all is emulated")
    add("--json", type=Path, default=None, help="file for all figures, after each engine")
    add("--resume", action="store_true", help="take over the engines that --json holds already")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"expected numbers from 1, such as 1,16, got {text!r}.")
    return found


def _cases(options: argparse.Namespace) -> list[EngineCase]:
    batches = _numbers(options.batches)
    scale = Scale(
        num_layers=options.layers,
        batches=batches,
        prompt_tokens=options.prompt_tokens,
        max_model_len=options.max_model_len,
        max_num_seqs=max(64, *batches),
        kv_sequences=options.kv_sequences,
        device=options.device,
    )
    if options.resume and options.json is None:
        raise ConfigError("--resume: expected --json beside it, got none.")
    models = [name for name in options.models.split(",") if name]
    if options.grid:
        tokens = options.queue_tokens
        short = replace(scale, batches=(1,), prompt_tokens=tokens, max_model_len=2 * tokens)
        return [
            case
            for model in models
            for freed in _numbers(options.freed)
            for case in grid_cases(model, short, freed, options.requests, (tokens, tokens))
        ]
    found = [case for model in models for case in cut_cases(model, scale)]
    return [*found, *full_cases(scale)] if options.full else found


def _measure(
    cases: Sequence[EngineCase], rates: Figures, run: Run, options: argparse.Namespace
) -> dict[str, Figures]:
    """Run the engines in turn; all figures are kept after each."""
    found: dict[str, Figures] = {}
    if options.resume and options.json.is_file():
        found = dict(json.loads(options.json.read_text(encoding="utf-8"))["engines"])
    for index, case in enumerate(cases, start=1):
        key = key_of(case)
        if key in found and "failed" not in found[key]:
            continue
        begin_s = time.perf_counter()
        config = replace(case.config, measured_rates=rates)
        limit_s = _queue_limit_s(cases, found, case)
        found[key] = run(replace(case, config=config, queue_limit_s=limit_s))
        if options.json is not None:
            kept = {"rates": rates, "engines": found}
            write_text_atomic(options.json, json.dumps(kept, indent=1) + "\n")
        what = "no fit" if "no_fit" in found[key] else str(found[key].get("failed", "done"))[:200]
        took_s = time.perf_counter() - begin_s
        sys.stderr.write(f"[{index}/{len(cases)}] {key}: {what}, {took_s:.1f} s\n")
        sys.stderr.flush()
    return found


def _queue_limit_s(
    cases: Sequence[EngineCase], found: Mapping[str, Figures], case: EngineCase
) -> float | None:
    """Return how long a queue may take on this budget and still be near the best one."""
    times = [
        point["measured_s"]
        for other in cases
        if (other.model, other.budget) == (case.model, case.budget)
        for point in found.get(key_of(other), {}).get("points", [])
        if point["what"] == "queue"
    ]
    return GIVE_UP * min(times) if times else None


def key_of(case: EngineCase) -> str:
    """Return a case's name in the figures."""
    return "; ".join(part for part in (case.model, case.budget, case.name) if part)


def point_lines(
    cases: Sequence[EngineCase], found: Mapping[str, Figures]
) -> tuple[list[str], bool]:
    """Return the table of points and of memory, and whether every decode step is near enough."""
    head = "| engine | what | batch | predicted ms | measured ms | difference |"
    lines = [head, "|---" * 6 + "|"]
    memory = ["", "| engine | GPU planned GiB | peak | host planned GiB | RSS |", "|---" * 5 + "|"]
    decodes, is_good = [], True
    for case in cases:
        key, figures = key_of(case), found[key_of(case)]
        if "points" not in figures:
            is_good = False
            lines.append(f"| {key} | {figures.get('no_fit') or figures.get('failed')} | | | | |")
            continue
        for point in figures["points"]:
            share = point["predicted_s"] / point["measured_s"] - 1
            if point["what"] == "decode step":
                decodes.append(abs(share) <= TOLERANCE)
            lines.append(
                f"| {key} | {point['what']} | {point['batch']} | "
                f"{number(point['predicted_s'] * 1e3)} | {number(point['measured_s'] * 1e3)} | "
                f"{share:+.1%} |"
            )
        names = ("gpu_planned_gib", "gpu_peak_gib", "host_planned_gib", "host_rss_gib")
        memory.append(f"| {key} | {' | '.join(f'{figures[name]:.2f}' for name in names)} |")
    words = f"{sum(decodes)} of {len(decodes)} decode steps within {TOLERANCE:.0%}."
    return [*lines, *memory, "", words], is_good and bool(decodes) and all(decodes)


def grid_lines(cases: Sequence[EngineCase], found: Mapping[str, Figures]) -> tuple[list[str], bool]:
    """Return a table for each budget and what auto reaches, and whether that is enough."""
    lines, is_good = [], True
    for group in dict.fromkeys((case.model, case.budget) for case in cases):
        members = [case for case in cases if (case.model, case.budget) == group]
        lines += ["", ", ".join(group), "", "| split | decode step ms | queue s |", "|---|---|---|"]
        times: dict[str, dict[str, float]] = {"decode step": {}, "queue": {}}
        for case in members:
            figures = found[key_of(case)]
            for point in figures.get("points", []):
                if point["what"] in times:
                    times[point["what"]][case.name] = point["measured_s"]
            cells = [_shown(times["decode step"].get(case.name), 1e3)]
            queue_s = times["queue"].get(case.name)
            given_up = queue_s is None and "queue_given_up_s" in figures
            cells.append("given up" if given_up else _shown(queue_s, 1.0))
            label = case.name if "points" in figures else f"{case.name} (no fit)"
            is_good = is_good and "failed" not in figures
            lines.append(f"| {label} | {' | '.join(cells)} |")
        for what, name in (("decode step", "auto latency"), ("queue", "auto throughput")):
            text, reached = _reached(what, name, times[what])
            if what == "queue" and reached and not text and _given_up(members, found):
                best = f"{number(times['queue'][name])} s" if name in times["queue"] else "none"
                text = f"{name}: {best}; every split by hand that fits was given up in {what}."
                reached = name in times["queue"]
            lines += ["", text] if text else []
            is_good = is_good and reached
    return lines[1:], is_good


def _reached(what: str, name: str, times: Mapping[str, float]) -> tuple[str, bool]:
    """What share of the best split by hand auto reaches."""
    hand = {split: value for split, value in times.items() if not split.startswith("auto")}
    if not hand:
        return "", True
    best = min(hand, key=lambda split: hand[split])
    if name not in times:
        return f"{name}: it has no figures; the best by hand is {best}.", False
    share = hand[best] / times[name]
    return f"{name}: {share:.3f} of the best by hand ({best}) in {what}.", share >= LEAST_SHARE


def _given_up(members: Sequence[EngineCase], found: Mapping[str, Figures]) -> bool:
    return any("queue_given_up_s" in found[key_of(case)] for case in members)


def _shown(seconds: float | None, factor: float) -> str:
    return "-" if seconds is None else number(seconds * factor)


if __name__ == "__main__":
    sys.exit(main())
