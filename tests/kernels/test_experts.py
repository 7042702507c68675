"""Routing, products with experts and their sums: against twins, and rows that are their own."""

import pytest
import torch

from kernels import sizes
from kernels.ops import codes, quantised
from kernels.ops import experts as ops
from kernels.ops.checks import KernelArgumentError
from kernels.ref import experts as ref
from kernels.sizes import MAX_SMALL_TOKENS, restored_experts
from tests.kernels.quantised_cases import CASES as EVERY_CASE
from tests.kernels.quantised_cases import Case, make
from tests.slow import slow

QUANTISED = [case for case in EVERY_CASE if "columns" not in case.has]


def kernel_route(logits, top_k, **given):
    """Run the kernel on any device."""
    from kernels.triton import experts as triton

    return triton.route(logits, top_k, **({"renormalise": False, "rounds": False} | given))


def kernel_products(x, w13, w2, slots, *, is_gelu=False, biases=None, clamp=None):
    """Run the kernels of Triton on any device; pairs without a block are zeros."""
    from kernels.triton.experts import Gate

    out = x.new_zeros((*slots.shape, x.shape[1]))
    ops._products_in_parts(x, w13, w2, slots, out, biases, Gate(is_gelu, clamp))
    return out


def twin_products(x, w13, w2, slots, **given):
    out = x.new_zeros((*slots.shape, x.shape[1]))
    ref.experts_products(x, w13, w2, slots, out, **given)
    return out


def slots_of(kind, num_tokens, top_k, num_slots, rng):
    """Return experts of tokens, int32 [T, k], no two of a token the same."""
    draws = torch.rand((num_tokens, num_slots), generator=rng, device=rng.device)
    if kind == "one":  # the first of every token
        draws[:, 1] = 2
    found = draws.argsort(1, descending=True)[:, :top_k].int()
    if kind == "holes":
        found[torch.rand(found.shape, generator=rng, device=rng.device) < 0.3] = -1
    return found.contiguous()


def weights_of(num_slots, hidden, ffn, dtype, rng):
    def randn(*shape):
        found = torch.randn(shape, generator=rng, device=rng.device)
        return (found / shape[-1] ** 0.5).to(dtype)

    return randn(num_slots * 2 * ffn, hidden), randn(num_slots * hidden, ffn)


CASES = [
    # tokens, experts of each, slots, hidden, ffn, kind
    (1, 2, 6, 64, 32, "uniform"),
    slow(1, 8, 8, 64, 48, "uniform"),
    (3, 1, 5, 40, 24, "uniform"),
    (16, 2, 4, 64, 32, "one"),
    (17, 2, 40, 32, 16, "uniform"),
    slow(40, 3, 4, 32, 16, "one"),
    (33, 2, 5, 32, 16, "holes"),
    slow(64, 4, 4, 32, 16, "uniform"),
    (70, 2, 5, 40, 24, "holes"),
    (130, 1, 3, 32, 16, "one"),
]


@pytest.mark.thorough_but("33", "130", "3-1")
@pytest.mark.parametrize(("num_tokens", "top_k", "num_slots", "hidden", "ffn", "kind"), CASES)
def test_products_equal_twin(device, rng, num_tokens, top_k, num_slots, hidden, ffn, kind):
    x = torch.randn((num_tokens, hidden), generator=rng, device=device)
    w13, w2 = weights_of(num_slots, hidden, ffn, torch.float32, rng)
    slots = slots_of(kind, num_tokens, top_k, num_slots, rng)
    found = kernel_products(x, w13, w2, slots)
    expected = twin_products(x, w13, w2, slots)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.thorough_but("70")
@pytest.mark.parametrize("num_tokens", [20, 70])
def test_biases_and_a_clamped_gate(device, rng, num_tokens):
    """By the definition too: of each pair alone, in float64."""
    hidden, ffn, limit = 40, 24, 0.7
    x = torch.randn((num_tokens, hidden), generator=rng, device=device)
    w13, w2 = weights_of(5, hidden, ffn, torch.float32, rng)
    biases = tuple(torch.randn(len(w), generator=rng, device=device) for w in (w13, w2))
    slots = slots_of("holes", num_tokens, 2, 5, rng)
    found = kernel_products(x, w13, w2, slots, biases=biases, clamp=(limit, 1.702))
    expected = twin_products(x, w13, w2, slots, biases=biases, clamp=(limit, 1.702))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    token, place = (slots >= 0).nonzero()[3].tolist()
    slot = int(slots[token, place])
    rows, down = (
        slice(slot * 2 * ffn, (slot + 1) * 2 * ffn),
        slice(slot * hidden, (slot + 1) * hidden),
    )
    gate, up = (x[token].double() @ w13[rows].double().T + biases[0][rows]).chunk(2)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    made = ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ w2[down].double().T + biases[1][down]
    torch.testing.assert_close(found[token, place].double(), made, rtol=2e-5, atol=2e-5)


