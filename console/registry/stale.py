"""What processes that are gone left behind: tests and downloads without one are interrupted."""

import os
import time
from dataclasses import dataclass
from typing import Final

import psutil
from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from console.registry.database import Database
from console.registry.tables import Model, TestRun

_SAME_S: Final = 2.0
"""Starts of a process that differ by less are one: the kernel counts from a clock that is set."""
GONE: Final = "its process is gone"


@dataclass(frozen=True)
class Process:
    """A process, told from a later one with its id."""

    pid: int
    started_s: float


def own_process() -> Process:
    """Return this process."""
    return Process(os.getpid(), psutil.Process().create_time())


def is_alive(pid: int | None, started_s: float | None) -> bool:
    """Return whether the process with this id that began then still runs."""
    if pid is None or started_s is None:
        return False
    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - started_s) < _SAME_S
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True  # it is there, and another user's: nothing is said of it


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """What was found without its process."""

    tests: tuple[int, ...]
    """Ids of tests."""
    models: tuple[str, ...]
    """Names of models that were being downloaded or tested."""


def interrupt_stale(database: Database) -> Interrupted:
    """End tests and downloads whose process is gone; call it when the console starts.

    A test that is queued has a process only once it runs, and stays.
    """
    with database.read() as session:
        running = session.scalars(select(TestRun).where(TestRun.status == "running")).all()
        busy = session.scalars(
            select(Model).where(Model.state.in_(("downloading", "testing")))
        ).all()
    # Processes are asked outside of the transaction that writes.
    gone = {run.id for run in running if not is_alive(run.pid, run.pid_started_s)}
    at_work = {run.model_id for run in running if run.id not in gone}
    left = {
        model.id
        for model in busy
        if model.id not in at_work and not is_alive(model.pid, model.pid_started_s)
    }
    if not gone and not left:
        return Interrupted(tests=(), models=())
    with database.write() as session:
        tests = session.scalars(
            select(TestRun).where(TestRun.id.in_(gone), TestRun.status == "running")
        ).all()
        for run in tests:
            run.status, run.reason, run.ended_s = "interrupted", GONE, time.time()
        models = session.scalars(
            select(Model).where(Model.id.in_(left), Model.state.in_(("downloading", "testing")))
        ).all()
        for model in models:
            model.reason = f"interrupted while {model.state}: {GONE}"
            was_loaded = model.state == "testing"
            model.state = tested_state(session, model.id) if was_loaded else "missing"
            model.pid = model.pid_started_s = None
        return Interrupted(
            tests=tuple(run.id for run in tests), models=tuple(model.name for model in models)
        )


def tested_state(session: Session, model_id: int) -> str:
    """Return the state of a model whose files are here: ready once a test of it has finished."""
    was_tested = exists().where(TestRun.model_id == model_id, TestRun.status == "finished")
    return "ready" if session.scalar(select(was_tested)) else "untested"
