"""mode=plan: without a card, for another engine's number, with lengths that are not set."""

import re
from pathlib import Path

import pytest

from catalogue.cards import card_names
from engine.errors import ConfigError
from harness.__main__ import main
from harness.config.compose import Composer
from harness.forecast.rows import Forecast, forecast, lacks_card, running_facts, ways_by_card
from harness.forecast.skip import planned_shortage
from harness.point.show import summary_lines
from harness.sweep.plan import point_lines, sweep_table
from reports.record.record import RunRecord

pytestmark = pytest.mark.thorough_but(
    "test_a_plan_and_a_run_of_the_same_words_mean_the_same",
    "test_advice_is_no_shorter_than_the_scenario_needs",
)

OLMO = ("+model=olmo7b", "gpu=rtx4080_16gb", "scenario=latency")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("engine.device.machine.open_gpu", lambda: None)


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def found_of(composer: Composer, *overrides: str) -> Forecast:
    (point,) = composer.plan(["mode=plan", *overrides]).points
    return forecast(point.config, tuple(point.overrides))


def said(found: Forecast) -> str:
    return " ".join(" ".join(point_lines(found)).split())


def test_without_a_card_every_card_is_shown_and_what_a_run_does_here(composer: Composer) -> None:
    found = found_of(composer, "+model=smollm2_135m", "scenario=latency")
    lines = point_lines(found)
    assert lines[1].startswith("This machine has no GPU, and no card is chosen.")
    assert "Here a run emulates a GPU on the CPU: smollm2_135m fits CPU: " in said(found)
    shown = {line.split()[0] for line in lines if line}
    assert set(card_names()) <= shown
    fits = [(name, card.best) for name, card in ways_by_card(found)]
    dtypes = {name: way.plan.dtype for name, way in fits if way is not None}
    assert {dtypes["rtx2060_6gb"], dtypes["v100_16gb"]} == {"float16"}
    assert dtypes["rtx4090_24gb"] == "bfloat16"


