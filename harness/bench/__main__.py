"""`python -m harness.bench`: speeds of every backend against link and memory, in one run."""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from engine.probe import probe_link
from harness.bench.cases import Asked, Case, Limits, Work, cases, read_model
from harness.bench.counter import calibrate
from harness.bench.document import markdown, write_section
from harness.bench.table import rows
from harness.errors import EXIT_BAD_CONFIG, EXIT_NOT_ALL_OK, EXIT_OK, ConfigError
from harness.measure.nvml import open_gpu

ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENT: Final = ROOT / "docs" / "performance.md"
CASE_TIMEOUT_S: Final = 300


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _split(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split("/"))
    if len(found) != 3:
        raise argparse.ArgumentTypeError("expected group/num/step, such as 8/5/2")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness.bench", description=__doc__)
    parser.add_argument("--model", default="olmo7b", help="a model of conf/model (random weights)")
    parser.add_argument("--rows", default="", help="cases to run, comma-separated; default: all")
    parser.add_argument("--batches", type=_numbers, default=(1, 16, 64))
    parser.add_argument("--prefetch", type=_split, default=(8, 5, 2), help="group/num/step")
    parser.add_argument("--prefetch-steps", type=_numbers, default=(), help="more steps, batch 1")
    parser.add_argument("--uva-gib", type=float, default=8.0)
    parser.add_argument("--memory-gib", type=float, default=15.9921875, help="the small card")
    parser.add_argument("--utilization", type=float, default=0.85)
    parser.add_argument("--resident-gib", type=float, default=44.45, help="memory that holds all")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of decode prompts")
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=24, help="decode steps that are timed")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--counter-s", type=float, default=10.0, help="0: no NVML comparison")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--output", type=Path, default=None, help="document with the two marks")
    parser.add_argument("--json", type=Path, default=None, help="write all figures here")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print the table, write it into the document.

    Returns:
        0, 2 for a bad command line or no GPU, 3 where a target was missed or a case failed.
    """
    options = _parser().parse_args(arguments)
    try:
        return _run(options, sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CONFIG


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    emulated = options.device == "cpu"
    if not emulated and not torch.cuda.is_available():
        raise ConfigError(
            "bench: expected a CUDA GPU, found none. --device=cpu runs the same flow with the GPU "
            "emulated; its figures say nothing about a GPU."
        )
    if emulated and options.output:
        raise ConfigError("--output: expected none with --device=cpu: its figures are emulated.")
    spec = read_model(options.model)
    limits = Limits(
        model=options.model,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=min(options.max_model_len, spec.max_position_embeddings),
        device=options.device,
    )
    chosen = _select(options)
    card = "CPU, emulated" if emulated else torch.cuda.get_device_name()
    before = probe_link(options.device)
    calibration = None if emulated or not options.counter_s else calibrate()
    found = _measure(chosen, limits, calibration)
    after = probe_link(options.device)
    made = rows(found, before, card)
    section = markdown(found, made, before, after, _about(card, arguments))
    print(section)
    if options.json:
        options.json.write_text(json.dumps({"cases": found, "before": before, "after": after}))
    output = options.output or (None if emulated or options.rows else DOCUMENT)
    if output is not None:
        write_section(output, section)
    failed = any("failed" in case for case in found.values())
    missed = any(row.is_met is False for row in made)
    return EXIT_NOT_ALL_OK if failed or missed else EXIT_OK


def _select(options: argparse.Namespace) -> list[Case]:
    group, num, step = options.prefetch
    every = cases(
        Asked(
            memory_gib=options.memory_gib,
            utilization=options.utilization,
            resident_gib=options.resident_gib,
            group=group,
            num=num,
            step=step,
            uva_gib=options.uva_gib,
            shape=Work(
                batches=options.batches,
                prompt_tokens=options.prompt_tokens,
                prefill_tokens=options.prefill_tokens,
                steps=options.steps,
            ),
            counter_s=0.0 if options.device == "cpu" else options.counter_s,
            steps=options.prefetch_steps,
        )
    )
    wanted = [name for name in options.rows.split(",") if name]
    unknown = sorted(set(wanted) - {case.name for case in every})
    if unknown:
        names = ", ".join(case.name for case in every)
        raise ConfigError(f"--rows: expected some of {names}, got {', '.join(unknown)}.")
    if wanted and "chosen" in wanted and "prefetch" not in wanted:
        raise ConfigError("--rows: chosen takes the KV room of prefetch. Add prefetch.")
    if read_model(options.model).tie_word_embeddings:  # a tied table is read whole by every step
        every = [case for case in every if case.name != "embed_in_place"]
    return [case for case in every if not wanted or case.name in wanted]


def _measure(
    chosen: Sequence[Case], limits: Limits, calibration: dict[str, Any] | None
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for number, planned in enumerate(chosen, start=1):
        case = planned
        if case.name == "chosen":
            room = found["prefetch"].get("plan", {}).get("kv_tokens")
            if room is None:
                continue
            case = replace(case, kv_tokens=room)
        begin = time.perf_counter()
        figures = _in_process(case, limits)
        found[case.name] = figures | {"title": case.title, "calibration": calibration}
        what = "no fit" if "no_fit" in figures else figures.get("failed", "done")[:200]
        took_s = time.perf_counter() - begin
        print(f"[{number}/{len(chosen)}] {case.title}: {what}, {took_s:.1f} s", file=sys.stderr)
    return found


def _in_process(case: Case, limits: Limits) -> dict[str, Any]:
    """Run one case in a fresh process; what it failed of where it did."""
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder, "job.json"), Path(folder, "result.json")
        job.write_text(json.dumps({"case": case.to_dict(), "limits": vars(limits)}))
        command = [sys.executable, "-m", "harness.bench.measure", str(job), str(result)]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=CASE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {CASE_TIMEOUT_S} s"}
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            return {"failed": lines[-1] if lines else f"exit code {done.returncode}"}
        figures: dict[str, Any] = json.loads(result.read_text())
        return figures


def _about(card: str, arguments: Sequence[str]) -> str:
    gpu = open_gpu()
    driver = gpu.facts()["driver"] if gpu else None
    command = shlex.join(["python", "-m", "harness.bench", *arguments])
    parts = [card, f"driver {driver}" if driver else "no driver", f"torch {torch.__version__}"]
    return f"`{command}` on {', '.join(parts)}, {datetime.now(UTC):%Y-%m-%d}. Clocks not locked."


if __name__ == "__main__":
    sys.exit(main())
