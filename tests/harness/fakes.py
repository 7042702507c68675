"""An engine with scripted times and failures; its clock moves only when the script says so."""

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from engine.asked.request import TokenEvent
from engine.errors import CapacityError, CheckpointError, RequestError
from tests.harness.prefixes import PrefixCache

GIB = 2**30
BEGIN_S = 100.0
"""The first time of a FakeClock; clock_start_s sets another."""
EXPERT_COUNTS = ("expert_hits", "expert_misses", "expert_bytes")
PLAN = {
    "gpu": {
        "budget_bytes": 2 * GIB,
        "items": {"weights": GIB, "kv_cache": GIB // 2},
        "total_bytes": 3 * GIB // 2,
        "free_bytes": GIB // 2,
    },
    "host": {"items": {"pinned_weights": GIB}, "total_bytes": GIB, "limit_bytes": 8 * GIB},
    "bytes_per_step": 1000,
}


@dataclass
class FakeClock:
    now_s: float = field(default_factory=lambda: BEGIN_S)

    def __post_init__(self):
        self._begin_s = self.now_s

    @property
    def passed_s(self):
        return self.now_s - self._begin_s

    def __call__(self):
        return self.now_s

    def advance(self, seconds):
        if seconds:  # a step that takes no time leaves the clock to the threads that move it
            self.now_s += seconds


@dataclass
class Script:
    """How the fake engine behaves; times in seconds."""

    prefill_s: float = 0.5
    """Wall of a step with a prefill; the whole prompt runs in it."""
    decode_s: float = 0.125
    phases: dict = field(default_factory=lambda: {"read": 2.0, "copy": 1.0})
    max_model_len: int = 512
    vocab_size: int = 1000
    moved_bytes: int = 1000
    """Copied from host to device in each step."""
    read_bytes: int = 500
    """Read in place in each step."""
    planned_bytes: tuple = (1000, 500)
    """What the plan says of the two."""
    experts: tuple = ()
    """Experts found, not found, and bytes over the link for these, in each step; in two layers."""
    gpu_peak_bytes: int = GIB
    fail_at: str = ""
    """plan | build | reference | step: where `failure` strikes."""
    failure: str = ""
    """no_fit | checkpoint | oom | memory_error | crash | sigkill | sigsegv | exit | hang"""
    fail_reference: str = ""
    """How the reference fails, whatever the engine under test does."""
    after_steps: int = 0
    """Steps before a failure at step."""
    wrong_token_at: int | None = None
    """Output position at which the engine under test differs from the reference."""
    refuse: list = field(default_factory=list)
    """Ids of requests that are refused."""
    knows_salts: bool = True
    """Prefixes are found where salts are equal; else of any earlier request."""
    touch: str = ""
    """File that is created just before a hang, so that a test knows."""

    def strike(self):
        match self.failure:
            case "no_fit":
                raise CapacityError("GPU: need 3.0 GiB, have 2.0 GiB. Set offload=uva.", dict(PLAN))
            case "checkpoint":
                raise CheckpointError("folder: expected config.json, found none.")
            case "oom":
                raise type("OutOfMemoryError", (RuntimeError,), {})("tried to allocate 2.00 GiB")
            case "memory_error":
                raise MemoryError
            case "crash":
                raise ValueError("the script says so")
            case "sigkill" | "sigsegv":
                os.kill(os.getpid(), signal.Signals[self.failure.upper()])
            case "exit":
                os._exit(7)
            case "hang":
                self._hang()

    def _hang(self):
        if self.touch:
            Path(self.touch).touch()
        while True:
            time.sleep(60)


class FakeLLM:
    """Sequences run together; a step prefills every new one, or decodes all."""

    def __init__(self, script, clock, progress, reference):
        self._script, self._clock, self._reference = script, clock, reference
        self.spec = SimpleNamespace(vocab_size=script.vocab_size)
        self.tokenizer = SimpleNamespace(
            all_special_ids=[0, 1], encode=lambda text: [5 + ord(char) for char in text]
        )
        self.max_model_len = script.max_model_len
        plan = dict(PLAN)
        if script.experts:
            plan["experts"] = {"hit_share": 0.5, "bytes_per_step": 300, "expert_bytes": [400]}
        self.plan = SimpleNamespace(
            to_dict=lambda: dict(plan),
            moved_per_step=lambda num_decodes: script.planned_bytes,
            block_size=10,
        )
        self.last_step = None
        self.closed = False
        self.prompts = []
        self.salts = []
        self._cache, self._hit_tokens = PrefixCache(), 0
        self._steps = 0
        self._new, self._running = [], []
        for name, seconds in script.phases.items():
            progress(name, 0, GIB)
            clock.advance(seconds)
            progress(name, GIB, GIB)
        if script.fail_at == ("reference" if reference else "build"):
            script.strike()
        if reference and script.fail_reference:
            Script(failure=script.fail_reference).strike()
        self.load_report = SimpleNamespace(
            phases=dict(script.phases),
            total_s=sum(script.phases.values()),
            busy={"read": 1.5},
            moved={"read": 3_000_000_000, "touch": 10**9, "pin": 10**9},
        )

    def add_request(self, prompt, params, request_id=None):
        if request_id in self._script.refuse:
            raise RequestError("prompt: too long for this test. Shorten it.")
        assert params.temperature == 0
        assert params.ignore_eos
        self.prompts.append((request_id, list(prompt)))
        self.salts.append(params.cache_salt)
        salt = params.cache_salt if self._script.knows_salts else None
        self._hit_tokens += self._cache.find(salt, prompt)
        self._new.append(SimpleNamespace(id=request_id, prompt=prompt, params=params, out=0))
        return request_id

    def has_unfinished(self):
        return bool(self._new or self._running)

    def step(self):
        script = self._script
        if script.fail_at == "step" and not self._reference and self._steps >= script.after_steps:
            script.strike()
        self._steps += 1
        sequences, is_prefill = (self._new, True) if self._new else (self._running, False)
        self._clock.advance(script.prefill_s if is_prefill else script.decode_s)
        if is_prefill:
            self._running, self._new = self._running + self._new, []
        self.last_step = SimpleNamespace(
            num_prefill_tokens=sum(len(s.prompt) for s in sequences) if is_prefill else 0,
            num_decode_tokens=0 if is_prefill else len(sequences),
            h2d_bytes=script.moved_bytes,
            in_place_bytes=script.read_bytes,
            **dict(zip(EXPERT_COUNTS, script.experts or (0, 0, 0), strict=True)),
        )
        events = [self._event(sequence) for sequence in sequences]
        self._running = [s for s in self._running if s.out < s.params.max_tokens]
        return events

    def _event(self, sequence):
        token = (sequence.prompt[0] * 7 + sequence.out) % self._script.vocab_size
        if not self._reference and sequence.out == self._script.wrong_token_at:
            token = (token + 1) % self._script.vocab_size
        sequence.out += 1
        is_last = sequence.out == sequence.params.max_tokens
        return TokenEvent(
            request_id=sequence.id,
            index=0,
            token_id=token,
            position=len(sequence.prompt) + sequence.out - 1,
            finish_reason="length" if is_last else None,
            logprob=0.0,
            time_s=self._clock(),
        )

    def abort(self, request_id):
        self._new = [sequence for sequence in self._new if sequence.id != request_id]
        self._running = [sequence for sequence in self._running if sequence.id != request_id]

    def stats(self):
        steps, experts = self._steps, {}
        if self._script.experts:
            totals = zip(("hits", "misses", "bytes"), self._script.experts, strict=True)
            experts = {name: [0, steps * count] for name, count in totals} | {"layers": [1, 3]}
        return {
            "steps": steps,
            "experts": experts,
            "preemptions": 0,
            "kv": {
                "gpu": {"blocks": 100, "owned": min(steps, 50), "cached": 10, "free": 40},
                "cpu": {"blocks": 200, "owned": 0, "cached": min(steps, 100), "in_transit": 0},
                "block_bytes": 1000,
                "prefix": {
                    "hits_gpu_tokens": self._hit_tokens,
                    "hits_cpu_tokens": 0,
                    "hits_gpu_bytes": 300 * steps,
                    "hits_cpu_bytes": 200 * steps,
                },
                "evictions": {"gpu_kept": steps, "gpu_lost": steps, "cpu": 0},
                "swaps_out": 1,
                "moved": {"stored_bytes": 10 * steps, "loaded_bytes": 20 * steps},
                "in_place_bytes": 30 * steps,
                "copied_ahead_bytes": 0,
                "staged_prefill_bytes": 0,
            },
        }

    def memory(self):
        return {
            "gpu_peak_bytes": self._script.gpu_peak_bytes,
            "gpu_budget_bytes": 2 * GIB,
            "host_pinned_bytes": GIB,
        }

    def effective(self):
        return {"device": "cpu", "emulated": True, "warnings": [], "fallbacks": []}

    def close(self):
        self.closed = True


class FakeFactory:
    """Stands in for the class engine.LLM."""

    def __init__(self, script, clock):
        self.script, self.clock, self.built, self.planned = script, clock, [], []

    def plan_for(self, config):
        self.planned.append(config)
        if self.script.fail_at == "plan":
            self.script.strike()
        return SimpleNamespace(to_dict=lambda: dict(PLAN))

    def from_config(self, config, *, progress, reference=False):
        llm = FakeLLM(self.script, self.clock, progress, reference)
        self.built.append(llm)
        return llm


def fake_door(script, clock=None):
    """An EngineDoor to the fake engine, and the factory behind it."""
    from harness.systems.door import EngineDoor

    clock = clock or FakeClock()
    factory = FakeFactory(script, clock)

    async def wait(seconds):
        clock.advance(seconds)
        await asyncio.sleep(0)

    door = EngineDoor(
        load_code=lambda: factory.from_config,
        probe=lambda config: {"h2d_gb_s": 0.00002, "d2h_gb_s": None},
        plan_for=factory.plan_for,
        predict=lambda plan, spec, scenario: {"predicted/tpot_ms": 250.0},
        clock=clock,
        wait=wait,
    )
    return door, factory


def main(arguments):
    """A worker process with the fake engine: SCRIPT.json, then the worker's own arguments."""
    from harness.worker import serve

    script = Script(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    spawned_s = float(arguments[arguments.index("--spawned-s") + 1])
    door, _ = fake_door(script, FakeClock(spawned_s + 1.0))
    return serve(arguments[1:], door)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
