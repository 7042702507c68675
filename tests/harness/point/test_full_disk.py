"""A disk that fills while a point runs is told in one line that names file and sizes."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.__main__ import main
from harness.point.full_disk import DiskFullError, full_disk_ends
from harness.point.process import classify_exception
from reports.record.record import write_text_atomic


def no_room(*_of: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_write_that_finds_no_room_names_file_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(DiskFullError) as error, full_disk_ends():
        write_text_atomic(tmp_path / "result.json", "x" * 2000)
    assert str(error.value).startswith(
        f"{tmp_path / 'result.json'}: No space left on device for 2,000 bytes, "
    )
    assert "bytes are free on its disk. Points that ended keep their records." in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_free_is_that_of_the_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    seen: list[Path] = []
    free = SimpleNamespace(free=7)
    monkeypatch.setattr("shutil.disk_usage", lambda path: seen.append(path) or free)
    below = tmp_path / "runs" / "file"
    for name in (None, below):  # an error need not name a file, and its folder need not be there
        with pytest.raises(DiskFullError, match="7 bytes are free"), full_disk_ends():
            raise OSError(errno.ENOSPC, "full", name)
    below.parent.mkdir()
    with pytest.raises(DiskFullError), full_disk_ends():
        raise OSError(errno.ENOSPC, "full", below)
    assert seen == [tmp_path, tmp_path, below.parent]


def test_other_errors_pass() -> None:
    with pytest.raises(PermissionError), full_disk_ends():
        raise PermissionError(errno.EACCES, "no")


def test_a_worker_that_found_no_room_has_no_traceback() -> None:
    status, error = classify_exception(OSError(errno.EDQUOT, "quota", "/a"), "latency")
    assert (status, error["traceback"], error["message"]) == (
        "failed",
        None,
        "[Errno 122] quota: '/a'",
    )


def test_a_plan_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    monkeypatch.setattr("harness.sweep.plan.show_plans", no_room)
    assert main(["+model=glass", "mode=plan"]) == 3
    assert capsys.readouterr().err.startswith("error: ")
