"""Rows on the KV cache: figures of its engines against the limits measured beside them.

A row is there where all the cases that it needs were chosen. Where one of them has no figure, or
what was to be measured did not happen, the row says so and its target is not measured.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from harness.bench.table import Found, Row, make_row, rate
from reports.record.record import SAMPLE_FLOORS

Figures = Mapping[str, Any]
CONTEXT: Final = 131_072
"""Longest context that is asked for, tokens."""
LEAST_STREAMED_BYTES: Final = 4e9
"""KV bytes over the link a step from which on the share of its rate is held to a target."""
LEAST_FOUND: Final = 0.9
"""Share of a prefix that the host tier must have held."""
LEAST_EXCESS: Final = 1.25
"""Sum of sequences in multiples of the GPU's room that counts as more than it holds."""


class _LackError(Exception):
    """What a row needs and is not there."""


def kv_rows(found: Found, card: str | None, *, is_default: bool) -> list[Row]:
    """Return the rows of the cases that ran, in the order of the targets.

    Args:
        found: figures by case.
        card: name of the GPU; None: it is emulated, and held against no target.
        is_default: the shape is that of the targets in seconds.
    """
    made = [
        *_move_rows(found),
        *_long_rows(found),
        *_parked_rows(found),
        *_ratio_rows(found),
        *_ttft_rows(found, is_default=is_default),
        *_itl_rows(found),
        *_attention_rows(found),
        *_streamed_rows(found),
    ]
    return made if card else [replace(row, target="", is_met=None) for row in made]


def _part(found: Found, case: str, part: str) -> Figures:
    """Return the figures of a part.

    Raises:
        _LackError: It has none.
    """
    parts = found[case].get("kv", {})
    if part not in parts:
        raise _LackError("it did not run")
    figures: Figures = parts[part]
    for why in ("failed", "no_room"):
        if why in figures:
            raise _LackError(str(figures[why]).splitlines()[0])
    return figures


def _known(value: float | None, what: str) -> float:
    if not value:
        raise _LackError(f"{what} is not known")
    return value


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise _LackError(otherwise)


def _absent(what: str, lack: _LackError, **bounds: float) -> Row:
    return make_row(what, f"not measured: {lack}", None, **bounds)


def _move_rows(found: Found) -> Iterator[Row]:
    if "kv_bare" not in found:
        return
    kinds = (
        ("to the host tier / copies back", "store_gb_s", "d2h_gb_s", 0.88),
        ("from the host tier / copies host to device", "load_gb_s", "h2d_gb_s", 0.88),
        ("both ways at once / copies both ways", "both_gb_s", "two_way_gb_s", 0.78),
    )
    for words, key, probe, least in kinds:
        what = f"block moves, 16-token blocks, {words}"
        try:
            figures = _part(found, "kv_bare", "moves")
            moved = _known(figures[key], "the rate of moves")
            link = _known(rate(found["kv_bare"], probe), "the link's rate")
            text = f"{moved:.1f} against {link:.1f} GB/s ({figures['block_bytes']:,} bytes each)"
            yield make_row(what, text, moved / link, least=least)
        except _LackError as lack:
            yield _absent(what, lack, least=least)


def _long_rows(found: Found) -> Iterator[Row]:
    if "kv_long" not in found:
        return
    yield _longest_row(found)
    for name, times in (("1.3", 1.3), ("longest", 3.0)):
        yield _beyond_row(found, name, times)
    what = "decode, at least 4 GB of KV over the link a step: bytes / step / in-place rate"
    try:
        run = _run(found, "longest")
        moved = run["kv_in_place_bytes"]
        _require(moved >= LEAST_STREAMED_BYTES, f"a step read {moved / 1e9:.2f} GB over the link")
        link = _known(rate(found["kv_long"], "in_place_gb_s"), "the in-place rate")
        text = f"{moved / 1e9:.2f} GB in {run['step_s'] * 1e3:.1f} ms"
        yield make_row(what, text, moved / run["step_s"] / 1e9 / link, least=0.90)
    except _LackError as lack:
        yield _absent(what, lack, least=0.90)


def _run(found: Found, name: str) -> Figures:
    runs = _part(found, "kv_long", "long")["runs"]
    _require(name in runs, "no such length fits both tiers")
    run: Figures = runs[name]
    _require("no_room" not in run, run.get("no_room", ""))
    return run


def _longest_row(found: Found) -> Row:
    what = f"longest context that runs to its end / min({CONTEXT:,}, blocks of both tiers)"
    try:
        run, figures = _run(found, "longest"), _part(found, "kv_long", "long")
        _require(run["has_ended"], f"{run['total']:,} tokens did not run to their end")
        text = (
            f"{run['total']:,} tokens, {figures['room']:,} of them on the GPU; first token after "
            f"{run['prefill_s']:.1f} s"
        )
        share = run["total"] / min(CONTEXT, figures["reach"])
        return make_row(what, text, share, least=0.97)
    except _LackError as lack:
        return _absent(what, lack, least=0.97)


