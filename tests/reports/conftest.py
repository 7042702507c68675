"""Folders with records, and their pages rendered once."""

import pytest

from reports.pages.write import write_report, write_sweep_report
from tests.reports.examples import config, no_fit_record, ok_record


def write_run(record, folder):
    folder.mkdir(parents=True)
    record.write(folder / "result.json")
    return folder


@pytest.fixture(scope="session")
def ok_dir(tmp_path_factory):
    folder = write_run(ok_record(), tmp_path_factory.mktemp("ok") / "run")
    write_report(folder)
    return folder


@pytest.fixture(scope="session")
def no_fit_dir(tmp_path_factory):
    folder = write_run(no_fit_record(), tmp_path_factory.mktemp("no_fit") / "run")
    write_report(folder)
    return folder


def sweep_records():
    prefetch = ok_record(
        config=config("prefetch"),
        overrides=["+model=olmo7b", "offload=prefetch", "gpu=rtx4080_16gb"],
    )
    prefetch.metrics |= {
        "throughput/output_tok_s": 431.25,
        "latency/tpot_ms/p50": 148.7,
        "memory/gpu_peak_gib": 13.1,
    }
    failed = ok_record(
        status="failed",
        valid=None,
        error={
            "type": "RuntimeError",
            "message": "first line\nsecond line",
            "phase": "throughput",
            "traceback": "Traceback (most recent call last):\nRuntimeError: first line",
        },
        overrides=["+model=olmo7b", "offload=uva", "gpu=rtx4080_16gb", "engine.seed=1"],
        metrics={},
        samples={},
    )
    return {"0": no_fit_record(), "1": ok_record(), "2": prefetch, "10": failed}


@pytest.fixture(scope="session")
def sweep_dir(tmp_path_factory):
    """Four readable points, one broken record, one that has not ended."""
    folder = tmp_path_factory.mktemp("sweeps") / "study"
    for name, record in sweep_records().items():
        write_run(record, folder / name)
    (folder / "11").mkdir()
    (folder / "11" / "result.json").write_text("{", encoding="utf-8")
    (folder / "12").mkdir()
    (folder / "12" / "state.json").write_text("{}", encoding="utf-8")
    (folder / "1" / "report.html").write_text("", encoding="utf-8")
    write_sweep_report(folder)
    return folder
