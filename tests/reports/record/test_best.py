"""The best of several runs: settled by intervals of repeats, or not at all."""

import pytest

from reports.record.judging import best_of, gain
from reports.record.metrics import METRICS

OUTPUT, TTFT = METRICS["throughput/output_tok_s"], METRICS["latency/ttft_ms"].at("p50")


def rate(mean, half=None):
    name = OUTPUT.name
    ends = (
        {} if half is None else {f"{name}/ci95_low": mean - half, f"{name}/ci95_high": mean + half}
    )
    return {name: mean, **ends}


@pytest.mark.parametrize(
    ("half", "is_settled", "words"),
    [
        (None, False, "1.32 times as good as b, but one or both ran only once"),
        (10.0, False, "but the interval 0.599 to 3.221 includes 1"),
        (1.0, True, "1.32 times as good as b (1.220 to 1.429)"),
    ],
)
def test_only_repeats_settle_who_is_best(half, is_settled, words):
    best = best_of([("b", rate(22.2, half)), ("a", rate(29.3, half)), ("c", {})], OUTPUT)
    assert (best.label, best.value, best.is_settled) == ("a", 29.3, is_settled)
    assert words in best.against
    assert best.remedy == ("scenario.throughput.repeats=5" if half is None else "")
    assert best.title == ("Best output" if is_settled else "Highest output, no winner")


def test_intervals_are_of_means_so_means_are_ranked():
    def found(p50, mean):
        ends = {"latency/ttft_ms/ci95_low": mean - 1, "latency/ttft_ms/ci95_high": mean + 1}
        return {"latency/ttft_ms/p50": p50, "latency/ttft_ms/mean": mean, **ends}

    best = best_of([("a", found(10, 40)), ("b", found(20, 30))], TTFT)
    assert (best.label, best.metric.label, best.value) == ("b", "TTFT mean", 30)
    assert best.is_settled


def test_one_run_alone_beats_none():
    best = best_of([("a", rate(1.0)), ("b", {})], OUTPUT)
    assert (best.title, best.against) == ("Only output", "no other point has it")
    assert best_of([("b", {})], OUTPUT) is None


def test_nothing_is_a_number_of_times_as_good_as_0():
    metric = METRICS["memory/host_pinned_gib"]
    none, some = {metric.name: 0.0}, {metric.name: 0.4}
    assert gain(metric, none, some) is None
    assert gain(metric, some, none) is None
    assert gain(metric, some, {metric.name: 0.2}) == 2
