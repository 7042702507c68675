"""A run on a stand-in GPU, whose worker takes real time: figures, reasons and warnings."""

import pytest

from engine.asked.config import GPUConfig
from engine.device import gpu as nvml
from harness.config.schema import CorrectnessConfig, ThroughputScenario
from harness.observe import run as telemetry
from harness.observe.run import Telemetry
from harness.observe.sampler import main
from harness.observe.window import Span
from harness.point import point
from harness.point.point import run_point
from tests.harness.cases import run_config, scenario
from tests.harness.fakes import Script
from tests.harness.observe.telemetry.cases import install, load, real_time_command, table
from tests.harness.observe.telemetry.pynvml_stand_in import UUID

PART = ThroughputScenario(num_requests=2, prompt_tokens=4, output_tokens=21, warmup_requests=1)
QUICK = scenario(latency=None, throughput=PART, correctness=CorrectnessConfig(enabled=False))


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Put the stand-in where this process, the worker and the sampler find it."""
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(point, "build_report", lambda folder: [])
    folder = tmp_path / "nvml"
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUID)

    def said(**readings):
        install(folder, **readings)
        monkeypatch.setattr(nvml, "_load_nvml", lambda: load(folder))

    return said


def run(tmp_path, decode_s):
    config = run_config(gpu=GPUConfig(name="auto", device="auto"), scenario=QUICK)
    script = Script(prefill_s=0.02, decode_s=decode_s, phases={})
    return run_point(config, tmp_path / "run", command=real_time_command(tmp_path, script))


@pytest.mark.thorough
def test_a_card_in_trouble(tmp_path, stand_in):
    stand_in(bits=0x40 | 0x8, temperature=91, gen=3, pids=[1, 2], rx_kb_s=10**7)
    record = run(tmp_path, decode_s=0.07)  # 1.42 s, or longer on a machine under load
    [window] = record.effective["telemetry"]["windows"]
    assert (record.status, record.valid) == ("ok", False)
    text = "\n".join(record.reasons)
    assert "throughput: 1 other process computed" in text
    assert "throughput: the GPU was slowed down in 100% of the busy time" in text
    assert "up to 91.0 C" in text
    assert "throughput: the PCIe link ran at generation 3 with 16 lanes" in text
    assert len(record.reasons) == 3
    metrics = record.metrics
    assert metrics["gpu/throttled_share"] == 1
    assert metrics["gpu/temperature_c"] == 91
    assert 2 < metrics["telemetry/rows_hz"] < 12  # 10, on a machine that has the time
    assert metrics["gpu/sm_clock_mhz/p50"] == 1980
    assert metrics["link/nvml_h2d_gb_s"] is None  # read every 5 s, and five readings are needed
    assert metrics["energy/total_j"] == pytest.approx(
        100 * (window["end_s"] - window["begin_s"]), rel=0.15
    )
    assert metrics["energy/j_per_token"] == pytest.approx(metrics["energy/total_j"] / 42)
    assert record.environment["gpu"]["pcie"]["max_gen"] == 5
    assert record.environment["cuda"]["driver"] == "13.0"


@pytest.mark.thorough
def test_a_healthy_card_with_absent_fields(tmp_path, stand_in, capsys):
    stand_in(energy_mj=None, rx_kb_s=None, pids=None)
    record = run(tmp_path, decode_s=0.01)
    assert (record.status, record.reasons) == ("ok", [])
    assert record.metrics["energy/total_j"] is None
    assert record.metrics["energy/j_per_token"] is None
    assert record.metrics["link/nvml_h2d_gb_s"] is None
    assert record.metrics["gpu/power_w"] == 300
    absent = {"gpu_energy_j", "pcie_rx_gb_s", "gpu_num_processes"}
    assert absent <= set(record.effective["telemetry"]["null_columns"])
    said = capsys.readouterr().err
    assert "the driver does not give gpu_energy_j, pcie_rx_gb_s, gpu_num_processes" in said


def report(tmp_path, monkeypatch, rows, *, gpu=None, uses_gpu=False):
    """What a run says whose rows are these."""
    found = Telemetry(tmp_path, None)
    found.close()
    monkeypatch.setattr(found, "_gpu", gpu)
    monkeypatch.setattr(telemetry, "read_telemetry", lambda folder: rows)
    span = Span(part="latency", job="measure", begin_s=100.0, end_s=104.0)
    return found.report([span], None, uses_gpu=uses_gpu)


def test_a_gpu_run_without_nvml_is_told(tmp_path, monkeypatch):
    found = report(tmp_path, monkeypatch, table(rss_bytes=7), uses_gpu=True)
    [warning] = found.warnings
    assert "NVML cannot be had" in warning
    assert "Install nvidia-ml-py" in warning


def test_a_sampler_that_cannot_reach_the_gpu_is_told(tmp_path, monkeypatch, stand_in):
    stand_in()
    gpu = nvml.open_gpu(UUID)
    found = report(tmp_path, monkeypatch, table(rss_bytes=7), gpu=gpu, uses_gpu=True)
    assert "got nothing of the GPU from NVML" in found.warnings[0]


def test_too_few_rows_are_noted(tmp_path, monkeypatch, stand_in):
    stand_in()
    rows = table(6, gpu_power_w=5)
    found = report(tmp_path, monkeypatch, rows, gpu=nvml.open_gpu(UUID), uses_gpu=True)
    assert found.notes[0].startswith("latency: 6 rows of telemetry in 4.0 s, too few")


def test_rows_that_cannot_be_read_are_a_warning(tmp_path, monkeypatch):
    found = Telemetry(tmp_path, None)
    found.close()
    (tmp_path / "telemetry.parquet").write_bytes(b"not a table")
    told = found.report([], None, uses_gpu=False)
    assert "cannot be read" in told.warnings[-1]
    assert told.metrics == {}


def test_a_folder_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "run_dir" in capsys.readouterr().err
