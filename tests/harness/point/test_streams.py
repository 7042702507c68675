"""Who prints goes on where nobody reads any more."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.point.streams import lasting

HELP = [sys.executable, "-m", "harness", "--help"]


def test_a_reader_that_is_gone_costs_nothing() -> None:
    read, write = os.pipe()
    stream = lasting(None, write)
    stream.write("first\n")
    assert os.read(read, 100) == b"first\n"
    os.close(read)
    for _ in range(2):
        stream.write("second\n" * 10_000)
    stream.flush()
    stream.close()
    os.close(write)  # left open by the stream


def test_a_file_gets_all_of_it(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+b") as file:
        stream = lasting(None, file.fileno())
        stream.write("a\u00fc\n" * 5000)
        stream.flush()
        file.seek(0)
        assert file.read().decode() == "a\u00fc\n" * 5000


def test_letters_that_the_encoding_lacks_are_escaped() -> None:
    read, write = os.pipe()
    with os.fdopen(os.dup(write), "w", encoding="ascii") as ascii_only:
        lasting(ascii_only, write).write("ho\u00fcme\n")
    assert os.read(read, 100) == b"ho\\xfcme\n"
    os.close(read)
    os.close(write)


@pytest.mark.thorough
def test_a_command_whose_reader_is_gone_ends_as_it_would() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(HELP, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.thorough
def test_a_command_without_streams_ends_as_it_would() -> None:
    closed = f"exec {shlex.join(HELP)} 0<&- 1>&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", closed], check=False).returncode == 0


@pytest.mark.parametrize(
    "words", [["help"], ["plan", "model=glass", "gpu=l4_24gb", "--json"], ["models", "list"]]
)
def test_an_output_that_cannot_be_written_is_told_in_a_line(words: list[str]) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tightfit", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 3
    said = "error: writing the output failed: No space left on device.\n"
    assert done.stderr.endswith(said)
    assert "Traceback" not in done.stderr
