"""The page of a search: its goal, its trials, and the best one that keeps the constraints."""

import json
import shlex

import pytest

from reports.pages.sweep import best_command, search_section
from reports.pages.write import write_sweep_report
from tests.reports.conftest import write_run
from tests.reports.examples import no_fit_record

HEAD = "trial,state,status,value,not_kept,reason,folder,offload.uva.cpu_offload_gb\n"
TRIALS = (
    "0,complete,ok,1008.0,memory/gpu_peak_gib<=2,,/runs/0,0.5\n"
    "1,complete,ok,805.0,,,/runs/1,1.0\n"
    "2,complete,ok,670.0,,,/runs/2,1.5\n"
    "3,fail,refused,,,the plan does not fit,,0.0\n"
)


def write_search(folder, trials=TRIALS, objective="maximize throughput/output_tok_s"):
    facts = {"objective": objective, "subject_to": ["memory/gpu_peak_gib<=2"]}
    (folder / "search.json").write_text(json.dumps(facts), encoding="utf-8")
    (folder / "trials.csv").write_text(HEAD + trials, encoding="utf-8")


def test_the_best_trial_is_the_one_that_keeps_the_constraints(tmp_path):
    write_search(tmp_path)
    section = search_section(tmp_path)
    assert section.text == (
        "Looked for: maximize throughput/output_tok_s, subject to memory/gpu_peak_gib<=2. Best "
        "measured: trial 1 (one run each; not compared).",
    )
    (table,) = section.tables
    assert table.columns == (
        *("trial", "cpu_offload_gb", "status", "throughput/output_tok_s", "note"),
    )
    assert [row[3] for row in table.rows] == ["1,008 tok/s", "805.0 tok/s", "670.0 tok/s", "n/a"]
    assert [row[4] for row in table.rows] == [
        *("does not keep memory/gpu_peak_gib<=2", "best measured", "", "the plan does not fit"),
    ]
    assert table.kinds == {0: "warn", 3: "bad"}


def test_the_best_can_be_run_again(tmp_path):
    assert best_command(tmp_path) == ()
    conf = tmp_path / "my search" / "conf"
    (conf / "experiment").mkdir(parents=True)
    (conf / "experiment" / "best.yaml").touch()
    (command,) = best_command(tmp_path / "my search")
    assert shlex.split(command.text)[2:] == ["--config-dir", str(conf), "+experiment=best"]


def test_of_times_the_least_is_the_best(tmp_path):
    write_search(tmp_path, objective="minimize latency/tpot_ms/mean")
    assert "trial 2 (" in search_section(tmp_path).text[0]


def test_that_no_trial_keeps_the_constraints_is_said(tmp_path):
    write_search(tmp_path, TRIALS.splitlines(keepends=True)[0])
    assert search_section(tmp_path).text[0].endswith("No trial keeps that.")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"objective": "maximize", "subject_to": []}'])
def test_a_folder_of_no_search_has_no_section(tmp_path, text):
    assert search_section(tmp_path) is None
    write_search(tmp_path)
    (tmp_path / "search.json").write_text(text, encoding="utf-8")
    assert search_section(tmp_path) is None


def test_the_page_begins_with_the_trials(tmp_path):
    write_run(no_fit_record(), tmp_path / "0")
    write_search(tmp_path)
    paths = write_sweep_report(tmp_path)
    text = next(path for path in paths if path.suffix == ".md").read_text(encoding="utf-8")
    places = [
        text.index(words) for words in ("# Search ", "Best measured", "## Trials", "## Points")
    ]
    assert places == sorted(places)
