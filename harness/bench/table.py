"""Rows of the table: figures of the engines against the limits measured beside them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

Case = Mapping[str, Any]
"""What harness.bench.measure returned, with `title`."""
Found = Mapping[str, Case]
"""By the case's name."""
RESIDENT_TARGETS: Final = {"H200": 0.72, "H100": 0.78}
"""Of batch 1, by a part of the card's name."""
BATCH_TARGETS: Final = {16: 0.68, 64: 0.62}
"""Of the resident engine at other batches."""
PREFILL_TARGETS_S: Final = {"1": 0.165, "4": 0.22}
"""Of prefetch, by the number of prompts of 2048 tokens."""
PEER_PREFETCH_S: Final = 0.1555
"""vLLM 0.25.1, prefetch of 20 of 32 layers, batch 1, on an H200 whose link gave 55.5 GB/s."""
PEER_LINK_GB_S: Final = 55.5


@dataclass(frozen=True)
class Row:
    """One line: what, the figure, what it is compared with and whether the target is met."""

    what: str
    figure: str
    share: float | None
    target: str = ""
    is_met: bool | None = None
    """None: no target here, or it was not measured."""


def make_row(
    what: str,
    figure: str,
    share: float | None,
    *,
    least: float | None = None,
    most: float | None = None,
) -> Row:
    """Return a row that is held against the bounds that are given."""
    bounds = [f"at least {least:g}"] if least is not None else []
    bounds += [f"at most {most:g}"] if most is not None else []
    met = None
    if share is not None and bounds:
        met = (least is None or share >= least) and (most is None or share <= most)
    return Row(what, figure, share, ", ".join(bounds), met)


def rows(found: Found, card: str | None, *, is_default: bool) -> list[Row]:
    """Return all rows that the figures allow.

    Args:
        found: Figures by case; a case that did not fit or did not run gives no rows.
        card: Name of the GPU; None: it is emulated, and held against no target.
        is_default: The shape is that of the targets in seconds.
    """
    good = {name: case for name, case in found.items() if "decode" in case}
    made = list(_stream_rows(good))
    made += _prefill_rows(good, is_default=is_default)
    made += _resident_rows(good, card or "")
    made += _embed_rows(good)
    made += _engine_rows(good)
    made += _chosen_rows(good, is_default=is_default)
    made += _planned_rows(good)
    made += _counter_rows(good)
    return made if card else [replace(row, target="", is_met=None) for row in made]


def rate(case: Case, name: str) -> float | None:
    """Return the mean of a rate as probed before and after a case, GB/s; None where unknown."""
    known = [found for when in ("before", "after") if (found := case.get(when, {}).get(name))]
    return sum(known) / len(known) if known else None


def _decodes(case: Case) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for batch, figures in case["decode"].items():
        if "no_room" not in figures:
            yield int(batch), figures


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _share(num_bytes: float, seconds: float, gb_s: float | None) -> float | None:
    return None if not gb_s else num_bytes / seconds / 1e9 / gb_s


def _kind(name: str) -> str:
    """The kind of a case by its name: prefetch_2 is a second prefetch."""
    return name.rstrip("0123456789").rstrip("_")


def _moved_text(figures: Mapping[str, Any]) -> str:
    parts = [
        f"{figures[key] / 1e9:.3f} GB {how}"
        for key, how in (("h2d_bytes", "copied"), ("in_place_bytes", "in place"))
        if figures[key]
    ]
    return ", ".join(parts) or "nothing moved"


def _stream_rows(found: Found) -> Iterator[Row]:
    """Bytes that cross the link a step, against what the link carries."""
    kinds = {
        "prefetch": ("h2d_gb_s", 0.97, "link rate"),
        "uva": ("in_place_gb_s", 0.96, "in-place rate"),
    }
    for name, case in found.items():
        known = kinds.get(_kind(name))
        if known is None:
            continue
        key, least, word = known
        for batch, figures in _decodes(case):
            num_bytes = figures["h2d_bytes"] + figures["in_place_bytes"]
            yield make_row(
                f"{case['title']}, batch {batch}: bytes / step time / {word}",
                f"{_ms(figures['step_s'])} ({_moved_text(figures)})",
                _share(num_bytes, figures["step_s"], rate(case, key)) if num_bytes else None,
                least=least if num_bytes else None,
            )


