"""Names, folders and hub ids through the public package; plans without an engine."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch

import engine
import tightfit
from catalogue.checkpoint import ModelUnavailableError
from catalogue.files import tightfit_home
from engine.asked.offload import OffloadWarning
from engine.errors import CapacityError, ConfigError
from engine.model.spec import ModelSpec
from tests.reports.examples import ok_record
from tests.tiny import COMMON

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"gpu_memory_gib": 0.5, "max_num_seqs": 4, "max_num_batched_tokens": 64, "device": "cpu"}


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without models and without a hub."""
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "theirs"))

    def refuse(*args: object, **options: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    return tmp_path


def snapshot(home: Path) -> Path:
    """A tiny model of the hub, downloaded before: sizes and no weights."""
    repository = home / "hub" / "models--org--tiny"
    folder = repository / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | COMMON))
    return folder


def test_importing_and_planning_a_card_loads_no_torch_that_is_not_used() -> None:
    code = "import sys, tightfit; dir(tightfit); print('torch' in sys.modules, len(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    has_torch, count = done.stdout.split()
    assert has_torch == "False"
    assert int(count) < 200


def test_the_names_are_the_engine_s() -> None:
    assert tightfit.SamplingParams is engine.SamplingParams
    assert tightfit.AsyncLLM is engine.AsyncLLM
    assert issubclass(tightfit.LLM, engine.LLM)
    with pytest.raises(AttributeError, match="no attribute 'llm'"):
        _ = tightfit.llm


def test_a_name_is_found_and_its_sizes_are_the_catalogue_s(glass_model_dir: Path) -> None:
    llm = tightfit.LLM("glass", **SMALL)
    try:
        assert llm.config.model.path == str(glass_model_dir)
        assert llm.config.model.spec == llm.spec
        params = tightfit.SamplingParams(max_tokens=4, temperature=0.0)
        found = llm.generate("Alice was", params)[0].outputs[0].token_ids
    finally:
        llm.close()
    direct = engine.LLM(str(glass_model_dir), **SMALL)
    try:
        assert direct.generate("Alice was", params)[0].outputs[0].token_ids == found
    finally:
        direct.close()


def test_random_weights_need_no_download(away: Path) -> None:
    llm = tightfit.LLM("glass", load_format="dummy", **SMALL)
    assert llm.spec.num_parameters == 852_608
    llm.close()
    with pytest.raises(ModelUnavailableError, match="cannot be reached"):
        tightfit.LLM("org/tiny", load_format="dummy", **SMALL)
    snapshot(away / "home")
    llm = tightfit.LLM("org/tiny", load_format="dummy", **SMALL)
    assert llm.spec == ModelSpec.from_hf_config({"model_type": "llama"} | COMMON)
    llm.close()


def test_a_folder_goes_through_as_it_is(away: Path) -> None:
    folder = snapshot(away / "home")
    llm = tightfit.LLM(str(folder), load_format="dummy", **SMALL)
    assert (llm.config.model.path, llm.config.model.spec) == (str(folder), None)
    llm.close()


def test_messages_speak_of_keywords(away: Path) -> None:
    with pytest.raises(ConfigError, match=r"^max_num_batched_tokens: expected at least max_num_s"):
        tightfit.LLM("glass", load_format="dummy", **SMALL | {"max_num_batched_tokens": 3})
    with pytest.raises(ConfigError, match=r"^pin_limit_gib: expected None without a host tier"):
        tightfit.plan("glass", pin_limit_gib=3)
    with pytest.raises(CapacityError, match=r"\nBest fix   choose=True ") as caught:
        tightfit.plan("llama31_8b", gpu="rtx3060_12gb", max_model_len=4096)
    assert not re.search(r"\b(engine|offload|planner|kv|gpu|model)[.=]", str(caught.value))
    with pytest.warns(
        OffloadWarning, match="^offload_backend='uva' is not needed: .* Remove the off"
    ) as caught:
        llm = tightfit.LLM("glass", load_format="dummy", **SMALL, cpu_offload_gb=0.1)
    assert {found.filename for found in caught} == {__file__}
    llm.close()
    with pytest.raises(ModelUnavailableError, match="load_format='dummy'"):
        tightfit.LLM("olmo7b")


def test_a_notebook_shows_a_plan_and_a_record(away: Path) -> None:
    shown = tightfit.plan("glass", gpu="rtx4090_24gb", load_format="dummy")._repr_html_()
    assert shown.startswith("<table><caption>Plan for rtx4090_24gb, ")
    assert "<th>KV on the GPU</th><td>" in shown
    assert shown.count("<tr>") == shown.count("</tr>") > 5
    folder = tightfit_home() / "runs" / "20260101-000000-x"
    folder.mkdir(parents=True)
    record = ok_record(name="<b>", metrics={"latency/ttft_ms/p50": 3.5, "load/total_s": None})
    record.write(folder / "result.json")
    shown = tightfit.read_run()._repr_html_()
    assert "<caption>&lt;b&gt;</caption><tr><th>status</th><td>ok</td></tr>" in shown
    assert "<th>latency/ttft_ms/p50</th><td>3.5</td>" in shown
    assert "load/total_s" not in shown


