"""Rows of `study=bench_lossless`: weights in codes against the same weights plain, to the token.

A row is there where all the points that it needs were chosen. Where one of them has no figure, or
something else was measured than the row says, the row says so and its target is not measured.
"""

from functools import partial
from typing import Final

from harness.studies.table import (
    BEFORE,
    Found,
    Judged,
    LackError,
    Result,
    Targets,
    Value,
    bare_of,
    decode_of,
    known,
    lacks,
    link_share,
    make_row,
    moved_bytes,
    prompt_ratio,
    require,
    sample_of,
    step_ms,
    step_ratio,
)

CARD: Final = "H200"
"""Part of the name of the card whose milliseconds, seconds and rates are targets."""
STEP_TARGETS_MS: Final = {1: 3.9, 16: 4.5}
"""Targets of decode steps in 13.6 GiB, by batch."""
RATIO_TARGETS: Final = {
    1: ("lossless_13gib", 0.95),
    8: ("lossless_13gib", 0.95),
    16: ("lossless_13gib", 0.97),
    32: ("lossless_16gib", 1.0),
    64: ("lossless_24gib", 1.15),
}
"""Points and targets of steps over those of plain weights, by batch."""
PREFILL_TARGETS: Final = {2048: 1.15, 128: 2.0, 512: 1.4}
"""Targets of single prompts over plain weights, by tokens."""
MOST_SLOWER: Final = 1.01
"""Most of a step or prompt of plain weights over the version before: what repeats differ by."""
MOST_STORED: Final = 0.755
"""Most bytes of weights in codes over those of plain ones, tables included."""
PLAIN: Final = {
    "lossless_13gib": "plain_40gib",
    "lossless_16gib": "plain_40gib",
    "lossless_24gib": "plain_40gib",
    "lossless_prefetch": "plain_40gib",
    "lossless_uva": "plain_40gib",
    "plain_prefetch": "plain_40gib",
    "lossless_llama": "plain_llama",
    "lossless_kept": "lossless_ready",
}
"""Point -> the one with the same weights, plain or not kept, whose tokens are compared."""
OVER_LINK: Final = "weight bytes over the link a step, but rows of the embedding"


def judge(found: Found, *, card: str | None, is_default: bool) -> Judged:
    """Return the rows of the points that ran, in the order of the targets."""
    table = Targets(found, is_absolute=is_default and CARD in (card or ""))
    _small_rows(table)
    _ratio_rows(table)
    _streamed_rows(table)
    _other_rows(table)
    _token_rows(table)
    lacking = [text for text in lacks(found) if card or "on a GPU only" not in text]
    return table.judged(lacking=lacking)


def _small_rows(table: Targets) -> None:
    """Rows of the model in a budget that plain weights exceed."""
    point, words = "lossless_13gib", "lossless, 13.6 GiB"
    for batch, most in STEP_TARGETS_MS.items():
        value = partial(step_ms, point, batch)
        table.add(
            point,
            f"{words}, batch {batch}: step, ms",
            value,
            batch=batch,
            is_ratio=False,
            most=most,
        )
    table.add(point, f"{words}: {OVER_LINK}", partial(_moved, point), most=0)
    table.add(point, f"{words}: KV tokens", partial(_kv, point), is_ratio=False, least=4600)
    what = f"{words}, 100 queued requests (128 in, 128 out): output tokens/s"
    table.add(point, what, _queue, is_ratio=False, least=2500)


