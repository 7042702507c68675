"""Work without an engine: moves, operators, rates of the machine, a checkpoint to load."""

import json
import math
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from catalogue.checkpoint import check_disk, write_json
from catalogue.files import tightfit_home
from engine.asked.config import EngineConfig
from engine.device.gpu import Gpu
from engine.model.formats import DUMMY_POOL_SIZE, DUMMY_STD
from engine.model.spec import ModelSpec
from engine.plan.cards import resolve_dtype
from harness.config.study import BareScenario
from harness.observe.machine_rates import is_disturbing, watched, write_rates
from reports.record.text import number

Figures = dict[str, Any]
ATTENTION: Final = "paged_decode_attention"
ATTENTION_SHAPE: Final = "32 x 4096 keys"
"""Begins the shape of the case that is timed."""


def measure_bare(config: BareScenario, engine: EngineConfig, gpu: Gpu | None) -> Figures:
    """Measure the parts that a configuration asks for.

    Blocks are those of `engine`'s model. Rates are kept as those of `gpu`; None: of the CPU.
    """
    spec, device = engine.model.spec, "cpu" if gpu is None else "cuda"
    found = Figures()
    for part in config.parts:
        match part:
            case "attention" | "restore" | "experts" if gpu is None:
                found[part] = {"no_room": "operators are timed on a GPU only"}
            case "attention":
                found[part] = _attention()
            case "experts":
                found[part] = _experts()
            case "rates":
                found[part] = _rates(device, gpu)
            case _ if spec is None:
                found[part] = {"no_room": "the model's sizes are not known"}
            case "moves":
                found[part] = _moves(engine, spec, device)
            case "restore":
                found[part] = _restore(spec)
            case _:
                found[part] = _checkpoint(engine.model.name, spec)
    if gpu is not None:
        import torch  # noqa: PLC0415  takes seconds

        torch.cuda.empty_cache()  # no part of an engine's peak
    return found


def _moves(engine: EngineConfig, spec: ModelSpec, device: str) -> Figures:
    """Time moves of blocks of the model."""
    from harness.observe.probe import probe_moves  # noqa: PLC0415  imports torch

    dtype = resolve_dtype(engine, spec, device)
    block_bytes = engine.kv.block_size * spec.kv_bytes_per_token(dtype)
    return {"block_bytes": block_bytes} | probe_moves(block_bytes, device)


def _card() -> Any:
    """Return the device of this process."""
    import torch  # noqa: PLC0415  takes seconds

    return torch.device("cuda", torch.cuda.current_device())


def _attention() -> Figures:
    """Time decode attention of one layer, all its blocks on the GPU."""
    from kernels import bench, bench_timing  # noqa: PLC0415  import torch

    card = _card()
    rates = bench_timing.measure_rates(card, in_place=False)
    for case in bench.OPERATORS[ATTENTION](card):
        if ATTENTION_SHAPE in case.name:
            timing = bench_timing.time_case(case, rates)
            return {
                "shape": case.name.removeprefix(f"{ATTENTION} "),
                "ms": timing.kernel_ms,
                "gb_s": timing.gb_per_s,
                "copy_gb_s": rates["copy"],
            }
    return {"no_room": f"kernels.bench has no case of {ATTENTION_SHAPE}"}


def _restore(spec: ModelSpec) -> Figures:
    """Time the largest matrix of a layer of the model, in codes, written as bf16."""
    from kernels import bench_timing, bench_weights  # noqa: PLC0415  import torch

    card, size_in, size_out = _card(), spec.hidden_size, 2 * spec.intermediate_size
    timing = bench_timing.time_case(
        bench_weights.restore_case(size_in, size_out, card),
        bench_timing.measure_rates(card, in_place=False),
    )
    written_bytes = 2 * size_in * size_out * bench_timing.num_copies(size_in, size_out)
    return {
        "shape": timing.name.removeprefix("restore "),
        "ms": timing.kernel_ms,
        "gb_s": timing.gb_per_s,
        "written_gb_s": written_bytes / timing.kernel_ms / 1e6,
        "is_equal": timing.is_equal,
    }


EXPERT_CASES: Final = {
    "gather": ("experts", "8 experts, bfloat16, 32 programs"),
    "products": ("experts_products", "experts 30B-A3B plain, 1 tokens"),
}
"""What is timed of experts: names of the benchmark of operators, and of its cases."""


