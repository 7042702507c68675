"""`tightfit models pack`, and model.keep_lossless in a configuration of the harness."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tightfit
from catalogue.files import kept_folder
from engine.asked.config import EngineSettings
from engine.device.cpu import CPUDevice
from engine.errors import ConfigError
from engine.model.checkpoint import copy_folder
from engine.weights.kept import alone
from harness.config.engine import check_settings, engine_config, reference_config
from harness.config.schema import ModelNode, SystemConfig
from harness.models import pack
from tests.harness.cases import run_config
from tests.tiny import hf_model, save

SIZES = {"vocab_size": 160, "intermediate_size": 128}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(hf_model("llama", **SIZES), tmp_path / "mine", "bfloat16")


def test_the_command_says_what_it_packed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack([str(folder), "--device", "cpu"], "pack") == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "mine: packed 0.00 of 0.00 GiB"
    first, counts, ratio, escapes, *plain = said.out.splitlines()
    assert first == f"mine: {copy_folder(kept_folder(), folder)}"
    assert counts.startswith("  13 tensors in codes, 13 of them packed now; 0.000 of 0.000 GiB")
    assert ratio.startswith("  in codes: ")
    assert ", ratio 0.8" in ratio  # of matrices this small
    assert "most in model.layers." in escapes or "most in lm_head" in escapes
    assert f"  plain: model.embed_tokens.weight ({160 * 64 * 2} bytes): looked up by row" in plain
    assert any(line.endswith("no matrix") for line in plain)
    assert pack([str(folder), "--device", "cpu"], "pack") == 0
    again = capsys.readouterr()
    assert again.err == ""
    assert "13 tensors in codes, 0 of them packed now" in again.out
    assert again.out.splitlines()[2:] == said.out.splitlines()[2:]


def test_what_was_packed_ahead_is_read_by_the_public_door(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack([str(folder), "--device", "cpu"], "pack")
    assert "ratio" in capsys.readouterr().out
    small: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "gpu_memory_gib": 0.125}
    llm = tightfit.LLM(str(folder), weight_format="lossless", max_num_seqs=2, **small)
    assert llm.load_report.moved["kept"] > 0
    llm.engine.store.close()


def test_a_damaged_copy_is_named_and_packed_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack([str(folder), "--device", "cpu"], "pack")
    [file] = copy_folder(kept_folder(), folder).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    assert pack([str(folder), "--device", "cpu"], "pack") == 0
    said = capsys.readouterr()
    assert f"{file.name} is damaged (checksums differ)" in said.err
    assert "13 of them packed now" in said.out


def test_every_weight_with_too_many_escapes_stays_plain_and_that_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor[:, ::3].mul_(2.0**30)
    save_file(tensors, file, metadata={"format": "pt"})
    assert pack([str(folder), "--device", "cpu"], "pack") == 0
    out = capsys.readouterr().out
    assert "  0 tensors in codes" in out
    assert "ratio 1.0000" in out
    assert "expected at most 256" in out
    assert not list(copy_folder(kept_folder(), folder).glob("*.safetensors"))


@pytest.mark.parametrize(
    ("dtype", "code", "why"),
    [("float16", 2, "expected weights in bfloat16, got float16"), ("float32", 2, "got float32")],
)
def test_other_dtypes_are_refused(
    tmp_path: Path, dtype: str, code: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(hf_model("llama", **SIZES), tmp_path / "other", dtype)
    assert pack([str(folder)], "pack") == code
    assert why in capsys.readouterr().err


def test_a_full_disk_and_another_process_are_told_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with alone(copy_folder(kept_folder(), folder)):
        assert pack([str(folder), "--device", "cpu"], "pack") == 3
    assert "another process writes this copy" in capsys.readouterr().err
    monkeypatch.setattr("engine.weights.kept.SPARE_BYTES", 2**60)
    assert pack([str(folder), "--device", "cpu"], "pack") == 3
    [line] = capsys.readouterr().err.splitlines()
    assert "GiB free at" in line
    kept_folder().rename(kept_folder().with_name("before"))
    kept_folder().write_text("")
    assert pack([str(folder), "--device", "cpu"], "pack") == 3
    [line] = capsys.readouterr().err.splitlines()
    assert f"writing {kept_folder()} failed" in line


def test_a_run_s_settings_reach_the_engine_and_its_reference_keeps_nothing(folder: Path) -> None:
    node = ModelNode(name="mine", path=str(folder), keep_lossless=True)
    config = run_config(model=node, engine=EngineSettings(weight_format="lossless"))
    check_settings(config)
    asked = engine_config(config, folder)
    assert asked.model.keep_lossless
    assert asked.kept_folder == str(kept_folder())
    assert not reference_config(config, folder).model.keep_lossless
    without = replace(config, engine=EngineSettings())
    for refused, why in (
        (without, "got checkpoint: nothing is packed"),
        (replace(config, system=SystemConfig(kind="accelerate")), "with system=accelerate"),
    ):
        with pytest.raises(ConfigError, match=f"model.keep_lossless: .*{why}"):
            check_settings(refused)
    with pytest.raises(ConfigError, match=r"model.keep_lossless: .*with load_format=dummy"):
        replace(node, load_format="dummy")


def test_a_full_gpu_is_told_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128 MiB")

    monkeypatch.setattr(CPUDevice, "scratch", full)
    assert pack([str(folder), "--device", "cpu"], "pack") == 3
    [line] = capsys.readouterr().err.splitlines()
    words = r"error: pack: expected [\d.]+ GiB of free GPU memory .* on the CPU \(--device cpu\)\.$"
    assert re.match(words, line)
