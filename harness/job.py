"""What a parent asks of one worker process, and the files through which the two talk."""

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import uuid4

from engine.config import EngineConfig
from harness.fake_config import FakeScript
from harness.prompts import PromptRow
from harness.schema import ScenarioConfig
from harness.system_config import SystemConfig
from harness.traffic.trace import TraceRow

SAMPLES_NAME: Final = "samples.jsonl"
WORKER_LOG_NAME: Final = "worker.log"
JOBS_FOLDER: Final = "jobs"
PLAN_PHASE: Final = "plan"
"""Phase of a reference job in which it plans the engine under test."""
UNFINISHED: Final = "unfinished"
"""Status of a worker's result until its job is done."""


@dataclass(frozen=True, kw_only=True)
class WorkerJob:
    """One start of the engine in a process of its own."""

    name: str
    """Unique in the run folder: measure, reference, load-cold-1, load-warm-1, ..."""
    kind: str
    """measure | load | reference."""
    engine: EngineConfig
    scenario: ScenarioConfig
    system: SystemConfig = field(default_factory=SystemConfig)
    """What answers the requests."""
    fake: FakeScript | None = None
    """What an engine that computes nothing pretends; None: a real one."""
    prompts: dict[str, list[PromptRow]] = field(default_factory=dict)
    """Part of the scenario -> rows of its prompts_file."""
    trace: list[TraceRow] = field(default_factory=list)
    """Rows of the trace of scenario.serve."""
    reference: Path | None = None
    """File of the reference tokens: read by measure (None: no comparison), written by reference."""
    under_test: EngineConfig | None = None
    """Of reference: the configuration that it is for, planned before the reference is built."""
    gpu_uuid: str | None = None
    """The GPU whose energy counter is read."""
    salt: str = field(default_factory=lambda: uuid4().hex)
    """Begins the salts of all requests: a server outlives the run and keeps prefixes."""

    def write(self, run_dir: Path) -> None:
        """Store the job where the worker finds it."""
        path = job_path(run_dir, self.name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(self))


def read_job(run_dir: Path, name: str) -> WorkerJob:
    """Return the job `name` of a run folder, as its parent stored it."""
    job = pickle.loads(job_path(run_dir, name).read_bytes())  # noqa: S301  written by our parent
    if not isinstance(job, WorkerJob):
        raise TypeError(f"{job_path(run_dir, name)}: expected a WorkerJob, got {type(job)}.")
    return job


def job_path(run_dir: Path, name: str) -> Path:
    """Return the file that holds a job."""
    return run_dir / JOBS_FOLDER / f"{name}.pickle"


def result_path(run_dir: Path, name: str) -> Path:
    """Return the file that a worker writes its result to."""
    return run_dir / JOBS_FOLDER / f"{name}.result.json"
