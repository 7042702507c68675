"""On a GPU: what a step exchanges with the host does not queue behind blocks that are moved."""

import pytest
import torch

from engine.device.cuda import open_device
from engine.run.inputs import StepInputs
from engine.run.sampler import Sampler
from tests.engine.run.test_sampler import make_row, sample

pytestmark = pytest.mark.gpu

MOVED_BYTES = 2**30


def move(stream: torch.cuda.Stream, dst: torch.Tensor, src: torch.Tensor) -> torch.cuda.Event:
    """Enqueue 1 GiB on a copy stream; return its end."""
    with torch.cuda.stream(stream):
        dst.copy_(src, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    return event


def test_inputs_and_tokens_pass_moves_of_both_directions() -> None:
    device = open_device("cuda")
    if not device.facts().can_uva:
        pytest.fail("this machine has no UVA; the test needs it")
    buffer = device.host_buffer(MOVED_BYTES, pin=True)
    gpu = torch.zeros(MOVED_BYTES, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    inputs = StepInputs(device, 64, 8, 4, beside_moves=True)
    sampler = Sampler(100, "cuda", max_rows=8, host_tensor=device.upload_buffer, reach=device.reach)
    logits = torch.zeros((8, 100), device="cuda")
    logits[torch.arange(8), torch.arange(8) * 3] = 5.0
    rows = [make_row(temperature=0) for _ in range(8)]
    # Kernels are loaded, which waits for the device.
    inputs.begin(64, 8)
    inputs.send(None)
    sample(sampler, logits, rows)
    for dst, src in ((gpu, buffer.tensor), (buffer.tensor, gpu)):
        device.synchronize()
        moved = move(stream, dst, src)
        inputs.begin(64, 8)
        inputs.ids.host[:] = range(64)
        inputs.send(None)
        pending = sampler.enqueue(logits, rows)
        torch.cuda.current_stream().synchronize()
        assert not moved.query(), "1 GiB took less time than one step's inputs and tokens"
        assert inputs.ids.device.tolist() == list(range(64))
        assert [token.token_id for token in sampler.collect(pending)] == list(range(0, 24, 3))
    device.synchronize()
    buffer.close()
    device.close()
