"""Comparisons from start to record: order, sides that fail, figures of known engines."""

import math
import signal
from dataclasses import replace

import pytest

from harness.config.compose import Composer
from harness.config.schema import AbConfig
from harness.point import point
from harness.point.point import run_point
from harness.studies import ab as ab_run
from harness.studies.ab import Comparison, compose_sides, steps
from reports.record.metrics import definition
from reports.record.record import RunRecord

pytestmark = pytest.mark.slow

LINE = [
    *("model=fake", "scenario=ab", "tracking=none", "scenario.load=null", "gpu=cpu"),
    *("scenario.correctness.enabled=false", "scenario.throughput.num_requests=4"),
    *("scenario.latency.num_requests=3", "model.fake.load_s=0"),
]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    for module in (point, ab_run):
        monkeypatch.setattr(module, "build_report", lambda folder: [])


def test_runs_are_interleaved_after_a_against_itself():
    labels = [step.label for step in steps(AbConfig(b=["x=1"], pairs=3, aa_pairs=2))]
    assert labels == [
        *("aa1-a", "aa1-a", "aa2-a", "aa2-a"),
        *("ab1-a", "ab1-b", "ab2-b", "ab2-a", "ab3-a", "ab3-b"),
    ]


def compare(tmp_path, *more, run_one=run_point):
    (found,) = Composer().plan([*LINE, *more]).points
    sides = compose_sides(found.config.ab, found.overrides)
    return Comparison(found, tmp_path / "ab", sides).run(run_one)


def fake_run(outcomes):
    """A run that ends as listed for its side, with a rate of 100 (a) or 50 (b)."""

    def run_one(config, folder, overrides, sweep):
        side = folder.name[-1]
        status, changes = outcomes.get(side, ("ok", {}))
        if status == "interrupt":
            raise KeyboardInterrupt
        error = {"type": "E", "message": f"{status} it is", "phase": "build", "traceback": None}
        rate = {"a": 100.0, "b": 50.0}[side]
        good = {
            "metrics": {"throughput/output_tok_s": rate},
            "samples": {"latency": [{"request_id": "l", "tokens_hash": "x", "error": None}]},
            "valid": True,
        }
        fields = good | changes if status == "ok" else {"error": error}
        calls.append((folder.name, sweep.index, config.rerun))
        return RunRecord(run_id=folder.name, name=side, status=status, **fields)

    calls = run_one.calls = []
    return run_one


def test_a_scripted_engine_that_is_known_to_be_slower(tmp_path, capsys):
    """a takes 5 ms a token, b 6: 20 + 63 x 5 = 335 ms for a queue, against 398."""
    record = compare(
        tmp_path, "ab.a=[]", "ab.b=[model.fake.decode_ms=[6]]", "ab.pairs=2", "ab.aa_pairs=0"
    )
    assert (record.status, record.valid) == ("ok", None)  # nobody compared with the reference
    assert RunRecord.read(tmp_path / "ab" / "result.json") == record
    assert record.metrics["ab/throughput_output_tok_s_ratio"] == pytest.approx(335 / 398)
    assert record.metrics["ab/throughput_output_tok_s_ratio/ci95_low"] == pytest.approx(335 / 398)
    assert record.metrics["ab/throughput_wall_s_ratio"] == pytest.approx(398 / 335)
    assert record.metrics["ab/latency_tpot_ms_ratio"] == pytest.approx(1.2)
    assert record.metrics["ab/latency_ttft_ms_ratio"] == pytest.approx(1)
    assert record.metrics["ab/latency_e2e_ms_ratio"] == pytest.approx(398 / 335)
    assert record.metrics["ab/memory_gpu_peak_gib_ratio"] == 1
    sample = record.samples["ab"]
    assert sample["tokens"]["latency"] == {
        "num_compared": 6,
        "num_equal": 6,
        "first_unequal": None,
    }
    assert sample["per_request"][1] == pytest.approx(
        {"quantity": "tpot_ms", "num": 6, "least": 1.2, "median": 1.2, "most": 1.2}
    )
    folders = [run["folder"] for run in sample["runs"]]
    assert folders == ["runs/00-ab1-a", "runs/01-ab1-b", "runs/02-ab2-b", "runs/03-ab2-a"]
    found = [RunRecord.read(tmp_path / "ab" / folder / "result.json") for folder in folders]
    assert [run.status for run in found] == ["ok"] * 4
    assert [run.name for run in found[:2]] == ["ab1-a", "ab1-b model.fake.decode_ms=[6]"]
    shown = capsys.readouterr().out
    assert "b is higher" in shown
    assert "latency: 6 of 6 requests gave equal tokens" in shown