def test_a_foreign_record_with_an_impossible_rate_is_not_valid(away: Path) -> None:
    folder = tightfit_home() / "runs" / "20260101-000000-y"
    folder.mkdir(parents=True)
    record = ok_record(
        config={"offload": {"uva": {"cpu_offload_gb": 8.0}}},
        environment={"gpu": {"pcie": {"gen": 4, "width": 16}}},
        effective={},
        plan={},
        metrics={"latency/tpot_ms/p50": 20.0},
    )
    record.write(folder / "result.json")
    read = tightfit.read_run()
    assert (record.valid, read.valid) == (True, False)
    assert "50.0 tokens/s of one request are impossible: 8.00 GiB" in read._repr_html_()


def test_the_public_names_are_there() -> None:
    assert all(getattr(tightfit, name).__doc__ for name in tightfit.__all__)
    assert [name for name in dir(tightfit) if name[:1] != "_"] == sorted(tightfit.__all__)
    assert list(inspect.signature(tightfit.plan).parameters)[:2] == ["model", "gpu"]
    assert inspect.signature(tightfit.LLM).parameters["cpu_offload_gb"].default == 0.0


def test_what_is_not_there_is_refused(away: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 'smollm2'\. Did you mean smollm2_135m\?"):
        tightfit.LLM("smollm2")
    with pytest.raises(ModelUnavailableError, match="some-org/some-model is not on this machine"):
        tightfit.LLM("some-org/some-model")
    for door in (tightfit.LLM, tightfit.plan):
        with pytest.raises(ConfigError, match=r"model: expected a folder, a name that .* got 42"):
            door(42)  # type: ignore[operator]
        with pytest.raises(ConfigError, match=r"model: expected one of .*, a folder, .* got ''"):
            door("")  # is not the folder in which Python runs
    with pytest.raises(ConfigError, match=r"plan: unknown keyword 'gpus'\. Did you mean gpu\?"):
        tightfit.plan("glass", gpus="rtx4080_16gb")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="a card of conf/gpu, got '16'"):
        tightfit.plan("glass", gpu=16)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_a_card_that_is_not_here_is_planned(away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for a device"))
    plan = tightfit.plan("llama31_8b", gpu="rtx4090_24gb", max_model_len=4096)
    assert plan.facts.name == "rtx4090_24gb"
    assert plan.facts.total_bytes == int(23.98828125 * 2**30)
    less = tightfit.plan("llama31_8b", gpu="rtx4090_24gb", gpu_memory_gib=20, max_model_len=4096)
    assert less.gpu_budget_bytes < plan.gpu_budget_bytes
    with pytest.raises(CapacityError):
        tightfit.plan("llama31_8b", gpu="rtx3060_12gb", max_model_len=4096)
    with pytest.raises(ConfigError, match=r"got 'rtx4090'\. Did you mean rtx4090_24gb or "):
        tightfit.plan("glass", gpu="rtx4090")
    with pytest.raises(ConfigError, match=r"leave gpu out and give gpu_memory_gib=12, link_gb_s="):
        tightfit.plan("glass", gpu="rtx4090")


def test_a_plan_without_a_card_is_this_machine_s_or_of_one_that_is_described(
    away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tightfit.plan("smollm2_135m", **SMALL | {"gpu_memory_gib": 1}, max_model_len=64)
    assert here.facts.kind == "cpu"
    monkeypatch.setattr("tightfit.doors.has_gpu", lambda: False)
    with pytest.raises(
        CapacityError, match=r"this plan is for the CPU\. gpu='rtx4080_16gb' plans for that card"
    ):
        tightfit.plan("smollm2_135m", **SMALL | {"gpu_memory_gib": 0.1, "device": "auto"})
    own = tightfit.plan("llama31_8b", gpu_memory_gib=24, link_gb_s=16, max_model_len=4096)
    assert (own.facts.name, own.dtype) == ("a card of 24 GiB", "bfloat16")
    assert repr(own) == (
        "MemoryPlan(a card of 24 GiB, bfloat16: 0 of 15 GiB of weights off the GPU; "
        f"{own.kv_tokens:,} tokens of KV on the GPU)"
    )


def test_a_plan_is_the_one_that_is_built(away: Path) -> None:
    plan = tightfit.plan("glass", load_format="dummy", **SMALL)
    llm = tightfit.LLM("glass", load_format="dummy", **SMALL)
    built, planned = llm.plan.to_dict(), plan.to_dict()
    llm.close()
    for found in (built, planned):
        del found["host"]["limit_bytes"]  # what is free now
    assert built == planned


@pytest.mark.parametrize("model", ["~/nope", "./nope", "/nope"])
def test_a_folder_that_is_not_there_is_named_without_the_catalogue(model: str) -> None:
    with pytest.raises(ConfigError, match="expected an existing folder or file, got"):
        tightfit.plan(model)


def test_notes_of_a_plan_speak_in_keywords() -> None:
    found = tightfit.plan("smollm2_135m", gpu="rtx4080_16gb", cpu_offload_gb=0.1)
    text = " ".join(found.notes)
    assert "Remove the offload settings" in text
    assert "offload." not in text
    assert "offload=none" not in text
