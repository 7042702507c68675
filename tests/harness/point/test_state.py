"""What a worker says of itself: written by a thread, its errors raised in the worker."""

import json
import shutil
from concurrent.futures import wait

import pytest

from harness.point.progress import LiveView
from harness.point.show import capacity_lines
from harness.worker import StateWriter


def test_a_write_that_failed_is_raised_by_the_next_report(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    state = StateWriter(folder, "measure")
    state.enter("latency")
    shutil.rmtree(folder)
    state.running(1, 1, 8)  # handed over; the writing thread finds no folder
    wait(state._writer._pending)
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


class Shown:
    """A display that keeps its lines."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)

    def update(self, state):
        self.lines.append(state["phase"])


def test_what_the_kv_cache_holds_is_shown_once_when_an_engine_has_started(tmp_path):
    kv = {
        "block_size": 16,
        "max_model_len": 64,
        "max_concurrency": 2.0,
        "max_kept": 2.0,
        "longest_tokens": 128,
        "groups": [{"layers": 2, "window": None, "block_bytes": 2**20, "num_blocks": 8}],
        "host": None,
    }
    state, display = StateWriter(tmp_path, "load"), Shown()
    view = LiveView(tmp_path, display, None)
    for known in (None, {"tokens": 3}, kv, kv):
        state.note(kv=known)
        state.enter("warm")
        view.tick()
    table = capacity_lines(kv)
    assert display.lines == ["warm", "warm", *table, "warm", "warm"]
    state.close()
