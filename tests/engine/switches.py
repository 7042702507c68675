"""What the switches of host memory must lead to, for every backend, on any device."""

from typing import Any

import torch

from engine import LLM
from engine.plan.units import ON_DEMAND, PREFETCH, RESIDENCES, RESIDENT, UVA, Residence

PREFIX = "TIGHTFIT_DISABLE_"
SWITCHES = [(), ("UVA",), ("PIN_MEMORY",), ("UVA", "PIN_MEMORY")]
BACKENDS: dict[str, dict[str, Any]] = {
    "resident": {},
    "uva": {"cpu_offload_gb": 1},
    "uva of some": {"cpu_offload_gb": 50_000 / 2**30},
    "uva, staged": {"cpu_offload_gb": 1, "uva_stage_tokens": 1},
    "uva, embedding too": {
        "cpu_offload_gb": 1,
        "cpu_offload_params": ["embed_tokens", "lm_head", "model.norm", "mlp", "layers.2"],
    },
    "prefetch": {"offload_group_size": 1},
    "prefetch, two ahead": {"offload_group_size": 1, "offload_prefetch_step": 2},
}
MIXED = "embedding in place beside prefetch"


def asked(backend: str) -> set[Residence]:
    """Return the placements outside the GPU that a backend asks for."""
    if backend == "resident":
        return set()
    if backend == MIXED:
        return {UVA, PREFETCH}
    return {UVA if backend.startswith("uva") else PREFETCH}


def check_record(llm: LLM, switches: tuple[str, ...], backend: str) -> None:
    """The record says what is really used, and why; tables hold what they may."""
    lost: set[Residence] = {UVA} if "UVA" in switches else set()
    if "PIN_MEMORY" in switches:
        lost = {UVA, PREFETCH}
    wanted = asked(backend)
    used = {ON_DEMAND if place in lost else place for place in wanted}
    effective, memory = llm.effective(), llm.memory()
    placed = {place for place in RESIDENCES if effective["placement_bytes"][place.name]}
    assert placed - {RESIDENT} == used
    pinned, pageable = memory["host_pinned_bytes"], memory["host_pageable_bytes"]
    assert (effective["host_pinned_bytes"], effective["host_pageable_bytes"]) == (pinned, pageable)
    is_pinned = "PIN_MEMORY" not in switches
    assert (pinned > 0, pageable > 0) == (bool(used) and is_pinned, bool(used) and not is_pinned)
    assert effective["pinned"] is (pinned > 0)
    check_fallbacks(effective["fallbacks"], switches, wanted & lost)
    check_tables(llm)


def check_fallbacks(
    fallbacks: list[str], switches: tuple[str, ...], changed: set[Residence]
) -> None:
    """Every placement that changed is named with the switch, and nothing else is."""
    moved = [note for note in fallbacks if "on demand" in note]
    assert len(moved) == bool(changed)
    for note in moved:
        memory = "pageable" if "PIN_MEMORY" in switches else "pinned"
        assert f"copied on demand from {memory} host memory" in note
        assert any(f"{PREFIX}{switch} is set" in note for switch in switches)
        for place in RESIDENCES:
            assert (place.name in note.split("(")[0]) is (place in changed)
    others = [note for note in fallbacks if note not in moved]
    assert all("without graphs" in note for note in others)
    assert not others or changed


def check_tables(llm: LLM) -> None:
    """Tensors in host memory that compute reads in place: as placed, and never pageable."""
    assert llm._engine is not None
    store, plan = llm._engine.store, llm.plan
    host = store._host_buffer.tensor
    start, stop = host.data_ptr(), host.data_ptr() + host.numel()
    tables: dict[str, torch.Tensor] = dict(store._outer)
    for layer, places in enumerate(store._operands):
        for at, found in places.items():
            key = f" {'-'.join(map(str, at))}"
            tables |= {f"model.layers.{layer}.{name}{key}": x for name, x in found.items()}
    device = llm._engine.device.torch_device
    assert {tensor.device for tensor in tables.values()} == {device}
    in_place = {name for name, x in tables.items() if start <= x.data_ptr() < stop}
    expected = {name for name, place in plan.placements.items() if place is UVA}
    assert {name.split()[0] for name in in_place} == expected
    assert all(name.endswith((" ", " 0")) or name in store._outer for name in in_place)
    assert store._host_buffer.pinned or not in_place
