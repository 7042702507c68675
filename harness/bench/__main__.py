"""`python -m harness.bench`: speeds of every backend against link and memory, in one run."""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from harness.bench.cases import Asked, Case, Limits, Work, cases, read_model
from harness.bench.document import check_document, markdown, write_section
from harness.bench.table import equal_tokens, rows
from harness.errors import EXIT_BAD_CONFIG, EXIT_NOT_ALL_OK, EXIT_OK, ConfigError
from harness.measure.nvml import open_gpu

ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENT: Final = ROOT / "docs" / "performance.md"
CASE_TIMEOUT_S: Final = 300
NO_CHANGE: Final = ("output", "json")
"""Options that change nothing of what is measured."""
SHAPE: Final = ("model", "model_layers", "prefill_tokens", "max_num_batched_tokens", "device")
"""Options that targets in seconds do not survive."""
Run = Callable[[Case, Limits], dict[str, Any]]


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(",") if part)
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers from 1, such as 1,16,64, got {text!r}")
    return found


def _splits(text: str) -> tuple[tuple[int, ...], ...]:
    found = tuple(tuple(int(n) for n in part.split("/")) for part in text.split(",") if part)
    if any(len(split) != 3 for split in found):
        raise argparse.ArgumentTypeError(f"expected group/num/step, such as 8/5/2, got {text!r}")
    return found


