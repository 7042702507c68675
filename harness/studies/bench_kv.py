"""Rows of `study=bench_kv`: a KV cache over two tiers against the limits measured beside it.

A row is there where all the points that it needs were chosen. Where one of them has no figure, or
what was to be measured did not happen, the row says so and its target is not measured.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from harness.studies.table import (
    Figures,
    Found,
    Judged,
    LackError,
    Targets,
    Value,
    counter_text,
    known,
    lacks,
    require,
)
from reports.record.record import SAMPLE_FLOORS

CONTEXT: Final = 131_072
"""Longest context that is asked for, tokens."""
LEAST_STREAMED_BYTES: Final = 4e9
"""KV bytes over the link a step from which on the share of its rate is held to a target."""
LEAST_FOUND: Final = 0.9
"""Share of a prefix that the host tier must have held."""
LEAST_EXCESS: Final = 1.25
"""Sum of sequences in multiples of the GPU's room that counts as more than it holds."""


_COPIED: Final = "copies ahead, 3 times the GPU's room: step / (host KV bytes / copy rate)"
_IN_PLACE_WORDS: Final = "step / (resident part + host KV bytes / in-place rate)"


def judge(found: Found, *, card: str | None, is_default: bool) -> Judged:
    """Return the rows of the points that ran, in the order of the targets."""
    table = Targets(found, is_absolute=is_default)
    _add_moves(table)
    _add_long(table)
    _add_parts(table)
    _add_together(table)
    lacking = [text for text in lacks(found) if card or "on a GPU only" not in text]
    return table.judged(lacking=lacking)


def _add_moves(table: Targets) -> None:
    """Add the rows of moves of blocks without an engine."""
    moves = "block moves, 16-token blocks, "
    for words, names, least in (
        ("to the host tier / copies back", ("store_gb_s", "d2h"), 0.88),
        ("from the host tier / copies host to device", ("load_gb_s", "h2d"), 0.88),
        ("both ways at once / copies both ways", ("both_gb_s", "two_way"), 0.78),
    ):
        table.add("kv_bare", moves + words, partial(_moves, names), least=least)


def _add_long(table: Targets) -> None:
    """Add the rows of one sequence that exceeds the GPU."""
    what = f"longest context that runs to its end / min({CONTEXT:,}, blocks of both tiers)"
    table.add("kv_long", what, _longest, least=0.97)
    for name, times in (("1.3", 1.3), ("longest", 3.0)):
        what = f"one sequence of {times:g} times the GPU's room: {_IN_PLACE_WORDS}"
        table.add("kv_long", what, partial(_beyond, name, times), most=1.10)
    table.add("kv_long", _COPIED, _copied, most=1.05)
    what = "decode, at least 4 GB of KV over the link a step: bytes / step / in-place rate"
    table.add("kv_long", what, _streamed_kv, least=0.90)
    what = "the longest: engine's bytes / NVML's counter of the link, calibrated"
    table.add("kv_long", what, _counted, least=0.9, most=1.1)


def _add_parts(table: Targets) -> None:
    """Add the rows of what is kept, found and moved, and of what is measured beside it."""
    what = "a parked conversation: swap in and out / a turn of 128 tokens"
    table.add("kv_cpu", what, _parked, most=0.05)
    what = "sequences of 1.3 times the GPU's room, in rounds / kv=gpu at its room: tokens/s"
    table.add("kv_cpu kv_gpu", what, partial(_ratio, "rounds"), least=0.95)
    what = "50 requests on a 10k prefix in the host tier / kv=gpu with it resident: tokens/s"
    table.add("kv_cpu kv_gpu", what, partial(_ratio, "shared"), least=0.98)
    what = "kv=cpu where everything fits the GPU / kv=gpu: time"
    table.add("kv_cpu kv_gpu", what, _fits, most=1.02)
    first = "first token behind a prefix of 8k tokens"
    what = f"{first} in the host tier: s"
    table.add("kv_cpu", what, _ttft_host, is_ratio=False, most=0.035)
    what = f"{first}: computed / found in the host tier"
    table.add("kv_cpu", what, _ttft_ratio, least=6.0)
    table.add("kv_cpu", f"{first}, computed: s", _ttft_computed, is_ratio=False, most=0.29)
    what = "gaps of running sequences while such a prefix loads / without: p99"
    table.add("kv_cpu", what, partial(_gaps, "loading"), most=1.2)
    what = "likewise, with the step that computes the request's own tokens: p99"
    table.add("kv_cpu", what, partial(_gaps, "beside"), most=1.3)
    what = "decode attention alone, all blocks on the GPU / memory copy rate"
    table.add("kv_bare", what, _attention, least=0.80)
    what = "weights and KV over the link together: bytes / step / link rate"
    table.add("kv_weights", what, _streamed, least=0.90)


