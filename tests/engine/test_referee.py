"""planner.referee: the two best candidates are timed in turn, and the faster one stays."""

from dataclasses import replace
from typing import Any

import pytest

from engine import LLM
from engine.asked.config import EngineConfig, PlannerConfig
from engine.asked.sampling import SamplingParams
from engine.build import TIMED_STEPS, judge, workload_of
from engine.errors import CapacityError, ConfigError
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_candidates, plan_memory
from tests.engine.specs import CPU, H200, OLMO_7B, configuration, small_spec
from tests.tiny import greedy_params, make_prompt, tokens_of


def asked(objective: str = "latency", **changes: Any) -> EngineConfig:
    config = configuration(OLMO_7B, memory_gib=15.99, max_model_len=4096, **changes)
    planner = PlannerConfig(choose=True, objective=objective, referee=True)
    return replace(config, planner=planner)


@pytest.fixture(scope="module")
def two() -> list[MemoryPlan]:
    return plan_candidates(asked(), OLMO_7B, H200, 2)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeEngine:
    """Prefills all prompts in a step of 1 s, then decodes; steps take `step_s`."""

    open_now = 0

    def __init__(self, clock: Clock, step_s: float, *, most: int = 10**6) -> None:
        type(self).open_now += 1
        assert type(self).open_now == 1, "two engines at once"
        self._clock, self._step_s, self._most = clock, step_s, most
        self._left: dict[str, int] = {}
        self._is_new = True
        self.last_step: Any = None
        self.prompts: list[list[int]] = []
        self.steps = 0

    def add_request(self, prompt: list[int], params: SamplingParams) -> str:
        assert params.max_tokens is not None
        self.prompts.append(prompt)
        self._left[str(len(self.prompts))] = min(params.max_tokens, self._most)
        return str(len(self.prompts))

    def step(self) -> list[Any]:
        count, self.steps = len(self._left), self.steps + 1
        prefills = sum(map(len, self.prompts)) if self._is_new else 0
        self._clock.now_s += 1.0 if self._is_new else self._step_s
        decodes = 0 if self._is_new else count
        kinds = {"num_prefill_tokens": prefills, "num_decode_tokens": decodes}
        self.last_step = type("Step", (), kinds)()
        self._is_new = False
        names = list(self._left)
        self._left = {name: left - 1 for name, left in self._left.items() if left > 1}
        return [type("Event", (), {"request_id": name})() for name in names]

    def has_unfinished(self) -> bool:
        return bool(self._left)

    def close(self) -> None:
        type(self).open_now -= 1


def refereed(plans: list[MemoryPlan], *steps_s: float, most: int = 10**6) -> MemoryPlan:
    clock, times = Clock(), iter(steps_s)
    found = judge(plans, 100, lambda plan: FakeEngine(clock, next(times), most=most), clock)
    assert FakeEngine.open_now == 0
    return found


def test_the_candidates_are_the_two_best_predicted(two: list[MemoryPlan]) -> None:
    config = asked()
    first, second = two
    assert first == plan_memory(config, OLMO_7B, H200)
    assert first.placements != second.placements
    labels = [row["label"] for row in (first.choice or {})["candidates"][:2]]
    assert [(plan.choice or {})["chosen"] for plan in two] == labels
    times = [(plan.predicted or {})["decode_step_ms"] for plan in two]
    assert times[0] <= times[1] * 1.01
    assert len(plan_candidates(config, OLMO_7B, H200, 1)) == 1


@pytest.mark.parametrize(("steps_s", "winner"), [((0.1, 0.2), 0), ((0.2, 0.1), 1)])
def test_the_faster_one_stays(
    two: list[MemoryPlan], steps_s: tuple[float, float], winner: int
) -> None:
    found = refereed(two, *steps_s)
    assert found.placements == two[winner].placements
    record = (found.choice or {})["referee"]
    assert [row["decode_step_ms"] for row in record["timed"]] == pytest.approx(
        [1e3 * seconds for seconds in steps_s]
    )
    assert record["timed"][0]["predicted_decode_step_ms"] > 0
    assert "fastest of 2 that were timed" in record["result"]
    assert (found.choice or {})["chosen"] == record["timed"][winner]["label"]


