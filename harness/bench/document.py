"""The table as Markdown, and its place in a document."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from harness.bench.table import Found, Row, crossover, equal_tokens
from harness.errors import ConfigError

BEGIN: Final = "<!-- bench: written by `make bench` -->"
END: Final = "<!-- bench: end -->"
_MARKS: Final = {True: "met", False: "**missed**", None: ""}


def markdown(
    found: Found,
    made: Sequence[Row],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    about: str,
) -> str:
    """Return the section: conditions, rows, rates, staging, tokens, loads, what did not run."""
    lines = [about, "", "| what | figure | share or ratio | target | |", "|---|---|---|---|---|"]
    for row in made:
        share = "" if row.share is None else f"{row.share:.3f}"
        lines.append(
            f"| {row.what} | {row.figure} | {share} | {row.target} | {_MARKS[row.is_met]} |"
        )
    lines += ["", "Rates in GB/s by `engine.probe` before and after: " + _rates(before, after)]
    lines += _staging(found)
    same = equal_tokens(found)
    if same:
        wrong = [name for name, equal in same.items() if not equal]
        text = "equal to the resident engine's in every case and batch"
        if wrong:
            text = f"**not equal** to the resident engine's in {', '.join(wrong)}"
        lines += ["", f"Greedy tokens: {text}."]
    lines += ["", *_loads(found)]
    for case in found.values():
        reason = case.get("no_fit") or case.get("failed")
        if reason:
            lines += ["", f"{case['title']}: no figures: {reason}"]
    return "\n".join(lines) + "\n"


def _rates(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    parts = []
    for name, rate in before.items():
        if rate is not None:
            late = after.get(name)
            parts.append(f"{name.removesuffix('_gb_s')} {rate:.1f} / {late:.1f}" if late else name)
    return ", ".join(parts) + "."


def _staging(found: Found) -> list[str]:
    pairs, at = crossover(found)
    if not pairs:
        return []
    lines = [
        "",
        "uva, one prompt of so many tokens: read in place, or staged through slots first",
        "",
    ]
    lines += ["| tokens | in place, ms | staged, ms |", "|---|---|---|"]
    lines += [f"| {n} | {a * 1e3:.1f} | {b * 1e3:.1f} |" for n, a, b in pairs]
    text = "Staging is not faster at any of them."
    if at is not None:
        text = f"Staging is faster from {at} tokens on."
    return [*lines, "", text]


def _loads(found: Found) -> list[str]:
    lines = [
        "| engine | load, s | pinning, GiB/s | slots | of GiB | GPU peak, GiB | KV tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in found.values():
        if "plan" not in case:
            continue
        plan, phases = case["plan"], case["phases"]
        pin_s = phases.get("touch", 0.0) + phases.get("pin", 0.0)
        pinned = case["memory"]["host_pinned_bytes"] / 2**30
        rate = f"{pinned / pin_s:.1f} ({pinned:.2f} GiB)" if pinned and pin_s else ""
        peak = case["memory"]["gpu_peak_bytes"] / 2**30
        lines.append(
            f"| {case['title']} | {case['load_s']:.1f} | {rate} | {plan['num_slots']} | "
            f"{plan['num_slots'] * plan['slot_bytes'] / 2**30:.2f} | {peak:.2f} | "
            f"{plan['kv_tokens']} |"
        )
    return lines


def write_section(file: Path, section: str) -> None:
    """Replace what stands between the two marks of a document.

    Raises:
        ConfigError: The document lacks the marks.
    """
    text = file.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError(f"--output: expected the lines {BEGIN!r} and {END!r} once in {file}.")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    file.write_text(f"{head}{BEGIN}\n\n{section}\n{END}{tail}")
