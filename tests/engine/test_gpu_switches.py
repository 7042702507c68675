"""On a GPU: the switches of host memory, all combinations, for every backend, graphs and eager."""

import pytest

from engine.plan import planner
from tests.engine.conftest import TinyModels
from tests.engine.growth import GRAPHS, Growths, grow, some_eager
from tests.engine.switches import BACKENDS, MIXED, PREFIX, SWITCHES, check_record, check_tables
from tests.engine.test_mixed_placements import EMBED, mixed

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def growths(tiny: TinyModels) -> Growths:
    return Growths(tiny)


@pytest.mark.parametrize("backend", [*list(BACKENDS)[1:], MIXED])
@pytest.mark.parametrize("switches", SWITCHES[1:], ids=str)
def test_every_combination(
    growths: Growths,
    monkeypatch: pytest.MonkeyPatch,
    switches: tuple[str, ...],
    backend: str,
) -> None:
    dtype = "float32" if "UVA" in switches else "bfloat16"
    expected = growths.expected(dtype=dtype).tokens
    for switch in switches:
        monkeypatch.setenv(f"{PREFIX}{switch}", "1")
    if backend == MIXED:
        monkeypatch.setattr(planner, "assign", lambda spec, *_: mixed(spec, (EMBED,), 4, 1))
    llm = growths.open(dtype=dtype, **BACKENDS.get(backend, {}))
    check_record(llm, switches, backend)
    graphs = llm.effective()["graphs"]
    assert graphs == ([] if "PIN_MEMORY" in switches else GRAPHS)
    for share in (0.0, 0.5) if graphs else (0.0,):
        with some_eager(llm, share):
            assert grow(llm, growths.prompts).tokens == expected, share
    assert llm.stats()["in_place_bytes"] == 0
    llm._engine.store._host_buffer.tensor.zero_()
    assert grow(llm, growths.prompts).tokens != expected
    llm.close()


def test_control_a_pageable_tensor_in_an_in_place_table_is_found(growths: Growths) -> None:
    llm = growths.open(dtype="float32", **BACKENDS["uva, embedding too"])
    check_record(llm, (), "uva, embedding too")
    buffer = llm._engine.store._host_buffer
    buffer.pinned = False
    with pytest.raises(AssertionError):
        check_tables(llm)
    buffer.pinned = True
    llm.close()
