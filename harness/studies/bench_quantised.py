"""Rows of `study=bench_quantised`: quantised weights against 16-bit ones that are resident."""

from functools import partial
from typing import Final

from harness.studies.table import (
    BEFORE,
    Found,
    Judged,
    Targets,
    lacks,
    link_share,
    prompt_ratio,
    step_ratio,
)

PLAIN: Final = "plain"
"""The point of 16-bit weights."""
STEP_TARGETS: Final = {
    "awq": {1: 0.43, 16: 0.55, 64: None},
    "int8": {1: 0.65, 16: None, 64: None},
    "fp8": {1: 0.65, 16: None, 64: None},
    "q4_k_m": {1: 0.5, 16: None, 64: None},
}
"""Most of a step over that of 16-bit weights, by point and batch; None: no target."""
BASES: Final = {BEFORE: "16 bits of the version before", PLAIN: "16 bits"}
"""16-bit weights that steps are compared with, and their name; targets are over the first found."""
PROMPTS: Final = (128, 512, 2048)
LINK_TARGETS: Final = {
    "awq_prefetch": ("h2d", "link", 0.97),
    "awq_uva": ("in_place", "in-place", 0.95),
}
"""Rate of the link, its name, and the least share of it, by point."""


def judge(found: Found, *, card: str | None, is_default: bool) -> Judged:
    """Return the rows of the points that ran; ratios are held on every card.

    Where a run of the version before the codes of lossless weights is given, targets are over its
    figures; the 16-bit weights of this version stand beside them.
    """
    del is_default
    table = Targets(found, is_absolute=False)
    held = next((base for base in BASES if base in found), PLAIN)
    for base, words in BASES.items():
        for name, targets in STEP_TARGETS.items():
            title = table.title(name)
            for batch, most in targets.items():
                what = f"{title} / {words}, batch {batch}: step"
                value = partial(step_ratio, name, base, batch)
                bound = most if base == held else None
                table.add(f"{name} {base}", what, value, batch=batch, most=bound)
            for tokens in PROMPTS:
                what = f"{title} / {words}, prefill 1 x {tokens} tokens"
                value = partial(prompt_ratio, name, base, tokens)
                table.add(f"{name} {base}", what, value, prompt=tokens)
    for name, (rate, words, least) in LINK_TARGETS.items():
        for batch in (1, 16):
            what = f"{table.title(name)}, batch {batch}: bytes / step time / {words} rate"
            value = partial(link_share, name, rate, batch)
            table.add(name, what, value, batch=batch, least=least)
    return table.judged(lacking=lacks(found) if card else [])
