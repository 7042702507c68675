"""Parts, repeats and rates do not find each other's prefixes; where they do, the record says so."""

import time
from functools import partial

import pytest

from harness.config.schema import LatencyScenario, ThroughputScenario
from harness.config.serve import Arrivals, Objectives, PeakSearch, Prefixes, Turns
from harness.observe.student import student_t
from harness.work.drive import Outcome
from harness.work.kv import Reuse, hit_tokens, note_reuse, reuse_since
from harness.work.offline import measure_latency, measure_throughput
from harness.work.prompts import PromptRow
from harness.work.times import RequestTimes
from tests.harness.cases import scenario
from tests.harness.test_worker import job, work
from tests.harness.work.test_serve import load, serve_fake
from tests.harness.work.traffic.cases import serve
from tests.tiny import hf_model, make_prompt, open_llm, save

FILE = {"prompts_file": "unused.jsonl", "output_tokens": 4, "warmup_requests": 0}
ROWS = [PromptRow(line, token_ids=tuple(make_prompt(40, seed=line))) for line in (1, 2, 3, 4)]
AT_ONCE = Arrivals(process="at_once")


def both_parts(rows=ROWS, **changes):
    """A job whose two parts read one file of prompts."""
    fields = FILE | {"num_requests": len(rows)} | changes
    parts = scenario(latency=LatencyScenario(**fields), throughput=ThroughputScenario(**fields))
    return job(scenario=parts, prompts={"latency": rows, "throughput": rows})


def test_two_parts_with_one_file_share_no_prefix(tmp_path):
    result, factory = work(tmp_path, both_parts())
    assert result["reasons"] == []
    assert result["metrics"]["latency/hit_share"] == 0
    assert result["metrics"]["throughput/hit_share"] == 0
    sent, salts = factory.built[0].prompts, factory.built[0].salts
    assert [prompt for _, prompt in sent[:4]] == [prompt for _, prompt in sent[4:]]
    assert len(set(salts[:4])) == len(set(salts[4:])) == 1
    assert salts[0] != salts[4]


def test_repeats_warm_up_and_other_runs_have_salts_of_their_own(tmp_path):
    sizes = {"prompt_tokens": 8, "output_tokens": 2, "warmup_requests": 1, "num_requests": 2}
    latency, throughput = LatencyScenario, ThroughputScenario
    parts = {"latency": latency(**sizes, repeats=2), "throughput": throughput(**sizes, repeats=2)}
    salts = []
    for task in (job(scenario=scenario(**parts)) for _ in range(2)):
        _, factory = work(tmp_path, task)
        found = zip(factory.built[0].prompts, factory.built[0].salts, strict=True)
        salts += [salt for (name, _), salt in found if name.endswith("-0")]
    assert len(salts) == len(set(salts)) == 2 * 2 * 3


def test_a_part_that_finds_what_another_left_is_not_valid(tmp_path):
    result, _ = work(tmp_path, both_parts(), knows_salts=False)
    assert result["metrics"]["latency/hit_share"] == 0
    assert result["metrics"]["throughput/hit_share"] == 1
    assert result["metrics"]["throughput/prefill_tok_s"] is None  # nothing was computed
    [reason] = result["reasons"]
    assert reason.startswith(
        "throughput: 160 of 160 prompt tokens were found in a prefix cache, where requests of this "
        "part share 0: "
    )


def test_rows_that_begin_alike_are_noted_and_not_counted_as_computed(tmp_path):
    begin = tuple(make_prompt(30))
    rows = [PromptRow(line, token_ids=(*begin, 100 + line, *range(9))) for line in (1, 2, 3, 4)]
    result, _ = work(tmp_path, both_parts(rows))
    assert result["reasons"] == []
    assert result["metrics"]["throughput/hit_share"] == pytest.approx(90 / 160)
    assert result["metrics"]["throughput/prefill_tok_s"] == pytest.approx(70 / 0.5)
    assert "throughput: 90 of 160 prompt tokens were found in a prefix cache" in "".join(
        result["notes"]
    )


