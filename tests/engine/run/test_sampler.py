import math
from dataclasses import replace
from itertools import count as counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import engine.run.sampler as module
from engine.asked.request import NoToken, Request, SampledToken, Sequence
from engine.asked.sampling import SamplingParams, StructuredOutput, sampler_workspace_bytes
from engine.errors import EngineError
from engine.run.sampler import SENT_BYTES, Sampler, SampleRow, send

V = 40
EOS = 3
NUMBERS = counter()


def make_row(
    position=None, *, request=0, index=0, seed=0, prompt=(1, 2), output=(), eos=EOS, **given
):
    params = SamplingParams(**given)
    asked = Request(request_id="r", prompt_token_ids=list(prompt), params=params, arrival=request)
    number = next(NUMBERS)
    sequence = Sequence(seq_id=number, request=asked, index=index, output_token_ids=list(output))
    position = sequence.num_tokens if position is None else position
    return SampleRow(sequence, params, seed, {eos}, position, len(output))


def sample(sampler, logits, rows):
    """Choose a token for each row and wait for them."""
    pending = sampler.enqueue(logits, rows)
    if sampler.device.type == "cuda":
        torch.cuda.current_stream(sampler.device).synchronize()
    return sampler.collect(pending)


def make_logits(seed, rows=1, *, size=V, step=None):
    logits = np.random.default_rng(seed).normal(size=(rows, size)) * 2
    if step is not None:
        logits = np.round(logits / step) * step
    return torch.tensor(logits, dtype=torch.float32)


def adjusted(logits, row):
    """The logits of one row after what changes them, float64."""
    x = np.array(logits, dtype=np.float32)
    p = row.params
    for token_id, bias in (p.logit_bias or {}).items():
        x[token_id] = float(x[token_id]) + bias
    output = row.sequence.output_token_ids
    for token_id in set(row.sequence.token_ids):
        value = float(x[token_id])
        value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.frequency_penalty * output.count(token_id)
        value -= p.presence_penalty * (token_id in output)
        x[token_id] = value
    if row.num_output_tokens < p.min_tokens:
        for token_id in p.stop_token_ids or ():
            x[token_id] = -math.inf
        if not p.ignore_eos:
            x[list(row.eos_ids)] = -math.inf
    return x.astype(np.float64)


def kept_probabilities(logits, row):
    """Token ids from most to least probable and what each rule leaves of their probabilities."""
    x = adjusted(logits, row)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    p = row.params
    probs = np.exp((x[order] - x[order[0]]) / p.temperature)
    if p.top_k > 0:
        probs[p.top_k :] = 0
    probs /= probs.sum()
    mass, kept = 0.0, np.zeros(len(x), dtype=bool)
    for place, prob in enumerate(probs):
        kept[place] = p.top_p == 1 or mass < p.top_p
        mass += prob
    kept &= probs >= p.min_p * probs[0]
    probs = np.where(kept, probs, 0)
    return order, probs / probs.sum()


def reference(logits, row):
    """The chosen token, computed the slow way."""
    if row.params.temperature == 0:
        return int(np.argmax(adjusted(logits, row)))
    order, probs = kept_probabilities(logits, row)
    u = row.uniform()
    return order[int(np.searchsorted(np.cumsum(probs), u, side="right"))]


biases = st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100, -1.5, 0.25, 3, 100]))


@st.composite
def batches(draw):
    number = draw(st.integers(1, 7))
    rows = []
    for at in range(number):
        min_tokens = draw(st.sampled_from([0, 0, 2]))
        rows.append(
            make_row(
                request=at,
                prompt=draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=6)),
                output=draw(st.lists(st.integers(0, V - 1), max_size=60)),
                temperature=draw(st.sampled_from([0, 0.3, 1.0, 2.5])),
                top_k=draw(st.sampled_from([0, -1, 1, 5, V, 1000])),
                top_p=draw(st.sampled_from([1.0, 0.9, 0.35, 1e-9])),
                min_p=draw(st.sampled_from([0.0, 0.1, 0.6])),
                repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.7, 0.5])),
                frequency_penalty=draw(st.sampled_from([0, 0, 0.3, -1.5])),
                presence_penalty=draw(st.sampled_from([0, 0, 2.0, -0.7])),
                logit_bias=draw(st.none() | biases),
                min_tokens=min_tokens,
                stop_token_ids=draw(st.sampled_from([None, [5, 6]])),
                ignore_eos=draw(st.booleans()),
                logprobs=draw(st.sampled_from([None, 0, 3])),
            )
        )
    step = draw(st.sampled_from([None, 1.0]))
    return make_logits(draw(st.integers(0, 10**6)), number, step=step), rows


