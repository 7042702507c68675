"""Times of decode steps on a clock of ours, and every part with the tiny engine on a CPU."""

from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace

import pytest

from engine.errors import ConfigError, RequestError
from harness.config.study import StepsScenario
from harness.work import steps
from harness.work.steps import Sender, decode, measure_steps
from tests.harness.fakes import EXPERT_COUNTS
from tests.harness.studies.kv_engine import Clock
from tests.tiny import hf_model, open_llm, save


class ScriptedLLM:
    """Every step takes 1 s; those at the indices in `slow` take 100 s."""

    def __init__(self, clock, slow=(), graphs=(2, 4), kv_tokens=4096):
        self.clock, self.slow, self.count, self.running = clock, slow, 0, {}
        self.tokenizer = None
        self.spec = SimpleNamespace(vocab_size=100, kv_bytes_per_token=lambda dtype: 10)
        self.plan = SimpleNamespace(
            kv_tokens=kv_tokens,
            block_size=16,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            dtype="bfloat16",
            predicted=None,
            moved_per_step=lambda num_decodes: (7, 0),
        )
        self.effective = lambda: {"graphs": list(graphs)}
        self.last_step = None

    def add_request(self, prompt, params, request_id):
        self.running[request_id] = params.max_tokens

    def has_unfinished(self):
        return bool(self.running)

    def step(self):
        is_prefill = self.last_step is None
        self.clock.now += 100 if self.count in self.slow else 1
        self.count += 1
        num, ending = len(self.running), [k for k, left in self.running.items() if left == 1]
        self.last_step = SimpleNamespace(
            num_prefill_tokens=8 * num if is_prefill else 0,
            num_decode_tokens=0 if is_prefill else num,
            h2d_bytes=7,
            in_place_bytes=0,
            wait_s=0.5,
            used_graph=True,
            is_overlapped=True,
            **dict.fromkeys(EXPERT_COUNTS, 0),
        )
        events = [
            SimpleNamespace(
                request_id=name,
                token_id=self.count,
                time_s=self.clock(),
                finish_reason="length" if name in ending else None,
            )
            for name in self.running
        ]
        self.running = {k: left - 1 for k, left in self.running.items() if left > 1}
        return events


@pytest.fixture
def clock():
    return Clock()


WORK = StepsScenario(batches=[3], prompt_tokens=8, steps=6)


def test_steps_that_warm_a_batch_up_are_not_timed(clock, monkeypatch):
    # 0: prefill; 1-5 warm up, 6-8 timed, replay, 9-11 settle, 12-14 timed, 15-19 spare.
    llm = ScriptedLLM(clock, slow=(1, 2, 3, 4, 5, 9, 10, 11, *range(15, 20)))
    monkeypatch.setattr(steps, "replay_s", lambda *_: 0.9)
    got = decode(Sender(llm, clock), 3, replace(WORK, warmup_tokens=13))
    assert got["step_s"] == got["least_s"] == 1
    assert got["steps"] == 6
    assert len(got["tokens"]) == 3 * 20


def test_first_steps_and_those_behind_a_replay_are_not_timed(clock, monkeypatch):
    # 0: prefill; 1-3 settle, 4-6 timed, replay, 7-9 settle, 10-12 timed, 13-14 spare.
    llm = ScriptedLLM(clock, slow=(1, 2, 3, 7, 8, 9, 13, 14))
    replays = []

    def replay(llm, size, step_s):
        replays.append((llm.count, size, step_s))
        clock.now += 1000
        return 0.9

    monkeypatch.setattr(steps, "replay_s", replay)
    got = decode(Sender(llm, clock), 3, WORK)
    assert got["step_s"] == got["least_s"] == 1
    assert got["steps"] == 6
    assert replays == [(7, 4, 1)]  # padded to the graph of four rows
    assert got["replay_s"] == 0.9
    # Decode k reads 8 + k keys: 4, 5, 6 and 10, 11, 12 are 16 on average.
    assert got["kv_bytes"] == 3 * 16 * 10
    assert (got["h2d_bytes"], got["planned_h2d_bytes"]) == (7, 7)
    assert len(got["tokens"]) == 3 * 15
    assert got["predicted_s"] is None


def test_a_batch_without_room_is_said_and_nothing_is_sent(clock):
    llm = ScriptedLLM(clock, kv_tokens=64)
    got = decode(Sender(llm, clock), 3, WORK)
    # 8 + 15 tokens are two blocks of 16, three times.
    assert got == {"no_room": "96 tokens of KV are needed, 64 fit"}
    assert not llm.has_unfinished()