def _add_together(table: Targets) -> None:
    """Add the rows of several long sequences, and of experiments."""
    what = "four sequences of 1.3 times the GPU's room at once / one after another: tokens/s"
    table.add("kv_together", what, _together, least=1.0)
    what = "first token of the last of them, sent while the others run / its prefill alone"
    table.add("kv_together", what, _last, most=1.3)
    what = "16 sequences of 52,000 tokens, 40,000 of them common: KV bytes of a step / planned"
    table.add("kv_together", what, _prefixed, most=1.1)
    what = "32 short requests beside one of twice the GPU's room / without it: tokens/s"
    table.add("kv_together", what, _beside, least=0.5)
    what = "64 conversations of 8 turns, 32 GiB of host blocks / kv=gpu: tokens/s"
    table.add("multi_turn multi_turn_gpu", what, partial(_served, "multi_turn"), least=1.7)
    what = "12 prefixes of 10,000 tokens, 16 GiB of host blocks / kv=gpu: tokens/s"
    table.add("shared_prefix shared_prefix_gpu", what, partial(_served, "shared_prefix"))
    what = "parked conversations, first token of a later turn: kv=gpu / 16 GiB of host blocks"
    table.add("parked parked_gpu", what, _resumed, least=1.0)
    what = "one sequence of 54,000 tokens: time per token / predicted"
    table.add("long_context", what, _context, most=1.1)


def _part(found: Found, point: str, part: str) -> Figures:
    """Return the figures of a part; LackError where it has none."""
    result = found[point]
    parts = result.sample("bare") or result.sample("tiers").get("parts", {})
    if part not in parts:
        raise LackError(result.lack or "it did not run")
    figures: Figures = parts[part]
    for why in ("failed", "no_room"):
        if why in figures:
            raise LackError(str(figures[why]).splitlines()[0])
    return figures


def _moves(names: tuple[str, str], found: Found) -> Value:
    figures = _part(found, "kv_bare", "moves")
    moved = known(figures[names[0]], "the rate of moves")
    link = known(found["kv_bare"].rate(names[1]), "the link's rate")
    text = f"{moved:.1f} against {link:.1f} GB/s ({figures['block_bytes']:,} bytes each)"
    return text, moved / link


def _run(found: Found, name: str) -> Figures:
    runs = _part(found, "kv_long", "long")["runs"]
    require(name in runs, "no such length fits both tiers")
    run: Figures = runs[name]
    require("no_room" not in run, run.get("no_room", ""))
    return run


def _in_place(found: Found) -> float:
    return known(found["kv_long"].rate("in_place"), "the in-place rate")


def _longest(found: Found) -> Value:
    run, figures = _run(found, "longest"), _part(found, "kv_long", "long")
    require(run["has_ended"], f"{run['total']:,} tokens did not finish")
    text = f"{run['total']:,} tokens, {figures['room']:,} of them on the GPU; first token after "
    share = run["total"] / min(CONTEXT, figures["reach"])
    return f"{text}{run['prefill_s']:.1f} s", share


def _beyond(name: str, times: float, found: Found) -> Value:
    run, near, over = _far_run(found, name, times)
    require(not _kv_bytes(near), "the resident sequence was not resident")
    require(_kv_bytes(run) > 0, "nothing was read in the host tier")
    streamed_s = _kv_bytes(run) / 1e9 / _in_place(found)
    text = f"{run['step_s'] * 1e3:.1f} ms against {near['step_s'] * 1e3:.1f} + "
    text += f"{streamed_s * 1e3:.1f} ms at {over:.2f} times"
    return text, run["step_s"] / (near["step_s"] + streamed_s)


def _far_run(found: Found, name: str, times: float) -> tuple[Figures, Figures, float]:
    """Return the runs of that name and within the room, and how many times the room it was."""
    run, near = _run(found, name), _run(found, "resident")
    over = run["total"] / _part(found, "kv_long", "long")["room"]
    require(over >= 0.97 * times, f"the longest is {over:.2f} times the room")
    return run, near, over


def _kv_bytes(run: Figures) -> float:
    """Keys and values that a decode step took over the link."""
    return float(run["kv_in_place_bytes"] + run["kv_copied_bytes"])


def _copied(found: Found) -> Value:
    run, _, over = _far_run(found, "longest", 3.0)
    require(run["kv_copied_bytes"] > 0, "nothing was copied ahead")
    link = known(found["kv_long"].rate("h2d"), "the link's rate")
    bound_s = _kv_bytes(run) / 1e9 / link
    text = f"{run['step_s'] * 1e3:.1f} against {bound_s * 1e3:.1f} ms at {over:.2f} times, "
    share = run["kv_copied_bytes"] / _kv_bytes(run)
    return f"{text}{share:.1%} of the bytes copied", run["step_s"] / bound_s


