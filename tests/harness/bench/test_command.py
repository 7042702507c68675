"""The command line of the bench: refusals, the document it writes, cases that fail."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.bench import __main__ as command
from harness.bench.cases import Limits
from harness.bench.document import BENCH, KV
from harness.bench.kv_cases import KVAsked, kv_cases
from tests.harness.bench.examples import case, decode
from tests.harness.bench.test_measure import TINY


def fake_run(asked, limits):
    """Return figures of any case without an engine."""
    if asked.sweep:
        return {"sweep": {}}
    copied = 8_000_000_000 if asked.name == "prefetch" else 0
    found = case(asked.title, {1: decode(0.2, copied=copied)})
    return {key: value for key, value in found.items() if key not in {"title", "prefill_tokens"}}


@pytest.fixture
def card(monkeypatch):
    """A machine on which torch says that there is an H100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")


@pytest.fixture
def document(monkeypatch, tmp_path):
    file = tmp_path / "performance.md"
    file.write_text(f"{BENCH.begin}\nold\n{BENCH.end}\n")
    monkeypatch.setattr(command, "DOCUMENT", file)
    return file


def test_without_a_gpu_it_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.bench([], fake_run) == 2
    assert (
        "expected a CUDA GPU, found none. Run it on a machine with one" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rows", "prefetch,nosuch"], "expected some of resident, "),
        (["--rows", "chosen"], "Add prefetch."),
        (["--model", "nosuch"], "expected one of"),
        (["--output", "x.md"], "figures are emulated"),
    ],
)
def test_a_bad_command_line_is_refused(arguments, text, capsys):
    assert command.bench([*TINY, *arguments], fake_run) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--batches", "0"], ["--batches", ""], ["--prefetch", "8/5"]]
)
def test_malformed_values_are_refused(arguments):
    with pytest.raises(SystemExit) as caught:
        command.bench(arguments, fake_run)
    assert caught.value.code == 2


@pytest.mark.usefixtures("card")
def test_the_usual_run_writes_the_document(document, capsys):
    assert command.bench([], fake_run) == 3  # 6 GB in 0.2 s miss the resident engine's target
    text = document.read_text()
    assert "`python -m harness.bench` on NVIDIA H100 80GB HBM3, driver " in text
    assert "prefetch 8/5/2, batch 1: bytes / step time / link rate" in text
    assert "old" not in text
    assert f"the table stands in {document}" in capsys.readouterr().err


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    "arguments", [["--rows", "prefetch"], ["--batches", "1"], ["--model-layers", "4"]]
)
def test_another_run_leaves_the_document(document, arguments, capsys):
    command.bench(arguments, fake_run)
    assert "old" in document.read_text()
    assert "batch 1: bytes / step time / link rate" in capsys.readouterr().out


@pytest.mark.usefixtures("card")
def test_another_run_writes_where_it_is_told(document, tmp_path):
    other = tmp_path / "other.md"
    other.write_text(f"{BENCH.begin}\n{BENCH.end}\n")
    assert command.bench(["--rows", "prefetch", "--output", str(other)], fake_run) == 0
    assert "--rows prefetch" in other.read_text()
    assert "old" in document.read_text()


@pytest.mark.usefixtures("card")
def test_a_document_without_marks_is_refused_before_anything_runs(document):
    document.write_text("nothing")
    assert command.bench([], lambda case, limits: pytest.fail("ran")) == 2


def test_an_emulated_run_writes_no_document(document, capsys):
    assert command.bench(TINY, fake_run) == 0
    assert document.read_text() == f"{BENCH.begin}\nold\n{BENCH.end}\n"
    assert "Emulated" in capsys.readouterr().out


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("asked_kv_tokens", "expected"), [(8000, (8000, (0.85,))), (None, (9000, (0.9,)))]
)
def test_placements_are_chosen_in_the_room_of_prefetch(asked_kv_tokens, expected):
    seen = {}

    def run(asked, limits):
        seen[asked.name] = (asked.kv_tokens, asked.utilizations)
        return fake_run(asked, limits) | {"utilization": 0.9, "asked_kv_tokens": asked_kv_tokens}

    command.bench(["--rows", "prefetch,chosen"], run)
    assert seen["chosen"] == expected


@pytest.mark.usefixtures("card")
def test_a_missed_target_and_a_failed_case_show_in_the_exit_code(capsys, tmp_path):
    def slow(asked, limits):
        return fake_run(asked, limits) | {"decode": {"1": decode(0.3, copied=8_000_000_000)}}

    assert command.bench(["--rows", "prefetch"], slow) == 3
    assert "**missed**" in capsys.readouterr().out
    assert command.bench(["--rows", "prefetch,chosen"], lambda *_: {"failed": "it broke"}) == 3
    out, err = capsys.readouterr()
    assert "prefetch 8/5/2: no figures: it broke" in out
    assert "prefetch has no figures." in out
    assert "prefetch 8/5/2: it broke, " in err


def test_other_tokens_than_the_resident_engine_show_in_the_exit_code(capsys):
    def run(asked, limits):
        tokens = [1, 2, 4] if asked.name == "prefetch" else [1, 2, 3]
        return fake_run(asked, limits) | {"decode": {"1": decode(0.2, tokens=tokens)}}

    arguments = [*TINY, "--prefetch", "1/1/1", "--rows", "resident,prefetch"]
    assert command.bench(arguments, fake_run) == 0
    assert command.bench(arguments, run) == 3
    assert "**not equal** to the resident engine's in prefetch." in capsys.readouterr().out


