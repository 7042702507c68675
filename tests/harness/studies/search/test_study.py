"""Searches with Optuna, which is an extra: pip install '.[search]'."""

import csv
from dataclasses import replace

import pytest

from engine.errors import ConfigError
from harness import search as command
from harness.config.compose import Composer
from harness.point import point
from harness.point.show import point_title
from harness.search import TrialOutcome, TrialRunner, open_study, require_optuna, write_best
from harness.studies.search_request import parse_request
from harness.sweep import track as sweep
from reports.record.record import RunRecord
from tests.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore")
GOAL = ("--maximize", "throughput/output_tok_s", "--subject-to", "latency/ttft_ms/p50<=6")
WIDE = ("model=fake", "gpu=cpu", "offload=uva", "offload.uva.cpu_offload_gb=range(0.25,8.1,0.25)")
FEW = ("model=fake", "gpu=cpu", "offload=none,uva", "offload.uva.cpu_offload_gb=1,2,3")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def request_of(*words):
    found = parse_request([*words, *GOAL])
    assert found is not None
    return found


def rate(size):
    """Best at 5; at 6 and below the constraint is kept."""
    return 100 - (size - 5) ** 2


class Trials:
    """Runs no point: a trial's figures follow from its size."""

    def __init__(self, folder, interrupt_at=None):
        self.folder, self.interrupt_at, self.ran, self.lines = folder, interrupt_at, [], []

    def run(self, number, proposal):
        size = float(proposal.get("offload.uva.cpu_offload_gb", 0))
        if len(self.ran) == self.interrupt_at:
            raise KeyboardInterrupt
        self.ran.append(size)
        if size < 2:
            return TrialOutcome(status="refused", reason="the plan does not fit")
        excess = size - 6
        return TrialOutcome(
            status="ok",
            value=rate(size),
            excesses=(excess,),
            broken=("ttft",) if excess > 0 else (),
            folder=self.folder / str(number),
        )

    def say(self, line):
        self.lines.append(line)


def few_ran(sizes, built):
    """The sizes up to the one with which so many were built."""
    count = 0
    for index, size in enumerate(sizes):
        count += size >= 2
        if count == built:
            return sizes[: index + 1]
    return sizes


def run(tmp_path, request, **changes):
    trials = Trials(tmp_path, **changes)
    with open_study(request, tmp_path / "search") as study:
        ended = study.run(trials.run, trials.say)
        best = study.best()
        found = (ended, None if best is None else best.value, len(study.trials()))
    return trials, found


def test_a_small_space_is_tried_completely(tmp_path):
    trials, (ended, best, count) = run(tmp_path, request_of(*FEW, "--trials", "9"))
    assert ended == "every combination was tried"
    assert (trials.ran, best, count) == ([0.0, 1.0, 2.0, 3.0], rate(3), 4)
    assert "trial 0: offload=none: failed, the plan does not fit" in trials.lines
    again, found = run(tmp_path, request_of(*FEW, "--trials", "9"))
    assert (again.ran, found) == ([], (ended, best, count))


@pytest.mark.thorough
def test_a_wide_space_is_searched_and_the_same_seed_repeats(tmp_path):
    request = request_of(*WIDE, "--trials", "12", "--seed", "1")
    trials, (ended, best, _) = run(tmp_path / "a", request)
    assert ended == "12 trials were built"
    assert sum(size >= 2 for size in trials.ran) == 12  # refused plans do not count
    assert len(set(trials.ran)) == len(trials.ran)  # nothing is run twice
    assert best == max(rate(size) for size in trials.ran if 2 <= size <= 6)
    few = replace(request, trials=4)
    assert run(tmp_path / "b", few)[0].ran == few_ran(trials.ran, 4)


class Refusing(Trials):
    """Has room on the GPU from 4 on and on the host up to 7: what is lacking is said."""

    most = 7.0

    def run(self, number, proposal):
        size = float(proposal["offload.uva.cpu_offload_gb"])
        lacking = max(4 - size, size - self.most)
        if lacking <= 0:
            return super().run(number, proposal)
        self.ran.append(size)
        return TrialOutcome(status="refused", reason="over", excesses=(lacking,))


INTERVAL = ("model=fake", "gpu=cpu", "offload=uva", "offload.uva.cpu_offload_gb=interval(0.0,32.0)")


@pytest.mark.thorough
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_refusals_lead_the_search_to_what_fits(tmp_path, seed):
    trials = Refusing(tmp_path)
    request = request_of(*INTERVAL, "--trials", "12", "--seed", seed)
    with open_study(request, tmp_path / "search") as study:
        assert study.run(trials.run, trials.say) == "12 trials were built"
        assert not study.is_early
    refused = [not 4 <= size <= 7 for size in trials.ran]
    assert sum(refused[10:]) < 0.75 * len(refused[10:])  # 91 % of what is drawn without learning


