"""Products with experts on a GPU: every kind of weight, captured, in place, rows of their own."""

from dataclasses import replace

import pytest
import torch

from kernels import sizes
from kernels.arguments import Codes, Quantised
from kernels.expert_arguments import ExpertArrays, expert_cache
from kernels.ops import codes, experts
from kernels.ops import expert_cache as ops
from kernels.ref import experts as ref
from kernels.ref import quantised as ref_quantised
from tests.kernels.quantised_cases import CASES, make
from tests.kernels.test_experts import MXFP4, slots_of, weights_of

pytestmark = pytest.mark.gpu
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
TOKENS = [1, 2, 5, 8, 9, 16, 17, 32, 33, 50, 64, 65, 200, 700]
SHAPES = [
    # experts of each token, slots, hidden, ffn
    (8, 128, 2048, 768),
    (2, 8, 512, 1792),
    (1, 3, 64, 64),
    (6, 6, 192, 320),
    (4, 60, 256, 128),
]


def products(x, w13, w2, slots):
    out = torch.full((*slots.shape, x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    experts.experts_products(x, w13, w2, slots, out)
    return out


def drawn(num_tokens, hidden, dtype, rng):
    return torch.randn((num_tokens, hidden), generator=rng, device=rng.device).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, HALF, FLOAT], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_twin(shape, dtype, rng):
    top_k, num_slots, hidden, ffn = shape
    w13, w2 = weights_of(num_slots, hidden, ffn, dtype, rng)
    exact = w13.float(), w2.float()
    for num_tokens in TOKENS:
        for kind in ("uniform", "one", "holes"):
            if kind == "one" and num_slots < 2:
                continue
            x = drawn(num_tokens, hidden, dtype, rng)
            slots = slots_of(kind, num_tokens, top_k, num_slots, rng)
            found = products(x, w13, w2, slots)
            expected = torch.full_like(found, float("nan"), dtype=FLOAT)
            ref.experts_products(x.float(), *exact, slots, expected)
            tolerance = {BF16: 2e-2, HALF: 3e-3, FLOAT: 1e-4}[dtype]
            torch.testing.assert_close(
                found.float(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_its_bits_in_every_batch_and_place(shape, dtype, rng):
    top_k, num_slots, hidden, ffn = shape
    w13, w2 = weights_of(num_slots, hidden, ffn, dtype, rng)
    for total in (64, 700):
        x = drawn(total, hidden, dtype, rng)
        slots = slots_of("one" if num_slots > 1 else "uniform", total, top_k, num_slots, rng)
        whole = products(x, w13, w2, slots)
        for size in (n for n in TOKENS if (n <= 64) == (total <= 64) and n <= total):
            part = products(x[-size:].clone(), w13, w2, slots[-size:].contiguous())
            assert torch.equal(part, whole[-size:]), size
        turned = products(x, w13, w2, slots.flip(1).contiguous())
        assert torch.equal(turned.flip(1), whole)
        order = torch.randperm(num_slots, generator=rng, device=x.device)
        moved = [
            torch.cat([w.view(num_slots, -1, w.shape[1])[order]] * 2).view(-1, w.shape[1])
            for w in (w13, w2)
        ]
        places = order.argsort().int()[slots.long()]
        places[1::2] += num_slots  # of copies
        assert torch.equal(products(x, *moved, places.contiguous()), whole)
        for part in range(3):
            own = torch.where(slots % 3 == part, slots, -1).contiguous()
            found = products(x, w13, w2, own)
            assert torch.equal(found[own >= 0], whole[own >= 0])
            assert found[own < 0].isnan().all()


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, BF16) for case in CASES), *((case, HALF) for case in CASES[3:6])],
    ids=str,
)
def test_quantised_weights_have_the_bits_of_restored_ones(case, dtype, rng, monkeypatch):
    monkeypatch.setattr(sizes, "_EXPERTS_BYTES", 2**24)  # of many tokens in parts
    for top_k, num_slots, hidden, ffn in ((8, 16, 2048, 768), (2, 5, 256, 320)):
        made = [
            replace(make(case, rows, columns, dtype, rng), columns=None)
            for rows, columns in ((num_slots * 2 * ffn, hidden), (num_slots * hidden, ffn))
        ]
        plain = [ref_quantised.restore(weight) for weight in made]
        for num_tokens in (1, 7, 16, 33, 64, 100):
            x = drawn(num_tokens, hidden, dtype, rng)
            slots = slots_of("holes", num_tokens, top_k, num_slots, rng)
            found = products(x, *made, slots).view(torch.int16)
            assert torch.equal(found, products(x, *plain, slots).view(torch.int16)), num_tokens