@pytest.mark.slow
def test_a_process_that_breaks_is_a_failed_case(monkeypatch):
    from harness.bench.cases import Case, Limits, Work

    case = Case(name="x", title="x", memory_gib=1.0, utilizations=(0.9,), work=Work(batches=(1,)))
    got = command.in_process(case, Limits(model="nosuch", device="cpu"))
    assert got["failed"].startswith("engine.errors.ConfigError: --model: expected one of")
    monkeypatch.setattr(command, "CASE_TIMEOUT_S", 0.01)
    assert command.in_process(case, Limits(device="cpu")) == {"failed": "not done after 0.01 s"}


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--steps", "0"], ["--max-num-seqs", "0"], ["--memory-gib", "-1"]),
        *(["--utilization", "1.5"], ["--kv-scale", "0"], ["--kv-offload", "8/2"]),
        *(["--counter-s", "-1"], ["--uva-gib", "0"]),
    ],
)
def test_odd_numbers_are_refused(arguments):
    with pytest.raises(SystemExit) as caught:
        command.bench(arguments, fake_run)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--json", "absent/figures.json"], "expected a folder absent, found none"),
        (["--json", "."], "expected a file, got a folder"),
        (["--resume"], "expected --json FILE"),
        (["--rows", "kv_long,prefetch"], "Run the command twice."),
        (["--rows", "kv_nosuch"], "expected some of kv_bare, "),
    ],
)
def test_files_and_rows_that_cannot_be_are_refused_before_anything_runs(arguments, text, capsys):
    assert command.bench([*TINY, *arguments], lambda *_: pytest.fail("ran")) == 2
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    "changes",
    [
        {"no_fit": "too large", "decode": {}},
        {"decode": {"1": {"no_room": "9 tokens are needed, 8 have room"}}},
        {"prefill_s": {"1": None}},
        {"before": {"h2d_gb_s": None}, "after": {}},
        {"counter": {"nvml_gb_s": None}},
    ],
)
def test_figures_that_are_not_there_show_in_the_exit_code(changes, capsys):
    def run(asked, limits):
        return fake_run(asked, limits) | changes

    assert command.bench(["--rows", "prefetch"], run) == 3
    out = capsys.readouterr().out
    assert "no figures" in out or "**not measured**" in out


def kv_run(asked, limits):
    """Return figures of the parts of a case that a row of its own has."""
    assert limits.model == "llama31_8b"
    streamed = {"h2d_bytes": 3e9, "in_place_bytes": 0, "kv_in_place_bytes": 4e9, "step_s": 0.16}
    rates = dict.fromkeys(("h2d_gb_s", "d2h_gb_s", "two_way_gb_s"), 50.0)
    return {"before": rates, "after": rates, "kv": {"streamed": streamed}, "decode": {}}


@pytest.mark.usefixtures("card")
def test_rows_of_the_kv_cache_have_a_section_of_their_own(document, capsys):
    document.write_text(f"{BENCH.begin}\nold\n{BENCH.end}\n{KV.begin}\nolder\n{KV.end}\n")
    assert command.bench(["--rows", "kv"], kv_run) == 3  # most parts did not run
    text = document.read_text()
    assert "old\n" in text
    assert "older" not in text
    assert "weights and KV over the link together: bytes / step / link rate" in text
    assert "**not measured**" in text
    assert command.bench(["--rows", "kv_weights"], kv_run) == 3  # 7 GB in 160 ms are 0.875
    assert "--rows kv_weights" in capsys.readouterr().out
    assert "--rows kv_weights" not in document.read_text()


@pytest.mark.usefixtures("card")
def test_a_table_is_made_in_several_calls(document, tmp_path, capsys):
    document.write_text(f"{KV.begin}\n{KV.end}\n")
    file, ran = tmp_path / "figures.json", []

    def run(asked, limits):
        ran.append(asked.name)
        return kv_run(asked, limits) | ({"failed": "it broke"} if len(ran) == 1 else {})

    keep = ["--json", str(file), "--resume"]
    command.bench(["--rows", "kv_bare,kv_weights", *keep], run)
    command.bench(["--rows", "kv_long", *keep], run)
    assert set(json.loads(file.read_text())["cases"]) == {"kv_weights", "kv_long"}
    command.bench(["--rows", "kv", *keep], run)
    assert ran == ["kv_bare", "kv_weights", "kv_long", "kv_bare", "kv_gpu", "kv_cpu", "kv_turns"]
    assert "weights and KV over the link" in document.read_text()
    assert command.bench(["--rows", "kv", "--kv-scale", "2", *keep], run) == 2
    assert "figures with the same options" in capsys.readouterr().err
    file.write_text("no figures")
    assert command.bench(["--rows", "kv", *keep], run) == 2


def test_a_process_that_ends_early_leaves_what_it_measured(monkeypatch):
    def end(arguments, **_):
        Path(arguments[-1]).write_text('{"kv": {}}', encoding="utf-8")
        return SimpleNamespace(returncode=1, stderr="first\nlast line\n")

    monkeypatch.setattr(command.subprocess, "run", end)
    case = kv_cases(KVAsked())[0]
    assert command.in_process(case, Limits()) == {"kv": {}, "failed": "last line"}
