"""Penalties over the steps of sequences, against logits computed the slow way."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.asked.request import Request, SampledToken, Sequence
from engine.asked.sampling import PENALTY_PAGE_TOKENS as PAGE
from engine.asked.sampling import SamplingParams
from engine.run.sampler import Sampler, SampleRow
from tests.engine.run.test_sampler import V, make_logits, reference, sample

PENALTIES = [(1.0, 0.0, 0.0), (1.4, 0.0, 0.0), (1.0, 0.6, 0.0), (1.0, 0.0, 1.5), (0.7, -0.5, 0.5)]


def make_sequences(number: int, kinds: list[int], prompts: list[int]) -> list[Sequence]:
    found = []
    for at in range(number):
        repetition, frequency, presence = PENALTIES[kinds[at]]
        params = SamplingParams(
            temperature=0.0 if at % 2 else 0.9,
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
        )
        prompt = [(7 * at + 3 * i) % V for i in range(prompts[at])]
        request = Request(request_id=str(at), prompt_token_ids=prompt, params=params, arrival=at)
        found.append(Sequence(seq_id=at, request=request))
    return found


class Steps:
    """Runs steps of some sequences, each behind one whose tokens the host may not know."""

    def __init__(self, sequences: list[Sequence], room: int = 0, device: str = "cpu") -> None:
        self.sequences = sequences
        self.sampler = Sampler(V, device, max_rows=3, penalty_tokens=room)
        self.unknown: list[tuple[int, int]] = []
        """Numbers of the sequences of the newest step, and their tokens."""
        self.number = 0

    def collect(self) -> None:
        """Let the host know the newest step's tokens."""
        for at, token_id in self.unknown:
            self.sequences[at].append(SampledToken(token_id, 0.0))
        self.unknown = []

    def run(self, mine: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of a step behind the newest one, and those computed the slow way."""
        hidden = {at: row for row, (at, _) in enumerate(self.unknown)}
        rows = []
        for at in mine:
            token_rows = range(hidden[at], hidden[at] + 1) if at in hidden else range(0)
            rows.append(SampleRow.of(self.sequences[at], 0, (), token_rows=token_rows))
        self.number += 1
        logits = make_logits(self.number, len(mine))
        found = sample(self.sampler, logits.to(self.sampler.device), rows)
        self.collect()
        known = [SampleRow.of(self.sequences[at], 0, ()) for at in mine]
        slow = [reference(x.numpy(), row) for x, row in zip(logits, known, strict=True)]
        self.unknown = [(at, t.token_id) for at, t in zip(mine, found, strict=True)]
        return [token_id for _, token_id in self.unknown], slow


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.integers(0, len(PENALTIES) - 1), min_size=5, max_size=5),
    prompts=st.lists(st.integers(1, 2 * PAGE), min_size=5, max_size=5),
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    room=st.sampled_from([0, 2 * PAGE, 700]),
)
def test_tokens_count_whatever_the_host_knows_and_wherever_they_lie(kinds, prompts, steps, room):
    world = Steps(make_sequences(5, kinds, prompts), room)
    for mine, collects in steps:
        if collects:
            world.collect()
        found, slow = world.run(mine)
        assert found == slow


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_the_token_that_nobody_knows_counts(kind):
    """Without it another token would be chosen."""
    world = Steps(make_sequences(2, [kind, kind], [1, 1]))
    logits = torch.full((1, V), -9.0)
    logits[0, [4, 5]] = torch.tensor([3.0, 2.9])
    sequence = world.sequences[1]
    first = sample(world.sampler, logits, [SampleRow.of(sequence, 0, ())])[0].token_id
    row = SampleRow.of(sequence, 0, (), token_rows=range(1))
    assert (first, sample(world.sampler, logits, [row])[0].token_id) == (4, 5)


def test_a_step_that_is_forgotten_counts_for_nothing():
    """The host says what the tokens are, whatever a step read on the device before."""
    world = Steps(make_sequences(1, [2], [1]))
    [sequence] = world.sequences
    logits = torch.full((1, V), -9.0)
    logits[0, [4, 5, 6]] = torch.tensor([3.0, 2.9, 2.8])
    sample(world.sampler, logits, [SampleRow.of(sequence, 0, ())])
    sample(world.sampler, logits, [SampleRow.of(sequence, 0, (), token_rows=range(1))])
    sequence.append(SampledToken(6, 0.0))
    row = SampleRow.of(sequence, 0, ())
    expected = reference(logits[0].numpy(), row)
    assert sample(world.sampler, logits, [row])[0].token_id == expected


def test_a_long_prompt_is_sent_in_parts():
    length = 10_000
    world = Steps(make_sequences(1, [1], [length]), length + PAGE)
    for _ in range(3):
        found, slow = world.run([0])
        assert found == slow
    written = world.sampler._penalties._pages.flatten()[: length + 2].tolist()
    world.collect()
    assert written == world.sequences[0].token_ids[:-1]


def test_tokens_that_nobody_knows_count_where_the_sampler_grows():
    world = Steps(make_sequences(5, [3, 3, 3, 3, 3], [4, 5, 6, 7, 8]), 16 * PAGE)
    world.run([0, 1])
    found, slow = world.run([0, 1, 2, 3, 4])  # max_rows is 3
    assert found == slow


def test_rows_without_penalties_keep_nothing_on_the_device(monkeypatch):
    world = Steps(make_sequences(3, [0, 0, 0], [3, 4, 5]), PAGE)
    penalties = world.sampler._penalties
    monkeypatch.setattr(penalties, "apply_", None)
    found, slow = world.run([0, 1, 2])
    assert found == slow


@pytest.mark.gpu
def test_cuda_counts_like_the_cpu():
    chooser = np.random.default_rng(5)
    kinds, prompts = [1, 2, 3, 4, 0], [1, 40, 90, 7, 33]
    for room in (0, 2 * PAGE):
        world = Steps(make_sequences(5, kinds, prompts), room, "cuda")
        for _ in range(30):
            if chooser.random() < 0.4:
                world.collect()
            mine = chooser.permutation(5)[: chooser.integers(1, 4)].tolist()
            found, slow = world.run(mine)
            assert found == slow
