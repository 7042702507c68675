"""The machine's sampler: two unequal cards, none, one that hangs; unknown is None."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from console.supervise.machine import SAMPLE_S, STALE_S, Machine
from engine.sealed import GIB


def cards(own: int | None = None, other: int | None = 2 * GIB) -> list[dict[str, Any]]:
    """A large card with two processes, and a small one whose driver says little."""
    large = {"name": "large", "uuid": "GPU-a", "total_bytes": 24 * GIB, "used_bytes": 12 * GIB}
    more = {"utilization": 0.5, "temperature_c": 50, "power_w": 100.0}
    pids = {os.getpid(): own, 2**30: other}
    small = dict.fromkeys(("total_bytes", "used_bytes", *more, "pids"))
    return [large | more | {"pids": pids}, {"name": "small", "uuid": "GPU-b", **small}]


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def machine(tmp_path: Path, gpus: Any = list, clock: Any = time.time) -> Machine:
    return Machine(gpus=gpus, root=tmp_path / "models", clock=clock)


def test_parts_of_two_unequal_cards(tmp_path: Path) -> None:
    found = machine(tmp_path, lambda: cards(own=10 * GIB))
    found.look_at_gpus()
    found.tell(
        [
            {"pid": 1, "gpu_uuid": "GPU-a", "weights_bytes": 6 * GIB, "kv_bytes": 3 * GIB},
            {"pid": 2, "gpu_uuid": "GPU-b", "weights_bytes": GIB, "budget_bytes": 2 * GIB},
        ]
    )
    large, small = found.snapshot()["gpus"]
    assert (large["index"], large["weights_bytes"], large["kv_bytes"]) == (0, 6 * GIB, 3 * GIB)
    parts = [large[f"{name}_bytes"] for name in ("ours", "others", "free")]
    assert parts == [GIB, 2 * GIB, 12 * GIB]
    assert large["budget_bytes"] is None
    assert (small["weights_bytes"], small["budget_bytes"], small["index"]) == (GIB, 2 * GIB, 1)
    for name in ("ours_bytes", "others_bytes", "free_bytes", "used_bytes", "temperature_c"):
        assert small[name] is None


def test_a_process_whose_memory_is_hidden_makes_the_parts_unknown(tmp_path: Path) -> None:
    found = machine(tmp_path, lambda: cards(own=None))
    found.look_at_gpus()
    large = found.snapshot()["gpus"][0]
    assert large["ours_bytes"] is None
    assert large["others_bytes"] is None
    assert large["used_bytes"] == 12 * GIB


def test_without_nvml_nothing_is_zero(tmp_path: Path) -> None:
    found = machine(tmp_path)
    told = found.snapshot()
    assert (told["gpus"], told["gpu_reason"], told["time_s"]) == ([], "not looked at yet", None)
    found.look_at_gpus()
    assert (
        found.snapshot()["gpu_reason"] == "No GPU was found: NVML is not installed, or shows none."
    )

    def fails() -> list[Any]:
        raise RuntimeError("driver mismatch")

    found = machine(tmp_path, fails)
    found.look_at_gpus()
    assert found.snapshot()["gpu_reason"] == "GPUs could not be read: driver mismatch"


def test_history_says_what_is_not_known_any_more(tmp_path: Path) -> None:
    clock = Clock()
    found = machine(tmp_path, lambda: cards(own=0), clock)
    found.look_at_gpus()
    found.tell_load({"running": 3, "decode_tokens_s": 40.0})
    found.look_at_host()
    clock.now_s += STALE_S + 1
    found.look_at_host()
    first, last = found.snapshot()["history"]
    assert (first["running"], first["decode_tokens_s"], first["waiting"]) == (3, 40.0, None)
    assert first["gpu_used_bytes"] == 12 * GIB
    assert last["running"] is None
    assert last["ram_available_bytes"] > 0


def test_history_is_bounded(tmp_path: Path) -> None:
    clock = Clock()
    found = machine(tmp_path, clock=clock)
    for _ in range(1810):
        clock.now_s += SAMPLE_S
        found._history.append({"time_s": clock.now_s})
    assert len(found.snapshot()["history"]) == 1800


def test_disk_of_models_counts_a_linked_file_once(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "a"
    folder.mkdir(parents=True)
    (folder / "blob").write_bytes(b"x" * 1000)
    (folder / "model.safetensors").symlink_to("blob")
    found = machine(tmp_path)
    found.look_at_disk()
    assert "models_bytes" not in found.snapshot()["disks"][0]
    found.walk()
    disk = found.snapshot()["disks"][0]
    assert disk["models_bytes"] == 1000
    assert disk["total_bytes"] > disk["free_bytes"] > 0


@pytest.mark.parametrize("where", ["gpus", "walk"])
@pytest.mark.thorough
def test_what_hangs_delays_nobody(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, began = threading.Event(), threading.Event()

    def hang(*_: Any) -> list[Any]:
        began.set()
        release.wait(30)
        return []

    found = machine(tmp_path, hang if where == "gpus" else list)
    if where == "walk":
        monkeypatch.setattr(found, "walk", hang)
        hang.__name__ = "walk"
    found.start()
    try:
        assert began.wait(10)
        end_s = time.monotonic() + 10
        while not found.snapshot()["history"] and time.monotonic() < end_s:
            time.sleep(0.01)
        assert found.snapshot()["ram"]["total_bytes"] > 0
    finally:
        found.close()
        release.set()