def _experts() -> Figures:
    """Time copies of experts out of host memory, and the products of those of one token."""
    from kernels import bench, bench_timing  # noqa: PLC0415  import torch

    card, found = _card(), Figures()
    rates = bench_timing.measure_rates(card)
    for name, (operator, wanted) in EXPERT_CASES.items():
        case = next((case for case in bench.CASES[operator](card) if case.name == wanted), None)
        if case is None:
            return {"no_room": f"kernels.bench has no case {wanted}"}
        timing = bench_timing.time_case(case, rates)
        found[name] = {
            "shape": case.name,
            "ms": timing.kernel_ms,
            "gb_s": timing.gb_per_s,
            "rate_gb_s": rates[case.kind],
        }
    return found


READ_BYTES: Final = 1 << 24


def _checkpoint(name: str, spec: ModelSpec) -> Figures:
    """Write a checkpoint of random weights in the model's shape; read it where it is there.

    Either way the page cache has it afterwards, where there is room. A second folder has the same
    files: what is kept of one checkpoint is not found for the other. Weights and biases are normal
    with DUMMY_STD, norms the same about 1 (or 0, where 1 is added).
    """
    import numpy as np  # noqa: PLC0415  not for every worker

    from catalogue.conversions import bf16_bits  # noqa: PLC0415  brings NumPy

    folder = tightfit_home() / "bench" / f"random-{name}"
    tensors = [part for tensor in spec.tensors() for part in tensor.parts]
    sizes = [2 * math.prod(part.shape) for part in tensors]
    ends = list(accumulate(sizes))
    header: dict[str, Any] = {
        part.name: {"dtype": "BF16", "shape": part.shape, "data_offsets": (end - size, end)}
        for part, size, end in zip(tensors, sizes, ends, strict=True)
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    num_bytes, weights = 8 + len(text) + ends[-1], folder / "model.safetensors"
    linked = folder.with_name(f"{folder.name}-linked")
    found = {"folder": str(folder), "linked_folder": str(linked), "num_bytes": num_bytes}
    if weights.is_file() and weights.stat().st_size == num_bytes:
        with weights.open("rb", buffering=0) as stream:
            room = bytearray(READ_BYTES)
            while stream.readinto(room):
                pass
        _link(folder, linked)
        return found
    folder.mkdir(parents=True, exist_ok=True)
    check_disk(name, folder, num_bytes)
    write_json(folder / "config.json", asdict(spec) | {"dtype": "bfloat16"})
    draws = np.random.default_rng(0).standard_normal(DUMMY_POOL_SIZE, dtype=np.float32) * DUMMY_STD
    pools = {False: bf16_bits(draws), True: bf16_bits(draws + 1 - spec.architecture.norm_offset)}
    begun = weights.with_suffix(".begun")
    with begun.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        start = 0
        for part, size in zip(tensors, sizes, strict=True):
            pool, left = pools[part.name.endswith("norm.weight")], size // 2
            while left:
                piece = pool[start : start + left]
                stream.write(piece.data)
                start, left = (start + len(piece)) % DUMMY_POOL_SIZE, left - len(piece)
    begun.replace(weights)
    _link(folder, linked)
    return found


def _link(folder: Path, linked: Path) -> None:
    """Make a folder whose files are those of another."""
    linked.mkdir(exist_ok=True)
    for file in folder.iterdir():
        place = linked / file.name
        if not (place.exists() and place.samefile(file)):
            place.unlink(missing_ok=True)
            place.hardlink_to(file)


def rates_note(figures: Figures) -> str:
    """Return the rates that were kept as a line of text."""
    rates = figures["rates"].items()
    shown = [f"{name} {'not measured' if v is None else number(v)}" for name, v in rates]
    kept = f"rates of this machine: {', '.join(shown)}. Kept in {figures['file']}."
    if not is_disturbing(figures["others_cores"]):
        return kept
    return (
        f"{kept} Other processes used {figures['others_cores']:.1f} cores meanwhile, so the rates "
        "are lower than the machine's: end them and probe again."
    )


def _rates(device: str, gpu: Gpu | None) -> Figures:
    """Measure what plans of this machine use, and keep it."""
    from harness.observe.probe import probe_rates  # noqa: PLC0415  imports torch

    rates, others_cores = watched(lambda: probe_rates(device))
    file = write_rates(gpu, rates, others_cores)
    return {"rates": rates, "others_cores": others_cores, "file": str(file)}