@settings(max_examples=25, deadline=None)
@given(batch=batches(), select=st.booleans())
def test_equals_the_slow_way(batch, select):
    logits, rows = batch
    before = logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_SELECT", 8 if select else 0)
        found = sample(Sampler(V, "cpu"), logits, rows)
    assert torch.equal(logits, before)
    assert [token.token_id for token in found] == [
        reference(logits[at].numpy(), row) for at, row in enumerate(rows)
    ]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    for at, (row, token) in enumerate(zip(rows, found, strict=True)):
        assert token.logprob == pytest.approx(float(logprobs[at, token.token_id]), abs=1e-5)
        if row.params.logprobs is None:
            assert (token.top_logprobs, token.rank) == (None, None)
            continue
        x = logits[at].tolist()
        best = sorted(range(V), key=lambda i: (-x[i], i))[: row.params.logprobs]
        expected = [token.token_id, *(i for i in best if i != token.token_id)]
        assert list(token.top_logprobs) == expected
        assert sorted(range(V), key=lambda i: (-x[i], i))[token.rank - 1] == token.token_id
        for token_id, value in token.top_logprobs.items():
            assert value == pytest.approx(float(logprobs[at, token_id]), abs=1e-5)


@pytest.mark.thorough
@settings(max_examples=15, deadline=None)
@given(batch=batches(), portion=st.integers(1, 3), order=st.randoms(use_true_random=False))
def test_batch_and_order_do_not_matter(batch, portion, order):
    logits, rows = batch
    sampler = Sampler(V, "cpu")
    together = sample(sampler, logits, rows)
    alone = [sample(sampler, logits[at : at + 1], [row])[0] for at, row in enumerate(rows)]
    places = list(range(len(rows)))
    order.shuffle(places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SAMPLER_SORT_ELEMENTS", portion * V)
        patch.setattr(module, "SAMPLER_GREEDY_ELEMENTS", portion * V)
        mixed = sample(sampler, logits[places], [rows[at] for at in places])
    for at, place in enumerate(places):
        assert mixed[at].token_id == together[place].token_id == alone[place].token_id
        assert mixed[at].logprob == pytest.approx(alone[place].logprob, abs=1e-6)


def test_three_ways_to_sort_agree():
    logits = make_logits(1, 6, step=0.5)
    logits[0, :5] = torch.tensor([0.0, -0.0, 0.0, -math.inf, -0.0])
    logits[1] = 1.0
    value, ids = logits.sort(dim=-1, descending=True, stable=True)
    for count in (7, V):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "MAX_SELECT", 0 if count == V else 10)
            found, found_ids = module._sort_rows(logits, count)
        assert torch.equal(found_ids, ids[:, :count])
        assert torch.equal(found, value[:, :count])


def test_ties_go_to_the_lower_id():
    logits = torch.zeros(1, V)
    logits[0, [7, 20]] = 5.0
    sampler = Sampler(V, "cpu")
    for params in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}):
        assert sample(sampler, logits, [make_row(**params)])[0].token_id == 7
    row = make_row(temperature=0, logprobs=3)
    assert list(sample(sampler, logits, [row])[0].top_logprobs) == [7, 20, 0]


def draws(count=400, **params):
    logits = make_logits(3).expand(count, V)
    rows = [make_row(position, **params) for position in range(count)]
    return [token.token_id for token in sample(Sampler(V, "cpu"), logits, rows)]


