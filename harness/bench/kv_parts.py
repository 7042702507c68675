"""What is measured of the KV cache: each part takes an engine and its work, and returns figures.

A part that cannot be measured with this engine returns `no_room`, which says why. What tells
host from GPU is the engine's count of tokens found, not what was intended.
"""

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any, Final

from engine import LLM
from harness.bench.drive import SETTLE_STEPS, drain, params, prompt, run_all
from harness.bench.kv_long import measure_long, measure_streamed
from harness.bench.kv_room import gpu_tokens, has_host, hold_in_host, kv_counts
from harness.bench.kv_work import KVWork
from harness.measure.kv import since
from reports.record.record import percentile

Part = Callable[[LLM, KVWork], dict[str, Any]]
REPEATS: Final = 4
"""Of runs of many requests; one before them is not counted."""
PREFIXES: Final = 5
"""Prefixes whose first tokens are timed; one before them is not counted."""
STEPS_OF_A_LOAD: Final = 30
"""Decode steps that a prefix may take to load, and room for as many tokens."""


def measure_fits(llm: LLM, work: KVWork) -> dict[str, Any]:
    """Time requests that fit the GPU together, each time with new prompts.

    First what finished is forgotten before each run, so that nothing is moved; `kept_wall_s` is
    with what finished in the cache, which gives way to what is new.
    """
    needed = work.fit_requests * (work.fit_prompt + work.fit_output + llm.plan.block_size)
    if needed > gpu_tokens(llm):
        return {"no_room": f"{needed} tokens of KV are needed, {gpu_tokens(llm)} have room"}
    before, first, kept = kv_counts(llm), 1, {}
    for name, forgets in (("wall_s", True), ("kept_wall_s", False)):
        walls = []
        for repeat in range(first, first + REPEATS + 1):
            if forgets:
                llm.reset_cache()
            rows = [
                prompt(llm, work.fit_prompt, 10_000 * repeat + row)
                for row in range(work.fit_requests)
            ]
            walls.append(run_all(llm, rows, work.fit_output))
        kept[name], first = median(walls[1:]), first + len(walls)
    rose = since(kv_counts(llm), before)
    return kept | {
        "output_tokens": work.fit_requests * work.fit_output,
        "preemptions": rose.get("preemptions", 0),
        "stored_bytes": rose.get("moved.stored_bytes", 0),
    }


def measure_ttft(llm: LLM, work: KVWork) -> dict[str, Any]:
    """Time the first token behind a prefix: computed, found in the host tier, and on the GPU."""
    llm.reset_cache()
    times: dict[str, list[float]] = {"recompute": [], "host": [], "gpu": []}
    found: list[float] = []
    for number in range(PREFIXES + 1):
        prefix = prompt(llm, work.prefix_tokens, 100 + number)
        own = [prompt(llm, work.own_tokens, 1000 + 3 * number + index) for index in range(3)]
        times["recompute"].append(run_all(llm, [prefix + own[0]], 1))
        hold_in_host(llm)
        before = kv_counts(llm)
        times["host"].append(run_all(llm, [prefix + own[1]], 1))
        found.append(since(kv_counts(llm), before).get("prefix.hits_cpu_tokens", 0))
        times["gpu"].append(run_all(llm, [prefix + own[2]], 1))
    return {f"{name}_s": median(values[1:]) for name, values in times.items()} | {
        "prefix_tokens": work.prefix_tokens,
        "hits_cpu_tokens": min(found[1:]),
    }