def test_one_candidate_is_not_timed(two: list[MemoryPlan]) -> None:
    found = judge(two[:1], 100, lambda plan: pytest.fail("built"), Clock())
    assert (found.choice or {})["referee"]["timed"] == []
    assert found.placements == two[0].placements


def test_a_candidate_that_cannot_be_built_loses_nothing(two: list[MemoryPlan]) -> None:
    clock = Clock()

    def build(plan: MemoryPlan) -> FakeEngine:
        if plan is two[0]:
            raise CapacityError("no room")
        return FakeEngine(clock, 0.1)

    found = judge(two, 100, build, clock)
    assert found.placements == two[0].placements
    first, second = (found.choice or {})["referee"]["timed"]
    assert (first["error"], first["decode_step_ms"]) == ("no room", None)
    assert second["decode_step_ms"] == pytest.approx(100)


def test_too_few_steps_keep_the_best_predicted(two: list[MemoryPlan]) -> None:
    found = refereed(two, 0.2, 0.1, most=2)
    assert found.placements == two[0].placements
    assert "not every candidate could be timed" in (found.choice or {})["referee"]["result"]


@pytest.mark.thorough
def test_throughput_is_that_of_the_queue_at_each_one_s_batch() -> None:
    config = asked("throughput")
    plans = plan_candidates(config, OLMO_7B, H200, 2)
    found = refereed(plans, 0.2, 0.1)
    rows = (found.choice or {})["referee"]["timed"]
    for plan, row, step_s in zip(plans, rows, (0.2, 0.1), strict=True):
        workload = workload_of(plan, "throughput")
        assert (row["batch"], row["prompt_tokens"]) == (workload.batch, 128)
        assert workload.batch > 1
        assert row["seconds"] == pytest.approx(max(1, 200 / workload.batch) * (1 + 127 * step_s))


@pytest.mark.parametrize("objective", ["latency", "context", "throughput"])
@pytest.mark.parametrize("length", [2, 3, 16, 40, 4096])
def test_loads_fit_the_length(two: list[MemoryPlan], objective: str, length: int) -> None:
    workload = workload_of(replace(two[0], max_model_len=length), objective)
    assert workload.prompt_tokens >= 1
    assert workload.output_tokens >= 1
    assert workload.prompt_tokens + workload.output_tokens <= length
    if length == 4096:
        assert workload.output_tokens > TIMED_STEPS


def test_without_choose_it_has_no_effect_and_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"planner\.referee: expected planner\.choose=true"):
        PlannerConfig(referee=True)


@pytest.mark.thorough
def test_engines_are_built_timed_and_the_winner_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec()
    config = configuration(spec, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32)
    resident = plan_memory(replace(config, gpu=replace(config.gpu, memory_gib=1)), spec, CPU)
    room = resident.gpu_total_bytes - resident.gpu_items["weights"] // 4
    config = replace(
        config,
        gpu=replace(config.gpu, memory_gib=room / 0.9 / 2**30),
        planner=PlannerConfig(choose=True, referee=True),
    )
    plans = plan_candidates(config, spec, CPU, 2)
    assert len(plans) == 2
    llm = LLM.from_config(config)
    record = (llm.plan.choice or {})["referee"]
    assert [row["decode_step_ms"] > 0 for row in record["timed"]] == [True, True]
    tokens = tokens_of(llm.generate([make_prompt(8)], greedy_params(4)))
    llm.close()
    plain = LLM.from_config(replace(config, planner=PlannerConfig(choose=True)))
    assert "referee" not in (plain.plan.choice or {})
    assert tokens_of(plain.generate([make_prompt(8)], greedy_params(4))) == tokens
    plain.close()
