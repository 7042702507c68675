"""`python -m harness.bench`: speeds of every backend against link and memory, in one run."""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from harness.bench import options as command_line
from harness.bench.cases import Asked, Case, Limits, Work, cases, read_model
from harness.bench.document import BENCH, KV, Marks, check_document, markdown, write_section
from harness.bench.kv_cases import GROUP, KVAsked, kv_cases
from harness.bench.kv_table import kv_rows
from harness.bench.kv_work import KVWork
from harness.bench.options import KV_SHAPE, NO_CHANGE, SHAPE
from harness.bench.table import Found, equal_tokens, lacks, rows
from harness.errors import EXIT_BAD_CONFIG, EXIT_NOT_ALL_OK, EXIT_OK, ConfigError
from harness.measure.nvml import open_gpu
from reports.record.record import write_text_atomic

ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENT: Final = ROOT / "docs" / "performance.md"
CASE_TIMEOUT_S: Final = 300
DESCRIPTION: Final = str(__doc__)
Run = Callable[[Case, Limits], dict[str, Any]]


@dataclass(frozen=True)
class _Group:
    """Cases that make one table."""

    chosen: list[Case]
    limits: Limits
    marks: Marks
    is_whole: bool
    """Whether all its cases were chosen."""
    is_default: bool
    """Whether the shape is that of the targets in seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print the table, write it into the document.

    Returns:
        0, 2 for a bad command line or no GPU, 3 where a target was missed or not measured, a case
        failed or has no figures, or tokens are not those of the resident engine.
    """
    return bench(sys.argv[1:] if arguments is None else arguments, in_process)


def bench(arguments: Sequence[str], run: Run) -> int:
    """As `main`, with another way to run a case."""
    options = command_line.parser(DESCRIPTION).parse_args(arguments)
    try:
        return _run(options, arguments, run)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CONFIG


def _run(options: argparse.Namespace, arguments: Sequence[str], run: Run) -> int:
    emulated = options.device == "cpu"
    command_line.check_files(options)
    if emulated and options.output:
        raise ConfigError("--output: expected none with --device=cpu: figures are emulated.")
    if not emulated and not torch.cuda.is_available():
        raise ConfigError(
            "bench: expected a CUDA GPU, found none. Run it on a machine with one; --device=cpu "
            "with a small --model runs the same flow emulated, whose figures say nothing of a GPU."
        )
    group = _group(options)
    output = _document(options, group)
    card = None if emulated else torch.cuda.get_device_name()
    about = {"card": card, "options": _measured_options(options), "command": list(arguments)}
    kept = _kept(options.json, about) if options.resume else {}

    def save(cases: dict[str, Any], **more: Any) -> None:
        if options.json:
            text = json.dumps(about | {"cases": kept | cases} | more)
            write_text_atomic(options.json, text)

    found = _measure(group.chosen, group.limits, run, save, kept)
    table = rows if group.marks is BENCH else kv_rows
    made = table(found, card, is_default=group.is_default)
    section = markdown(found, made, _about(card, arguments), card)
    save(found, rows=[asdict(row) for row in made], section=section)
    if output is not None:
        write_section(output, section, group.marks)
    print(section)
    if output is not None:
        print(f"bench: the table stands in {output}.", file=sys.stderr)
    missed = any(row.is_met is not True for row in made if row.target)
    wrong = not all(equal_tokens(found).values())
    return EXIT_NOT_ALL_OK if missed or wrong or lacks(found, card) else EXIT_OK


def _changed(options: argparse.Namespace, names: Sequence[str]) -> bool:
    return command_line.changed(options, names, DESCRIPTION)


def _measured_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options that change what is measured in a case, as JSON reads them."""
    chosen = {name: value for name, value in vars(options).items() if name not in NO_CHANGE}
    plain: dict[str, Any] = json.loads(json.dumps(chosen))
    return plain


def _kept(file: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The cases of a file of figures that have some; none where there is no file.

    Raises:
        ConfigError: The file is of another card or other options.
    """
    if not file.exists():
        return {}
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume: {file} cannot be read: {error}. Remove it.") from error
    for name in ("card", "options"):
        if before.get(name) != about[name]:
            raise ConfigError(
                f"--resume: expected figures with the same {name} in {file}, got other "
                "ones. Repeat its command line with other --rows, or name another --json."
            )
    return {
        name: case
        for name, case in before["cases"].items()
        if "failed" not in case and "no_fit" not in case
    }