def test_a_request_that_gives_fewer_tokens_ends_the_measurement(clock):
    llm = ScriptedLLM(clock)
    sender = Sender(llm, clock)
    assert sender.run([[1, 2]], 3) == 3
    plain = llm.step

    def step():
        events = plain()
        llm.running.clear()
        return events

    llm.step = step
    with pytest.raises(RequestError, match="after 1 tokens"):
        sender.run([[1, 2]], 3)


@pytest.mark.parametrize("fields", [{}, {"batches": [0]}, {"chunks": [4], "counter_s": -1.0}])
def test_what_measures_nothing_or_cannot_be_is_refused(fields):
    with pytest.raises(ConfigError, match=r"scenario\.steps"):
        StepsScenario(**fields)


@pytest.mark.thorough
def test_every_part_of_an_engine_on_a_cpu(glass_model_dir):
    config = StepsScenario(
        batches=[1, 2, 8],
        prompt_tokens=8,
        steps=4,
        prefills=[1],
        prefill_tokens=16,
        chunks=[1, 8, 1000],
        counter_s=0.01,
    )
    found = {}
    for name, offload in (("resident", {}), ("uva", {"cpu_offload_gb": 0.001})):
        llm = open_llm(glass_model_dir, max_num_seqs=2, **offload)
        found[name] = measure_steps(llm, config, clock=perf_counter)
        llm.close()
    one, two = (found[name]["decode"]["2"] for name in ("resident", "uva"))
    assert one["tokens"] == two["tokens"]
    assert one["steps"] == 4
    assert (one["in_place_bytes"], one["planned_in_place_bytes"]) == (0, 0)
    assert two["in_place_bytes"] == two["planned_in_place_bytes"] > 2**20
    assert "are needed" in found["uva"]["decode"]["8"]["no_room"]
    assert found["uva"]["prefill"]["1"]["seconds"] > 0
    for length, num in {"1": 6, "8": 6}.items():
        tokens = [found[name]["chunk_tokens"][length] for name in ("resident", "uva")]
        assert tokens[0] == tokens[1]
        assert len(tokens[0]) == num  # one of each repeat, and of the one before
    assert found["uva"]["chunk_tokens"]["1000"] is None
    assert found["uva"]["chunk_s"]["8"] > 0
    assert found["uva"]["chunk_s"]["1000"] is None
    assert found["uva"]["chunk_expert_bytes"] == {"1": 0, "8": 0, "1000": None}
    assert found["uva"]["counter"]["engine_gb_s"] > found["resident"]["counter"]["engine_gb_s"] == 0
    assert found["uva"]["counter"]["nvml_gb_s"] is None
    assert found["resident"]["read_bytes"] == 4 * 852_608  # float32, the table is tied


@pytest.mark.thorough
def test_experts_that_a_prompt_copied(tmp_path):
    folder = save(hf_model("qwen3_moe"), tmp_path / "model")
    llm = open_llm(folder, offload_backend="experts", expert_slots=2)
    found = measure_steps(llm, StepsScenario(batches=[], chunks=[16]), clock=perf_counter)
    counted = llm.stats()["experts"]
    llm.close()
    by_expert = [
        size / misses for size, misses in zip(counted["bytes"], counted["misses"], strict=True)
    ]
    assert len(set(by_expert)) == 1
    # Of all prompts but the first, a whole number of experts; six ran.
    num = found["chunk_expert_bytes"]["16"] * steps.REPEATS / by_expert[0]
    assert num == pytest.approx(round(num))
    assert 0 < num < sum(counted["misses"])


@pytest.mark.gpu
def test_graphs_are_replayed_and_the_link_is_counted_on_a_gpu(glass_model_dir):
    config = StepsScenario(batches=[2], prompt_tokens=8, steps=8, counter_s=0.2)
    llm = open_llm(glass_model_dir, device="cuda", max_num_seqs=2, cpu_offload_gb=0.001)
    found = measure_steps(llm, config, clock=perf_counter)
    llm.close()
    figures = found["decode"]["2"]
    assert figures["used_graph"]
    assert figures["replay_s"] > 0
    assert figures["in_place_bytes"] > 0
    assert found["counter"]["engine_gb_s"] > 0