@pytest.mark.thorough_but("70")
@pytest.mark.parametrize(
    ("num_tokens", "is_gelu"), [(5, True), (70, False), slow(5, False), slow(70, True)]
)
def test_products_in_bfloat16(device, rng, num_tokens, is_gelu):
    x = torch.randn((num_tokens, 64), generator=rng, device=device).bfloat16()
    w13, w2 = weights_of(4, 64, 32, torch.bfloat16, rng)
    slots = slots_of("uniform", num_tokens, 2, 4, rng)
    found = kernel_products(x, w13, w2, slots, is_gelu=is_gelu)
    expected = twin_products(x, w13, w2, slots, is_gelu=is_gelu)
    torch.testing.assert_close(found.float(), expected.float(), rtol=3e-2, atol=3e-2)


@pytest.mark.thorough
@pytest.mark.parametrize("total", [5, slow(20), 80])
def test_a_row_depends_on_no_other_and_on_no_place(device, rng, total):
    """Not on the batch (up to 64 tokens, or more), the order of experts, or their slots."""
    x = torch.randn((total, 64), generator=rng, device=device).bfloat16()
    w13, w2 = weights_of(6, 64, 32, torch.bfloat16, rng)
    slots = slots_of("one", total, 2, 6, rng)
    whole = kernel_products(x, w13, w2, slots)
    for size in {5: (1, 3), 20: (1, 16), 80: (65,)}[total]:
        part = kernel_products(x[:size].clone(), w13, w2, slots[:size].contiguous())
        assert torch.equal(part, whole[:size])
    turned = kernel_products(x, w13, w2, slots.flip(1).contiguous())
    assert torch.equal(turned.flip(1), whole)
    order = torch.tensor([3, 5, 0, 2, 1, 4], device=device)
    moved13 = torch.cat([w13.view(6, 64, 64)[order], w13.view(6, 64, 64)[:2]]).view(-1, 64)
    moved2 = torch.cat([w2.view(6, 64, 32)[order], w2.view(6, 64, 32)[:2]]).view(-1, 32)
    moved = kernel_products(x, moved13, moved2, order.argsort().int()[slots.long()].contiguous())
    assert torch.equal(moved, whole)


@pytest.mark.thorough
@pytest.mark.parametrize("total", [slow(7), slow(20), 80])
def test_parts_of_a_step_make_what_the_whole_does(device, rng, total):
    x = torch.randn((total, 64), generator=rng, device=device).bfloat16()
    w13, w2 = weights_of(6, 64, 32, torch.bfloat16, rng)
    slots = slots_of("uniform", total, 3, 6, rng)
    whole = kernel_products(x, w13, w2, slots)
    parts = torch.zeros_like(whole)
    for part in range(3):
        own = torch.where(slots % 3 == part, slots, -1)
        parts += kernel_products(x, w13, w2, own)
    assert torch.equal(parts, whole)


NUM_EXPERTS = 7


def packed_of(weight, form, rng):
    """Return a bfloat16 matrix in codes, or a random one of 4 bits of the same shape."""
    if form == "codes":
        return codes.pack(weight)
    return make(EVERY_CASE[1], *weight.shape, torch.bfloat16, rng)


PARTS = [
    # tokens, how experts are kept, how many are restored together
    (70, "codes", 1),
    (70, "codes", 3),
    (70, "uint4", 5),
    (70, "uint4", NUM_EXPERTS),
    (9, "codes", 3),
    slow(40, "codes", 2),
    slow(130, "uint4", 4),
]


@pytest.mark.thorough_but("uint4-7")
@pytest.mark.parametrize(("total", "form", "together"), PARTS)
def test_experts_restored_in_parts_make_what_a_whole_matrix_does(
    device, rng, monkeypatch, total, form, together
):
    """The last part has fewer, some experts have no tokens, and some pairs no expert."""
    monkeypatch.setattr(sizes, "_EXPERTS_BYTES", together * 128 * 64 * 2)
    x = torch.randn((total, 64), generator=rng, device=device).bfloat16()
    plain = weights_of(NUM_EXPERTS, 64, 64, torch.bfloat16, rng)
    slots = slots_of("holes", total, 3, NUM_EXPERTS, rng)
    slots[(slots == 2) | (slots == NUM_EXPERTS - 1)] = -1
    biases, restore = None, quantised.restore
    if form == "codes":
        biases = tuple(torch.randn(len(e), generator=rng, device=device).bfloat16() for e in plain)
        restore = codes.restore
    packed = [packed_of(each, form, rng) for each in plain]
    memory = torch.empty(together * 128 * 64 * 2, dtype=torch.uint8, device=device)
    parts = [each.with_scratch(memory, NUM_EXPERTS) for each in packed]
    rows = [each.scratch.shape[0] for each in parts]
    assert rows == [together * 128, min(NUM_EXPERTS, 2 * together) * 64]
    found = kernel_products(x, *parts, slots, biases=biases)
    assert torch.equal(found, kernel_products(x, *map(restore, packed), slots, biases=biases))
    expected = twin_products(x, *packed, slots, biases=biases)
    torch.testing.assert_close(found.float(), expected.float(), rtol=3e-2, atol=6e-2)
    assert not found[slots < 0].any()