@pytest.mark.thorough
def test_draws_follow_the_probabilities():
    count = 20_000
    row = make_row(temperature=1.3, top_p=0.95)
    order, probs = kept_probabilities(make_logits(3)[0].numpy(), row)
    found = np.bincount(draws(count, temperature=1.3, top_p=0.95), minlength=V)[order]
    assert not found[probs == 0].any()
    expected = probs[probs > 0] * count
    chi2 = float((((found[probs > 0] - expected) ** 2) / expected).sum())
    freedom = len(expected) - 1
    # Three standard deviations of a chi-square; the draws are fixed, so this cannot flake.
    assert chi2 < freedom + 3 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("params", "changed"),
    [
        ({"temperature": 0.2}, True),
        ({"top_k": 2}, True),
        ({"top_k": V}, False),
        ({"top_k": -1}, False),
        ({"top_p": 0.3}, True),
        ({"min_p": 0.5}, True),
        ({"repetition_penalty": 3.0, "prompt": range(0, V, 2)}, True),
        ({"frequency_penalty": 2.0, "output": [7, 7, 9]}, True),
        ({"presence_penalty": 2.0, "output": range(0, V, 2)}, True),
        ({"frequency_penalty": 2.0, "presence_penalty": 2.0, "prompt": range(V)}, False),
        ({"logit_bias": {7: 100}}, True),
        ({"min_tokens": 1, "stop_token_ids": list(range(20))}, True),
        ({"seed": 1}, True),
        ({"request": 1}, True),
        ({"index": 1}, True),
        ({"logprobs": 2}, False),
        ({"max_tokens": 99}, False),
    ],
)
def test_each_parameter_changes_what_it_should(params, changed):
    assert (draws() != draws(**params)) is changed


def test_more_greedy_settings_draw_fewer_tokens():
    spread = len(set(draws()))
    for params in ({"temperature": 0.2}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}):
        assert len(set(draws(**params))) < spread / 2
    assert len(set(draws(top_k=2))) == 2
    assert len(set(draws(temperature=1e-300))) == 1
    assert len(set(draws(temperature=1e300))) > spread


def test_min_tokens_masks_what_would_end_the_output():
    logits = torch.zeros(1, V)
    logits[0, [EOS, 9, 11]] = torch.tensor([9.0, 8.0, 7.0])
    sampler = Sampler(V, "cpu")

    def greedy(**params):
        return sample(sampler, logits, [make_row(temperature=0, **params)])[0].token_id

    assert greedy() == EOS
    assert greedy(min_tokens=1) == 9
    assert greedy(min_tokens=1, stop_token_ids=[9]) == 11
    assert greedy(min_tokens=1, stop_token_ids=[9], ignore_eos=True) == EOS
    assert greedy(min_tokens=1, output=[4]) == EOS
    assert greedy(min_tokens=2, output=[4]) == 9
    assert all(greedy(min_tokens=1, eos=outside) == EOS for outside in (-1, EOS - V, V))


def test_repetition_penalty_counts_prompt_and_output():
    logits = torch.full((1, V), -9.0)
    logits[0, [10, 11, 12]] = torch.tensor([4.0, 3.0, 2.5])
    sampler = Sampler(V, "cpu")

    def greedy(penalty, **ids):
        row = make_row(temperature=0, repetition_penalty=penalty, **ids)
        return sample(sampler, logits, [row])[0].token_id

    assert greedy(1.5) == 10
    assert greedy(1.5, prompt=[10, 10]) == 11
    assert greedy(1.5, prompt=[10], output=[11]) == 10
    assert greedy(2.0, prompt=[10], output=[11]) == 12
    assert greedy(1e300, prompt=[10], output=[11]) == 12
    assert greedy(5e-324, prompt=[12]) == 12
    negative = torch.full((1, V), -1.0)
    row = make_row(temperature=0, repetition_penalty=2.0, prompt=range(V - 1))
    assert sample(sampler, negative, [row])[0].token_id == V - 1


def test_zero_probability_is_never_drawn():
    logits = torch.full((1000, V), -math.inf)
    logits[:, [4, 30]] = 0.0
    rows = [make_row(position) for position in range(1000)]
    assert {token.token_id for token in sample(Sampler(V, "cpu"), logits, rows)} == {4, 30}


def test_uniform_is_in_range_and_even():
    values = np.array([make_row(n, seed=7, request=3).uniform() for n in range(4000)])
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(np.histogram(values, bins=10, range=(0, 1))[0] - 400).max() < 80


