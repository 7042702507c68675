"""The GPUs of this machine through NVML: which there are, and what their driver tells; no torch."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from engine.errors import ConfigError
from engine.sealed import GIB

GpuFacts = dict[str, Any]
ORDER_VARIABLE: Final = "CUDA_DEVICE_ORDER"
PCI_ORDER: Final = "PCI_BUS_ID"
PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


class Gpu:
    """One GPU. Every reading is tried alone, so one missing field costs no other."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.uuid: str | None = _text(self._try("nvmlDeviceGetUUID"))

    def _try(self, name: str, *arguments: Any) -> Any:
        return attempt(lambda: getattr(self._nvml, name)(self._handle, *arguments))

    def _memory(self) -> Any:
        """Return total and used bytes; the driver's own reserve is not in use (version 2)."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        found = self._try("nvmlDeviceGetMemoryInfo", version) if version is not None else None
        return self._try("nvmlDeviceGetMemoryInfo") if found is None else found

    def facts(self) -> GpuFacts:
        """Return what does not change during a run: name, memory, driver, link, limits."""
        memory = self._memory()
        power_mw = self._try("nvmlDeviceGetEnforcedPowerLimit")
        clock = getattr(self._nvml, "NVML_CLOCK_SM", 1)
        return {
            "name": _text(self._try("nvmlDeviceGetName")),
            "uuid": self.uuid,
            "memory_bytes": None if memory is None else int(memory.total),
            "driver": _text(attempt(self._nvml.nvmlSystemGetDriverVersion)),
            "cuda_driver": _cuda_version(attempt(self._nvml.nvmlSystemGetCudaDriverVersion)),
            "pcie": {
                "gen": self._try("nvmlDeviceGetCurrPcieLinkGeneration"),
                "width": self._try("nvmlDeviceGetCurrPcieLinkWidth"),
                "max_gen": self._try("nvmlDeviceGetMaxPcieLinkGeneration"),
                "max_width": self._try("nvmlDeviceGetMaxPcieLinkWidth"),
            },
            "numa_node": self.numa_node(),
            "power_limit_w": None if power_mw is None else power_mw / 1e3,
            "max_sm_clock_mhz": self._try("nvmlDeviceGetMaxClockInfo", clock),
        }

    def compute_capability(self) -> tuple[int, int] | None:
        """Return major and minor version; None where the driver does not tell."""
        found = self._try("nvmlDeviceGetCudaComputeCapability")
        return None if found is None else (int(found[0]), int(found[1]))

    def sample(self) -> dict[str, float | None]:
        """Return what changes fast and costs little, by column of the telemetry."""
        memory = self._memory()
        power_mw = self._try("nvmlDeviceGetPowerUsage")
        return {
            "gpu_used_bytes": None if memory is None else int(memory.used),
            "gpu_power_w": None if power_mw is None else power_mw / 1e3,
        }

    def sample_slow(self, own_pids: set[int]) -> dict[str, float | None]:
        """Return what needs no reading ten times a second: load, clocks, temperature, link.

        Each takes microseconds as a rule. Where kernels read host memory in place, one in some
        hundred takes 10 to 120 ms of CPU time (H200, driver 580).
        """
        pids = self.compute_pids()
        rates = self._try("nvmlDeviceGetUtilizationRates")
        return {
            "gpu_busy_pct": None if rates is None else rates.gpu,
            "gpu_memory_busy_pct": None if rates is None else rates.memory,
            "gpu_sm_clock_mhz": self._clock("NVML_CLOCK_SM", 1),
            "gpu_throttle_bits": self._throttle_bits(),
            "gpu_temperature_c": self._try("nvmlDeviceGetTemperature", 0),
            "gpu_memory_clock_mhz": self._clock("NVML_CLOCK_MEM", 2),
            "pcie_gen": self._try("nvmlDeviceGetCurrPcieLinkGeneration"),
            "pcie_width": self._try("nvmlDeviceGetCurrPcieLinkWidth"),
            "gpu_num_processes": None if pids is None else len(pids),
            "gpu_num_own_processes": None if pids is None else len(pids & own_pids),
        }

    def sample_costly(self) -> dict[str, float | None]:
        """Return energy and PCIe traffic: 3.7 and 1.8 ms of CPU time, within 45 ms (H200)."""
        return {
            "gpu_energy_j": self.energy_j(),
            "pcie_rx_gb_s": self.link_rx_gb_s(),
            "pcie_tx_gb_s": self.link_tx_gb_s(),
        }

    def _clock(self, name: str, number: int) -> int | None:
        found: int | None = self._try("nvmlDeviceGetClockInfo", getattr(self._nvml, name, number))
        return found

    def _throttle_bits(self) -> int | None:
        """Return why the clock is not higher; the name of the call changed with driver 535."""
        found: int | None = self._try("nvmlDeviceGetCurrentClocksEventReasons")
        if found is None:
            found = self._try("nvmlDeviceGetCurrentClocksThrottleReasons")
        return found

    def energy_j(self) -> float | None:
        """Return the total energy counter in joules; a difference of two is a window's energy."""
        millijoules = self._try("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def link_rx_gb_s(self) -> float | None:
        """Return what the GPU receives over PCIe, packet overhead included, GB/s.

        The driver counts for about 20 ms, in which this blocks.
        """
        return self._traffic_gb_s("NVML_PCIE_UTIL_RX_BYTES", 1)

    def link_tx_gb_s(self) -> float | None:
        """Return what the GPU sends over PCIe; see link_rx_gb_s."""
        return self._traffic_gb_s("NVML_PCIE_UTIL_TX_BYTES", 0)

    def _traffic_gb_s(self, name: str, number: int) -> float | None:
        kb_s = self._try("nvmlDeviceGetPcieThroughput", getattr(self._nvml, name, number))
        return None if kb_s is None else kb_s * 1024 / 1e9

    def compute_pids(self) -> set[int] | None:
        """Return the processes that compute on this GPU, as the driver numbers them."""
        found = self._try("nvmlDeviceGetComputeRunningProcesses")
        return None if found is None else {process.pid for process in found}

    def processes(self) -> dict[int, int | None]:
        """Return the processes on this GPU and the bytes that each holds, context included.

        None where the driver does not count a process's bytes. In some containers it does not know
        this process by its number.
        """
        # One that computes and draws is in both.
        names = ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetComputeRunningProcesses")
        found = [process for name in names for process in self._try(name) or ()]
        return {process.pid: process.usedGpuMemory for process in found}

    def holders(self) -> tuple[str, ...]:
        """Return the other processes on this GPU in words, the largest first."""
        found = self.processes().items()
        others = sorted((size or 0, pid) for pid, size in found if pid != os.getpid())
        return tuple(_holder(size, pid) for size, pid in reversed(others))

    def numa_node(self) -> int | None:
        """Return the node of the host's memory that is nearest to the GPU; None if unknown."""
        pci = self._try("nvmlDeviceGetPciInfo")
        bus = None if pci is None else _text(pci.busId)
        return None if bus is None else _numa_node(bus, PCI_DEVICES)


def _holder(num_bytes: int, pid: int) -> str:
    try:
        name = f"{psutil.Process(pid).name()} (process {pid})"
    except psutil.Error:
        name = f"process {pid}"
    return f"{name} {num_bytes / GIB:.2f} GiB" if num_bytes else f"{name}, bytes unknown"


def open_gpu(uuid: str | None = None, environ: Mapping[str, str] = os.environ) -> Gpu | None:
    """Return the GPU with this UUID (default: the first that CUDA would show), None without one."""
    if uuid is not None:
        return next((gpu for gpu in _all_gpus() if gpu.uuid == uuid), None)
    return next(iter(visible_gpus(environ)), None)


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that CUDA would show, in its order: as CUDA_VISIBLE_DEVICES lists them.

    Numbers count in the order of the PCI bus, as NVML and nvidia-smi count.

    Raises:
        ConfigError: CUDA_DEVICE_ORDER asks for another order, which would show other GPUs.
    """
    gpus, visible = _all_gpus(), environ.get("CUDA_VISIBLE_DEVICES")
    _check_order(environ.get(ORDER_VARIABLE, PCI_ORDER), visible, gpus)
    if visible is None:
        return gpus
    found: list[Gpu] = []
    for item in map(str.strip, visible.split(",")):
        gpu = _named(item, gpus)
        if gpu is None or gpu in found:
            break  # CUDA shows none from here on
        found.append(gpu)
    return found


def like_the_first(gpus: list[Gpu]) -> list[Gpu]:
    """Return the GPUs of the first one's kind: its name and memory, so that figures compare."""
    kinds = [(facts["name"], facts["memory_bytes"]) for facts in map(Gpu.facts, gpus)]
    others = zip(gpus[1:], kinds[1:], strict=True)
    return gpus[:1] + [gpu for gpu, kind in others if kind == kinds[0] and gpu.uuid is not None]


def _check_order(order: str, visible: str | None, gpus: list[Gpu]) -> None:
    """Raise ConfigError where numbers of unlike GPUs mean to CUDA what they don't mean here."""
    by_number = visible is None or any(item.strip().isdecimal() for item in visible.split(","))
    if order != PCI_ORDER and by_number and len(like_the_first(gpus)) < len(gpus):
        raise ConfigError(
            f"{ORDER_VARIABLE}: expected {PCI_ORDER}, the order of nvidia-smi, because the GPUs of "
            f"this machine differ, got {order}. Unset it, or name a GPU by its UUID in "
            "CUDA_VISIBLE_DEVICES (nvidia-smi -L lists them)."
        )


def _all_gpus() -> list[Gpu]:
    """Return the GPUs of this machine in NVML's order."""
    nvml = _load_nvml()
    if nvml is None or attempt(nvml.nvmlInit, default=False) is False:
        return []
    count = attempt(nvml.nvmlDeviceGetCount) or 0
    return [
        Gpu(nvml, handle)
        for index in range(count)
        if (handle := attempt(lambda i=index: nvml.nvmlDeviceGetHandleByIndex(i))) is not None  # type: ignore[misc]
    ]


def _named(item: str, gpus: list[Gpu]) -> Gpu | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names, None where there is none."""
    if item.isdecimal():
        return gpus[int(item)] if int(item) < len(gpus) else None
    return next((gpu for gpu in gpus if item and (gpu.uuid or "").startswith(item)), None)


def _load_nvml() -> Any:
    try:
        import pynvml  # noqa: PLC0415  absent on machines without NVIDIA tools
    except ImportError:
        return None
    return pynvml


def attempt(read: Callable[[], Any], default: Any = None) -> Any:
    """Return what `read` returns, `default` when the driver refuses or lacks the field."""
    try:
        return read()
    except Exception:  # noqa: BLE001  NVML raises one class per code, old bindings lack functions
        return default


def _numa_node(bus: str, devices: Path) -> int | None:
    """Return the NUMA node of a PCI device; NVML writes its domain with 8 digits, Linux with 4."""
    domain, _, rest = bus.lower().partition(":")
    path = devices / f"{domain[-4:]}:{rest}" / "numa_node"
    node = attempt(lambda: int(path.read_text(encoding="ascii")))
    return None if node is None or node < 0 else node


def _text(value: object) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if value is None else str(value)


def _cuda_version(number: int | None) -> str | None:
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"
