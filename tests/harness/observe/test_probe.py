"""The link probe where a machine cannot do what is probed; test_gpu_memory.py runs it on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.device.cpu import CPUDevice
from engine.errors import CapacityError, PinningError
from harness.observe import probe


@dataclass
class Card:
    """A CUDA device as far as the probe asks it before it times anything."""

    pins: bool
    sees: bool = True
    kind: str = "cuda"
    closed: int = 0

    def host_buffer(self, num_bytes: int, *, pin: bool) -> Any:
        assert pin
        if not self.pins:
            raise PinningError("pinning: failed with CUDA error 2.")
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8)
        return self

    def in_place(self, buffer: Any, view: torch.Tensor) -> torch.Tensor:
        if not self.sees:
            raise CapacityError("in-place reads: another address.")
        return view

    def synchronize(self) -> None:
        return

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """What would be read in place; nothing is timed."""
    seen: list[torch.Tensor | None] = []

    def rates(_: Any, host: torch.Tensor, view: torch.Tensor | None) -> dict[str, float | None]:
        seen.append(view)
        return dict.fromkeys(probe.RATES, 1.0)

    monkeypatch.setattr(probe, "_rates", rates)
    return seen


def use(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "open_device", lambda _: card)
    monkeypatch.setattr(probe, "COPY_BYTES", 64)


def test_a_driver_that_pins_nothing_has_no_rates(
    monkeypatch: pytest.MonkeyPatch, views: list[torch.Tensor | None]
) -> None:
    use(Card(pins=False), monkeypatch)
    assert probe.probe_link("cuda") == dict.fromkeys(probe.RATES)
    assert views == []


@pytest.mark.parametrize("sees", [True, False])
def test_host_memory_at_another_address_is_not_read_in_place(
    sees: bool, monkeypatch: pytest.MonkeyPatch, views: list[torch.Tensor | None]
) -> None:
    card = Card(pins=True, sees=sees)
    use(card, monkeypatch)
    assert probe.probe_link("cuda") == dict.fromkeys(probe.RATES, 1.0)
    (view,) = views
    assert (view is not None) == sees
    assert view is None or view.numel() == 64
    assert card.closed == 1


def test_a_cpu_has_the_same_names_and_copies_alone() -> None:
    found = probe.probe_link("cpu")
    assert tuple(found) == probe.RATES
    assert {name for name, rate in found.items() if rate} == {"h2d_gb_s", "d2h_gb_s"}


def test_moves_of_blocks_and_products_of_many_rows_are_timed_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work runs on a CPU; how long each takes is given."""
    monkeypatch.setattr(probe, "MANY_BYTES", 2**16)
    monkeypatch.setattr(probe, "BLOCK_BYTES", 2**12)
    monkeypatch.setattr(probe, "MANY_COLUMNS", 64)
    device = CPUDevice()
    host = torch.arange(2**17, dtype=torch.int32).view(torch.uint8)[: 2**17]
    host.view(torch.int32).remainder_(2**10)
    gpu, copied = device.empty(2**16), []

    def rate(work: Callable[[], object], num_bytes: int) -> float:
        gpu.zero_()
        work()
        device.synchronize()
        copied.append(sorted(gpu.view(-1, 2**12)[:, 0].tolist()))
        assert num_bytes == 2**16
        return [44.0, 50.0, 55.0, 40.0][len(copied) - 1]

    monkeypatch.setattr(probe, "_rate", rate)
    found = probe._many_rates(device, host, host, gpu)
    assert (found["in_place_many_gb_s"], found["blocks_gb_s"]) == (44.0, 50.0)
    assert found["block_overhead_s"] == pytest.approx(2**12 * 1e-9 * (1 / 40.0 - 1 / 55.0))
    whole = sorted(host[: 2**16].view(-1, 2**12)[:, 0].tolist())
    assert copied == [[0] * 16, whole, whole, whole]
    assert set(probe._many_rates(device, host, None, gpu).values()) == {None}