def test_uniform_is_the_same_everywhere():
    assert make_row(0).uniform() == 0.14548700719291274


@pytest.mark.parametrize("edge", [0.0, 1 - 2.0**-53])
def test_edges_of_the_uniform(monkeypatch, edge):
    monkeypatch.setattr(SampleRow, "uniform", lambda _: edge)
    logits = make_logits(4)
    order, probs = kept_probabilities(logits[0].numpy(), make_row())
    expected = order[0] if edge == 0 else order[-1]
    assert sample(Sampler(V, "cpu"), logits, [make_row()])[0].token_id == expected
    assert (probs > 0).all()


@pytest.mark.parametrize(
    ("uniform", "token_id"), [(0.0, 4), (0.5 - 2.0**-42, 4), (0.5, 30), (0.75, 30)]
)
def test_border_between_two_tokens(monkeypatch, uniform, token_id):
    monkeypatch.setattr(SampleRow, "uniform", lambda _: uniform)
    logits = torch.full((1, V), -math.inf)
    logits[0, [4, 30]] = 1.5
    assert sample(Sampler(V, "cpu"), logits, [make_row()])[0].token_id == token_id


def test_row_of_a_sequence():
    request = Request(request_id="x", prompt_token_ids=[1, 2], arrival=6)
    sequence = Sequence(seq_id=0, request=request, index=1)
    sequence.output_token_ids.append(9)
    row = SampleRow.of(sequence, 42, (EOS,), token_rows=range(3, 4))
    assert (row.position, row.num_output_tokens) == (4, 2)
    drawn = make_row(4, request=6, index=1, seed=42).uniform()
    assert row.uniform() == drawn
    request.params.seed = 5
    other = make_row(4, request=9, index=0, seed=1)
    other.params.seed = 6
    assert row.uniform() == other.uniform() != drawn


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_unusable_logits_give_no_token_to_their_row_alone(value):
    logits = make_logits(0, 3)
    if value == -math.inf:
        logits[1] = value
    else:
        logits[1, 5] = value
    for params in ({"temperature": 0}, {}, {"temperature": 0, "logprobs": 1}):
        rows = [make_row(request=at, **params) for at in range(3)]
        found = sample(Sampler(V, "cpu"), logits, rows)
        alone = sample(Sampler(V, "cpu"), logits[[0, 2]], [rows[0], rows[2]])
        assert found[1] is NoToken.LOGITS
        assert [found[0].token_id, found[2].token_id] == [token.token_id for token in alone]


@pytest.mark.parametrize("value", [0.0, math.nan])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_form_is_at_fault_only_where_logits_are_usable(value, temperature):
    logits = make_logits(0, 2)
    logits[0, 5] = value
    form = StructuredOutput(regex="a")
    rows = [make_row(temperature=temperature, structured=asked) for asked in (form, None)]
    rows[0].sequence.constraint = object()
    for words, fault in ([0, 0], NoToken.FORM), ([-1, -1], None):
        rows[0] = replace(rows[0], mask=np.array(words, dtype=np.int32))
        found = sample(Sampler(V, "cpu"), logits, rows)
        wanted = NoToken.LOGITS if math.isnan(value) else fault
        assert wanted is None or found[0] is wanted
        assert isinstance(found[0], SampledToken) is (wanted is None)
        assert isinstance(found[1], SampledToken)


def test_misuse_raises():
    sampler = Sampler(V, "cpu")
    logits = make_logits(0)
    assert sample(sampler, logits[:0], []) == []
    everything = make_row(min_tokens=1, stop_token_ids=list(range(V)))
    with pytest.raises(EngineError, match="all 40 tokens masked"):
        sample(sampler, logits, [everything])
    for size in (0, 2**22):
        with pytest.raises(EngineError, match="vocabulary"):
            Sampler(size, "cpu")


def test_top_logprobs_of_a_tiny_vocabulary():
    token = sample(
        Sampler(3, "cpu"),
        torch.tensor([[0.0, 2.0, 1.0]]),
        [make_row(temperature=0, logprobs=20, prompt=[0])],
    )[0]
    assert list(token.top_logprobs) == [1, 2, 0]
    assert sum(map(math.exp, token.top_logprobs.values())) == pytest.approx(1)


