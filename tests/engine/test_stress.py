"""Streams in any order that their waits allow, poisoned slots and blocks: the same tokens.

Faults put in on purpose, one wait or copy each, must change tokens.
"""

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from engine import LLM
from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig
from engine.plan import planner
from engine.plan.policy import assign_prefetch
from engine.plan.units import PREFETCH
from engine.run.executor import DeviceExecutor
from engine.weights.residence import OnDemandSlot, SlotRing
from engine.weights.store import WeightStore
from tests.engine.faults import heedless, leave_stale, or_poison, skip_wait
from tests.engine.groups import with_blocks
from tests.engine.placements import MAX_TOKENS, OFFLOADS, PROMPTS, Residents, check_decode_bytes
from tests.engine.test_mixed_placements import EMBED, HEAD, mixed
from tests.engine.two_streams import POLICIES, TwoStreams, on_two_streams
from tests.slow import mostly_slow, slow
from tests.tiny import greedy, greedy_params, make_prompt

pytestmark = pytest.mark.thorough_but(
    "test_control_a_stale_slot_changes_tokens",
    "test_layers_of_different_sizes_share_slots",
    "test_control_a_copy_on_demand_that_is_left_out_changes_tokens",
)

LAYERS = 5
ODD: dict[str, dict[str, Any]] = {
    "layers of different sizes": {
        "offload_group_size": 1,
        "offload_params": ["layers.0.mlp", "layers.2.self_attn.o_proj", "layers.3", "layers.4.mlp"],
    },
    "different sizes, three slots": {
        "offload_group_size": 1,
        "offload_prefetch_step": 2,
        "offload_params": ["input_layernorm", "layers.1", "layers.2.mlp.down_proj"],
    },
    "different sizes, more slots than layers": {
        "offload_group_size": 2,
        "offload_prefetch_step": 9,
        "offload_params": ["layers.1.mlp", "layers.3.self_attn"],
    },
    "a group larger than the model": {"offload_group_size": 8, "offload_num_in_group": 6},
    "one layer": {"offload_group_size": 5, "offload_prefetch_step": 3},
    "uva cut inside a layer, staged": {"cpu_offload_gb": 60_000 / 2**30, "uva_stage_tokens": 1},
    "uva of other sizes, staged": {
        "cpu_offload_gb": 1,
        "cpu_offload_params": ["layers.0.mlp", "layers.1", "layers.3.self_attn.q_proj", "norm"],
        "uva_stage_tokens": 1,
    },
    "uva, staged from 3 tokens on": {"cpu_offload_gb": 1, "uva_stage_tokens": 3},
}


def tokens_on_two_streams(llm: LLM, policy: str, seed: int = 0) -> list[list[int]]:
    with on_two_streams(llm, policy, seed):
        return greedy(llm, PROMPTS, MAX_TOKENS)