def _document(options: argparse.Namespace, group: _Group) -> Path | None:
    """The document to write: the named one, or the project's where all is measured as usual."""
    names = [name for name in vars(options) if name not in NO_CHANGE]
    found: Path | None = options.output
    is_usual = group.is_whole and options.device != "cpu" and not _changed(options, names)
    if found is None and is_usual:
        found = DOCUMENT
    if found is not None:
        check_document(found, group.marks)
    return found


def _group(options: argparse.Namespace) -> _Group:
    """Choose the cases.

    Raises:
        ConfigError: There is no such case, or names of both tables are mixed.
    """
    wanted = [name for name in options.rows.split(",") if name]
    of_kv = [name for name in wanted if name.split("_")[0] == GROUP]
    if of_kv and len(of_kv) < len(wanted):
        raise ConfigError(
            f"--rows: expected cases of one table, got {', '.join(of_kv)} beside others. Run the "
            "command twice."
        )
    limits = Limits(
        model=options.kv_model if of_kv else options.model,
        num_layers=options.model_layers,
        max_num_seqs=options.max_num_seqs or max(options.batches),
        max_num_batched_tokens=(
            options.kv_batched_tokens if of_kv else options.max_num_batched_tokens
        ),
        device=options.device,
    )
    spec = read_model(limits.model, limits.num_layers)
    longest = spec.max_position_embeddings
    limits = replace(limits, max_model_len=min(options.max_model_len, longest))
    every = (
        _kv_cases(options, longest)
        if of_kv
        else _cases(options, spec.num_hidden_layers, is_tied=spec.tie_word_embeddings)
    )
    known = {case.name for case in every}
    unknown = sorted(set(wanted) - known - {GROUP})
    if unknown:
        names = ", ".join(case.name for case in every)
        raise ConfigError(f"--rows: expected some of {names}, got {', '.join(unknown)}.")
    if "chosen" in wanted and "prefetch" not in wanted:
        raise ConfigError("--rows: chosen takes the KV room of prefetch. Add prefetch.")
    is_whole = not wanted or GROUP in wanted or known <= set(wanted)
    return _Group(
        chosen=[case for case in every if is_whole or case.name in wanted],
        limits=limits,
        marks=KV if of_kv else BENCH,
        is_whole=is_whole,
        is_default=not _changed(options, KV_SHAPE if of_kv else SHAPE),
    )


def _kv_cases(options: argparse.Namespace, longest: int) -> list[Case]:
    work = replace(KVWork(), steps=options.steps).scaled(options.kv_scale)
    found = kv_cases(
        KVAsked(
            memory_gib=options.kv_memory_gib,
            utilization=options.kv_utilization,
            host_gib=options.kv_host_gib,
            turns_gib=options.kv_turns_gib,
            offload=options.kv_offload,
            short_len=min(options.kv_short_len, longest),
            work=work,
        )
    )
    if options.max_num_seqs is None:
        return found
    return [replace(case, max_num_seqs=options.max_num_seqs) for case in found]


def _cases(options: argparse.Namespace, num_layers: int, *, is_tied: bool) -> list[Case]:
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
    # A tied table is read whole by every step.
    return [case for case in every if not (is_tied and case.name == "embed_in_place")]


def _measure(
    chosen: Sequence[Case],
    limits: Limits,
    run: Run,
    save: Callable[[dict[str, Any]], None],
    kept: Found,
) -> dict[str, dict[str, Any]]:
    """Run the cases in turn; `save` gets all figures after each, so that none is lost.

    Those that are in `kept` do not run.
    """
    found: dict[str, dict[str, Any]] = {}
    for number, planned in enumerate(chosen, start=1):
        case, begin = planned, time.perf_counter()
        if case.name in kept:
            found[case.name] = dict(kept[case.name])
            continue
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
        job.write_text(
            json.dumps({"case": case.to_dict(), "limits": asdict(limits)}), encoding="utf-8"
        )
        command = [sys.executable, "-m", "harness.bench.measure", str(job), str(result)]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=CASE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _so_far(result) | {"failed": f"not done after {CASE_TIMEOUT_S} s"}
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            why = lines[-1] if lines else f"exit code {done.returncode}"
            return _so_far(result) | {"failed": why}
        return _so_far(result)


def _so_far(result: Path) -> dict[str, Any]:
    """The figures that a process has written; none where it wrote none."""
    figures: dict[str, Any] = (
        json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    )
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
