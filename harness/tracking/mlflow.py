"""MLflow: one SQLite file and artifact root for all runs; a run a point, a parent run a sweep.

Only the harness's own process talks to MLflow, through MlflowClient with explicit addresses; no
global state of MLflow is used, and MLflow is imported when the tracker opens.
"""

import logging
import math
import os
import re
import shlex
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from filelock import FileLock

from harness.config.schema import SweepContext, TrackingConfig
from harness.observe.host import start_ticks
from harness.tracking.base import GuardedTracker, PointFacts, SweepFacts, Tracker
from harness.work.kv import kv_series
from reports.record.metrics import Place, found, metric_text, shown
from reports.record.record import RunRecord
from reports.record.text import LOCAL, SWEEPS, experiment_page, runs_search

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_COLUMNS: Final = (("experiments", "artifact_location"), ("runs", "artifact_uri"))
"""Where MLflow keeps absolute addresses of files."""


def follow_store(database: Path, artifacts: str, experiment: str) -> None:
    """Make a moved or copied store keep files beside itself, not where it was made.

    Nothing changes unless the folder of the experiment's files has the name of `artifacts` (the
    address of the folder beside the database), is another one, and came along with the store.
    """
    now = _path(artifacts)
    with closing(sqlite3.connect(database, timeout=60.0)) as store, store:
        has_tables = store.execute(
            "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN (?, ?)",
            [table for table, _ in _COLUMNS],
        ).fetchone()[0] == len(_COLUMNS)
        if now is None or not now.is_dir() or not has_tables:
            return
        row = store.execute(
            "SELECT artifact_location FROM experiments WHERE name = ?", [experiment]
        ).fetchone()
        before = None if row is None else _path(str(row[0]))
        if before is None or before.name != now.name or before.resolve() == now.resolve():
            return
        old = str(row[0])
        for table, column in _COLUMNS:
            store.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) "  # noqa: S608  constants
                f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                [artifacts, len(old) + 1, old, len(old) + 1, f"{old}/"],
            )


def _path(address: str) -> Path | None:
    """Return the folder of a file:// address, None of another kind."""
    parts = urlsplit(address)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


DATABASE_NAME: Final = "mlflow.db"
_FINAL_STATUS: Final = {"ok": "FINISHED", "partial": "FINISHED", "killed": "KILLED"}
"""Status of a record or a sweep -> MLflow's; the others are FAILED."""
_NOTE: Final = "mlflow.note.content"
_KIND: Final = "mlflow.experimentKind"
"""Tag by which MLflow shows runs, not traces, first."""
READING: Final = (
    "Each run is one point; points of a sweep, a comparison or a study lie below a parent run. "
    "Its description has the table and the best point. `headline/...` repeats the metrics of that "
    "table, so that they come first; `latency/...` are of requests alone, `throughput/...` of a "
    "queue, `system/...` over time (tab System metrics). All other metrics of a run are in its "
    "artifacts (`metrics.csv`, `result.json`), with the report as HTML. A run whose tag "
    "`harness.valid` is false does not count; `harness.status` says how it ended."
)
"""Description of an experiment."""
_SHARED: Final = ("config.yaml", "result.json", "report.html", "report.md")
_ARTIFACTS: Final = (
    *_SHARED,
    *("overrides.yaml", "metrics.csv", "worker.log", "samples.jsonl"),
    *("requests.parquet", "requests.jsonl", "telemetry.parquet", "telemetry.jsonl"),
)
_SWEEP_ARTIFACTS: Final = (
    *_SHARED,
    *("multirun.yaml", "sweep.csv", "sweep.html", "sweep.md", "failures.md"),
)
_FIGURES: Final = ("*.png", "figures/*.png")
ENVIRONMENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # MLflow's own 7 retries of 120 s each keep a server that is down from being noticed.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
DATABASES: Final = ("sqlite", "postgresql", "mysql", "mssql")
_T = TypeVar("_T")
_MAX_BATCH: Final = 1000
_MAX_PARAM_BATCH: Final = 100
_TS_FIELDS: Final = {
    "tokens_s": "system/output_tok_s",
    "output_tokens": "system/output_tokens",
    "requests_done": "system/requests_done",
    "expert_hit_share": "system/expert_hit_share",
    "rss_bytes": "system/host_rss_bytes",
    "pinned_bytes": "system/host_pinned_bytes",
    "host_available_bytes": "system/host_available_bytes",
    "host_swap_used_bytes": "system/host_swap_used_bytes",
    "gpu_used_bytes": "system/gpu_used_bytes",
    "gpu_power_w": "system/gpu_power_w",
    "gpu_sm_clock_mhz": "system/gpu_sm_clock_mhz",
    "gpu_temperature_c": "system/gpu_temperature_c",
    "gpu_busy_pct": "system/gpu_busy_pct",
    "pcie_rx_gb_s": "system/pcie_rx_gb_s",
    "pcie_tx_gb_s": "system/pcie_tx_gb_s",
}


