"""A KV cache over two tiers: each part takes an engine and lengths, and returns figures.

A part that cannot be measured with this engine returns `no_room`, which says why. What tells host
from GPU is the engine's count of tokens found, not what was intended.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import Any, Final

from harness.config.study import TiersScenario
from harness.observe.link import LinkCounter
from harness.work.bench import (
    NUM_COUNTED_TOKENS,
    SETTLE_STEPS,
    DecodeGaps,
    Figures,
    Sender,
    counted,
)
from harness.work.drive import Clock
from harness.work.kv import Counts, counts, since
from reports.record.record import percentile

REPEATS: Final = 4
"""Repeats of runs of many requests; one before them is not counted."""
PREFIXES: Final = 5
"""Prefixes whose first tokens are timed; one before them is not counted."""
STEPS_OF_A_LOAD: Final = 30
"""Decode steps that a prefix may take to load, and room for as many tokens."""
MOST_WAITS: Final = 1000
"""Short requests that are run until no block is under way."""
SHORT_TOKENS: Final = 2
"""Prompt and output of each: shorter than any block, so that the cache keeps none of it."""


def measure_tiers(
    llm: Any,
    config: TiersScenario,
    *,
    clock: Clock,
    counter: LinkCounter | None = None,
    on_part: Callable[[str], None],
    save: Callable[[Figures], None],
) -> None:
    """Measure the parts in order; one that fails says so and leaves the others' figures.

    The engine has prefix caching. `counter` is the link's; None: there is none. `on_part` gets the
    name of each before it begins, `save` the figures so far after each.
    """
    tiers, work, found = Tiers(llm, clock, counter), config.scaled(), Figures()
    for name in config.parts:
        on_part(name)
        begin_s = clock()
        try:
            figures = PARTS[name](tiers, work)
        except Exception as error:  # noqa: BLE001  the edge: shown in the table
            figures = {"failed": f"{type(error).__name__}: {error}"}
            tiers.driver.cancel("its part failed")
            tiers.driver.drain()
        found[name] = figures | {"took_s": clock() - begin_s}
        save({"parts": dict(found), "memory": llm.memory()})


class Tiers(Sender):
    """A sender that knows the room of both tiers and what moved between them."""

    def __init__(self, llm: Any, clock: Clock, counter: LinkCounter | None = None) -> None:
        super().__init__(llm, clock)
        self.counter = counter
        self._begin = self.counts()
        self.block: int = llm.plan.block_size

    def counts(self) -> Counts:
        """Return the engine's counters of the KV cache."""
        return counts(self.llm.stats())

    def mark(self) -> None:
        """Count anew from here."""
        self._begin = self.counts()

    def rose(self) -> Counts:
        """Return by how much each counter rose since the last mark."""
        return since(self.counts(), self._begin)

    @property
    def gpu_tokens(self) -> int:
        """Tokens of KV that have room on the GPU."""
        return int(self.counts()["gpu.blocks"]) * self.block

    @property
    def host_tokens(self) -> int:
        """Tokens of KV that have room in the host tier."""
        return int(self.counts().get("cpu.blocks", 0)) * self.block

    def hold_in_host(self) -> None:
        """Take idle content off the GPU and wait until none of it is under way."""
        self.llm.evict_gpu_cache()
        prompt = self.prompt(SHORT_TOKENS, "short")
        for _ in range(MOST_WAITS):
            self.run([prompt], SHORT_TOKENS)
            if not self.counts().get("cpu.in_transit", 0):
                return
        raise RuntimeError(f"blocks are still under way after {MOST_WAITS} short requests.")


def measure_fits(tiers: Tiers, work: TiersScenario) -> Figures:
    """Time requests that fit the GPU together, each time with new prompts.

    First what finished is forgotten before each run, so that nothing is moved; `kept_wall_s` is
    with what finished in the cache, which gives way to what is new.
    """
    needed = work.fit_requests * (work.fit_prompt + work.fit_output + tiers.block)
    if needed > tiers.gpu_tokens:
        return {"no_room": f"{needed} tokens of KV are needed, {tiers.gpu_tokens} fit"}
    tiers.mark()
    kept = {}
    for name, forgets in (("wall_s", True), ("kept_wall_s", False)):
        walls = []
        for repeat in range(REPEATS + 1):
            if forgets:
                tiers.llm.reset_cache()
            rows = tiers.prompts(work.fit_requests, work.fit_prompt, f"{name} {repeat}")
            walls.append(tiers.run(rows, work.fit_output))
        kept[name] = median(walls[1:])
    rose = tiers.rose()
    return kept | {
        "output_tokens": work.fit_requests * work.fit_output,
        "preemptions": rose.get("preemptions", 0),
        "stored_bytes": rose.get("moved.stored_bytes", 0),
    }


