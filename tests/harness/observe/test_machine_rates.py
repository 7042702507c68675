"""Rates that a probe found are kept per machine and driver, and planned with."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from harness.config.compose import Composer
from harness.config.study import BareScenario
from harness.forecast.rows import Forecast, forecast
from harness.observe import machine_rates
from harness.observe.machine_rates import Probed, rates_path, read_rates, write_rates
from harness.sweep.plan import point_lines
from harness.systems import door
from harness.work import bare
from harness.work.bare import measure_bare, rates_note
from tests.engine.specs import configuration, small_spec

RATES = {"h2d_gb_s": 20.0, "in_place_gb_s": None, "bf16_tflops": 100.0, "hbm_copy_gb_s": 800.0}
MEMORY = {"memory_bytes": 24 * 2**30}


class Card:
    uuid = "GPU-1"

    def __init__(self, **facts: Any) -> None:
        self._facts = {"name": "NVIDIA L4", "uuid": "GPU-1", "driver": "550.1"} | MEMORY | facts

    def facts(self) -> dict[str, Any]:
        return self._facts

    def sample(self) -> dict[str, Any]:
        return {"gpu_used_bytes": 0}

    def compute_capability(self) -> tuple[int, int]:
        return 8, 9

    def holders(self) -> tuple[str, ...]:
        return ()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    return tmp_path


def test_rates_are_kept_for_one_card_driver_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    card: Any = Card()
    write_rates(card, RATES)
    found = read_rates(card)
    assert found is not None
    assert found.rates == {name: rate for name, rate in RATES.items() if rate is not None}
    others: list[Any] = [None, Card(driver="551.0"), Card(uuid="GPU-2"), Card(name="NVIDIA L40")]
    assert [read_rates(other) for other in others] == [None] * 4
    monkeypatch.setattr(machine_rates, "processor_facts", lambda: {"name": "another"})
    assert read_rates(card) is None


def test_rates_of_a_cpu_are_those_of_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write_rates(None, RATES)
    card: Any = Card()
    write_rates(card, RATES)
    assert read_rates(None) is not None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert read_rates(None) is None
    assert read_rates(card) is not None
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(machine_rates, "num_threads", lambda: 99)
    assert read_rates(None) is None


@pytest.mark.parametrize("text", ["{", "{}", '{"rates": 1, "measured_at": 2}', '{"rates": {}}'])
def test_a_file_that_cannot_be_read_is_none(text: str) -> None:
    path = rates_path(None)
    path.parent.mkdir()
    path.write_text(text)
    assert read_rates(None) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 minutes ago"), (7100, "118 minutes ago"), (7200, "2 hours ago"), (4e5, "5 days ago")],
)
def test_the_age_is_said_in_words(seconds: float, words: str) -> None:
    assert Probed(rates={}, measured_at=1000.0).age(1000.0 + seconds) == words


def test_a_scenario_measures_and_keeps_them(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measure(device: str) -> dict[str, float | None]:
        asked.append(device)
        return {**RATES}

    monkeypatch.setattr("harness.observe.probe.probe_rates", measure)
    monkeypatch.setattr(bare, "watched", lambda probe: (probe(), 0.0))
    figures = measure_bare(BareScenario(parts=["rates"]), configuration(small_spec()), None)
    [path] = (home / "rates").iterdir()
    assert figures["rates"] == {"rates": RATES, "others_cores": 0.0, "file": str(path)}
    assert json.loads(path.read_text(encoding="utf-8"))["rates"] == RATES
    assert asked == ["cpu"]
    note = rates_note(figures["rates"])
    assert "h2d_gb_s 20.0, in_place_gb_s not measured" in note
    assert note.endswith(f"Kept in {path}.")
    note = rates_note(figures["rates"] | {"others_cores": 99.0})
    assert note.endswith(
        "Other processes used 99.0 cores meanwhile, so the rates are lower than the"
        " machine's: end them and probe again."
    )


def test_a_probe_says_what_other_processes_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Machine(NamedTuple):
        user: float
        idle: float

    clock = iter([0.0, 2.0])
    machine = iter([Machine(10.0, 50.0), Machine(13.0, 51.0)])  # 3 s of work in 2 s
    own = iter([SimpleNamespace(user=1.0, system=0.0), SimpleNamespace(user=1.5, system=0.5)])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("psutil.cpu_times", lambda: next(machine))
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(cpu_times=lambda: next(own)))
    rates, others_cores = machine_rates.watched(lambda: RATES)
    assert rates == RATES
    assert others_cores == pytest.approx(1.0)  # 1 of the 3 s was its own


def test_rates_that_others_disturbed_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(device: str) -> dict[str, float | None]:
        return {"sequence_overhead_s": 1e-4, "hbm_copy_gb_s": next(speeds)}

    speeds, loads = iter([3.0, 12.0, 13.0]), iter([99.0, 0.0])
    now = [1000.0]
    monkeypatch.setattr("harness.observe.probe.probe_rates", measure)
    monkeypatch.setattr(door, "watched", lambda probe: (probe(), next(loads)))
    monkeypatch.setattr("time.time", lambda: now[0])
    config = configuration(small_spec())
    found = []
    for now[0] in (1000.0, 1500.0, 1700.0, 1e6):
        found.append(door.rates_of_cpu(config)["hbm_copy_gb_s"])
    assert found == [3.0, 3.0, 12.0, 12.0]
    disturbed = Probed(rates={}, measured_at=0.0, others_cores=99.0)
    assert disturbed.age(120.0) == "2 minutes ago while other processes used 99.0 cores"


@pytest.mark.thorough
def test_a_plan_uses_them_where_the_card_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    composer = Composer()
    card: Any = Card()
    monkeypatch.setattr("engine.device.machine.open_gpu", lambda: card)

    def found(gpu: str) -> Forecast:
        (point,) = composer.plan(
            ["mode=plan", "+model=olmo7b", f"gpu={gpu}", "scenario=latency"]
        ).points
        return forecast(point.config, tuple(point.overrides))

    before = found("l4_24gb")
    text = " ".join(" ".join(point_lines(before)).split())
    assert "(measure this machine's: `tightfit run scenario=probe`)" in text
    write_rates(card, RATES)
    after = found("l4_24gb")
    text = " ".join(" ".join(point_lines(after)).split())
    source = "probe of this machine; the rest: data sheet of NVIDIA L4 (probed 0 minutes"
    assert f"Predicted from: {source}" in text
    rates = after.rows[0].predicted["rates"]
    assert (rates["h2d_gb_s"], rates["hbm_gb_s"], rates["bf16_tflops"]) == (20.0, 800.0, 100.0)
    assert before.rows[0].predicted["rates"]["h2d_gb_s"] != 20.0
    assert found("rtx4080_16gb").probed is None


def test_a_cpu_is_measured_once_and_then_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measure(device: str) -> dict[str, float | None]:
        asked.append(device)
        return {"sequence_overhead_s": 1e-4, "hbm_copy_gb_s": 11.0, "two_way_gb_s": None}

    monkeypatch.setattr("harness.observe.probe.probe_rates", measure)
    monkeypatch.setattr(door, "watched", lambda probe: (probe(), 0.0))
    write_rates(None, {"h2d_gb_s": 5.0})  # by an earlier version, which measured less
    config = configuration(small_spec())
    for _ in range(2):
        found = door.rates_of_cpu(config)
        assert found == {"sequence_overhead_s": 1e-4, "hbm_copy_gb_s": 11.0}
    assert asked == ["cpu"]
    monkeypatch.setattr(door, "open_gpu", Card)
    assert door.rates_of_cpu(config) == {}
