"""The CPU as a device: budget, buffers, switches; host figures; the link probe; the KV cache."""

import gc
import mmap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.clock import PhaseClock
from engine.device import base as host
from engine.device import machine as host_limits
from engine.device.base import PREFIXES
from engine.device.cpu import CPUDevice
from engine.device.cuda import open_device
from engine.errors import CapacityError, ConfigError
from engine.kv.memory import KVCache
from engine.plan.planner import plan_memory
from harness.observe import probe
from tests.engine.specs import CPU, configuration, small_spec

MIB = 2**20


def test_allocations_beyond_the_budget_fail() -> None:
    device = CPUDevice()
    device.enforce_budget(1000)
    first = device.empty(600)
    assert (first.numel(), first.dtype) == (600, torch.uint8)
    with pytest.raises(CapacityError, match="401 bytes more than 600 exceed the budget of 1000"):
        device.empty(401)
    device.empty(400)
    assert device.allocated_bytes() == device.peak_bytes() == 1000


@pytest.mark.thorough_but("0", "1", "4097")
@pytest.mark.parametrize("num_bytes", [0, 1, 4097, 65 * MIB])
def test_host_buffers_have_the_exact_size(num_bytes: int) -> None:
    for pin in (False, True):
        buffer = CPUDevice().host_buffer(num_bytes, pin=pin)
        assert buffer.pinned is pin
        assert buffer.tensor.shape == (num_bytes,)
        assert not buffer.tensor.any()
        buffer.tensor.fill_(1)
        view = buffer.tensor[:1]
        buffer.close()
        assert view.tolist() == [1] * min(1, num_bytes)


def test_a_closed_buffer_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Mapping(mmap.mmap):
        """Of a kernel without huge pages."""

        def madvise(self, *args: Any) -> None:
            raise OSError(22, "Invalid argument")

    def watched(*args: Any, **keywords: Any) -> Mapping:
        mapping = Mapping(*args, **keywords)
        made.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(host.mmap, "mmap", watched)
    buffer = CPUDevice().host_buffer(4096, pin=True)
    [mapping] = made
    view = buffer.tensor[:1]
    buffer.close()
    assert mapping() is not None
    del view
    gc.collect()
    assert mapping() is None


def test_pageable_memory_is_never_read_in_place() -> None:
    device = CPUDevice()
    pinned, pageable = (device.host_buffer(64, pin=pin) for pin in (True, False))
    assert device.in_place(pinned, pinned.tensor) is pinned.tensor
    with pytest.raises(CapacityError, match="expected pinned memory"):
        device.in_place(pageable, pageable.tensor)


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({}, (True, True)),
        ({"UVA": "1"}, (True, False)),
        ({"PIN_MEMORY": "1"}, (False, False)),
        ({"PIN_MEMORY": "yes", "UVA": "1"}, (False, False)),
        ({"PIN_MEMORY": "0", "UVA": ""}, (True, True)),
    ],
)
@pytest.mark.parametrize("prefix", ["TIGHTFIT_DISABLE_", "VLLM_WEIGHT_OFFLOADING_DISABLE_"])
def test_switches_disable_pinning_and_in_place_reads(
    monkeypatch: pytest.MonkeyPatch,
    prefix: str,
    switches: dict[str, str],
    expected: tuple[bool, bool],
) -> None:
    for name in ("UVA", "PIN_MEMORY"):
        for each in PREFIXES:
            monkeypatch.delenv(each + name, raising=False)
    for name, value in switches.items():
        monkeypatch.setenv(prefix + name, value)
    facts = CPUDevice().facts()
    assert (facts.can_pin, facts.can_uva) == expected
    assert facts.reason.startswith("" if all(expected) else prefix)
    assert bool(facts.reason) is not all(expected)


CGROUPS = {
    # Version 2 in a container, in a nested group, with the limit on a group above; version 1.
    "": ("0::/", "memory.max", "memory.current", ""),
    "user/me": ("0::/user/me", "memory.max", "memory.current", ""),
    "user": ("0::/user/me", "memory.max", "memory.current", ""),
    "memory/docker/x": (
        "4:memory:/docker/x",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_",
    ),
}