def _streamed_kv(found: Found) -> Value:
    run = _run(found, "longest")
    moved = _kv_bytes(run)
    require(moved >= LEAST_STREAMED_BYTES, f"a step read {moved / 1e9:.2f} GB over the link")
    text = f"{moved / 1e9:.2f} GB in {run['step_s'] * 1e3:.1f} ms"
    return text, moved / run["step_s"] / 1e9 / _in_place(found)


def _counted(found: Found) -> Value:
    counter = _part(found, "kv_long", "long").get("counter")
    if counter is None:
        raise LackError("scenario.tiers.counter_s is 0")
    ours, theirs = counter["engine_gb_s"], known(counter["nvml_gb_s"], "NVML's counter")
    return counter_text(counter), ours / theirs


def _parked(found: Found) -> Value:
    figures = _part(found, "kv_cpu", "parked")
    require(figures["loaded_bytes"] > 0, "no turn found its conversation in the host tier")
    near_s, far_s = figures["resident_turn_s"], figures["parked_turn_s"]
    text = f"{far_s * 1e3:.1f} against {near_s * 1e3:.1f} ms a turn, {figures['tokens']:,} tokens "
    text += f"against {figures['room']:,} of room, {figures['loaded_bytes'] / 1e9:.2f} GB loaded a "
    return f"{text}turn", far_s / near_s - 1


def _ratio(part: str, found: Found) -> Value:
    """Tokens a second of an engine with a host tier over those of one without."""
    ours, base = _part(found, "kv_cpu", part), _part(found, "kv_gpu", part)
    more = _EXTRAS[part](ours)
    rates = [figures["output_tokens"] / figures["wall_s"] for figures in (ours, base)]
    return f"{rates[0]:.0f} against {rates[1]:.0f} tokens/s ({more})", rates[0] / rates[1]


def _rounds_text(figures: Figures) -> str:
    excess = figures["excess"]
    require(excess >= LEAST_EXCESS, f"the sequences were {excess:.2f} times the room")
    text = f"{figures['sequences']} sequences, {excess:.2f} times the room, "
    text += f"{figures['swaps_out']:.0f} swaps out, {figures['swaps_in']:.0f} in, "
    return f"{text}{figures['recomputes']:.0f} recomputed"


def _shared_text(figures: Figures) -> str:
    _require_found(figures)
    return f"{figures['loaded_bytes'] / 1e9:.2f} GB loaded"


_EXTRAS: Final[Mapping[str, Callable[[Figures], str]]] = {
    "rounds": _rounds_text,
    "shared": _shared_text,
}


def _require_found(figures: Figures) -> None:
    share = figures["hits_cpu_tokens"] / figures["prefix_tokens"]
    require(share >= LEAST_FOUND, f"the host tier had {share:.0%} of the prefix")


def _fits(found: Found) -> Value:
    ours, base = (_part(found, point, "fits") for point in ("kv_cpu", "kv_gpu"))
    require(not ours["preemptions"], "a sequence was preempted")
    text = (
        f"{ours['wall_s']:.3f} against {base['wall_s']:.3f} s (if finished sequences are evicted: "
    )
    text += f"{ours['kept_wall_s']:.3f} against {base['kept_wall_s']:.3f} s)"
    return text, ours["wall_s"] / base["wall_s"]


def _ttft(found: Found) -> Figures:
    figures = _part(found, "kv_cpu", "ttft")
    _require_found(figures)
    return figures


def _ttft_host(found: Found) -> Value:
    figures = _ttft(found)
    host_s, gpu_s = figures["host_s"], figures["gpu_s"]
    return f"{host_s * 1e3:.1f} ms (on the GPU: {gpu_s * 1e3:.1f} ms)", host_s


def _ttft_ratio(found: Found) -> Value:
    figures = _ttft(found)
    return "", figures["recompute_s"] / figures["host_s"]


def _ttft_computed(found: Found) -> Value:
    computed_s = _ttft(found)["recompute_s"]
    return f"{computed_s * 1e3:.1f} ms", computed_s


def _gaps(kind: str, found: Found) -> Value:
    """A step is one gap, whatever the number of sequences that share it."""
    figures = _part(found, "kv_cpu", "itl")
    _require_found(figures)
    least = min(figures["num_alone"], figures[f"num_{kind}"])
    require(least >= SAMPLE_FLOORS[99], f"{least} steps are too few for p99")
    slow_s, alone_s = figures[f"{kind}_p99_s"], figures["alone_p99_s"]
    text = f"{slow_s * 1e3:.2f} against {alone_s * 1e3:.2f} ms ({figures['loads']} loads, "
    text += f"{figures[f'num_{kind}']} steps; medians {figures[f'{kind}_p50_s'] * 1e3:.2f} and "
    text += f"{figures['alone_p50_s'] * 1e3:.2f} ms; the step that computes the rest "
    return f"{text}{figures['mixed_p50_s'] * 1e3:.2f} ms)", slow_s / alone_s


