"""Rates of this machine: what is measured, and what is not where it cannot be."""

from typing import Any

import pytest
import torch

from engine.device.cpu import CPUDevice
from engine.errors import PinningError
from engine.plan.rates import cpu_rates
from harness.observe import probe

MIB = 2**20
NAMES = {"bf16_tflops", "float32_tflops", "pin_gb_s", "copy_overhead_s"}
BESIDE = {"layer_overhead_s", "sequence_overhead_s", "step_overhead_s"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "REPEATS", 2)
    monkeypatch.setattr(probe, "EMULATED_COPY_BYTES", MIB)
    monkeypatch.setattr(probe, "RATE_REPEATS", 2)
    monkeypatch.setattr(probe, "EMULATED_HOST_BYTES", MIB)
    monkeypatch.setattr(probe, "EMULATED_PRODUCT", (8, 64, 64))
    monkeypatch.setattr(probe, "EMULATED_WEIGHTS", (2, 64, 64))
    monkeypatch.setattr(probe, "MANY", 4)


@pytest.mark.thorough
@pytest.mark.usefixtures("small")
def test_a_cpu_is_measured_and_planned_with() -> None:
    found = probe.probe_rates("cpu")
    assert set(found) == NAMES | BESIDE | set(probe.RATES)
    measured = {name: rate for name, rate in found.items() if rate is not None}
    not_on_cpus = {"two_way_gb_s", "copy_overhead_s", "rows_gb_s", "rows_overhead_s", "launch_us"}
    not_on_cpus |= {"in_place_many_gb_s", "blocks_gb_s", "block_overhead_s"}
    assert set(found) - set(measured) == not_on_cpus
    assert min(measured[name] for name in set(measured) - {"sequence_overhead_s"}) > 0
    rates = cpu_rates().measured(found)
    for name in ("h2d_gb_s", "float32_tflops", "pin_gb_s"):
        assert getattr(rates, name) == measured[name]
    assert rates.hbm_gb_s == rates.in_place_gb_s == measured["hbm_copy_gb_s"]
    assert all(getattr(rates, name) == measured[name] for name in BESIDE)
    assert "assumed" in cpu_rates().source
    assert "assumed" not in rates.source
    assert rates.copy_overhead_s == cpu_rates().copy_overhead_s


@pytest.mark.usefixtures("small")
def test_without_registered_memory_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: CPUDevice, num_bytes: int, *, pin: bool) -> None:
        raise PinningError("no")

    monkeypatch.setattr(probe, "probe_link", lambda device: dict.fromkeys(probe.RATES))
    monkeypatch.setattr(probe, "probe_layers", dict)
    monkeypatch.setattr(CPUDevice, "host_buffer", refuse)
    found = probe.probe_rates("cpu")
    assert set(found) == NAMES | set(probe.RATES)
    assert {name for name, rate in found.items() if rate} == {
        "bf16_tflops",
        "float32_tflops",
        "hbm_copy_gb_s",
        "in_place_gb_s",
    }


@pytest.mark.usefixtures("small")
def test_products_have_weights_as_layers_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a CPU without instructions for bf16 others are 14 to 36 times slower (two cores)."""
    monkeypatch.setattr(probe, "EMULATED_PRODUCT", (16, 32, 64))
    linear, seen = torch.nn.functional.linear, set()

    def watched(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.add((x.dtype, tuple(x.shape), tuple(weight.shape)))
        return linear(x, weight, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    monkeypatch.setattr(probe, "probe_layers", dict)
    probe.probe_rates("cpu")
    assert (torch.float32, (16, 32), (64, 32)) in seen
    assert (torch.bfloat16, (2, 32), (64, 32)) in seen


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_is_measured_within_what_its_parts_can_do() -> None:
    before = torch.cuda.memory_reserved()
    found = {name: rate or 0.0 for name, rate in probe.probe_rates("cuda").items()}
    assert 0 < found["in_place_gb_s"] <= 1.05 * found["h2d_gb_s"]
    assert found["hbm_copy_gb_s"] > found["h2d_gb_s"]
    assert found["bf16_tflops"] > 2 * found["float32_tflops"] > 0
    assert 0 <= found["copy_overhead_s"] < 1e-3
    assert found["pin_gb_s"] > 0.1
    assert 1 < found["launch_us"] < 100
    assert 0.8 * found["h2d_gb_s"] < found["rows_gb_s"] < 1.05 * found["h2d_gb_s"]
    assert 0 <= found["rows_overhead_s"] < 1e-4
    assert 0 < found["in_place_many_gb_s"] < 1.05 * found["in_place_gb_s"]
    assert 0.5 * found["h2d_gb_s"] < found["blocks_gb_s"] < 1.05 * found["h2d_gb_s"]
    assert 0 <= found["block_overhead_s"] < 1e-3
    assert 0 < found["restore_gb_s"] < found["hbm_copy_gb_s"]
    assert 0 < found["lossless_gb_s"] < 1.1 * found["hbm_copy_gb_s"]
    # Of what was reserved, the workspaces of matrix products stay with their library.
    assert torch.cuda.memory_reserved() - before < 128 * MIB
