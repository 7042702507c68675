"""Colours and axes that all figures share."""

import pytest

from reports.figures.run import PHASE_ORDER
from reports.figures.theme import log_ticks, part_colours

HOST = ("pinned_weights", "pinned_kv", "pageable_kv", "kv_staging", "load_staging", "tokenizer")


GPU = ("weights", "kv_cache", "activations", "logits", "graphs", "runtime", "kv_moves", "kv_stages")


@pytest.mark.parametrize(
    "names", [(*PHASE_ORDER, "other_s"), (*HOST, "process", "emulated_gpu"), GPU]
)
def test_no_two_parts_of_a_figure_have_one_colour(names):
    assert len(set(part_colours(names).values())) == len(names)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (3, 40, [5, 10, 20]),
        (0.4, 30, [1, 3, 10, 30]),
        (80, 30_000, [100, 1000, 10_000]),
        (1, 1e12, [1, 100, 1e4, 1e6, 1e8, 1e10, 1e12]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_few_and_round(low, high, ticks):
    assert log_ticks(low, high) == pytest.approx(ticks)
