"""What is measured without an engine: moves of KV blocks, decode attention, rates for plans."""

from typing import Any, Final

from engine.asked.config import EngineConfig
from engine.plan.memory import resolve_dtype
from harness.config.study import BareScenario
from harness.observe.gpu import Gpu
from harness.observe.machine_rates import write_rates
from reports.record.text import number

ATTENTION: Final = "paged_decode_attention"
ATTENTION_SHAPE: Final = "32 x 4096 keys"
"""Begins the shape of the case that is timed."""
Figures = dict[str, Any]


def measure_bare(config: BareScenario, engine: EngineConfig, gpu: Gpu | None) -> Figures:
    """Measure the parts that a configuration asks for.

    Args:
        config: the parts.
        engine: of a model whose blocks are moved; names the device.
        gpu: whose rates are kept; None: those of the CPU.
    """
    device = "cpu" if gpu is None else "cuda"
    found = Figures()
    for part in config.parts:
        match part:
            case "moves":
                found[part] = _moves(engine, device)
            case "attention":
                found[part] = _attention(device)
            case _:
                found[part] = _rates(device, gpu)
    if gpu is not None:
        import torch  # noqa: PLC0415  takes seconds

        torch.cuda.empty_cache()  # no part of an engine's peak
    return found


def _moves(engine: EngineConfig, device: str) -> Figures:
    """Time moves of blocks of the model."""
    from harness.observe.probe import probe_moves  # noqa: PLC0415  imports torch

    spec = engine.model.spec
    if spec is None:
        return {"no_room": "the model's sizes are not known"}
    block_bytes = engine.kv.block_size * spec.kv_bytes_per_token(
        resolve_dtype(engine, spec, device)
    )
    return {"block_bytes": block_bytes} | probe_moves(block_bytes, device)


def _attention(device: str) -> Figures:
    """Time decode attention of one layer, all its blocks on the GPU."""
    if device == "cpu":
        return {"no_room": "operators are timed on a GPU only"}
    import torch  # noqa: PLC0415  takes seconds

    from kernels import bench  # noqa: PLC0415  imports torch

    card = torch.device("cuda", torch.cuda.current_device())
    rates = bench.measure_rates(card, in_place=False)
    for case in bench.OPERATORS[ATTENTION](card):
        if ATTENTION_SHAPE in case.name:
            timing = bench.time_case(case, rates)
            return {
                "shape": case.name.removeprefix(f"{ATTENTION} "),
                "ms": timing.kernel_ms,
                "gb_s": timing.gb_per_s,
                "copy_gb_s": rates["copy"],
            }
    return {"no_room": f"kernels.bench has no case of {ATTENTION_SHAPE}"}


def rates_note(figures: Figures) -> str:
    """Return the rates that were kept as a line of text."""
    rates = figures["rates"].items()
    shown = [f"{name} {'not measured' if v is None else number(v)}" for name, v in rates]
    return f"rates of this machine: {', '.join(shown)}. Kept in {figures['file']}."


def _rates(device: str, gpu: Gpu | None) -> Figures:
    """Measure what plans of this machine use, and keep it."""
    from harness.observe.probe_machine import probe_rates  # noqa: PLC0415  imports torch

    rates = probe_rates(device)
    return {"rates": rates, "file": str(write_rates(gpu, rates))}
