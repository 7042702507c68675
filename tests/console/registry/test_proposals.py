"""What is proposed for a card: settings with which a model fits, and what each costs."""

from typing import Any

import pytest

from console.registry.checks import FieldError
from console.registry.database import Database
from console.registry.models import Models, profile_of
from console.registry.results import Results
from engine.device import machine
from tests.console.registry.conftest import measured

CARD = "rtx4080_16gb"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "open_gpu", lambda: None)


def test_a_model_that_does_not_fit_is_offered_each_way_with_its_price(models: Models) -> None:
    row = models.describe("olmo7b")
    found = models.plan(row, card=CARD)
    assert (found.card, found.is_here, found.verdict) == (CARD, False, "fits_with")
    assert found.lines[0].startswith("olmo7b does not fit rtx4080_16gb: 2.45 GiB short (needs 2.00")
    [best, *others] = found.choices
    assert (best.words, best.settings) == ("--weight-format lossless", best.settings)
    assert found.settings == {"weight_format": "lossless", "max_num_seqs": 16}
    [least] = [each for each in others if each.words.startswith("--cpu-offload-gb")]
    assert list(least.settings) == ["cpu_offload_gb"]
    assert 3 < least.settings["cpu_offload_gb"] < 4
    assert least.host_weights_bytes >= least.settings["cpu_offload_gb"] * 2**30
    # No step is faster than the link carries what lies beyond it.
    assert least.tokens_s < 32e9 / least.host_weights_bytes
    assert best.tokens_s > least.tokens_s
    assert found.price["decode_tokens_s"] == pytest.approx(best.tokens_s)
    assert found.price["source"] == "data sheet of rtx4080_16gb"
    assert found.memory["gpu"]["total_bytes"] <= found.memory["gpu"]["budget_bytes"]
    # What is proposed does fit.
    again = models.plan(row, found.settings, card=CARD)
    assert (again.verdict, again.settings) == ("fits", found.settings)


@pytest.mark.thorough
def test_what_is_set_is_kept(models: Models) -> None:
    row = models.describe("olmo7b")
    asked = {"cpu_offload_gb": 8, "max_num_seqs": 3, "max_model_len": 1024}
    found = models.plan(row, asked, card=CARD)
    assert (found.verdict, found.settings) == ("fits", asked)
    assert "with offload=uva" in found.lines[0] or "--offload uva" in found.lines[0]
    quick = models.plan(row, asked, card=CARD, explain=False)
    assert (quick.verdict, quick.choices, quick.settings) == ("fits", (), asked)
    assert quick.memory["placements"]["uva"] >= 8 * 2**30
    short = models.plan(row, {"cpu_offload_gb": 1}, card=CARD, explain=False)
    assert short.verdict == "no_fit"
    assert "GiB short" in short.lines[0]
    assert short.price is None
    assert short.memory["gpu"]["budget_bytes"] > 0


def test_a_small_model_takes_many_sequences(models: Models) -> None:
    row = models.add("glass", card="rtx3060_12gb")
    assert profile_of(row).settings == {"max_num_seqs": 256}
    row = models.add("qwen25_0_5b", settings={"max_num_seqs": 2}, card="rtx3060_12gb")
    assert profile_of(row).settings == {"max_num_seqs": 2}


@pytest.mark.thorough
def test_a_model_beyond_every_memory_is_added_as_it_is(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 << 30)
    row = models.describe("olmo7b")
    found = models.plan(row)
    assert (found.card, found.is_here, found.verdict) == ("CPU", True, "no_fit")
    assert found.price is None
    assert found.settings == {}
    assert models.plan(row, card="cpu").lines == found.lines
    assert profile_of(models.add("olmo7b")).settings == {}


def measure(results: Results, model_id: int, speed: float, card: str, **settings: Any) -> None:
    """Store a test as console.testing does."""
    asked = {"profiles": {"default": settings}, "profile_ids": {"default": 1}}
    run = results.create(model_id, "test", profile_id=1, settings=asked)
    measured(results, run, card, "throughput", {"throughput/output_tok_s": speed})


def test_what_was_measured_is_proposed(models: Models, database: Database) -> None:
    row = models.store(models.describe("glass"), {})
    results, card = Results(database), "rtx3060_12gb"
    for count, speed in ((4, 90.0), (8, 120.0), (32, 70.0)):
        measure(results, row.id, speed, card, max_num_seqs=count)
        measure(results, row.id, 1e6, "another", max_num_seqs=count)
    measure(results, row.id, 500.0, card, max_num_seqs=2, seed=1)
    found = models.plan(row, card=card)
    assert found.settings == {"max_num_seqs": 8}
    assert [each["output_tok_s"] for each in found.measured] == [500.0, 120.0, 90.0, 70.0]
    assert models.plan(row, {"max_num_seqs": 2}, card=card).settings["max_num_seqs"] == 2
    measure(results, row.id, 600.0, card)  # as many as the engine's default
    assert models.plan(row, card=card).settings == {"max_num_seqs": 64}
    measure(results, row.id, 5.0, "CPU: some processor", max_num_seqs=1)
    assert models.plan(row, card="cpu").settings == {"max_num_seqs": 1}


class Gpu:
    """Stands for a card of this machine."""

    uuid = "GPU-1"

    def facts(self) -> dict[str, object]:
        return {"name": "NVIDIA GeForce RTX 4080", "memory_bytes": 16 << 30}

    def sample(self) -> dict[str, float]:
        return {"gpu_used_bytes": 4 << 30}

    def compute_capability(self) -> tuple[int, int]:
        return 8, 9

    def holders(self) -> tuple[str, ...]:
        return ("another (7)",)


def test_the_card_of_this_machine_is_taken_as_it_is_now(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "open_gpu", Gpu)
    found = models.plan(models.describe("olmo7b"), explain=False)
    assert (found.card, found.is_here) == ("NVIDIA GeForce RTX 4080", True)
    # Another process holds 4 GiB of the card.
    assert found.verdict == "no_fit"
    assert "12.00 GiB" in " ".join(found.lines)


def test_a_card_that_is_none_is_refused(models: Models) -> None:
    with pytest.raises(FieldError, match=r"card: expected cpu or a card of conf/gpu, got 'rtx9'"):
        models.plan(models.describe("glass"), card="rtx9")
    with pytest.raises(FieldError, match="--max-num-seqs: expected an integer >= 1") as refused:
        models.plan(models.describe("glass"), {"max_num_seqs": 0}, card=CARD)
    assert refused.value.field == "max_num_seqs"


@pytest.mark.thorough
def test_ways_are_settings_of_a_profile(models: Models) -> None:
    """Settings that a way replaces go, and those of host memory for KV stay."""
    row = models.describe("llama32_1b")
    asked = {"kv_cpu_gib": 0.5, "cpu_offload_gb": 0.1, "max_model_len": 2048}
    found = models.plan(row, asked | {"gpu_memory_gib": 2.0}, card="rtx3060_12gb")
    assert found.settings["offload"] == "auto"
    assert found.settings["kv_cpu_gib"] == 0.5
    assert "cpu_offload_gb" not in found.settings
