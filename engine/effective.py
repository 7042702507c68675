"""What an engine really uses, for the record."""

from typing import Any

from engine.build import Engine


def describe(engine: Engine) -> dict[str, Any]:
    """Return plain data: device, dtype, placements, attention, graphs, fallbacks, notes."""
    plan, device = engine.plan, engine.device
    pinned, pageable = engine.store.host_bytes()
    is_cuda = device.kind == "cuda"
    return {
        "device": device.name,
        "device_kind": device.kind,
        "emulated": plan.facts.emulated,
        "reference": engine.reference,
        "dtype": plan.dtype,
        "backend": "auto" if engine.config.planner.choose else engine.config.offload.backend,
        "placement_bytes": plan.placed_bytes(),
        "offloaded_layers": [layer.index for layer in plan.offloaded_layers],
        "num_slots": plan.num_slots,
        "slot_bytes": plan.slot_bytes,
        "stage_tokens": plan.stage_tokens,
        "host_pinned_bytes": pinned,
        "host_pageable_bytes": pageable,
        "pinned": pinned > 0,
        "attention": "triton paged" if is_cuda else "torch paged",
        "graphs": engine.runner.captured_sizes,
        "prefill_graphs": [list(shape) for shape in engine.runner.captured_prefills],
        "load_format": engine.config.model.load_format,
        "max_model_len": plan.max_model_len,
        "num_gpu_blocks": plan.num_gpu_blocks,
        "num_window_blocks": plan.num_window_blocks,
        "window": plan.window,
        "block_size": plan.block_size,
        "fallbacks": [note for note in plan.notes if note.startswith("fallback")],
        "warnings": [
            *engine.config.offload.ignored(),
            *(note for note in plan.notes if not note.startswith("fallback")),
        ],
    }
