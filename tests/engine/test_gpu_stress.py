"""On a GPU: streams delayed at random, slots and KV blocks poisoned: the same tokens.

Faults put in on purpose must change tokens, in eager steps and in graphs.
"""

from itertools import product
from typing import Any

import pytest

from engine.weights.residence import SlotRing
from tests.engine.conftest import TinyModels
from tests.engine.faults import heedless, leave_stale, or_poison, skip_wait
from tests.engine.growth import Growths, grow, some_eager
from tests.engine.storm import LONG_CYCLES, poisoned_blocks, storm
from tests.engine.test_gpu_equality import PLACEMENTS
from tests.tiny import greedy, make_prompt, open_llm

pytestmark = pytest.mark.gpu

TWO_SLOTS = "prefetch"
STORMS = [
    *product(("copies", "compute", "both"), (TWO_SLOTS, "uva, staged from 3 tokens on")),
    ("copies", "prefetch, two ahead"),
    ("compute", "prefetch, two ahead"),
    ("both", "prefetch of layers of different sizes"),
    ("both", "prefetch, two of three"),
    ("both", "prefetch, more ahead than layers"),
    ("both", "uva, staged"),
    ("both", "uva"),
    ("both", "on demand, eager"),
]


@pytest.fixture(scope="module")
def growths(tiny: TinyModels) -> Growths:
    return Growths(tiny)


@pytest.mark.parametrize(("delays", "name"), STORMS)
def test_delays_and_poison_change_no_token(growths: Growths, delays: str, name: str) -> None:
    expected = growths.expected(dtype="float32")
    with storm(delays):
        llm = growths.open(dtype="float32", **PLACEMENTS[name])
        with poisoned_blocks(llm):
            for share in (0.0, 0.5, 1.0):
                with some_eager(llm, share, seed=1):
                    assert grow(llm, growths.prompts).tokens == expected.tokens, share
        llm.close()


def test_delays_and_poison_change_no_token_in_bfloat16(growths: Growths) -> None:
    expected = growths.expected(dtype="bfloat16")
    for seed, name in enumerate((TWO_SLOTS, "uva, staged from 3 tokens on")):
        with storm("both", seed):
            llm = growths.open(dtype="bfloat16", **PLACEMENTS[name])
            with poisoned_blocks(llm), some_eager(llm, 0.5):
                assert grow(llm, growths.prompts).tokens == expected.tokens, name
            llm.close()


SHORT = [make_prompt(length, seed=4) for length in (1, 19, 70)]


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_odd_splits_in_a_storm(tiny: TinyModels, layers: int) -> None:
    """Groups, numbers and steps that do not divide each other, from 1 to more than the layers."""
    folder = tiny.folder("llama", num_hidden_layers=layers)
    expected = tiny.greedy("llama", SHORT, 6, num_hidden_layers=layers)
    splits = {(1, 1, 1), (1, 1, layers - 1), (1, 1, layers + 2)}
    if layers == 7:
        splits |= {(1, 1, 2), (1, 1, 3), (3, 2, 1), (3, 2, 2), (2, 1, 1), (7, 1, 3), (9, 8, 4)}
    for number, (group, num, step) in enumerate(sorted(splits)):
        with storm("both", number):
            llm = open_llm(
                folder,
                device="cuda",
                max_num_seqs=4,
                offload_group_size=group,
                offload_num_in_group=num,
                offload_prefetch_step=max(1, step),
            )
            for share in (0.0, 1.0):
                with some_eager(llm, share):
                    assert greedy(llm, SHORT, 6) == expected, (group, num, step, share)
            llm.close()


# Faults put in on purpose.

FAULTS: dict[str, tuple[str, str, Any]] = {
    "one skipped wait for a copy": ("copies", "acquire", skip_wait(3)),
    "one slot refilled before its last use": (
        "device",
        "release",
        heedless(SlotRing.release, 1),
    ),
    "one stale slot": ("both", "_start", leave_stale(4)),
}


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["graph", "eager"])
@pytest.mark.parametrize("fault", FAULTS)
def test_control_faults_change_tokens(
    growths: Growths, monkeypatch: pytest.MonkeyPatch, fault: str, share: float
) -> None:
    delays, method, faulty = FAULTS[fault]
    expected = growths.expected(dtype="float32").tokens
    with storm(delays):
        llm = growths.open(dtype="float32", **PLACEMENTS["prefetch, two ahead"])
        with some_eager(llm, share):
            assert grow(llm, growths.prompts).tokens == expected
        llm.close()
    with storm(delays, most_cycles=LONG_CYCLES):
        monkeypatch.setattr(SlotRing, method, faulty)
        llm = growths.open(dtype="float32", **PLACEMENTS["prefetch, two ahead"])
        with some_eager(llm, share):
            assert or_poison(lambda: grow(llm, growths.prompts).tokens) != expected
        llm.close()


def test_control_one_slot_staged_before_its_last_use_changes_tokens(
    growths: Growths, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = growths.expected(dtype="float32").tokens
    monkeypatch.setattr(SlotRing, "begin_step", heedless(SlotRing.begin_step, None))
    with storm("device"):
        llm = growths.open(dtype="float32", **PLACEMENTS["uva, staged from 3 tokens on"])
        assert or_poison(lambda: grow(llm, growths.prompts).tokens) != expected
        llm.close()