def test_the_rates_of_a_search_share_no_prefix_of_a_file():
    search = PeakSearch(low_per_s=1, high_per_s=4, good_share=0.5, duration_s=1)
    config = serve(
        arrivals=Arrivals(),
        search=search,
        slo=Objectives(e2e_ms=1e9),
        prompt=None,
        prompts_file="a",
        num_requests=3,
    )
    rows = [make_prompt(40, seed=seed) for seed in range(config.num_rows)]
    sent = {"rows": rows, "salt": "run", "prefill_s": 0.0, "decode_s": 0.0}
    outcome, _, llm = serve_fake(config, **sent)
    assert len(outcome.samples["trials"]) == 2
    assert outcome.metrics["serve/hit_share"] == 0
    assert sorted(set(llm.salts)) == ["run/serve-1", "run/serve-2"]
    blind, _, _ = serve_fake(config, **sent, knows_salts=False)
    assert blind.metrics["serve/hit_share"] == pytest.approx(3 / 5)  # the first rate sent three
    assert "120 of 200 prompt tokens were found" in blind.reasons[0]


def test_what_a_serving_part_shares_by_its_settings_is_no_reason():
    config = serve(
        num_requests=8, arrivals=AT_ONCE, turns=Turns(num=2), prefixes=Prefixes(num=1, tokens=20)
    )
    outcome, _, llm = serve_fake(config, salt="run")
    assert outcome.metrics["serve/hit_share"] > 0.3
    assert outcome.reasons == []
    assert len(set(llm.salts)) == 1
    first = load(config, salt="run")
    assert first.of_repeat(1).schedule().salt != first.of_repeat(0).schedule().salt


def served_before(share):
    """A part whose prompts share nothing, and what a server found."""
    times = RequestTimes(request_id="a", num_prompt_tokens=1000, submit_s=0.0)
    stats = {"prefix_hit_tokens": 50 + share}
    found = reuse_since(50, stats, [times], lambda: [(list(range(1000)), [])])
    outcome = Outcome(num_measured=1)
    note_reuse(outcome, "latency", found)
    return outcome


def test_a_hundredth_may_be_another_way_of_counting():
    assert served_before(10).reasons == []
    assert len(served_before(11).reasons) == 1
    assert served_before(0).metrics == {"latency/hit_share": 0.0}


def test_an_engine_that_does_not_tell_has_no_share():
    assert hit_tokens({"steps": 3}) is None
    assert hit_tokens({"prefix_hit_tokens": 0}) == 0
    found = reuse_since(None, {"steps": 3}, [], list)
    assert found == Reuse(prompt_tokens=0, hit_tokens=None, shared_tokens=0)
    outcome = Outcome(num_measured=1)
    note_reuse(outcome, "latency", found)
    assert outcome.metrics == {"latency/hit_share": None}
    assert outcome.reasons == []


def test_the_engine_finds_prefixes_within_a_salt_alone(tmp_path):
    """The engine itself, with blocks in both tiers; 32 of 40 tokens are full blocks."""
    folder = save(hf_model("llama"), tmp_path / "tiny")
    llm = open_llm(folder, enable_prefix_caching=True, cpu_gib=0.01, block_size=16)
    prompts = [make_prompt(40, seed=seed) for seed in range(4)]
    latency = partial(measure_latency, t=student_t)
    salts = ("latency", "throughput", "throughput")
    outcomes = [
        measure(llm, prompts, 4, clock=time.perf_counter, salt=salt)[0]
        for measure, salt in zip((latency, *[measure_throughput] * 2), salts, strict=True)
    ]
    llm.close()
    shares = [
        outcomes[0].metrics["latency/hit_share"],
        *(outcome.metrics["throughput/hit_share"] for outcome in outcomes[1:]),
    ]
    assert shares == [0, 0, pytest.approx(0.8)]
    assert [len(outcome.reasons) for outcome in outcomes] == [0, 0, 1]
    assert "128 of 160 prompt tokens were found" in outcomes[2].reasons[0]
