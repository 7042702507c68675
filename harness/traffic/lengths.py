"""Lengths of prompts and outputs, drawn from a distribution and kept within bounds."""

import math
import random

from harness.traffic.settings import Lengths


def draw_lengths(num: int, lengths: Lengths, draw: random.Random) -> list[int]:
    """Return `num` lengths in tokens, from `lengths.least` to `lengths.most`.

    Normal and lognormal draws are rounded, then moved to the nearer bound where they are outside.
    The lognormal's mean and deviation are those of the lengths, not of their logarithms.

    Args:
        num: how many.
        lengths: the distribution.
        draw: the source of chance.
    """
    return [_draw(lengths, draw) for _ in range(num)]


def _draw(lengths: Lengths, draw: random.Random) -> int:
    mean, std = float(lengths.tokens or 0), lengths.std or 0.0
    match lengths.distribution:
        case "uniform":
            return draw.randint(lengths.least, lengths.most)
        case "normal":
            found = draw.gauss(mean, std)
        case "lognormal":
            variance = math.log(1 + (std / mean) ** 2)
            found = draw.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
        case _:
            return lengths.most
    return min(max(round(found), lengths.least), lengths.most)
