"""The table as Markdown, and its place in a document."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.bench.table import Case, Found, Row, crossover, equal_tokens, lacks
from harness.errors import ConfigError


@dataclass(frozen=True)
class Marks:
    """Two lines of a document; what stands between them is written anew."""

    begin: str
    end: str


BENCH: Final = Marks("<!-- bench: written by `make bench` -->", "<!-- bench: end -->")
KV: Final = Marks("<!-- bench kv: written by `make bench-kv` -->", "<!-- bench kv: end -->")
GIB: Final = 2**30


def markdown(found: Found, made: Sequence[Row], about: str, card: str | None = None) -> str:
    """Return the section: conditions, rows, steps, staging, tokens, engines, what did not run.

    Args:
        found: figures by case.
        made: rows of the table.
        about: conditions, in words.
        card: name of the GPU; None: emulated.
    """
    lines = [about, "", "| what | measured | share or ratio | target | |", "|---|---|---|---|---|"]
    for row in made:
        share = "" if row.share is None else f"{row.share:.3f}"
        lines.append(f"| {row.what} | {row.figure} | {share} | {row.target} | {_verdict(row)} |")
    lines += [*_sweeps(found), *_staging(found)]
    same = equal_tokens(found)
    if same:
        wrong = [name for name, equal in same.items() if not equal]
        text = "equal to the resident engine's in every case and batch that both ran"
        if wrong:
            text = f"**not equal** to the resident engine's in {', '.join(wrong)}"
        lines += ["", f"Greedy tokens: {text}."]
    lines += [*_engines(found), *_rates(found)]
    for text in _remarks(found, card):
        lines += ["", text]
    return "\n".join(lines) + "\n"


def _verdict(row: Row) -> str:
    if not row.target:
        return ""
    return {True: "met", False: "**missed**", None: "**not measured**"}[row.is_met]


def _rates(found: Found) -> list[str]:
    names = ("h2d_gb_s", "d2h_gb_s", "two_way_gb_s", "in_place_gb_s", "hbm_copy_gb_s")
    lines = [
        "",
        "Rates by `engine.probe` in the process of each engine, before it was built / after it was "
        "closed, GB/s; shares are of the mean:",
        "",
        "| engine | host to device | back | both ways | in place | device memory, read + write |",
        "|---|---|---|---|---|---|",
    ]
    for case in found.values():
        cells = [_pair(case, name) for name in names]
        if any(cells):
            lines.append(f"| {case['title']} | {' | '.join(cells)} |")
    return lines


def _pair(case: Case, name: str) -> str:
    rates = [case.get(when, {}).get(name) for when in ("before", "after")]
    return " / ".join(f"{rate:.1f}" for rate in rates if rate)


def _sweeps(found: Found) -> list[str]:
    lines = []
    for case in found.values():
        for step, figures in case.get("sweep", {}).items():
            decode = figures["decode"]
            slots, size = figures["num_slots"], figures["slot_bytes"]
            cells = [step, str(slots), f"{slots * size / GIB:.2f}", decode.get("no_room", "")]
            if "no_room" not in decode:
                moved = decode["h2d_bytes"] / 1e9
                cells[3:] = [f"{decode['step_s'] * 1e3:.2f}", f"{moved:.3f}"]
                cells.append(f"{moved / decode['step_s']:.1f}" if moved else "")
            lines.append(f"| {' | '.join(cells)} |")
        if case.get("sweep"):
            head = "| prefetch_step | slots | of GiB | step, ms | copied, GB | GB/s |"
            title = f"{case['title']}: what each prefetch_step costs and gives"
            lines = ["", title, "", head, "|---|---|---|---|---|---|", *lines]
    return lines


def _staging(found: Found) -> list[str]:
    pairs, at = crossover(found)
    if not pairs:
        return []
    lines = [
        "",
        f"{found['uva_in_place']['title'].rpartition(',')[0]}: one prompt of so many tokens, read "
        "in place or staged through slots first",
        "",
        "| tokens | in place, ms | staged, ms |",
        "|---|---|---|",
    ]
    lines += [f"| {n} | {a * 1e3:.1f} | {b * 1e3:.1f} |" for n, a, b in pairs]
    text = "Staging is not faster at the largest of them."
    if at is not None:
        text = f"Staging is faster from {at} tokens on."
    return [*lines, "", text]


def _engines(found: Found) -> list[str]:
    lines = [
        "",
        "| engine | load, s | weights ready, s | pinned, GiB | pinning, GiB/s | slots | of GiB "
        "| GPU peak, GiB | KV tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in found.values():
        if "plan" not in case or "memory" not in case:
            continue
        plan, phases, memory = case["plan"], case["phases"], case["memory"]
        pin_s = phases.get("touch", 0.0) + phases.get("pin", 0.0)
        ready_s = pin_s + sum(phases.get(name, 0.0) for name in ("allocate", "convert"))
        pinned = memory["host_pinned_bytes"] / GIB
        cells = [
            case["title"],
            f"{case['load_s']:.1f}",
            f"{ready_s:.1f}",
            f"{pinned:.2f}" if pinned else "",
            f"{pinned / pin_s:.1f}" if pinned and pin_s else "",
            str(plan["num_slots"]),
            f"{plan['num_slots'] * plan['slot_bytes'] / GIB:.2f}",
            f"{memory['gpu_peak_bytes'] / GIB:.2f}",
            str(plan["kv_tokens"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _remarks(found: Found, card: str | None) -> Iterator[str]:
    """What did not run, and what ran otherwise than asked."""
    yield from lacks(found, card)
    for case in found.values():
        if case.get("utilization") != case.get("asked_utilization"):
            yield (
                f"{case['title']}: gpu_memory_utilization {case['utilization']:g} instead of "
                f"{case['asked_utilization']:g}, where KV has no room for the largest batch."
            )


def check_document(file: Path, marks: Marks = BENCH) -> None:
    """Refuse a document without the two marks, before anything is measured.

    Args:
        file: the document.
        marks: of its section.

    Raises:
        ConfigError: It cannot be read, or does not hold each mark once, in order.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output: expected a document to rewrite, got {file}: {error.strerror}. Name one "
            f"that holds the lines {marks.begin} and {marks.end}."
        ) from error
    begin, end = marks.begin, marks.end
    is_once = text.count(begin) == text.count(end) == 1
    if not is_once or text.index(begin) > text.index(end):
        raise ConfigError(
            f"--output: expected the lines {begin} and {end} once each in {file}, in this order. "
            "Add them where the table shall stand."
        )


def write_section(file: Path, section: str, marks: Marks = BENCH) -> None:
    """Replace what stands between the two marks of a document.

    Args:
        file: the document.
        section: what stands there then.
        marks: of the section.

    Raises:
        ConfigError: The document lacks the marks.
    """
    check_document(file, marks)
    begin, end = marks.begin, marks.end
    head, rest = file.read_text(encoding="utf-8").split(begin)
    tail = rest.split(end)[1]
    file.write_text(f"{head}{begin}\n\n{section}\n{end}{tail}", encoding="utf-8")
