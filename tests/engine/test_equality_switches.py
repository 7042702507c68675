"""The switches of host memory, all combinations, for every backend: same tokens, recorded."""

import pytest

from engine.errors import CapacityError
from engine.plan import planner
from tests.engine.placements import MAX_TOKENS, PROMPTS, Residents, check_equal
from tests.engine.switches import BACKENDS, MIXED, PREFIX, SWITCHES, check_record, check_tables
from tests.engine.test_mixed_placements import EMBED, mixed
from tests.engine.two_streams import on_two_streams
from tests.slow import slow
from tests.tiny import greedy

LAYERS = 5


EACH = ("uva",)
"""Backends that `make test` runs with every combination; of the others, each with one."""


@pytest.mark.thorough_but("('UVA', 'PIN_MEMORY')-uva, staged")
@pytest.mark.parametrize(
    ("switches", "backend"),
    [
        (switches, backend) if backend in EACH or (at + other) % 4 == 2 else slow(switches, backend)
        for at, switches in enumerate(SWITCHES)
        for other, backend in enumerate([*BACKENDS, MIXED])
    ],
    ids=str,
)
def test_every_combination(
    residents: Residents,
    monkeypatch: pytest.MonkeyPatch,
    switches: tuple[str, ...],
    backend: str,
) -> None:
    for switch in switches:
        monkeypatch.setenv(f"{PREFIX}{switch}", "1")
    if backend == MIXED:
        monkeypatch.setattr(planner, "assign", lambda spec, *_: mixed(spec, (EMBED,), 4, 1))
    llm = residents.open(LAYERS, **BACKENDS.get(backend, {}))
    check_record(llm, switches, backend)
    if backend == MIXED:
        assert greedy(llm, PROMPTS, MAX_TOKENS) == residents.tokens(LAYERS)
    else:
        check_equal(residents, llm, LAYERS)
    with on_two_streams(llm, "any order"):
        assert greedy(llm, PROMPTS, MAX_TOKENS) == residents.tokens(LAYERS)
    llm.close()


def test_control_a_pageable_tensor_in_an_in_place_table_is_found(residents: Residents) -> None:
    llm = residents.open(LAYERS, cpu_offload_gb=1)
    check_tables(llm)
    llm._engine.store._host_buffer.pinned = False
    with pytest.raises(AssertionError):
        check_tables(llm)
    llm._engine.store._host_buffer.pinned = True
    llm.close()


def test_control_a_tensor_read_in_place_against_its_placement_is_found(
    residents: Residents, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = residents.open(LAYERS, offload_group_size=2)
    check_tables(llm)
    store = llm._engine.store
    name = llm.plan.offloaded_layers[0].offloaded_tensors[0].name
    monkeypatch.setitem(store._outer, name, store._raw[name])
    with pytest.raises(AssertionError):
        check_tables(llm)
    llm.close()


def test_pageable_memory_is_refused_where_it_would_be_read_in_place(residents: Residents) -> None:
    llm = residents.open(LAYERS, cpu_offload_gb=1)
    device = llm._engine.device
    buffer = device.host_buffer(4096, pin=False)
    with pytest.raises(CapacityError, match="expected pinned memory"):
        device.in_place(buffer, buffer.tensor)
    llm.close()
