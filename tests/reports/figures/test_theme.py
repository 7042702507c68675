"""Colours and axes that all figures share."""

from dataclasses import fields

import pytest

from reports.figures.run import FIGURES, PHASE_ORDER
from reports.figures.theme import (
    NARROW_IN,
    PART_COLOURS,
    SPARE_COLOURS,
    THEMES,
    Theme,
    adaptive,
    ink_on,
    log_ticks,
    part_colours,
)
from tests.reports.examples import ok_record
from tests.reports.figures.pictures import drawn
from tests.slow import mostly_slow

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


@pytest.mark.thorough
def test_an_adaptive_figure_has_no_colour_of_its_own_but_those_of_parts():
    svg = adaptive(drawn("memory").svg()).decode()
    rules, picture = svg.split("</style>", 1)
    colours = [getattr(THEMES["light"], item.name) for item in fields(Theme)]
    for colour in filter(lambda value: isinstance(value, str), colours):
        assert colour in rules
        assert colour not in picture
    assert THEMES["dark"].ink in rules
    assert "var(--ink)" in picture
    assert PART_COLOURS["weights"] in picture
    assert "DejaVu" not in picture


def test_no_colour_that_stays_is_one_of_the_light_theme():
    light = {getattr(THEMES["light"], item.name) for item in fields(Theme)}
    kept = {*PART_COLOURS.values(), *SPARE_COLOURS, *map(ink_on, ("#000000", "#ffffff"))}
    assert not light & kept
    assert len(light) == len(fields(Theme))


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(sorted(FIGURES), "kv".__eq__))
def test_a_narrow_figure_has_the_width_of_a_phone_and_nothing_beyond(name):
    drawing = FIGURES[name](ok_record(), THEMES["light"].narrow)
    drawing.png()
    figure = drawing.figure
    assert figure.get_figwidth() == NARROW_IN
    drawn_in = figure.get_tightbbox()
    assert drawn_in.x0 > -0.01
    assert drawn_in.x1 < NARROW_IN + 0.01
