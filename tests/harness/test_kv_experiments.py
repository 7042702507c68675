"""The experiments on the KV cache, in small: what each asks for shows in what is counted."""

import time
from dataclasses import replace
from functools import cache

import pytest

from engine import LLM
from engine.errors import CapacityError
from harness.config.compose import Composer
from harness.config.engine import engine_config
from harness.observe.student import student_t
from harness.work.kv import KVWatch
from harness.work.offline import measure_latency
from harness.work.prompts import synthetic_prompts
from harness.work.schedule import Load
from harness.work.serve import measure_serve

pytestmark = pytest.mark.slow

SMALL = (
    *("model=glass", "model.load_format=dummy", "gpu=cpu", "gpu.memory_gib=0.02"),
    *("engine.max_num_batched_tokens=64", "engine.max_num_seqs=2", "hydra.mode=RUN"),
)
SERVED = {
    "parked": (
        "engine.max_model_len=128",
        "scenario.serve.turns.first_tokens=60",
        "scenario.serve.prompt.tokens=4",
        "scenario.serve.output.tokens=4",
    ),
    "shared_prefix": (
        "engine.max_model_len=128",
        "scenario.serve.prefixes.tokens=64",
        "scenario.serve.prompt.tokens=8",
        "scenario.serve.output.tokens=4",
        "scenario.serve.num_requests=48",
    ),
    "multi_turn": (
        "engine.max_model_len=128",
        "scenario.serve.prompt.tokens=8",
        "scenario.serve.output.tokens=4",
        "scenario.serve.num_requests=64",
    ),
}


@cache
def composer():
    return Composer()


def configured(name, *overrides):
    (point,) = composer().plan((f"+experiment={name}", *SMALL, *overrides)).points
    return point.config


def served(name, cpu_gib):
    config = configured(name, f"kv.cpu_gib={cpu_gib}", *SERVED[name])
    built = engine_config(config, None)
    memory_gib = least_memory_gib(built, 16)
    llm = LLM.from_config(replace(built, gpu=replace(built.gpu, memory_gib=memory_gib)))
    watch = KVWatch(llm, time.perf_counter)
    load = Load(config=config.scenario.serve, vocab_size=llm.spec.vocab_size)
    outcome, _ = measure_serve(watch, load, clock=time.perf_counter, t=student_t)
    result = {"metrics": outcome.metrics, "samples": {}}
    watch.note("serve", result)
    llm.close()
    assert outcome.reasons == []
    return result


@pytest.mark.parametrize("name", sorted(SERVED))
def test_what_the_gpu_gives_away_is_found_in_the_host_tier(name):
    with_host = served(name, 0.04)
    metrics = with_host["metrics"]
    assert metrics["kv/cpu_hit_tokens"] > 0
    assert metrics["kv/loaded_gib"] > 0
    assert metrics["kv/gpu_evictions_lost"] == 0
    assert metrics["kv/cpu_used_peak_share"] > 0
    assert with_host["samples"]["kv"]["cpu_blocks"] > 0
    alone = served(name, 0)["metrics"]
    assert alone["kv/cpu_hit_tokens"] == 0
    assert alone["kv/gpu_evictions_lost"] > 0
    assert alone["kv/missed_tokens"] > metrics["kv/missed_tokens"]
    assert metrics["kv/hit_share"] > (alone["kv/hit_share"] or 0)


def num_blocks(config, memory_gib):
    """GPU blocks of a plan with so much memory; 0 where there is none."""
    asked = replace(config, gpu=replace(config.gpu, memory_gib=memory_gib))
    try:
        return LLM.plan_for(asked).num_gpu_blocks
    except CapacityError:
        return 0


def least_memory_gib(config, blocks=1):
    """The least memory, to 10 KiB, with so many blocks on the GPU."""
    low, high = 0.001, 0.02
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (low, middle) if num_blocks(config, middle) >= blocks else (middle, high)
    return high


def test_a_sequence_beyond_the_gpu_runs_with_a_host_tier_alone():
    lengths = ("scenario.latency.prompt_tokens=184", "scenario.latency.output_tokens=8")
    host = ("kv.num_cpu_blocks=11", "kv.enable_prefix_caching=false", "engine.max_num_seqs=1")
    longer = "model.spec.max_position_embeddings=512"  # 128 tokens are less than the stage buffers
    asked = configured("long_context", *host, longer, *lengths)
    assert asked.engine.max_model_len == 192
    config = engine_config(asked, None)
    memory_gib = least_memory_gib(config)
    alone = replace(config, kv=replace(config.kv, num_cpu_blocks=0))
    assert num_blocks(alone, memory_gib) == 0
    llm = LLM.from_config(replace(config, gpu=replace(config.gpu, memory_gib=memory_gib)))
    watch, part = KVWatch(llm, time.perf_counter), asked.scenario.latency
    rows = synthetic_prompts(
        part.num_requests, part.prompt_tokens, vocab_size=llm.spec.vocab_size, seed=0, stream="x"
    )
    outcome, _ = measure_latency(
        watch, rows, part.output_tokens, clock=time.perf_counter, t=student_t
    )
    metrics, _ = watch.figures()
    room = llm.plan.num_gpu_blocks * llm.plan.block_size
    llm.close()
    assert outcome.reasons == []
    assert outcome.num_measured == 2
    assert room < 192
    assert metrics["kv/in_place_gib"] > 0
