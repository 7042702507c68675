"""What `tightfit doctor` makes of a machine: each line ok, warn and bad, and the exit code."""

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tightfit import doctor
from tightfit.__main__ import main
from tightfit.doctor import Facts, judge

GIB = 1 << 30
PCIE = {"gen": 1, "width": 16, "max_gen": 4, "max_width": 16}
GPU = {
    "name": "RTX 4080",
    "memory_bytes": 16 * GIB,
    "driver": "580.1",
    "cuda_driver": "13.0",
    "pcie": PCIE,
}
GOOD = Facts(
    python=(3, 11),
    torch="2.13.0",
    torch_cuda="13.0",
    cuda_works=True,
    cuda_bindings=True,
    gpu=GPU,
    gpu_free_bytes=15 * GIB,
    gpu_holders=(),
    capability=(8, 9),
    link={"h2d_gb_s": 25.04},
    link_age="2 days ago",
    ram_free_bytes=40 * GIB,
    memlock_bytes=None,
    huge_pages="madvise",
    home=Path("/data/tightfit"),
    home_error="",
    disk_free_bytes=100 * GIB,
    models=("glass",),
    models_bytes=GIB,
    has_mlflow=True,
    store=Path("/data/tightfit/mlflow.db"),
    store_error="",
    store_runs=7,
)
NO_GPU = {"gpu": None, "gpu_free_bytes": None, "capability": None, "cuda_works": None}


def lines(**changes: Any) -> dict[str, tuple[str, str, str]]:
    found = judge(replace(GOOD, **changes))
    return {line.name: (line.verdict, line.found, line.remedy) for line in found}


def test_a_good_machine_is_ok_throughout() -> None:
    found = lines()
    assert {verdict for verdict, _, _ in found.values()} == {"ok"}
    assert {remedy for _, _, remedy in found.values()} == {""}
    assert found["PCIe"][1] == ("generation 1 x16 now, 4 x16 at most (an idle card clocks down)")
    assert found["link"][1] == "copies 25.0 GB/s, probed 2 days ago"
    assert found["GPU memory"][1] == "15.00 of 16.00 GiB free"


@pytest.mark.parametrize(
    ("name", "changes", "verdict", "words"),
    [
        ("Python", {"python": (3, 13)}, "bad", "Use Python 3.11 or 3.12."),
        ("torch", {"torch": None}, "bad", "pip install torch"),
        ("torch", {"torch_cuda": None}, "bad", "install the CUDA build of torch"),
        ("torch", {"cuda_works": False}, "bad", "the driver offers CUDA 13.0"),
        ("torch", {"cuda_bindings": False}, "bad", "pip install cuda-bindings"),
        ("torch", {**NO_GPU, "torch_cuda": None, "cuda_bindings": False}, "ok", ""),
        ("driver", NO_GPU, "warn", "emulated on the CPU"),
        ("GPU", NO_GPU, "warn", "tightfit plan gpu=NAME"),
        ("GPU", {"capability": None}, "warn", "does not say"),
        ("GPU", {"capability": (7, 5)}, "warn", "become float16"),
        ("GPU", {"capability": (7, 0)}, "bad", "7.5 is the least"),
        ("GPU memory", {"gpu_free_bytes": None}, "warn", "does not say"),
        ("GPU memory", {"gpu_free_bytes": 9 * GIB, "gpu_holders": ("pid 7",)}, "warn", "(pid 7)"),
        ("PCIe", {"gpu": GPU | {"pcie": PCIE | {"width": 4}}}, "warn", "4 of 16 lanes"),
        ("PCIe", {"gpu": GPU | {"pcie": PCIE | {"gen": None}}}, "warn", "probe the link"),
        ("link", {"link": None}, "warn", "tightfit run scenario=probe"),
        ("CPU rates", {**NO_GPU, "link": None}, "warn", "tightfit run scenario=probe"),
        ("host memory", {"ram_free_bytes": 4 * GIB}, "warn", "offload less"),
        ("host memory", {"ram_free_bytes": GIB}, "bad", "offload less"),
        ("memlock", {"memlock_bytes": 64 * GIB}, "ok", ""),
        ("memlock", {"memlock_bytes": 8 << 20}, "warn", "ulimit -l unlimited"),
        ("huge pages", {"huge_pages": "never"}, "warn", "echo madvise"),
        ("huge pages", {"huge_pages": None}, "warn", "echo madvise"),
        ("home", {"home_error": "it cannot be written"}, "bad", "Set TIGHTFIT_HOME"),
        ("disk", {"disk_free_bytes": 5 * GIB}, "warn", "Free some room"),
        ("disk", {"disk_free_bytes": 5}, "bad", "Free some room"),
        ("models", {"models": ()}, "warn", "tightfit models fetch"),
        ("MLflow", {"store_error": "file is not a database"}, "bad", "tracking=none"),
        ("MLflow", {"has_mlflow": False}, "warn", "tracking=none"),
        ("MLflow", {"store_runs": None}, "ok", ""),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(
    name: str, changes: dict[str, Any], verdict: str, words: str
) -> None:
    found = lines(**changes)[name]
    assert found[0] == verdict
    assert words in found[2]
    assert bool(found[2]) == bool(words)


@pytest.mark.parametrize(("changes", "code"), [({}, 0), (NO_GPU, 0), ({"disk_free_bytes": 5}, 1)])
def test_what_is_bad_decides_the_exit_code(
    changes: dict[str, Any],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: replace(GOOD, **changes))
    assert main(["doctor"]) == code
    shown = capsys.readouterr().out
    assert ("  bad " in shown) == bool(code)
    assert main(["doctor", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["exit_code"]) == ("doctor", code)
    assert {"name", "verdict", "found", "remedy"} == set(document["lines"][0])


@pytest.mark.thorough
def test_the_facts_of_this_machine_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    monkeypatch.setattr("engine.device.gpu._all_gpus", list)
    facts = doctor.collect()
    assert (facts.gpu, facts.models, facts.store_runs, facts.home_error) == (None, (), None, "")
    assert facts.ram_free_bytes > 0
    assert facts.torch is not None
    database = tmp_path / "mlflow.db"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE runs (id TEXT)")
    connection.close()
    assert doctor.collect().store_runs == 0
    database.write_bytes(b"no database at all, but text" * 99)
    assert "database" in doctor.collect().store_error
    (tmp_path / "file").write_text("x", encoding="utf-8")
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "file" / "home"))
    assert "is no folder" in doctor.collect().home_error
