"""Rows of `study=bench`: every backend against what link and memory allow."""

from collections.abc import Iterator
from typing import Any, Final

from engine.sealed import GIB
from harness.studies.table import (
    Found,
    Judged,
    Result,
    Row,
    counter_text,
    engine_table,
    grid,
    lacks,
    make_row,
    moved_bytes,
    moved_text,
    rate_table,
    touched_s,
)

RESIDENT_TARGETS: Final = {"H200": 0.72, "H100": 0.78}
"""Targets of batch 1, by a part of the card's name."""
BATCH_TARGETS: Final = {16: 0.68, 64: 0.62}
"""Targets of the resident engine at other batches."""
PREFILL_TARGETS_S: Final = {"1": 0.165, "4": 0.22}
"""Targets of prefetch, by the number of prompts of 2048 tokens."""
PEER_PREFETCH_S: Final = 0.1555
"""vLLM 0.25.1, prefetch of 20 of 32 layers, batch 1, on an H200 whose link gave 55.5 GB/s."""
PEER_LINK_GB_S: Final = 55.5
LEAST_PINNING_GIB_S: Final = 8.0
"""Least rate of slabs of 4 GiB or more, touched and registered by 16 threads."""
LEAST_PINNED_GIB: Final = 4.0
"""Less is told by no row: what does not grow with it takes as long."""
LEAST_LOADED_GIB: Final = 8.0
"""Of less, warming up and capturing take as long as the weights."""
LEAST_LOADING_GIB_S: Final = 1.5
"""Least rate from LLM() to an engine that is ready, in GiB of random weights a second."""


def judge(found: Found, *, card: str | None, is_default: bool) -> Judged:
    """Return all rows that the figures allow."""
    good = {name: result for name, result in found.items() if result.sample("steps")}
    rows = [
        *_stream_rows(good),
        *_prefill_rows(good, is_default=is_default),
        *_resident_rows(good, card or ""),
        *_embed_rows(good),
        *_engine_rows(good),
        *_chosen_rows(good, is_default=is_default),
        *_planned_rows({k: v for k, v in good.items() if _kind(k) != "prefetch_step"}),
        *_counter_rows(good),
        *_pinning_rows(good),
        *_loading_rows(good),
    ]
    lacking = lacks(found)
    if card:
        lacking += [
            f"{result.title}: NVML's counter of the link: no figures: it cannot be read."
            for result in good.values()
            if (counter := result.sample("steps")["counter"]) and counter["nvml_gb_s"] is None
        ]
    same = equal_tokens(good)
    wrong = [name for name, equal in same.items() if not equal]
    if wrong:
        named = ", ".join(wrong)
        lacking.append(f"Greedy tokens: **not equal** to the resident engine's in {named}.")
    tables = [*_sweep_table(good), *_staging_table(good)]
    if same and not wrong:
        words = "equal to the resident engine's in every case and batch that both ran"
        tables += ["", f"Greedy tokens: {words}."]
    tables += [*engine_table(found), *rate_table(found)]
    return Judged(rows=rows, tables=tables, headline=_headline(good), lacks=lacking)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _share(num_bytes: float, seconds: float, gb_s: float | None) -> float | None:
    return None if not gb_s else num_bytes / seconds / 1e9 / gb_s


def _kind(name: str) -> str:
    """Return the kind of a point by its name: prefetch_2 is a second prefetch."""
    return name.rstrip("0123456789").rstrip("_")


def _stream_rows(found: Found) -> Iterator[Row]:
    """Bytes that cross the link a step, against what the link carries."""
    kinds = {"prefetch": ("h2d", 0.97, "link rate"), "uva": ("in_place", 0.96, "in-place rate")}
    for name, result in found.items():
        if _kind(name) not in kinds:
            continue
        probe, least, word = kinds[_kind(name)]
        for batch, run in result.decodes():
            moved = moved_bytes(run)
            text = f"{_ms(run['step_s'])} ({moved_text(run)})"
            what = f"{result.title}, batch {batch}: bytes / step time / {word}"
            share = _share(moved, run["step_s"], result.rate(probe)) if moved else None
            yield make_row(what, (text, share), least=least if moved else None)


def _prefill_rows(found: Found, *, is_default: bool) -> Iterator[Row]:
    """Time to the first tokens of long prompts."""
    for num, most in PREFILL_TARGETS_S.items():
        base: float | None = None
        for name, result in found.items():
            steps = result.sample("steps")
            seconds = steps["prefill"].get(num, {}).get("seconds")
            if seconds is None:
                continue
            is_prefetch = _kind(name) == "prefetch"
            what = f"{result.title}, prefill {num} x {steps['prefill_tokens']} tokens"
            bound = most if is_prefetch and is_default else None
            yield make_row(f"{what}: s", (f"{seconds:.4f} s", seconds), most=bound)
            if is_prefetch and base is None:
                base = seconds
            elif _kind(name) == "uva" and base:
                yield make_row(f"{what} / prefetch", ("", seconds / base), most=1.15)