def _ratio_rows(table: Targets) -> None:
    """Rows of steps and prompts over those of plain weights that are resident.

    Where a run of the version before is given, targets are over its figures; the plain weights of
    this version stand beside them, and may be no slower.
    """
    what = "lossless / bf16: weight bytes that a step reads"
    table.add("lossless_13gib plain_40gib", what, _stored, most=MOST_STORED)
    bases = {BEFORE: " of the version before", "plain_40gib": ""}
    held = next((name for name in bases if name in table.found), None)
    for base, words in bases.items():
        for batch, (name, most) in RATIO_TARGETS.items():
            what = f"lossless / bf16{words}, batch {batch}: step"
            value = partial(step_ratio, name, base, batch)
            bound = most if base == held else None
            table.add(f"{name} {base}", what, value, batch=batch, most=bound)
        for tokens, most in PREFILL_TARGETS.items():
            what = f"lossless / bf16{words}, prefill 1 x {tokens} tokens"
            value = partial(prompt_ratio, "lossless_13gib", base, tokens)
            bound = most if base == held else None
            table.add(f"lossless_13gib {base}", what, value, prompt=tokens, most=bound)
    for batch in RATIO_TARGETS:
        what = f"bf16 / bf16{bases[BEFORE]}, batch {batch}: step"
        value = partial(step_ratio, "plain_40gib", BEFORE, batch)
        table.add(f"plain_40gib {BEFORE}", what, value, batch=batch, most=MOST_SLOWER)
    for tokens in PREFILL_TARGETS:
        what = f"bf16 / bf16{bases[BEFORE]}, prefill 1 x {tokens} tokens"
        value = partial(prompt_ratio, "plain_40gib", BEFORE, tokens)
        table.add(f"plain_40gib {BEFORE}", what, value, prompt=tokens, most=MOST_SLOWER)


def _streamed_rows(table: Targets) -> None:
    """Rows of 20 of 32 layers off the GPU."""
    ahead, words = "lossless_prefetch", "lossless, 20 of 32 layers off the GPU"
    for batch in (1, 16, 64):
        what = f"{words}, prefetch, batch {batch}"
        value = partial(link_share, ahead, "h2d", batch)
        rate = f"{what}: bytes / step time / link rate"
        table.add(ahead, rate, value, batch=batch, least=0.97)
        value = partial(step_ms, ahead, batch)
        table.add(ahead, f"{what}: step, ms", value, batch=batch, is_ratio=False, most=114)
    what = f"{words}, prefetch: bytes copied a step / those of bf16"
    table.add(f"{ahead} plain_prefetch", what, _streamed, batch=1, most=MOST_STORED)
    for batch in (1, 16, 64):
        what = f"{words}, uva, batch {batch}: bytes / step time / in-place rate"
        value = partial(link_share, "lossless_uva", "in_place", batch)
        table.add("lossless_uva", what, value, batch=batch, least=0.95)


def _other_rows(table: Targets) -> None:
    """Rows of other models, of restoring alone, and of the load."""
    point, words = "lossless_13b", "lossless, 13B in 21.6 GiB"
    value = partial(step_ms, point, 1)
    table.add(point, f"{words}, batch 1: step, ms", value, batch=1, is_ratio=False, most=7.5)
    table.add(point, f"{words}: {OVER_LINK}", partial(_moved, point), most=0)
    what = "Llama-3.1-8B in 21.6 GiB, lossless / bf16: KV tokens"
    table.add("lossless_llama plain_llama", what, _kv_ratio, least=1.7)
    what = "restoring alone: TB/s of bf16 written"
    table.add("lossless_bare", what, _restored, is_ratio=False, least=2.1)
    what = "lossless, engine ready from page cache: s, without compiling"
    table.add("lossless_ready", what, partial(_ready, "lossless_ready"), is_ratio=False, most=10)
    what = "lossless, engine ready from a kept copy: s, without compiling"
    value = partial(_ready, "lossless_kept", is_kept=True)
    table.add("lossless_kept", what, value, is_ratio=False, most=4)


