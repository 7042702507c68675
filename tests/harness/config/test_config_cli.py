"""`python -m harness` as a process: help, printed configurations, refusals, and how fast."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from catalogue.files import CONF
from engine.errors import ConfigError
from harness.__main__ import main
from harness.config.cli_args import parse_command_line

ROOT = CONF.parent


def harness(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command somewhere else than in the checkout."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TIGHTFIT_HOME": str(tmp_path / "home")}
    return subprocess.run(
        [sys.executable, "-m", "harness", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run the command as `harness` does, but in this process."""
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Done:
        code = main(list(words))
        return Done(code, *capsys.readouterr())

    return run


def test_options_may_stand_anywhere() -> None:
    for words in (
        ["-m", "model=a", "offload=b"],
        ["model=a", "-m", "offload=b"],
        ["model=a", "offload=b", "--multirun"],
    ):
        line = parse_command_line(words)
        assert line.multirun
        assert line.overrides == ["model=a", "offload=b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--multirn"], "unknown option --multirn. Did you mean --multirun?"),
        (["--model", "olmo7b"], "unknown option --model. A setting: model=VALUE. See"),
        (["--gpu=l4_24gb"], "unknown option --gpu=l4_24gb. A setting: gpu=l4_24gb. See"),
        (
            ["--nothing"],
            "unknown option --nothing. Settings are KEY=VALUE, such as model=glass. See",
        ),
        (
            ["--cpu-offload-gb", "4"],
            "unknown option --cpu-offload-gb. A setting: offload.uva.cpu_offload_gb=VALUE. See",
        ),
        (["--max-model-len=64"], "A setting: engine.max_model_len=64. See"),
        (["--cfg", "jobb"], "invalid choice: 'jobb'"),
        (["--cfg"], "expected one argument"),
        (["--resolve"], "--resolve has an effect only with --cfg"),
        (["--package", "gpu"], "--package has an effect only with --cfg"),
        (["--config-dir", "/nosuch"], "expected a folder for --config-dir"),
    ],
)
def test_wrong_options_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command_line(words)
    assert message in str(caught.value)


def test_help_names_groups_options_keys_and_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# Of the user.\nname: mine\n")
    done = harness(tmp_path, "--help", "--config-dir", str(tmp_path))
    assert done.returncode == 0
    assert done.stderr == ""
    for word in (
        "model=",
        "olmo7b",
        "prefetch",
        "fail_fast",
        "timeout_s",
        "-m, --multirun",
        "mine",
    ):
        assert word in done.stdout
    assert str(tmp_path / "home") in done.stdout
    assert ".local/share/tightfit" in done.stdout
    lines = [line for line in done.stdout.splitlines() if str(tmp_path) not in line]
    assert max(len(line) for line in lines) <= 80
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("engine.max_num_seqs", ["engine.max_num_seqs=64:", "an integer", "run at once"]),
        ("cpu_offload_gb", ["offload.uva.cpu_offload_gb=0.0:", "keyword  cpu_offload_gb"]),
        ("warmup_requests", ["scenario.throughput.warm", "scenario.latency.warm"]),
        ("planner", ["planner.objective=", "planner.kv_tokens="]),
        ("gpu", ["rtx4080_16gb  ", "gpu.memory_gib="]),
        ("experiment", ["fit_7b_16gb"]),
    ],
)
def test_help_of_a_key_says_what_it_means(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mode=plan", "--help", name]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words)
    assert "exit codes" not in out


def test_help_of_an_unknown_key_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "engine.max_num_seq"]) == 2
    assert "Did you mean engine.max_num_seqs?" in capsys.readouterr().err


@pytest.mark.thorough
def test_cfg_prints_yaml_and_the_notice_goes_to_stderr(tmp_path: Path) -> None:
    done = harness(tmp_path, "--cfg", "job", "offload=prefetch")
    assert done.returncode == 0
    content = yaml.safe_load(done.stdout)
    assert content["model"]["name"] == "smollm2_135m"
    assert content["offload"]["prefetch"]["offload_group_size"] == 8
    assert "hydra" not in content
    (line,) = done.stderr.splitlines()
    assert "smollm2_135m" in line
    assert not (tmp_path / "home").exists()


def test_cfg_of_a_sweep_prints_every_point(here: Callable[..., Done]) -> None:
    words = ["+model=glass", "-m", "offload=none,uva", "--cfg", "job", "--package", "offload"]
    done = here(*words)
    assert done.stderr == ""
    backends = [node["offload_backend"] for node in yaml.safe_load_all(done.stdout)]
    assert backends == ["auto", "uva"]


def test_a_part_that_is_null_can_be_printed(here: Callable[..., Done]) -> None:
    done = here("model=glass", "--cfg", "job", "--package", "timeout_s")
    assert (done.returncode, done.stdout) == (0, "null\n")


@pytest.mark.thorough
def test_a_process_that_is_refused_says_one_line_and_has_exit_code_2(tmp_path: Path) -> None:
    done = harness(tmp_path, "+modell=olmo7b")
    assert done.returncode == 2
    assert done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert "Did you mean model?" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nosuch"], "unknown option --nosuch"),
        (["--cfg", "job", "--package", "engin"], "Did you mean engine?"),
        (["offload.uva.cpu_offload_gb=-1"], "expected a number >= 0"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, here: Callable[..., Done]
) -> None:
    done = here(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "home").exists()


def test_a_home_that_cannot_be_made_is_refused(tmp_path: Path, here: Callable[..., Done]) -> None:
    (tmp_path / "home").write_text("a file")
    done = here("model=glass")
    assert done.returncode == 2
    assert "TIGHTFIT_HOME" in done.stderr
    assert "Traceback" not in done.stderr


def test_neither_help_nor_composing_imports_anything_heavy() -> None:
    code = (
        "import sys, io\n"
        "from harness.__main__ import main\n"
        "out, sys.stdout = sys.stdout, io.StringIO()\n"
        "assert main(['--help']) == 0\n"
        "assert 'hydra' not in sys.modules\n"
        "assert main(['model=glass', '--cfg', 'job']) == 0\n"
        "assert main(['offload=uvaa']) == 2\n"
        "sys.stdout = out\n"
        "heavy = {'torch', 'transformers', 'mlflow', 'numpy', 'matplotlib', 'triton', 'pandas'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
