"""Every figure of the harness against values worked out by hand, from scripted times."""

import math

import pytest

from engine.asked.config import EngineSettings, GPUConfig
from harness.config.schema import FakeScript
from harness.work.correctness import read_reference
from harness.work.prompts import PromptRow
from tests.harness.systems.fake.cases import figures, job, latency, run, throughput

pytestmark = pytest.mark.usefixtures("clock_start_s")

GIB = 2**30


def test_latency_of_requests_in_turn(tmp_path):
    """First tokens after 20 and 30 ms in turn; then gaps of 5, 7 and 6 ms, which mean 6."""
    script = FakeScript(prefill_ms=[20, 30], decode_ms=[5, 7, 6])
    result = run(tmp_path, job(latency(12), script))
    assert result["status"] == "ok"
    spread = math.sqrt(12 * 25 / 11)
    expected = {
        "ttft_ms": {"mean": 25, "p50": 25, "min": 20, "max": 30, "std": spread},
        "tpot_ms": {"mean": 6, "p50": 6, "min": 6, "max": 6, "std": 0},
        "itl_ms": {"mean": 6, "p50": 6, "min": 5, "max": 7, "std": math.sqrt(24 / 35)},
        "e2e_ms": {"mean": 43, "p50": 43, "min": 38, "max": 48, "std": spread},
    }
    for quantity, values in expected.items():
        found = figures(result, "latency", quantity)
        assert [found.pop(name) for name in ("p90", "p95", "p99")] == [None] * 3
        assert found == pytest.approx(values, abs=1e-5)
    rows = result["samples"]["latency"]
    assert [row["num_output_tokens"] for row in rows] == [4] * 12
    assert rows[1]["itl_ms"] == pytest.approx([5, 7, 6])
    assert result["reasons"] == []


@pytest.mark.thorough_but("11", "64", "130")
@pytest.mark.parametrize(
    ("num", "there"),
    [
        *((10, ""), (11, "50"), (63, "50"), (64, "50 90"), (129, "50 90")),
        *((130, "50 90 95"), (661, "50 90 95"), (662, "50 90 95 99")),
    ],
)
def test_percentiles_of_known_samples_at_their_floors(tmp_path, num, there):
    """First tokens after 1, 2, ..., num ms: the q-th percentile is 1 + q / 100 x (num - 1)."""
    script = FakeScript(prefill_ms=[float(ms) for ms in range(1, num + 1)])
    result = run(tmp_path, job(latency(num, output=1), script))
    found = figures(result, "latency", "ttft_ms")
    for q in (50, 90, 95, 99):
        expected = 1 + q / 100 * (num - 1) if str(q) in there.split() else None
        assert found[f"p{q}"] == (None if expected is None else pytest.approx(expected))
    assert not any("percentiles are null" in note for note in result["notes"])
    drift = [reason for reason in result["reasons"] if "not steady" in reason]
    assert drift == []  # of one token there is no time per output token


def test_one_output_token_has_no_gap_and_no_time_per_token(tmp_path):
    result = run(tmp_path, job(latency(11, output=1), FakeScript(prefill_ms=[20])))
    assert result["status"] == "ok"
    for quantity in ("tpot_ms", "itl_ms"):
        assert set(figures(result, "latency", quantity).values()) == {None}
    assert result["metrics"]["latency/ttft_ms/mean"] == pytest.approx(20)
    assert result["metrics"]["latency/e2e_ms/mean"] == pytest.approx(20)


def test_warm_up_takes_its_times_and_is_not_counted(tmp_path):
    script = FakeScript(prefill_ms=[500, *[20] * 11])
    result = run(tmp_path, job(latency(11, warmup_requests=1), script))
    assert result["metrics"]["latency/ttft_ms/max"] == pytest.approx(20)
    assert len(result["samples"]["latency"]) == 11


def test_answers_shorter_than_asked_are_a_reason(tmp_path):
    for part in (latency(2), throughput(2, output=4)):
        (reason,) = run(tmp_path, job(part, FakeScript(stop_after=3)))["reasons"]
        name = part.part
        assert reason.startswith(f"{name}: 2 of 2 requests ended before their length; {name}-0")
        assert "after 3 of 4 tokens" in reason


def test_a_drift_over_the_requests_is_a_reason(tmp_path):
    slower = [5.0] * 45 + [6.0] * 45  # one gap a request
    result = run(tmp_path, job(latency(90, output=2), FakeScript(decode_ms=slower)))
    (reason,) = result["reasons"]
    assert "from 5 ms in the first third of the requests to 6 ms in the last" in reason