@pytest.mark.thorough
def test_a_search_that_finds_nothing_more_ends_early_and_says_so(tmp_path):
    trials = Refusing(tmp_path)
    trials.most = -40.0
    with open_study(request_of(*INTERVAL, "--trials", "3"), tmp_path / "search") as study:
        ended = study.run(trials.run, trials.say)
        assert study.is_early
    assert ended.startswith("ended early with 0 of 3 trials built: 50 proposals in a row")


@pytest.mark.thorough
def test_an_early_end_is_exit_code_3_although_there_is_a_best(home, monkeypatch):
    def run_point(config, folder, overrides, context, config_dir):
        metrics = {"throughput/output_tok_s": 5.0, "latency/ttft_ms/p50": 1.0}
        return RunRecord(run_id="a", name="a", status="ok", valid=True, metrics=metrics)

    monkeypatch.setattr(point, "run_point", run_point)
    monkeypatch.setattr(sweep, "finish_sweep", lambda *args, **settings: ([], None))
    monkeypatch.setattr(command, "IDLE", 1)
    few = ("model=fake", "gpu=cpu", "gpu.memory_gib=2.5", *INTERVAL[2:])
    assert command.main([*few, *GOAL, "--trials", "40"]) == 3


@pytest.mark.thorough
def test_an_interrupted_search_goes_on(tmp_path):
    request = request_of(*FEW, "--trials", "9")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, request, interrupt_at=2)
    trials, (_, best, count) = run(tmp_path, request)
    assert trials.ran == [2.0, 3.0]
    assert (best, count) == (rate(3), 5)  # with the interrupted one


def test_a_trial_that_a_killed_process_left_is_closed(tmp_path):
    request = request_of(*FEW, "--trials", "9")
    with open_study(request, tmp_path / "search") as study:
        study._study.ask()
    left = tmp_path / "search" / "0" / "state.json"
    left.parent.mkdir()
    left.touch()
    trials, (_, _, count) = run(tmp_path, request)
    assert (len(trials.ran), count) == (4, 5)
    assert not left.parent.exists()


def test_two_searches_do_not_share_a_name_nor_two_processes_a_search(tmp_path):
    request = request_of(*FEW, "--name", "mine")
    with (
        open_study(request, tmp_path / "search"),
        pytest.raises(ConfigError, match="another process runs it"),
    ):
        run(tmp_path, request)
    other = request_of(*WIDE, "--name", "mine")
    with pytest.raises(ConfigError, match="base, space differ"):
        run(tmp_path, other)


def test_minutes_are_a_limit(tmp_path, monkeypatch):
    times = iter([0.0, 0.0, 59.0, 61.0])
    monkeypatch.setattr("harness.search.time.monotonic", lambda: next(times))
    trials, (ended, _, _) = run(tmp_path, request_of(*FEW, "--trials", "9", "--minutes", "1"))
    assert (ended, len(trials.ran)) == ("1 minutes have passed", 2)


@pytest.mark.parametrize(("found", "words"), [(None, "not installed"), ("3.6.1", "got 3.6.1")])
def test_optuna_4_is_needed(found, words, monkeypatch, capsys):
    from importlib.metadata import PackageNotFoundError

    def version(name):
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr("harness.search.version", version)
    with pytest.raises(ConfigError, match=words):
        require_optuna()
    assert command.main([*FEW, *GOAL]) == 2
    assert "[search]" in capsys.readouterr().err