def _beyond_row(found: Found, name: str, times: float) -> Row:
    what = (
        f"one sequence of {times:g} times the GPU's room: step / (resident part + host KV bytes / "
        "in-place rate)"
    )
    try:
        run, near = _run(found, name), _run(found, "resident")
        room = _part(found, "kv_long", "long")["room"]
        _require(
            run["total"] >= 0.97 * times * room,
            f"the longest is {run['total'] / room:.2f} times the room",
        )
        _require(not near["kv_in_place_bytes"], "the resident sequence was not resident")
        _require(run["kv_in_place_bytes"] > 0, "nothing was read in the host tier")
        link = _known(rate(found["kv_long"], "in_place_gb_s"), "the in-place rate")
        streamed_s = run["kv_in_place_bytes"] / 1e9 / link
        text = (
            f"{run['step_s'] * 1e3:.1f} ms against {near['step_s'] * 1e3:.1f} + "
            f"{streamed_s * 1e3:.1f} ms at {run['total'] / room:.2f} times"
        )
        return make_row(what, text, run["step_s"] / (near["step_s"] + streamed_s), most=1.10)
    except _LackError as lack:
        return _absent(what, lack, most=1.10)


def _parked_rows(found: Found) -> Iterator[Row]:
    if "kv_cpu" not in found:
        return
    what = "a parked conversation: swap in and out / a turn of 128 tokens"
    try:
        figures = _part(found, "kv_cpu", "parked")
        _require(figures["loaded_bytes"] > 0, "no turn found its conversation in the host tier")
        near_s, far_s = figures["resident_turn_s"], figures["parked_turn_s"]
        text = (
            f"{far_s * 1e3:.1f} against {near_s * 1e3:.1f} ms a turn, {figures['tokens']:,} "
            f"tokens against {figures['room']:,} of room, {figures['loaded_bytes'] / 1e9:.2f} GB "
            "loaded a turn"
        )
        yield make_row(what, text, far_s / near_s - 1, most=0.05)
    except _LackError as lack:
        yield _absent(what, lack, most=0.05)


def _ratio_rows(found: Found) -> Iterator[Row]:
    """Tokens a second of an engine with a host tier over those of one without."""
    kinds = (
        (
            "rounds",
            "kv_cpu",
            "sequences of 1.3 times the GPU's room, in rounds / kv=gpu at its room",
            0.95,
        ),
        (
            "shared",
            "kv_cpu",
            "50 requests on a 10k prefix in the host tier / kv=gpu with it resident",
            0.98,
        ),
        ("turns", "kv_turns", "64 conversations of 8 turns, 32 GiB of host blocks / kv=gpu", 1.7),
    )
    for part, case, words, least in kinds:
        if {case, "kv_gpu"} <= found.keys():
            yield _ratio_row(found, part, case, words, least)
    if {"kv_cpu", "kv_gpu"} <= found.keys():
        what = "kv=cpu where everything fits the GPU / kv=gpu: time"
        try:
            ours, base = (_part(found, case, "fits") for case in ("kv_cpu", "kv_gpu"))
            _require(not ours["preemptions"], "a sequence was preempted")
            text = (
                f"{ours['wall_s']:.3f} against {base['wall_s']:.3f} s (where what finished gives "
                f"way: {ours['kept_wall_s']:.3f} against {base['kept_wall_s']:.3f} s)"
            )
            yield make_row(what, text, ours["wall_s"] / base["wall_s"], most=1.02)
        except _LackError as lack:
            yield _absent(what, lack, most=1.02)


def _ratio_row(found: Found, part: str, case: str, words: str, least: float) -> Row:
    what = f"{words}: tokens/s"
    try:
        ours, base = _part(found, case, part), _part(found, "kv_gpu", part)
        more = _EXTRAS[part](ours)
        rates = [figures["output_tokens"] / figures["wall_s"] for figures in (ours, base)]
        text = f"{rates[0]:.0f} against {rates[1]:.0f} tokens/s ({more})"
        return make_row(what, text, rates[0] / rates[1], least=least)
    except _LackError as lack:
        return _absent(what, lack, least=least)


def _rounds_text(figures: Figures) -> str:
    excess = figures["excess"]
    _require(excess >= LEAST_EXCESS, f"the sequences were {excess:.2f} times the room")
    return (
        f"{figures['sequences']} sequences, {excess:.2f} times the room, "
        f"{figures['swaps_out']:.0f} swaps out, {figures['swaps_in']:.0f} in, "
        f"{figures['recomputes']:.0f} recomputed"
    )