@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_rows_of_a_quantised_matrix(device, rng, case):
    weight = make(case, 72, 512, torch.bfloat16, rng)
    whole = quantised.restore(weight)
    for start, stop in ((0, 16), (16, 64), (48, 72)):
        assert torch.equal(quantised.restore(weight.rows(start, stop)), whole[start:stop])


def test_rows_of_codes(device, rng):
    weight = torch.randn((64, 128), generator=rng, device=device).bfloat16()
    weight[::7, 3] *= 2.0**40  # bits that are in the table
    packed = codes.pack(weight)
    for start, stop in ((0, 16), (16, 48), (48, 64)):
        assert torch.equal(codes.restore(packed.rows(start, stop)), weight[start:stop])


def test_without_scratch_experts_are_restored_in_a_few_mebibytes(monkeypatch):
    monkeypatch.setattr(sizes, "_EXPERTS_BYTES", 3 * 2 * 64 * 64 + 100)
    weight = codes.pack(torch.ones((7 * 64, 64), dtype=torch.bfloat16))
    bias = torch.arange(7 * 64)
    found = [
        (first, part.shape[0], part.data_ptr(), own.tolist())
        for first, part, own in ops._restored_parts(weight, 7, bias)
    ]
    assert [(first, rows) for first, rows, _, _ in found] == [(0, 192), (3, 192), (6, 64)]
    assert len({place for _, _, place, _ in found}) == 1
    assert [row for _, _, _, own in found for row in own] == bias.tolist()


@pytest.mark.parametrize(
    ("sizes_of_experts", "count"),
    [
        ((128, 2 * 768, 2048, 2), 10),  # w13 of Qwen3 30B-A3B
        ((128, 2048, 768, 2), 21),
        ((8, 2 * 14336, 4096, 2), 1),  # w13 of Mixtral: one is more
        ((6, 64, 64, 2), 6),
        ((128, 24, 2**18, 2), 4),  # two have whole tiles
        ((128, 40, 2**24, 2), 2),
    ],
)
def test_experts_that_are_restored_together_have_a_bound(sizes_of_experts, count):
    assert restored_experts(*sizes_of_experts) == count


MXFP4 = Case("table4", 32, scale_dtype=torch.uint8)


