"""What an engine really uses, for the record."""

from typing import Any

from engine.build import Engine


def describe(engine: Engine) -> dict[str, Any]:
    """Return plain data: device, dtype, placements, attention, graphs, fallbacks, notes."""
    plan, device = engine.plan, engine.device
    pinned, pageable = engine.host_bytes()
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
        "num_window_blocks": sum(plan.kv.pools[1:]),
        "window": plan.window,
        "kv": _kv(engine),
        "block_size": plan.block_size,
        "fallbacks": [note for note in plan.notes if note.startswith("fallback")],
        "warnings": [
            *engine.config.offload.ignored(),
            *(note for note in plan.notes if not note.startswith("fallback")),
        ],
    }


def _kv(engine: Engine) -> dict[str, Any]:
    """Where KV blocks are, in blocks of all groups of layers."""
    plan, host = engine.plan, engine.plan.host_kv
    pinned = sum(blocks.num_pinned for blocks in engine.tier.blocks)
    pageable = sum(blocks.num_pageable for blocks in engine.tier.blocks)
    return {
        "tiers": ["gpu"] if host is None else ["gpu", "cpu"],
        "num_gpu_blocks": sum(plan.kv.pools),
        "num_pinned_blocks": pinned,
        "num_pageable_blocks": pageable,
        "in_place": engine.runner.is_tiered,
        "stage_blocks": 0 if host is None or not engine.runner.is_tiered else host.stage_blocks,
        "prefix_caching": plan.prefix_caching,
    }
