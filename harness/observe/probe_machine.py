"""Measure what predicted times follow from: the link, GPU memory, products, host memory.

A few seconds with nothing else running. Of GPU memory only the workspaces of matrix products stay.
Names are those of engine.plan.times.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Final

import torch

from engine.asked.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig
from engine.asked.sampling import SamplingParams
from engine.device.base import Device, HostBuffer
from engine.device.cuda import open_device
from engine.device.facts import num_threads
from engine.device.host import worker_pool
from engine.errors import PinningError
from engine.llm import LLM
from engine.model.spec import ModelSpec
from harness.observe.probe import probe_link

FEW: Final = 2
MANY: Final = 12
"""Layers of the two models that are compared."""
BATCH: Final = 8
STEPS: Final = 12


def probe_layers() -> dict[str, float]:
    """Return seconds beside the bytes of weights: of a step, of a layer, of a sequence in a layer.

    Decode steps of two models whose products take no time, of 2 and 12 layers, of one sequence and
    of 8: medians of 12.
    """
    few, many = _decode_s(FEW, 1), _decode_s(MANY, 1)
    together = _decode_s(MANY, BATCH)
    layer_s = max(1e-6, (many - few) / (MANY - FEW))
    sequence_s = min(0.9 * layer_s, max(1e-9, together - many) / (BATCH - 1) / MANY)
    return {
        "layer_overhead_s": layer_s - sequence_s,
        "sequence_overhead_s": sequence_s,
        "step_overhead_s": max(1e-6, few - FEW * layer_s),
    }


def _decode_s(num_layers: int, batch: int) -> float:
    spec = ModelSpec(
        model_type="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_theta=10000.0,
    )
    config = EngineConfig(
        model=ModelConfig(name="probe", load_format="dummy", spec=spec),
        gpu=GPUConfig(name="probe", device="cpu", memory_gib=0.25),
        engine=EngineSettings(max_num_seqs=BATCH, max_num_batched_tokens=64),
    )
    llm = LLM.from_config(config)
    try:
        for index in range(batch):
            params = SamplingParams(temperature=0, max_tokens=STEPS + 4, ignore_eos=True)
            llm.add_request([index + 1, 2, 3, 4], params)
        times = []
        while llm.has_unfinished():
            begin_s = perf_counter()
            llm.step()
            times.append(perf_counter() - begin_s)
        return median(times[2:-2])
    finally:
        llm.close()


REPEATS = 10
HOST_BYTES = 2**30
EMULATED_HOST_BYTES = 64 * 2**20
SMALL_COPIES, SMALL_BYTES = 64, 2**20
"""Copies whose time, less that of their bytes, is the overhead of each."""
TOKENS, IN, OUT = 2048, 4096, 22016
"""A product as prefills of models of 7B run it."""
EMULATED_PRODUCT = (128, 512, 512)
EMULATED_WEIGHTS = (32, 1024, 1024)


def probe_rates(device: str = "auto") -> dict[str, float | None]:
    """Return the rates of this machine; what cannot be measured here is None.

    Beside the rates of `probe_link`: `bf16_tflops` and `float32_tflops` (a product of
    2048 rows, TF32 off; medians of 10), `copy_overhead_s` (64 copies of 1 MiB in a row),
    `host_read_gb_s` (1 GiB summed by the threads that loading uses) and `pin_gb_s` (the same memory
    made present and registered). On a CPU sizes are smaller, and there are `hbm_copy_gb_s` and
    `in_place_gb_s` (weights of 128 MiB read by products of one row) and what
    `harness.observe.probe_machine` finds.

    Args:
        device: auto | cuda | cpu.
    """
    found = probe_link(device)
    opened = open_device(device)
    found |= _products(opened)
    if opened.kind == "cpu":
        read_gb_s = _weights_gb_s(opened)
        found |= {"hbm_copy_gb_s": read_gb_s, "in_place_gb_s": read_gb_s, **probe_layers()}
    with _buffer(opened) as buffer:
        if buffer is None:
            return found | dict.fromkeys(("host_read_gb_s", "pin_gb_s", "copy_overhead_s"))
        size = buffer.tensor.numel()
        found["pin_gb_s"] = size / max(1e-9, buffer.touch_s + buffer.pin_s) / 1e9
        found["host_read_gb_s"] = _host_read_gb_s(buffer.tensor)
        found["copy_overhead_s"] = _copy_overhead_s(opened, buffer.tensor, found["h2d_gb_s"])
    return found


@contextmanager
def _buffer(opened: Device) -> Iterator[HostBuffer | None]:
    """Registered host memory; None where the driver registers none."""
    try:
        size = EMULATED_HOST_BYTES if opened.kind == "cpu" else HOST_BYTES
        buffer = opened.host_buffer(size, pin=True)
    except PinningError:
        yield None
        return
    try:
        yield buffer
    finally:
        opened.synchronize()
        buffer.close()
        if opened.kind == "cuda":
            torch.cuda.empty_cache()


def _products(opened: Device) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, dtype in (("bf16_tflops", torch.bfloat16), ("float32_tflops", torch.float32)):
        rows, inner, columns = EMULATED_PRODUCT if opened.kind == "cpu" else (TOKENS, IN, OUT)
        if opened.kind == "cpu" and dtype is torch.bfloat16:
            rows //= 8  # without instructions for it, a hundred times slower
        left = torch.randn(rows, inner, device=opened.torch_device).to(dtype)
        weight = torch.randn(columns, inner, device=opened.torch_device).to(dtype)

        def work(a: torch.Tensor = left, w: torch.Tensor = weight) -> None:
            torch.nn.functional.linear(a, w)  # rows of weights, as layers have them

        found[name] = 2.0 * rows * inner * columns / _seconds(opened, work) / 1e12
    return found


def _weights_gb_s(opened: Device) -> float:
    """GB/s of float32 weights that one row is multiplied by, each read once."""
    count, rows, columns = EMULATED_WEIGHTS
    weights = torch.ones(count, rows, columns)
    row = torch.ones(1, columns)

    def work() -> None:
        for weight in weights:
            torch.nn.functional.linear(row, weight)

    return weights.numel() * weights.itemsize / _seconds(opened, work) / 1e9


def _seconds(opened: Device, work: Callable[[], object]) -> float:
    """Median time of one call; calls are enqueued in threes, so that none waits for its launch."""
    times = []
    for index in range(REPEATS + 2):
        opened.synchronize()
        begin = perf_counter()
        for _ in range(3):
            work()
        opened.synchronize()
        if index >= 2:
            times.append((perf_counter() - begin) / 3)
    return median(times)


def _host_read_gb_s(host: torch.Tensor) -> float:
    count = num_threads()
    step = host.numel() // count // 8 * 8
    parts = [host[i * step : (i + 1) * step].view(torch.int64) for i in range(count)]
    times = []
    with worker_pool(count) as pool:
        for index in range(REPEATS + 1):
            begin = perf_counter()
            list(pool.map(torch.sum, parts))
            if index:
                times.append(perf_counter() - begin)
    return count * step / median(times) / 1e9


def _copy_overhead_s(opened: Device, host: torch.Tensor, h2d_gb_s: float | None) -> float | None:
    """Seconds of a copy beside its bytes; None on a CPU, where there is no queue of copies."""
    if opened.kind == "cpu" or not h2d_gb_s:
        return None
    target = opened.empty(SMALL_COPIES * SMALL_BYTES)

    def work() -> None:
        for index in range(SMALL_COPIES):
            part = slice(index * SMALL_BYTES, (index + 1) * SMALL_BYTES)
            target[part].copy_(host[part], non_blocking=True)

    each = _seconds(opened, work) / SMALL_COPIES
    return max(0.0, each - SMALL_BYTES / (h2d_gb_s * 1e9))
