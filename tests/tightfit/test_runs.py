"""Runs by their ids, completion of command lines, JSON documents, verbs for models."""

import errno
import json
import os
import webbrowser
from pathlib import Path

import pytest

import tightfit
from engine.errors import ConfigError
from engine.lines import WIDTH
from tests.reports.examples import ok_record
from tightfit.__main__ import main
from tightfit.cli import run
from tightfit.completion import SCRIPTS, candidates
from tightfit.runs import find_run, has_display

OFFLOADS = ["auto", "experts", "experts_in_place", "experts_prefetch", "none", "prefetch", "uva"]
OLD, NEW = "20260101-101010-aaaaaa", "20260202-101010-bbbbbb"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, and a sweep of one point."""
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    for name in (OLD, NEW, "20251212-101010-cccccc/0"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        ok_record(run_id=name).write(folder / "result.json")
        (folder / "report.html").write_text("page", encoding="utf-8")
    return tmp_path


def test_a_run_is_found_by_its_id(home: Path) -> None:
    runs = home / "runs"
    assert find_run("latest") == runs / NEW
    assert find_run(OLD) == find_run("202601") == runs / OLD
    assert find_run("20251212/0") == runs / "20251212-101010-cccccc" / "0"
    (runs / NEW / "0").mkdir()
    assert find_run("latest/0") == runs / NEW / "0"
    assert find_run(str(runs / OLD)) == (runs / OLD).resolve()
    with pytest.raises(
        ConfigError, match=f"expected one run, got 2 whose ids begin so: {NEW}, {OLD}"
    ):
        find_run("2026")
    for second in range(10, 20):
        (runs / f"20261010-1010{second}-eeeeee").mkdir()
        (runs / f"20261010-1010{second}-eeeeee" / "state.json").touch()
    newest = "got 10 whose ids begin so, the newest 6 of them: 20261010-101019-eeeeee"
    with pytest.raises(ConfigError, match=f"{newest}.*101014-eeeeee. Write more of the id"):
        find_run("20261010")
    with pytest.raises(ConfigError, match=r"or the id of a run in .*, got ''"):
        find_run("")
    with pytest.raises(ConfigError, match=r"or the id of a run in .*, got '/0'"):
        find_run("/0")
    with pytest.raises(ConfigError, match=f"Did you mean {OLD}"):
        find_run(OLD.replace("aaa", "aac"))


def test_a_run_is_found_by_the_id_that_its_page_shows(home: Path) -> None:
    told = "20251212-101011-dddddd"
    for sweep in ("20251213-101010-cccccc", "20251212-101010-cccccc"):  # the later one took it over
        folder = home / "runs" / sweep / "1"
        folder.mkdir(parents=True)
        ok_record(run_id=told).write(folder / "result.json")
    assert find_run(told) == folder
    assert tightfit.read_run(told) == tightfit.read_run(folder)
    with pytest.raises(ConfigError, match="the id of a run"):
        tightfit.read_run(Path("absent"))


def test_a_search_is_found_by_its_name(home: Path) -> None:
    trial = home / "searches" / "mine" / "3"
    trial.mkdir(parents=True)
    (home / "searches" / "mine2").mkdir()
    for name, time_s in (("mine", 2e9), ("mine2", 1.0)):  # later than every run, and earlier
        question = home / "searches" / name / "search.json"
        question.touch()
        os.utime(question, (time_s, time_s))
    assert find_run("mine") == find_run("latest") == trial.parent
    assert find_run("mine/3") == trial


def test_a_plan_is_not_the_latest_run_and_can_be_opened(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = home / "runs" / "20260303-101010-dddddd" / "plan.png"
    figure.parent.mkdir()
    figure.touch()
    figure.with_suffix(".csv").touch()
    assert find_run("latest") == home / "runs" / NEW
    assert main(["open", "20260303"]) == 0
    assert capsys.readouterr().out.strip() == str(figure)


def test_without_runs_latest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    assert main(["open"]) == 2
    assert "found none. Start one: `tightfit run`." in capsys.readouterr().err


def test_open_prints_the_page_and_shows_it_where_it_can(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", shown.append)
    monkeypatch.setattr("tightfit.runs.sys.platform", "linux")
    assert main(["open"]) == 0
    assert capsys.readouterr().out.strip() == str(home / "index.html")
    page = home / "runs" / NEW / "report.html"
    assert main(["open", "latest"]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert shown == []
    monkeypatch.setenv("DISPLAY", ":0")
    assert main(["open", NEW]) == 0
    assert shown == [page.as_uri()]
    assert has_display({}, "darwin")


def test_open_draws_no_page_below_a_folder_of_other_things(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = tmp_path / "other" / "deep" / "run"
    deep.mkdir(parents=True)
    ok_record(run_id="deep").write(deep / "result.json")
    for folder in (tmp_path / "other", home / "runs"):
        assert main(["open", str(folder)]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "expected the folder of a run, a sweep, a search or a study, or a TIG" in said
        assert f"got {folder}. `tightfit open` without a folder lists" in said
    assert not list(tmp_path.rglob("sweep.html"))
    assert not (deep / "report.html").exists()
    assert main(["open", str(home)]) == 0  # of another home too
    assert capsys.readouterr().out.strip() == str(home / "index.html")
    assert main(["open", str(deep.parent)]) == 0  # a sweep of one run
    assert capsys.readouterr().out.splitlines()[-1] == str(deep.parent / "sweep.html")


def test_compare_takes_ids_and_prints_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "202601", "latest", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "comparison"
    assert [Path(run["folder"]).name for run in document["runs"]] == [OLD, NEW]
    metrics = document["runs"][1]["metrics"]
    assert metrics
    assert {found["times_as_good"] for found in metrics.values() if found["value"]} == {1.0}
    for words, said in (
        (["latest", "latest"], "expected runs that differ"),
        (["latest", "other"], "or the id of a run in "),
    ):
        assert main(["compare", *words, "--json"]) == 2
        shown = capsys.readouterr()
        document = json.loads(shown.out)
        assert (document["kind"], document["exit_code"]) == ("error", 2)
        assert said in document["message"]
        assert document["message"] in shown.err


def test_compare_prints_verdict_and_figures(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", OLD, "latest", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("No winner without repeats: ")
    rows = [line for line in lines if line.startswith("  output (tok/s) ")]
    assert rows[-1].endswith(" (1.00x)")
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1] == f"page  {tmp_path / 'out' / 'compare.html'}"
    assert (tmp_path / "out" / "compare.html").is_file()


def test_compare_refuses_as_the_other_commands_do(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["latest", "latest"], ["latest"]):
        assert main(["compare", *words]) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("words", [["run", "model=fake"], ["doctor"], ["compare", "latest", OLD]])
@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt("signal 15"), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "/full/file"), 3, "No space left on"),
    ],
)
def test_an_end_from_outside_is_one_json_document_too(
    words: list[str],
    raised: BaseException,
    code: int,
    said: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    for name in ("harness.sweep.app.run", "tightfit.doctor.collect", "tightfit.runs.comparison"):
        monkeypatch.setattr(name, fail)
    assert main([*words, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["exit_code"]) == ("error", code)
    assert said in document["message"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tightfit pl", ["plan"]),
        ("tightfit models fetch sm", ["smollm2_135m", "smollm2_135m_q4"]),
        ("tightfit models pa", ["pack"]),
        ("tightfit serve gl", ["glass"]),
        (f"tightfit open {OLD[:6]}", [OLD]),
        ("tightfit compare latest lat", ["latest"]),
        ("tightfit completion f", ["fish"]),
        ("tightfit help sw", ["sweep"]),
        (
            "tightfit run offload=",
            [f"offload={x}" for x in OFFLOADS],
        ),
        ("tightfit plan model=olmo7b engine.max_num_s", ["engine.max_num_seqs="]),
        ("tightfit version x", []),
        ("tightfit run offload=uva --js", ["--json"]),
        ("tightfit plan --config", ["--config-dir"]),
        ("tightfit search --maxi", ["--maximize"]),
        ("tightfit serve glass --max-num-s", ["--max-num-seqs"]),
        ("tightfit models fetch --co", ["--config-dir"]),
        ("tightfit ui --po", ["--port"]),
        ("tightfit doctor -", ["--json", "--help"]),
        ("tightfit absent --", []),
    ],
)
def test_the_last_word_is_completed(line: str, found: list[str], home: Path) -> None:
    assert candidates(line, ["plan", "sweep", "help"], run) == found


def test_shells_get_a_script_and_bash_what_stands_behind_the_sign(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for shell in SCRIPTS:
        assert main(["completion", shell]) == 0
        assert "tightfit completion --line" in capsys.readouterr().out
    assert main(["completion", "--line", "tightfit run offload=", "bash"]) == 0
    assert capsys.readouterr().out.split() == OFFLOADS
    assert main(["completion", "--line", "tightfit run offload=u", "fish"]) == 0
    assert capsys.readouterr().out.split() == ["offload=uva"]


@pytest.mark.thorough
def test_a_plan_is_one_json_document(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert main(["plan", "model=glass", "gpu=rtx4090_24gb", "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert (document["kind"], document["exit_code"]) == ("plan", 0)
    (point,) = document["points"]
    assert point["recommended"] in {way["offload"] for way in point["ways"] if way["fits"]}
    assert "glass" in shown.err


def test_a_refusal_is_one_json_document(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert main(["run", "modell=glass", "--json"]) == 2
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert (document["kind"], document["exit_code"]) == ("error", 2)
    assert document["message"].startswith("modell: there is no such key")
    assert shown.err == f"error: {document['message']}\n"
    assert len(shown.err) > WIDTH


@pytest.mark.parametrize(
    "words",
    [
        ["compare"],
        ["compare", "latest", "--outt", "x"],
        ["doctor", "now"],
        ["run", "--jsonn"],
        ["sweep", "--resolve"],
        ["models", "test"],
        ["models", "show"],
        ["models", "lst"],
        ["service", "status", "--only", "server"],
        ["comparison"],
        ["version", "now"],
        ["completion", "now"],
    ],
)
def test_a_wrong_command_line_is_one_json_document(
    words: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--json"]) == 2
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert (document["kind"], document["exit_code"]) == ("error", 2)
    assert shown.err == f"error: {document['message']}\n"


@pytest.mark.thorough_but("run")
@pytest.mark.parametrize(("word", "num_points"), [("run", None), ("sweep", 1)])
def test_runs_are_one_json_document(
    word: str,
    num_points: int | None,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    logging_as_before: None,
) -> None:
    record = ok_record(run_id="made")
    monkeypatch.setattr("harness.point.point.run_point", lambda *arguments, **options: record)
    assert main([word, "model=fake", "scenario=quick", "tracking=none", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == word
    found = document["points"] if num_points else [document]
    assert [point["record"]["run_id"] for point in found] == ["made"]
    assert Path(found[0]["folder"]).is_relative_to(home)


@pytest.mark.thorough
def test_models_are_listed_shown_and_removed(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "theirs"))
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row, below = (line.split() for line in lines if line.split()[:1] == ["olmo7b"])
    assert row == ["olmo7b", "absent", "-", "7.30"]
    assert below == ["olmo7b", "allenai/OLMo-2-1124-7B-Instruct"]
    assert main(["models", "show", "olmo7b"]) == 0
    assert "13.59 GiB" in capsys.readouterr().out
    begun = home / "hub" / "models--allenai--OLMo-2-1124-7B-Instruct" / "blobs"
    begun.mkdir(parents=True)
    (begun / "x").write_bytes(bytes(1 << 20))
    assert main(["models", "remove", "olmo7b"]) == 0
    assert not begun.parent.exists()
    assert capsys.readouterr().out == "olmo7b: 0.00 GiB removed\n"
    assert main(["models", "remove", "olmo7b"]) == 2
    assert "expected files that were fetched into TIGHTFIT_HOME, got nothing" in (
        capsys.readouterr().err
    )
    mine = home / "mine"
    mine.mkdir()
    (mine / "config.json").write_text("{}", encoding="utf-8")
    assert main(["models", "remove", str(mine)]) == 2
    assert "which are the user's" in capsys.readouterr().err
    assert mine.is_dir()
