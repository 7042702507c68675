"""The table at the end of a sweep."""

from dataclasses import replace
from io import StringIO

from harness.config.schema import SweepContext
from harness.point import progress
from harness.point.progress import display_title, open_display
from harness.point.show import point_line
from harness.sweep.track import sweep_lines
from reports.record.record import RunRecord


def record(name, metrics, status="ok", valid=None):
    return RunRecord(
        run_id=name,
        name=name,
        status=status,
        valid=valid,
        overrides=["+model=a", name],
        metrics=metrics,
    )


def lines(tmp_path, *records):
    folders = [tmp_path / str(index) for index in range(len(records))]
    sweep = SweepContext(sweep_id="s", folder=tmp_path, index=0, total=len(records))
    return sweep_lines(records, folders, sweep)


def test_columns_are_those_that_some_point_has(tmp_path):
    found = lines(
        tmp_path,
        record("rate=1", {"serve/good_share": 1.0, "serve/ttft_ms/mean": 12.5}),
        record("rate=9", {"serve/good_share": None}, status="failed"),
    )
    assert found[2].split() == [
        *("point", "choices", "status", "good", "requests", "(%)"),
        *("TTFT", "from", "arrival", "mean", "(ms)"),
    ]
    assert found[3].split() == ["0", "rate=1", "ok", "100.0", "12.5"]
    assert found[4].split() == ["1", "rate=9", "failed", "-", "-"]


def test_a_point_that_is_not_valid_is_told(tmp_path):
    found = lines(tmp_path, record("a", {"load/total_s": 3.0}, valid=False))
    assert found[3].split() == ["0", "a", "ok,", "not", "valid", "3.00"]
    elsewhere = replace(record("a", {}), run_id="b")
    sweep = SweepContext(sweep_id="s", folder=tmp_path, index=0, total=1)
    assert sweep_lines([elsewhere], [tmp_path / "earlier"], sweep)[3].split()[-1] == "earlier"


def test_points_of_other_scenarios_show_their_figures(tmp_path):
    found = lines(tmp_path, record("a", {"throughput/output_tok_s": 20.0, "load/total_s": 3.0}))
    assert found[2].split() == [*("point", "choices", "status", "output", "(tok/s)", "load", "(s)")]
    assert "serve" not in found[2]


def test_choices_are_shown_in_full_and_the_same_command_is_told(tmp_path):
    text = "offload.uva.cpu_offload_params=[" + ",".join(f"layer_{i}" for i in range(30)) + "]"
    error = {"type": "CapacityError", "message": "2.45 GiB short.\nMore."}
    other = record("offload=none", {}, status="no_fit")
    other.error = error
    found = lines(tmp_path, record(text, {"load/total_s": 3.0}), other)
    assert found[3].split()[1] == text
    assert "  point 1, offload=none: no_fit: 2.45 GiB short." in found
    rest = "Without rerun=, the same command reuses 1 point and runs 1 (1 no_fit); rerun=none"
    assert rest in " ".join(" ".join(found).split())


def test_a_sweep_of_points_measured_once_has_no_winner(tmp_path):
    name = "throughput/output_tok_s"
    found = lines(tmp_path, record("a=1", {name: 22.2}), record("a=2", {name: 29.3}))
    assert (
        "  Highest output, no winner: a=2, 29.3 tok/s, 1.32 times as good as a=1, but one" in found
    )
    assert max(map(len, found[:-1])) <= 80
    ends = [{name: x, f"{name}/ci95_low": x - 1, f"{name}/ci95_high": x + 1} for x in (22.2, 29.3)]
    found = lines(tmp_path, *(record(f"a={i}", each) for i, each in enumerate(ends)))
    assert "  Best output: a=1, 29.3 tok/s, 1.32 times as good as a=0 (1.220 to 1.429)" in found


def test_the_line_of_a_point_has_its_place_figures_and_reason(tmp_path):
    sweep = SweepContext(sweep_id="s", folder=tmp_path, index=2, total=6)
    ended = record("offload=prefetch", {"throughput/output_tok_s": 20.0})
    ended.duration_s = 62.0
    assert point_line(ended, sweep) == (
        "point 3 of 6 offload=prefetch: ok, output 20.0 tok/s, took 62.0 s"
    )
    refused = record("offload=none", {}, status="no_fit")
    refused.error = {"type": "CapacityError", "message": "2.45 GiB short.\nMore."}
    assert point_line(refused, sweep) == "point 3 of 6 offload=none: no_fit, 2.45 GiB short."


def test_the_live_view_says_where_the_sweep_stands(tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    sweep = SweepContext(sweep_id="s", folder=tmp_path, index=2, total=6, point_s=105.0)
    title = display_title(sweep, "offload=prefetch")
    assert title.words() == "point 3 of 6 offload=prefetch, sweep about 7 min left"
    now_s = 160.0
    assert title.words() == "point 3 of 6 offload=prefetch, sweep about 6 min left"
    now_s = 1000.0
    assert title.words() == "point 3 of 6 offload=prefetch, sweep ends soon"
    shown = StringIO()
    open_display(shown, sweep=display_title(replace(sweep, point_s=None), "a=1")).close()
    assert shown.getvalue() == "point 3 of 6 a=1\n"
    assert display_title(None, "a") is None


def test_points_of_several_models_are_held_against_those_of_their_own(tmp_path):
    rates = {"a=1 x=1": 20.0, "a=1 x=2": 30.0, "a=2 x=1": 400.0, "a=2 x=2": 500.0, "a=3 x=1": 9.0}
    points = []
    for name, rate in rates.items():
        point = record(name, {"throughput/output_tok_s": rate})
        point.config = {"model": {"name": name, "spec": {"num_layers": int(name[2])}}}
        point.overrides = name.split()
        points.append(point)
    found = [line for line in lines(tmp_path, *points) if "winner" in line]
    assert [line.split(", 1")[0] for line in found] == [
        "  Highest output, no winner: a=1 x=2, 30.0 tok/s",
        "  Highest output, no winner: a=2 x=2, 500.0 tok/s",
    ]
