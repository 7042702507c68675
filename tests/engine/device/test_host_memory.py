"""Host memory: exact sizes from outside, old kernels, limits and refusals with their figures."""

import errno
import mmap
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.asked.offload import OffloadConfig, UVAOffloadConfig
from engine.device import base as host
from engine.device import machine as host_limits
from engine.device.cpu import CPUDevice
from engine.errors import CapacityError
from engine.plan.planner import plan_memory
from tests.engine.smaps import mapped, present_bytes
from tests.engine.specs import H200, OLMO_7B, configuration

MIB, GIB = 2**20, 2**30
PAGE = mmap.PAGESIZE
UVA = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=8))
ODD_SIZES = [1, PAGE - 1, 2 * MIB - 1, 2 * MIB + 5, 33 * MIB, 33 * MIB + 5, 70_000_001]


def pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


@pytest.mark.parametrize("num_bytes", ODD_SIZES)
def test_no_more_pages_are_taken_than_asked_for(num_bytes: int) -> None:
    for pin in (False, True):
        buffer = CPUDevice().host_buffer(num_bytes, pin=pin)
        address = buffer.tensor.data_ptr()
        assert address % (2 * MIB if num_bytes >= 2 * MIB else PAGE) == 0
        assert present_bytes(buffer.tensor) == pages(num_bytes)
        assert buffer.tensor.untyped_storage().nbytes() <= pages(num_bytes) + 2 * MIB
        buffer.close()
        del buffer


def test_whole_huge_pages_are_asked_for_and_the_rest_is_not() -> None:
    buffer = host.HostBuffer(5 * MIB)
    address = buffer.tensor.data_ptr()
    if "hg" not in mapped(address, 4 * MIB):
        pytest.skip("this kernel has no huge pages")
    rest = mapped(address + 4 * MIB, MIB)
    assert "hg" not in rest
    assert rest["nh"] == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of fork, in 3.12