def test_throughput_of_requests_at_once(tmp_path):
    """One prefill of 20 ms for four prompts of 8 tokens, then four steps of 5 ms."""
    result = run(tmp_path, job(throughput(4), FakeScript(prefill_ms=[20], decode_ms=[5])))
    found = {k: v for k, v in result["metrics"].items() if k.startswith("throughput/")}
    assert found == pytest.approx(
        {
            "throughput/wall_s": 0.04,
            "throughput/hit_share": 0,
            "throughput/requests_s": 100,
            "throughput/output_tok_s": 500,
            "throughput/total_tok_s": (32 + 20) / 0.04,
            "throughput/prefill_tok_s": 1600,
            "throughput/decode_tok_s": 800,
        }
    )
    samples = result["samples"]["throughput"]
    assert (samples["num_steps"], samples["num_decode_steps"]) == (5, 4)
    assert samples["num_decode_tokens"] == 16


def test_throughput_with_two_places(tmp_path):
    """Two requests, then the other two: 2 x (20 + 4 x 5) ms."""
    task = job(throughput(4), FakeScript(), engine=EngineSettings(max_num_seqs=2))
    assert run(tmp_path, task)["metrics"]["throughput/output_tok_s"] == pytest.approx(20 / 0.08)


def test_repeats_have_mean_deviation_and_interval(tmp_path):
    """Walls of 40, 50 and 60 ms give 500, 400 and 333.3 tokens/s."""
    script = FakeScript(prefill_ms=[20, 30, 40], decode_ms=[5])
    result = run(tmp_path, job(throughput(4, repeats=3), script))
    metrics, name = result["metrics"], "throughput/output_tok_s"
    mean, std = 1233.3333333 / 3, 83.887048
    assert metrics[name] == pytest.approx(mean)
    assert metrics[f"{name}/std"] == pytest.approx(std)
    half = 4.302652730 * std / math.sqrt(3)  # t of 2 degrees of freedom, 95 %
    assert metrics[f"{name}/ci95_low"] == pytest.approx(mean - half)
    assert metrics[f"{name}/ci95_high"] == pytest.approx(mean + half)


def test_a_settled_series_ends_early(tmp_path):
    result = run(tmp_path, job(throughput(4, repeats=10, stop_share=0.01), FakeScript()))
    assert len(result["samples"]["repeats"]["throughput"]) == 3
    assert "means over 3 repeats of 10, settled early" in " ".join(result["notes"])


def test_repeats_of_latency_pool_requests_and_bound_the_means(tmp_path):
    """First tokens after 10, 20 and 30, 40 ms: means 15 and 35, deviation 20 / sqrt(2)."""
    script = FakeScript(prefill_ms=[10, 20, 30, 40])
    result = run(tmp_path, job(latency(2, repeats=2), script))
    found = figures(result, "latency", "ttft_ms")
    assert found["mean"] == pytest.approx(25)
    assert (found["min"], found["max"]) == pytest.approx((10, 40))
    assert found["std"] == pytest.approx(math.sqrt(500 / 3))
    assert found["repeat_std"] == pytest.approx(20 / math.sqrt(2))
    assert found["ci95_low"] == pytest.approx(25 - 12.7062047 * 10)  # t of 1; 20/sqrt(2)/sqrt(2)
    assert found["ci95_high"] == pytest.approx(25 + 12.7062047 * 10)
    rows = result["samples"]["latency"]
    assert [(row["repeat"], row["request_id"]) for row in rows] == [
        *((0, "latency-0"), (0, "latency-1"), (1, "latency-0"), (1, "latency-1"))
    ]
    means = [one["latency/ttft_ms/mean"] for one in result["samples"]["repeats"]["latency"]]
    assert means == pytest.approx([15, 35])
    assert "intervals of the means of 2 repeats" in " ".join(result["notes"])


def test_percentiles_of_repeats_are_those_of_all_requests(tmp_path):
    """Neither six requests nor six have a median, but twelve have."""
    script = FakeScript(prefill_ms=[float(ms) for ms in range(1, 13)])
    result = run(tmp_path, job(latency(6, repeats=2), script))
    assert figures(result, "latency", "ttft_ms")["p50"] == pytest.approx(6.5)
    assert not [note for note in result["notes"] if "needs 64" in note]


def test_a_steady_latency_ends_early(tmp_path):
    result = run(tmp_path, job(latency(2, repeats=9, stop_share=0.01), FakeScript()))
    assert len(result["samples"]["repeats"]["latency"]) == 3