def test_codes_have_the_bits_of_restored_weights(rng, monkeypatch):
    monkeypatch.setattr(sizes, "_EXPERTS_BYTES", 2**24)  # of many tokens in parts
    for top_k, num_slots, hidden, ffn in ((8, 16, 2048, 768), (2, 5, 256, 320)):
        plain = weights_of(num_slots, hidden, ffn, BF16, rng)
        made = [codes.pack(weight) for weight in plain]
        for num_tokens in (1, 7, 16, 33, 64, 100):
            x = drawn(num_tokens, hidden, BF16, rng)
            slots = slots_of("holes", num_tokens, top_k, num_slots, rng)
            found = products(x, *made, slots).view(torch.int16)
            assert torch.equal(found, products(x, *plain, slots).view(torch.int16)), num_tokens


def in_host(weight, host_view):
    """Return a weight whose arrays lie in pinned host memory."""
    if isinstance(weight, torch.Tensor):
        return host_view(weight.cpu())
    names = ("bytes", "codes", "first", "offsets", "table")
    if isinstance(weight, Quantised):
        names = ("values", "scale", "high", "zero", "low", "subscale", "sublow", "table")
    arrays = {name: getattr(weight, name) for name in names}
    return replace(weight, **{n: host_view(x.cpu()) for n, x in arrays.items() if x is not None})


@pytest.mark.parametrize("num_tokens", [1, 20, 64, 90])
def test_weights_in_host_memory_give_the_same_bits(num_tokens, rng, host_view):
    plain = weights_of(16, 256, 128, BF16, rng)
    packed: list[Codes] = [codes.pack(weight) for weight in plain]
    rounded = [replace(make(CASES[0], *each.shape, BF16, rng), columns=None) for each in plain]
    x = drawn(num_tokens, 256, BF16, rng)
    slots = slots_of("uniform", num_tokens, 4, 16, rng)
    for weights in (plain, packed, rounded):
        there = [in_host(weight, host_view) for weight in weights]
        assert torch.equal(products(x, *there, slots), products(x, *weights, slots))


