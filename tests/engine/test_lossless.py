"""Weights in codes give the tokens of the same weights plain: families, placements, batches."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM
from engine.build import build_engine, read_model
from engine.errors import ConfigError, EngineError
from engine.model import formats, lossless
from engine.model.formats import EMBEDDING, HEAD
from engine.plan import planner
from engine.plan.planner import plan_again, plan_memory
from engine.plan.units import ON_DEMAND, PREFETCH, UVA
from tests.engine.coded import (
    LIMITS,
    PROMPTS,
    SHORT,
    SHORT_TOKENS,
    TOKENS,
    Checkpoints,
    change_checkpoint,
    check_weights,
    corrupt,
    run,
)
from tests.engine.placements import GIB, OF_ANY, check_decode_bytes, copies
from tests.engine.switches import PREFIX, check_fallbacks
from tests.engine.test_mixed_placements import EMBED, mixed, patchwork
from tests.engine.two_streams import on_two_streams
from tests.slow import mostly_slow, slow
from tests.tiny import VARIANTS, greedy, make_config

pytestmark = pytest.mark.thorough_but("test_weights_of_every_kind_are_restored_to_the_bit")

ALL_UVA = {"cpu_offload_gb": 1}
PLACES: dict[str, dict[str, Any]] = {
    "uva of some": {"cpu_offload_gb": 50_000 / GIB},
    "uva": ALL_UVA,
    "uva, staged": ALL_UVA | {"uva_stage_tokens": 1},
    "uva, prefills staged": ALL_UVA | {"uva_stage_tokens": 10},
    "uva of products": ALL_UVA | {"cpu_offload_params": ["mlp.down_proj", "q_proj"]},
    "prefetch, one slot": {"offload_group_size": 2},
    "prefetch, two slots": {"offload_group_size": 1},
    "prefetch, three slots": {"offload_group_size": 1, "offload_prefetch_step": 2},
    "prefetch of products": {"offload_group_size": 1, "offload_params": ["gate_proj", "o_proj"]},
}
SLOTS = {"prefetch, one slot": 1, "prefetch, two slots": 2, "prefetch, three slots": 3}
FEW = ("uva", "prefetch, two slots")
"""Placements that `make test` runs of a tied model too."""
AS_STORED = [variant for variant in VARIANTS if variant != "gpt_oss"]
"""Variants whose matrices are those of the checkpoint; experts of gpt_oss are put in order."""
FINITE = (0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x4480, 0xC4FF)
"""Bits: zeros, denormals, the least normal, some weights of a thousand and more."""
OTHER = (0x7F80, 0xFF80, 0x7FC1, 0xFF81, 0x7FFF, 0x7F7F)
"""Infinities, NaNs of several payloads, the largest."""


@pytest.fixture(scope="module")
def checkpoints(single_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("coded"))


def short(llm: LLM) -> list[list[int]]:
    return run(llm, SHORT, SHORT_TOKENS)[0]


def is_tied(llm: LLM) -> bool:
    return llm.spec.tie_word_embeddings


def check_formats(llm: LLM, variant: str) -> None:
    """Every matrix that fills tiles is in codes; an embedding that is looked up by row is not."""
    others = set(llm.plan.formats.others)
    matrices = [tensor for tensor in llm.spec.tensors() if len(tensor.shape) == 2]
    fill = [
        t for t in matrices if all(r % 16 == c % 64 == 0 for r, c in (p.shape for p in t.parts))
    ]
    expected = {tensor.name for tensor in fill} - ({HEAD} if is_tied(llm) else {EMBEDDING})
    assert (len(fill) < len(matrices)) == ("odd" in variant or llm.spec.num_experts > 0)
    assert others == expected
    record = llm.plan.to_dict()["weight_format"]
    assert record["chosen"] == "lossless"
    assert record["formats"]["lossless12"]["tensors"] == len(others)


@pytest.mark.thorough_but("olmo2")
@pytest.mark.parametrize(
    "variant", mostly_slow(AS_STORED, lambda each: each in {"olmo2", "gemma3", "llama_odd_sizes"})
)
def test_every_family(checkpoints: Checkpoints, variant: str) -> None:
    """And a control: one wrong escape changes tokens."""
    llm = checkpoints.open(variant)
    check_formats(llm, variant)
    check_weights(llm, checkpoints.folder(variant))
    found = short(llm)
    assert found == checkpoints.short(variant)
    corrupt(llm, "self_attn.o_proj.weight" if llm.spec.num_experts else "mlp.down_proj.weight")
    assert short(llm) != found
    llm.close()


@pytest.mark.parametrize("variant", mostly_slow(VARIANTS, lambda each: each == "llama"))
def test_batches_that_shrink(checkpoints: Checkpoints, variant: str) -> None:
    """From 9 to 1, after prompts in chunks, of more than 64 tokens too."""
    llm = checkpoints.open(variant)
    found, _ = run(llm)
    assert found == checkpoints.tokens(variant)
    assert len({token for tokens in found for token in tokens}) > 2
    llm.close()


@pytest.mark.thorough_but("llama-prefetch, two slots")
@pytest.mark.parametrize(
    ("variant", "place"),
    [
        (variant, place)
        if place in FEW or (variant == "llama" and place == "prefetch of products")
        else slow(variant, place)
        for variant in ("llama", "qwen2")
        for place in PLACES
    ],
)
def test_placements(checkpoints: Checkpoints, variant: str, place: str) -> None:
    llm = checkpoints.open(variant, **PLACES[place])
    plan = llm.plan
    assert set(plan.formats.others) & {t.name for x in plan.layers for t in x.offloaded_tensors}
    if place in SLOTS:
        assert plan.num_slots == min(SLOTS[place], len(plan.offloaded_layers))
    items = set(plan.gpu_items) - {"graphs", "runtime"}
    assert plan.gpu_items["restore"] > 0
    assert llm.memory()["gpu_allocated_bytes"] == sum(plan.gpu_items[item] for item in items)
    assert llm.memory()["host_pinned_bytes"] == plan.host_items["pinned_weights"]
    check_weights(llm, checkpoints.folder(variant), num_tokens=64)
    assert short(llm) == checkpoints.short(variant)
    if place != "uva, staged":  # of three units in two slots, one stays
        check_decode_bytes(llm, SHORT[1])
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", AS_STORED)
def test_placements_of_every_family(checkpoints: Checkpoints, variant: str, place: str) -> None:
    settings = dict(PLACES[place])
    for name in settings.keys() & {"cpu_offload_params", "offload_params"}:
        if any(word in VARIANTS[variant][0] for word in ("Moe", "Mixtral", "Olmoe")):
            settings[name] = ["experts", "q_proj"]
    llm = checkpoints.open(variant, **settings)
    check_weights(llm, checkpoints.folder(variant))
    assert run(llm)[0] == checkpoints.tokens(variant)
    with on_two_streams(llm, "any order"):
        assert run(llm)[0] == checkpoints.tokens(variant)
    llm.close()


def test_outer_tensors_are_read_in_place_and_the_reference_is_plain(
    checkpoints: Checkpoints,
) -> None:
    outer = ["embed_tokens", "lm_head", "layers.1"]
    llm = checkpoints.open("llama", **ALL_UVA, cpu_offload_params=outer)
    assert llm.plan.placements[HEAD] is llm.plan.placements[EMBEDDING] is UVA
    assert HEAD in llm.plan.formats.others
    check_weights(llm, checkpoints.folder("llama"))
    assert short(llm) == checkpoints.short("llama")
    llm.close()
    reference = checkpoints.open("llama", reference=True)
    assert not reference.plan.formats.others
    assert short(reference) == checkpoints.short("llama")
    reference.close()


def test_some_matrices_in_codes_beside_plain_ones(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Sizes of which down projections and head fill no tiles."""
    tight = Checkpoints(tmp_path)
    sizes = {"vocab_size": 151, "intermediate_size": 96}
    folder = tight.folder("llama", **sizes)
    usual = checkpoints.open(folder, weight_format="checkpoint")
    coded = checkpoints.open(folder, offload_group_size=2)
    assert run(coded)[0] == run(usual)[0]
    check_weights(coded, folder)
    assert {name.split(".", 3)[-1] for name in coded.plan.formats.others} == {
        "self_attn.qkv_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.gate_up_proj.weight",
    }
    kept = coded.plan.to_dict()["weight_format"]["plain_matrices"]
    assert HEAD in {name for names in kept.values() for name in names}
    coded.close()
    usual.close()