class MlflowTracker(Tracker):
    """Mirrors points to an MLflow experiment."""

    def __init__(self, config: TrackingConfig, home: Path) -> None:
        self._home = home
        self._experiment = config.experiment
        self._uri = store_uri(config, home)
        self._artifacts = artifact_root(self._uri, home)
        self._client: MlflowClient | None = None
        self._experiment_id = ""
        self._run_id: str | None = None
        self._started_s = 0.0

    def open(self) -> None:
        """Connect; create the database and the experiment when absent; repair stale runs."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        logging.getLogger("urllib3").setLevel(logging.ERROR)  # it announces every retry
        # It prints the traceback of what it raises, which becomes a warning here.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        prepare_store(self._uri, self._home, self._experiment)
        with only_one(self._home):
            self._client = MlflowClient(tracking_uri=self._uri)
            found = self._client.get_experiment_by_name(self._experiment)
            if found is None:
                self._experiment_id = self._client.create_experiment(
                    self._experiment, artifact_location=self._artifacts
                )
            else:
                if found.lifecycle_stage == "deleted":
                    self._client.restore_experiment(found.experiment_id)
                self._experiment_id = found.experiment_id
            self._client.set_experiment_tag(self._experiment_id, _KIND, "custom_model_development")
            if found is None or _NOTE not in found.tags:
                self._client.set_experiment_tag(self._experiment_id, _NOTE, READING)
            self._repair()

    def start_sweep(self, sweep: SweepContext) -> None:
        """Create the sweep's run with status RUNNING."""
        with only_one(self._home):
            self._sweep_run(sweep, {})

    def start_point(self, point: PointFacts) -> None:
        """Create the point's run with status RUNNING, below its sweep's run if it has one."""
        from mlflow.entities import Param

        tags = {**point.tags, **_own_tags(), "harness.run_id": point.run_id}
        if point.sweep is not None:
            with only_one(self._home):
                parent = self._sweep_run(point.sweep, point.tags)
            sweep_id = point.sweep.sweep_id
            tags |= {"harness.sweep_id": sweep_id, SWEEPS: sweep_id, "mlflow.parentRunId": parent}
        client = self._open_client()
        run = client.create_run(self._experiment_id, tags=tags, run_name=point.name)
        self._run_id = run.info.run_id
        self._started_s = time.time()
        params = [Param(key, str(value)) for key, value in point.params.items()]
        for batch in _batches(params, _MAX_PARAM_BATCH):
            client.log_batch(self._run_id, params=batch)

    def log_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the rows as time series `system/...`; the step is milliseconds since the start."""
        from mlflow.entities import Metric

        if self._run_id is None:
            return
        metrics = [
            Metric(
                name,
                float(row[key]),
                int(row["time"] * 1e3),
                max(0, int((row["time"] - self._started_s) * 1e3)),
            )
            for row in rows
            for key, name in _TS_FIELDS.items()
            if _is_finite(row.get(key))
        ]
        for batch in _batches(metrics, _MAX_BATCH):
            self._open_client().log_batch(self._run_id, metrics=batch)

    def finish_point(self, record: RunRecord, run_dir: Path) -> None:
        """Log the figures and files, then end the run FINISHED, FAILED or KILLED."""
        if self._run_id is None:
            return
        client, run_id = self._open_client(), self._run_id
        try:
            self._log_figures(record)
            self._log_files(run_id, run_dir, _ARTIFACTS)
        finally:
            client.set_terminated(run_id, _FINAL_STATUS.get(record.status, "FAILED"))
            self._run_id = None

    def take_over_point(self, point: PointFacts, record: RunRecord, run_dir: Path) -> None:
        """Tag the run of a point as one of this sweep too; log it only where there is none."""
        client = self._open_client()
        found = client.search_runs(
            [self._experiment_id], f"tags.`harness.run_id` = '{record.run_id}'", max_results=1
        )
        if not found:
            super().take_over_point(point, record, run_dir)
            return
        if point.sweep is None:
            return
        with only_one(self._home):
            self._sweep_run(point.sweep, point.tags)
        tags, run_id = found[0].data.tags, found[0].info.run_id
        before = tags.get(SWEEPS, tags.get("harness.sweep_id", ""))
        client.set_tag(run_id, SWEEPS, f"{before} {point.sweep.sweep_id}".strip())

    def finish_sweep(self, sweep: SweepFacts) -> None:
        """Log the sweep's files and end its run."""
        client = self._open_client()
        with only_one(self._home):
            run_id = self._sweep_run(sweep.context, {})
        try:
            for status, count in sweep.counts.items():
                client.log_metric(run_id, f"points/{status}", count)
            for name, value in sweep.metrics.items():
                if value is not None and _is_finite(value):
                    client.log_metric(run_id, name, value)
            counts = ", ".join(f"{count} {status}" for status, count in sweep.counts.items())
            client.set_tag(run_id, "harness.status", sweep.status)
            client.set_tag(run_id, "harness.points", counts)
            if sweep.note:
                client.set_tag(run_id, _NOTE, sweep.note)
                latest = f"{READING}\n\n## Latest: {sweep.context.title}\n\n{sweep.note}"
                client.set_experiment_tag(self._experiment_id, _NOTE, latest)
            self._log_files(run_id, sweep.context.folder, _SWEEP_ARTIFACTS)
        finally:
            client.set_terminated(run_id, _FINAL_STATUS.get(sweep.status, "FAILED"))
            for run in self._running("harness.sweep_id", sweep.context.sweep_id):
                self._kill(run.info.run_id)  # a point whose end a second Ctrl-C cut short

    def view_command(self, sweep_id: str | None = None) -> str:
        """Return the command that opens the UI, and the page of these runs in it."""
        number = self.experiment_id()
        search = "" if sweep_id is None else runs_search(SWEEPS, sweep_id)
        if self._uri.startswith(("http://", "https://")):
            return f"open {experiment_page(self._uri, number, search, is_chart=bool(search))}"
        own = self._uri == store_uri(TrackingConfig(), self._home)
        command = "tightfit ui" + ("" if own else f" --store {shlex.quote(self._uri)}")
        page = experiment_page(LOCAL, number, search, is_chart=bool(search))
        return f"{command}    # then {page}"

    def experiment_id(self) -> str | None:
        """Return MLflow's number of the experiment."""
        return self._experiment_id or None

    def _open_client(self) -> "MlflowClient":
        if self._client is None:
            raise RuntimeError("tracking: open() comes first.")
        return self._client

    def _sweep_run(self, sweep: SweepContext, tags: Mapping[str, str]) -> str:
        """Return the id of the sweep's run, created when absent; under the lock."""
        client, sweep_id = self._open_client(), sweep.sweep_id
        found = client.search_runs(
            [self._experiment_id],
            f"tags.`harness.kind` = 'sweep' and tags.`harness.sweep_id` = '{sweep_id}'",
            max_results=1,
        )
        if found:
            return str(found[0].info.run_id)
        shared = {key: tags[key] for key in ("git.sha", "git.dirty") if key in tags}
        own = {**shared, **_own_tags(), "harness.kind": "sweep", "harness.sweep_id": sweep_id}
        own[SWEEPS] = sweep_id
        name = sweep.title or f"sweep {sweep_id}"
        run = client.create_run(self._experiment_id, tags=own, run_name=name)
        return str(run.info.run_id)

    def _log_figures(self, record: RunRecord) -> None:
        from mlflow.entities import Metric, RunTag

        now_ms = int(time.time() * 1e3)
        metrics = [
            Metric(name, float(value), now_ms, 0)
            for name, value in logged(record.metrics).items()
            if value is not None and _is_finite(value)
        ]
        metrics += [
            Metric(f"system/{name}", value, now_ms, round(1e3 * time_s))
            for name, time_s, value in kv_series(record.samples.get("kv"))
        ]
        tags = {
            "harness.status": record.status,
            "harness.valid": {True: "true", False: "false", None: "unknown"}[record.valid],
            "harness.emulated": str(record.environment.get("emulated")).lower(),
            "mlflow.note.content": note(record),
        }
        uuid = (record.environment.get("gpu") or {}).get("uuid")
        if uuid is not None:  # which GPU was free was not known when the run was shown
            tags["gpu.uuid"] = str(uuid)
        if record.error is not None:
            tags["error.type"] = str(record.error["type"])
        client, run_id = self._open_client(), self._run_id or ""
        client.log_batch(run_id, tags=[RunTag(key, value[:5000]) for key, value in tags.items()])
        for batch in _batches(metrics, _MAX_BATCH):
            client.log_batch(run_id, metrics=batch)

    def _log_files(self, run_id: str, folder: Path, names: Sequence[str]) -> None:
        client = self._open_client()
        for name in names:
            path = folder / name
            if path.suffix == ".html" and path.is_file():
                client.log_text(run_id, without_links(path.read_text(encoding="utf-8")), name)
            elif path.is_file():
                client.log_artifact(run_id, str(path))
        for pattern in _FIGURES:
            for path in sorted(folder.glob(pattern)):
                client.log_artifact(run_id, str(path), "figures")

    def _repair(self) -> None:
        """End runs of this machine that are RUNNING although their process is gone."""
        for run in self._running("harness.host", socket.gethostname()):
            pid = run.data.tags.get("harness.pid", "")
            ticks = start_ticks(int(pid)) if pid.isdecimal() else None
            if str(ticks) != run.data.tags.get("harness.pid_start"):
                self._kill(run.info.run_id)

    def _running(self, tag: str, value: str) -> "Sequence[Run]":
        """Return runs with a tag that are RUNNING."""
        return self._open_client().search_runs(
            [self._experiment_id],
            f"attributes.status = 'RUNNING' and tags.`{tag}` = '{value}'",
            max_results=_MAX_BATCH,
        )

    def _kill(self, run_id: str) -> None:
        self._open_client().set_tag(run_id, "harness.status", "killed")
        self._open_client().set_terminated(run_id, "KILLED")


