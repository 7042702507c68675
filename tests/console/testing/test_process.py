"""How far a test is, from the files that the harness writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from console.testing.process import progress_of

RUNNING = {"requests_done": 2, "requests_total": 8, "output_tokens": 9, "tokens_s": 2.5}
LOADING = {"done_bytes": 3 * 2**20 + 1, "total_bytes": 5 * 2**20 + 1}


def write(folder: Path, **state: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({}, (None, None, None, "start")),
        ({"job": "measure", "phase": "import", "progress": None}, (None, None, None, "import")),
        (
            {"job": "reference", "phase": "load:load", "progress": LOADING},
            (3, 6, "MiB", "reference: load:load (MiB)"),
        ),
        (
            {"job": "measure", "phase": "load:x", "progress": LOADING | {"total_bytes": 0}},
            (None, None, None, "load:x"),
        ),
        (
            {"job": "measure", "phase": "latency", "progress": RUNNING},
            (2, 8, "requests", "latency"),
        ),
    ],
)
def test_a_state_is_done_of_total_and_a_phase(
    state: dict[str, Any], found: tuple[Any, ...], tmp_path: Path
) -> None:
    write(tmp_path, **state)
    told = progress_of(tmp_path, "test", 1)
    assert tuple(told[name] for name in ("done", "total", "unit", "phase")) == found


@pytest.mark.parametrize(("kind", "folders"), [("ab", "runs/0{}-x"), ("sweep", "{}")])
def test_several_runs_are_counted(kind: str, folders: str, tmp_path: Path) -> None:
    assert progress_of(tmp_path, kind, 3)["phase"] == "start"
    for number in range(2):
        folder = tmp_path / folders.format(number)
        write(folder, job="measure", phase="throughput", progress=RUNNING)
    (tmp_path / folders.format(0) / "result.json").touch()
    assert progress_of(tmp_path, kind, 3) == {
        "done": 1,
        "total": 3,
        "unit": "runs",
        "phase": "run 2: throughput 2/8",
    }
