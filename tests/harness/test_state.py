"""What a worker says of itself: written by a thread, its errors raised in the worker."""

import json
import shutil
from concurrent.futures import wait

import pytest

from harness.state import StateWriter


def test_a_write_that_failed_is_raised_by_the_next_report(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    state = StateWriter(folder, "measure")
    state.enter("latency")
    shutil.rmtree(folder)
    state.running(1, 1, 8)  # handed over; the writing thread finds no folder
    wait(state._pending)
    with pytest.raises(FileNotFoundError):
        state.running(1, 1, 16)


def test_a_phase_is_written_when_it_begins_or_raises(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    state = StateWriter(folder, "measure")
    state.enter("latency")
    assert json.loads((folder / "state.json").read_text())["phase"] == "latency"
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        state.enter("throughput")


def test_the_last_report_is_in_its_file_after_close(tmp_path):
    state = StateWriter(tmp_path, "measure")
    state.enter("latency")
    for count in range(1, 51):
        state.running(count, count, 8 * count)
    state.close()
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["requests_done"] for row in rows] == list(range(1, 51))
    assert json.loads((tmp_path / "state.json").read_text())["progress"]["output_tokens"] == 400


def test_close_raises_what_no_report_did(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    state = StateWriter(folder, "measure")
    state.enter("latency")
    shutil.rmtree(folder)
    state.running(1, 1, 8)
    with pytest.raises(FileNotFoundError):
        state.close()