def store_uri(config: TrackingConfig, home: Path) -> str:
    """Return the address of the store: the one that is set, else the database in the home."""
    return config.uri or f"sqlite:///{home / DATABASE_NAME}"


@contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Let one process at a time change what all of them share in the store."""
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / f"{DATABASE_NAME}.lock"):
        yield


def prepare_store(uri: str, home: Path, experiment: str) -> None:
    """Create an SQLite file that is absent, with MLflow's own experiment beside its files.

    A client would put that experiment's files into the folder of the first command. The file
    has its name when it is complete: a creation that was killed cannot be gone on with. One
    that was moved gets its files' addresses corrected. Processes that start at once take turns:
    concurrent migrations of a new file fail.
    """
    path, artifacts = sqlite_path(uri), artifact_root(uri, home)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if path is None or artifacts is None:
        return
    with only_one(home):
        if path.exists():
            follow_store(path, artifacts, experiment)
            return
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        for file in path.parent.glob(f"{unfinished.name}*"):  # and its journal
            file.unlink()
        store = SqlAlchemyStore(f"sqlite:///{unfinished}", artifacts)  # type: ignore[no-untyped-call]
        store.engine.dispose()
        unfinished.replace(path)


def logged(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the metrics that tables and summaries show, in their order, with their intervals.

    Those of a sweep's table come twice, first as `headline/...`: MLflow orders charts by name.
    """
    first = {
        f"headline/{metric.name.replace('/', '_')}": metrics[metric.name]
        for metric in found("sweep", [metrics])
    }
    shown_in: tuple[Place, ...] = ("summary", "card", "sweep", "best", "ab", "compare")
    bases = dict.fromkeys(metric.name for place in shown_in for metric in shown(place))
    ends = ("", "/mean", "/p50", "/ci95_low", "/ci95_high")
    names = [f"{base}{end}" for base in bases for end in ends]
    names += [name for name in metrics if name.startswith("ab/")]
    return first | {name: metrics[name] for name in dict.fromkeys(names) if name in metrics}