def _prefill_rows(found: Found, *, is_default: bool) -> Iterator[Row]:
    """Time to the first tokens of long prompts."""
    for count, most in PREFILL_TARGETS_S.items():
        base: float | None = None
        for name, case in found.items():
            seconds = case["prefill_s"].get(count)
            if seconds is None:
                continue
            is_prefetch = _kind(name) == "prefetch"
            what = f"{case['title']}, prefill {count} x {case['prefill_tokens']} tokens"
            bound = most if is_prefetch and is_default else None
            yield make_row(f"{what}: s", f"{seconds:.4f} s", seconds, most=bound)
            if is_prefetch and base is None:
                base = seconds
            elif _kind(name) == "uva" and base:
                yield make_row(f"{what} / prefetch", "", seconds / base, most=1.15)


def _resident_rows(found: Found, card: str) -> Iterator[Row]:
    """Bytes that a resident step reads, against the copy rate of GPU memory."""
    case = found.get("resident")
    if case is None:
        return
    first = next((v for k, v in RESIDENT_TARGETS.items() if k in card), None)
    for batch, figures in _decodes(case):
        num_bytes = case["plan"]["read_bytes"] + (figures["kv_bytes"] if batch > 1 else 0)
        what = "weight bytes" if batch == 1 else "weight and KV bytes"
        yield make_row(
            f"resident, batch {batch}: {what} / step time / memory copy rate",
            f"{_ms(figures['step_s'])} ({num_bytes / 1e9:.2f} GB)",
            _share(num_bytes, figures["step_s"], rate(case, "hbm_copy_gb_s")),
            least=first if batch == 1 else BATCH_TARGETS.get(batch),
        )


def _embed_rows(found: Found) -> Iterator[Row]:
    """An embedding table in host memory against one on the GPU."""
    if not {"resident", "embed_in_place"} <= found.keys():
        return
    base = dict(_decodes(found["resident"]))
    for batch, figures in _decodes(found["embed_in_place"]):
        if batch in base:
            yield make_row(
                f"embedding table in place / resident, batch {batch}: step",
                f"{_ms(figures['step_s'])} against {_ms(base[batch]['step_s'])}",
                figures["step_s"] / base[batch]["step_s"],
                most=1.01,
            )


def _engine_rows(found: Found) -> Iterator[Row]:
    """The whole step of the largest batch against a bare replay of its graph."""
    sizes = [int(size) for case in found.values() for size in case["decode"]]
    for case in found.values():
        for batch, figures in _decodes(case):
            if figures["replay_s"] and batch == max(sizes):
                yield make_row(
                    f"{case['title']}, batch {batch}: whole step / bare graph replay",
                    f"{_ms(figures['step_s'])} against {_ms(figures['replay_s'])}",
                    figures["step_s"] / figures["replay_s"],
                    most=1.05,
                )


def _chosen_rows(found: Found, *, is_default: bool) -> Iterator[Row]:
    """Placements chosen by predicted times, in the same GPU bytes as prefetch."""
    case = found.get("chosen")
    if case is None:
        return
    peer_s = PEER_PREFETCH_S * PEER_LINK_GB_S / (rate(case, "h2d_gb_s") or PEER_LINK_GB_S)
    for batch, figures in _decodes(case):
        is_compared = is_default and batch == 1
        yield make_row(
            f"{case['title']} ({case['plan']['chosen']}), batch {batch}: step"
            + (" / vLLM's prefetch, 155.5 ms at 55.5 GB/s, at this link" if is_compared else ""),
            f"{_ms(figures['step_s'])} ({_moved_text(figures)})",
            figures["step_s"] / peer_s if is_compared else None,
            most=0.88 if is_compared else None,
        )


