"""Rows of the table: figures of the engines against the limits measured beside them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Found = Mapping[str, Mapping[str, Any]]
"""By case: what harness.bench.measure returned."""
RESIDENT_TARGETS: Final = {"H200": 0.72, "H100": 0.78}
"""Of batch 1, by a part of the card's name."""
PEER_PREFETCH_S: Final = 0.1555
"""vLLM 0.25.1, prefetch of 20 of 32 layers, batch 1, on an H200 whose link gave 55.5 GB/s."""
PEER_LINK_GB_S: Final = 55.5
GIB: Final = 2**30


@dataclass(frozen=True)
class Row:
    """One line: what, the figure, what it is compared with and whether the target is met."""

    what: str
    figure: str
    share: float | None
    target: str
    is_met: bool | None
    """None: no target here, or no figure."""


def _row(
    what: str,
    figure: str,
    share: float | None,
    *,
    least: float | None = None,
    most: float | None = None,
) -> Row:
    if least is not None:
        met = None if share is None else share >= least
        return Row(what, figure, share, f"at least {least:g}", met)
    if most is not None:
        met = None if share is None else share <= most
        return Row(what, figure, share, f"at most {most:g}", met)
    return Row(what, figure, share, "", None)


def rows(found: Found, probe: Mapping[str, Any], card: str) -> list[Row]:
    """Return all rows that the figures allow.

    Args:
        found: Figures by case; a case that did not fit or did not run gives no rows.
        probe: Rates in GB/s of the same run.
        card: Name of the GPU.
    """
    good = {name: case for name, case in found.items() if "decode" in case}
    made = list(_stream_rows(good, probe))
    made += _prefill_rows(good)
    made += _resident_rows(good, probe, card)
    made += _engine_rows(good)
    made += _chosen_rows(good, probe)
    made += _counter_rows(good)
    return made


