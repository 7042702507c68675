"""Who holds the rest of a card is said with its refusal."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine.device import gpu as gpus
from engine.device.gpu import Gpu
from engine.errors import CapacityError
from engine.plan.planner import plan_memory
from tests.engine.specs import H200, OLMO_7B, configuration

# ruff: noqa: N802  the names are NVML's


GIB = 2**30
ABSENT_PID = 2**22 + 1
"""Above the most that Linux gives."""


class Nvml:
    def __init__(
        self, *processes: tuple[int, int | None], fails: bool = False, drawing: tuple[int, ...] = ()
    ) -> None:
        self._processes, self._fails, self._drawing = processes, fails, drawing

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        if self._fails:
            raise RuntimeError
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self._processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=GIB) for pid in self._drawing]


def test_a_process_that_computes_and_draws_is_named_once() -> None:
    nvml = Nvml((ABSENT_PID, GIB), drawing=(ABSENT_PID, ABSENT_PID + 1))
    assert Gpu(nvml, "GPU-1").holders() == (
        f"process {ABSENT_PID + 1} 1.00 GiB",
        f"process {ABSENT_PID} 1.00 GiB",
    )


def test_other_processes_are_named_the_largest_first() -> None:
    nvml = Nvml((os.getpid(), 9 * GIB), (ABSENT_PID, 2 * GIB), (1, 3 * GIB), (ABSENT_PID + 1, None))
    first, second, third = Gpu(nvml, "GPU-1").holders()
    assert first.endswith("(process 1) 3.00 GiB")
    assert second == f"process {ABSENT_PID} 2.00 GiB"
    assert third == f"process {ABSENT_PID + 1}, bytes unknown"


def test_a_driver_that_does_not_answer_names_none() -> None:
    nvml = Nvml((1, GIB), fails=True)
    assert Gpu(nvml, "GPU-1").holders() == ()


def test_a_driver_that_does_not_start_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError

    monkeypatch.setattr(gpus, "_load_nvml", lambda: SimpleNamespace(nvmlInit=fail))
    assert gpus.visible_gpus() == []


def test_a_budget_above_what_is_free_says_who_holds_the_rest() -> None:
    facts = replace(H200, free_bytes=10 * GIB, holders=("python (process 7) 130.00 GiB",))
    with pytest.raises(CapacityError, match=r"hold the rest \(python \(process 7\) 130.00 GiB\)"):
        plan_memory(configuration(OLMO_7B, memory_gib=16), OLMO_7B, facts)
    facts = replace(facts, holders=())
    with pytest.raises(CapacityError, match="the driver names none"):
        plan_memory(configuration(OLMO_7B, memory_gib=16), OLMO_7B, facts)