def _together(found: Found) -> Value:
    figures = _part(found, "kv_together", "together")
    rates = [figures["output_tokens"] / figures[name] for name in ("wall_s", "alone_s")]
    text = f"{rates[0]:.1f} against {rates[1]:.1f} tokens/s ({figures['sequences']} x "
    text += f"{figures['total']:,} tokens, {figures['turns']:.0f} turns, at most "
    return f"{text}{figures['waited_steps']:.0f} steps between two tokens)", rates[0] / rates[1]


def _last(found: Found) -> Value:
    figures = _part(found, "kv_together", "together")
    first_s, prefill_s = figures["last_first_s"], figures["prefill_s"]
    return f"{first_s:.2f} against {prefill_s:.2f} s", first_s / prefill_s


def _prefixed(found: Found) -> Value:
    figures = _part(found, "kv_together", "prefixed")
    count, ended = figures["sequences"], figures["ended"]
    require(ended == count, f"{ended} of {count} sequences ended with all tokens")
    require(figures["steps"] > 0, "in no step all of them decoded")
    require(figures["planned_bytes"] > 0, "all of it fits the GPU")
    read, planned = figures["read_bytes"], figures["planned_bytes"]
    text = f"{read / 1e9:.2f} against {planned / 1e9:.2f} GB, {figures['step_s'] * 1e3:.0f} ms a "
    return f"{text}step of {count}", read / planned


def _beside(found: Found) -> Value:
    figures = _part(found, "kv_together", "beside")
    require(figures["long_tokens"] > 0, "the long sequence had no token meanwhile")
    rates = [figures["output_tokens"] / figures[name] for name in ("wall_s", "alone_s")]
    text = f"{rates[0]:.0f} against {rates[1]:.0f} tokens/s ({figures['requests']} requests; last "
    text += f"first token {figures['first_s'] * 1e3:.0f} against "
    text += f"{figures['alone_first_s'] * 1e3:.0f} ms; {figures['long_tokens']} tokens of the long "
    return f"{text}one, {figures['total']:,} tokens)", rates[0] / rates[1]


def _metric(found: Found, point: str, name: str) -> float:
    """Return a metric of a point that is an experiment."""
    result = found[point]
    if result.record is None or result.lack:
        raise LackError(result.lack or "it did not run")
    value = result.record.metrics.get(name)
    require(value is not None, f"{name} is not known")
    return float(value or 0.0)


def _served(point: str, found: Found) -> Value:
    rates = [_metric(found, name, "serve/output_tok_s") for name in (point, f"{point}_gpu")]
    hits = _metric(found, point, "kv/cpu_hit_tokens")
    require(hits > 0, "nothing was found in the host tier")
    text = f"{rates[0]:.0f} against {rates[1]:.0f} tokens/s ({hits:,.0f} tokens found in host "
    return f"{text}blocks)", rates[0] / rates[1]


def _resumed(found: Found) -> Value:
    name = "serve/turn_ttft_ms/p50"
    host_ms, none_ms = (_metric(found, point, name) for point in ("parked", "parked_gpu"))
    require(_metric(found, "parked", "kv/cpu_hit_tokens") > 0, "no turn found its conversation")
    return f"{none_ms:.1f} against {host_ms:.1f} ms at the median", none_ms / host_ms


def _context(found: Found) -> Value:
    tpot_ms = _metric(found, "long_context", "latency/tpot_ms/mean")
    record = found["long_context"].record
    assert record is not None
    host = (((record.plan or {}).get("predicted") or {}).get("host_kv") or {}).get("decode_step_ms")
    planned_ms = known(host, "the predicted step")
    require(
        _metric(found, "long_context", "kv/in_place_gib") > 0, "nothing was read in host memory"
    )
    return f"{tpot_ms:.1f} against {planned_ms:.1f} ms", tpot_ms / planned_ms


def _attention(found: Found) -> Value:
    figures = _part(found, "kv_bare", "attention")
    return f"{figures['ms']:.3f} ms ({figures['shape']})", figures["gb_s"] / figures["copy_gb_s"]


def _streamed(found: Found) -> Value:
    run = _part(found, "kv_weights", "streamed")
    weights, kv = run["h2d_bytes"] + run["in_place_bytes"], _kv_bytes(run)
    require(weights > 0 and kv > 0, f"{weights:,} bytes of weights, {kv:,} of KV were moved")
    link = known(found["kv_weights"].rate("h2d"), "the link's rate")
    text = f"{weights / 1e9:.2f} GB of weights and {kv / 1e9:.2f} GB of KV in "
    share = (weights + kv) / run["step_s"] / 1e9 / link
    return f"{text}{run['step_s'] * 1e3:.1f} ms", share