def _resident_rows(found: Found, card: str) -> Iterator[Row]:
    """Bytes that a resident step reads, against the copy rate of GPU memory."""
    if "resident" not in found:
        return
    result = found["resident"]
    first = next((v for k, v in RESIDENT_TARGETS.items() if k in card), None)
    for batch, run in result.decodes():
        moved = result.sample("steps")["read_bytes"] + (run["kv_bytes"] if batch > 1 else 0)
        text = f"{_ms(run['step_s'])} ({moved / 1e9:.2f} GB)"
        words = "weight bytes" if batch == 1 else "weight and KV bytes"
        what = f"resident, batch {batch}: {words} / step time / memory copy rate"
        value = text, _share(moved, run["step_s"], result.rate("hbm_copy"))
        yield make_row(what, value, least=first if batch == 1 else BATCH_TARGETS.get(batch))


def _embed_rows(found: Found) -> Iterator[Row]:
    """An embedding table in host memory against one on the GPU; a tied one is read whole."""
    if not {"resident", "embed_in_place"} <= found.keys():
        return
    record = found["embed_in_place"].record
    if record is not None and (record.config["model"]["spec"] or {})["tie_word_embeddings"]:
        return
    base = dict(found["resident"].decodes())
    for batch, run in found["embed_in_place"].decodes():
        if batch in base:
            ours_s, base_s = run["step_s"], base[batch]["step_s"]
            text = f"{_ms(ours_s)} against {_ms(base_s)}"
            what = f"embedding table in place / resident, batch {batch}: step"
            yield make_row(what, (text, ours_s / base_s), most=1.01)


def _engine_rows(found: Found) -> Iterator[Row]:
    """The whole step of the largest batch against a bare replay of its graph."""
    sizes = [batch for result in found.values() for batch, _ in result.decodes()]
    for result in found.values():
        for batch, run in result.decodes():
            if run["replay_s"] and batch == max(sizes):
                text = f"{_ms(run['step_s'])} against {_ms(run['replay_s'])}"
                what = f"{result.title}, batch {batch}: whole step / bare graph replay"
                yield make_row(what, (text, run["step_s"] / run["replay_s"]), most=1.05)


def _chosen_rows(found: Found, *, is_default: bool) -> Iterator[Row]:
    """Placements chosen by predicted times, in the same GPU bytes as prefetch."""
    if "chosen" not in found:
        return
    result = found["chosen"]
    peer_s = PEER_PREFETCH_S * PEER_LINK_GB_S / (result.rate("h2d") or PEER_LINK_GB_S)
    for batch, run in result.decodes():
        is_compared = is_default and batch == 1
        text = f"{_ms(run['step_s'])} ({moved_text(run)})"
        share = run["step_s"] / peer_s if is_compared else None
        words = " / vLLM's prefetch, 155.5 ms at 55.5 GB/s, at this link" if is_compared else ""
        what = f"{result.title} ({_chosen(result)}), batch {batch}: step{words}"
        yield make_row(what, (text, share), most=0.88 if is_compared else None)


def _chosen(result: Result) -> str | None:
    plan: dict[str, Any] = (result.record.plan if result.record is not None else None) or {}
    return (plan.get("choice") or {}).get("chosen")


def _planned_rows(found: Found) -> Iterator[Row]:
    """Bytes of a decode step as the engine counts them, against the plan."""
    for result in found.values():
        pairs = [
            (moved_bytes(run), run["planned_h2d_bytes"] + run["planned_in_place_bytes"])
            for _, run in result.decodes()
        ]
        worst = max(pairs, key=lambda p: abs(p[0] / p[1] - 1) if p[1] else p[0], default=(0, 0))
        if worst[1]:
            what = f"{result.title}: bytes of a step, counted / planned"
            value = f"{worst[0]:,} against {worst[1]:,}", worst[0] / worst[1]
            yield make_row(what, value, least=0.99, most=1.01)


def _counter_rows(found: Found) -> Iterator[Row]:
    """The engine's count of bytes against NVML's counter, calibrated on traffic of known size."""
    for result in found.values():
        counter = result.sample("steps")["counter"]
        if counter and counter["nvml_gb_s"]:
            ours, theirs = counter["engine_gb_s"], counter["nvml_gb_s"]
            what = f"{result.title}: engine's bytes / NVML's counter of the link, calibrated"
            yield make_row(what, (counter_text(counter), ours / theirs), least=0.9, most=1.1)


def _pinning_rows(found: Found) -> Iterator[Row]:
    """Host memory of the weights, made present and registered."""
    for result in found.values():
        build = result.sample("build")
        pinned = result.sample("steps")["memory"]["host_pinned_bytes"] / GIB
        seconds = touched_s(build)
        if pinned >= LEAST_PINNED_GIB and seconds:
            what = f"{result.title}: host memory touched and registered, GiB/s"
            value = f"{pinned:.2f} GiB in {seconds:.2f} s", pinned / seconds
            yield make_row(what, value, least=LEAST_PINNING_GIB_S)