def _planned_rows(found: Found) -> Iterator[Row]:
    """Bytes of a decode step as the engine counts them, against the plan."""
    for case in found.values():
        pairs = [
            (
                f["h2d_bytes"] + f["in_place_bytes"],
                f["planned_h2d_bytes"] + f["planned_in_place_bytes"],
            )
            for _, f in _decodes(case)
        ]
        worst = max(
            pairs,
            key=lambda pair: abs(pair[0] / pair[1] - 1) if pair[1] else pair[0],
            default=(0, 0),
        )
        if worst[1]:
            yield make_row(
                f"{case['title']}: bytes of a step, counted / planned",
                f"{worst[0]:,} against {worst[1]:,}",
                worst[0] / worst[1],
                least=0.99,
                most=1.01,
            )


def _counter_rows(found: Found) -> Iterator[Row]:
    """The engine's count of bytes against NVML's counter, calibrated on known copies."""
    for case in found.values():
        counter = case["counter"]
        if counter and counter["nvml_gb_s"]:
            yield make_row(
                f"{case['title']}: engine's bytes / NVML's counter of the link, calibrated",
                f"{counter['engine_gb_s']:.2f} against {counter['nvml_gb_s']:.2f} GB/s in "
                f"{counter['wall_s']:.0f} s (x {counter['factor']:.3f})",
                counter["engine_gb_s"] / counter["nvml_gb_s"],
                least=0.9,
                most=1.1,
            )


def lacks(found: Found, card: str | None) -> list[str]:
    """Return in words which figures are not there although they were asked for.

    Args:
        found: figures by case.
        card: name of the GPU; None: emulated, where there is no counter of a link.
    """
    lines = []
    for case in found.values():
        title = case["title"]
        reason = case.get("no_fit") or case.get("failed")
        if reason:
            lines.append(f"{title}: no figures: {reason}")
        decodes = {f"batch {batch}": run for batch, run in case.get("decode", {}).items()}
        runs = decodes | {part: run for part, run in case.get("kv", {}).items() if card}
        for name, figures in runs.items():
            why = figures.get("no_room") or figures.get("failed")
            if why:
                lines.append(f"{title}, {name}: no figures: {why}.")
        for count, seconds in case.get("prefill_s", {}).items():
            if seconds is None:
                lines.append(f"{title}, prefill of {count} prompts: no figures: no room in KV.")
        counter = case.get("counter")
        if card and counter and counter["nvml_gb_s"] is None:
            lines.append(f"{title}: NVML's counter of the link: no figures: it cannot be read.")
    return lines


def crossover(found: Found) -> tuple[list[tuple[int, float, float]], int | None]:
    """Return (tokens, in place s, staged s), and from how many tokens on staging is faster."""
    place, stage = found.get("uva_in_place", {}), found.get("uva_staged", {})
    pairs = sorted(
        (int(n), seconds, stage["chunk_s"][n])
        for n, seconds in place.get("chunk_s", {}).items()
        if seconds is not None and stage.get("chunk_s", {}).get(n) is not None
    )
    at = None
    for tokens, in_place_s, staged_s in reversed(pairs):
        if staged_s >= in_place_s:
            break
        at = tokens
    return pairs, at


def equal_tokens(found: Found) -> dict[str, bool]:
    """Say of each case whether its tokens are the resident engine's, at every batch of both.

    Only steps that both made are compared: an engine that is fast makes more of them.
    """
    base = dict(_decodes(found["resident"])) if "decode" in found.get("resident", {}) else {}
    same = {}
    for name, case in found.items():
        pairs = [
            (figures["tokens"], base[batch]["tokens"])
            for batch, figures in (_decodes(case) if "decode" in case else ())
            if batch in base
        ]
        if name != "resident" and pairs:
            same[name] = all(_begin_alike(ours, theirs) for ours, theirs in pairs)
    return same


def _begin_alike(ours: list[int], theirs: list[int]) -> bool:
    count = min(len(ours), len(theirs))
    return ours[:count] == theirs[:count]