def banked(weight, num_experts, num_slots):
    """Return a weight with as many experts as there are slots, and the arrays of both by experts.

    What belongs to no expert is the same.
    """
    names = [""] if isinstance(weight, torch.Tensor) else ["bytes", "codes", "first", "offsets"]
    if isinstance(weight, Quantised):
        names = [name for name in ("values", "scale", "zero") if getattr(weight, name) is not None]
    of = {name: getattr(weight, name) if name else weight for name in names}
    to = {
        name: array[: len(array) // num_experts * num_slots].clone() for name, array in of.items()
    }
    pairs = [(of[name], to[name]) for name in names]
    if isinstance(weight, torch.Tensor):
        return to[""], pairs
    if isinstance(weight, Quantised):
        to["num_rows"] = weight.num_rows // num_experts * num_slots
    return replace(weight, **to), pairs


@pytest.mark.parametrize("num_tokens", [1, 3, 16])
@pytest.mark.parametrize("kind", ["plain", "codes", "quantised"])
def test_products_beside_copies_wait_for_missing_experts(kind, num_tokens, rng, host_view):
    """In a captured step; a slot has another expert's rows until its own are there."""
    num_experts, num_slots, top_k, hidden, ffn = 32, 12, 4, 1024, 512
    shapes = (num_experts * 2 * ffn, hidden), (num_experts * hidden, ffn)
    if kind == "quantised":
        weights = [replace(make(CASES[0], *shape, BF16, rng), columns=None) for shape in shapes]
    else:
        weights = weights_of(num_experts, hidden, ffn, BF16, rng)
    if kind == "codes":
        weights = [codes.pack(weight) for weight in weights]
    (bank13, first), (bank2, later) = (banked(each, num_experts, num_slots) for each in weights)
    sources = [host_view(x.cpu()).view(num_experts, -1) for x, _ in first + later]
    targets = [x.view(num_slots, -1) for _, x in first + later]
    arrays = ExpertArrays.of(sources, targets, len(first))
    size = sizes.expert_cache_bytes(num_experts, num_slots)
    memory = torch.empty(size, dtype=torch.uint8, device=rng.device)
    counts = torch.zeros(2, dtype=torch.int64, device=rng.device)
    cache = expert_cache(num_experts, num_slots, memory, counts)
    x = drawn(num_tokens, hidden, BF16, rng)
    if num_tokens == 3:  # rows that must be copied first
        x = drawn(num_tokens, hidden + 4, BF16, rng)[:, 4:]
    ids = torch.zeros((num_tokens, top_k), dtype=torch.int32, device=x.device)
    out = torch.empty((num_tokens, top_k, hidden), dtype=BF16, device=x.device)

    def step():
        for part in range(sizes.num_expert_parts(ids.numel(), num_experts, num_slots)):
            slots = ops.claim(ids, part, cache)
            ops.gather(arrays, cache)
            experts.experts_products(x, bank13, bank2, slots, out, arriving=cache)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(40):
        ids.copy_(slots_of("uniform", num_tokens, top_k, num_experts, rng))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, products(x, *weights, ids))
    assert counts.min() > 0


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 128])
def test_a_captured_step_routes_anew(num_tokens, rng):
    w13, w2 = weights_of(12, 256, 128, BF16, rng)
    x, logits = drawn(num_tokens, 256, BF16, rng), drawn(num_tokens, 12, BF16, rng)
    rows = torch.arange(num_tokens, device=x.device)

    def step():
        ids, shares = experts.route(logits, 4, renormalise=True, rounds=True, rows_T=rows)
        out = torch.empty((num_tokens, 4, 256), dtype=BF16, device=x.device)
        experts.experts_products(x, w13, w2, ids, out)
        return experts.experts_sum(out, shares, ids)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = step()
    for seed in range(3):
        generator = torch.Generator(device=x.device).manual_seed(seed)
        x.copy_(drawn(num_tokens, 256, BF16, generator))
        logits.copy_(drawn(num_tokens, 12, BF16, generator))
        rows[num_tokens // 2 :] = -1 if seed == 1 else 0
        graph.replay()
        found = result.clone()
        assert torch.equal(found, step())
        if seed == 1:
            assert not found[num_tokens // 2 :].any()


@pytest.mark.parametrize("dtype", [BF16, HALF, FLOAT], ids=str)
@pytest.mark.parametrize("is_plain", [True, False])
def test_biases_and_a_clamped_gate_equal_twin(is_plain, dtype, rng):
    """Plain experts, and those of MXFP4, of which a call restores none but in registers."""
    top_k, num_slots, hidden, ffn = 4, 8, 320, 192
    w13, w2 = weights_of(num_slots, hidden, ffn, dtype, rng)
    exact = w13.float(), w2.float()
    if not is_plain:
        w13 = make(MXFP4, num_slots * 2 * ffn, hidden, dtype, rng)
        w2 = make(MXFP4, num_slots * hidden, ffn, dtype, rng)
        exact = tuple(ref_quantised.restore(each).float() for each in (w13, w2))
    biases = tuple(drawn(len(each), 1, dtype, rng).flatten() for each in exact)
    for num_tokens in (1, 17, 64, 65, 300):
        x = drawn(num_tokens, hidden, dtype, rng)
        slots = slots_of("uniform", num_tokens, top_k, num_slots, rng)
        out = torch.empty((*slots.shape, hidden), dtype=dtype, device=x.device)
        experts.experts_products(x, w13, w2, slots, out, biases=biases, clamp=(0.7, 1.702))
        expected = torch.empty_like(out, dtype=FLOAT)
        of_bias = tuple(each.float() for each in biases)
        given = {"biases": of_bias, "clamp": (0.7, 1.702)}
        ref.experts_products(x.float(), *exact, slots, expected, **given)
        tolerance = {BF16: 3e-2, HALF: 4e-3, FLOAT: 1e-4}[dtype]
        torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