def without_links(page: str) -> str:
    """Return a page without links to files beside it, which are not there among artifacts."""
    link = r'<a\b[^>]*\bhref="(?!#|https?:)[^"]*"[^>]*>(.*?)</a>'
    return re.sub(link, r"\1", page, flags=re.DOTALL)


def sqlite_path(uri: str) -> Path | None:
    """Return the file of an SQLite address, None for another kind of address."""
    scheme, _, rest = uri.partition("?")[0].partition("://")
    return Path(rest.removeprefix("/")).absolute() if scheme.startswith("sqlite") else None


def artifact_root(uri: str, home: Path) -> str | None:
    """Return where new experiments keep files; None: where the server says.

    Beside an SQLite file, and in TIGHTFIT_HOME for another database: never in the folder in which a
    command happens to start.
    """
    if not uri.startswith(DATABASES):
        return None
    path = sqlite_path(uri)
    return ((path.parent if path is not None else home) / "artifacts").as_uri()


def _own_tags() -> dict[str, str]:
    """Return what names this process, so that a later start can tell whether it still lives."""
    pid = os.getpid()
    return {
        "harness.host": socket.gethostname(),
        "harness.pid": str(pid),
        "harness.pid_start": str(start_ticks(pid)),
    }


def _batches(items: list[_T], size: int) -> Iterator[list[_T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def note(record: RunRecord) -> str:
    """Return a short summary in Markdown for the run's page."""
    figures = [
        f"{metric.label} {metric_text(metric.name, record.metrics[metric.name])}"
        for metric in found("sweep", [record.metrics])
    ]
    lines = [f"**{record.status}** {', '.join([record.name, *figures])}"]
    if record.environment.get("emulated") is True:
        lines.append("Emulated on the CPU: not a GPU's figures.")
    if record.error is not None:
        lines.append(f"{record.error['type']}: {record.error['message']}")
    lines += [f"- {reason}" for reason in record.reasons]
    return "\n\n".join(lines)


def open_tracker(config: TrackingConfig, home: Path) -> GuardedTracker:
    """Return an open tracker; its troubles are in `warnings`, never raised."""
    tracker: Tracker = Tracker() if config.backend == "none" else MlflowTracker(config, home)
    return GuardedTracker(tracker)