def test_gates_that_end_within_a_tile_stay_plain(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Their rows fill tiles together with the ups', which products take in turn."""
    folder = Checkpoints(tmp_path).folder("llama", intermediate_size=72)
    llm = checkpoints.open(folder)
    others = llm.plan.formats.others
    assert not any("mlp" in name for name in others)
    assert any("qkv" in name for name in others)
    llm.close()


@pytest.mark.parametrize(
    ("stage_tokens", "eager"), [(4, False), (2**20, True), slow(4, True), slow(2**20, False)]
)
def test_a_layer_holds_units_of_every_residence(
    checkpoints: Checkpoints,
    stage_tokens: int,
    eager: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies(monkeypatch, eager=eager)
    monkeypatch.setattr(planner, "assign", lambda spec, *_: patchwork(spec))
    llm = checkpoints.open("llama", uva_stage_tokens=stage_tokens)
    assert {slots.residence for slots in llm.plan.slots} == {UVA, PREFETCH, ON_DEMAND}
    placed = llm.effective()["placement_bytes"]
    assert min(placed[place.name] for place in OF_ANY) > 0
    check_weights(llm, checkpoints.folder("llama"), 5)
    assert short(llm) == checkpoints.short("llama")
    llm.close()


def test_formats_and_residences_are_mixed(checkpoints: Checkpoints) -> None:
    """Each product of a layer in another residence; codes beside plain weights in all of them."""
    folder = checkpoints.folder("llama", num_hidden_layers=8)
    config = make_config(folder, **LIMITS | {"uva_stage_tokens": 4})
    spec, machine = read_model(config.model).spec, LLM.plan_for(config).facts
    every = lossless.lossless_formats(spec).others
    inner = (name for name in every if name != HEAD)
    chosen = {name: every[name] for index, name in enumerate(inner) if index // 4 % 2}
    resident = plan_memory(config, spec, machine, tensor_formats=chosen)
    places = patchwork(spec).placements
    mix = plan_again(replace(resident, placements=places), config, spec, machine, chosen)
    found = {(place, name in chosen) for name, place in mix.placements.items() if name in every}
    assert found == set(product(OF_ANY, (False, True)))
    llm = LLM._of(build_engine(config, plan=mix))
    assert (llm.plan.placements, set(llm.plan.formats.others)) == (places, set(chosen))
    check_weights(llm, folder, 5)
    usual = checkpoints.open(folder, weight_format="checkpoint")
    assert short(llm) == short(usual)
    usual.close()
    llm.close()


@pytest.mark.thorough_but("('UVA',)")
@pytest.mark.parametrize(
    ("switches", "place"),
    [
        (("UVA",), "uva"),
        (("PIN_MEMORY",), "prefetch, two slots"),
        slow(("UVA",), "prefetch, two slots"),
        slow(("PIN_MEMORY",), "uva"),
        slow(("UVA", "PIN_MEMORY"), "uva"),
    ],
    ids=str,
)
def test_switches_of_host_memory(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    switches: tuple[str, ...],
    place: str,
) -> None:
    """Codes are copied on demand, from pinned or pageable memory."""
    for switch in switches:
        monkeypatch.setenv(f"{PREFIX}{switch}", "1")
    llm = checkpoints.open("llama", **PLACES[place])
    lost = {UVA if place == "uva" else PREFETCH}
    if switches == ("UVA",):
        lost -= {PREFETCH}
    check_fallbacks(llm.effective()["fallbacks"], switches, lost)
    assert (llm.plan.placed_bytes()["on_demand"] > 0) is bool(lost)
    check_weights(llm, checkpoints.folder("llama"))
    assert short(llm) == checkpoints.short("llama")
    llm.close()


def put_bits(bits: tuple[int, ...]) -> Callable[[torch.Tensor], None]:
    """Return what puts weights of these bits into a matrix, a few of each."""
    values = torch.tensor(bits).to(torch.int16).view(torch.bfloat16)

    def put(tensor: torch.Tensor) -> None:
        flat = tensor.view(-1)
        for at, value in enumerate(values):
            flat[31 * at + 3 :: flat.numel() // 7] = value

    return put


@pytest.mark.parametrize("place", ["uva, staged", slow(None), slow("prefetch, one slot")])
def test_weights_of_every_kind_are_restored_to_the_bit(
    checkpoints: Checkpoints, tmp_path: Path, place: str | None
) -> None:
    """A model with weights that are no numbers fails as it does with plain weights."""

    source, keywords = checkpoints.folder("llama"), PLACES.get(place or "", {})
    finite = change_checkpoint(source, tmp_path / "finite", put_bits(FINITE))
    llm = checkpoints.open(finite, **keywords)
    check_weights(llm, finite)
    found = short(llm)
    llm.close()
    usual = checkpoints.open(finite, weight_format="checkpoint")
    assert short(usual) == found
    usual.close()
    every = change_checkpoint(source, tmp_path / "every", put_bits(FINITE + OTHER))
    for weight_format in ("lossless", "checkpoint"):
        llm = checkpoints.open(every, weight_format=weight_format, **keywords)
        if weight_format == "lossless":
            check_weights(llm, every)
        with pytest.raises(EngineError, match="finite logits"):
            greedy(llm, SHORT, 4)
        llm.close()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_stay_plain(checkpoints: Checkpoints, dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf"weight_format=lossless: expected .* got {dtype}"):
        checkpoints.open("llama", dtype=dtype)
    llm = checkpoints.open("llama", dtype=dtype, weight_format="auto")
    assert not llm.plan.formats.others
    llm.close()


@pytest.mark.parametrize("choose", [False, slow(True)], ids=["formats", "formats and placements"])
def test_what_is_chosen_gives_the_same_tokens(
    checkpoints: Checkpoints, choose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a budget in which codes have room and plain weights do not."""
    monkeypatch.setattr(formats, "PACK_BATCH_BYTES", 1)
    monkeypatch.setattr(lossless, "pack_chunk_rows", lambda _: 16)
    folder = checkpoints.folder("llama", num_hidden_layers=8)
    plans = [
        LLM.plan_for(make_config(folder, weight_format=each, **LIMITS))
        for each in ("lossless", "checkpoint")
    ]
    items, usual = plans[0].gpu_items, plans[1].gpu_items["weights"]
    assert usual - items["weights"] > 2 * items["restore"]
    kv = plans[0].block_bytes * -(-plans[0].max_model_len // plans[0].block_size)
    budget = sum(items.values()) - items["kv_cache"] + kv
    llm = checkpoints.open(
        folder,
        weight_format="auto",
        choose=choose,
        gpu_memory_gib=(budget + 1000) / GIB,
        gpu_memory_utilization=1.0,
    )
    if not choose:  # otherwise plain weights may be chosen of which some move
        assert llm.plan.to_dict()["weight_format"]["chosen"] == "lossless"
    assert llm.plan.placed_bytes()["resident"] < usual
    found = short(llm)
    llm.close()
    resident = checkpoints.open(folder, weight_format="checkpoint")
    assert found == short(resident)
    resident.close()


def test_engines_that_follow_each_other_and_engines_side_by_side(
    checkpoints: Checkpoints,
) -> None:
    first = checkpoints.open("llama", **PLACES["prefetch, two slots"])
    second = checkpoints.open("qwen2", **PLACES["uva"])
    assert short(first) == checkpoints.short("llama")
    assert short(second) == checkpoints.short("qwen2")
    store = first._engine.store
    first.close()
    assert store.host_bytes() == (0, 0)
    third = checkpoints.open("llama")
    assert short(third) == checkpoints.short("llama")
    assert short(second) == checkpoints.short("qwen2")
    third.close()
    second.close()


@pytest.mark.thorough_but("uva")
@pytest.mark.parametrize("place", ["uva", "prefetch, two slots", slow("uva, staged")])
def test_control_a_wrong_escape_changes_tokens(checkpoints: Checkpoints, place: str | None) -> None:
    llm = checkpoints.open("llama", **PLACES.get(place or "", {}))
    corrupt(llm)
    assert short(llm) != checkpoints.short("llama")
    with pytest.raises(AssertionError):
        check_weights(llm, checkpoints.folder("llama"))
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [1, 2])
def test_an_embedding_in_place_beside_copied_layers(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, lookahead: int
) -> None:
    monkeypatch.setattr(planner, "assign", lambda spec, *_: mixed(spec, (EMBED,), 2, lookahead))
    llm = checkpoints.open("llama")
    assert run(llm, PROMPTS, TOKENS)[0] == checkpoints.tokens("llama")
    llm.close()
