import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config.serve import Arrivals, Lengths, Prefixes, Seeds, TraceSource, Turns
from harness.work.prompts import PromptError
from harness.work.schedule import fill_tokens, mean_rate, plan_requests
from harness.work.trace import TraceRow
from tests.harness.work.traffic.cases import fixed, serve

SPREAD = Lengths(distribution="uniform", low=3, high=9)


def filled(config, vocab_size=1000, **fields):
    return fill_tokens(plan_requests(config), config, vocab_size=vocab_size, **fields)


def ids(schedule):
    return [request.prompt_token_ids for request in schedule.requests]


def test_a_schedule_says_when_what_is_sent():
    schedule = filled(serve())
    assert [request.request_id for request in schedule.requests] == [
        f"serve-{index}" for index in range(4)
    ]
    assert [request.scheduled_s for request in schedule.requests] == [0, 1, 2, 3]
    assert [len(prompt) for prompt in ids(schedule)] == [8] * 4
    assert {request.output_tokens for request in schedule.requests} == {4}
    assert len(set(ids(schedule))) == 4
    assert schedule.requested_per_s == 1.0
    assert schedule.planned_per_s == pytest.approx(1.0)
    assert plan_requests(serve(), rate_per_s=4.0).planned_per_s == pytest.approx(4.0)


def test_a_rate_needs_two_times_apart():
    assert mean_rate([]) is None
    assert mean_rate([3.0]) is None
    assert mean_rate([3.0, 3.0]) is None
    assert mean_rate([5.0, 3.0, 4.0]) == 1.0


@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_each_seed_changes_its_own_part_alone(prompts, order, arrivals):
    def make(**changes):
        seeds = {"prompts": prompts, "order": order, "arrivals": arrivals} | changes
        return filled(
            serve(
                num_requests=12,
                prompt=SPREAD,
                output=SPREAD,
                arrivals=Arrivals(rate_per_s=1.0),
                seeds=Seeds(**seeds),
            )
        )

    base = make()
    assert base == make()

    def times(schedule):
        return [request.scheduled_s for request in schedule.requests]

    def works(schedule):
        return sorted((r.prompt_token_ids, r.output_tokens) for r in schedule.requests)

    assert times(make(arrivals=arrivals + 1)) != times(base)
    assert ids(make(arrivals=arrivals + 1)) == ids(base)
    assert times(make(prompts=prompts + 1)) == times(base)
    assert ids(make(prompts=prompts + 1)) != ids(base)
    other = make(order=order + 1)
    assert times(other) == times(base)
    assert works(other) == works(base)  # the same requests at other times


@given(st.integers(2, 40), st.integers(1, 4), st.integers(0, 5))
def test_prompts_are_distinct_and_avoid_special_tokens(num, tokens, seed):
    config = serve(num_requests=num, prompt=fixed(tokens), seeds=Seeds(prompts=seed))
    schedule = filled(config, vocab_size=50, avoid={0, 49})
    assert len(set(ids(schedule))) == num
    assert {token for prompt in ids(schedule) for token in prompt} <= set(range(1, 49))


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(PromptError, match="room for 4 different prompts of 1 tokens, got 3"):
        filled(serve(prompt=fixed(1)), vocab_size=3)
    with pytest.raises(PromptError, match="expected usable token ids"):
        filled(serve(), vocab_size=1, avoid={0})


def test_a_full_vocabulary_is_used_up():
    assert sorted(ids(filled(serve(prompt=fixed(1)), vocab_size=4))) == [(0,), (1,), (2,), (3,)]


def test_shared_prefixes_are_equal_and_what_follows_is_not():
    config = serve(num_requests=20, prefixes=Prefixes(num=2, tokens=6))
    schedule = filled(config)
    assert {request.num_prompt_tokens for request in schedule.requests} == {14}
    begins = {(request.prefix, request.prompt_token_ids[:6]) for request in schedule.requests}
    assert len(begins) == 2
    assert len({prompt[6:] for prompt in ids(schedule)}) == 20