def test_cards_of_one_size_share_a_placement_and_have_their_own_rates(
    composer: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["rtx4060_8gb", "rtx5060_8gb", "rtx4080_16gb", "a100_80gb"]
    monkeypatch.setattr("harness.forecast.rows.card_names", lambda: names)
    found = found_of(composer, "+model=olmo7b", "scenario=latency")
    cards = dict(ways_by_card(found))
    assert [cards[name].as_set is None for name in names] == [True, True, True, False]
    ways = {name: card.best for name, card in cards.items()}
    slow, fast, coded, roomy = (ways[name] for name in names)
    assert slow is not None
    assert fast is not None
    assert slow.settings == fast.settings == ("offload=auto",)
    assert slow.plan is fast.plan
    assert fast.tokens_s() > 1.5 * slow.tokens_s()  # twice the link
    for name, way in (("rtx4080_16gb", coded), ("a100_80gb", roomy)):
        alone = found_of(composer, "+model=olmo7b", f"gpu={name}", "scenario=latency")
        assert way is not None
        assert alone.best is not None
        assert way.tokens_s() == pytest.approx(alone.best["tokens_s"])


def test_a_card_of_another_size_by_a_gib_has_a_placement_of_its_own(
    composer: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.forecast.rows.card_names", lambda: ["t4_16gb", "v100_16gb"])
    cards = dict(ways_by_card(found_of(composer, "+model=olmo7b", "scenario=latency")))
    alone = found_of(composer, "+model=olmo7b", "gpu=v100_16gb", "scenario=latency").best
    way = cards["v100_16gb"].best
    assert way is not None
    assert alone is not None
    assert way.tokens_s() == pytest.approx(alone["tokens_s"])


def test_offload_beyond_the_weights_is_a_note_of_the_answer(composer: Composer) -> None:
    words = ("+model=smollm2_135m", "gpu=rtx2060_6gb", "scenario=latency", "offload=uva")
    note = r"offload\.uva\.cpu_offload_gb=30 is more than the 0\.\d+ GiB of weights that"
    assert re.search(note, said(found_of(composer, *words, "offload.uva.cpu_offload_gb=30")))
    assert "can be moved" not in said(found_of(composer, *words, "offload.uva.cpu_offload_gb=0.1"))


def test_the_command_s_minutes_are_a_comment_of_one_line(composer: Composer) -> None:
    words = ("+model=smollm2_135m_q4", "gpu=rtx2060_6gb", "scenario=latency")
    for more in ([], ["engine.max_model_len=512"], ["engine.max_num_seqs=16", "engine.seed=1"]):
        lines = point_lines(found_of(composer, *words, *more))
        (noted,) = [line for line in lines if "# about" in line]
        assert noted.endswith(" min")
        assert len(noted) <= 80


def test_plain_weights_that_fit_are_shown_beside_faster_ones(
    composer: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["rtx4080_16gb", "rtx4090_24gb", "v100_32gb"]
    monkeypatch.setattr("harness.forecast.rows.card_names", lambda: names)
    lines = point_lines(found_of(composer, "+model=olmo7b", "scenario=latency"))
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert rows["rtx4080_16gb"][1:3] == ["no", "lossless"]
    assert float(rows["rtx4090_24gb"][1]) < float(rows["rtx4090_24gb"][3])
    assert rows["rtx4090_24gb"][2] == "lossless"
    assert rows["v100_32gb"][2:4] == ["as", "set"]
    assert max(map(len, lines)) <= 80


@pytest.mark.slow
def test_memory_alone_is_a_part_of_every_card_and_no_card_of_its_own(
    composer: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.forecast.rows.card_names", lambda: ["rtx4080_16gb"])
    none = said(found_of(composer, "+model=olmo7b", "gpu.memory_gib=2", "scenario=latency"))
    assert (
        "It does not fit 2 GiB of any card of conf/gpu with KV cache for at least 4,096 tokens"
        in none
    )
    assert "With gpu.link_gb_s as well, it describes a card of your own" in none
    short = ("engine.max_model_len=1024", "scenario=latency")
    some = said(found_of(composer, "+model=smollm2_135m", "gpu.memory_gib=2", *short))
    assert "rtx4080_16gb 2.00 " in some
    own = ("+model=olmo7b", "gpu.memory_gib=12", "gpu.link_gb_s=16", "scenario=latency")
    rates = "Predicted from: the card as described (gpu.hbm_gb_s=500, gpu.bf16_tflops=60 assumed)."
    assert rates in said(found_of(composer, *own))


def test_a_plan_and_a_run_of_the_same_words_mean_the_same(composer: Composer) -> None:
    for words in (["gpu.memory_gib=2"], ["gpu.memory_gib=0.1"], []):
        found = found_of(composer, "+model=smollm2_135m", *words, "engine.max_model_len=1024")
        assert lacks_card(found.config)
        running = running_facts(found.config)
        assert (found.facts.kind, running.kind) == ("cpu", "cpu")
        assert (found.plan is None) == (planned_shortage(found.config) is not None)
    card = found_of(composer, "+model=olmo7b", "gpu.memory_gib=12", "gpu.link_gb_s=16")
    assert (card.facts.kind, card.facts.name) == ("cuda", "a card of 12 GiB")
    assert "olmo7b does not fit a card of 12 GiB: " in said(card)


def test_a_planned_sweep_without_a_card_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mode=plan", "-m", "+model=olmo7b", "offload=none,uva"]) == 2
    assert "gpu: expected a card for each point of a planned sweep" in capsys.readouterr().err


def test_another_engine_is_told_what_it_lacks(composer: Composer) -> None:
    text = said(found_of(composer, *OLMO, "plan.reported_kv_gib=-3.44"))
    assert "reported -3.44 GiB for its KV cache; one sequence of 4,096 tokens needs 2.00" in text
    assert "5.44 GiB are missing" in text
    flags = "--cpu-offload-gb 5.44 \\ --max-model-len 4096"
    assert f"vLLM vllm serve allenai/OLMo-2-1124-7B-Instruct {flags}" in text
    assert 'accelerate device_map="auto", max_memory={0: "8.15GiB", "cpu": "7GiB"}' in text
    assert "olmo7b does not fit rtx4080_16gb: 2.45 GiB short" in text  # ours, of our own memory
    zero = said(found_of(composer, *OLMO, "plan.reported_kv_gib=-0.001"))
    assert "reported 0.00 GiB" in zero
    roomy = said(found_of(composer, *OLMO, "plan.reported_kv_gib=2.5"))
    assert "no weights have to leave the GPU" in roomy
    assert "describes that engine's memory" in roomy
    # Of 34 layers 5 keep all tokens, the others 1,024 and those of a step.
    windows = ("+model=gemma3_4b", "gpu=rtx3060_12gb", "engine.max_model_len=131072")
    text = said(found_of(composer, *windows, "plan.reported_kv_gib=-1.25"))
    assert "one sequence of 131,072 tokens needs 2.84 GiB. 4.10 GiB are missing" in text
    with pytest.raises(ConfigError, match=r"plan\.reported_kv_gib: expected mode=plan"):
        composer.plan([*OLMO, "plan.reported_kv_gib=0"])
    with pytest.raises(ConfigError, match=r"plan\.verbose: expected mode=plan beside it"):
        composer.plan([*OLMO, "plan.verbose=true"])


def test_a_length_that_is_not_set_is_cut_to_what_fits_and_its_price_is_said(
    composer: Composer,
) -> None:
    base = ("+model=llama31_8b", "gpu=rtx4090_24gb", "scenario=latency")
    found = found_of(composer, *base)
    assert found.plan is not None
    length = found.plan.max_model_len
    assert 40_000 < length < 50_000
    text = said(found)
    assert f"{length:,} tokens (the model's own limit is 131,072)" in text
    assert "Length engine.max_model_len=131072 " in text
    assert any(f"engine.max_model_len={length}: reduced from" in note for note in found.plan.notes)
    full = found_of(composer, *base, "engine.max_model_len=131072")
    assert full.plan is None
    small = found_of(composer, "+model=llama31_8b", "gpu=rtx3060_12gb", "scenario=latency")
    assert "needs 1.00 GiB of KV for 8,192 of the model's 131,072 tokens" in said(small)
    long = "scenario.latency.prompt_tokens=20000"
    asked = found_of(composer, "+model=llama31_8b", "gpu=rtx3060_12gb", "scenario=latency", long)
    assert "for 20,032 of the model's 131,072 tokens" in said(asked)


@pytest.mark.slow
def test_an_offload_that_is_chosen_beside_fields_has_its_own_label(composer: Composer) -> None:
    words = ("offload=auto", "planner.auto_fields=[max_num_seqs]", "engine.max_model_len=2048")
    found = found_of(composer, *OLMO, *words)
    assert [row.label for row in found.rows][:2] == ["auto (as set)", "none"]
    assert found.rows[0].fits
    assert not found.rows[1].fits


def test_a_length_beside_the_objective_that_chooses_it_is_refused(composer: Composer) -> None:
    context = ("offload=auto", "planner.objective=context", "engine.max_model_len=2048")
    with pytest.raises(ConfigError, match=r"objective=context: expected no engine\.max_model_len"):
        composer.plan([*OLMO, *context])
    composer.plan([*OLMO, *context, "planner.auto_fields=[max_model_len]"])


def test_a_length_that_was_chosen_at_the_price_of_speed_has_the_fast_one_beside_it(
    composer: Composer,
) -> None:
    base = ("+model=llama31_8b", "gpu=rtx4080_16gb", "scenario=latency")
    chosen = (*base, "planner.auto_fields=[max_model_len]")
    text = said(found_of(composer, *chosen, "offload=auto"))
    assert "offload=auto: 1.82 tok/s" in text
    shorter = re.search(
        r"Shorter engine\.max_model_len=(\d+) 47\.8 tok/s up to ([\d,]+) tokens", text
    )
    assert shorter is not None
    length = int(shorter[1])
    assert shorter[2] == f"{length:,}"
    assert 10_000 < length < 11_500
    fast = found_of(composer, *base, "offload=auto", f"engine.max_model_len={length}")
    assert "47.8 tok/s, no layer leaves the GPU" in said(fast)
    longer = found_of(composer, *base, "offload=auto", f"engine.max_model_len={length + 16}")
    assert "in host memory" in said(longer).split("tokens.")[0]
    context = found_of(composer, *base, "offload=auto", "planner.objective=context")
    assert "Shorter planner.objective=latency 47.8 tok/s" in said(context)
    # As long as on the GPU alone, or no faster when shorter.
    assert "Shorter" not in said(found_of(composer, *chosen, "gpu=rtx4090_24gb"))
    uva = found_of(composer, *chosen, "gpu=rtx4090_24gb", "offload=uva")
    assert "Shorter" not in said(uva)


def test_advice_is_no_shorter_than_the_scenario_needs(composer: Composer) -> None:
    """By itself a few tokens would fit."""
    words = ("+model=mistral_7b", "gpu=l4_24gb", "gpu.memory_gib=12.18", "offload=prefetch")
    plain = "engine.weight_format=checkpoint"
    found = found_of(composer, *words, "offload.prefetch.offload_num_in_group=3", plain)
    assert found.plan is None
    ways = found.answer.plan["ways"]  # type: ignore[index,union-attr]
    assert all(way["max_model_len"] >= 192 for way in ways)  # type: ignore[union-attr]


def test_sequences_that_are_chosen_are_as_many_as_fit(composer: Composer) -> None:
    """One of full length has room, and many short ones beside each other."""
    words = ("+model=llama31_8b", "gpu=rtx4090_24gb", "engine.max_model_len=32768")
    found = found_of(composer, *words, "planner.auto_fields=[max_num_seqs]", "scenario=latency")
    assert found.plan is not None
    assert found.plan.max_num_seqs == 64
    assert (found.plan.predicted or {})["decode_tokens_full_s"] > 1000


def test_a_run_that_is_refused_says_what_its_plan_says(composer: Composer, tmp_path: Path) -> None:
    found = found_of(composer, *OLMO)
    error = found.answer
    assert isinstance(error, Exception)
    record = RunRecord(
        run_id="1",
        name="point",
        status="no_fit",
        error={"type": "CapacityError", "message": str(error)},
        plan=error.plan,  # type: ignore[union-attr]
        overrides=list(OLMO),
    )
    lines = [line.strip() for line in summary_lines(record, tmp_path, view_command=None)]
    planned = [line.strip() for line in point_lines(found)]
    labels = ("Best fix", "Next", "Simplest", "Budget", "Run it")
    for label in labels:
        [mine], [theirs] = (
            [line for line in each if line.startswith(label)] for each in (lines, planned)
        )
        assert mine == theirs


@pytest.mark.slow
def test_a_sweep_shows_what_is_best_for_each_point(composer: Composer) -> None:
    items = [found_of(composer, *OLMO), found_of(composer, *OLMO, "offload=auto")]
    _, header, first, second, *end = sweep_table(items, ["as it is", "auto"])
    assert header.split() == ["point", "fits", "tok/s", "best", "settings", "tok/s"]
    assert first.split()[3:6] == ["no", "-", "engine.weight_format=lossless"]
    assert second.split()[1] == "yes"
    assert "1 does not fit with its settings; running the others takes" in " ".join(end)
