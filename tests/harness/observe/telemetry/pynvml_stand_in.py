"""Stands in for the module pynvml: one GPU whose readings a JSON file says; others refuse.

A child process finds it as `pynvml` in a folder that PYTHONPATH names; the file is beside it.
"""

import json
import time
from pathlib import Path
from types import SimpleNamespace

# ruff: noqa: N802  the names are NVML's

NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_PCIE_UTIL_TX_BYTES = 0
NVML_PCIE_UTIL_RX_BYTES = 1
UUID = "GPU-stand-in"
READINGS = {
    "memory": 5 * 2**30,
    "power_mw": 300_000,
    "energy_mj": 0,
    "busy": 90,
    "memory_busy": 40,
    "sm_mhz": 1980,
    "memory_mhz": 2600,
    "bits": 0,
    "rx_kb_s": 20_000_000,
    "tx_kb_s": 1000,
    "temperature": 55,
    "gen": 5,
    "width": 16,
    "max_gen": 5,
    "max_width": 16,
    "pids": [],
}
"""What the GPU says; None: it refuses. Energy grows by 100 J a second where it is not None."""


class NVMLError(Exception):
    """NVML refuses."""


def _reading(name):
    readings = json.loads(Path(__file__).with_name("readings.json").read_text())
    if readings.get("hang"):
        time.sleep(600)
    if readings[name] is None:
        raise NVMLError("Not Supported")
    return readings[name]


def nvmlInit():
    return None


def nvmlDeviceGetCount():
    return 2


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetUUID(handle):
    return (b"GPU-other", UUID.encode())[handle]


def nvmlDeviceGetName(handle):
    return "NVIDIA Stand-in"


def nvmlSystemGetDriverVersion():
    return "580.1"


def nvmlSystemGetCudaDriverVersion():
    return 13000


def _mine(handle):
    if handle != 1:
        raise NVMLError("the other GPU was asked")


def nvmlDeviceGetMemoryInfo(handle, version=1):
    _mine(handle)
    return SimpleNamespace(total=16 * 2**30, used=_reading("memory"))


def nvmlDeviceGetPowerUsage(handle):
    _mine(handle)
    return _reading("power_mw")


def nvmlDeviceGetTotalEnergyConsumption(handle):
    _mine(handle)
    return _reading("energy_mj") + int(1e5 * time.monotonic())


def nvmlDeviceGetUtilizationRates(handle):
    _mine(handle)
    return SimpleNamespace(gpu=_reading("busy"), memory=_reading("memory_busy"))


def nvmlDeviceGetClockInfo(handle, clock):
    _mine(handle)
    return _reading({NVML_CLOCK_SM: "sm_mhz", NVML_CLOCK_MEM: "memory_mhz"}[clock])


def nvmlDeviceGetCurrentClocksThrottleReasons(handle):
    _mine(handle)
    return _reading("bits")


def nvmlDeviceGetPcieThroughput(handle, direction):
    _mine(handle)
    return _reading("rx_kb_s" if direction == NVML_PCIE_UTIL_RX_BYTES else "tx_kb_s")


def nvmlDeviceGetTemperature(handle, sensor):
    _mine(handle)
    return _reading("temperature")


def nvmlDeviceGetCurrPcieLinkGeneration(handle):
    _mine(handle)
    return _reading("gen")


def nvmlDeviceGetCurrPcieLinkWidth(handle):
    _mine(handle)
    return _reading("width")


def nvmlDeviceGetMaxPcieLinkGeneration(handle):
    _mine(handle)
    return _reading("max_gen")


def nvmlDeviceGetMaxPcieLinkWidth(handle):
    _mine(handle)
    return _reading("max_width")


def nvmlDeviceGetComputeRunningProcesses(handle):
    _mine(handle)
    return [SimpleNamespace(pid=pid) for pid in _reading("pids")]