def test_a_side_that_does_not_fit_is_a_result(tmp_path, capsys):
    """b asks for 3 GiB on a card of 2: it is tried once, and a runs once."""
    record = compare(tmp_path, "ab.a=[]", "ab.b=[gpu.memory_gib=2]", "ab.aa_pairs=0")
    assert (record.status, record.error["type"]) == ("no_fit", "CapacityError")
    assert record.error["message"].startswith("side b: GPU: need 3.00 GiB, have 1.80 GiB")
    sample = record.samples["ab"]
    assert [run["status"] for run in sample["runs"]] == ["ok", "no_fit"]
    assert sample["rows"] == []
    assert sample["a"]["first_run"]["latency/tpot_ms/mean"] == pytest.approx(5)
    assert sample["b"]["status"] == "no_fit"
    assert "a: TPOT mean (ms)" in capsys.readouterr().out
    assert record.valid is None


@pytest.mark.parametrize("status", ["failed", "oom", "timeout", "killed"])
def test_a_side_that_ends_badly_is_not_run_again(tmp_path, status):
    run_one = fake_run({"a": (status, {})})
    record = compare(tmp_path, run_one=run_one)
    assert [name for name, *_ in run_one.calls] == ["00-aa1-a", "01-ab1-b"]
    assert (record.status, record.error["message"]) == (status, f"side a: {status} it is")
    assert record.samples["ab"]["b"]["first_run"] == {"throughput/output_tok_s": 50}


def test_every_run_is_a_fresh_one_and_a_child_of_one_parent(tmp_path):
    run_one = fake_run({})
    record = compare(tmp_path, "ab.pairs=2", "ab.aa_pairs=2", run_one=run_one)
    assert [(index, rerun) for _, index, rerun in run_one.calls] == [(n, "all") for n in range(8)]
    assert record.metrics["ab/throughput_output_tok_s_ratio"] == pytest.approx(0.5)
    assert record.metrics["ab/throughput_output_tok_s_noise_share"] == 0
    (row,) = record.samples["ab"]["rows"]
    assert (row["aa_ratio"], row["verdict"]) == (1, "b is lower")
    assert record.valid is True


def test_every_figure_has_a_definition(tmp_path):
    record = compare(tmp_path, "ab.pairs=2", run_one=fake_run({}))
    assert len(record.metrics) == 4
    found = [definition(name) for name in record.metrics]
    assert found[0].startswith("b / a of throughput/output_tok_s")
    assert all(found)
    assert definition("ab/unknown_ratio") is None


def test_other_tokens_of_requests_alone_make_it_not_valid(tmp_path):
    other = {"samples": {"latency": [{"request_id": "l", "tokens_hash": "y", "error": None}]}}
    record = compare(tmp_path, run_one=fake_run({"b": ("ok", other)}))
    assert record.valid is False
    assert (
        "4 of 4 requests gave other tokens on side b than on side a, the first l"
        in (record.reasons[0])
    )


def test_other_tokens_of_another_system_are_a_note(tmp_path):
    other = {
        "samples": {"latency": [{"request_id": "l", "tokens_hash": "y", "error": None}]},
        "config": {"system": {"kind": "accelerate"}},
    }
    record = compare(tmp_path, run_one=fake_run({"b": ("ok", other)}))
    assert (record.valid, record.reasons) == (True, [])
    assert "4 of 4 requests gave other tokens" in " ".join(record.effective["notes"])


def test_a_reason_of_runs_is_told_once_with_their_names(tmp_path):
    why = {"valid": False, "reasons": ["gpu: hot."]}
    record = compare(tmp_path, "ab.pairs=2", "ab.aa_pairs=0", run_one=fake_run({"b": ("ok", why)}))
    assert (record.valid, record.reasons) == (False, ["ab1-b, ab2-b: gpu: hot."])


def test_ctrl_c_amid_the_report_waits_for_the_record(tmp_path, monkeypatch):
    def interrupted(folder):
        signal.raise_signal(signal.SIGINT)
        return ["told"]

    monkeypatch.setattr(ab_run, "build_report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path, "ab.b=[offload=uva]", run_one=fake_run({}))
    record = RunRecord.read(tmp_path / "ab" / "result.json")
    assert (record.status, record.effective["warnings"]) == ("ok", ["told"])


def test_ctrl_c_stands_where_the_record_cannot_be_written(tmp_path, capsys):
    def run_one(config, folder, overrides, sweep):
        (tmp_path / "ab").rename(tmp_path / "away")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path, run_one=run_one)
    assert "FileNotFoundError" in capsys.readouterr().err


def test_ctrl_c_keeps_what_ran(tmp_path):
    run_one = fake_run({"b": ("interrupt", {})})
    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path, "ab.aa_pairs=2", run_one=run_one)
    record = RunRecord.read(tmp_path / "ab" / "result.json")
    assert (record.status, record.error["type"]) == ("killed", "Interrupted")
    assert len(record.samples["ab"]["runs"]) == 5
    assert math.isfinite(record.duration_s)
    assert replace(record) == record