def test_points_are_planned_run_and_the_best_is_a_composition(home, monkeypatch, capsys):
    asked, finished, titles = [], [], []

    def run_point(config, folder, overrides, context, config_dir):
        asked.append(config)
        titles.append(point_title(context, ""))
        size = config.offload.uva.cpu_offload_gb
        metrics = {"throughput/output_tok_s": rate(size), "latency/ttft_ms/p50": 1.0}
        record = RunRecord(
            run_id="a", name="a", status="ok", valid=True, metrics=metrics, overrides=overrides
        )
        folder.mkdir(parents=True)
        record.write(folder / "result.json")
        return record

    def finish(tracking, context, records, *, interrupted, is_ok, trials):
        finished.append((context.sweep_id, len(records), interrupted, is_ok, trials))
        return [], "tightfit ui"

    monkeypatch.setattr(point, "run_point", run_point)
    monkeypatch.setattr(sweep, "finish_sweep", finish)
    words = [*FEW, "gpu.memory_gib=3", "--trials", "9", "--name", "mine"]
    assert command.main([*words, *GOAL]) == 0
    # 2 GiB of weights and 1 of KV in 2.7 GiB: none does not fit, and only the plan said so.
    assert [config.offload.uva.cpu_offload_gb for config in asked] == [1.0, 2.0, 3.0]
    assert titles == ["point 1 of 9 ", "point 2 of 9 ", "point 3 of 9 "]  # those that were built
    assert command.main([*words, *GOAL]) == 0  # nothing is left to run, all of it is reported
    (home / "searches" / "mine" / "2" / "result.json").write_text("{", encoding="utf-8")
    assert command.main([*words, *GOAL]) == 0  # a record that cannot be read is left out
    of_all = ("mine", 3, False, True, [1, 2, 3])
    assert finished == [of_all, of_all, ("mine", 2, False, True, [1, 3])]
    out = capsys.readouterr()
    assert "trial 0: offload=none: failed, the plan does not fit: GPU: need" in out.err
    assert "best measured  trial 3" in out.out
    assert "one run each; not compared\n" in out.out
    assert "  compare        tightfit ui\n" in out.out
    folder = home / "searches" / "mine"
    with (folder / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["fail", "complete", "complete", "complete"]
    (plan,) = Composer(folder / "conf").plan(["+experiment=best"]).points
    assert plan.config == replace(asked[-1], rerun=None)


@pytest.mark.thorough
def test_no_trial_that_keeps_the_constraints_is_exit_code_3(home, monkeypatch):
    def run_point(config, folder, overrides, context, config_dir):
        return RunRecord(run_id="a", name="a", status="oom", error={"type": "a", "message": "b"})

    monkeypatch.setattr(point, "run_point", run_point)
    monkeypatch.setattr(sweep, "finish_sweep", lambda *args, **settings: ([], None))
    assert command.main([*FEW, *GOAL]) == 3


@pytest.mark.thorough
def test_a_defect_of_the_harness_is_a_failed_trial(home, monkeypatch, capsys):
    def run_point(config, folder, overrides, context, config_dir):
        raise ZeroDivisionError("a defect")

    def finish(tracking, context, records, **settings):
        finished.append((len(records), settings["is_ok"]))
        return [], None

    finished = []
    monkeypatch.setattr(point, "run_point", run_point)
    monkeypatch.setattr(sweep, "finish_sweep", finish)
    assert command.main([*FEW, *GOAL, "--trials", "1"]) == 3
    assert finished == [(0, False)]
    assert "ZeroDivisionError: a defect" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.thorough
def test_what_cannot_be_composed_is_a_failed_trial(tmp_path):
    runner = TrialRunner(Composer(), ["model=fake", "offload=prefetch"], request_of(*FEW).goal)
    outcome = runner.run(["offload.prefetch.offload_num_in_group=9"], _context(tmp_path))
    assert outcome.status == "invalid"
    assert "offload_group_size=8" in (outcome.reason or "")
    words = ["+experiment=smoke"]
    with pytest.raises(ConfigError, match=r"hydra.mode=RUN"):
        TrialRunner(Composer(), words, request_of(*FEW).goal).compose([])


def _context(tmp_path):
    return command._context(request_of(*FEW), "fake", tmp_path, 0)


@pytest.mark.thorough_but("words0")
@pytest.mark.parametrize(
    "words",
    [
        ["+model=glass", "offload=uva", "offload.uva.cpu_offload_gb=0.001"],
        slow(
            ["+model=glass", "offload.uva.cpu_offload_params=[mlp]", "offload.uva.cpu_offload_gb=1"]
        ),
        slow(["+experiment=smoke", "hydra.mode=RUN", "engine.seed=3"]),
        ["+model=mine", "+experiment=own"],
    ],
)
@pytest.mark.thorough
def test_a_composition_of_one_file_is_the_trial_s(tmp_path, words):
    mine = tmp_path / "mine"
    (mine / "model").mkdir(parents=True)
    (mine / "experiment").mkdir()
    (mine / "model" / "mine.yaml").write_text("defaults: [glass]\n")
    (mine / "experiment" / "own.yaml").write_text(
        "# @package _global_\ndefaults:\n- override /offload: uva\nengine:\n  seed: 7\n"
    )
    plan = Composer(mine).plan(words)
    config = plan.points[0].config
    line = write_best(tmp_path, plan.overrides, config, why="best", config_dir=mine)
    assert line.endswith("+experiment=best")
    (found,) = Composer(tmp_path / "conf").plan(["+experiment=best"]).points
    assert found.config == config
