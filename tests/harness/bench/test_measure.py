"""Times of decode steps on a clock of ours, and all cases end to end with the GPU emulated."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine import LLM, probe, probe_moves
from engine.errors import CapacityError
from harness.bench import __main__ as command
from harness.bench import measure
from harness.bench.cases import Asked, Case, Limits, Work, cases, engine_config, read_model
from harness.bench.kv_cases import KVAsked, kv_cases
from harness.errors import ConfigError

pytestmark = pytest.mark.slow

TINY = [
    *("--device", "cpu", "--model", "glass", "--batches", "1,2", "--prompt-tokens", "8"),
    *("--prefill-tokens", "16", "--max-num-batched-tokens", "64", "--steps", "4"),
    *("--memory-gib", "0.5", "--resident-gib", "0.5", "--uva-gib", "0.001"),
    *("--prefetch", "2/1/1", "--counter-s", "0.05"),
]


class ScriptedLLM:
    """Every step takes 1 s; those at the indices in `slow` take 100 s."""

    def __init__(self, clock, slow=(), graphs=(2, 4), kv_tokens=4096):
        self.clock, self.slow, self.count, self.running = clock, slow, 0, []
        self.spec = SimpleNamespace(vocab_size=100, kv_bytes_per_token=lambda dtype: 10)
        self.plan = SimpleNamespace(
            kv_tokens=kv_tokens,
            block_size=16,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            dtype="bfloat16",
            moved_per_step=lambda num_decodes: (7, 0),
        )
        self.effective = lambda: {"graphs": list(graphs)}
        self.replays = []
        self.last_step = None

    def add_request(self, prompt, params):
        self.running.append(params.max_tokens)

    def has_unfinished(self):
        return bool(self.running)

    def step(self):
        is_prefill = self.last_step is None
        self.clock.now += 100 if self.count in self.slow else 1
        self.count += 1
        num = len(self.running)
        self.last_step = SimpleNamespace(
            num_prefill_tokens=8 * num if is_prefill else 0,
            num_decode_tokens=0 if is_prefill else num,
            h2d_bytes=7,
            in_place_bytes=0,
            wait_s=0.5,
            used_graph=True,
            is_overlapped=True,
        )
        self.running = [left - 1 for left in self.running if left > 1]
        return [SimpleNamespace(token_id=self.count)] * num


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=clock))
    return clock


def test_first_steps_and_those_behind_a_replay_are_not_timed(clock, monkeypatch):
    # 0: prefill; 1-3 settle, 4-6 timed, replay, 7-9 settle, 10-12 timed, 13-14 spare.
    llm = ScriptedLLM(clock, slow=(1, 2, 3, 7, 8, 9, 13, 14))
    replays = []

    def replay(llm, size, step_s):
        replays.append((llm.count, size, step_s))
        clock.now += 1000
        return 0.9

    monkeypatch.setattr(measure, "_replay", replay)
    work = Work(batches=(3,), prompt_tokens=8, steps=6)
    got = measure._decode(llm, 3, work)
    assert got["step_s"] == got["least_s"] == 1
    assert got["steps"] == 6
    assert replays == [(7, 4, 1)]  # padded to the graph of four rows
    assert got["replay_s"] == 0.9
    # Decode k reads 8 + k keys: 4, 5, 6 and 10, 11, 12 are 16 on average.
    assert got["kv_bytes"] == 3 * 16 * 10
    assert (got["h2d_bytes"], got["planned_h2d_bytes"]) == (7, 7)
    assert len(got["tokens"]) == 3 * 15


def test_a_batch_without_room_is_said_and_nothing_is_sent(clock):
    llm = ScriptedLLM(clock, kv_tokens=64)
    got = measure._decode(llm, 3, Work(batches=(3,), prompt_tokens=8, steps=6))
    # 8 + 15 tokens are two blocks of 16, three times.
    assert got == {"no_room": "96 tokens of KV are needed, 64 have room"}
    assert not llm.has_unfinished()


def test_a_second_share_of_the_card_is_used_where_kv_needs_it(monkeypatch):
    work = Work(batches=(1, 4), prompt_tokens=8, steps=4)
    case = Case(name="x", title="x", memory_gib=0.02, utilizations=(0.3, 0.9), work=work)
    limits = Limits(model="glass", max_num_seqs=4, max_num_batched_tokens=64, device="cpu")
    rooms = {0.3: 64, 0.9: 128}
    monkeypatch.setattr(measure, "engine_config", lambda case, limits, share: share)
    plan = SimpleNamespace(block_size=16, max_num_batched_tokens=64)
    monkeypatch.setattr(
        measure,
        "LLM",
        SimpleNamespace(
            plan_for=lambda share: SimpleNamespace(kv_tokens=rooms[share], **vars(plan))
        ),
    )
    assert measure._utilization(case, limits) == (0.9, 64)  # four sequences of two blocks
    rooms[0.3] = 128
    assert measure._utilization(case, limits) == (0.3, 128)
    rooms.update({0.3: 32, 0.9: 64})
    assert measure._utilization(case, limits) == (0.9, 32)


def asked(**changes):
    fields = {
        "work": Work(batches=(1, 16, 64)),
        "memory_gib": 16.0,
        "utilization": 0.85,
        "resident_gib": 44.0,
        "prefetch": ((8, 5, 2), (4, 3, 1)),
        "uva_gib": (8.0,),
        "counter_s": 10.0,
        "sweep": (),
        "num_layers": 32,
    }
    return Asked(**(fields | changes))


def test_cases_of_the_table():
    found = {case.name: case for case in cases(asked())}
    assert list(found) == [
        *("resident", "embed_in_place", "prefetch", "prefetch_2", "uva", "chosen"),
        *("uva_in_place", "uva_staged", "prefetch_step"),
    ]
    assert found["prefetch"].utilizations == (0.85, 0.9)
    assert (found["prefetch"].work.counter_s, found["prefetch_2"].work.counter_s) == (10.0, 0.0)
    assert found["prefetch_2"].offload["offload_group_size"] == 4
    assert found["chosen"].work.batches == found["embed_in_place"].work.batches == (1,)
    assert found["prefetch_step"].sweep == (1, 2, 3, 4, 5, 6)  # five of eight layers, and one more
    assert found["uva_in_place"].num_layers == 8
    assert {case.name for case in cases(asked(prefetch=()))} == set(found) - {
        *("prefetch", "prefetch_2", "chosen", "prefetch_step")
    }


def test_a_case_survives_the_way_to_its_process():
    for case in cases(asked()):
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case


def test_engines_are_configured_as_the_case_says():
    found = {case.name: case for case in cases(asked())}
    limits = Limits(num_layers=40)
    config = engine_config(found["prefetch"], limits, 0.9)
    assert config.offload.backend == "prefetch"
    assert config.engine.gpu_memory_utilization == 0.9
    assert config.model.spec.num_hidden_layers == 40
    config = engine_config(found["uva_staged"], limits, 0.85)
    assert (config.engine.uva_stage_tokens, config.model.spec.num_hidden_layers) == (1, 8)


def test_models_come_from_conf():
    assert read_model("olmo2_13b").hidden_size == 5120
    assert read_model("olmo7b", 4).num_hidden_layers == 4
    with pytest.raises(ConfigError, match=r"expected one of .*olmo7b"):
        read_model("nosuch")
    with pytest.raises(ConfigError, match="has none"):
        read_model("local")


def test_every_case_runs_emulated(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(probe, "EMULATED_COPY_BYTES", 2**20)
    file = tmp_path / "figures.json"
    assert command.bench([*TINY, "--json", str(file)], measure.measure) == 0
    out, err = capsys.readouterr()
    assert "**Emulated: these figures are a CPU's and say nothing of a GPU.**" in out
    assert "missed" not in out
    assert "no figures" not in out
    assert "uva 0.001 GiB: bytes of a step, counted / planned" in out
    assert "Greedy tokens: equal to the resident engine's" in out
    assert "| prefetch_step | slots |" in out
    assert "| 32 | " in out
    assert err.count("done, ") == 7
    figures = json.loads(file.read_text())
    resident = figures["cases"]["resident"]["decode"]["2"]
    assert resident["steps"] == 16
    assert figures["cases"]["prefetch"]["counter"]["nvml_gb_s"] is None
    assert list(figures["cases"]["prefetch_step"]["sweep"]) == ["1", "2", "3"]


@pytest.mark.gpu
def test_graphs_are_replayed_and_the_link_is_counted_on_a_gpu(tmp_path):
    file = tmp_path / "figures.json"
    sizes = ["--memory-gib", "4", "--resident-gib", "4", "--counter-s", "1", "--device", "cuda"]
    rows = ["--rows", "resident,prefetch,uva,uva_staged", "--prefetch", "1/1/1"]
    command.bench([*TINY, *sizes, *rows, "--json", str(file)], measure.measure)
    found = json.loads(file.read_text())["cases"]
    for name in ("resident", "prefetch", "uva"):
        figures = found[name]["decode"]["2"]
        assert figures["used_graph"]
        assert 0 < figures["replay_s"] < figures["step_s"]
        assert found[name]["after"]["hbm_copy_gb_s"] > found[name]["after"]["h2d_gb_s"] > 1
    assert found["prefetch"]["decode"]["1"]["h2d_bytes"] > 0
    assert found["uva"]["decode"]["1"]["in_place_bytes"] > 0
    assert found["prefetch"]["counter"]["engine_gb_s"] > 0
    tokens = [found[name]["decode"]["2"]["tokens"] for name in ("resident", "prefetch", "uva")]
    assert tokens[0][: len(tokens[1])] == tokens[1] == tokens[2]


def test_one_case_runs_in_a_process_of_its_own(capsys):
    arguments = [*TINY, "--rows", "prefetch", "--batches", "1", "--counter-s", "0"]
    assert command.main(arguments) == 0
    out, _ = capsys.readouterr()
    assert "prefetch 2/1/1, batch 1: bytes / step time / link rate" in out


KV_TINY = [
    *("--device", "cpu", "--kv-model", "glass", "--kv-host-gib", "0.004"),
    *("--kv-turns-gib", "0.004", "--kv-offload", "1/1/1", "--kv-scale", "0.004"),
    *("--kv-batched-tokens", "64", "--max-num-seqs", "4", "--steps", "4"),
]


def most_memory_gib(num_blocks):
    """The most memory, to 10 KiB, with which fewer than so many blocks are on the GPU."""
    [case] = [case for case in kv_cases(KVAsked(host_gib=0.004)) if case.name == "kv_long"]
    case = replace(case, max_model_len=128, max_num_seqs=4)
    limits = Limits(model="glass", max_num_batched_tokens=64, device="cpu")

    def has_fewer(memory_gib):
        config = engine_config(replace(case, memory_gib=memory_gib), limits, 0.9)
        try:
            return LLM.plan_for(config).num_gpu_blocks < num_blocks
        except CapacityError:
            return True

    low, high = 0.001, 0.02
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if has_fewer(middle) else (low, middle)
    return low


def test_every_part_of_the_kv_cache_runs_emulated(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(probe, "EMULATED_COPY_BYTES", 2**20)
    monkeypatch.setattr(probe_moves, "EMULATED_MOVED_BYTES", 2**18)
    file = tmp_path / "figures.json"
    memory = ["--kv-memory-gib", str(most_memory_gib(8))]  # eight hold 128 tokens
    asked = [*KV_TINY, *memory, "--rows", "kv", "--json", str(file)]
    assert command.bench(asked, measure.measure) == 0
    out, err = capsys.readouterr()
    assert err.count("done, ") == 6
    found = json.loads(file.read_text())["cases"]
    parts = {f"{name}/{part}": f for name, case in found.items() for part, f in case["kv"].items()}
    assert {name: f["failed"] for name, f in parts.items() if "failed" in f} == {}
    longest = parts["kv_long/long"]["runs"]["longest"]
    assert longest["has_ended"]
    assert longest["kv_in_place_bytes"] > 0
    assert f"128 tokens, {parts['kv_long/long']['room']} of them on the GPU" in out
    assert parts["kv_weights/streamed"]["h2d_bytes"] > 0
    for part in ("ttft", "shared", "parked"):
        assert parts[f"kv_cpu/{part}"]["hits_cpu_tokens"] > 0
    assert parts["kv_gpu/shared"]["hits_cpu_tokens"] == 0
    assert parts["kv_turns/turns"]["output_tokens"] == parts["kv_turns/turns"]["asked_tokens"]
