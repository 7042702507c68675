"""The benchmark of two tiers: its inputs are right, and what it prints is what it measured."""

import json

import pytest
import torch

from kernels import bench_kv, bench_kv_cases, bench_kv_prefill
from kernels.triton.tiles import decode_tile


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("arguments", [[], ["decode", "gather"]], ids=str)
def test_no_gpu_is_said_and_ends_with_2(arguments, capsys):
    assert bench_kv.main(arguments) == 2
    assert "expected a CUDA device, got none" in capsys.readouterr().err


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        bench_kv.main(["gathering"])
    assert caught.value.code == 2
    assert "'gather'" in capsys.readouterr().err


def test_a_line_holds_the_figures():
    row = bench_kv.Row("tiered", "1 x 9", "64/4/3", 0.5, 48.25, 0.95, 1.0625, is_equal=False)
    assert bench_kv.render(row).split() == [
        *["tiered", "1", "x", "9", "64/4/3"],
        *["0.5000", "48.2", "0.950", "1.062", "DIFFERS"],
    ]
    row = bench_kv.Row("decode", "1 x 9", "64/4/3", 0.5, 2000.0, 0.75)
    assert bench_kv.render(row).split()[-1] == "0.750"


@pytest.fixture
def no_pinned_memory(monkeypatch):
    def tensors(shape, dtype):
        made = torch.zeros(shape, dtype=dtype)
        return made, made

    for module in (bench_kv_cases, bench_kv_prefill):
        monkeypatch.setattr(module, "host_tensor", tensors)


def test_parts_of_the_prompt_are_those_of_one_pass(no_pinned_memory):
    chunk = bench_kv_prefill._Chunk.of(128, 512, 128, torch.device("cpu"))
    assert chunk.has_bits_of_one_pass()
    chunk.run_parts()
    stale = chunk.out.clone()
    chunk.run_whole()
    assert not torch.equal(chunk.out, stale)


def test_two_tiers_of_the_sequence_are_one(device, no_pinned_memory, monkeypatch):
    monkeypatch.setattr(bench_kv_cases, "_GPU_TOKENS", 48)
    sequence = bench_kv_cases._Sequence.of(100, 1, device)
    tile = decode_tile(128, torch.bfloat16)
    assert sequence.table.shape == (1, 7)
    assert sequence.has_bits_of_one_tier(tile, sequence.table)
    one_block = sequence.table.clone()
    one_block[:] = 4
    lens = torch.tensor([112], dtype=torch.int32, device=device)
    out, other = torch.empty_like(sequence.q), torch.empty_like(sequence.q)
    sequence.attend(tile, sequence.table, lens, out)
    sequence.attend(tile, one_block, lens, other)
    assert not torch.equal(out, other)


@pytest.mark.gpu
def test_a_part_is_timed(capsys, tmp_path):
    assert bench_kv.main(["gather", "--json", str(tmp_path / "kv.json")]) == 0
    document = json.loads((tmp_path / "kv.json").read_text())
    assert document["rates_gb_s"]["in_place"] > 0
    assert len(document["rows"]) == len(capsys.readouterr().out.splitlines()) - 2 == 8
    assert all(0 < row["share"] < 2 for row in document["rows"])