def measure_ttft(tiers: Tiers, work: TiersScenario) -> Figures:
    """Time the first token behind a prefix: computed, found in the host tier, and on the GPU."""
    tiers.llm.reset_cache()
    times: dict[str, list[float]] = {"recompute": [], "host": [], "gpu": []}
    found: list[float] = []
    for number in range(PREFIXES + 1):
        prefix = tiers.prompt(work.prefix_tokens, f"ttft {number}")
        own = tiers.prompts(3, work.own_tokens, f"ttft own {number}")
        times["recompute"].append(tiers.run([prefix + own[0]], 1))
        tiers.hold_in_host()
        tiers.mark()
        times["host"].append(tiers.run([prefix + own[1]], 1))
        found.append(tiers.rose().get("prefix.hits_cpu_tokens", 0))
        times["gpu"].append(tiers.run([prefix + own[2]], 1))
    return {f"{name}_s": median(values[1:]) for name, values in times.items()} | {
        "prefix_tokens": work.prefix_tokens,
        "hits_cpu_tokens": min(found[1:]),
    }


def measure_itl(tiers: Tiers, work: TiersScenario) -> Figures:
    """Gaps between tokens of sequences that decode: alone, and while a prefix loads.

    Each step is one gap, which all sequences share. `loading` are the steps from the arrival of the
    request on that only decode, `mixed` the ones that compute its own tokens, `beside` are both.
    """
    tiers.llm.reset_cache()
    prefix = tiers.prompt(work.prefix_tokens, "itl")
    tiers.run([prefix + tiers.prompt(work.own_tokens, "itl first")], 1)
    steps = work.alone_steps + work.loads * STEPS_OF_A_LOAD
    room = tiers.gpu_tokens - work.prefix_tokens - work.own_tokens - tiers.block
    length = min(tiers.llm.max_model_len, room // work.running)
    tokens = min(steps, length - work.own_tokens - tiers.block)
    if tokens < work.alone_steps:
        return {"no_room": f"{work.running} sequences beside a prefix have {length} tokens each"}
    for prompt in tiers.prompts(work.running, work.own_tokens, "itl running"):
        tiers.send(prompt, tokens)
    is_over = not _settle(tiers, work.running)
    alone, loading, mixed, found = [], list[float](), list[float](), list[float]()
    for _ in range(work.alone_steps):
        step = tiers.driver.step()
        alone.append(step.end_s - step.begin_s)
    for own in tiers.prompts(work.loads, work.own_tokens, "itl own"):
        tiers.llm.evict_gpu_cache()
        is_over = is_over or not _settle(tiers, work.running)
        if is_over:
            break
        tiers.mark()
        _beside_a_load(tiers, prefix + own, work.running, loading, mixed)
        found.append(tiers.rose().get("prefix.hits_cpu_tokens", 0))
    tiers.driver.cancel("measured")
    tiers.driver.drain()
    figures: Figures = {"loads": len(found), "prefix_tokens": work.prefix_tokens}
    parts = {"alone": alone, "loading": loading, "mixed": mixed, "beside": loading + mixed}
    for name, gaps in parts.items():
        figures |= {f"{name}_p{q}_s": percentile(gaps, q) for q in (50, 99)}
        figures[f"num_{name}"] = len(gaps)
    return figures | {"hits_cpu_tokens": min(found, default=0)}


def _settle(tiers: Tiers, running: int) -> bool:
    """Step until some steps in a row have only decoded; False where a sequence ends or waits."""
    in_a_row = 0
    while in_a_row < SETTLE_STEPS and tiers.driver.has_unfinished:
        in_a_row = in_a_row + 1 if tiers.driver.step().only_decodes(running) else 0
    return in_a_row == SETTLE_STEPS


def _beside_a_load(
    tiers: Tiers, prompt: list[int], running: int, loading: list[float], mixed: list[float]
) -> None:
    """Step until a request has its token; note the gaps of steps that only decode, and others."""
    times = tiers.send(prompt, 1)
    while tiers.driver.has_unfinished and not times.finish_reason:
        step = tiers.driver.step()
        only_decodes = step.only_decodes(running) and not times.finish_reason
        (loading if only_decodes else mixed).append(step.end_s - step.begin_s)


def measure_shared(tiers: Tiers, work: TiersScenario) -> Figures:
    """Time many requests that share a prefix: in the host tier where there is one, else resident.

    The prefix is computed before. Its tokens count as found in the host tier once a run, for the
    first of the requests.
    """
    tiers.llm.reset_cache()
    prefix = tiers.prompt(work.shared_tokens, "shared")
    tiers.run([prefix + tiers.prompt(work.own_tokens, "shared first")], 1)
    walls, found = [], []
    for repeat in range(REPEATS):
        if tiers.host_tokens:
            tiers.hold_in_host()
        tiers.mark()
        own = tiers.prompts(work.shared_requests, work.own_tokens, f"shared own {repeat}")
        walls.append(tiers.run([prefix + row for row in own], work.shared_output))
        found.append(tiers.rose())
    last = found[1:]
    return {
        "wall_s": median(walls[1:]),
        "output_tokens": work.shared_requests * work.shared_output,
        "prefix_tokens": work.shared_tokens,
        "hits_cpu_tokens": min(rose.get("prefix.hits_cpu_tokens", 0) for rose in last),
        "hits_gpu_tokens": min(rose.get("prefix.hits_gpu_tokens", 0) for rose in last),
        "loaded_bytes": max(rose.get("moved.loaded_bytes", 0) for rose in last),
    }


def measure_parked(tiers: Tiers, work: TiersScenario) -> Figures:
    """Time turns of conversations that were parked in the host tier, and of some that were not.

    A few conversations fit the GPU: their turns find everything there. Then all of them, more than
    the GPU holds, take their turns in order, so that each was parked since its last one.
    """
    room, length = tiers.gpu_tokens, work.parked_tokens
    count = -(-int(work.parked_excess * room) // length)
    resident = max(1, int(0.6 * room / length))
    tiers.llm.reset_cache()
    chats = tiers.prompts(count, length, "parked")
    own = tiers.prompts(count + resident, work.own_tokens, "parked turns")
    for chat in chats[:resident]:
        tiers.run([chat], 1)
    near = _turns(tiers, chats[:resident], own[count:], work.turn_output)
    for chat in chats[resident:]:
        tiers.run([chat], 1)
    tiers.mark()
    far = _turns(tiers, chats, own[:count], work.turn_output)
    rose = tiers.rose()
    names = ["moved.loaded_bytes", "moved.stored_bytes"]
    names += ["prefix.hits_cpu_tokens", "prefix.missed_tokens"]
    return {
        "resident_turn_s": median(near[1:] or near),
        "parked_turn_s": mean(far),
        "conversations": count,
        "tokens": count * length,
        "room": room,
        "turn_tokens": work.turn_output,
        **{name.partition(".")[2]: rose.get(name, 0) / count for name in names},
    }


def _turns(
    tiers: Tiers, chats: Sequence[list[int]], own: Sequence[list[int]], num_tokens: int
) -> list[float]:
    """Time a turn of each: what was said before, and a few new tokens."""
    return [tiers.run([chat + new], num_tokens) for chat, new in zip(chats, own, strict=True)]


def measure_rounds(tiers: Tiers, work: TiersScenario) -> Figures:
    """Time sequences that fill the GPU's room, or exceed it where there is a host tier."""
    block, room = tiers.block, tiers.gpu_tokens
    length = min(room // work.rounds_fill // block * block - block, tiers.llm.max_model_len)
    own = length - work.rounds_output
    if own < 1:
        return {"no_room": f"{work.rounds_fill} sequences have {length} tokens each"}
    count = work.rounds_sequences if tiers.host_tokens else work.rounds_fill
    tiers.llm.reset_cache()
    tiers.mark()
    walls = [
        tiers.run(tiers.prompts(count, own, f"rounds {repeat}"), work.rounds_output)
        for repeat in range(2)
    ]
    rose = tiers.rose()
    names = ("swaps_out", "swaps_in", "recomputes", "preemptions")
    return {
        "wall_s": median(walls),
        "output_tokens": count * work.rounds_output,
        "sequences": count,
        "excess": count * length / room,
        **{name: rose.get(name, 0) / len(walls) for name in names},
    }


def measure_turns(tiers: Tiers, work: TiersScenario) -> Figures:
    """Time conversations that all run at once, each turn sent when the one before has ended."""
    tiers.llm.reset_cache()
    said = [
        tiers.prompts(work.turns, work.chat_input, f"turns {number}")
        for number in range(work.conversations)
    ]
    history = [list(turns.pop(0)) for turns in said]
    tiers.mark()
    num_tokens, begin_s = 0, tiers.clock()
    owners = {
        tiers.send(row, work.chat_output).request_id: number for number, row in enumerate(history)
    }
    while tiers.driver.has_unfinished:
        for event in tiers.driver.step().events:
            num_tokens += 1
            number = owners[event.request_id]
            history[number].append(event.token_id)
            if event.finish_reason is None or not said[number]:
                continue
            history[number] += said[number].pop(0)
            owners[tiers.send(history[number], work.chat_output).request_id] = number
    wall_s = tiers.clock() - begin_s
    rose = tiers.rose()
    names = ["prefix.hits_gpu_tokens", "prefix.hits_cpu_tokens", "prefix.missed_tokens"]
    names += ["moved.loaded_bytes", "moved.stored_bytes", "preemptions"]
    return {
        "wall_s": wall_s,
        "output_tokens": num_tokens,
        "asked_tokens": work.conversations * work.turns * work.chat_output,
        **{name.rpartition(".")[2]: rose.get(name, 0) for name in names},
    }


def measure_long(tiers: Tiers, work: TiersScenario) -> Figures:
    """Decode one sequence at the end of the GPU's room, beyond it, and at the longest there is.

    `runs` has each by name; `resident` ends where the GPU's room does. `counter` holds the bytes of
    the longest against NVML's counter; None: not asked for.
    """
    room = tiers.gpu_tokens
    reach = room + tiers.host_tokens
    most = min(tiers.llm.max_model_len, reach)
    lengths = {"resident": min(room - 2 * tiers.block, most)}
    lengths |= {f"{times:g}": int(times * room) for times in work.beyond[:-1]}
    lengths["longest"] = most
    runs = {
        name: _decode_at(tiers, total, work.steps)
        for name, total in lengths.items()
        if total <= most
    }
    return {
        "room": room,
        "reach": reach,
        "max_model_len": tiers.llm.max_model_len,
        "runs": runs,
        "counter": _count_at(tiers, most, work.counter_s) if work.counter_s else None,
    }


def _count_at(tiers: Tiers, total: int, seconds: float) -> Figures:
    """Hold the bytes of one sequence's decode, at about `total` tokens, against NVML's counter."""
    tiers.llm.reset_cache()
    output = min(NUM_COUNTED_TOKENS, total // 2)
    prompt = tiers.prompt(total - output, "counter")

    def send() -> None:
        """Send it, and compute its prompt."""
        times = tiers.send(prompt, output)
        while tiers.driver.has_unfinished and not times.token_times_s:
            tiers.driver.step()

    send()
    return counted(tiers, seconds, tiers.counter, send)


def measure_streamed(tiers: Tiers, work: TiersScenario) -> Figures:
    """Decode one sequence beyond the GPU's room while weights are streamed too."""
    room = tiers.gpu_tokens
    total = min(tiers.llm.max_model_len, room + min(tiers.host_tokens, work.streamed_tokens))
    return {"room": room} | _decode_at(tiers, total, work.steps)


def _decode_at(tiers: Tiers, total: int, steps: int) -> Figures:
    """Run one request that ends at `total` tokens; time the last of its steps."""
    output = steps + 2 * SETTLE_STEPS
    if total <= output:
        return {"no_room": f"{total} tokens leave no prompt for {output} of output"}
    tiers.llm.reset_cache()
    prompt, gaps = tiers.prompt(total - output, "long"), DecodeGaps(1)
    times = tiers.send(prompt, output)
    while tiers.driver.has_unfinished:
        gaps.add(tiers.driver.step())
    timed = gaps.seconds[:steps]
    names = ("h2d_bytes", "in_place_bytes", "kv_in_place_bytes")
    moved = {name: median(getattr(step, name) for step in gaps.stats) for name in names}
    return {
        "total": total,
        "prefill_s": times.token_times_s[0] - times.submit_s,
        "step_s": median(timed),
        "steps": len(timed),
        **moved,
        "has_ended": times.finish_reason == "length" and len(times.token_ids) == output,
    }


PARTS: Final[Mapping[str, Callable[[Tiers, TiersScenario], Figures]]] = {
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
"""By the name in scenario.tiers.parts."""
