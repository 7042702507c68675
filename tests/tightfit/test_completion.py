"""What a user's shell makes of a line and the tab key, with each shell where it is installed."""

import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contracts.project import ROOT
from tightfit.completion import SCRIPTS

LINES = {
    "tightfit pl": ["plan"],
    "tightfit models fetch gl": ["models", "fetch", "glass"],
    "tightfit service unin": ["service", "uninstall"],
    "tightfit serve glass --kv-cpu-g": ["serve", "glass", "--kv-cpu-gib"],
    "tightfit run offload=p": ["run", "offload=prefetch"],
    "tightfit plan model=olmo7b engine.max_num_s": ["plan", "model=olmo7b", "engine.max_num_seqs="],
    "tightfit compare note": ["compare", "notes.txt"],
}
"""Lines with a single continuation, and the words of the command after the tab key."""
RC = {
    "bash": ["--norc", "--noprofile", "-i"],
    "zsh": ["-f", "-i"],
}
COMMAND = """\
#!/bin/sh
if [ "$1" = completion ]; then PYTHONPATH='{root}' exec '{python}' -m tightfit "$@"; fi
for word in "$@"; do echo "$word"; done > '{said}.part' && mv '{said}.part' '{said}'
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to which the command `tightfit` writes its words, in a folder with one file."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes.txt").touch()
    command = tmp_path / "bin" / "tightfit"
    command.write_text(
        COMMAND.format(root=ROOT, python=sys.executable, said=tmp_path / "said"), encoding="utf-8"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "said"


def needs(shell: str) -> str:
    """Return where a shell is, or skip the test."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    return found


@contextmanager
def terminal(*command: str) -> Iterator[int]:
    """Run a shell in a terminal and yield the terminal's end for its user."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        command,
        env=os.environ | {"COLUMNS": "80"},
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        close_fds=True,
    )
    os.close(its)
    try:
        yield ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def wait_for(file: Path) -> list[str]:
    """Return the words that were written to a file."""
    end_s = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end_s, f"expected {file} within 60 s"
        time.sleep(0.02)
    words = file.read_text(encoding="utf-8").split("\n")[:-1]
    file.unlink()
    return words


@pytest.mark.slow
@pytest.mark.parametrize("shell", list(RC))
def test_the_tab_key_completes_the_line(shell: str, said: Path) -> None:
    with terminal(needs(shell), *RC[shell]) as user:
        os.write(user, f'eval "$(tightfit completion {shell})"; tightfit ready\n'.encode())
        assert wait_for(said) == ["ready"]
        for line, words in LINES.items():
            os.write(user, f"{line}\t\n".encode())
            assert wait_for(said) == words


@pytest.mark.slow
def test_fish_completes_the_line(said: Path) -> None:
    fish = needs("fish")
    for line, words in LINES.items():
        asked = f"tightfit completion fish | source; complete -C {line!r}"
        found = subprocess.run([fish, "-c", asked], capture_output=True, text=True, check=True)
        assert found.stdout.split() == [words[-1]]


@pytest.mark.thorough_but("bash")
@pytest.mark.parametrize("shell", list(SCRIPTS))
def test_a_shell_completes_a_command(shell: str, said: Path) -> None:
    """One line in every fast run: the script has no error, and the command is reached."""
    asked = {
        "bash": 'eval "$(tightfit completion bash)"; COMP_LINE="tightfit pl"; COMP_POINT=11; '
        'compopt() { :; }; _tightfit; echo "$COMPREPLY"',
        "zsh": 'autoload -Uz compinit; compinit -D; eval "$(tightfit completion zsh)"; '
        'compadd() { [ $# -gt 3 ] || echo "$2"; }; words=(tightfit pl); CURRENT=2 PREFIX=pl; '
        "_tightfit",
        "fish": "tightfit completion fish | source; complete -C 'tightfit pl'",
    }[shell]
    found = subprocess.run([needs(shell), "-c", asked], capture_output=True, text=True, check=True)
    assert (found.stdout.split(), found.stderr) == (["plan"], "")
