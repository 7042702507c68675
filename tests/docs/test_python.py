"""The code of docs/python.md runs, from its first line to its last."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.project import ROOT

pytestmark = pytest.mark.thorough

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore::engine.asked.offload.OffloadWarning")
def test_the_code_runs(
    glass_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(glass_model_dir.parents[1]))
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # of the whole process
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    code = "\n".join(blocks)
    known: dict[str, Any] = {}
    exec(compile(code, "docs/python.md", "exec"), known)
    shown = capsys.readouterr().out
    assert "Alice was -> " in shown
    assert "LLM(glass on CPU emulation: 0.00118 of " in shown
    assert " tokens of KV\n" in shown
    assert "olmo7b does not fit rtx3060_12gb: " in shown
    assert "quantization='awq': not supported: " in shown
    said = re.findall(r"print\(error\)  # (.*)", code)
    assert len(said) == 2
    assert all(line in shown for line in said)