def _token_rows(table: Targets) -> None:
    """Rows that compare greedy tokens, of all that two points both made."""
    for name, plain in PLAIN.items():
        if not {name, plain} <= table.found.keys():
            continue
        both = [_tokens(table.found[each]) for each in (name, plain)]
        pairs = {words: (both[0][words], both[1][words]) for words in both[0].keys() & both[1]}
        equal = {words: _is_same(*pair) for words, pair in sorted(pairs.items())}
        if equal:
            wrong = [words for words, is_equal in equal.items() if not is_equal]
            text = f"**not** in {', '.join(wrong)}" if wrong else ", ".join(equal)
            titles = (table.found[each].title for each in (name, plain))
            what = "greedy tokens of {} equal to those of {}: share".format(*titles)
            value = text, sum(equal.values()) / len(equal)
            table.rows.append(make_row(what, value, least=1))


def _is_same(ours: list[int], theirs: list[int]) -> bool:
    """Tell whether tokens are the same as far as both went; an engine that is fast makes more."""
    least = min(len(ours), len(theirs))
    return least > 0 and ours[:least] == theirs[:least]


def _tokens(result: Result) -> dict[str, list[int]]:
    """Return greedy tokens by what was done, in words."""
    tokens = {f"batch {batch}": run["tokens"] for batch, run in result.decodes()}
    for length, made in result.sample("steps").get("chunk_tokens", {}).items():
        if made is not None:
            tokens[f"prompts of {length}"] = made
    return tokens


def _moved(name: str, found: Found) -> Value:
    sample_of(found, name, "steps")
    runs = dict(found[name].decodes())
    require(bool(runs), "no batch fitted")
    worst = max(map(moved_bytes, runs.values()))
    return f"{worst:,} bytes, batch {', '.join(map(str, runs))}", worst


def _kv_tokens(found: Found, name: str) -> int:
    record = found[name].record
    if record is None or record.plan is None:
        raise LackError(found[name].lack or "it has no plan")
    return int(record.plan["kv"]["tokens"])


def _kv(name: str, found: Found) -> Value:
    tokens = _kv_tokens(found, name)
    return f"{tokens:,} tokens", tokens


def _kv_ratio(found: Found) -> Value:
    ours, theirs = (_kv_tokens(found, f"{kind}_llama") for kind in ("lossless", "plain"))
    return f"{ours:,} against {theirs:,} tokens", ours / known(theirs, "the KV room of bf16")


def _stored(found: Found) -> Value:
    names = ("lossless_13gib", "plain_40gib")
    ours, theirs = (sample_of(found, name, "steps")["read_bytes"] for name in names)
    return f"{ours / 1e9:.2f} against {theirs / 1e9:.2f} GB", ours / theirs


def _streamed(found: Found) -> Value:
    names = ("lossless_prefetch", "plain_prefetch")
    ours, theirs = (moved_bytes(decode_of(found, name, 1)) for name in names)
    require(theirs > 0, "bf16 copied nothing")
    return f"{ours / 1e9:.3f} against {theirs / 1e9:.3f} GB", ours / theirs


def _restored(found: Found) -> Value:
    figures = bare_of(found, "lossless_bare", "restore")
    require(figures["is_equal"], "what was restored was not what was packed")
    text = f"{figures['ms']:.3f} ms ({figures['shape']})"
    return text, figures["written_gb_s"] / 1e3


def _queue(found: Found) -> Value:
    result = found["lossless_13gib"]
    metrics = result.record.metrics if result.record is not None else {}
    rate = metrics.get("throughput/output_tok_s")
    if rate is None:
        raise LackError(result.lack or "it did not run")
    work = result.sample("throughput")
    require(
        work["num_completed"] == work["num_requests"],
        f"{work['num_completed']} of {work['num_requests']} requests finished",
    )
    return f"{rate:.0f} tokens/s", rate


def _ready(name: str, found: Found, *, is_kept: bool = False) -> Value:
    build = sample_of(found, name, "build")
    kept_bytes, compile_s = build["moved_bytes"].get("kept", 0), build["phases"].get("compile", 0.0)
    wrong = "no copy that was kept was read" if is_kept else "a copy that was kept was read"
    require(is_kept == bool(kept_bytes), wrong)
    seconds = build["seconds"] - compile_s
    return f"{seconds:.2f} s, compiling {compile_s:.2f} s more", seconds
