"""The open loop in virtual time: every figure is worked out by hand."""

import asyncio
import itertools
import math

import pytest

from engine.errors import EngineError
from harness.config.serve import Arrivals, Turns
from harness.work.open_loop import CUT_OFF, OpenLoop
from harness.work.schedule import fill_tokens, plan_requests
from harness.work.times import (
    ArrivalWindow,
    arrival_window,
    count_requests,
    serving_metrics,
    serving_pools,
)
from tests.harness.work.traffic.cases import serve
from tests.harness.work.virtual import ScriptedDoor, now_s, passed_s, run_virtually

pytestmark = pytest.mark.usefixtures("clock_start_s")


def planned(**changes):
    config = serve(**changes)
    return fill_tokens(plan_requests(config), config, vocab_size=1000)


def run(
    schedule,
    make_door=ScriptedDoor,
    *,
    max_concurrency=None,
    drain_s=60.0,
    during=None,
    give_up=None,
):
    """What came of every request, and the door."""

    async def main():
        door = make_door()
        limits = serve(max_concurrency=max_concurrency, drain_s=drain_s)
        if during is not None:
            task = asyncio.create_task(during(door))
        served = await OpenLoop(door, schedule, limits, clock=now_s, give_up=give_up).run()
        if during is not None:
            await task
        return served, door

    return run_virtually(main())


def test_requests_are_sent_at_their_times_whatever_the_engine_does():
    """An engine that takes 100 s to a first token gets the four requests one a second."""
    served, door = run(planned(), lambda: ScriptedDoor(first_s=100.0), drain_s=1000)
    assert [time_s for _, time_s, _ in door.sent] == [0, 1, 2, 3]
    assert door.most_open == 4
    assert [request.ttft_ms for request in served] == [100_000] * 4
    assert all(request.is_complete for request in served)