@pytest.mark.parametrize("place", CGROUPS)
def test_host_figures_stay_within_the_cgroup(tmp_path: Path, place: str) -> None:
    line, limit, usage, prefix = CGROUPS[place]
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"1:cpu:/other\n{line}\n")
    folder = cgroups / place
    folder.mkdir(parents=True)
    cached = f"{prefix}inactive_file {15 * MIB}\n{prefix}active_file {5 * MIB}\n"
    (folder / "memory.stat").write_text(f"anon 5\n{cached}")
    (folder / limit).write_text(f"{100 * MIB}\n")
    (folder / usage).write_text(f"{70 * MIB}\n")
    assert host_limits.available_bytes(proc, cgroups) == 50 * MIB
    (folder / usage).write_text(f"{200 * MIB}\n")
    assert host_limits.available_bytes(proc, cgroups) == 0
    for broken in ("max\n", "broken\n"):
        (folder / limit).write_text(broken)
        assert host_limits.available_bytes(proc, cgroups) > 100 * MIB


def test_host_figures_without_cgroups(tmp_path: Path) -> None:
    assert host_limits.available_bytes(tmp_path, tmp_path) > 100 * MIB


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match=r"gpu\.device: expected a CUDA device"):
        open_device("cuda")
    assert open_device("auto").kind == open_device("cpu").kind == "cpu"


def test_the_link_probe_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "REPEATS", 3)
    found = probe.probe_link("cpu")
    assert found.keys() == {
        "h2d_gb_s",
        "d2h_gb_s",
        "two_way_gb_s",
        "in_place_gb_s",
        "in_place_many_gb_s",
        "blocks_gb_s",
        "block_overhead_s",
        "rows_gb_s",
        "rows_overhead_s",
        "hbm_copy_gb_s",
        "launch_us",
    }
    assert found["h2d_gb_s"] is not None
    assert 0.05 < found["h2d_gb_s"] < 1000
    assert found["in_place_gb_s"] is None


def test_a_stream_of_copies_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "EMULATED_COPY_BYTES", MIB)
    num_bytes, begin_s, end_s = probe.stream_link(0.01, "cpu")
    assert num_bytes >= MIB
    assert num_bytes % MIB == 0
    assert end_s - begin_s >= 0.01


@pytest.mark.gpu
@pytest.mark.alone
def test_probes_leave_nothing_behind() -> None:
    probe.probe_link("cuda")
    before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    found = probe.probe_link("cuda")
    copied, read = (probe.stream_link(0.3, "cuda", in_place=in_place) for in_place in (False, True))
    after = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    assert after == before
    for name, (num_bytes, begin_s, end_s) in (("h2d_gb_s", copied), ("in_place_gb_s", read)):
        assert found[name] == pytest.approx(num_bytes / (end_s - begin_s) / 1e9, rel=0.1)


def test_a_block_of_the_kv_cache_is_one_run_of_bytes() -> None:
    spec = small_spec(num_hidden_layers=3)
    config = configuration(spec, memory_gib=0.05, max_num_seqs=2, max_num_batched_tokens=16)
    plan = plan_memory(config, spec, CPU)
    cache = KVCache(plan, spec, CPUDevice())
    assert cache.tensor.is_contiguous()
    assert cache.tensor[0].numel() * 4 == plan.block_bytes
    assert cache.tensor.shape == (plan.num_gpu_blocks, 3, 2, 2, 16, 16)
    cache.tensor.zero_()
    keys, values = cache.layer(1)
    keys[5].fill_(1)
    values[5].fill_(2)
    assert cache.tensor[5, 1, 0].unique().tolist() == [1]
    assert cache.tensor[5, 1, 1].unique().tolist() == [2]
    assert cache.tensor.sum() == 3 * 2 * 16 * 16


def test_a_clock_attributes_every_moment_once() -> None:
    clock = PhaseClock()
    with clock.phase("read"):
        with clock.phase("copy"):
            sum(range(1000))
        with pytest.raises(ValueError, match="x"), clock.phase("convert"):
            raise ValueError("x")
        clock.part("touch", 1e-9)
        clock.part("pin", 1000.0)
    clock.add_bytes("read", 5)
    clock.add_bytes("read", 6)
    clock.add_busy("read", 5.0)
    clock.add_busy("read", 1.0)
    report = clock.report()
    assert report.phases.keys() == {"other", "read", "copy", "convert", "touch", "pin"}
    assert report.phases["touch"] == 1e-9
    assert 0 <= report.phases["read"] < report.phases["pin"] < 1  # it had no 1000 seconds
    assert report.moved == {"read": 11}
    assert sum(report.phases.values()) == pytest.approx(report.total_s, abs=1e-9)
    assert report.busy == {"read": 6.0}
