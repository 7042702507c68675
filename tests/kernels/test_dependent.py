"""Overlapped launches: where they are used, and that no bit depends on them."""

import pytest
import torch

from kernels.arguments import decode_workspace
from kernels.ops import linear, norm
from tests.kernels.cases import randn

NUM_LAYERS = 8
SIZE = 2048


@pytest.mark.parametrize(
    ("capability", "overlaps"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)]
)
def test_overlap_needs_compute_capability_9(capability, overlaps, monkeypatch):
    from kernels.triton import dependent

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert dependent.can_overlap.__wrapped__(torch.device("cuda", 0)) is overlaps


def test_a_cpu_is_given_neither_overlap_nor_the_launch_mode():
    from kernels.triton import dependent

    assert dependent.launch_options(torch.device("cpu")) == {"OVERLAPS": False}


class Layers:
    """Products and norms whose weights come through two slots, filled by another stream."""

    def __init__(self, rng):
        shape = (SIZE, SIZE)
        weights = [randn(shape, torch.bfloat16, rng) / SIZE**0.5 for _ in range(NUM_LAYERS)]
        self.resident = weights
        self.host = [weight.cpu().pin_memory() for weight in weights]
        self.slots = [torch.empty_like(weights[0]) for _ in range(2)]
        self.norm = randn((SIZE,), torch.bfloat16, rng)
        self.x = randn((4, SIZE), torch.bfloat16, rng)
        self.workspace = decode_workspace(4, 8, 128, 512, rng.device)
        self.copies = torch.cuda.Stream()

    def layer(self, hidden, weight):
        out = linear.linear(hidden, weight, workspace=self.workspace)
        out = norm.add_rms_norm(out, hidden, self.norm, 1e-6)
        norm.rms_norm_add_(norm.rms_norm(out, self.norm, 1e-6), hidden, self.norm, 1e-6)

    def run_resident(self):
        hidden = self.x.clone()
        for weight in self.resident:
            self.layer(hidden, weight)
        return hidden

    def run_slots(self):
        hidden, compute, freed = self.x.clone(), torch.cuda.current_stream(), []
        self.copies.wait_stream(compute)
        for index, host in enumerate(self.host):
            slot = self.slots[index % 2]
            if index >= 2:
                self.copies.wait_event(freed[index - 2])
            with torch.cuda.stream(self.copies):
                slot.copy_(host, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self.copies)
            compute.wait_event(copied)
            self.layer(hidden, slot)
            freed.append(torch.cuda.Event())
            freed[-1].record()
        return hidden


@pytest.mark.gpu
def test_overlap_changes_no_bit(rng, monkeypatch):
    from kernels.triton import norm, small_linear

    layers = Layers(rng)
    overlapped = layers.run_resident()
    for module in (norm, small_linear):
        monkeypatch.setattr(module, "launch_options", lambda device: {"OVERLAPS": False})
    monkeypatch.setattr(norm, "_launcher", norm._launcher.__wrapped__)  # else it keeps the others
    assert torch.equal(layers.run_resident(), overlapped)


@pytest.mark.gpu
def test_kernels_wait_for_copies_of_another_stream(rng):
    layers = Layers(rng)
    expected = layers.run_resident()
    for _ in range(5):
        for slot in layers.slots:
            slot.fill_(torch.nan)
        assert torch.equal(layers.run_slots(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers.run_slots()
    for _ in range(10):
        for slot in layers.slots:
            slot.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)
    for host in layers.host:
        host.zero_()
    graph.replay()
    assert not torch.equal(captured, expected)
