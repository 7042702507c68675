"""Sides of a comparison: how they are written, composed, and held to the same work."""

import functools

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from engine.errors import ConfigError
from harness.config.compose import Composer
from harness.config.schema import AbConfig
from harness.config.source import keep_texts
from harness.studies.ab import check_comparisons, compose_sides
from tests.slow import slow

LINE = ["model=fake", "scenario=ab", "tracking=none"]


@pytest.mark.parametrize(
    ("typed", "quoted"),
    [
        ("ab.a=[offload=none]", "ab.a=['offload=none']"),
        ("++ab.b=[offload=uva, x.y=4]", "++ab.b=['offload=uva','x.y=4']"),
        (
            "ab.b=[model.fake.decode_ms=[5,6],kv=gpu]",
            "ab.b=['model.fake.decode_ms=[5,6]','kv=gpu']",
        ),
        ("ab.a=[]", "ab.a=[]"),
        ("ab.a=['offload=none']", "ab.a=['offload=none']"),
        ("offload=[a=b]", "offload=[a=b]"),
    ],
)
def test_items_need_no_quotes(typed, quoted):
    assert keep_texts(typed, OverridesParser.create()) == quoted


@functools.cache
def point(*more):
    (found,) = Composer().plan([*LINE, *more]).points
    return found


def sides(*more):
    found = point(*more)
    return compose_sides(found.config.ab, found.overrides)


@pytest.mark.thorough
def test_both_sides_have_what_is_beside_them_and_their_own():
    a, b = sides("ab.b=[offload=uva,offload.uva.cpu_offload_gb=1]", "engine.max_num_seqs=3")
    assert (a.config.offload.backend, b.config.offload.backend) == ("none", "uva")
    assert b.config.offload.uva.cpu_offload_gb == 1
    assert {a.config.engine.max_num_seqs, b.config.engine.max_num_seqs} == {3}
    assert (a.config.ab, b.config.ab) == (None, None)
    assert a.config.scenario == b.config.scenario
    assert a.overrides == [
        "+model=fake",
        "scenario=ab",
        "tracking=none",
        "engine.max_num_seqs=3",
        "offload=none",
    ]


@pytest.mark.thorough
def test_a_side_s_own_choice_replaces_one_beside_it():
    a, b = sides("offload=prefetch", "ab.a=[offload=none]", "ab.b=[]")
    assert (a.config.offload.backend, b.config.offload.backend) == ("none", "prefetch")


def test_what_a_scripted_engine_pretends_is_no_work():
    a, b = sides("ab.a=[]", "ab.b=[model.fake.decode_ms=[6]]")
    assert (a.config.model.fake.decode_ms, b.config.model.fake.decode_ms) == ([5], [6])


@pytest.mark.thorough_but("offload=uwa", "mode=plan")
@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            "scenario.latency.num_requests=3",
            "the same scenario on both sides, but scenario.latency",
        ),
        slow("model.load_format=auto", "ab.b: "),
        ("offload=uwa", "ab.b: offload: expected one of"),
        slow("offload=none,uva", "ab.b: "),
        ("mode=plan", "ab.b: mode: expected run with model=fake"),
        slow("tracking=mlflow", "the same tracking on both sides"),
        ("fail_fast=false", "expected two sides that differ"),
    ],
)
def test_unlike_work_and_wrong_sides_are_refused(own, words):
    with pytest.raises(ConfigError, match=words):
        sides("ab.a=[]", f"ab.b=[{own}]" if "," not in own else f"ab.b=['{own}']")


def test_equal_overrides_are_refused():
    with pytest.raises(ConfigError, match="expected other overrides"):
        AbConfig(a=["x=1", "y=2"], b=["y=2", "x=1"])
    with pytest.raises(ConfigError, match="one pair has no deviation"):
        AbConfig(b=["x=1"], aa_pairs=1)
    for name in ("pairs", "aa_pairs"):
        with pytest.raises(ConfigError, match=rf"ab.{name}: .* <= 1000, got 100000000000"):
            AbConfig(b=["x=1"], **{name: 10**11})
    with pytest.raises(ConfigError, match="expected an integer >= 1"):
        AbConfig(b=["x=1"], pairs=0)


@pytest.mark.thorough
def test_a_sweep_of_comparisons_is_refused():
    plan = Composer().plan([*LINE, "engine.max_num_seqs=1,2"], multirun=True)
    with pytest.raises(ConfigError, match="expected one comparison, got a sweep"):
        check_comparisons(plan)
    check_comparisons(Composer().plan(LINE))