def test_later_turns_hold_earlier_prompts_and_answers():
    config = serve(
        num_requests=6, turns=Turns(num=3, think_s=0.5), prefixes=Prefixes(num=1, tokens=2)
    )
    first, second, third, *_ = filled(config).requests
    assert (first.request_id, first.scheduled_s, first.follows) == ("serve-0", 0.0, None)
    assert (second.request_id, second.scheduled_s) == ("serve-0.1", None)
    assert (second.follows, third.follows) == ("serve-0", "serve-0.1")
    assert (second.think_s, third.think_s) == (0.5, 0.5)
    assert [r.num_prompt_tokens for r in (first, second, third)] == [10, 22, 34]
    assert [len(r.prompt_token_ids) for r in (first, second, third)] == [10, 8, 8]


def test_what_arrives_while_the_rate_rises_is_marked():
    ramp = Arrivals(process="constant", rate_per_s=2.0, ramp_up_s=4.0)
    schedule = plan_requests(serve(num_requests=7, arrivals=ramp))
    assert [r.is_ramp_up for r in schedule.requests] == [True] * 4 + [False] * 3
    assert schedule.arrivals_s == pytest.approx([4, 4.5, 5])
    assert schedule.planned_per_s == pytest.approx(2.0)


def test_the_first_prompt_of_a_conversation_may_have_a_length_of_its_own():
    config = serve(num_requests=6, turns=Turns(num=3, first_tokens=50))
    first, second, third, *_ = filled(config).requests
    assert [r.num_prompt_tokens for r in (first, second, third)] == [50, 62, 74]
    assert [len(r.prompt_token_ids) for r in (first, second, third)] == [50, 8, 8]
    assert config.longest_tokens() == 50 + 2 * 8 + 3 * 4


def trace_config(**changes):
    source = {"path": "a.jsonl"} | changes
    return serve(
        num_requests=None,
        prompt=None,
        output=None,
        arrivals=Arrivals(process="trace"),
        trace=TraceSource(**source),
    )


ROWS = [
    TraceRow(line=1, time_s=0, prompt_tokens=1300, output_tokens=50, hash_ids=(0, 7, 8)),
    TraceRow(line=2, time_s=2, prompt_tokens=900, output_tokens=9, hash_ids=(0, 7)),
    TraceRow(line=3, time_s=4, prompt_tokens=100, output_tokens=4),
    TraceRow(line=4, time_s=4, prompt_tokens=600, output_tokens=4, hash_ids=(0,)),
]


@pytest.mark.parametrize(("scale", "lengths"), [(1.0, (1300, 900, 100)), (0.1, (130, 90, 10))])
def test_a_trace_is_scaled_and_shares_what_its_hashes_share(scale, lengths):
    config = trace_config(time_scale=0.5, length_scale=scale)
    schedule = fill_tokens(plan_requests(config, ROWS), config, vocab_size=1000)
    assert [r.scheduled_s for r in schedule.requests] == [0, 1, 2, 2]
    assert [len(prompt) for prompt in ids(schedule)][:3] == list(lengths)
    assert [r.num_prompt_tokens for r in schedule.requests][:3] == list(lengths)
    one, two, _, four = ids(schedule)
    assert one[: lengths[1]] == two
    edge = round(512 * scale)
    assert four[:edge] == one[:edge]
    assert four[edge:] != one[edge : len(four)]
    assert schedule.requested_per_s == schedule.planned_per_s == pytest.approx(1.5)


def test_a_trace_needs_its_rows():
    with pytest.raises(ValueError, match="expected the rows"):
        plan_requests(trace_config())


def test_prompts_of_a_file_keep_their_order_or_are_shuffled():
    rows = [[1, 2], [3], [4, 5, 6], [7]]
    config = serve(prompt=None, prompts_file="a.jsonl")
    schedule = filled(config, rows=rows)
    assert ids(schedule) == [(1, 2), (3,), (4, 5, 6), (7,)]
    assert [request.num_prompt_tokens for request in schedule.requests] == [2, 1, 3, 1]
    shuffled = filled(dataclasses.replace(config, seeds=Seeds(order=1)), rows=rows)
    assert sorted(ids(shuffled)) == sorted(ids(schedule))
    assert [r.scheduled_s for r in shuffled.requests] == [0, 1, 2, 3]


def test_a_stream_of_its_own_shares_no_prompt():
    config = serve(num_requests=30)
    one, two = (set(ids(filled(config, stream=name))) for name in ("serve", "warm-up"))
    assert not one & two