def test_refused_and_broken_requests_are_counted_out_and_named(tmp_path):
    """Of twelve every fourth is refused and every sixth breaks: 4, 8, 12 and 6."""
    script = FakeScript(refuse_every=4, break_every=6, prefill_ms=[20])
    result = run(tmp_path, job(latency(12), script))
    assert result["status"] == "ok"
    (reason,) = result["reasons"]
    assert reason.startswith("latency: 4 of 12 requests failed; latency-3: request: scripted")
    assert result["metrics"]["latency/ttft_ms/mean"] == pytest.approx(20)
    assert result["metrics"]["latency/ttft_ms/p50"] is None  # of 8
    failed = [row for row in result["samples"]["latency"] if row["error"]]
    assert [row["request_id"] for row in failed] == [f"latency-{n}" for n in (3, 5, 7, 11)]
    assert failed[1]["error"] == "request: scripted to break (model.fake.break_every=6)."
    assert [row["num_output_tokens"] for row in failed] == [0, 1, 0, 0]


def test_nothing_completed_is_a_failure_and_no_zero(tmp_path):
    result = run(tmp_path, job(throughput(4), FakeScript(refuse_every=1)))
    assert result["status"] == "failed"
    assert "nothing was measured" in result["error"]["message"]
    assert {v for k, v in result["metrics"].items() if k.startswith("throughput/")} == {None}


def test_load_is_the_sum_of_its_phases(tmp_path):
    task = job(None, FakeScript(load_s=2.0, prefill_ms=[30]), name="load-warm-1", kind="load")
    result = run(tmp_path, task, spawned_ago_s=1.0)
    (row,) = result["samples"]["load"]
    expected = {"import": 1, "read": 2, "build": 0, "first_token": 0.03}
    assert row["phases"] == pytest.approx(expected, abs=1e-6)
    assert row["total_s"] == pytest.approx(3.03)
    assert row["moved_bytes"] == {"read": 2 * GIB}


def test_memory_is_what_the_script_says(tmp_path):
    script = FakeScript(weights_gib=2, kv_gib=1, gpu_gib=10)
    metrics = run(tmp_path, job(throughput(1), script))["metrics"]
    assert metrics["memory/gpu_peak_gib"] == 3
    assert metrics["memory/gpu_budget_gib"] == pytest.approx(9)
    assert metrics["memory/budget_margin_gib"] == pytest.approx(6)
    over = run(tmp_path, job(throughput(1), FakeScript(gpu_peak_gib=15, gpu_gib=10)))
    (reason,) = over["reasons"]
    assert "the GPU peak of 15.000 GiB is over the budget of 9.000 GiB" in reason


def test_memory_that_is_touched_is_seen(tmp_path):
    bare = run(tmp_path, job(throughput(1), FakeScript()))["metrics"]
    full = run(tmp_path, job(throughput(1), FakeScript(host_touched_gib=0.25)))["metrics"]
    name = "memory/host_rss_peak_gib"
    assert full[name] - bare[name] == pytest.approx(0.25, abs=0.05)


def test_a_budget_that_is_too_small_is_a_no_fit_with_figures(tmp_path):
    task = job(throughput(1), FakeScript(), gpu=GPUConfig(memory_gib=2))
    result = run(tmp_path, task)
    assert result["status"] == "no_fit"
    assert result["error"]["message"].startswith(
        "GPU: need 3.00 GiB, have 1.80 GiB (1.20 GiB over)"
    )
    assert result["plan"]["gpu"]["items"] == {"weights": 2 * GIB, "kv_cache": GIB}


def test_prompts_of_a_file_are_counted_in_tokens(tmp_path):
    rows = [PromptRow(1, text="abc"), PromptRow(2, token_ids=(7, 8))]
    task = job(latency(2), FakeScript(prefill_ms_per_token=1), prompts={"latency": rows})
    rows = run(tmp_path, task)["samples"]["latency"]
    assert [row["num_prompt_tokens"] for row in rows] == [3, 2]
    assert [row["ttft_ms"] for row in rows] == pytest.approx([23, 22])


def test_the_same_tokens_whatever_the_times_and_one_wrong_token_is_found(tmp_path):
    path = tmp_path / "key.json"
    made = run(
        tmp_path,
        job(latency(1), FakeScript(), name="reference", kind="reference", reference=path),
    )
    assert made["status"] == "ok"
    assert len(read_reference(path)["tokens"]) == 2
    good = run(tmp_path, job(latency(1), FakeScript(decode_ms=[9]), reference=path))
    assert good["effective"]["correctness"]["checked"] is True
    bad = run(tmp_path, job(latency(1), FakeScript(wrong_token_at=3), reference=path))
    assert (bad["status"], bad["error"]["type"]) == ("failed", "WrongTokens")
    assert "at position 3 of prompt 0" in bad["error"]["message"]
    assert "latency" not in bad["samples"]
