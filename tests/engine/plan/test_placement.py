"""Which tensors each backend moves: groups, budgets, selectors, fallbacks."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from engine.errors import ConfigError
from engine.model.formats import plain
from engine.model.spec import DTYPE_BYTES, ModelSpec
from engine.plan.policy import (
    Assignment,
    assign,
    assign_layers_on_demand,
    assign_prefetch,
    assign_resident,
    assign_spread,
    assign_uva,
    fall_back,
)
from engine.plan.units import ON_DEMAND, PREFETCH, RESIDENT
from tests.engine.specs import GIB, model_specs, prefetch, small_spec, uva


def moved(assignment: Assignment) -> list[str]:
    """Names that are not resident, in the order of the model."""
    return [name for name, place in assignment.placements.items() if place is not RESIDENT]


def moved_layers(assignment: Assignment) -> list[int]:
    return sorted({int(name.split(".")[2]) for name in moved(assignment)})


def moved_bytes(spec: ModelSpec, assignment: Assignment, dtype: str) -> int:
    names = set(moved(assignment))
    return sum(t.numel for t in spec.tensors() if t.name in names) * DTYPE_BYTES[dtype]


def test_groups_of_eight_with_two_offload_their_last_two() -> None:
    found = assign_prefetch(small_spec(num_hidden_layers=27), prefetch(8, 2))
    assert moved_layers(found) == [6, 7, 14, 15, 22, 23]
    assert {found.placements[name] for name in moved(found)} == {PREFETCH}


@pytest.mark.parametrize(
    ("layers", "group", "num", "expected"),
    [
        (8, 1, 1, list(range(8))),
        (8, 8, 8, list(range(8))),
        (8, 8, 1, [7]),
        (7, 4, 3, [1, 2, 3, 5, 6]),
        (10, 4, 1, [3, 7]),
        (1, 1, 1, [0]),
        (3, 4, 2, [2]),
    ],
)
def test_the_last_layers_of_each_group(
    layers: int, group: int, num: int, expected: list[int]
) -> None:
    found = assign_prefetch(small_spec(num_hidden_layers=layers), prefetch(group, num))
    assert moved_layers(found) == expected
    whole = [t.name for i in expected for t in small_spec().layer_tensors(i)]
    if layers <= 8:
        assert sorted(moved(found)) == sorted(whole)


def test_a_group_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes layers from 9 on, and the model has 8"):
        assign_prefetch(small_spec(), prefetch(10, 1))


def test_prefetch_selectors_choose_within_the_offloaded_layers() -> None:
    found = assign_prefetch(small_spec(), prefetch(4, 1, 1, "down_proj", "q_proj"))
    kinds = ("self_attn.qkv_proj", "mlp.down_proj")
    assert moved(found) == [f"model.layers.{i}.{kind}.weight" for i in (3, 7) for kind in kinds]
    assert any("self_attn.qkv_proj.weight is one product" in note for note in found.notes)


def test_prefetch_selectors_may_name_layers() -> None:
    found = assign_prefetch(small_spec(), prefetch(4, 1, 1, "layers.7.mlp"))
    assert moved_layers(found) == [7]
    with pytest.raises(ConfigError, match=r"'layers\.8\.mlp'"):
        assign_prefetch(small_spec(), prefetch(4, 1, 1, "layers.8.mlp"))


def test_prefetch_that_moves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp.*nothing would move"):
        assign_prefetch(small_spec(), prefetch(4, 1, 1, "layers.0.mlp"))


def test_uva_takes_tensors_in_layer_order_and_overshoots_by_at_most_one() -> None:
    spec = small_spec()
    first = spec.layer_tensors(0)
    sizes = [tensor.numel * 4 for tensor in first]
    for count in range(1, len(first) + 1):
        exact = sum(sizes[:count])
        for budget, taken in ((exact, count), (exact - 1, count), (exact + 1, count + 1)):
            found = assign_uva(spec, uva(budget / GIB), plain("float32"))
            names = [t.name for i in (0, 1) for t in spec.layer_tensors(i)]
            assert moved(found) == names[:taken]


def test_uva_of_more_than_the_model_takes_every_layer_and_no_outer_tensor() -> None:
    found = assign_uva(small_spec(), uva(100), plain("bfloat16"))
    assert len(moved(found)) == 8 * len(small_spec().layer_tensors(0))
    assert moved_layers(found) == list(range(8))
    assert found.placements["model.embed_tokens.weight"] is RESIDENT


@settings(deadline=None)
@given(spec=model_specs(), share=st.floats(1e-6, 1.5))
def test_uva_reaches_the_budget_with_as_few_tensors_as_possible(
    spec: ModelSpec, share: float
) -> None:
    layers = [t for i in range(spec.num_hidden_layers) for t in spec.layer_tensors(i)]
    total = sum(tensor.numel for tensor in layers) * 2
    budget = total * share
    found = assign_uva(spec, uva(budget / GIB), plain("bfloat16"))
    names = moved(found)
    order = [t.name for t in layers]
    assert names == order[: len(names)]
    last = next(t for t in layers if t.name == names[-1]).numel * 2
    taken = moved_bytes(spec, found, "bfloat16")
    if share > 1:
        assert taken == total
    else:
        # The budget passes through GiB, which may change its last bit.
        assert taken > budget * (1 - 1e-12) - 1e-3
        assert taken - last < budget * (1 + 1e-12) + 1e-3


def test_uva_that_ends_inside_a_product_takes_it_whole_and_says_so() -> None:
    spec = small_spec()
    [note] = assign_uva(spec, uva(1 / GIB), plain("float32")).notes
    assert "the budget ends inside model.layers.0.self_attn.qkv_proj.weight" in note
    qkv = spec.layer_tensors(0)[0].numel * 4
    assert assign_uva(spec, uva(qkv / GIB), plain("float32")).notes == []


def test_uva_selectors_choose_layers_and_outer_tensors() -> None:
    found = assign_uva(small_spec(), uva(1, "down_proj", "lm_head"), plain("float32"))
    expected = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(8)]
    assert sorted(moved(found)) == sorted([*expected, "lm_head.weight"])
    found = assign_uva(small_spec(), uva(1 / GIB, "embed_tokens"), plain("float32"))
    assert moved(found) == ["model.embed_tokens.weight"]


def test_uva_selectors_do_not_reach_a_tied_embedding() -> None:
    tied = small_spec(tie_word_embeddings=True)
    for selector in ("embed_tokens", "lm_head"):
        with pytest.raises(ConfigError, match=selector):
            assign_uva(tied, uva(1, selector), plain("float32"))


@pytest.mark.parametrize(
    "config", [uva(0, backend="uva"), uva(0, "mlp", backend="uva"), uva(0, "mlp")]
)
def test_uva_of_zero_bytes_is_refused(config: object) -> None:
    with pytest.raises(ConfigError, match=r"cpu_offload_gb.*nothing would move"):
        assign_uva(small_spec(), config, plain("float32"))  # type: ignore[arg-type]


def offload(backend: str = "auto", gb: float = 0, **fields: object) -> OffloadConfig:
    """Return a configuration of single fields; cpu_offload_params is `uva_params`."""
    params = fields.pop("uva_params", [])
    return OffloadConfig(
        offload_backend=backend,
        uva=UVAOffloadConfig(cpu_offload_gb=gb, cpu_offload_params=params),  # type: ignore[arg-type]
        prefetch=PrefetchOffloadConfig(**fields),  # type: ignore[arg-type]
    )


def test_the_backend_in_force_places_the_weights() -> None:
    spec = small_spec()
    assert assign(spec, offload(), plain("float32")) == assign_resident(spec)
    for config in (offload(gb=1), offload("uva", gb=1)):
        assert assign(spec, config, plain("float32")) == assign_uva(spec, uva(1), plain("float32"))
    for config in (offload(offload_group_size=4), offload("prefetch", offload_group_size=4)):
        assert assign(spec, config, plain("float32")) == assign_prefetch(spec, prefetch(4))


def test_selectors_without_a_size_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cpu_offload_gb: .*cpu_offload_params set.*got 0"):
        assign(small_spec(), offload(uva_params=["mlp"]), plain("float32"))
    with pytest.raises(ConfigError, match=r"offload_params: expected offload_group_size >= 1"):
        assign(small_spec(), offload(offload_params=["mlp"]), plain("float32"))


@pytest.mark.parametrize(
    ("config", "start"),
    [
        (offload(offload_num_in_group=5), "offload.prefetch"),
        (offload(offload_prefetch_step=0), "offload.prefetch"),
        (offload(gb=1, offload_prefetch_step=3), "offload.prefetch"),
        (offload(gb=1, offload_params=["mlp"]), "offload.prefetch"),
        (offload(offload_group_size=4, uva_params=["mlp"]), "offload.uva"),
    ],
)
def test_fields_that_auto_does_not_use_are_noted(config: OffloadConfig, start: str) -> None:
    note = assign(small_spec(), config, plain("float32")).notes[-1]
    assert note.startswith(f"{start}: ")
    assert "ignored" in note


@pytest.mark.parametrize("count", range(9))
def test_spread_takes_whole_layers_evenly(count: int) -> None:
    found = assign_spread(small_spec(), count)
    layers = moved_layers(found)
    assert len(layers) == count
    gaps = [b - a for a, b in pairwise(layers)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_reference_moves_every_layer() -> None:
    found = assign_layers_on_demand(small_spec())
    assert moved_layers(found) == list(range(8))
    assert {found.placements[name] for name in moved(found)} == {ON_DEMAND}


def test_fallbacks() -> None:
    spec = small_spec()
    on_gpu = assign_resident(spec)
    in_place = assign_uva(spec, uva(1, "mlp"), plain("float32"))
    ahead = assign_prefetch(spec, prefetch(2))

    def places(assignment: Assignment, *, can_pin: bool, can_uva: bool) -> set[str]:
        found = fall_back(assignment, can_pin=can_pin, can_uva=can_uva, reason="because")
        changed = found.notes != assignment.notes
        assert changed is any("because" in note for note in found.notes)
        return {place.name for place in found.placements.values()}

    assert places(on_gpu, can_pin=False, can_uva=False) == {"resident"}
    assert places(in_place, can_pin=True, can_uva=True) == {"resident", "uva"}
    assert places(in_place, can_pin=True, can_uva=False) == {"resident", "on_demand"}
    assert places(in_place, can_pin=False, can_uva=False) == {"resident", "on_demand"}
    assert places(ahead, can_pin=True, can_uva=False) == {"resident", "prefetch"}
    assert places(ahead, can_pin=False, can_uva=False) == {"resident", "on_demand"}
