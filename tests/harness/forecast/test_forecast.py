"""mode=plan: what is printed, which command is recommended, and the table of a sweep."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from catalogue.conversions import write_weights
from engine.errors import CapacityError, ConfigError
from engine.model.checkpoint import write_unpackable
from engine.plan.cards import UNKNOWN_HOST_BYTES, DeviceFacts
from harness.__main__ import main
from harness.config.compose import Composer
from harness.forecast import rows as forecast_rows
from harness.forecast.rows import Forecast, forecast
from harness.point.show import capacity_lines
from harness.sweep.plan import csv_row, point_lines, sweep_table
from tests.contracts.project import ROOT
from tests.harness.cases import quoted

pytestmark = pytest.mark.thorough_but(
    "test_all_ways_stand_side_by_side_and_auto_is_recommended",
    "test_what_cannot_fit_is_said_with_figures",
    "test_the_answer_comes_first_in_80_columns",
)

GIB = 2**30

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 1000,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("TIGHTFIT_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def olmo(composer: Composer) -> Forecast:
    """What most tests look at; must not be changed."""
    return found_of(composer, *OLMO, VERBOSE)


def found_of(composer: Composer, *overrides: str) -> Forecast:
    """Of one request at a time, where nothing else is said: a queue is planned for, too.

    Weights are plain, so that placements differ.
    """
    has_scenario = any(item.startswith("scenario=") for item in overrides)
    scenario = [] if has_scenario else ["scenario=latency"]
    (point,) = composer.plan(["mode=plan", PLAIN, *overrides, *scenario]).points
    return forecast(point.config, tuple(overrides))


def said(found: Forecast) -> str:
    """All that is printed of a point, in one line."""
    return " ".join(" ".join(point_lines(found)).replace("\\ ", " ").split())


def ways_of(found: Forecast) -> Any:
    """What a refusal says that fits."""
    assert isinstance(found.answer, CapacityError)
    assert found.answer.plan is not None
    return found.answer.plan["ways"]


PLAIN = "engine.weight_format=checkpoint"
VERBOSE = "plan.verbose=true"
OLMO = ("+model=olmo7b", "gpu=rtx4080_16gb")
HUGE_TIER = (*OLMO, "kv=cpu", "kv.cpu_gib=100", "offload=auto")


def test_all_ways_stand_side_by_side_and_auto_is_recommended(olmo: Forecast) -> None:
    found = olmo
    assert [row.label.split(",")[0] for row in found.rows] == ["none", "uva", "prefetch", "auto"]
    assert [row.fits for row in found.rows] == [False, True, True, True]
    assert found.recommended is found.rows[3]
    times = [row.predicted["decode_step_ms"] for row in found.rows[1:]]
    assert min(times) == times[2]
    text = said(found)
    assert "olmo7b on rtx4080_16gb: budget 14.39 GiB (15.99 x 0.9)" in text
    assert "none: olmo7b does not fit rtx4080_16gb: 2.45 GiB short" in text
    assert "recommended: auto: embedding read in place; " in text
    assert "lossless" not in text
    assert "rates: data sheet of rtx4080_16gb" in text
    assert "Run it tightfit run +model=olmo7b gpu=rtx4080_16gb offload=auto Host Needs " in text


def test_the_answer_comes_first_in_80_columns(composer: Composer) -> None:
    (point,) = composer.plan(["mode=plan", *OLMO, "scenario=latency"]).points
    lines = point_lines(forecast(point.config, OLMO, "/my files"))
    assert any("tightfit run --config-dir '/my files' +model=olmo7b" in line for line in lines)
    assert max(map(len, lines)) <= 80
    labels = [line.split("  ")[0] for line in lines if line[:1] not in {"", " "}]
    assert labels[0].startswith("olmo7b does not fit rtx4080_16gb: 2.45 GiB short (needs 2.00 GiB")
    assert labels[2:8] == ["Best fix", "Next", "Simplest", "4-bit", "Budget", "Run it"]
    assert lines[-1].endswith("plan.verbose=true shows every way.")
    assert len(lines) <= 21


def test_a_row_and_the_advice_of_a_refusal_are_one_setting(composer: Composer) -> None:
    found = found_of(composer, *OLMO)
    ways = {tuple(way["settings"]): way for way in ways_of(found)}
    rows = {row.overrides: row for row in found.rows if row.fits}
    for label in ("prefetch", "auto"):
        [row] = [each for each in rows.values() if each.label.startswith(label)]
        assert ways[row.overrides]["tokens_s"] == pytest.approx(row.predicted["decode_tokens_s"])
        assert ways[row.overrides]["host_weights_bytes"] == row.host_weights_bytes
    [uva] = [row for row in rows.values() if row.label.startswith("uva")]
    assert ways[uva.overrides[1:]]["host_weights_bytes"] == uva.host_weights_bytes


def test_lossless_weights_are_recommended_where_nothing_moves_in_them(composer: Composer) -> None:
    length = "engine.max_model_len=2048"
    (point,) = composer.plan(["mode=plan", *OLMO, length, VERBOSE, "scenario=latency"]).points
    found = forecast(point.config, (*OLMO, length))
    assert [row.label for row in found.rows][:2] == ["none", "lossless"]
    best = found.recommended
    assert best is found.rows[1]
    assert best.host_weights_bytes == 0
    [auto] = [row for row in found.rows if row.label == "auto"]
    assert auto.is_lossless
    text = said(found)
    rate = f"{best.predicted['decode_tokens_s']:.3g} tok/s"
    assert f"Best fix engine.weight_format=lossless {rate} no layer leaves the" in text
    assert "weights: lossless (10.42 GiB, 0.767 of plain; engine.weight_format sets it)" in text
    assert "gpu=rtx4080_16gb engine.max_model_len=2048 engine.weight_format=lossless" in text
    values = [csv_row(found, row, "x") for row in found.rows]
    assert [(row["offload"].split(",")[0], row["weight_format"]) for row in values[:5]] == [
        ("none", None),
        ("lossless", "lossless"),
        ("4-bit", "int4"),
        ("uva", "checkpoint"),
        ("prefetch", "checkpoint"),
    ]


@pytest.mark.slow
def test_weights_in_codes_that_leave_the_gpu_least_are_recommended(composer: Composer) -> None:
    asked = ("+model=olmo7b", "gpu=rtx3060_12gb", "engine.max_model_len=2048", "scenario=latency")
    (point,) = composer.plan(["mode=plan", *asked]).points
    found = forecast(point.config, asked)
    best = found.recommended
    assert best is not None
    assert best.label == "auto"
    assert best.is_lossless
    assert found.best is not None
    assert found.best["host_weights_bytes"] == best.host_weights_bytes
    moved = f"{best.host_weights_bytes / GIB:.2f} GiB in host memory, same tokens"
    assert moved in said(found)


@pytest.mark.slow
def test_a_model_that_fits_plain_is_recommended_in_codes_where_they_are_faster(
    composer: Composer,
) -> None:
    (point,) = composer.plan(["mode=plan", "+model=qwen3_4b", "gpu=rtx4090_24gb"]).points
    found = forecast(point.config, ())
    assert found.recommended is not None
    assert found.recommended.is_lossless
    assert found.rows[0].fits
    steps = [row.predicted["decode_step_ms"] for row in found.rows[:2]]
    assert steps[1] < steps[0]
    (point,) = composer.plan(["mode=plan", "+model=glass", "gpu=rtx4090_24gb"]).points
    found = forecast(point.config, ())
    assert "lossless" not in [row.label for row in found.rows]
    assert found.recommended is found.rows[0]


def test_a_stated_routing_is_planned_for(composer: Composer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS), encoding="utf-8")
    asked = [
        *("+model=local", f"model.path={quoted(tmp_path)}", "model.load_format=dummy"),
        *("offload=experts", "offload.experts.expert_slots=40", "engine.max_model_len=512"),
        "gpu=rtx4090_24gb",
    ]
    found = [
        found_of(composer, *asked, f"model.routing={routing}")
        for routing in ("dummy", "synthetic:0.9")
    ]
    uniform, local = (each.plan.predicted["decode_step_ms"] for each in found if each.plan)
    assert local < uniform / 2


def test_recommended_overrides_give_the_row(composer: Composer, olmo: Forecast) -> None:
    for row in olmo.rows[2:]:
        again = found_of(composer, *OLMO, *row.overrides)
        chosen = again.chosen or next(r for r in again.rows if r.label == "auto")
        assert chosen.bytes["placements"] == row.bytes["placements"]


def test_the_title_and_the_csv_have_the_memory_and_the_dtype_that_are_asked_for(
    composer: Composer,
) -> None:
    """Also where the machine has more; a CPU computes in float32."""
    asked = ("+model=glass", "gpu=cpu", "gpu.memory_gib=1.5", "scenario=quick", VERBOSE)
    found = found_of(composer, *asked)
    assert found.facts.total_bytes != 1.5 * GIB
    title = said(found)
    assert "budget 1.35 GiB (1.50 x 0.9), weights 0.00318 GiB, 128 tokens" in title
    assert csv_row(found, found.rows[0], "x")["memory_gib"] == 1.5


def test_a_bar_is_as_long_as_the_budget(olmo: Forecast) -> None:
    lines = point_lines(olmo)
    [bar] = [line for line in lines if line.strip().startswith("GPU  [")]
    cells = bar.split("[")[1].split("]")[0]
    assert len(cells) == 50
    assert cells.count("a") == pytest.approx(50 * 10.8 / 14.39, abs=1)
    assert max(map(len, lines)) <= 80
    assert re.search(r"a weights .* kv_cache 2\.", said(olmo))


def test_both_tiers_of_the_kv_cache_are_shown(composer: Composer) -> None:
    found = found_of(
        composer,
        "+model=llama31_8b",
        "gpu=rtx4090_24gb",
        "kv=cpu",
        "kv.num_cpu_blocks=8192",
        "engine.max_model_len=52000",
        VERBOSE,
    )
    assert [row.fits for row in found.rows] == [True] * 5
    assert found.rows[-1].label == "kv=gpu, auto"
    assert found.rows[-1].bytes["kv"]["tokens"] >= 52_000
    assert found.recommended is found.rows[-1]  # it is best at the length that was asked for
    plan = found.rows[0].plan
    assert plan is not None
    lines = [*point_lines(found), *capacity_lines(found.rows[0].bytes["kv"])]
    text = "\n".join(lines)
    blocks = f"{plan.num_gpu_blocks:,}"
    assert re.search(rf"GPU +{blocks} +{plan.kv_tokens:,} +\d\.\d\d", text)
    assert re.search(r"host, pinned, used in place +8,192 +131,072 +16\.00", text)
    assert "longest sequence: 131,072 tokens (max_model_len 52,000)" in text
    assert "3.3 sequences of 52,000 tokens run at once, 3.3 are kept" in " ".join(text.split())
    # Some weights over the link each step instead of more KV.
    shortest = "+model=llama31_8b gpu=rtx4090_24gb engine.max_model_len=52000 kv=gpu offload=auto"
    assert f"Shortest for such a sequence, without kv=cpu: tightfit run {shortest} " in said(found)
    assert f"Run it tightfit run {shortest} " in said(found)
    page = (ROOT / "docs/kv_cache.md").read_text(encoding="utf-8")  # the same command's figures
    for line in capacity_lines(found.rows[0].bytes["kv"]):
        assert f"  {line}\n" in page
    ms = [round(row.predicted["decode_step_long_ms"]) for row in (found.rows[-1], found.rows[0])]
    gib = found.rows[0].predicted["host_kv"]["host_bytes"] / GIB
    weights = sum(found.rows[-1].bytes["placements"].values()) / GIB
    weights -= found.rows[-1].bytes["placements"]["resident"] / GIB
    sentence = f"{ms[0]} ms with {weights:.1f} GiB of weights in host memory and"
    assert f"{sentence} {ms[1]} ms with {gib:.1f} GiB of KV." in " ".join(page.split())
    values = csv_row(found, found.rows[0], "x")
    assert values["host_kv_tokens"] == 131_072
    assert values["longest_tokens"] == 131_072
    assert values["max_kept"] == pytest.approx(plan.max_kept)
    short = ("+model=llama31_8b", "gpu=rtx4090_24gb", "engine.max_model_len=9000", VERBOSE)
    alone = found_of(composer, *short)
    text = said(alone)
    assert "host, pinned" not in text
    assert "kv=gpu, auto" not in text
    assert "ms a token of one sequence of 9,000 tokens: none " in text
    assert "from the host" not in text
    assert csv_row(alone, alone.rows[0], "x")["host_kv_tokens"] == 0
    words = ("offload=auto", "planner.auto_fields=[max_model_len]", VERBOSE)
    chosen = found_of(composer, "+model=llama31_8b", "gpu=rtx4080_16gb", *words)
    first, *others = (row.predicted["long_context_tokens"] for row in chosen.rows if row.fits)
    lines = " ".join(said(chosen).split())
    assert f"ms a token of one sequence of {first:,} tokens: auto (as set) " in lines
    assert any(f" (at {tokens:,})" in lines for tokens in others)
    refused = found_of(
        composer, "+model=llama31_8b", "gpu=rtx4090_24gb", "engine.max_model_len=52000"
    )
    advised = [way["settings"][0].split("=")[0] for way in ways_of(refused)]
    assert advised.count("kv.cpu_gib") == 1
    assert "Shorter engine.max_model_len=4" in said(refused)


@pytest.mark.slow
def test_swap_space_that_moves_weights_is_held_against_auto(composer: Composer) -> None:
    found = found_of(
        composer,
        "+model=llama31_8b",
        "gpu=rtx3060_12gb",
        "kv.swap_space=12",
        "engine.max_model_len=32768",
    )
    rows = {row.label: row for row in found.rows}
    moved, auto = rows["swap_space (as set)"], rows["auto"]
    assert found.as_set is moved
    assert moved.plan is not None
    assert moved.plan.offloaded_layers
    assert moved.predicted["decode_step_ms"] > auto.predicted["decode_step_ms"]
    assert not rows["none"].fits  # offload=none leaves every weight on the GPU
    assert rows["none"].overrides == ("offload=none", "kv.swap_space=0", "kv.cpu_gib=12")
    assert found.recommended is auto
    assert "fits rtx3060_12gb with kv.swap_space=12: " in said(found)


def test_what_is_said_beside_swap_space_can_be_typed(composer: Composer) -> None:
    typed = ("+model=smollm2_135m", "gpu=rtx4080_16gb", "offload=uva", "kv.swap_space=4")
    found = found_of(composer, *typed)
    assert found.best is not None
    words = found.command_with(found.best["settings"]).split()[2:]
    [point] = composer.plan(words).points
    assert point.config.offload_name == "none"
    assert point.config.kv.sizes == {"cpu_gib": 4.0}


def test_what_a_run_would_warn_of_is_said(composer: Composer) -> None:
    card = ("+model=olmo7b", "gpu=h100_80gb", VERBOSE)
    text = said(found_of(composer, *card, "offload=uva"))
    assert "uva (as set): offload=uva is not needed: everything fits the GPU budget" in text
    assert " ms more than " in text
    assert "Faster offload=none " in text
    assert " none: kv.cpu_gib: the host tier " in said(found_of(composer, *card, "kv.cpu_gib=200"))


def test_an_offload_that_is_set_is_shown_as_it_is(composer: Composer) -> None:
    found = found_of(composer, *OLMO, VERBOSE, "offload=uva", "offload.uva.cpu_offload_gb=5")
    assert [row.label.split(",")[0] for row in found.rows] == [
        "uva (as set)",
        "none",
        "prefetch",
        "auto",
    ]
    assert found.chosen is found.rows[0]
    assert found.rows[0].bytes["placements"]["uva"] >= 5 * GIB
    _, *slots = said(found).split("slots of 0.75 GiB")
    assert len(slots) == 1
    switch = slots[0].split("engine.")[1].split(" ")[0]
    size = "offload.uva.cpu_offload_gb=5"
    other = found_of(composer, *OLMO, VERBOSE, "offload=uva", size, f"engine.{switch}")
    freed = other.rows[0].bytes["kv"]["tokens"] - found.rows[0].bytes["kv"]["tokens"]
    assert freed * 2**19 == pytest.approx(0.75 * GIB, rel=0.05)
    assert "slots of" not in said(other)
    assert found.as_set is found.rows[0]
    sized = found_of(composer, *OLMO, "planner.auto_fields=[cpu_offload_gb]")
    assert sized.rows[0].label == "uva (as set)"
    assert sized.rows[0].bytes["placements"]["uva"] > 0


def test_a_model_that_fits_needs_no_offload(composer: Composer) -> None:
    found = found_of(composer, "+model=smollm2_135m", "gpu=rtx3060_12gb")
    assert found.recommended is found.rows[0]
    assert all(row.fits for row in found.rows)
    step = [row.predicted["decode_step_ms"] for row in found.rows]
    assert step[0] == step[3] < min(step[1:3])
    text = said(found)
    assert "smollm2_135m fits rtx3060_12gb: " in text
    assert re.search(r"Run it tightfit run \+model=smollm2_135m gpu=rtx3060_12gb # about 0", text)


def test_what_cannot_fit_is_said_with_figures(composer: Composer) -> None:
    found = found_of(composer, "+model=qwen3_14b", "gpu=rtx3060_12gb", "gpu.memory_gib=1.5")
    assert found.recommended is None
    text = said(found)
    assert "qwen3_14b does not fit rtx3060_12gb: " in text
    assert re.search(r"or use a card of 3\d\.\d\d GiB, which needs no offload", text)
    assert "planner.auto_fields" not in text  # nobody set it
    assert found.rows[1].label == "uva, 27.51 GiB"
    assert found.minutes(found.rows[0].plan) == 0


def test_a_local_config_is_enough(composer: Composer, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    local = ("+model=local", f"model.path={quoted(tmp_path)}", "gpu=l4_24gb")
    (found, named) = (
        found_of(composer, *local),
        found_of(composer, "+model=llama2_7b", "gpu=l4_24gb"),
    )
    assert found.spec.num_parameters == named.spec.num_parameters
    assert [row.fits for row in found.rows] == [row.fits for row in named.rows]
    for changes, words in (
        ({"model_type": "phi3"}, "expected model_type among llama"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ConfigError, match=words):
            found_of(composer, *local)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"model\.path"):
        found_of(composer, *local)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.path: .*config\.json: not JSON"):
        found_of(composer, *local)
    with pytest.raises(ConfigError, match=r"model\.path"):
        found_of(composer, "+model=local")


def test_a_local_config_without_a_dtype_is_planned_in_that_of_its_files(
    composer: Composer, tmp_path: Path
) -> None:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = {"model_type": "llama", "num_attention_heads": 2} | dict.fromkeys(names, 64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {"model.norm.weight": np.zeros(9, np.uint16), "a": np.zeros(3, np.float32)}
    write_weights(tmp_path, weights)
    found = found_of(composer, "+model=local", f"model.path={quoted(tmp_path)}", "gpu=l4_24gb")
    assert {row.plan.dtype for row in found.rows if row.plan} == {"bfloat16"}
    assert "it counts as bfloat16, which most elements have (3 of float32)" in said(found)


def test_a_plan_knows_which_tensors_a_load_found_that_codes_cannot_hold(
    composer: Composer, tmp_path: Path, home: Path
) -> None:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = {"model_type": "llama", "num_attention_heads": 2} | dict.fromkeys(names, 64)
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    write_weights(tmp_path, {"model.norm.weight": np.zeros(9, np.uint16)})
    name = "model.layers.1.mlp.down_proj.weight"
    overrides = ["+model=local", f"model.path={quoted(tmp_path)}", "gpu=l4_24gb"]
    (point,) = composer.plan([*overrides, "mode=plan", "engine.weight_format=lossless"]).points
    before = forecast(point.config, ()).rows[0].plan
    write_unpackable(str(home / "facts"), str(tmp_path), {name: "many escapes"})
    after = forecast(point.config, ()).rows[0].plan
    assert before is not None
    assert after is not None
    assert before.formats.others.keys() - after.formats.others.keys() == {name}
    assert (after.weight_format or {})["plain_matrices"]["many escapes"] == [name]


def test_host_memory_of_a_machine_that_is_not_here_is_stated(composer: Composer) -> None:
    unknown = found_of(composer, *HUGE_TIER)
    plan = unknown.rows[-1].plan
    assert plan is not None
    need = plan.host_total_bytes / GIB + 1
    text = said(unknown)
    assert f"Needs {need:.2f} GiB of free host memory, including a 1 GiB reserve. Not" in text
    uva = found_of(composer, *OLMO, "gpu.host_gib=4", "offload=uva")
    assert "3.00 GiB of gpu.host_gib=4 are available after a reserve of 1 GiB" in said(uva)


@pytest.mark.slow
def test_host_memory_that_is_stated_bounds_what_is_told_of_it(composer: Composer) -> None:
    known = found_of(composer, *HUGE_TIER, "gpu.host_gib=64")
    assert not any(row.fits for row in known.rows)
    assert known.best is not None
    [advised] = known.best["settings"]
    assert advised.startswith("kv.cpu_gib=")
    assert found_of(composer, *HUGE_TIER, "gpu.host_gib=64", advised).plan is not None
    assert "Not checked" not in said(known)


def test_the_machine_of_a_plan(composer: Composer, monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(*overrides: str) -> DeviceFacts:
        (point,) = composer.plan(overrides).points
        return forecast_rows.machine_facts(point.config)[0]

    card = facts("gpu=l4_24gb")
    assert (card.kind, card.name, card.total_bytes) == ("cuda", "l4_24gb", 23034 * 2**20)
    assert card.host_available_bytes == UNKNOWN_HOST_BYTES

    class Here:
        uuid = "GPU-1"

        def facts(self) -> dict[str, Any]:
            return {"name": "NVIDIA L4", "memory_bytes": 24 * GIB}

        def sample(self) -> dict[str, Any]:
            return {"gpu_used_bytes": GIB}

        def compute_capability(self) -> tuple[int, int]:
            return 8, 9

        def holders(self) -> tuple[str, ...]:
            return ()

    monkeypatch.setattr("engine.device.machine.open_gpu", Here)
    here = facts("gpu=auto")
    assert (here.name, here.free_bytes) == ("NVIDIA L4", 23 * GIB)
    assert here.compute_capability == (8, 9)
    assert here.host_available_bytes < UNKNOWN_HOST_BYTES
    part = facts("gpu=auto", "gpu.memory_gib=8")
    assert (part.name, part.total_bytes) == ("NVIDIA L4", 24 * GIB)
    assert facts("gpu=l4_24gb").name == "NVIDIA L4"  # by its sheet
    assert facts("gpu=rtx4080_16gb").name == "rtx4080_16gb"
    assert facts("gpu=cpu").kind == "cpu"
    monkeypatch.setattr("engine.device.machine.open_gpu", lambda: None)
    assert facts("gpu=auto").kind == "cpu"


def test_a_point_on_the_command_line(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert main([*OLMO, "mode=plan"]) == 0
    assert "\nBest fix   engine.weight_format=lossless " in capsys.readouterr().out
    assert main(["+model=qwen3_14b", "gpu.memory_gib=1.5", "gpu.name=x", "mode=plan"]) == 0
    assert not (home / "runs").exists()  # a plan needs no home


def test_a_sweep_is_one_table_and_a_csv_file(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    command = ["-m", "+model=olmo7b", "gpu=rtx3060_12gb,rtx4090_24gb", "offload=none,auto"]
    assert main([*command, "mode=plan", PLAIN, "scenario=latency"]) == 0
    out = capsys.readouterr().out
    assert "gpu=rtx3060_12gb offload=none" in out
    assert "4 points, 1 does not fit with its settings; running the others takes about" in out
    assert re.search(r"gpu=rtx3060_12gb offload=none +no +- +offload=auto +\d", out)
    [path] = (home / "runs").glob("*/plan.csv")
    figure = path.with_suffix(".png")
    assert f"as a figure: {figure}" in out
    assert figure.read_bytes().startswith(b"\x89PNG")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"point", "offload", "fits", "decode_tokens_s", "error"} <= rows[0].keys()
    assert {row["fits"] for row in rows} == {"True", "False"}
    best = [row for row in rows if row["recommended"] == "True"]
    assert [row["offload"] for row in best][:2] == ["auto", "auto"]
    assert len(best) == 4
    assert float(best[0]["decode_tokens_s"]) > 1
    assert rows[0]["decode_tokens_s"] == ""
    assert all(bool(row["error"]) != (row["fits"] == "True") for row in rows)
    assert rows[0]["error"].startswith("olmo7b does not fit rtx3060_12gb: ")


@pytest.mark.parametrize(
    ("override", "least", "most"),
    [
        ("scenario.serve.num_requests=20", 0, 1.0),
        ("scenario.serve.num_requests=600", 9.5, 11.5),
        ("scenario.serve.arrivals.rate_per_s=0.05", 6, 8),
    ],
)
def test_arrivals_take_their_time(
    composer: Composer, override: str, least: float, most: float
) -> None:
    found = found_of(composer, "+model=smollm2_135m", "gpu=l4_24gb", "scenario=serve", override)
    assert least < found.minutes(found.rows[0].plan) < most


@pytest.mark.slow
def test_repeats_and_rates_of_a_search_count(composer: Composer) -> None:
    base = ("+model=olmo7b", "gpu=rtx4080_16gb", "scenario=throughput")
    few, many = (
        found_of(composer, *base, f"scenario.throughput.repeats={count}") for count in (1, 8)
    )
    rows = [next(row for row in item.rows if row.label == "auto") for item in (few, many)]
    assert many.minutes(rows[1].plan) > 4 * few.minutes(rows[0].plan)
    search = found_of(composer, "+model=smollm2_135m", "gpu=l4_24gb", "scenario=serve_peak")
    assert search.minutes(search.rows[0].plan) > 8 * 10 / 60


def test_run_and_plan_do_not_mix() -> None:
    assert main(["-m", "+model=glass", "mode=run,plan"]) == 2


def test_minutes_grow_with_the_scenario(composer: Composer) -> None:
    few = found_of(composer, *OLMO, "offload=auto", "scenario=latency")
    many = found_of(
        composer, *OLMO, "offload=auto", "scenario=latency", "scenario.latency.num_requests=640"
    )
    row, more = (next(r for r in item.rows if r.label == "auto") for item in (few, many))
    assert many.minutes(more.plan) > 5 * few.minutes(row.plan)
    table = sweep_table([few, many], ["few", "many"])
    assert table[2].strip().startswith("few")
    assert "2 points, all fit; running them takes about" in table[-1]


@pytest.mark.thorough
def test_the_page_on_two_tiers_has_the_figures_of_its_second_command(composer: Composer) -> None:
    found = found_of(
        composer,
        "+model=llama31_8b",
        "gpu=rtx4090_24gb",
        "kv=cpu",
        "kv.cpu_gib=64",
        "engine.max_model_len=52000",
        "engine.max_num_seqs=8",
        "engine.weight_format=checkpoint",
    )
    assert found.plan is not None
    page = (ROOT / "docs/kv_cache.md").read_text(encoding="utf-8")
    host = (found.plan.predicted or {})["host_kv"]
    rows = [f"| 1 |  | {1e3 / host['decode_step_ms']:.1f} | {host['decode_step_ms'] / 1e3:.3f} |"]
    for each in host["together"][1:]:
        how = f"in turns of {each['turn_tokens']} tokens"
        rows.append(
            f"| {each['sequences']} | {how} | {each['tokens_s']:.1f} | {each['wait_s']:.3g} |"
        )
    assert "\n".join(rows) in page
    one = host["together"][0]
    assert f"{one['skipped_steps']} steps, {100 * one['short_share']:.0f} %." in page
