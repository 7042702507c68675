"""Rows of `study=bench_experts`: experts in host memory, read in place, copied ahead or cached.

Tokens a second and ratios are of decode steps; experts are routed with a stated reuse.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final

from harness.studies.table import (
    Found,
    Judged,
    Targets,
    Value,
    bare_of,
    decode_of,
    known,
    lacks,
    prompt_ratio,
    require,
    sample_of,
    step_ratio,
)

CARD: Final = "H200"
"""Part of the name of the card whose tokens a second are targets."""
RATE_TARGETS: Final[Mapping[str, Mapping[int, float | None]]] = {
    "resident": {1: None, 4: None, 16: None, 64: None},
    "cached": {1: 60, 4: None, 16: None},
    "lossless": {1: 90, 4: None, 16: None},
    "awq": {1: 250, 4: None, 16: None, 64: None},
    "awq_cached": {1: 180, 4: None, 16: None},
}
"""Least tokens a second, by point and batch; None: no target."""
OVER_TARGETS: Final = {"in_place": 3.0, "prefetch": 30.0}
"""Least of the cached experts' tokens a second over those of another backend, batch 1."""
PROMPT_TOKENS: Final = 2048
"""Tokens of the prompts that are timed, one step each."""
PROMPT_TARGETS: Final[Mapping[str, float | None]] = {"in_place": None, "prefetch": 1.0}
"""Least of the time of such a prompt with another backend over that with cached experts."""
BARE_TARGETS: Final = {"gather": ("copies of experts alone", "in-place", 0.85)} | {
    "products": ("products of one token's experts alone", "copy", 0.65)
}
"""What is measured without an engine, the rate that it is held against, and the least share."""
LEAST_READ: Final = 0.45
"""Least share of the copy rate of a resident step of one token, with bytes of routed experts."""
MOST_OVER_BOUND: Final = 1.1
"""Most of a step over the time of its host blocks on the link."""
ENDS: Final = ("published", "longest", "four")
"""Points whose requests must all be answered."""


def judge(found: Found, *, card: str | None, is_default: bool) -> Judged:
    """Return the rows of the points that ran; tokens a second are held on one card alone."""
    table = Targets(found, is_absolute=is_default and CARD in (card or ""))
    for name, ratio in OVER_TARGETS.items():
        words = name.replace("_", " ")
        what = f"bf16 in 21.6 GiB, batch 1: tokens/s, cached / {words}"
        value = partial(step_ratio, name, "cached", 1)
        table.add(f"{name} cached", what, value, batch=1, least=ratio)
    for name, targets in RATE_TARGETS.items():
        for batch, least in targets.items():
            what = f"{table.title(name)}, batch {batch}: tokens/s"
            value = partial(_tokens_s, name, batch)
            table.add(name, what, value, batch=batch, is_ratio=False, least=least)
    for name, bound in PROMPT_TARGETS.items():
        words = name.replace("_", " ")
        what = f"bf16 in 21.6 GiB, prompt of {PROMPT_TOKENS} tokens: time, {words} / cached"
        value = partial(prompt_ratio, name, "cached", PROMPT_TOKENS)
        table.add(f"{name} cached", what, value, prompt=PROMPT_TOKENS, least=bound)
    for name in ("cached", "lossless", "awq_cached"):
        what = (
            f"{table.title(name)}, prompt of {PROMPT_TOKENS} tokens: bytes / time / in-place rate"
        )
        table.add(name, what, partial(_prompt_share, name), prompt=PROMPT_TOKENS)
    what = "resident, batch 1: bytes of weights / step time / copy rate"
    table.add("resident", what, _read_share, batch=1, least=LEAST_READ)
    for name, (words, rate, least) in BARE_TARGETS.items():
        what = f"{words} / {rate} rate"
        table.add("bare", what, partial(_bare_share, name), least=least)
    for name in ENDS:
        what = f"{table.title(name)}: share of requests answered"
        table.add(name, what, partial(_ended, name), least=1)
    what = "one of 131,072 tokens: step / time of its host blocks on the link"
    table.add("longest", what, _over_bound, most=MOST_OVER_BOUND)
    return table.judged(lacking=lacks(found) if card else [])


def _tokens_s(name: str, batch: int, found: Found) -> Value:
    run = decode_of(found, name, batch)
    needed, rate = run["expert_hits"] + run["expert_misses"], batch / run["step_s"]
    text = f"{run['step_s'] * 1e3:.2f} ms"
    if needed:
        text += f", {run['expert_hits'] / needed:.1%} of experts found, "
        text += f"{run['expert_bytes'] / 1e6:.0f} MB of others"
    return text, rate


def _read_share(found: Found) -> Value:
    run, read = decode_of(found, "resident", 1), sample_of(found, "resident", "steps")["read_bytes"]
    rate = known(found["resident"].rate("hbm_copy"), "the copy rate of the card")
    text = f"{run['step_s'] * 1e3:.2f} ms ({read / 1e9:.2f} GB)"
    return text, read / run["step_s"] / 1e9 / rate


def _prompt_share(name: str, found: Found) -> Value:
    """Hold the experts that a prompt copied against what the link gives."""
    steps, rate = sample_of(found, name, "steps"), found[name].rate("in_place")
    key = str(PROMPT_TOKENS)
    time_s = known(steps["chunk_s"][key], "the time of such a prompt")
    copied = steps["chunk_expert_bytes"][key]
    text = f"{time_s * 1e3:.1f} ms ({copied / 1e9:.2f} GB of experts)"
    return text, copied / time_s / 1e9 / known(rate, "the in-place rate of the link")


def _bare_share(name: str, found: Found) -> Value:
    case = bare_of(found, "bare", "experts")[name]
    text = f"{case['gb_s']:.1f} of {case['rate_gb_s']:.1f} GB/s ({case['shape']})"
    return text, case["gb_s"] / case["rate_gb_s"]


def _ended(name: str, found: Found) -> Value:
    work = sample_of(found, name, "throughput")
    done, asked = work["num_completed"], work["num_requests"]
    return f"{done} of {asked} requests", done / asked


def _over_bound(found: Found) -> Value:
    """Hold steps that only decode against what the link needs for blocks beyond the GPU's."""
    work, record = sample_of(found, "longest", "throughput"), found["longest"].record
    require(work["num_decode_steps"] > 0, "no step only decoded")
    assert record is not None
    kv = (record.plan or {})["kv"]
    beyond_bytes = (kv["max_model_len"] - kv["tokens"]) * kv["block_bytes"] / kv["block_size"]
    require(beyond_bytes > 0, "the GPU holds all blocks")
    step_ms = work["decode_s"] / work["num_decode_steps"] * 1e3
    bound_ms = beyond_bytes / known(found["longest"].rate("h2d"), "the rate of the link") / 1e6
    return f"{step_ms:.1f} ms, {bound_ms:.1f} ms on the link", step_ms / bound_ms
