"""Runs of the same work: labels, refusals and ratios."""

from contextlib import nullcontext

import pytest

from reports.compare import UnlikeError, check_alike, compare_rows, compared_metrics
from reports.record.judging import ratio_interval
from reports.record.metrics import METRICS
from tests.reports.examples import config, no_fit_record, ok_record


def peer_record(factor=2.0, **changes):
    """A run of accelerate whose times are `factor` times those of the usual record."""
    record = ok_record(name="peer", config=config(), **changes)
    record.config["system"] = {"kind": "accelerate"}
    for name, value in record.metrics.items():
        if value is not None and name.startswith("latency/"):
            record.metrics[name] = value * factor
        elif value is not None and name.startswith("throughput/"):
            record.metrics[name] = value / factor
    return record


def rows_of(tmp_path, *records):
    return compare_rows([(tmp_path / str(i), record) for i, record in enumerate(records)])


def test_an_interval_of_a_ratio_holds_all_ratios_of_the_means():
    base, other = ok_record(), ok_record()
    name = "throughput/output_tok_s"
    assert ratio_interval(base.metrics, other.metrics, name) is None
    base.metrics |= {f"{name}/ci95_low": 90.0, f"{name}/ci95_high": 110.0}
    other.metrics |= {f"{name}/ci95_low": 180.0, f"{name}/ci95_high": 220.0}
    assert ratio_interval(base.metrics, other.metrics, name) == pytest.approx((180 / 110, 220 / 90))


def test_a_latency_with_intervals_of_its_mean_is_compared_by_its_mean():
    base, other = ok_record(), ok_record()
    assert METRICS["latency/ttft_ms"].at("p50") in compared_metrics([base.metrics, other.metrics])
    for record, mean in ((base, 20.0), (other, 40.0)):
        record.metrics |= {"latency/ttft_ms/mean": mean}
        record.metrics |= {"latency/ttft_ms/ci95_low": mean - 4, "latency/ttft_ms/ci95_high": 50.0}
    assert METRICS["latency/ttft_ms"].at("mean") in compared_metrics([base.metrics, other.metrics])
    assert ratio_interval(base.metrics, other.metrics, "latency/ttft_ms/mean") == pytest.approx(
        (36 / 50, 50 / 16)
    )
    assert ratio_interval(base.metrics, other.metrics, "latency/ttft_ms/p50") is None


def test_files_are_compared_by_what_they_hold(tmp_path):
    records = [ok_record(name=name, config=config()) for name in "abc"]
    for record, path, digest in zip(records, "xyx", ("1" * 64, "1" * 64, "2" * 64), strict=True):
        record.config["scenario"]["latency"] = {"prompts_file": path}
        record.effective = record.effective | {"inputs": {"latency.prompts_file": digest}}
    check_alike(rows_of(tmp_path, *records[:2]))
    with pytest.raises(
        UnlikeError, match=r"latency.prompts_file: content 1+ in a, content 2+ in c"
    ):
        check_alike(rows_of(tmp_path, records[0], records[2]))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("scenario.latency.output_tokens", 64, "scenario.latency.output_tokens"),
        ("scenario.throughput.seed", 3, "scenario.throughput.seed: null in"),
        ("model.num_layers", 16, "model.num_layers: 32 in"),
        ("model.name", "other", "model.name"),
    ],
)
def test_unlike_work_is_refused_by_name(tmp_path, path, value, words):
    other = ok_record(name="b", config=config())
    node = other.config
    *above, last = path.split(".")
    for key in above:
        node = node.setdefault(key, {})
    node[last] = value
    with pytest.raises(UnlikeError, match=words):
        check_alike(rows_of(tmp_path, ok_record(), other))


@pytest.mark.parametrize(
    ("asked", "sha256", "words"),
    [
        ("synthetic:0.8", None, "synthetic:0.8 in a, null in b"),
        ("trace:x", "1" * 64, "trace, content 1{12} in a, null in b"),
    ],
)
def test_experts_that_others_chose_are_other_work(tmp_path, asked, sha256, words):
    records = [ok_record(name=name, config=config()) for name in "abc"]
    for record in (records[0], records[2]):
        record.config["model"]["routing"] = asked
        record.effective = record.effective | {"routing": {"kind": "?", "sha256": sha256}}
    records[1].config["model"]["routing"] = "dummy"
    with pytest.raises(UnlikeError, match=f"model.routing: {words}"):
        check_alike(rows_of(tmp_path, *records[:2]))
    check_alike(rows_of(tmp_path, records[0], records[2]))
    check_alike(rows_of(tmp_path, records[1], ok_record(name="nothing asked", config=config())))


