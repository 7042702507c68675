"""Command lines and files of settings."""

import json
from pathlib import Path

import pytest

from engine.asked.keywords import config_from_keywords
from engine.errors import ConfigError
from server.flags import as_flags, parse

TRANSFER = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"num_cpu_blocks": 50_000},
}


def test_the_published_launcher_s_flags_are_taken_literally() -> None:
    line = (
        "--model /models/coder --dtype auto --max-model-len 52000 --gpu-memory-utilization 0.88 "
        "--enforce-eager --max-num-seqs 16 --tensor-parallel-size 1 --enable-prefix-caching"
    )
    asked = parse([*line.split(), "--kv-transfer-config", json.dumps(TRANSFER)])
    assert asked.model == "/models/coder"
    config = config_from_keywords(asked.model, asked.keywords)
    assert (config.engine.max_model_len, config.engine.max_num_seqs) == (52_000, 16)
    assert config.engine.gpu_memory_utilization == 0.88
    assert config.engine.enforce_eager
    assert config.kv.enable_prefix_caching
    assert config.kv.num_cpu_blocks == 50_000


def test_flags_for_the_front_of_vllm_are_taken_where_they_mean_the_same() -> None:
    line = "m --disable-log-requests --enable-auto-tool-choice --uvicorn-log-level info -tp 1"
    assert parse(line.split()).keywords == {"tensor_parallel_size": 1}
    for typed, reason in {
        "--enable-log-requests": "set --log-prompts",
        "--no-enable-auto-tool-choice": "--tool-call-parser none",
        "--uvicorn-log-level debug": "--no-access-log",
        "-tp 2": "several GPUs",
        "-q awq": "quantization='awq': not supported",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            parse(["m", *typed.split()])


def test_flags_of_the_issue_and_their_short_forms() -> None:
    line = "olmo7b --cpu-offload-gb 8 --kv-cpu-gib 4 --weight-format auto --port 9000"
    asked = parse(line.split())
    assert asked.keywords == {"cpu_offload_gb": 8.0, "cpu_gib": 4.0, "weight_format": "auto"}
    assert asked.server.port == 9000
    assert parse(["m", "--offload", "auto"]).keywords == {"choose": True}
    assert parse(["m", "--offload", "uva"]).keywords == {"offload_backend": "uva"}
    assert parse(["m", "--no-enforce-eager"]).keywords == {"enforce_eager": False}
    assert parse(["m", "--offload-params", "mlp.a", "mlp.b"]).keywords == {
        "offload_params": ["mlp.a", "mlp.b"]
    }


def test_a_file_has_flat_keys_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: olmo7b\nmax-model-len: 4096\nmax_num_seqs: 4\nkv-transfer-config: {TRANSFER}\n"
        "enable-prefix-caching: true\nserved-model-name: [a, 0e9e]\ndrain-s: 5\n",
        encoding="utf-8",
    )
    asked = parse(["--config", str(file), "--max-num-seqs", "8"])
    assert asked.model == "olmo7b"
    assert asked.keywords == {
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "kv_transfer_config": TRANSFER,
        "enable_prefix_caching": True,
    }
    assert (asked.server.served_model_name, asked.server.drain_s) == (["a", "0e9e"], 5)
    file.write_text("max-model-length: 4096\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="Did you mean max_model_len"):
        parse(["m", "--config", str(file)])


@pytest.mark.parametrize("keys", ["port: 1\nport: 2", "max-num-seqs: 1\nmax_num_seqs: 2"])
def test_a_key_that_a_file_has_twice_is_refused(tmp_path: Path, keys: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: olmo7b\n{keys}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="twice"):
        parse(["--config", str(file)])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "serve MODEL"),
        (["a", "--model", "b"], "one model"),
        (["a", "--offload", "some"], "none, auto, uva, prefetch, experts"),
        (["a", "--offload", "auto", "--choose"], "got both"),
        (["a", "--kv-transfer-config", "{"], "kv-transfer-config"),
        (["a", "--max-num-queued-reqs", "0"], "max_num_queued_reqs"),
    ],
)
def test_what_is_refused(line: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(line)


def test_keys_come_from_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n", encoding="utf-8")
    monkeypatch.setenv("TIGHTFIT_API_KEY", "three")
    line = ["m", "--host", "0.0.0.0", "--api-key", "zero", "--api-key-file", str(file)]
    settings = parse(line).server
    assert settings.keys() == ["zero", "one", "two", "three"]
    assert "zero" not in repr(settings)
    monkeypatch.delenv("TIGHTFIT_API_KEY")
    assert parse(["m"]).server.keys() == []
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="one key a line"):
        parse(line).server.keys()


@pytest.mark.parametrize(
    ("told", "flags"),
    [
        ("engine.max_model_len: expected 2, got 1.", "--max-model-len: expected 2, got 1."),
        (
            "a folder (model.path=FOLDER), or weights (model.load_format=dummy).",
            "a folder (FOLDER), or weights (--load-format dummy).",
        ),
        ("Set offload=auto, or kv.cpu_gib=2.", "Set --offload auto, or --cpu-gib 2."),
        (
            "set engine.enforce_eager=true kv.enable_prefix_caching=false",
            "set --enforce-eager --no-enable-prefix-caching",
        ),
        ("lower offload.uva.cpu_offload_gb.", "lower --cpu-offload-gb."),
        ("server.log_prompts: expected access_log", "--log-prompts: expected --access-log"),
        ("port: expected a seed of /a/max_num_seqs", "port: expected a seed of /a/max_num_seqs"),
        (
            "kv_transfer_config.kv_connector: ask with cpu_gib.",
            "kv_transfer_config.kv_connector: ask with --cpu-gib.",
        ),
    ],
)
def test_messages_speak_of_flags(told: str, flags: str) -> None:
    assert as_flags(told) == flags


def test_flags_of_other_engines_are_taken_where_they_change_nothing() -> None:
    line = ["--trust-remote-code", "--no-enable-chunked-prefill", "--quantization", "awq"]
    for flags, told in zip((line[:1], line[1:2], line[2:]), REASONS, strict=True):
        with pytest.raises(ConfigError) as caught:
            parse(["model", *flags])
        assert as_flags(str(caught.value)).startswith(told)
    inert = "--pipeline-parallel-size 1 --kv-cache-dtype auto --enable-chunked-prefill"
    asked = parse(["model", *inert.split(), "--disable-log-stats", "--tokenizer-mode", "auto"])
    assert config_from_keywords("model", asked.keywords) == config_from_keywords("model", {})


REASONS = (
    "--trust-remote-code: not supported: no code",
    "--no-enable-chunked-prefill: not supported: prompts",
    "quantization='awq': not supported: how a checkpoint",
)
