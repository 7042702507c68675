"""mode=plan where a queue is timed: what is best for one stands beside what is set."""

import re
from pathlib import Path

import pytest

from harness.config.compose import Composer
from harness.forecast.rows import FOR_QUEUE, Forecast, forecast
from harness.sweep.plan import point_lines
from tests.slow import slow

pytestmark = pytest.mark.thorough

NEARLY_FULL = ("+model=mistral_7b", "gpu=rtx4080_16gb", "gpu.memory_gib=16.9")
QUEUE = "planner.objective=throughput"
LIMIT = "engine.max_model_len=1024"
PLAIN = "engine.weight_format=checkpoint"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def found_of(composer: Composer, *overrides: str) -> Forecast:
    asked = ["mode=plan", "plan.verbose=true", *NEARLY_FULL, LIMIT, PLAIN, *overrides]
    (point,) = composer.plan(asked).points
    return forecast(point.config, tuple(point.overrides))


@pytest.mark.parametrize("scenario", [slow("throughput"), "serve"])
def test_what_is_best_for_a_queue_is_shown_where_one_is_timed(
    composer: Composer, scenario: str
) -> None:
    found = found_of(composer, f"scenario={scenario}")
    row = found.rows[-1]
    assert row.label == FOR_QUEUE
    assert row.queue_tokens_s > 1.5 * found.rows[-2].queue_tokens_s
    assert found.recommended is found.rows[0]  # as the objective is latency
    text = " ".join(" ".join(point_lines(found)).split())
    assert f"auto (throughput) {row.queue_tokens_s:,.0f}." in text
    _, line = text.split("Best for such a queue: ")
    assert " offload=auto planner.objective=throughput " in line


@pytest.mark.slow
def test_it_is_recommended_where_the_objective_is_a_queue(composer: Composer) -> None:
    found = found_of(composer, "scenario=throughput", "offload=auto", QUEUE)
    assert [row.label for row in found.rows][-1] == "auto"
    assert found.recommended is found.rows[-1]
    text = " ".join(" ".join(point_lines(found)).split())
    assert "recommended: auto: embedding read in place; " in text
    assert re.search(r"Run it tightfit run .* planner.objective=throughput", text)
    roomy = found_of(composer, "offload=auto", QUEUE, "gpu.memory_gib=40")
    assert roomy.recommended is not None
    assert roomy.recommended.host_weights_bytes == 0


def test_what_makes_the_room_that_is_asked_for_is_recommended(composer: Composer) -> None:
    found = found_of(composer, "offload=auto", "planner.kv_tokens=9000", "scenario=latency")
    best = found.recommended
    assert best is not None
    assert best.label == "auto"
    assert best.plan is not None
    assert best.plan.kv_tokens >= 9000
    little = found_of(composer, "offload=auto", "planner.kv_tokens=900", "scenario=latency")
    assert little.recommended is not None
    assert little.recommended.host_weights_bytes == 0


def test_one_request_at_a_time_shows_no_queue(composer: Composer) -> None:
    found = found_of(composer, "scenario=latency")
    assert [row.label.split(",")[0] for row in found.rows] == ["none", "uva", "prefetch", "auto"]
    assert not any("requests of" in line for line in point_lines(found))


def test_a_roomy_card_shows_none_either(composer: Composer) -> None:
    found = found_of(composer, "scenario=throughput", "gpu.memory_gib=40")
    assert FOR_QUEUE not in [row.label for row in found.rows]
