"""mode=plan of a comparison, and of peers, which are not planned."""

import re
from pathlib import Path

import pytest

from harness.__main__ import main

pytestmark = pytest.mark.thorough

OLMO = ("+model=olmo7b", "gpu=rtx4080_16gb")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))


def test_a_peer_is_not_planned_but_others_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.sweep.plan.build_report", lambda folder: [])
    assert main(["mode=plan", "+experiment=peers", "scenario=latency", "gpu.host_gib=64"]) == 0
    out = capsys.readouterr().out
    assert out.count("system=accelerate") == 1
    assert "1 point, all fit" in out
    assert "\n  not planned: system=accelerate (plans are of this project's engine" in out
    assert max(len(line) for line in out.splitlines() if "/" not in line) <= 80
    side = ["scenario=ab", "ab.a=[]", "ab.b=[system=accelerate]"]
    for words in (["-m", "system=accelerate,vllm"], side):
        assert main(["mode=plan", *OLMO, *words]) == 2
        assert "mode: expected run with system=accelerate, got plan" in capsys.readouterr().err


def test_both_sides_of_a_comparison_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["+model=qwen3_4b", "scenario=ab", "gpu=rtx4080_16gb", "engine.max_model_len=2048"]
    side = "ab.b=[offload=uva, offload.uva.cpu_offload_gb=4]"
    assert main(["mode=plan", *line, side]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    [last] = [number for number, line in enumerate(lines) if line.endswith("run min")]
    a, b = (row.split() for row in lines[last:] if row.startswith(("  a: ", "  b: ")))
    assert (a[:2], b[0]) == (["a:", "offload=none"], "b:")
    minutes = round(10 * float(a[-1]) + 4 * float(b[-1]))
    assert minutes == pytest.approx(26, abs=2)
    wanted = " ".join(line) + """ "ab.b=['offload=uva','offload.uva.cpu_offload_gb=4']\""""
    words = " ".join(text.replace(" \\\n", " ").split())
    found = re.search(rf"Run it .*{re.escape(wanted)} # 14 runs, about (\d+) min", words)
    assert found is not None
    assert int(found[1]) == pytest.approx(minutes, abs=1)  # cells have a tenth of a minute