def test_known_times_give_known_figures():
    """Each request: TTFT 0.5 s, four tokens 0.125 s apart, so 0.875 s end to end."""
    served, _ = run(planned())
    metrics = serving_metrics(served, {"ttft_ms": 500.0, "tpot_ms": 125.0})
    wall_s = 3 + 0.875
    expected = {
        "serve/sent_requests_s": 1.0,
        "serve/requests_s": 4 / wall_s,
        "serve/output_tok_s": 16 / wall_s,
        "serve/total_tok_s": (32 + 16) / wall_s,
        "serve/wall_s": wall_s,
        "serve/window_s": 3.0,
        "serve/window_output_tok_s": 12 / 3,  # the tokens of the last request come after it
        "serve/good_requests_s": 4 / wall_s,
        "serve/good_share": 1.0,
        "serve/schedule_lag_ms/mean": 0.0,
        "serve/ttft_ms/mean": 500.0,
        "serve/tpot_ms/mean": 125.0,
        "serve/itl_ms/mean": 125.0,
        "serve/e2e_ms/mean": 875.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["serve/ttft_ms/p50"] is None  # 4 of 11


def test_ttft_holds_what_a_request_waits_in_the_queue():
    """One place, 0.875 s for each, one request each 0.25 s: the third waits twice 0.625 s."""
    schedule = planned(arrivals=Arrivals(process="constant", rate_per_s=4.0))
    served, _ = run(schedule, lambda: ScriptedDoor(places=1))
    assert [request.ttft_ms for request in served] == pytest.approx([500, 1125, 1750, 2375])
    assert [request.lag_ms for request in served] == [0, 0, 0, 0]


def test_ttft_holds_what_a_request_waits_at_the_client():
    schedule = planned(arrivals=Arrivals(process="constant", rate_per_s=4.0))
    served, door = run(schedule, max_concurrency=1)
    assert door.most_open == 1
    assert [request.ttft_ms for request in served] == pytest.approx([500, 1125, 1750, 2375])
    assert [request.lag_ms for request in served] == pytest.approx([0, 625, 1250, 1875])
    assert [request.sent_ttft_ms for request in served] == pytest.approx([500] * 4)
    assert serving_metrics(served, {})["serve/sent_requests_s"] == pytest.approx(3 / 2.625)
    served[2].is_later_turn = True
    pools = serving_pools(served)
    assert pools["serve/sent_ttft_ms"] == pytest.approx([500] * 4)
    assert pools["serve/turn_ttft_ms"] == pytest.approx([500])


def test_all_at_once():
    served, door = run(planned(arrivals=Arrivals(process="at_once")))
    assert [time_s for _, time_s, _ in door.sent] == [0, 0, 0, 0]
    metrics = serving_metrics(served, {})
    assert metrics["serve/window_s"] == 0
    assert metrics["serve/window_output_tok_s"] is None
    assert metrics["serve/sent_requests_s"] is None
    assert metrics["serve/wall_s"] == 0.875
    assert metrics["serve/good_share"] is None  # nothing was asked


def test_failures_count_as_bad_and_the_accounts_balance():
    def door():
        made = ScriptedDoor(first_s={"serve-0": 0.5, "serve-2": 0.75, "serve-3": 0.5})
        made.refuse = {"serve-1"}
        made.ends = {"serve-3": ("error", 1)}
        return made

    served, _ = run(planned(), door)
    accounts = count_requests(4, served)
    assert tuple(accounts.values()) == (4, 2, 2, 0)
    assert "too long" in served[1].error
    assert served[3].error == "the engine ended it with error"
    metrics = serving_metrics(served, {"ttft_ms": 600.0})
    assert metrics["serve/good_share"] == 0.25  # of four, not of the two that completed
    assert metrics["serve/requests_s"] == pytest.approx(2 / (2 + 0.75 + 0.375))
    assert metrics["serve/ttft_ms/mean"] == pytest.approx(625)


@pytest.mark.parametrize(
    ("bounds", "share"),
    [
        ({"ttft_ms": 499.0}, 0.0),
        ({"ttft_ms": 500.0}, 1.0),
        ({"tpot_ms": 124.0}, 0.0),
        ({"e2e_ms": 874.0, "ttft_ms": 500.0}, 0.0),
        ({"e2e_ms": 875.0, "ttft_ms": 500.0, "tpot_ms": 125.0}, 1.0),
    ],
)
def test_a_good_request_keeps_every_bound(bounds, share):
    served, _ = run(planned(arrivals=Arrivals(process="at_once")))
    assert serving_metrics(served, bounds)["serve/good_share"] == share


def test_one_token_has_no_time_per_token_and_keeps_that_bound():
    served, _ = run(planned(output=serve().output.__class__(tokens=1)))
    metrics = serving_metrics(served, {"tpot_ms": 0.001})
    assert metrics["serve/tpot_ms/mean"] is None
    assert metrics["serve/itl_ms/mean"] is None
    assert metrics["serve/good_share"] == 1.0


def test_what_still_runs_after_the_drain_is_cancelled():
    """Arrivals end at 3 s; 2 s later the last request has no token, its first is due at 5.5 s."""

    def door():
        return ScriptedDoor(first_s={f"serve-{i}": 0.5 for i in range(3)} | {"serve-3": 2.5})

    served, made = run(planned(), door, drain_s=2.0)
    assert tuple(count_requests(4, served).values()) == (4, 3, 0, 1)
    assert served[3].is_cancelled
    assert served[3].error == "it still ran 2 s after the last arrival"
    assert made.open == set()
    assert serving_metrics(served, {"e2e_ms": 1e6})["serve/good_share"] == 0.75


def test_a_run_that_is_cut_off_says_so_of_each_request_that_had_not_ended():
    """At 2 s, with serve-2 just due: serve-1 still runs, serve-2 and serve-3 were never sent."""

    def door():
        return ScriptedDoor(first_s={"serve-0": 0.5, "serve-1": 50.0})

    served, made = run(planned(), door, give_up=lambda *_: passed_s() >= 2.0)
    assert [request.error for request in served] == [None, CUT_OFF, CUT_OFF, CUT_OFF]
    assert tuple(count_requests(4, served).values()) == (4, 1, 0, 3)
    assert [name for name, _, _ in made.sent] == ["serve-0", "serve-1"]
    assert made.open == set()


def test_what_waits_at_the_client_is_cancelled_too():
    def door():
        return ScriptedDoor(first_s=100.0)

    served, made = run(planned(), door, max_concurrency=1, drain_s=1.0)
    assert tuple(count_requests(4, served).values()) == (4, 0, 0, 4)
    assert [name for name, _, _ in made.sent] == ["serve-0"]
    assert "max_concurrency" in served[3].error
    assert serving_metrics(served, {"e2e_ms": 1.0})["serve/good_requests_s"] is None
    assert serving_metrics(served, {"e2e_ms": 1.0})["serve/good_share"] == 0.0


def test_a_ramp_is_served_and_not_counted(clock_start_s):
    """Two a second after 4 s; four arrivals before, the counted ones at 4, 4.5 and 5 s."""
    ramp = Arrivals(process="constant", rate_per_s=2.0, ramp_up_s=4.0)
    served, door = run(planned(num_requests=7, arrivals=ramp))
    assert [time_s for _, time_s, _ in door.sent][4:] == pytest.approx([4, 4.5, 5])
    begin_s, end_s = (pytest.approx(clock_start_s + time_s) for time_s in (4, 5))
    assert arrival_window(served) == ArrivalWindow(begin_s=begin_s, end_s=end_s)
    metrics = serving_metrics(served, {"ttft_ms": 500.0})
    assert metrics["serve/sent_requests_s"] == pytest.approx(2.0)
    assert metrics["serve/requests_s"] == pytest.approx(3 / 1.875)
    assert metrics["serve/good_share"] == 1.0
    # In (4, 5]: of the ramp's last, sent at 3.46, tokens at 4.09, 4.21, 4.34 (3.96 is before);
    # of the one at 4: 4.5, 4.625, 4.75, 4.875; of the one at 4.5: 5.0.
    assert metrics["serve/window_output_tok_s"] == pytest.approx(3 + 4 + 1)


def test_later_turns_come_after_the_answer_and_hold_it():
    schedule = planned(num_requests=4, turns=Turns(num=2, think_s=1.0))
    served, door = run(schedule)
    sent = {name: (time_s, prompt) for name, time_s, prompt in door.sent}
    assert {name: time_s for name, (time_s, _) in sent.items()} == pytest.approx(
        {"serve-0": 0, "serve-1": 1, "serve-0.1": 0.875 + 1, "serve-1.1": 1.875 + 1}
    )
    first, later = schedule.requests[:2]
    answer = (100, 101, 102, 103)
    assert sent["serve-0.1"][1] == first.prompt_token_ids + answer + later.prompt_token_ids
    by_name = {request.request_id: request for request in served}
    assert by_name["serve-0.1"].num_prompt_tokens == later.num_prompt_tokens == 20
    assert by_name["serve-0.1"].ttft_ms == pytest.approx(500)
    assert by_name["serve-0.1"].lag_ms == pytest.approx(0)
    assert serving_metrics(served, {})["serve/sent_requests_s"] == pytest.approx(1.0)


def test_a_turn_whose_answer_fails_takes_the_rest_of_its_conversation_with_it():
    def door():
        made = ScriptedDoor()
        made.refuse = {"serve-0.1"}
        return made

    served, made = run(planned(num_requests=6, turns=Turns(num=3)), door)
    assert tuple(count_requests(6, served).values()) == (6, 4, 1, 1)
    lost = served[2]
    assert (lost.request_id, lost.is_cancelled, lost.sent_s) == ("serve-0.2", True, None)
    assert math.isnan(lost.submit_s)
    assert "earlier turn" in lost.error
    assert len(made.sent) == 5


def test_the_drain_waits_for_turns_that_are_yet_to_come(clock_start_s):
    """The second turn arrives 9 s after the last planned arrival; the drain is 2 s."""
    schedule = planned(num_requests=2, turns=Turns(num=2, think_s=8.125))
    served, _ = run(schedule, drain_s=2.0)
    assert [request.is_complete for request in served] == [True, True]
    assert served[1].submit_s == pytest.approx(clock_start_s + 9.0)


def test_an_engine_that_fails_ends_the_run_with_its_error():
    async def strike(door):
        await asyncio.sleep(1.25)
        door.failure = MemoryError("out of memory")

    with pytest.raises(MemoryError, match="out of memory"):
        run(planned(num_requests=500), during=strike)


def test_an_engine_that_fails_is_told_before_the_next_arrival():
    class Door(ScriptedDoor):
        async def tokens(self, prompt, params=None, request_id=None):
            async for events in super().tokens(prompt, params, request_id):
                yield events
                self.failure = MemoryError("out of memory")
                raise EngineError("the engine failed")

    async def main():
        schedule = planned(arrivals=Arrivals(process="constant", rate_per_s=0.001))
        limits = serve(drain_s=9)
        with pytest.raises(MemoryError):
            await OpenLoop(Door(), schedule, limits, clock=now_s).run()
        return passed_s()

    assert run_virtually(main()) < 2  # and not at 1000 s


def test_progress_counts_ended_requests_and_tokens():
    seen = []

    async def main():
        await OpenLoop(
            ScriptedDoor(),
            planned(num_requests=2),
            serve(drain_s=9),
            clock=now_s,
            on_progress=lambda *state: seen.append(state),
        ).run()

    run_virtually(main())
    assert seen[-1] == (2, 2, 8)
    assert [tokens for _, _, tokens in seen] == sorted(tokens for _, _, tokens in seen)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_pause_of_the_schedule_is_no_silence_but_one_of_the_engine_is(is_stuck):
    """Arrivals an hour apart: progress is told at least every ten minutes, unless one runs."""
    told = []

    async def main():
        arrivals = Arrivals(process="constant", rate_per_s=1 / 3600)
        await OpenLoop(
            ScriptedDoor(first_s=3000.0 if is_stuck else 0.5),
            planned(num_requests=2, arrivals=arrivals),
            serve(drain_s=9),
            clock=now_s,
            on_progress=lambda *_: told.append(passed_s()),
        ).run()

    run_virtually(main())
    pauses = [after - before for before, after in itertools.pairwise(told)]
    assert max([told[0], *pauses]) == pytest.approx(3000 if is_stuck else 600, abs=1)