def measure_itl(llm: LLM, work: KVWork) -> dict[str, Any]:
    """Gaps between tokens of sequences that decode: alone, and while a prefix loads.

    A step counts as one beside the load if it began after the request came and only decodes; so
    the step that computes the request's own tokens does not, it is in `prefill_steps_s`.
    """
    llm.reset_cache()
    prefix = prompt(llm, work.prefix_tokens, 200)
    run_all(llm, [prefix + prompt(llm, work.own_tokens, 201)], 1)
    steps = work.alone_steps + work.loads * STEPS_OF_A_LOAD
    room = gpu_tokens(llm) - work.prefix_tokens - work.own_tokens - llm.plan.block_size
    length = min(llm.max_model_len, room // work.running)
    tokens = min(steps, length - work.own_tokens - llm.plan.block_size)
    if tokens < work.alone_steps:
        return {"no_room": f"{work.running} sequences beside a prefix have {length} tokens each"}
    names = [
        llm.add_request(prompt(llm, work.own_tokens, 300 + row), params(tokens))
        for row in range(work.running)
    ]
    watch = _Watch(llm, work.running)
    watch.settle()
    alone = [watch.step() for _ in range(work.alone_steps)]
    loading: list[float] = []
    mixed: list[float] = []
    found: list[float] = []
    for load in range(work.loads):
        llm.evict_gpu_cache()
        watch.settle()
        before = kv_counts(llm)
        own = prompt(llm, work.own_tokens, 400 + load)
        name = llm.add_request(prefix + own, params(1))
        watch.until(name, loading, mixed)
        if watch.is_over:
            break
        found.append(since(kv_counts(llm), before).get("prefix.hits_cpu_tokens", 0))
    for name in names:
        llm.abort(name)
    drain(llm)
    return {
        "alone_p99_s": percentile(alone * work.running, 99),
        "loading_p99_s": percentile(loading * work.running, 99),
        "alone_p50_s": percentile(alone, 50),
        "loading_p50_s": percentile(loading, 50),
        "prefill_steps_s": percentile(mixed, 50),
        "num_alone": len(alone) * work.running,
        "num_loading": len(loading) * work.running,
        "loads": len(found),
        "prefix_tokens": work.prefix_tokens,
        "hits_cpu_tokens": min(found, default=0),
    }


class _Watch:
    """Gaps between the ends of steps of an engine in which `running` sequences decode."""

    def __init__(self, llm: LLM, running: int) -> None:
        self._llm, self._running, self._end_s = llm, running, perf_counter()
        self.is_over = False
        """Whether a sequence ended, or waits."""

    def step(self, name: str | None = None) -> float:
        """Run one step; return the time since the end of the one before it.

        Args:
            name: a request; whether it ended is in `has_ended`.
        """
        events = self._llm.step()
        self.has_ended = any(event.request_id == name for event in events)
        begin_s, self._end_s = self._end_s, perf_counter()
        return self._end_s - begin_s

    @property
    def only_decodes(self) -> bool:
        """Whether the newest step decoded every running sequence and did nothing else."""
        step = self._llm.last_step
        return (
            step is not None
            and step.num_decode_tokens == self._running
            and not step.num_prefill_tokens
        )

    def settle(self) -> None:
        """Step until some steps in a row have only decoded."""
        in_a_row = 0
        while in_a_row < SETTLE_STEPS and self._llm.has_unfinished():
            self.step()
            in_a_row = in_a_row + 1 if self.only_decodes else 0
        self.is_over = in_a_row < SETTLE_STEPS

    def until(self, name: str, loading: list[float], mixed: list[float]) -> None:
        """Step until a request has ended; note the gaps of steps that only decode, and others."""
        while self._llm.has_unfinished():
            gap = self.step(name)
            if self.has_ended or not self.only_decodes:
                mixed.append(gap)
            else:
                loading.append(gap)
            if self.has_ended:
                return


def measure_shared(llm: LLM, work: KVWork) -> dict[str, Any]:
    """Time many requests that share a prefix: in the host tier where there is one, else resident.

    The prefix is computed before. Its tokens count as found in the host tier once a run, for the
    first of the requests.
    """
    llm.reset_cache()
    prefix = prompt(llm, work.shared_tokens, 500)
    run_all(llm, [prefix + prompt(llm, work.own_tokens, 501)], 1)
    walls, found = [], []
    for repeat in range(REPEATS):
        if has_host(llm):
            hold_in_host(llm)
        before = kv_counts(llm)
        rows = [
            prefix + prompt(llm, work.own_tokens, 1000 * (repeat + 1) + row)
            for row in range(work.shared_requests)
        ]
        walls.append(run_all(llm, rows, work.shared_output))
        found.append(since(kv_counts(llm), before))
    last = found[1:]
    return {
        "wall_s": median(walls[1:]),
        "output_tokens": work.shared_requests * work.shared_output,
        "prefix_tokens": work.shared_tokens,
        "hits_cpu_tokens": min(rose.get("prefix.hits_cpu_tokens", 0) for rose in last),
        "hits_gpu_tokens": min(rose.get("prefix.hits_gpu_tokens", 0) for rose in last),
        "loaded_bytes": max(rose.get("moved.loaded_bytes", 0) for rose in last),
    }


def measure_parked(llm: LLM, work: KVWork) -> dict[str, Any]:
    """Time turns of conversations that were parked in the host tier, and of some that were not.

    A few conversations fit the GPU: their turns find everything there. Then all of them, more than
    the GPU holds, take their turns in order, so that each was parked since its last one.
    """
    room, length = gpu_tokens(llm), work.parked_tokens
    count = -(-int(work.parked_excess * room) // length)
    resident = max(1, int(0.6 * room / length))
    llm.reset_cache()
    chats = [prompt(llm, length, 600 + number) for number in range(count)]
    for chat in chats[:resident]:
        run_all(llm, [chat], 1)
    near = [_turn(llm, chat, work, number) for number, chat in enumerate(chats[:resident])]
    for chat in chats[resident:]:
        run_all(llm, [chat], 1)
    before, far = kv_counts(llm), []
    for number, chat in enumerate(chats):
        far.append(_turn(llm, chat, work, number + count))
    rose = since(kv_counts(llm), before)
    return {
        "resident_turn_s": median(near[1:] or near),
        "parked_turn_s": sum(far) / len(far),
        "conversations": count,
        "tokens": count * length,
        "room": room,
        "turn_tokens": work.turn_output,
        "hits_cpu_tokens": rose.get("prefix.hits_cpu_tokens", 0) / count,
        "missed_tokens": rose.get("prefix.missed_tokens", 0) / count,
        "loaded_bytes": rose.get("moved.loaded_bytes", 0) / count,
        "stored_bytes": rose.get("moved.stored_bytes", 0) / count,
    }


def _turn(llm: LLM, chat: list[int], work: KVWork, number: int) -> float:
    """Time one turn: what was said before, and a few new tokens."""
    return run_all(llm, [chat + prompt(llm, work.own_tokens, 700 + number)], work.turn_output)


def measure_rounds(llm: LLM, work: KVWork) -> dict[str, Any]:
    """Time sequences that fill the GPU's room, or exceed it where there is a host tier."""
    block, room = llm.plan.block_size, gpu_tokens(llm)
    length = min(room // work.rounds_fill // block * block - block, llm.max_model_len)
    own = length - work.rounds_output
    if own < 1:
        return {"no_room": f"{work.rounds_fill} sequences have {length} tokens each"}
    count = work.rounds_sequences if has_host(llm) else work.rounds_fill
    llm.reset_cache()
    walls, before = [], kv_counts(llm)
    for repeat in range(2):
        rows = [prompt(llm, own, 20_000 * (repeat + 1) + row) for row in range(count)]
        walls.append(run_all(llm, rows, work.rounds_output))
    rose = since(kv_counts(llm), before)
    names = ("swaps_out", "swaps_in", "recomputes", "preemptions")
    return {
        "wall_s": median(walls),
        "output_tokens": count * work.rounds_output,
        "sequences": count,
        "excess": count * length / room,
        **{name: rose.get(name, 0) / len(walls) for name in names},
    }


def measure_turns(llm: LLM, work: KVWork) -> dict[str, Any]:
    """Time conversations that all run at once, each turn sent when the one before has ended."""
    llm.reset_cache()
    history = [prompt(llm, work.chat_input, 800 + number) for number in range(work.conversations)]
    left = [work.turns - 1] * work.conversations
    before, num_tokens, begin_s = kv_counts(llm), 0, perf_counter()
    owners = {
        llm.add_request(row, params(work.chat_output)): number for number, row in enumerate(history)
    }
    while llm.has_unfinished():
        for event in llm.step():
            num_tokens += 1
            number = owners[event.request_id]
            history[number].append(event.token_id)
            if event.finish_reason is None or not left[number]:
                continue
            left[number] -= 1
            seed = 30_000 + number * work.turns + left[number]
            history[number] += prompt(llm, work.chat_input, seed)
            owners[llm.add_request(list(history[number]), params(work.chat_output))] = number
    wall_s = perf_counter() - begin_s
    rose = since(kv_counts(llm), before)
    return {
        "wall_s": wall_s,
        "output_tokens": num_tokens,
        "asked_tokens": work.conversations * work.turns * work.chat_output,
        **{
            name.rpartition(".")[2]: rose.get(name, 0)
            for name in (
                *("prefix.hits_gpu_tokens", "prefix.hits_cpu_tokens", "prefix.missed_tokens"),
                *("moved.loaded_bytes", "moved.stored_bytes", "preemptions"),
            )
        },
    }


PARTS: Final[Mapping[str, Part]] = MappingProxyType(
    {
        "fits": measure_fits,
        "ttft": measure_ttft,
        "itl": measure_itl,
        "shared": measure_shared,
        "parked": measure_parked,
        "rounds": measure_rounds,
        "turns": measure_turns,
        "long": measure_long,
        "streamed": measure_streamed,
    }
)
"""By the name in a case's parts."""