def test_traces_are_compared_by_what_they_hold(tmp_path):
    records = [ok_record(name=name, config=config()) for name in "abc"]
    for record, path, digest in zip(records, "xyx", ("1" * 64, "1" * 64, "2" * 64), strict=True):
        record.config["model"]["routing"] = f"trace:{path}"
        record.effective = record.effective | {"routing": {"kind": "trace", "sha256": digest}}
    check_alike(rows_of(tmp_path, *records[:2]))
    with pytest.raises(UnlikeError, match=r"content 1{12} in a, trace, content 2{12} in c"):
        check_alike(rows_of(tmp_path, records[0], records[2]))


@pytest.mark.parametrize(
    ("path", "value", "is_alike"),
    [
        ("model.keep_lossless", False, True),
        ("model.spec.layer_types", [], True),
        ("scenario.latency.repeats", 1, True),
        ("scenario.latency.repeats", 5, False),
        ("scenario.serve.turns.num", 1, True),
        ("scenario.latency.seed", 1, False),
        ("scenario.serve.max_concurrency", 1, False),
        ("scenario.serve.is_new", True, False),
    ],
)
def test_a_setting_that_came_later_is_unset_before(tmp_path, path, value, is_alike):
    old, new = ok_record(config=config()), ok_record(name="b", config=config())
    *above, last = path.split(".")
    nodes = [old.config, new.config]
    for key in above:
        nodes = [node.setdefault(key, {"some": 2}) for node in nodes]
    nodes[1][last] = value
    for rows, words in (((old, new), "null in"), ((new, old), ", null in")):
        with nullcontext() if is_alike else pytest.raises(UnlikeError, match=f"{path}: .*{words}"):
            check_alike(rows_of(tmp_path, *rows))


def test_a_gpu_and_its_emulation_are_unlike(tmp_path):
    other = ok_record(name="b")
    other.environment = {**other.environment, "emulated": True}
    with pytest.raises(UnlikeError, match="emulation on a CPU"):
        check_alike(rows_of(tmp_path, ok_record(), other))


def test_metrics_are_those_that_two_runs_have():
    names = [metric.name for metric in compared_metrics([ok_record().metrics, ok_record().metrics])]
    assert "latency/ttft_ms/p50" in names
    assert "latency/ttft_ms/mean" not in names
    alone = ok_record(metrics={"load/total_s": 1.0})
    assert compared_metrics([{}, alone.metrics]) == []


def test_equal_names_are_told_apart_by_their_run(tmp_path):
    records = [ok_record(run_id="r1"), ok_record(run_id="r2")]
    labels = [row.label for row in rows_of(tmp_path, *records)]
    assert [label.split()[-1] for label in labels] == ["r1", "r2"]


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["o=none,g=8", "o=uva,g=8"], ["o=none", "o=uva"]),
        (["o=none,a.g=8", "o=uva,a.g=16"], ["o=none g=8", "o=uva g=16"]),
        (["a.g=8,b.g=8", "b.g=8,c.g=8"], ["a.g=8", "c.g=8"]),
        (["o=uva,g=8", "o=uva"], ["o=uva,g=8", "o=uva"]),
        (["v=[1,2],g=1", "v=[3,2],g=1"], ["v=[1,2],g=1", "v=[3,2],g=1"]),
    ],
)
def test_labels_leave_out_settings_that_all_runs_have(tmp_path, names, labels):
    rows = rows_of(tmp_path, *(ok_record(name=name) for name in names))
    assert [row.label for row in rows] == labels


def test_a_run_without_figures_is_not_what_others_are_held_against(tmp_path):
    records = [no_fit_record(name="small"), ok_record(name="a"), ok_record(name="b")]
    rows = rows_of(tmp_path, *records)
    assert [(row.label, row.place) for row in rows] == [("a", 0), ("b", 1), ("small", 2)]


def test_long_labels_are_shortened_and_told_apart(tmp_path):
    same = [ok_record(name="n" * 70 + middle + "n" * 70, run_id=middle) for middle in "ab"]
    first, second = (row.label for row in rows_of(tmp_path, *same))
    assert len(first) < 60
    assert (first[-2:], second[-2:]) == (" a", " b")