def _decodes(case: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for batch, figures in case["decode"].items():
        if figures is not None:
            yield int(batch), figures


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _share(num_bytes: float, seconds: float, gb_s: float | None) -> float | None:
    return None if not gb_s else num_bytes / seconds / 1e9 / gb_s


def _stream_rows(found: Found, probe: Mapping[str, Any]) -> Iterator[Row]:
    """Bytes that cross the link a step, against what the link carries."""
    limits = {"prefetch": ("h2d_gb_s", 0.97, "link")}
    for name in ("uva", "uva_in_place", "uva_staged"):
        limits[name] = ("in_place_gb_s", 0.96, "in-place")
    for name, case in found.items():
        key = "prefetch" if name.startswith("prefetch") else name
        if key not in limits:
            continue
        rate, least, word = limits[key]
        for batch, figures in _decodes(case):
            copied, read = figures["h2d_bytes"], figures["in_place_bytes"]
            parts = [
                f"{n / 1e9:.3f} GB {how}"
                for n, how in ((copied, "copied"), (read, "in place"))
                if n
            ]
            yield _row(
                f"{case['title']}, batch {batch}: bytes / step time / {word} rate",
                f"{_ms(figures['step_s'])} ({', '.join(parts)})",
                _share(copied + read, figures["step_s"], probe.get(rate)),
                least=least if name in {"prefetch", "uva", "uva_in_place"} else None,
            )


def _prefill_rows(found: Found) -> Iterator[Row]:
    """Time to the first token of long prompts."""
    most = {"1": 0.165, "4": 0.22}
    for count in ("1", "4"):
        times = {
            name: found[name]["prefill_s"].get(count)
            for name in ("prefetch", "uva", "chosen")
            if name in found
        }
        for name, seconds in times.items():
            if seconds is not None:
                yield _row(
                    f"{found[name]['title']}, prefill {count} x 2048, s",
                    f"{seconds:.4f} s",
                    seconds,
                    most=most[count] if name == "prefetch" else None,
                )
        if times.get("prefetch") and times.get("uva"):
            ratio = times["uva"] / times["prefetch"]
            yield _row(f"prefill {count} x 2048, uva / prefetch", "", ratio, most=1.15)


def _resident_rows(found: Found, probe: Mapping[str, Any], card: str) -> Iterator[Row]:
    """Bytes that a resident step reads, against the copy rate of GPU memory."""
    case = found.get("resident")
    if case is None:
        return
    first = next((v for k, v in RESIDENT_TARGETS.items() if k in card), None)
    least = {1: first, 16: 0.68, 64: 0.62}
    for batch, figures in _decodes(case):
        read = case["plan"]["read_bytes"] + (figures["kv_bytes"] if batch > 1 else 0)
        what = "weight bytes" if batch == 1 else "weight and KV bytes"
        yield _row(
            f"resident, batch {batch}: {what} / step time / memory copy rate",
            f"{_ms(figures['step_s'])} ({read / 1e9:.2f} GB)",
            _share(read, figures["step_s"], probe.get("hbm_copy_gb_s")),
            least=least.get(batch),
        )
    other = found.get("embed_in_place")
    for batch, figures in [] if other is None else _decodes(other):
        base = case["decode"].get(str(batch))
        if base is not None:
            yield _row(
                f"embedding table in place / resident, batch {batch}: step",
                f"{_ms(figures['step_s'])} against {_ms(base['step_s'])}",
                figures["step_s"] / base["step_s"],
                most=1.01,
            )


def _engine_rows(found: Found) -> Iterator[Row]:
    """The whole step against a bare replay of its graph."""
    for name in ("resident", "prefetch"):
        for batch, figures in _decodes(found[name]) if name in found else []:
            if figures["replay_s"]:
                yield _row(
                    f"{found[name]['title']}, batch {batch}: whole step / bare graph replay",
                    f"{_ms(figures['step_s'])} against {_ms(figures['replay_s'])}",
                    figures["step_s"] / figures["replay_s"],
                    most=1.05 if batch == 64 else None,
                )


def _chosen_rows(found: Found, probe: Mapping[str, Any]) -> Iterator[Row]:
    """Placements chosen by predicted times, in the same GPU bytes as prefetch."""
    case = found.get("chosen")
    if case is None:
        return
    for batch, figures in _decodes(case):
        moved = figures["h2d_bytes"] + figures["in_place_bytes"]
        peer_s = PEER_PREFETCH_S * PEER_LINK_GB_S / (probe.get("h2d_gb_s") or PEER_LINK_GB_S)
        yield _row(
            f"{case['title']}, batch {batch}: step"
            + (" / vLLM's prefetch at this link" if batch == 1 else ""),
            f"{_ms(figures['step_s'])} ({moved / 1e9:.3f} GB)",
            figures["step_s"] / peer_s if batch == 1 else None,
            most=0.88 if batch == 1 else None,
        )


def _counter_rows(found: Found) -> Iterator[Row]:
    """The engine's count of bytes against NVML's counter, calibrated on known copies."""
    for case in found.values():
        counter, known = case.get("counter"), case.get("calibration")
        if counter and counter["nvml_gb_s"] and known and known["factor"]:
            calibrated = counter["nvml_gb_s"] * known["factor"]
            ratio = counter["counted_gb_s"] / calibrated
            yield Row(
                f"{case['title']}: engine's bytes / NVML's counter, calibrated",
                f"{counter['counted_gb_s']:.2f} against {calibrated:.2f} GB/s in "
                f"{counter['wall_s']:.0f} s",
                ratio,
                "0.9 to 1.1",
                0.9 <= ratio <= 1.1,
            )


def crossover(found: Found) -> tuple[list[tuple[int, float, float]], int | None]:
    """Return (tokens, in place s, staged s), and from how many tokens on staging is faster."""
    place, stage = found.get("uva_in_place", {}), found.get("uva_staged", {})
    pairs = [
        (int(n), seconds, stage["chunk_s"][n])
        for n, seconds in place.get("chunk_s", {}).items()
        if seconds is not None and stage.get("chunk_s", {}).get(n) is not None
    ]
    at = None
    for tokens, in_place_s, staged_s in sorted(pairs, reverse=True):
        if staged_s >= in_place_s:
            break
        at = tokens
    return pairs, at


def equal_tokens(found: Found) -> dict[str, bool]:
    """Say of each case whether its tokens are those of the resident engine, at every batch."""
    base = found.get("resident", {}).get("decode", {})
    same = {}
    for name, case in found.items():
        pairs = [
            (figures["tokens"], base[batch]["tokens"])
            for batch, figures in case.get("decode", {}).items()
            if figures is not None and base.get(batch) is not None
        ]
        if name != "resident" and pairs:
            same[name] = all(ours == theirs for ours, theirs in pairs)
    return same
