"""Building an engine: what is left behind where a first attempt fails."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, build
from engine.device.base import HostBuffer
from engine.device.cpu import CPUDevice
from engine.errors import KernelError, PinningError
from engine.kv.prefix import root_key
from engine.plan.units import ON_DEMAND, RESIDENT
from engine.run.executor import DeviceExecutor
from engine.run.routing import Routers
from harness.point.process import classify_exception
from kernels.compile_time import CudaError
from kernels.cuda import driver
from kernels.cuda.driver import Kernel
from tests.engine.conftest import TinyModels
from tests.tiny import make_config, open_llm


@pytest.mark.parametrize("is_given", [False, True], ids=["planned here", "handed in"])
@pytest.mark.filterwarnings("ignore::engine.asked.offload.OffloadWarning")
def test_memory_that_could_not_be_pinned_is_free_before_the_next_is_taken(
    tiny: TinyModels, is_given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[weakref.ref[Any]] = []
    alive, bounds = [], []

    class NoPinning(CPUDevice):
        def host_buffer(self, num_bytes: int, *, pin: bool) -> HostBuffer:
            if pin:
                buffer = HostBuffer(num_bytes)
                refused.append(weakref.ref(buffer))
                raise PinningError("tests say so")
            alive.extend(found() for found in refused)
            return super().host_buffer(num_bytes, pin=pin)

        def enforce_budget(self, num_bytes: int) -> None:
            bounds.append(num_bytes)
            super().enforce_budget(num_bytes)

    monkeypatch.setattr(build, "open_device", lambda _: NoPinning())
    if is_given:
        config = make_config(tiny.folder("llama"), cpu_offload_gb=1)
        plan = LLM.plan_for(config)
        bare = make_config(tiny.folder("llama"))
        llm = LLM._of(build.build_engine(bare, plan=plan))
        assert set(llm.plan.placements.values()) == {RESIDENT, ON_DEMAND}
        offloaded = [x.index for x in plan.offloaded_layers]
        assert [x.index for x in llm.plan.offloaded_layers] == offloaded
    else:
        llm = open_llm(tiny.folder("llama"), cpu_offload_gb=1)
    assert llm.memory()["host_pageable_bytes"] > 0
    assert len(refused) == 1
    assert alive == [None]
    # Without graphs, which cannot copy pageable memory, the second plan has another bound on a GPU.
    assert len(bounds) == 2
    assert bounds[1] == llm.plan.allocator_bytes
    llm.close()


def test_a_kernel_that_does_not_compile_is_an_error_of_the_engine(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise CudaError("CUDA kernel rows: NVRTC did not compile it")

    monkeypatch.setattr(DeviceExecutor, "warm_up", fails)
    with pytest.raises(KernelError, match=r"^CUDA kernel rows: NVRTC did not compile it$") as error:
        open_llm(tiny.folder("llama"))
    status, facts = classify_exception(error.value, "load")
    assert (status, facts["traceback"]) == ("failed", None)


def test_kernels_are_compiled_while_weights_load(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each that the formats name, once; the load says what that took."""
    compiled = []
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    monkeypatch.setattr(driver, "kept", lambda kernel, *_: compiled.append(kernel.expression))
    monkeypatch.setattr(build, "_kernels_of", lambda *_: {Kernel("rows", 1), Kernel("wide", 1)})
    llm = open_llm(tiny.folder("llama"))
    assert sorted(compiled) == ["rows", "wide"]
    assert {"compile"} <= llm.load_report.phases.keys() & llm.load_report.busy.keys()
    llm.close()


def test_what_steps_exchange_with_the_host_is_allocated_by_the_device(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device alone knows whether it may pin: inputs and tokens, two buffers each."""
    asked = []

    class Counting(CPUDevice):
        def upload_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            asked.append(dtype)
            return super().upload_buffer(shape, dtype)

    monkeypatch.setattr(build, "open_device", lambda _: Counting())
    llm = open_llm(tiny.folder("llama"))
    assert sorted(asked, key=str) == [torch.float64] * 2 + [torch.uint8] * 2
    llm.close()


def test_blocks_of_other_weights_dtypes_and_windows_have_other_names(tiny: TinyModels) -> None:
    def root(variant: str, routing: str = "router", **keywords: Any) -> bytes:
        config = make_config(tiny.folder(variant), max_model_len=200, **keywords)
        spec = build.read_model(config.model).spec
        routers = Routers(facts={"kind": routing})
        identity = build._identity(config, spec, LLM.plan_for(config), routers)
        return root_key(identity, config.kv.block_size)

    dummy = {"load_format": "dummy"}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("llama", {}),
        ("llama_biases", {}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"block_size": 32}),
        ("llama", dummy),
        ("llama", {**dummy, "seed": 1}),
        ("mistral_window", {}),
        ("mistral_window", {"disable_sliding_window": True}),
        ("llama", {"routing": "dummy"}),
    ]
    roots = [root(variant, **keywords) for variant, keywords in cases]
    assert len(set(roots)) == len(cases)
    # Where weights lie and how much of a cache there is changes nothing.
    assert root("llama", cpu_offload_gb=1, num_cpu_blocks=8, max_num_seqs=4) == roots[0]
