"""How far a peer's greedy tokens agree with the reference: other kernels round otherwise."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

UNKNOWN_TOKEN: Final = -1
"""Stands for a token whose id the system does not tell."""


@dataclass(kw_only=True)
class Agreement:
    """What a comparison found."""

    facts: dict[str, Any]
    """For the record's effective.correctness."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def agree(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> Agreement:
    """Compare tokens prompt by prompt up to the first that differs.

    After that one the two go on from different texts, so nothing more is compared. Where no prompt
    agrees in its first token, the peer has other weights or other prompts, and a reason says so.

    Args:
        expected: tokens of the reference.
        got: tokens of the peer, UNKNOWN_TOKEN where it does not tell them.
    """
    if any(UNKNOWN_TOKEN in tokens for tokens in got):
        why = "the system tells no token ids"
        note = f"correctness: {why}, so its tokens were not compared with the reference."
        return Agreement(facts={"checked": False, "why": note}, notes=[note])
    leading = [_num_equal(want, have) for want, have in zip(expected, got, strict=True)]
    total, equal = sum(len(tokens) for tokens in expected), sum(leading)
    facts: dict[str, Any] = {
        "checked": True,
        "num_prompts": len(got),
        "num_tokens": total,
    }
    if equal < total:
        facts["leading_equal"] = leading
    found = Agreement(facts=facts, metrics={"correctness/equal_share": equal / total})
    if not any(leading):
        found.reasons.append(
            f"correctness: of {len(got)} prompts none begins with the reference's token. The "
            "system has other weights or was sent other prompts. Compare its model with ours."
        )
    elif equal < total:
        found.notes.append(
            f"correctness: {equal} of {total} tokens are those of the reference, counted up to the "
            "first that differs of each prompt. Other kernels round otherwise; see "
            "correctness/equal_share."
        )
    return found


def _num_equal(want: Sequence[int], have: Sequence[int]) -> int:
    for index, (token, other) in enumerate(zip(want, have, strict=True)):
        if token != other:
            return index
    return len(want)
