"""Which GPU a point takes on a machine with several, with NVML as a stand-in."""

import contextlib
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.asked.config import GPUConfig
from engine.device import gpu as nvml
from engine.errors import ConfigError
from harness.config.schema import SweepContext, SystemConfig
from harness.point import devices, point
from harness.point.devices import first_gpu, own_device
from tests.harness.cases import fake_command, run_config, scenario
from tests.harness.fakes import Script
from tests.harness.observe.test_measure import FakeNvml
from tests.harness.point.test_point import UNCHECKED

# ruff: noqa: N802  some names are NVML's


CONFIG = run_config(gpu=GPUConfig(name="auto"))


class Several(FakeNvml):
    """Two of a kind with another card between them."""

    def __init__(self):
        super().__init__(("GPU-0", "GPU-1", "GPU-2"))

    def nvmlDeviceGetName(self, handle):
        return "Other" if handle == 1 else "Test"

    def nvmlDeviceGetMemoryInfo(self, handle, version=1):
        return SimpleNamespace(total=16 * 2**30, used=2**30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return []


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(nvml, "_load_nvml", Several)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def hold(tmp_path, config=CONFIG, said=None, **options):
    said = [] if said is None else said
    fields = {"owner": "a point", "say": said.append, "any_gpu": True}
    return own_device(config, tmp_path, **(fields | options))


class WaitingError(Exception):
    """In the place of a wait."""


@pytest.fixture
def no_wait(monkeypatch):
    def wait(_):
        raise WaitingError

    monkeypatch.setattr("harness.point.devices.time.sleep", wait)


def test_points_at_once_take_gpus_of_one_kind_and_then_wait(tmp_path, no_wait):
    assert first_gpu(CONFIG).uuid == "GPU-0"
    with hold(tmp_path) as first, hold(tmp_path) as second:
        assert (first.gpu.uuid, first.num_busy) == ("GPU-0", 0)
        assert (second.gpu.uuid, second.num_busy) == ("GPU-2", 1)
        said = []
        with pytest.raises(WaitingError), hold(tmp_path, said=said):
            pass
        assert said[0].startswith("waiting for GPU-0 or GPU-2: in use by process")
    with hold(tmp_path) as again:
        assert (again.gpu.uuid, again.num_busy) == ("GPU-0", 0)


def test_a_point_that_waits_takes_the_gpu_that_becomes_free(tmp_path, monkeypatch):
    with contextlib.ExitStack() as second, hold(tmp_path):
        second.enter_context(hold(tmp_path))
        monkeypatch.setattr("harness.point.devices.time.sleep", lambda _: second.close())
        with hold(tmp_path) as third:
            assert third.gpu.uuid == "GPU-2"


def test_only_gpus_that_cuda_shows_are_taken(tmp_path, monkeypatch, no_wait):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2,9,0")
    with hold(tmp_path) as first:
        assert first.gpu.uuid == "GPU-2"
        with pytest.raises(WaitingError), hold(tmp_path):
            pass


@pytest.mark.parametrize("visible", [None, "2", "GPU-2,0"])
def test_numbers_of_unlike_gpus_in_an_order_of_cuda_s_own_are_refused(visible, monkeypatch):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    environ["CUDA_DEVICE_ORDER"] = "FASTEST_FIRST"
    with pytest.raises(ConfigError, match=r"expected PCI_BUS_ID, .* got FASTEST_FIRST\. Unset it"):
        nvml.visible_gpus(environ)
    monkeypatch.setattr(nvml, "_load_nvml", lambda: FakeNvml(("GPU-0",)))
    nvml.visible_gpus(environ)  # one alone has no order


@pytest.mark.parametrize(
    ("visible", "order", "uuids"),
    [
        ("GPU-2,GPU-1", "FASTEST_FIRST", ["GPU-2", "GPU-1"]),
        ("2,1", "PCI_BUS_ID", ["GPU-2", "GPU-1"]),
        ("2,1", None, ["GPU-2", "GPU-1"]),
    ],
)
def test_gpus_are_named_by_uuid_or_counted_on_the_pci_bus(visible, order, uuids):
    environ = {"CUDA_VISIBLE_DEVICES": visible} | ({"CUDA_DEVICE_ORDER": order} if order else {})
    assert [gpu.uuid for gpu in nvml.visible_gpus(environ)] == uuids


def test_runs_of_a_comparison_stay_on_one_gpu(tmp_path, no_wait):
    with hold(tmp_path), pytest.raises(WaitingError), hold(tmp_path, any_gpu=False):
        pass


def test_points_on_the_cpu_and_on_a_server_run_one_after_another(tmp_path, no_wait):
    cpu = run_config()
    server = replace(CONFIG, system=SystemConfig(kind="http", base_url="http://localhost:1/v1"))
    other = replace(CONFIG, system=SystemConfig(kind="http", base_url="http://localhost:2/v1"))
    with hold(tmp_path, cpu) as here, hold(tmp_path, server) as there:
        assert here.gpu is None
        assert there.gpu.uuid == "GPU-0"
        with hold(tmp_path, other):
            pass
        for config in (cpu, server):
            with pytest.raises(WaitingError), hold(tmp_path, config):
                pass


@pytest.mark.thorough_but("ab1-a")
@pytest.mark.parametrize(("label", "uuid"), [("", "GPU-2"), ("ab1-a", "GPU-0")])
def test_the_record_names_the_gpu_that_was_taken(
    forked_workers, tmp_path, monkeypatch, label, uuid
):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(point, "build_report", lambda folder: [])
    config = replace(CONFIG, scenario=scenario(correctness=UNCHECKED, throughput=None))
    sweep = SweepContext(sweep_id="s", folder=tmp_path, index=0, total=1, label=label)
    with hold(tmp_path) if not label else contextlib.nullcontext():
        record = point.run_point(
            config, tmp_path / "run", [], sweep, command=fake_command(tmp_path, Script())
        )
    assert record.status == "ok"
    assert record.environment["gpu"]["uuid"] == uuid
    beside = [note for note in record.effective["notes"] if "other points ran on 1 other" in note]
    assert len(beside) == (0 if label else 1)


def test_without_nvml_the_lock_is_that_of_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(nvml, "_load_nvml", lambda: None)
    assert devices.first_gpu(CONFIG) is None
    with hold(tmp_path) as device:
        assert device.gpu is None
    assert (tmp_path / "locks" / "cpu.lock").is_file()