def distinct_splits(most: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (layers, group, num, step) up to `most` layers, one for each set of those and slots."""
    seen = set()
    sizes = range(1, most + 1)
    for n, group, num, step in product(sizes, sizes, sizes, range(1, most + 2)):
        if num <= group <= n and step <= n + 1:
            node = PrefetchOffloadConfig(
                offload_group_size=group, offload_num_in_group=num, offload_prefetch_step=step
            )
            found = assign_prefetch(_spec(n), OffloadConfig(prefetch=node))
            moved = [name for name, p in found.placements.items() if p is PREFETCH]
            layers = frozenset(int(name.split(".")[2]) for name in moved)
            key = (n, layers, min(step + 1, len(layers)))
            if key not in seen:
                seen.add(key)
                yield n, group, num, step


def _spec(layers: int) -> Any:
    from engine.model.spec import ModelSpec

    return ModelSpec(
        model_type="llama",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )


@pytest.mark.parametrize(("most", "count"), [(3, 8), slow(4, 18), slow(6, 71)])
def test_prefetch_with_every_split_of_a_few_layers(
    residents: Residents, most: int, count: int
) -> None:
    splits = list(distinct_splits(most))
    assert len(splits) == count
    for number, (layers, group, num, step) in enumerate(splits):
        llm = residents.open(
            layers,
            offload_group_size=group,
            offload_num_in_group=num,
            offload_prefetch_step=step,
        )
        check_decode_bytes(llm, PROMPTS[0])
        with on_two_streams(llm, list(POLICIES)[number % len(POLICIES)], number):
            [found] = greedy(llm, PROMPTS[1:2], 4)
        assert found == residents.tokens(layers)[1][:4], (layers, group, num, step)
        llm.close()


def test_more_steps_ahead_than_layers_give_a_slot_to_each_layer(residents: Residents) -> None:
    for step in (4, 5, 6, 60):
        llm = residents.open(LAYERS, offload_group_size=1, offload_prefetch_step=step)
        assert llm.effective()["num_slots"] == LAYERS
        assert llm.plan.bytes_per_step() == 0
        assert tokens_on_two_streams(llm, "any order") == residents.tokens(LAYERS)
        check_decode_bytes(llm, PROMPTS[0])
        llm.close()


FAST = ("uva of all, staged", "layers of different sizes", "different sizes, three slots")


@pytest.mark.thorough_but("uva of all, staged")
@pytest.mark.parametrize("name", [*mostly_slow(OFFLOADS | ODD, lambda x: x in FAST)])
def test_every_placement_in_every_order(residents: Residents, name: str) -> None:
    llm = residents.open(LAYERS, **(OFFLOADS | ODD)[name])
    for policy in POLICIES:
        assert tokens_on_two_streams(llm, policy) == residents.tokens(LAYERS), policy
    llm.close()


def test_layers_of_different_sizes_share_slots(residents: Residents) -> None:
    for name in ("layers of different sizes", "different sizes, three slots"):
        llm = residents.open(LAYERS, **ODD[name])
        plan = llm.plan
        sizes = [layer.offloaded_bytes for layer in plan.offloaded_layers]
        assert len(set(sizes)) >= 3
        assert len(sizes) > plan.num_slots
        assert plan.slot_bytes == max(sizes)
        check_decode_bytes(llm, PROMPTS[0])
        llm.close()


@pytest.mark.parametrize("family", [slow("qwen2"), "olmo2", slow("mistral"), "qwen3"])
def test_other_families_in_any_order(residents: Residents, family: str) -> None:
    for name in ("uva of all, staged", "prefetch of products"):
        llm = residents.open(3, family, **OFFLOADS[name])
        assert tokens_on_two_streams(llm, "any order") == residents.tokens(3, family)
        llm.close()


@pytest.mark.parametrize("switch", ["TIGHTFIT_DISABLE_UVA", slow("TIGHTFIT_DISABLE_PIN_MEMORY")])
def test_copies_on_demand_in_any_order(
    residents: Residents, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.setenv(switch, "1")
    for params in ([], ["embed_tokens", "lm_head", "model.norm", "mlp"]):
        llm = residents.open(LAYERS, cpu_offload_gb=1, cpu_offload_params=params)
        assert llm.plan.placed_bytes()["on_demand"] > 0
        for policy in POLICIES:
            assert tokens_on_two_streams(llm, policy) == residents.tokens(LAYERS)
        llm.close()


@pytest.mark.parametrize(
    ("outer", "count", "lookahead"), [slow((EMBED,), 3, 1), ((EMBED, HEAD), 5, 2)]
)
def test_an_embedding_in_place_beside_copied_layers_in_any_order(
    residents: Residents,
    outer: tuple[str, ...],
    count: int,
    lookahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "assign", lambda spec, *_: mixed(spec, outer, count, lookahead))
    llm = residents.open(LAYERS)
    for policy in POLICIES:
        assert tokens_on_two_streams(llm, policy) == residents.tokens(LAYERS)
    llm.close()


LOAD = [make_prompt(1 + 7 * index % 34, seed=index, vocab=61) for index in range(12)]


@pytest.fixture(scope="module")
def load_tokens(residents: Residents) -> list[list[int]]:
    """What each request of LOAD gets where nothing is offloaded and all has room."""
    llm = residents.open(LAYERS)
    found = greedy(llm, LOAD, 20)
    assert llm.stats()["preemptions"] == 0
    llm.close()
    return found


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_random_loads_in_any_order(
    residents: Residents,
    load_tokens: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    pool_is_full: Callable[[LLM], bool],
    seed: int,
) -> None:
    """Arrivals, aborts and preemptions: each request gets the tokens that it gets alone."""
    chance = random.Random(seed)
    with_blocks(monkeypatch, 9)
    choices: list[dict[str, Any]] = [
        {"offload_group_size": 1},
        {"cpu_offload_gb": 1, "uva_stage_tokens": 3},
        ODD["different sizes, three slots"],
        {"offload_group_size": 1, "offload_prefetch_step": 3},
    ]
    llm = residents.open(LAYERS, block_size=8, max_num_seqs=5, **choices[seed])
    tokens: dict[str, list[int]] = {}
    sent, aborted = 0, set()
    with on_two_streams(llm, "any order", seed) as streams:
        while sent < len(LOAD) or llm.has_unfinished():
            while sent < len(LOAD) and chance.random() < 0.5:
                llm.add_request(LOAD[sent], greedy_params(chance.randint(12, 20)), str(sent))
                sent += 1
            if sent and chance.random() < 0.03:
                aborted.add(str(chance.randrange(sent)))
                llm.abort(max(aborted))
            for event in llm.step():
                tokens.setdefault(event.request_id, []).append(event.token_id)
    for index, whole in enumerate(load_tokens):
        found = tokens.get(str(index), [])
        assert found == whole[: len(found)]
        assert found or str(index) in aborted
    assert llm.stats()["preemptions"] > 0
    assert streams.most_ahead > 2 * LAYERS  # a step was enqueued behind one that had not run
    assert pool_is_full(llm)
    llm.close()


@pytest.mark.parametrize(
    "keywords",
    [{"offload_group_size": 1}, slow({"cpu_offload_gb": 1, "uva_stage_tokens": 2})],
    ids=str,
)
def test_steps_that_fail_amid_their_layers_change_no_token(
    residents: Residents, monkeypatch: pytest.MonkeyPatch, keywords: dict[str, Any]
) -> None:
    """What a failed step enqueued runs all the same; the next one finds other layers in slots."""
    chance, acquire = random.Random(3), WeightStore.acquire

    def fail(self: WeightStore, layer: int) -> Any:
        if chance.random() < 0.05:
            raise RuntimeError("tests say so")
        return acquire(self, layer)

    expected = residents.tokens(LAYERS)
    llm = residents.open(LAYERS, **keywords)
    monkeypatch.setattr(WeightStore, "acquire", fail)
    tokens: dict[str, list[int]] = {}
    num_failed = 0
    for policy in POLICIES:
        with on_two_streams(llm, policy):
            for at, prompt in enumerate(PROMPTS):
                llm.add_request(prompt, greedy_params(MAX_TOKENS), f"{policy} {at}")
            while llm.has_unfinished():
                try:
                    events = llm.step()
                except RuntimeError:
                    num_failed += 1
                    continue
                for event in events:
                    tokens.setdefault(event.request_id, []).append(event.token_id)
        found = [tokens[f"{policy} {at}"] for at in range(len(PROMPTS))]
        assert found == expected, policy
    assert num_failed > 4
    llm.close()


# Faults put in on purpose.

ALL, STAGED = {"offload_group_size": 1}, {"cpu_offload_gb": 1, "uva_stage_tokens": 1}


def check_caught(residents: Residents, keywords: dict[str, Any], policies: list[str]) -> None:
    """Every one of several seeds must give other tokens than a resident engine's, or NaN."""
    for policy, seed in product(policies, range(2)):
        llm = residents.open(LAYERS, **keywords)
        found = or_poison(lambda: tokens_on_two_streams(llm, policy, seed))  # noqa: B023
        assert found != residents.tokens(LAYERS), (policy, seed)
        llm.close()


@pytest.mark.parametrize("keywords", [ALL, slow(STAGED)], ids=["prefetch", "staged"])
def test_control_one_skipped_wait_of_compute_changes_tokens(
    residents: Residents, monkeypatch: pytest.MonkeyPatch, keywords: dict[str, Any]
) -> None:
    monkeypatch.setattr(SlotRing, "acquire", skip_wait(3))
    check_caught(residents, keywords, ["copies late", "poison early, copies late", "any order"])


@pytest.mark.parametrize("layer", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_control_one_slot_refilled_before_its_last_use_changes_tokens(
    residents: Residents, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    monkeypatch.setattr(SlotRing, "release", heedless(SlotRing.release, layer))
    policies = ["copies early", "poison early, copies late", "any order"]
    check_caught(residents, ALL | {"offload_prefetch_step": 2}, policies)


def test_control_slots_staged_before_the_last_step_has_used_them_changes_tokens(
    residents: Residents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not every step is staged: slots that wrap are filled before a step begins."""
    monkeypatch.setattr(SlotRing, "begin_step", heedless(SlotRing.begin_step, None))
    check_caught(
        residents,
        STAGED | {"uva_stage_tokens": 2},
        ["copies early", "poison early, copies late", "any order"],
    )


@pytest.mark.parametrize(
    "stale", [0, *(pytest.param(layer, marks=pytest.mark.slow) for layer in (1, 4))]
)
def test_control_a_stale_slot_changes_tokens(
    residents: Residents, monkeypatch: pytest.MonkeyPatch, stale: int
) -> None:
    monkeypatch.setattr(SlotRing, "_start", leave_stale(stale))
    check_caught(residents, ALL, list(POLICIES))


def test_control_a_copy_from_the_layer_before_changes_tokens(
    residents: Residents, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = SlotRing._start

    def shift(self: SlotRing, k: int) -> None:
        self._sources[2] = self._sources[1]
        start(self, k)

    monkeypatch.setattr(SlotRing, "_start", shift)
    check_caught(residents, ALL, list(POLICIES))


def test_control_a_copy_on_demand_that_is_left_out_changes_tokens(
    residents: Residents, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = OnDemandSlot.acquire
    monkeypatch.setattr(OnDemandSlot, "acquire", lambda self, k: 0 if k == 2 else acquire(self, k))
    monkeypatch.setenv("TIGHTFIT_DISABLE_UVA", "1")
    check_caught(residents, {"cpu_offload_gb": 1}, ["any order"])


def test_control_a_read_beyond_the_last_key_changes_tokens(
    residents: Residents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but poison lies there."""
    llm = residents.open(LAYERS)
    execute = DeviceExecutor.execute
    with on_two_streams(llm, "any order") as streams:

        def read_on(self: DeviceExecutor, batch: Any) -> torch.Tensor:
            if batch.prefill_starts is None:
                streams.compute(lambda: batch.seq_lens.add_(batch.seq_lens > 0))
            return execute(self, batch)

        monkeypatch.setattr(DeviceExecutor, "execute", read_on)
        assert or_poison(lambda: greedy(llm, PROMPTS, MAX_TOKENS)) is None
    llm.close()


def test_control_streams_that_wait_for_each_other_are_told() -> None:
    streams = TwoStreams(0, "any order")
    streams.compute_after(streams.record() + 1)
    streams.compute(lambda: None)
    streams.after_compute()
    streams.copy(torch.zeros(2), torch.ones(2))
    with pytest.raises(AssertionError, match="wait for each other"):
        streams.drain()