def test_memory_that_children_do_not_get() -> None:
    kept, shared = host.HostBuffer(3 * MIB, inherit=False), host.HostBuffer(3 * MIB)
    assert mapped(kept.tensor.data_ptr(), 3 * MIB)["dc"] == 2
    assert "dc" not in mapped(shared.tensor.data_ptr(), 3 * MIB)
    address = kept.tensor.data_ptr()
    child = os.fork()
    if child == 0:
        os._exit(1 if mapped(address, 3 * MIB) else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert not kept.tensor.any()


def test_a_kernel_that_knows_none_of_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(mmap.mmap):
        def madvise(self, *args: Any) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(host.mmap, "mmap", Mapping)
    buffer = host.HostBuffer(33 * MIB + 5, inherit=False)
    assert present_bytes(buffer.tensor) == pages(33 * MIB + 5)
    assert not buffer.tensor.any()


def test_a_kernel_without_room_is_named_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(host.mmap, "mmap", refuse)
    with pytest.raises(CapacityError, match=r"3221225472 bytes \(3\.00 GiB\).*Cannot allocate"):
        host.HostBuffer(3 * GIB)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of fork, in 3.12
def test_a_limit_on_the_address_space_is_refused() -> None:
    """The kernel's own refusal, in a child of ours."""
    child = os.fork()
    if child == 0:
        limit = 8 * GIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        try:
            host._map(64 * GIB, inherit=True)
        except CapacityError as error:
            os._exit(0 if "64.00 GiB" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_of_a_pool_leave_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    with host.worker_pool(3) as pool:
        inside = list(pool.map(lambda _: torch.get_num_threads(), range(6)))
    assert inside == [1] * 6
    assert torch.get_num_threads() == before
    with host.worker_pool(0) as pool:
        assert pool.submit(lambda: 5).result() == 5


# Limits.


STATUS = "Name:\tpython\nVmLck:\t    {locked} kB\nCapEff:\t{capabilities:016x}\n"


@pytest.mark.parametrize(
    ("limit", "locked_kib", "capabilities", "expected"),
    [
        (resource.RLIM_INFINITY, 0, 0, None),
        (8 * MIB, 0, 0, 8 * MIB),
        (8 * MIB, 1024, 0, 7 * MIB),
        (8 * MIB, 9000, 0, 0),
        (8 * MIB, 0, 1 << 14, None),
        (8 * MIB, 0, 0xFFFF ^ 1 << 14, 8 * MIB),
        (0, 0, 0, 0),
    ],
)
def test_what_the_memlock_limit_leaves(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    locked_kib: int,
    capabilities: int,
    expected: int | None,
) -> None:
    monkeypatch.setattr(host_limits.resource, "getrlimit", lambda _: (limit, limit))
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(
        STATUS.format(locked=locked_kib, capabilities=capabilities)
    )
    assert host_limits.memlock_room(tmp_path) == expected


@pytest.mark.parametrize("text", [None, "", "VmLck:\t\n", "CapEff:\tnonsense\nother line\n"])
def test_the_memlock_limit_counts_whole_where_the_status_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(host_limits.resource, "getrlimit", lambda _: (4096, 4096))
    if text is not None:
        (tmp_path / "self").mkdir()
        (tmp_path / "self" / "status").write_text(text)
    assert host_limits.memlock_room(tmp_path) == 4096


def test_a_cgroup_is_bounded_by_its_high_mark(tmp_path: Path) -> None:
    (tmp_path / "memory.stat").write_text(f"inactive_file {MIB}\nactive_file 0\n")
    (tmp_path / "memory.current").write_text(f"{30 * MIB}\n")
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.high").write_text("max\n")
    assert host_limits.available_bytes(tmp_path, tmp_path) == 71 * MIB
    (tmp_path / "memory.high").write_text(f"{50 * MIB}\n")
    assert host_limits.available_bytes(tmp_path, tmp_path) == 21 * MIB


def test_plans_that_pin_more_than_the_memlock_limit_are_refused() -> None:
    uva = configuration(OLMO_7B, memory_gib=15.99, offload=UVA)
    limited = replace(H200, pin_limit_bytes=GIB)
    with pytest.raises(CapacityError) as error:
        plan_memory(uva, OLMO_7B, limited)
    for part in ("8.0", "1.000 GiB", "ulimit -l", "TIGHTFIT_DISABLE_PIN_MEMORY=1"):
        assert part in str(error.value)
    assert error.value.plan is not None
    assert plan_memory(uva, OLMO_7B, replace(H200, pin_limit_bytes=9 * GIB)).pin
    pageable = plan_memory(uva, OLMO_7B, replace(limited, can_pin=False, can_uva=False))
    assert pageable.host_items["pageable_weights"] > 7 * GIB
    resident = configuration(OLMO_7B, memory_gib=44)
    assert plan_memory(resident, OLMO_7B, replace(H200, pin_limit_bytes=0)).num_gpu_blocks
    # Advice does not name an offload that the limit forbids.
    with pytest.raises(CapacityError) as error:
        plan_memory(configuration(OLMO_7B, memory_gib=8), OLMO_7B, limited)
    assert "offload=uva" not in str(error.value)


@pytest.mark.parametrize("available", [0.5, 8.5])
def test_hosts_that_are_too_small_are_refused_with_the_figures(available: float) -> None:
    facts = replace(H200, host_available_bytes=int(available * GIB))
    uva = configuration(OLMO_7B, memory_gib=15.99, offload=UVA)
    with pytest.raises(CapacityError, match=r"9\.\d+ GiB of host memory are needed.*reserve of 1"):
        plan_memory(uva, OLMO_7B, facts)


@pytest.mark.parametrize("num_bytes", [0, 1, 4097, 5 * 2**20 + 3])
def test_the_storage_of_a_slab_begins_where_it_does(num_bytes: int) -> None:
    """CUDA registers the slab alone, and torch asks of a storage's first byte whether it is."""
    found = host.HostBuffer(num_bytes).tensor
    assert found.numel() == num_bytes
    assert found.storage_offset() == 0
    assert num_bytes == 0 or found.untyped_storage().data_ptr() == found.data_ptr()
