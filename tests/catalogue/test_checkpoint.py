"""The file format, bfloat16 rounding, row order and the intactness check."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from catalogue.checkpoint import is_intact, write_provenance
from catalogue.conversions import bf16_bits, half_split_rows, write_weights


def test_half_split_rows_puts_pairs_half_a_head_apart() -> None:
    rows = np.arange(16, dtype=np.float32)[:, None].repeat(3, axis=1)
    reordered = half_split_rows(rows, 2)[:, 0].astype(int).tolist()
    assert reordered == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_bf16_bits_round_like_torch() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [
            rng.normal(0, 1, 4096).astype(np.float32),
            rng.integers(0, 1 << 16, 512).astype(np.uint32).view(np.float32),  # subnormal
            np.array([0.0, -0.0, 1.00390625, 1.01171875, 3.3e38], dtype=np.float32),  # ties
        ]
    )
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bf16_bits(values), expected)


def test_written_weights_are_read_back_by_safetensors(tmp_path: Path) -> None:
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_weights(tmp_path, {"b.weight": plain.T, "a.weight": bf16_bits(plain)})
    found = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "a.weight": torch.bfloat16,
        "b.weight": torch.float32,
    }
    assert torch.equal(found["a.weight"].float(), torch.from_numpy(plain))
    assert torch.equal(found["b.weight"], torch.from_numpy(plain).T)


@pytest.mark.parametrize("damage", ["shortened", "missing", "other source", "no provenance"])
def test_a_damaged_folder_is_not_intact(tmp_path: Path, damage: str) -> None:
    facts = {"package": "p", "version": "1"}
    (tmp_path / "config.json").write_text("{}")
    write_provenance(tmp_path, facts)
    assert is_intact(tmp_path, facts)
    match damage:
        case "shortened":
            (tmp_path / "config.json").write_text("")
        case "missing":
            (tmp_path / "config.json").unlink()
        case "other source":
            facts = {"package": "p", "version": "2"}
        case _:
            (tmp_path / "provenance.json").unlink()
    assert not is_intact(tmp_path, facts)
