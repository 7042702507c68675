from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.arguments import CODES_PARTS, Codes, TooManyEscapesError, empty_codes
from kernels.ops import codes, linear
from kernels.ops.checks import KernelArgumentError
from kernels.sizes import codes_capacity, has_codes, pack_chunk_rows, pack_scratch_bytes
from tests.kernels.cases import randn

SHAPES = [(16, 64), (32, 192), (80, 64), (16, 1024)]


def restored_slowly(packed: Codes) -> torch.Tensor:
    """The weights, lane after lane from the description of the layout, in plain Python."""
    num_rows, num_columns = packed.shape
    first, offsets = packed.first.tolist(), packed.offsets.tolist()
    table = packed.table.tolist()
    bits = [[0] * num_columns for _ in range(num_rows)]
    for n16 in range(num_rows // 16):
        for k64 in range(num_columns // 64):
            code_words, byte_words = packed.codes[n16, k64].tolist(), packed.bytes[n16, k64]
            for h in (0, 1):
                words = byte_words[h].tolist()
                for lane in range(32):
                    g, t = lane >> 2, lane & 3
                    for j in (0, 1):
                        c0 = 64 * k64 + 32 * h + 16 * j + 2 * t
                        for i in range(4):
                            row = 16 * n16 + g + 8 * (i % 2)
                            word, code_word = words[lane][2 * j + i // 2], code_words[lane]
                            for high in (0, 1):
                                half = word >> 16 * high & 0xFFFF
                                if i % 2:
                                    half = half >> 8 | (half & 0xFF) << 8
                                code = code_word[2 * h + j] >> 16 * high + 4 * i & 15
                                value = half & 0x807F | first[row] + code << 7
                                if code == 15:
                                    index = half >> 8 & 0x80 | half & 0x7F
                                    value = table[offsets[n16] + index]
                                column = c0 + 8 * (i // 2) + high
                                bits[row][column] = (value & 0xFFFF ^ 0x8000) - 0x8000
    return torch.tensor(bits, dtype=torch.int16)


def bits_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16)


def assert_exact(weight: torch.Tensor) -> Codes:
    packed = codes.pack(weight)
    assert torch.equal(bits_of(codes.restore(packed)), bits_of(weight))
    return packed


def normal(shape, seed=0):
    return randn(shape, torch.bfloat16, torch.Generator().manual_seed(seed))


def escapes(exponents: list[int]) -> tuple[int, int]:
    """The first exponent of the best window of a row, and how many are out of it."""
    each = Counter(exponents)
    counts = [sum(each[e] for e in range(first, first + 15)) for first in range(242)]
    return counts.index(max(counts)), len(exponents) - max(counts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layout_is_the_one_described(shape):
    weight = normal(shape)
    weight.view(-1)[::97] *= 2.0**-30
    packed = assert_exact(weight)
    assert torch.equal(restored_slowly(packed), bits_of(weight))
    assert packed.shape == shape
    assert packed.bytes.shape == (shape[0] // 16, shape[1] // 64, 2, 32, 4)


def test_every_bit_pattern_survives():
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    # A row has one sign and 16 exponents, each with every mantissa: the last one escapes.
    near = patterns.view(32, 2048)[:, : 15 * 128]
    assert_exact(near.contiguous().view(torch.bfloat16))
    # Each as an escape: 256 in a group, far from the window that zeros have.
    far = torch.zeros(256 * 16, 128, dtype=torch.int16)
    far.view(256, -1)[:, ::8] = patterns.view(256, 256)
    zero_window = patterns.view(256, 256) >> 7 & 0xFF < 15
    count = int((~zero_window).sum())
    assert count == 2 * 241 * 128
    with pytest.raises(TooManyEscapesError, match=f"got {count} and 256"):
        codes.pack(far.view(torch.bfloat16))
    # More than a table of that shape holds, so that it is made larger.
    packed = replace(
        empty_codes(*far.shape, "cpu"), table=torch.ones(count + 256, dtype=torch.int16)
    )
    assert codes.pack_into(far.view(torch.bfloat16), packed).total == count
    assert torch.equal(bits_of(codes.restore(packed)), far)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3e38, float("inf"), float("nan"), 1e-40])
def test_a_constant_matrix_needs_no_escape(value):
    packed = assert_exact(torch.full((32, 64), value, dtype=torch.bfloat16))
    assert int(packed.table.count_nonzero()) == 0


def test_escapes_of_the_last_window_keep_their_signs():
    weight = torch.full((16, 64), float("inf"), dtype=torch.bfloat16)
    weight[3, :2] = torch.tensor([1.5, -2.0])
    weight[3, 2:] = -3e38  # beside infinities its window is the last one
    weight[3, 9] = float("inf")
    packed = assert_exact(weight)
    assert packed.first[3] == 241


@st.composite
def matrices(draw):
    """Matrices of several distributions, row after row."""
    shape = draw(st.sampled_from(SHAPES))
    weight = normal(shape, draw(st.integers(0, 2**16)))
    kind = draw(st.sampled_from(["normal", "outliers", "huge row", "zero rows", "tails", "scales"]))
    if kind == "outliers":
        weight.view(-1)[:: draw(st.integers(40, 400))] *= 2.0 ** draw(st.integers(-120, 120))
    elif kind == "huge row":
        weight[draw(st.integers(0, shape[0] - 1))] *= 2.0**100
    elif kind == "zero rows":
        weight[:: draw(st.integers(1, 3))] = draw(st.sampled_from([0.0, -0.0]))
    elif kind == "tails":
        weight = (weight.float() ** 3).bfloat16()
    elif kind == "scales":
        weight *= 2.0 ** torch.arange(shape[0]).unsqueeze(1)
    return weight


@settings(max_examples=20, deadline=None)
@given(weight=matrices())
def test_any_distribution_is_exact_or_refused(weight):
    exponents = (bits_of(weight).int() >> 7 & 0xFF).tolist()
    windows = [escapes(row) for row in exponents]
    groups = [sum(n for _, n in windows[at : at + 16]) for at in range(0, len(windows), 16)]
    if max(groups) > 256 or sum(groups) > codes_capacity(*weight.shape):
        with pytest.raises(TooManyEscapesError, match=f"got {sum(groups)} and {max(groups)}"):
            codes.pack(weight)
        return
    packed = assert_exact(weight)
    assert packed.first.tolist() == [first for first, _ in windows]
    assert packed.offsets.tolist() == [sum(groups[:at]) for at in range(len(groups))]
    used = sum(groups)
    escaped = [
        value
        for row, (first, _), values in zip(
            exponents, windows, bits_of(weight).tolist(), strict=True
        )
        for e, value in zip(row, values, strict=True)
        if not first <= e <= first + 14
    ]
    assert packed.table[:used].tolist() == escaped
    assert int(packed.table[used:].count_nonzero()) == 0


def test_of_equal_windows_the_lowest_is_taken():
    weight = torch.ones(16, 64, dtype=torch.bfloat16)
    weight[:8, 32:] = 2.0**100
    assert assert_exact(weight).first.tolist() == [127 - 14] * 16


@pytest.mark.parametrize(
    ("rows", "columns", "step", "message"),
    [
        (16, 64, 3, "at most 256 escapes and 256 in 16 rows, got 352 and 352"),
        (64, 64, 8, "at most 256 escapes and 256 in 16 rows, got 512 and 128"),
        (128, 1600, 700, "at most 512 escapes and 256 in 16 rows, got 384 and 384"),
    ],
)
def test_too_many_escapes_are_refused_with_their_count(rows, columns, step, message):
    weight = torch.ones(rows, columns, dtype=torch.bfloat16)
    if rows < 128:
        weight[:, ::step] = 2.0**60
    else:
        weight[:16, :24] = 2.0**60
    with pytest.raises(TooManyEscapesError, match=message):
        codes.pack(weight)
    packed = empty_codes(rows, columns, "cpu")
    assert not codes.pack_into(weight, packed).fits(packed.capacity)


def test_rows_packed_and_restored_in_turn_are_the_matrix(monkeypatch):
    weight = normal((80, 192))
    weight.view(-1)[::300] = 2.0**60
    whole, parts = codes.pack(weight), empty_codes(80, 192, "cpu")
    monkeypatch.setattr("kernels.ref.codes.pack_chunk_rows", lambda columns: 32)
    parts.table.fill_(7)
    assert codes.pack_into(weight, parts) == (52, 11)
    for name in CODES_PARTS:
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name
    assert torch.equal(codes.restore(parts), weight)


@pytest.mark.parametrize("columns", [64, 4096, 28672, 2**20])
def test_scratch_is_bounded(columns):
    assert pack_chunk_rows(columns) % 16 == 0
    most = max(64 * 2**20, 16 * (12 * columns + 5120))
    assert 0 < pack_scratch_bytes(10**6, columns) <= most
    assert pack_scratch_bytes(16, columns) == 16 * (12 * columns + 5120)


@pytest.mark.parametrize("shape", [(2048, 512), (12288, 4096), (1024, 1024), (100352, 4096)])
def test_bytes_are_at_most_0755_of_bfloat16(shape):
    packed = empty_codes(*shape, "meta")
    sizes = [getattr(packed, name).nbytes for name in CODES_PARTS]
    assert sum(-(-size // 256) * 256 for size in sizes) <= 0.755 * 2 * shape[0] * shape[1]


def test_shapes_that_fill_no_tiles_are_refused():
    for shape in ((8, 64), (16, 32), (24, 64), (16, 96), (0, 64)):
        assert not has_codes(*shape)
        with pytest.raises(KernelArgumentError, match=r"pack\.weight: .* 16 rows and of 64 col"):
            codes.pack(torch.zeros(shape, dtype=torch.bfloat16))
    assert has_codes(16, 64)
    with pytest.raises(KernelArgumentError, match=r"pack\.weight: .*bfloat16"):
        codes.pack(torch.zeros(16, 64, dtype=torch.float16))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("name", "how"),
    [("linear", {}), ("linear_gated_mul", {}), ("linear_gated_mul", {"is_gelu": True})],
    ids=["linear", "silu", "gelu"],
)
def test_door_gives_the_bits_of_the_plain_operator(name, how, has_bias):
    weight, bias = normal((96, 128), 1), normal((96,), 2) if has_bias else None
    packed = codes.pack(weight)
    for shape in ((1, 128), (40, 128), (2, 3, 128), (0, 128)):
        x = normal(shape, 3)
        expected = getattr(linear, name)(x, weight, bias, **how)
        assert torch.equal(getattr(codes, name)(x, packed, bias, **how), expected)


def test_gates_that_end_within_a_tile_are_refused():
    packed, x = codes.pack(normal((48, 64))), normal((3, 64))
    assert codes.linear(x, packed).shape == (3, 48)
    with pytest.raises(KernelArgumentError, match=r"codes: expected a multiple of 32 rows"):
        codes.linear_gated_mul(x, packed)


def test_control_a_wrong_escape_changes_the_product():
    weight = normal((32, 64))
    weight[3, 5] = 2.0**40
    packed = codes.pack(weight)
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    before = codes.linear(x, packed)
    packed.table[0] += 1 << 7
    assert codes.linear(x, packed)[0, 3] == 2 * before[0, 3]


@pytest.mark.parametrize("scale", [None, 11.3])
def test_rows_are_restored_alone(scale):
    table = normal((64, 128))
    table[:, 7] *= 2.0**50
    packed = codes.pack(table)
    for ids in (torch.tensor([3, 63, 8, 3, 16]), torch.zeros(0, dtype=torch.int64)):
        assert torch.equal(codes.embedding(ids, packed, scale), linear.embedding(ids, table, scale))


def test_restore_writes_what_it_is_given():
    weight = normal((32, 64))
    out = torch.empty_like(weight)
    assert codes.restore(codes.pack(weight), out) is out
    assert torch.equal(out, weight)


def test_door_refuses_what_does_not_fit():
    packed = codes.pack(normal((32, 128)))
    x = normal((2, 128))
    shifted = normal((32 * 128 + 1,))[1:].view(32, 128)
    for message, call in (
        (r"linear\.x: .*\(2, 128\)", lambda: codes.linear(x[:, :64], packed)),
        (r"linear\.x: .*bfloat16", lambda: codes.linear(x.float(), packed)),
        (r"linear\.bias: .*\(32\)", lambda: codes.linear(x, packed, normal((31,)))),
        (r"embedding\.ids: .*int64", lambda: codes.embedding(torch.tensor([1.0]), packed)),
        (r"restore\.out: .*\(32, 128\)", lambda: codes.restore(packed, x)),
        (r"restore\.out: .*contig", lambda: codes.restore(packed, normal((32, 256))[:, :128])),
        (r"restore\.out: .*2 more", lambda: codes.restore(packed, shifted)),
        (r"pack_into\.codes: .*\(16, 128\)", lambda: codes.pack_into(normal((16, 128)), packed)),
    ):
        with pytest.raises(KernelArgumentError, match=message):
            call()


def test_tensors_of_no_one_matrix_are_refused_when_codes_are_made():
    packed = codes.pack(normal((32, 128)))
    for part, value in (
        ("table", packed.table[:255]),
        ("bytes", packed.bytes[:1]),
        ("codes", packed.codes.short()),
        ("offsets", packed.offsets[:1]),
        ("scratch", torch.empty(32, 127, dtype=torch.bfloat16)),
    ):
        with pytest.raises(ValueError, match=rf"codes\.{part}: expected"):
            replace(packed, **{part: value})


@pytest.mark.gpu
@settings(max_examples=20, deadline=None)
@given(weight=matrices())
def test_packing_on_a_gpu_gives_the_same_codes(weight):
    from kernels.ref import codes as ref

    try:
        expected = codes.pack(weight)
    except TooManyEscapesError:
        with pytest.raises(TooManyEscapesError):
            codes.pack(weight.cuda())
        return
    found = codes.pack(weight.cuda())
    for name in CODES_PARTS:
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    assert torch.equal(bits_of(ref.restore(found).cpu()), bits_of(weight))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 11264), (65536, 64)], ids=str)
def test_packing_on_a_gpu_stays_within_its_scratch(shape):
    weight = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    packed = empty_codes(*shape, "cuda")
    codes.pack_into(weight, packed)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    codes.pack_into(weight, packed)
    assert torch.cuda.max_memory_allocated() - before <= pack_scratch_bytes(*shape)


@pytest.mark.parametrize("part", ["bytes", "codes"])
def test_codes_that_kernels_could_not_read_are_refused(part: str) -> None:
    packed = codes.pack(torch.ones((16, 64), dtype=torch.bfloat16))
    usual = getattr(packed, part)
    memory = torch.zeros(usual.numel() + 8, dtype=torch.int32)
    begin = -(memory.data_ptr() // 4) % 4 + 1
    moved = memory[begin:][: usual.numel()].view(usual.shape)
    with pytest.raises(
        ValueError, match=rf"codes\.{part}: expected memory at a multiple of 16 .*4"
    ):
        replace(packed, **{part: moved})