def quantised_products(x, w13, w2, slots, biases):
    """Run the kernels of quantised experts, with a clamped gate."""
    from kernels.triton import experts as triton
    from kernels.triton import quantised_experts

    hidden = x.new_zeros((slots.numel(), w2.shape[1]))
    out = x.new_zeros((slots.numel(), x.shape[1]))
    gate = triton.Gate(clamp=(0.7, 1.702))
    if len(x) <= MAX_SMALL_TOKENS:
        quantised_experts.few(x, w13, slots, hidden, biases[0], gate)
        quantised_experts.few(hidden, w2, slots, out, biases[1])
    else:
        pairs = triton.sort_pairs(slots, w13.num_rows // (2 * w2.num_columns), x.dtype)
        quantised_experts.many(x, w13, pairs, hidden, biases[0], gate)
        quantised_experts.many(hidden, w2, pairs, out, biases[1])
    return out.view(*slots.shape, -1)


@pytest.mark.thorough
@pytest.mark.parametrize("num_tokens", [17, 65])
@pytest.mark.parametrize("case", [MXFP4, *map(slow, QUANTISED)], ids=str)
def test_quantised_experts(device, rng, case, num_tokens):
    """As the twin has them; a row depends on no other, and not on the slot of its expert."""
    hidden, ffn, num_slots = 96, 32, 3
    x = torch.randn((num_tokens, hidden), generator=rng, device=device)
    w13 = make(case, num_slots * 2 * ffn, hidden, torch.float32, rng)
    w2 = make(case, num_slots * hidden, ffn, torch.float32, rng)
    biases = tuple(torch.randn(w.num_rows, generator=rng, device=device) for w in (w13, w2))
    slots = slots_of("one", len(x), 2, num_slots, rng)
    slots[3, 0] = -1
    found = quantised_products(x, w13, w2, slots, biases)
    expected = twin_products(x, w13, w2, slots, biases=biases, clamp=(0.7, 1.702))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    if num_tokens <= MAX_SMALL_TOKENS:
        alone = quantised_products(x[:1].clone(), w13, w2, slots[:1].contiguous(), biases)
        assert torch.equal(alone[0], found[0])


@pytest.mark.thorough_but("4")
@pytest.mark.parametrize(
    ("num_experts", "renormalise"), [(4, False), (60, True), slow(4, True), slow(60, False)]
)
def test_routing_equals_twin(device, rng, num_experts, renormalise):
    logits = torch.randn((9, num_experts), generator=rng, device=device)
    rows = torch.tensor([0, -1, 5, 3, -1, 2, 1, 7, 8], device=device)
    for top_k in (1, 2, min(num_experts, 9)):
        given = {"renormalise": renormalise, "rows_T": rows}
        ids, shares = kernel_route(logits, top_k, **given)
        expected_ids, expected = ref.route(logits, top_k, rounds=False, **given)
        assert torch.equal(ids, expected_ids)
        assert (ids[1] == -1).all()
        assert not shares[4].any()
        torch.testing.assert_close(shares, expected, rtol=1e-5, atol=1e-6)


def test_routing_of_equal_logits_takes_lower_numbers_and_rounds(device, rng):
    logits = torch.zeros((2, 8), device=device, dtype=torch.bfloat16)
    logits[1, 5] = 1
    for run in (kernel_route, lambda *args, **given: ops.route(*args, renormalise=False, **given)):
        ids, shares = run(logits, 3, rounds=True)
        assert ids.tolist() == [[0, 1, 2], [5, 0, 1]]
        assert torch.equal(shares, shares.bfloat16().float())


def test_experts_that_were_chosen_before_have_the_weights_of_the_router(device, rng):
    logits = torch.randn((4, 6), generator=rng, device=device)
    chosen = torch.tensor([[5, 0], [1, 2], [3, 4], [0, 1]], dtype=torch.int32, device=device)
    rows = torch.tensor([1, -1, 2, 3], device=device)
    given = {"renormalise": True, "rows_T": rows, "chosen_Tk": chosen}
    ids, shares = kernel_route(logits, 2, **given)
    expected_ids, expected = ref.route(logits, 2, rounds=False, **given)
    assert torch.equal(ids, expected_ids)
    assert ids.tolist() == [[5, 0], [-1, -1], [3, 4], [0, 1]]
    torch.testing.assert_close(shares, expected)
    own = logits.softmax(-1)[0, [5, 0]]
    torch.testing.assert_close(shares[0], own / own.sum())


@pytest.mark.parametrize("has_shared", [False, True])
def test_sums_equal_twin_and_read_nothing_of_pairs_without_an_expert(device, rng, has_shared):
    from kernels.triton import experts as triton

    products = torch.randn((5, 3, 40), generator=rng, device=device)
    shares = torch.rand((5, 3), generator=rng, device=device)
    ids = slots_of("holes", 5, 3, 4, rng)
    products[ids < 0] = float("nan")
    shared = torch.randn((5, 40), generator=rng, device=device) if has_shared else None
    logits = torch.randn((5, 1), generator=rng, device=device) if has_shared else None
    found = triton.experts_sum(products, shares, ids, shared, logits)
    expected = ref.experts_sum(products, shares, ids, shared, logits)
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_arguments_that_do_not_agree_are_refused():
    x, slots = torch.zeros((2, 64)), torch.zeros((2, 2), dtype=torch.int32)
    w13, w2, out = torch.zeros((128, 64)), torch.zeros((128, 32)), torch.zeros((2, 2, 64))
    with pytest.raises(KernelArgumentError, match=r"experts_products\.w13: expected 64 columns"):
        ops.experts_products(x, w13[:, :32].contiguous(), w2, slots, out)
    with pytest.raises(KernelArgumentError, match=r"w2: expected as many blocks of 64 rows"):
        ops.experts_products(x, w13, w2[:64], slots, out)
    with pytest.raises(KernelArgumentError, match=r"route\.top_k: expected 1 to 4, got 5"):
        ops.route(torch.zeros((2, 4)), 5, renormalise=False, rounds=False)
    with pytest.raises(KernelArgumentError, match=r"experts_sum\.shared: expected logits beside"):
        ops.experts_sum(out, torch.zeros((2, 2)), slots, torch.zeros((2, 64)))
