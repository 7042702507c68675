"""The command: exit codes, output folder, and what it never imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reports.__main__ import main
from tests.reports.conftest import write_run
from tests.reports.examples import no_fit_record, ok_record

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "triton", "hydra", "omegaconf", "mlflow", "transformers")


def bare_record(**changes):
    return ok_record(plan=None, metrics={"load/total_s": 3.0}, samples={}, **changes)


def python(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=100,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(cwd)},
    )


def test_reports_import_no_engine_and_no_harness():
    code = (
        "import importlib, json, pkgutil, sys, reports\n"
        "names = [m.name for m in pkgutil.walk_packages(reports.__path__, 'reports.')]\n"
        "names = [n for n in names if not n.endswith('__main__')] + ['reports.__main__']\n"
        "[importlib.import_module(n) for n in names]\n"
        "print(json.dumps([names, sorted({m.split('.')[0] for m in sys.modules})]))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    names, modules = json.loads(done.stdout)
    assert {"reports.record.record", "reports.figures.run", "reports.pages.write"} <= set(names)
    assert not {*HEAVY, "engine", "harness", "kernels", "matplotlib"} & set(modules)


def test_record_module_is_standard_library_only():
    code = (
        "import sys, reports.record.record; print(sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert not any(f"'{name}'" in done.stdout for name in ("numpy", "jinja2", "matplotlib"))


def test_a_missing_drawing_package_is_named_without_a_traceback(tmp_path, monkeypatch, capsys):
    folder = write_run(ok_record(), tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(folder)]) == 1
    error = capsys.readouterr().err
    assert "matplotlib" in error
    assert "Install the missing package" in error


@pytest.mark.thorough
def test_command_rebuilds_a_run_from_its_folder_without_torch(tmp_path):
    folder = write_run(no_fit_record(), tmp_path / "run")
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['reports', {str(folder)!r}]\n"
        "try:\n"
        "    runpy.run_module('reports', run_name='__main__')\n"
        "except SystemExit as end:\n"
        f"    print(end.code, sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "figures" / "memory.png").is_file()


def test_paths_are_printed(tmp_path, capsys):
    folder = write_run(bare_record(), tmp_path / "run")
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "out" / "report.html"),
        str(tmp_path / "out" / "report.md"),
        str(tmp_path / "out" / "metrics.csv"),
    ]
    assert not (folder / "report.html").exists()


def test_a_sweep_gets_its_page_and_a_page_for_each_point(tmp_path, capsys):
    folder = tmp_path / "sweep"
    write_run(bare_record(), folder / "0")
    write_run(bare_record(status="killed"), folder / "1")
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    out = tmp_path / "out"
    for name in ("0/report.html", "1/report.md", "sweep.html", "sweep.md", "sweep.csv"):
        assert (out / name).stat().st_size > 0
    assert 'href="1/report.html"' in (out / "sweep.html").read_text(encoding="utf-8")
    assert str(out / "sweep.html") in capsys.readouterr().out
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["result.json"] * 2


def test_an_unreadable_point_costs_the_exit_code_and_no_other_point(tmp_path, capsys):
    folder = tmp_path / "sweep"
    write_run(bare_record(), folder / "0")
    (folder / "1").mkdir()
    (folder / "1" / "result.json").write_text('{"schema_version": 9}', encoding="utf-8")
    assert main([str(folder)]) == 2
    assert (folder / "0" / "report.html").is_file()
    assert "unreadable" in (folder / "sweep.html").read_text(encoding="utf-8")
    assert "schema_version: expected 1, got 9" in capsys.readouterr().err


def test_a_sweep_rebuilds_only_points_with_a_newer_record_unless_forced(tmp_path):
    folder = tmp_path / "sweep"
    reports = {}
    for name, age_s in (("0", -10), ("1", 10)):
        result = write_run(bare_record(), folder / name) / "result.json"
        reports[name] = folder / name / "report.html"
        reports[name].write_text("old", encoding="utf-8")
        changed_s = result.stat().st_mtime + age_s
        os.utime(reports[name], (changed_s, changed_s))
    assert main([str(folder)]) == 0
    assert reports["0"].stat().st_size > 1000
    assert reports["1"].read_text(encoding="utf-8") == "old"
    assert main([str(folder), "--force"]) == 0
    assert reports["1"].stat().st_size > 1000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "no result.json here or in any folder below"),
        (lambda folder: folder.write_text("", encoding="utf-8"), "expected a folder, got a file"),
        (
            lambda folder: (folder.mkdir(), (folder / "result.json").write_text("{")),
            "not valid JSON",
        ),
        (
            lambda folder: (
                folder.mkdir(),
                (folder / "result.json").write_text('{"schema_version": 2}'),
            ),
            "schema_version: expected 1, got 2",
        ),
    ],
)
def test_bad_input_ends_with_two_and_one_line(tmp_path, capsys, make, message):
    folder = tmp_path / "here"
    make(folder)
    assert main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(folder) in error
    assert error.count("\n") == 1


def test_wrong_arguments_end_with_two():
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