class Launches(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


VIEWS = {"slice", "view", "unsqueeze", "select", "unbind", "numpy_T", "lift_fresh", "detach"}
NUM_GREEDY, NUM_DRAWING = 2, 52
"""What greedy tokens take beside the kernel of most_probable, and drawn ones with top_p."""


def launches(*kinds):
    rows = [make_row(request=at, **kind) for at, kind in enumerate(kinds)]
    sampler = Sampler(V, "cpu", max_rows=len(rows), penalty_tokens=1024)
    logits = make_logits(1, len(rows))
    found = module.most_probable(logits)
    with pytest.MonkeyPatch.context() as patch, Launches() as seen:
        patch.setattr(module, "most_probable", lambda logits: found)
        sampler.enqueue(logits, rows)
    return [name for name in seen.names if name not in VIEWS]


def test_what_nobody_asks_for_launches_nothing():
    greedy = {"temperature": 0}
    off = {"frequency_penalty": 0, "logit_bias": {}, "repetition_penalty": 1.0, "logprobs": None}
    plain, drawing = launches(greedy, greedy), launches({"top_p": 0.9}, {"top_p": 0.9})
    assert len(plain) <= NUM_GREEDY
    assert len(drawing) <= NUM_DRAWING
    assert launches(greedy | off, greedy | off) == plain
    assert launches({"top_p": 0.9} | off, {"top_p": 0.9} | off) == drawing
    for more in (
        {"presence_penalty": 1, "output": [5]},
        {"logit_bias": {3: 1.0}},
        {"logprobs": 0},
        {"min_tokens": 1},
    ):
        assert len(launches(greedy, greedy | more)) > len(plain)


def big_rows(count):
    kinds = [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 50},
        {"min_p": 0.05},
        {"temperature": 0, "logprobs": 5},
        {"top_p": 0.95, "logprobs": 0},
        {"repetition_penalty": 1.2, "prompt": range(500)},
        {"frequency_penalty": 0.4, "presence_penalty": 0.2, "output": [5, 6, 6, 30] * 40},
        {"temperature": 0, "logit_bias": {3: 2.5, 20: -100}},
        {"min_tokens": 4},
    ]
    return [make_row(request=at, **kinds[at % len(kinds)]) for at in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [V, 32_000, 100_278, 152_064])
@pytest.mark.parametrize("select", [0, 1024])
def test_cuda_chooses_like_the_cpu(monkeypatch, size, select):
    monkeypatch.setattr(module, "MAX_SELECT", select)
    rows = big_rows(30)
    if size == V:
        for row in rows:
            row.sequence.prompt_token_ids[:] = [1]
    logits = make_logits(2, len(rows), size=size, step=2.0**-6)
    on_cpu = sample(Sampler(size, "cpu"), logits, rows)
    on_gpu = sample(Sampler(size, "cuda"), logits.cuda(), rows)
    assert [t.token_id for t in on_gpu] == [t.token_id for t in on_cpu]
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert one.rank == other.rank
        assert (one.top_logprobs is None) == (other.top_logprobs is None)
        if one.top_logprobs is not None:
            assert list(one.top_logprobs) == list(other.top_logprobs)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [32_000, 152_064])
@pytest.mark.parametrize("plain", [False, True])
def test_cuda_memory_stays_within_the_stated_bytes(size, plain):
    rows = [make_row(request=at, temperature=0) for at in range(256)] if plain else big_rows(256)
    logits = torch.randn(len(rows), size, device="cuda")
    sampler = Sampler(size, "cuda")
    sample(sampler, logits, rows)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sample(sampler, logits, rows)
    assert torch.cuda.max_memory_allocated() - before <= sampler_workspace_bytes(size)


def test_numbers_beyond_one_copy_are_sent_whole():
    values = np.arange(SENT_BYTES // 4 + 6).reshape(2, -1)
    sent = send(values, np.int64, torch.device("cpu"))
    assert sent.nbytes > 2 * SENT_BYTES
    assert torch.equal(sent, torch.from_numpy(values))
