"""The benchmark of operators: every operator is timed, inputs are right, lines hold the figures."""

import json
import re
from dataclasses import replace

import pytest
import torch

from kernels import bench, bench_timing, bench_weights
from kernels.bench import TieredSequence
from kernels.bench_timing import Timing
from tests.kernels.test_every_op_has_twin import OPERATORS

ON_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


def test_what_is_timed_by_name_is_an_operator():
    timed = {re.sub(r"(silu|gelu)_mul$", "gated_mul", name) for name in bench.OPERATORS}
    assert timed <= {name.split(".")[1] for name in OPERATORS}


@ON_A_CPU
@pytest.mark.parametrize("arguments", [[], ["rms_norm", "gather"]], ids=str)
def test_no_gpu_is_said_and_ends_with_2(arguments, capsys):
    assert bench.main(arguments) == 2
    assert "expected a CUDA device, got none" in capsys.readouterr().err


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(["rms_nrom"])
    assert caught.value.code == 2
    assert "rms_norm" in capsys.readouterr().err


def test_a_line_holds_the_figures():
    timing = Timing("rms_norm 4 x 4", 0.5, 2000.0, 0.75, twin_ms=12.25)
    assert bench_timing.render(timing).split()[-4:] == ["0.5000", "2000.0", "0.750", "12.250"]
    timing = Timing("tiered 1 x 9", 0.5, 48.25, 0.95, ratio=1.0625, is_equal=False)
    assert bench_timing.render(timing).split()[-5:] == [
        "0.5000",
        "48.2",
        "0.950",
        "1.062",
        "DIFFERS",
    ]


def test_a_case_is_held_against_its_rate_and_what_is_beside_it(monkeypatch):
    """A call of two layers takes 8 ms, the part beside it 1 ms, and 2 MB in place 1 ms."""
    monkeypatch.setattr(bench_timing, "captured", lambda run: run)
    monkeypatch.setattr(bench_timing, "median_ms", lambda run, repeats=0: run())
    near = bench_timing.Case("near", lambda: 1.0, 1)
    case = bench_timing.Case(
        "far",
        lambda: 8.0,
        4_000_000,
        twin=lambda: 9.0,
        num_flops=8 * 10**9,
        kind="in place",
        num_layers=2,
        beside=near,
        host_bytes=2_000_000,
        check=lambda: True,
    )
    found = bench_timing.time_case(case, {"copy": 100.0, "in place": 2.0})
    assert found == Timing("far", 4.0, 1.0, 0.5, 2.0, 9.0, ratio=2.0, is_equal=True)


def test_two_tiers_of_the_sequence_are_one(device, monkeypatch):
    monkeypatch.setattr(bench, "host_tensor", lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    sequence = TieredSequence.draw(100, 48, 1, device)
    assert sequence.table.shape == (1, 7)
    assert sequence.has_bits_of_one_tier(sequence.table)
    one_block = torch.full_like(sequence.table, 4)
    lens = torch.tensor([112], dtype=torch.int32, device=device)
    out, other = torch.empty_like(sequence.q), torch.empty_like(sequence.q)
    sequence.attend(sequence.table, lens, out)
    sequence.attend(one_block, lens, other)
    assert not torch.equal(out, other)


CODES = ("linear_codes", "linear_silu_mul_codes", "restore", "pack")


@pytest.fixture
def small_codes(monkeypatch):
    """Cases of weights in codes at sizes for a CPU, two of each."""
    monkeypatch.setattr(bench_weights, "num_copies", lambda size_in, size_out: 2)
    monkeypatch.setattr(bench_weights, "_CODES_SIZES", ((128, 32), (64, 48)))

    def cases(name, device):
        make = bench.CASES[name]
        if name.startswith("linear"):
            return list(make.func(make.args[0], ((128, 32), (64, 64)), device))
        return list(make(device))

    return cases


@pytest.mark.parametrize("name", CODES)
def test_weights_in_codes_are_checked_bit_by_bit(name, small_codes, device):
    for case in small_codes(name, device):
        case.run()
        assert case.check()


def test_bytes_of_codes_are_those_that_are_stored(small_codes, device):
    stored = [128 * 32 * 3 // 2 + 32 + 4 * 2 + 2 * 512]
    stored += [64 * 48 * 3 // 2 + 48 + 4 * 3 + 2 * 512]
    plain = [2 * 128 * 32, 2 * 64 * 48]
    pairs = list(zip(stored, plain, strict=True))
    assert [case.num_bytes for case in small_codes("pack", device)] == [a + b for a, b in pairs]
    found = [case.num_bytes for case in small_codes("restore", device)]
    assert found == [2 * (a + b) for a, b in pairs]
    of_tokens = [case.num_bytes for case in small_codes("linear_codes", device)[:4]]
    each = [num * 2 * (128 + 32) for num in (1, 16, 32, 64)]
    assert of_tokens == [2 * (stored[0] + x_and_out) for x_and_out in each]


def test_one_wrong_code_is_noticed(small_codes, device, monkeypatch):
    """Each case packs weights of its own; the exponents of the first row of each are moved."""
    plain = bench_weights.codes.pack

    def wrong(weight):
        packed = plain(weight)
        packed.first[0] += 30
        return packed

    monkeypatch.setattr(bench_weights.codes, "pack", wrong)
    for name in ("linear_codes", "restore"):
        assert not any(case.check() for case in small_codes(name, device))


def test_what_waits_for_the_card_is_not_captured(monkeypatch):
    monkeypatch.setattr(bench_timing, "captured", lambda run: lambda: 2.0)
    monkeypatch.setattr(bench_timing, "median_ms", lambda run, repeats=0: run())
    case = bench_timing.Case("pack", lambda: 1.0, 1, is_captured=False)
    assert bench_timing.time_case(case, {"copy": 1.0}).kernel_ms == 1.0
    assert bench_timing.time_case(replace(case, is_captured=True), {"copy": 1.0}).kernel_ms == 2.0


@pytest.mark.gpu
def test_a_part_is_timed_on_a_gpu(capsys, tmp_path):
    assert bench.main(["gather", "silu_mul", "--json", str(tmp_path / "rows.json")]) == 0
    document = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert document["rates_gb_s"]["in place"] > 0
    assert len(document["rows"]) == len(capsys.readouterr().out.splitlines()) - 2 == 9
    assert all(0 < row["share"] < 2 for row in document["rows"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(bench.CASES))
def test_cases_run_on_a_gpu(name):
    for case in bench.CASES[name](torch.device("cuda", torch.cuda.current_device())):
        assert case.num_bytes > 0
        case.run()
    torch.cuda.current_stream().synchronize()