def _shared_text(figures: Figures) -> str:
    _require_found(figures)
    return f"{figures['loaded_bytes'] / 1e9:.2f} GB loaded"


def _require_found(figures: Figures) -> None:
    share = figures["hits_cpu_tokens"] / figures["prefix_tokens"]
    _require(share >= LEAST_FOUND, f"the host tier had {share:.0%} of the prefix")


def _turns_text(figures: Figures) -> str:
    ran, asked = figures["output_tokens"], figures["asked_tokens"]
    _require(ran == asked, f"{ran:,} of {asked:,} tokens came")
    found = figures["hits_gpu_tokens"] + figures["hits_cpu_tokens"]
    return f"{found:,} tokens found, {figures['missed_tokens']:,} not"


_EXTRAS: Final = {"rounds": _rounds_text, "shared": _shared_text, "turns": _turns_text}


def _ttft_rows(found: Found, *, is_default: bool) -> Iterator[Row]:
    if "kv_cpu" not in found:
        return
    text = "first token behind a prefix of 8k tokens"
    rows: tuple[tuple[str, dict[str, float]], ...] = (
        (f"{text} in the host tier: s", {"most": 0.035} if is_default else {}),
        (f"{text}: computed / found in the host tier", {"least": 6.0}),
        (f"{text}, computed: s", {"most": 0.29} if is_default else {}),
    )
    try:
        figures = _part(found, "kv_cpu", "ttft")
        _require_found(figures)
    except _LackError as lack:
        yield from (_absent(what, lack, **bounds) for what, bounds in rows)
        return
    host_s, computed_s = figures["host_s"], figures["recompute_s"]
    texts = (
        (f"{host_s * 1e3:.1f} ms (on the GPU: {figures['gpu_s'] * 1e3:.1f} ms)", host_s),
        ("", computed_s / host_s),
        (f"{computed_s * 1e3:.1f} ms", computed_s),
    )
    for (what, bounds), (shown, share) in zip(rows, texts, strict=True):
        yield make_row(what, shown, share, **bounds)


def _itl_rows(found: Found) -> Iterator[Row]:
    if "kv_cpu" not in found:
        return
    what = "gaps of running sequences while such a prefix loads / without: p99"
    try:
        figures = _part(found, "kv_cpu", "itl")
        _require_found(figures)
        least = min(figures["num_alone"], figures["num_loading"])
        _require(least >= SAMPLE_FLOORS[99], f"{least} gaps are too few for p99")
        slow_s, alone_s = figures["loading_p99_s"], figures["alone_p99_s"]
        text = (
            f"{slow_s * 1e3:.2f} against {alone_s * 1e3:.2f} ms ({figures['loads']} loads, "
            f"{figures['num_loading']} gaps; medians {figures['loading_p50_s'] * 1e3:.2f} and "
            f"{figures['alone_p50_s'] * 1e3:.2f} ms; the step that computes the rest "
            f"{figures['prefill_steps_s'] * 1e3:.2f} ms)"
        )
        yield make_row(what, text, slow_s / alone_s, most=1.2)
    except _LackError as lack:
        yield _absent(what, lack, most=1.2)


def _attention_rows(found: Found) -> Iterator[Row]:
    if "kv_bare" not in found:
        return
    what = "decode attention alone, all blocks on the GPU / memory copy rate"
    try:
        figures = _part(found, "kv_bare", "attention")
        text = f"{figures['ms']:.3f} ms ({figures['shape']})"
        yield make_row(what, text, figures["gb_s"] / figures["copy_gb_s"], least=0.80)
    except _LackError as lack:
        yield _absent(what, lack, least=0.80)


def _streamed_rows(found: Found) -> Iterator[Row]:
    if "kv_weights" not in found:
        return
    what = "weights and KV over the link together: bytes / step / link rate"
    try:
        run = _part(found, "kv_weights", "streamed")
        weights, kv = run["h2d_bytes"] + run["in_place_bytes"], run["kv_in_place_bytes"]
        _require(weights > 0 and kv > 0, f"{weights:,} bytes of weights, {kv:,} of KV were moved")
        link = _known(rate(found["kv_weights"], "h2d_gb_s"), "the link's rate")
        text = (
            f"{weights / 1e9:.2f} GB of weights and {kv / 1e9:.2f} GB of KV in "
            f"{run['step_s'] * 1e3:.1f} ms"
        )
        yield make_row(what, text, (weights + kv) / run["step_s"] / 1e9 / link, least=0.90)
    except _LackError as lack:
        yield _absent(what, lack, least=0.90)
