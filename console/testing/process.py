"""A harness that runs by itself: started, recognised again, watched through its files, ended."""

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from catalogue.files import read_json
from catalogue.processes import start_child
from console.registry.stale import is_alive
from reports.record.record import RESULT_NAME, STATE_NAME

LOG_NAME: Final = "test.log"
DOCUMENT_NAME: Final = "test.json"
"""What the harness printed: its lines, and its one document."""
MIB: Final = 2**20


@dataclass(frozen=True)
class Harness:
    """A process by its number and its beginning: the number alone may be another's by now."""

    pid: int
    started_s: float

    @classmethod
    def start(
        cls, command: Sequence[str], folder: Path
    ) -> "tuple[Harness, subprocess.Popen[bytes]]":
        """Start a command that writes into a folder; it outlives this process."""
        with (
            (folder / LOG_NAME).open("ab") as log,
            (folder / DOCUMENT_NAME).open("wb") as document,
        ):
            child = start_child(command, stdin=subprocess.DEVNULL, stdout=document, stderr=log)
        return cls(child.pid, psutil.Process(child.pid).create_time()), child

    def process(self) -> psutil.Process | None:
        """Return it; None where it has ended."""
        with contextlib.suppress(psutil.Error):
            if is_alive(self.pid, self.started_s):
                return psutil.Process(self.pid)
        return None

    def interrupt(self) -> None:
        """Ask it to end as Ctrl-C does: its workers end and its record is written.

        It takes SIGTERM so too, which no shell has it ignore.
        """
        if found := self.process():
            with contextlib.suppress(psutil.Error):
                found.terminate()

    def kill(self) -> None:
        """End it and what it started."""
        if found := self.process():
            with contextlib.suppress(psutil.Error):
                children = found.children(recursive=True)
                found.kill()
                for child in children:
                    with contextlib.suppress(psutil.Error):
                        child.kill()


def progress_of(folder: Path, kind: str, total: int) -> dict[str, Any]:
    """Return how far a test is: done, total, unit, phase.

    Args:
        folder: Of the test.
        kind: test | ab | sweep.
        total: Runs that an A/B or a sweep has at most.
    """
    if kind == "test":
        return _of_state(read_json(folder / STATE_NAME))
    runs = _runs(folder, kind)
    done = [run for run in runs if (run / RESULT_NAME).is_file()]
    phase = "start"
    if open_runs := [run for run in runs if run not in done]:
        now = _of_state(read_json(open_runs[-1] / STATE_NAME))
        of = f" {now['done']}/{now['total']}" if now["unit"] == "requests" else ""
        phase = f"run {len(done) + 1}: {now['phase']}{of}"
    return {"done": len(done), "total": total, "unit": "runs", "phase": phase}


def _runs(folder: Path, kind: str) -> list[Path]:
    if kind == "ab":
        return sorted((folder / "runs").glob("*"))
    points = (path for path in folder.glob("*") if path.name.isdecimal())
    return sorted(points, key=lambda path: int(path.name))


def run_folders(folder: Path, kind: str) -> list[Path]:
    """Return the folders of a test's runs that have a record, in order."""
    runs = [folder] if kind == "test" else _runs(folder, kind)
    return [run for run in runs if (run / RESULT_NAME).is_file()]


def _of_state(state: Mapping[str, Any]) -> dict[str, Any]:
    job, phase = str(state.get("job") or ""), str(state.get("phase") or "start")
    words = phase if job in {"", "measure"} else f"{job}: {phase}"
    found: dict[str, Any] = {"done": None, "total": None, "unit": None, "phase": words}
    match state.get("progress"):
        case {"total_bytes": total, "done_bytes": done} if total:
            sizes = {"done": done // MIB, "total": -(-total // MIB), "unit": "MiB"}
            found |= sizes | {"phase": f"{words} (MiB)"}
        case {"requests_done": done, "requests_total": total, **rest}:
            found |= {"done": done, "total": total, "unit": "requests"}
            found["tokens_s"] = rest.get("tokens_s")
        case _:
            pass
    return found
