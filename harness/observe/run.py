"""The telemetry of one run, from the sampler's start to what the record says of it."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from catalogue.processes import module_command, start_child
from engine.device.gpu import Gpu
from harness.observe.link import payload_gb_s
from harness.observe.spool import write_parquet
from harness.observe.window import (
    LEAST_ROWS,
    Span,
    Window,
    cost_warning,
    facts,
    notes,
    peak_metrics,
    reasons,
    window_metrics,
)
from reports.record.rows import (
    TELEMETRY_COLUMNS,
    TELEMETRY_PARQUET,
    TELEMETRY_SPOOL,
    Table,
    read_telemetry,
)

SAMPLER_COMMAND: Final = module_command("harness.observe.sampler")
GRACE_S: Final = 2.0
"""Seconds that the sampler has to write its last row."""


class Sampler:
    """A sampler in a process of its own. Its troubles become warnings and cost no run."""

    def __init__(
        self, run_dir: Path, gpu_uuid: str | None, command: Sequence[str] = SAMPLER_COMMAND
    ) -> None:
        self._run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self.warnings: list[str] = []
        """What went wrong, once it was closed."""
        arguments = [str(run_dir), "--parent", str(os.getpid())]
        if gpu_uuid is not None:
            arguments += ["--gpu", gpu_uuid]
        try:
            self._process = start_child(
                [*command, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            self.warnings.append(f"telemetry: the sampler did not start: {error}.")

    @property
    def pid(self) -> int | None:
        """Process id of the sampler, None where it did not start."""
        return None if self._process is None else self._process.pid

    def watch(self, pid: int, job: str) -> None:
        """Say which worker runs now."""
        self._tell(f"{pid} {job}\n")

    def unwatch(self) -> None:
        """Say that no worker runs now."""
        self._tell("0\n")

    def _tell(self, line: str) -> None:
        pipe = None if self._process is None else self._process.stdin
        if pipe is None or pipe.closed:
            return
        try:
            pipe.write(line.encode())
            pipe.flush()
        except OSError:  # it ended; close() says why
            return

    def close(self) -> None:
        """End the sampler and turn its rows into a Parquet file; the second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        message = _end(process)
        if message is not None:
            self.warnings.append(f"telemetry: {message} Rows after its end are missing.")
        warning = write_parquet(self._run_dir)
        if warning is not None:
            self.warnings.append(warning)


def _end(process: subprocess.Popen[bytes]) -> str | None:
    """Close the sampler's input, wait for it and return what is wrong with its end."""
    try:
        _, errors = process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"the sampler did not end within {GRACE_S:g} s and was killed."
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode == 0:
        return None
    lines = errors.decode(errors="replace").strip().splitlines()
    why = lines[-1].rstrip(".") if lines else "no message"
    return f"the sampler ended with exit code {process.returncode} ({why})."


LOAD_PART: Final = "load"
_GPU_PREFIXES: Final = ("gpu_", "pcie_")


@dataclass(kw_only=True)
class Report:
    """What is to be said of a point in its record: here, what the telemetry adds."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    effective: dict[str, Any] = field(default_factory=dict)


class Telemetry(Sampler):
    """The sampler of a run, and what its rows say."""

    def __init__(self, run_dir: Path, gpu: Gpu | None) -> None:
        super().__init__(run_dir, gpu.uuid if gpu is not None else None)
        self._gpu = gpu

    def missing(self) -> str | None:
        """Return a line that says what of the GPU will not be sampled, None where all is."""
        if self._gpu is None:
            return None
        gpu = self._gpu
        found = gpu.sample() | gpu.sample_costly() | gpu.sample_slow(set())
        absent = [name for name, value in found.items() if value is None]
        if not absent:
            return None
        return f"telemetry: the driver does not give {', '.join(absent)}: null in every row."

    def report(self, spans: Sequence[Span], link_factor: float | None, *, uses_gpu: bool) -> Report:
        """Return what the rows say of what was timed; after `close`.

        `link_factor` is payload bytes per byte that the link's counter tells.
        """
        found = Report(warnings=list(self.warnings))
        if uses_gpu and self._gpu is None:
            found.warnings.append(
                "telemetry: NVML cannot be had, so the GPU was not sampled, and clocks, "
                "throttling, other processes and link were not judged. Install nvidia-ml-py, and "
                "look whether nvidia-smi shows the GPU."
            )
        try:
            table = read_telemetry(self._run_dir)
        except (ImportError, OSError, ValueError) as error:
            found.warnings.append(f"telemetry: cannot be read: {error}.")
            table = None
        if table is None or not table["clock_s"]:
            return found
        found.metrics = peak_metrics(table)
        self._judge(found, [Window(table, span) for span in spans])
        found.reasons = list(dict.fromkeys(found.reasons))  # of several starts
        timed = [span for span in spans if span.part != LOAD_PART]
        if timed:
            found.metrics |= window_metrics(Window(table, timed[-1]))
            begin_s, end_s = timed[-1].begin_s, timed[-1].end_s
            found.metrics["link/nvml_h2d_gb_s"] = payload_gb_s(table, link_factor, begin_s, end_s)
        self._add_facts(found, table, spans)
        return found

    def _judge(self, found: Report, windows: Sequence[Window]) -> None:
        pcie = self._gpu.facts()["pcie"] if self._gpu is not None else {}
        for window in windows:
            found.reasons += reasons(
                window, max_gen=pcie.get("max_gen"), max_width=pcie.get("max_width")
            )
            found.notes += notes(window)
            if len(window) < LEAST_ROWS and self._gpu is not None and window.span.part != LOAD_PART:
                found.notes.append(
                    f"{window.span.part}: {len(window)} rows of telemetry in "
                    f"{window.span.length_s:.1f} s, too few to judge clocks, throttling and link. "
                    "Raise its requests or tokens."
                )

    def _add_facts(self, found: Report, table: Table, spans: Sequence[Span]) -> None:
        is_parquet = (self._run_dir / TELEMETRY_PARQUET).is_file()
        told = facts(table, spans, TELEMETRY_PARQUET if is_parquet else TELEMETRY_SPOOL)
        found.effective = {"telemetry": told}
        cost = cost_warning(table)
        if cost is not None:
            found.warnings.append(cost)
        found.metrics["telemetry/cpu_pct"] = told["cpu_pct"]
        of_gpu = [name for name in TELEMETRY_COLUMNS if name.startswith(_GPU_PREFIXES)]
        if self._gpu is not None and set(of_gpu) <= set(told["null_columns"]):
            found.warnings.append(
                "telemetry: the sampler got nothing of the GPU from NVML, so its columns are null "
                "and clocks, throttling, other processes and link were not judged."
            )
