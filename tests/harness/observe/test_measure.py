"""NVML, the page cache and the environment."""

import importlib.util
import json
import os
import sys
from types import SimpleNamespace

import pytest

from engine.device import gpu as nvml
from harness.observe.environment import collect, git_state, huge_page_facts, numa_facts, torch_cuda
from harness.observe.host import cached_share, drop_page_cache

# ruff: noqa: N802, N815  some names are NVML's


class FakeNvml:
    """Two GPUs; the second gives neither memory nor energy."""

    NVML_CLOCK_SM = 1
    nvmlMemory_v2 = 2

    def __init__(self, uuids=("GPU-aa", "GPU-bb")):
        self.uuids = uuids

    def nvmlInit(self):
        return None

    def nvmlDeviceGetCount(self):
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return self.uuids[handle].encode()

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA Test"

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlSystemGetCudaDriverVersion(self):
        return 13000

    def nvmlDeviceGetMemoryInfo(self, handle, version=1):
        if handle == 1:
            raise RuntimeError("Not Supported")
        reserve = 0 if version == 2 else 2**29
        return SimpleNamespace(total=16 * 2**30, used=2**30 + reserve)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if handle == 1:
            raise RuntimeError("Not Supported")
        return 5000

    def nvmlDeviceGetPowerUsage(self, handle):
        return 300_000

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle):
        return 5

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=1), SimpleNamespace(pid=2)]


@pytest.fixture
def fake_nvml(monkeypatch):
    monkeypatch.setattr(nvml, "_load_nvml", FakeNvml)


def test_gpu_facts_by_uuid(fake_nvml):
    gpu = nvml.open_gpu("GPU-aa")
    facts = gpu.facts()
    assert facts["name"] == "NVIDIA Test"
    assert facts["memory_bytes"] == 16 * 2**30
    assert (facts["driver"], facts["cuda_driver"]) == ("580.1", "13.0")
    assert facts["pcie"]["gen"] == 5
    assert facts["pcie"]["width"] is None  # this driver does not tell
    assert gpu.energy_j() == 5
    assert gpu.sample()["gpu_power_w"] == 300
    assert gpu.compute_pids() == {1, 2}
    assert gpu.sample_slow({2, 7})["gpu_num_own_processes"] == 1


def test_a_field_that_the_driver_refuses_is_none_and_costs_no_other(fake_nvml):
    gpu = nvml.open_gpu("GPU-bb")
    assert gpu.facts()["memory_bytes"] is None
    assert gpu.facts()["name"] == "NVIDIA Test"
    assert gpu.energy_j() is None
    assert gpu.sample()["gpu_used_bytes"] is None
    assert gpu.sample()["gpu_power_w"] == 300


def test_an_old_binding_counts_the_reserve_as_used(fake_nvml, monkeypatch):
    gpu = nvml.open_gpu("GPU-aa")
    assert gpu.sample()["gpu_used_bytes"] == 2**30
    monkeypatch.delattr(FakeNvml, "nvmlMemory_v2")
    assert gpu.sample()["gpu_used_bytes"] == 2**30 + 2**29


@pytest.mark.parametrize(
    ("visible", "uuid"),
    [(None, "GPU-aa"), ("1", "GPU-bb"), ("1,0", "GPU-bb"), ("GPU-b", "GPU-bb")],
)
def test_the_gpu_is_the_first_that_cuda_shows(fake_nvml, visible, uuid):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert nvml.open_gpu(environ=environ).uuid == uuid


@pytest.mark.parametrize("visible", ["", "7", "MIG-1", "-1"])
def test_no_gpu_where_cuda_shows_none(fake_nvml, visible):
    assert nvml.open_gpu(environ={"CUDA_VISIBLE_DEVICES": visible}) is None


def test_no_gpu_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.open_gpu() is None


def test_page_cache_is_counted_and_dropped(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(1 << 20))
    before = cached_share([path])
    if before is None:
        pytest.skip("this kernel does not tell what is in the page cache")
    assert before == 1
    drop_page_cache([path])
    assert cached_share([path]) <= before
    assert cached_share([]) is None


def test_environment_without_a_gpu():
    facts = collect(None)
    assert facts["gpu"] is None
    assert facts["driver"] is None
    assert facts["cpu"]["num_cores"] == os.cpu_count()
    assert facts["memory_bytes"] > 2**30
    assert facts["swap_bytes"] >= 0
    assert facts["kernel"] == os.uname().release
    assert facts["numa"]["gpu_node"] is None
    assert facts["cuda"]["driver"] is None
    assert facts["torch"] == facts["packages"]["torch"]
    json.dumps(facts)


def test_numa_nodes_of_known_files(tmp_path):
    for number, total in ((0, 100), (1, 50)):
        folder = tmp_path / "devices/system/node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{8 * number}-{8 * number + 7}\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:   {total} kB\n")
    assert numa_facts(1, tmp_path) == {
        "nodes": [
            {"node": 0, "cpus": "0-7", "memory_bytes": 102_400},
            {"node": 1, "cpus": "8-15", "memory_bytes": 51_200},
        ],
        "gpu_node": 1,
    }
    assert numa_facts(None, tmp_path / "none") == {"nodes": None, "gpu_node": None}


def test_huge_pages_of_known_files(tmp_path):
    folder = tmp_path / "kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text("always [madvise] never\n")
    (folder / "defrag").write_text("always defer [defer+madvise] madvise never\n")
    assert huge_page_facts(tmp_path) == {
        "enabled": "madvise",
        "defrag": "defer+madvise",
        "shmem_enabled": None,
    }


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda: Optional[str] = None", None),
        ("hip = '6'", None),
    ],
)
def test_the_cuda_of_torch_is_read_without_importing_it(tmp_path, monkeypatch, line, version):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "version.py").write_text(f"__version__ = '2'\n{line}\n")
    spec = importlib.util.spec_from_file_location("torch", folder / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert torch_cuda() == version


@pytest.mark.parametrize(("text", "node"), [("1", 1), ("-1", None), (None, None)])
def test_the_node_of_a_gpu(fake_nvml, tmp_path, monkeypatch, text, node):
    devices = tmp_path / "0000:3b:00.0"
    devices.mkdir()
    if text is not None:
        (devices / "numa_node").write_text(f"{text}\n")
    monkeypatch.setattr(nvml, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(
        FakeNvml,
        "nvmlDeviceGetPciInfo",
        lambda self, handle: SimpleNamespace(busId=b"00000000:3B:00.0"),
        raising=False,
    )
    assert nvml.open_gpu("GPU-aa").facts()["numa_node"] == node


def test_no_git_state_outside_a_checkout(tmp_path):
    assert git_state(tmp_path) is None
