"""The device of a peer: its budget, and refusals."""

import pytest
import torch

from engine.asked.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig
from engine.errors import ConfigError
from harness.systems.accelerate_engine import AccelerateEngine
from harness.systems.base import RUNTIME_BYTES, PeerDevice, open_peer_device
from tests.harness.cases import SPEC

GIB = 2**30


def config(**gpu):
    model = ModelConfig(name="tiny", load_format="dummy", spec=SPEC)
    return EngineConfig(
        model=model, gpu=GPUConfig(**gpu), engine=EngineSettings(gpu_memory_utilization=0.5)
    )


def test_the_budget_is_the_share_of_what_was_asked():
    device = open_peer_device(config(device="cpu", memory_gib=4))
    assert (device.kind, device.torch_name) == ("cpu", "cpu")
    assert device.budget_bytes == device.tensor_bytes == 2 * GIB
    assert device.peak_bytes() is None
    device.enforce()


def test_the_runtime_is_part_of_the_budget_of_a_card():
    card = PeerDevice(
        name="x", kind="cuda", budget_bytes=4 * GIB, runtime_bytes=RUNTIME_BYTES, card_bytes=8 * GIB
    )
    assert card.tensor_bytes == 4 * GIB - RUNTIME_BYTES
    assert card.torch_name == "cuda:0"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused():
    with pytest.raises(ConfigError, match="found no CUDA device"):
        open_peer_device(config(device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("offload_gb", [0.0, 1.0])
def test_accelerate_runs_on_a_gpu_within_its_budget(offload_gb):
    pytest.importorskip("accelerate", reason="the extra accelerate is not installed")
    import time

    from engine.asked.offload import OffloadConfig, UVAOffloadConfig
    from harness.work.drive import run_requests

    asked = EngineConfig(
        model=ModelConfig(name="tiny", load_format="dummy", spec=SPEC),
        gpu=GPUConfig(device="cuda", memory_gib=4),
        offload=OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=offload_gb)),
        engine=EngineSettings(max_model_len=64, dtype="float32"),
    )
    llm = AccelerateEngine.from_config(asked, progress=lambda phase, done, total: None)
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13]]
    requests, totals = run_requests(
        llm, prompts, 6, clock=time.perf_counter, at_once=True, prefix="r"
    )
    assert all(request.is_complete for request in requests)
    moved = (
        0
        if not offload_gb
        else SPEC.weight_bytes("float32") - llm.plan.facts["weights"]["gpu_bytes"]
    )
    assert totals.decode_copied_bytes == totals.num_decode_steps * moved
    assert llm.memory()["gpu_peak_bytes"] <= llm.memory()["gpu_budget_bytes"]
    llm.close()
