"""Decodes of sequences that the GPU has no room for: what steps and turns cost, and how long."""

import math
from typing import Any, Final

from engine.plan.memory import MemoryPlan
from engine.plan.sizes import ReadRates, TierCosts

MOVE_SHARE: Final = 0.02
"""Share of a turn that moving blocks for it may take, where MOST_TURN and MOST_TURN_S allow."""
LEAST_TURN: Final = 16
"""Tokens of a turn at least."""
MOST_TURN: Final = 256
"""Tokens of a turn at most."""
MOST_TURN_S: Final = 6.0
"""Seconds of a turn at most, where LEAST_TURN allows: each other long sequence waits for it."""
LONG_SHARE: Final = 0.4
"""Share of the time that reading host blocks takes, where short sequences decode too."""
MOST_SKIPPED: Final = 63
"""Steps of short sequences at most between two of long ones."""


def read_step_s(rates: ReadRates | None, read_bytes: float) -> float:
    """Return the time of a decode step that reads so much of the host tier; 0 without rates."""
    if rates is None:
        return 0.0
    return rates.step_s + max(0.0, read_bytes) / rates.read_bytes_s


def turn_of(costs: TierCosts, read_bytes: float, moved_bytes: float) -> tuple[float, int]:
    """Return the time of a token in a turn, its moves shared out, and the tokens of the turn.

    Args:
        costs: Of the host tier.
        read_bytes: What each step of it reads of the host tier.
        moved_bytes: What is moved to the GPU before it.
    """
    step_s, move_s = read_step_s(costs.read_rates, read_bytes), 0.0
    if costs.swap_rates is not None:
        move_s = moved_bytes / costs.swap_rates.load_bytes_s
    tokens = LEAST_TURN
    if step_s:
        most = min(MOST_TURN, int(MOST_TURN_S / step_s))
        tokens = max(tokens, min(most, math.ceil(move_s / step_s / MOVE_SHARE)))
    return step_s + move_s / tokens, tokens


def num_skipped(rates: ReadRates | None, read_bytes: float) -> int:
    """Return the steps of short sequences between two that read so much of the host tier."""
    step_s = read_step_s(rates, 0)
    if not step_s:
        return 0
    read_s = read_step_s(rates, read_bytes) - step_s
    return min(MOST_SKIPPED, max(0, math.ceil(read_s / step_s * (1 / LONG_SHARE - 1)) - 1))


def predict_long(plan: MemoryPlan) -> list[dict[str, Any]] | None:
    """Return what sequences of max_model_len do at once, by their number; None where none is long.

    `wait_s` bounds the time between two tokens of each while no prompt is computed and no short
    sequence decodes; beside short ones it is 1 / LONG_SHARE times that.
    """
    host, kv = plan.host_kv, plan.kv
    if host is None or host.costs.read_rates is None or not kv.groups[0].in_place:
        return None
    size, rates = plan.block_bytes, host.costs.read_rates
    need, room = kv.blocks(plan.max_model_len)[0] * size, plan.num_gpu_blocks * size
    rows = []
    for count in _counts(int(plan.max_concurrency)):
        together_s = read_step_s(rates, count * need - room)
        token_s, tokens = turn_of(host.costs, need - room, room)
        in_turns = count > 1 and token_s < together_s / count
        read = need - room if in_turns else count * need - room
        rows.append(
            {
                "sequences": count,
                "in_turns": in_turns,
                "step_ms": read_step_s(rates, read) * 1e3,
                "tokens_s": 1 / token_s if in_turns else count / together_s,
                "turn_tokens": tokens if in_turns else None,
                "wait_s": (count - 1) * tokens * token_s if in_turns else together_s,
                "skipped_steps": num_skipped(rates, read),
            }
        )
    return rows


def _counts(most: int) -> list[int]:
    """Return powers of two up to a number, and that."""
    return sorted({1, *(2**n for n in range(most.bit_length()) if 2**n <= most), max(1, most)})