def _loading_rows(found: Found) -> Iterator[Row]:
    """From LLM() to an engine that is ready; not of the first, which compiles kernels for all."""
    for result in list(found.values())[1:]:
        plan: dict[str, Any] = (result.record.plan if result.record is not None else None) or {}
        weights = sum(plan.get("placements", {}).values()) / GIB
        seconds = result.sample("build").get("seconds")
        if weights >= LEAST_LOADED_GIB and seconds:
            what = f"{result.title}: LLM() to ready: weights / time, GiB/s"
            value = f"{weights:.2f} GiB in {seconds:.2f} s", weights / seconds
            yield make_row(what, value, least=LEAST_LOADING_GIB_S)


def _sweep_table(found: Found) -> list[str]:
    """What each prefetch_step costs and gives, of the points prefetch_step_1, ..."""
    rows, title = [], ""
    for name, result in found.items():
        if _kind(name) != "prefetch_step" or result.record is None or result.record.plan is None:
            continue
        plan = result.record.plan
        for _, run in list(result.decodes())[:1]:
            title, moved = result.title.rpartition(",")[0], run["h2d_bytes"] / 1e9
            size = plan["num_slots"] * plan["slot_bytes"] / GIB
            cells = [name.rpartition("_")[2], str(plan["num_slots"]), f"{size:.2f}"]
            cells += [f"{run['step_s'] * 1e3:.2f}", f"{moved:.3f}"]
            rows.append([*cells, f"{moved / run['step_s']:.1f}" if moved else ""])
    head = ("prefetch_step", "slots", "of GiB", "step, ms", "copied, GB", "GB/s")
    words = f"{title}: what each prefetch_step costs and gives"
    return ["", words, "", *grid(head, rows)] if rows else []


def crossover(found: Found) -> tuple[list[tuple[int, float, float]], int | None]:
    """Return (tokens, in place s, staged s), and from how many tokens on staging is faster."""
    both = [
        found[name].sample("steps").get("chunk_s", {}) if name in found else {}
        for name in ("uva_in_place", "uva_staged")
    ]
    pairs = sorted(
        (int(num), seconds, both[1][num])
        for num, seconds in both[0].items()
        if seconds is not None and both[1].get(num) is not None
    )
    at = None
    for tokens, in_place_s, staged_s in reversed(pairs):
        if staged_s >= in_place_s:
            break
        at = tokens
    return pairs, at


def _staging_table(found: Found) -> list[str]:
    pairs, at = crossover(found)
    if not pairs:
        return []
    title = found["uva_in_place"].title.rpartition(",")[0]
    words = "one prompt, its weights read in place or staged through slots first; by prompt tokens"
    rows = [(str(num), f"{a * 1e3:.1f}", f"{b * 1e3:.1f}") for num, a, b in pairs]
    text = "Staging is not faster at the largest of them."
    if at is not None:
        text = f"Staging is faster from {at} tokens on."
        if at == pairs[0][0]:
            text = "Staging is faster at all of them."
    table = grid(("tokens", "in place, ms", "staged, ms"), rows)
    return ["", f"{title}: {words}", "", *table, "", text]


def equal_tokens(found: Found) -> dict[str, bool]:
    """Say of each point whether its tokens are the resident engine's, at every batch of both.

    Only steps that both made are compared: an engine that is fast makes more of them.
    """
    if "resident" not in found:
        return {}
    base, same = dict(found["resident"].decodes()), {}
    for name, result in found.items():
        if name == "resident" or _layers(result) != _layers(found["resident"]):
            continue
        pairs = [
            (run["tokens"], base[batch]["tokens"])
            for batch, run in result.decodes()
            if batch in base
        ]
        if pairs:
            same[name] = all(a[: len(b)] == b[: len(a)] for a, b in pairs)
    return same


def _layers(result: Result) -> int:
    if result.record is None:
        return 0
    return int((result.record.config["model"]["spec"] or {})["num_hidden_layers"])


def _headline(found: Found) -> list[str]:
    """The backends side by side: what README shows."""
    shares = {"prefetch": ("h2d", "of copies"), "uva": ("in_place", "of in-place reads")}
    head = "backend|share of the card|weights in host memory|one sequence: a token|64 at once: "
    head += "tokens/s of a step|share of what the link gives"
    rows = []
    for name in ("uva", "prefetch", "chosen"):
        runs = dict(found[name].decodes()) if name in found else {}
        if 1 not in runs:
            continue
        result = found[name]
        record = result.record
        assert record is not None
        plan, probe = record.plan or {}, shares.get(name, ("h2d", "of copies"))
        placed = plan["placements"]
        off = sum(size for place, size in placed.items() if place != "resident") / GIB
        part = _share(moved_bytes(runs[1]), runs[1]["step_s"], result.rate(probe[0]))
        share = "" if part is None else f"{part:.2f} {probe[1]}"
        many = f"{64 / runs[64]['step_s']:.0f}" if 64 in runs else ""
        used = f"{record.config['engine']['gpu_memory_utilization']:g}"
        step = f"{runs[1]['step_s'] * 1e3:.0f} ms"
        rows.append((f"`{_command(name)}`", used, f"{off:.1f} GiB", step, many, share))
    return grid(head.split("|"), rows) if rows else []


def _command(name: str) -> str:
    return f"offload={'auto' if name == 'chosen' else name}"
