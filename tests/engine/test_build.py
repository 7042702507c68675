"""Building an engine: what is left behind where a first attempt fails."""

import weakref
from typing import Any

import pytest
import torch

from engine import build
from engine.device.base import HostBuffer
from engine.device.cpu import CPUDevice
from engine.device.host import MappedBuffer
from engine.errors import PinningError
from tests.engine.conftest import TinyModels
from tests.tiny import open_llm


def test_memory_that_could_not_be_pinned_is_free_before_the_next_is_taken(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[weakref.ref[Any]] = []
    alive = []

    class NoPinning(CPUDevice):
        def host_buffer(self, num_bytes: int, *, pin: bool) -> HostBuffer:
            if pin:
                buffer = MappedBuffer(num_bytes)
                refused.append(weakref.ref(buffer))
                raise PinningError("tests say so")
            alive.extend(found() for found in refused)
            return super().host_buffer(num_bytes, pin=pin)

    monkeypatch.setattr(build, "open_device", lambda _: NoPinning())
    llm = open_llm(tiny.folder("llama"), cpu_offload_gb=1)
    assert llm.memory()["host_pageable_bytes"] > 0
    assert len(refused) == 1
    assert alive == [None]
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