def _sizes(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", default="", help="cases to run, comma-separated; empty: all")
    add("--model", default="olmo7b", help="a model of conf/model (random weights)")
    add("--model-layers", type=int, default=None, help="layers instead of the model's own")
    add("--batches", type=_numbers, default=(1, 16, 64), help="sequences that decode at once")
    add("--prefetch", type=_splits, default=((8, 5, 2),), help="group/num/step, several by commas")
    add(
        "--prefetch-steps", type=_numbers, default=(), help="of the sweep; else 1 to layers off + 1"
    )
    add("--uva-gib", type=_sizes, default=(8.0,), help="GiB in host memory, several by commas")
    add("--memory-gib", type=float, default=15.9921875, help="memory of the small card")
    add("--utilization", type=float, default=0.85, help="of it; 0.9 where KV needs it")
    add("--resident-gib", type=float, default=44.45, help="memory that holds all, used to 0.9")
    add("--max-model-len", type=int, default=4096, help="tokens")
    add("--max-num-seqs", type=int, default=None, help="sequences at once; else the largest batch")
    add("--max-num-batched-tokens", type=int, default=8192, help="tokens of a step")
    add("--prompt-tokens", type=int, default=128, help="of prompts before a decode")
    add("--prefill-tokens", type=int, default=2048, help="of prompts whose prefill is timed")
    add("--steps", type=int, default=22, help="decode steps that are timed; resident: 4 times")
    add("--counter-s", type=float, default=10.5, help="decode beside NVML's counter; 0: do not")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: all is emulated")
    add("--output", type=Path, default=None, help="document whose marked section is rewritten")
    add("--json", type=Path, default=None, help="file for all figures, after each case")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print the table, write it into the document.

    Returns:
        0, 2 for a bad command line or no GPU, 3 where a target was missed, a case failed, or tokens
        are not those of the resident engine.
    """
    return bench(sys.argv[1:] if arguments is None else arguments, in_process)


def bench(arguments: Sequence[str], run: Run) -> int:
    """As `main`, with another way to run a case."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options, arguments, run)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CONFIG


def _run(options: argparse.Namespace, arguments: Sequence[str], run: Run) -> int:
    emulated = options.device == "cpu"
    output = _document(options)
    if not emulated and not torch.cuda.is_available():
        raise ConfigError(
            "bench: expected a CUDA GPU, found none. Run it on a machine with one; --device=cpu "
            "with a small --model runs the same flow emulated, whose figures say nothing of a GPU."
        )
    spec = read_model(options.model, options.model_layers)
    limits = Limits(
        model=options.model,
        num_layers=options.model_layers,
        max_num_seqs=options.max_num_seqs or max(options.batches),
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=min(options.max_model_len, spec.max_position_embeddings),
        device=options.device,
    )
    chosen = _select(options, spec.num_hidden_layers, is_tied=spec.tie_word_embeddings)
    card = None if emulated else torch.cuda.get_device_name()
    about = {"card": card, "command": list(arguments)}

    def save(cases: dict[str, Any], **more: Any) -> None:
        if options.json:
            options.json.write_text(json.dumps(about | {"cases": cases} | more))

    found = _measure(chosen, limits, run, save)
    made = rows(found, card, is_default=not _changed(options, SHAPE))
    section = markdown(found, made, _about(card, arguments))
    save(found, rows=[asdict(row) for row in made], section=section)
    if output is not None:
        write_section(output, section)
    print(section)
    if output is not None:
        print(f"bench: the table stands in {output}.", file=sys.stderr)
    failed = any("failed" in case for case in found.values())
    missed = any(row.is_met is False for row in made)
    wrong = not all(equal_tokens(found).values())
    return EXIT_NOT_ALL_OK if failed or missed or wrong else EXIT_OK


def _changed(options: argparse.Namespace, names: Sequence[str]) -> bool:
    defaults = _parser().parse_args([])
    return any(getattr(options, name) != getattr(defaults, name) for name in names)


def _document(options: argparse.Namespace) -> Path | None:
    """The document to write: the named one, or the project's where all is measured as usual."""
    if options.device == "cpu":
        if options.output:
            raise ConfigError("--output: expected none with --device=cpu: figures are emulated.")
        return None
    names = [name for name in vars(options) if name not in NO_CHANGE]
    found: Path | None = options.output
    if found is None and not _changed(options, names):
        found = DOCUMENT
    if found is not None:
        check_document(found)
    return found


def _select(options: argparse.Namespace, num_layers: int, *, is_tied: bool) -> list[Case]:
    every = cases(
        Asked(
            memory_gib=options.memory_gib,
            utilization=options.utilization,
            resident_gib=options.resident_gib,
            prefetch=options.prefetch,
            uva_gib=options.uva_gib,
            work=Work(
                batches=options.batches,
                prompt_tokens=options.prompt_tokens,
                prefill_tokens=options.prefill_tokens,
                steps=options.steps,
            ),
            counter_s=options.counter_s,
            sweep=options.prefetch_steps,
            num_layers=num_layers,
        )
    )
    if is_tied:  # a tied table is read whole by every step
        every = [case for case in every if case.name != "embed_in_place"]
    wanted = [name for name in options.rows.split(",") if name]
    unknown = sorted(set(wanted) - {case.name for case in every})
    if unknown:
        names = ", ".join(case.name for case in every)
        raise ConfigError(f"--rows: expected some of {names}, got {', '.join(unknown)}.")
    if "chosen" in wanted and "prefetch" not in wanted:
        raise ConfigError("--rows: chosen takes the KV room of prefetch. Add prefetch.")
    return [case for case in every if not wanted or case.name in wanted]


def _measure(
    chosen: Sequence[Case], limits: Limits, run: Run, save: Callable[[dict[str, Any]], None]
) -> dict[str, dict[str, Any]]:
    """Run the cases in turn; `save` gets all figures after each, so that none is lost."""
    found: dict[str, dict[str, Any]] = {}
    for number, planned in enumerate(chosen, start=1):
        case, begin = planned, time.perf_counter()
        if case.name == "chosen":
            base = found["prefetch"]
            if "plan" not in base:
                found[case.name] = {"title": case.title, "no_fit": "prefetch has no figures."}
                continue
            room, share = base["asked_kv_tokens"], base["asked_utilization"]
            if room is None:
                room, share = base["plan"]["kv_tokens"], base["utilization"]
            case = replace(case, kv_tokens=room, utilizations=(share,))
        figures = run(case, limits)
        found[case.name] = figures | {
            "title": case.title,
            "prefill_tokens": case.work.prefill_tokens,
        }
        save(found)
        what = "no fit" if "no_fit" in figures else figures.get("failed", "done")[:200]
        took_s = time.perf_counter() - begin
        print(f"[{number}/{len(chosen)}] {case.title}: {what}, {took_s:.1f} s", file=sys.stderr)
    return found


def in_process(case: Case, limits: Limits) -> dict[str, Any]:
    """Run one case in a fresh process; `failed` says what it failed of where it did."""
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder, "job.json"), Path(folder, "result.json")
        job.write_text(json.dumps({"case": case.to_dict(), "limits": asdict(limits)}))
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


def _about(card: str | None, arguments: Sequence[str]) -> str:
    command = shlex.join(["python", "-m", "harness.bench", *arguments])
    parts = [card or "a CPU"]
    if card:
        gpu = open_gpu()
        driver = gpu.facts()["driver"] if gpu else None
        parts.append(f"driver {driver or 'unknown'}")
    parts.append(f"torch {torch.__version__}")
    try:
        parts.append(f"triton {metadata.version('triton')}")
    except metadata.PackageNotFoundError:
        parts.append("no triton")
    text = f"`{command}` on {', '.join(parts)}, {datetime.now(UTC):%Y-%m-%d}."
    if card is None:
        return f"{text} **Emulated: these figures are a CPU's and say nothing of a GPU.**"
    return f"{text} Random bf16 weights, clocks not locked, medians."


if __name__ == "__main__":
    sys.exit(main())
