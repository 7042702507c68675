"""A KV cache over two tiers: each part takes an engine and lengths, and returns figures.

A part that cannot be measured with this engine returns `no_room`, which says why. What tells host
from GPU is the engine's count of tokens found, not what was intended.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import Any, Final

from harness.config.study import TiersScenario
from harness.observe.link import LinkCounter
from harness.work.drive import Clock
from harness.work.kv import Counts, counts, since
from harness.work.steps import (
    NUM_COUNTED_TOKENS,
    SETTLE_STEPS,
    DecodeGaps,
    Figures,
    Sender,
    check_ended,
    counted,
)
from reports.record.record import percentile

REPEATS: Final = 4
"""Repeats of runs of many requests; one before them is not counted."""
PREFIXES: Final = 5
"""Prefixes whose first tokens are timed; one before them is not counted."""
STEPS_OF_A_LOAD: Final = 30
"""Decode steps that a prefix may take to load, and room for as many tokens."""
ALONE: Final = 2
"""Long sequences that are timed one after another."""
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
    Steps `alone` lie before each load, so that contexts are as long.
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
    for own in tiers.prompts(work.loads, work.own_tokens, "itl own"):
        tiers.llm.evict_gpu_cache()
        is_over = is_over or not _settle(tiers, work.running)
        if is_over:
            break
        for _ in range(-(-work.alone_steps // work.loads)):
            step = tiers.driver.step()
            alone.append(step.end_s - step.begin_s)
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
        _run_until(tiers, [tiers.send(prompt, output)], num_tokens=1)

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
    names = ("h2d_bytes", "in_place_bytes", "kv_in_place_bytes", "kv_copied_bytes")
    moved = {name: median(getattr(step, name) for step in gaps.stats) for name in names}
    return {
        "total": total,
        "prefill_s": times.token_times_s[0] - times.submit_s,
        "step_s": median(timed),
        "steps": len(timed),
        **moved,
        "has_ended": times.finish_reason == "length" and len(times.token_ids) == output,
    }


def measure_together(tiers: Tiers, work: TiersScenario) -> Figures:
    """Time sequences beyond the GPU's room one after another and at once.

    Of those one after another only a few run: they take equally long. Of those at once the last is
    sent when each of the others has a token: `last_first_s` is the time to its first token,
    `prefill_s` that of one alone.
    """
    room, count, output = tiers.gpu_tokens, work.together_sequences, work.together_output
    total = int(work.beyond[0] * room)
    if total > tiers.llm.max_model_len or count * (total + tiers.block) > room + tiers.host_tokens:
        return {"no_room": f"{count} sequences of {total} tokens exceed both tiers"}
    prefills, walls = [], []
    for prompt in tiers.prompts(min(count, ALONE), total - output, "one after another"):
        tiers.llm.reset_cache()
        times = tiers.send(prompt, output)
        tiers.driver.drain()
        prefills.append(times.token_times_s[0] - times.submit_s)
        walls.append(times.token_times_s[-1] - times.submit_s)
    tiers.llm.reset_cache()
    tiers.mark()
    *prompts, last = tiers.prompts(count, total - output, "together")
    begin_s = tiers.clock()
    sent = [tiers.send(prompt, output) for prompt in prompts]
    _run_until(tiers, sent, num_tokens=1)
    times = tiers.send(last, output)
    tiers.driver.drain()
    wall_s = tiers.clock() - begin_s
    check_ended([*sent, times], output)
    rose, waited = tiers.rose(), tiers.counts().get("long_waited_steps", 0)
    return {
        "room": room,
        "total": total,
        "sequences": count,
        "output_tokens": count * output,
        "alone_s": count * mean(walls),
        "wall_s": wall_s,
        "turns": rose.get("long_turns", 0),
        "waited_steps": waited,
        "prefill_s": mean(prefills),
        "last_first_s": times.token_times_s[0] - times.submit_s,
    }


def _run_until(tiers: Tiers, sent: Sequence[Any], *, num_tokens: int) -> None:
    """Step until each request has so many tokens."""
    while tiers.driver.has_unfinished and any(len(times.token_ids) < num_tokens for times in sent):
        tiers.driver.step()


def measure_prefixed(tiers: Tiers, work: TiersScenario) -> Figures:
    """Run long sequences that share a prefix, which the GPU holds, at once.

    Their prompts are computed before, one at a time, so that all decode in the same steps.
    `planned_bytes` are the blocks of the host tier at the middle of those, if the GPU is full;
    `read_bytes` is what such a step has over the link, at the median.
    """
    room, count, output = tiers.gpu_tokens, work.prefixed_sequences, work.prefixed_output
    prefix_tokens, total = work.prefixed_tokens, work.prefixed_total
    own = total - prefix_tokens - output
    needed = prefix_tokens + count * (total - prefix_tokens + tiers.block)
    if own < 1 or prefix_tokens > room or needed > room + tiers.host_tokens:
        return {"no_room": f"{count} sequences of {total} tokens, {prefix_tokens} of them common"}
    tiers.llm.reset_cache()
    prefix, gaps = tiers.prompt(prefix_tokens, "prefixed"), DecodeGaps(count)
    prompts = [prefix + row for row in tiers.prompts(count, own, "prefixed own")]
    for prompt in prompts:
        tiers.run([prompt], 1)
    sent = [tiers.send(prompt, output) for prompt in prompts]
    while tiers.driver.has_unfinished:
        gaps.add(tiers.driver.step())
    middle = count * (own + output / 2) - (room - prefix_tokens)
    token_bytes = tiers.counts()["block_bytes"] / tiers.block
    ended = [times for times in sent if len(times.token_ids) == output]
    read = [step.kv_in_place_bytes + step.kv_copied_bytes for step in gaps.stats]
    return {
        "room": room,
        "total": total,
        "sequences": count,
        "ended": len(ended),
        "steps": len(gaps.seconds),
        "step_s": median(gaps.seconds) if gaps.seconds else None,
        "read_bytes": median(read) if read else None,
        "planned_bytes": max(0.0, middle) * token_bytes,
    }


def measure_beside(tiers: Tiers, work: TiersScenario) -> Figures:
    """Time short requests, alone and beside a sequence of twice the GPU's room that decodes."""
    room, output = tiers.gpu_tokens, work.fit_output
    total = int(work.beside_times * room)
    most = min(tiers.llm.max_model_len, room + tiers.host_tokens)
    if total > most or work.fit_requests * (work.fit_prompt + output + tiers.block) > room:
        return {"no_room": f"{total} tokens beside {work.fit_requests} requests"}

    def run(name: str) -> tuple[float, float]:
        """Return seconds to the end of all, and to the last first token."""
        rows = tiers.prompts(work.fit_requests, work.fit_prompt, name)
        sent = [tiers.send(row, output) for row in rows]
        while not all(times.finish_reason for times in sent):
            tiers.driver.step()
        begin_s = sent[0].submit_s
        return (
            max(times.token_times_s[-1] for times in sent) - begin_s,
            max(times.token_times_s[0] for times in sent) - begin_s,
        )

    tiers.llm.reset_cache()
    run("beside none, warm")
    alone_s, alone_first_s = run("beside none")
    tiers.llm.reset_cache()
    more = min(4 * output, total // 2)
    long = tiers.send(tiers.prompt(total - more, "beside"), more)
    _run_until(tiers, [long], num_tokens=2)
    before = len(long.token_ids)
    wall_s, first_s = run("beside one")
    gained = len(long.token_ids) - before
    tiers.driver.cancel("measured")
    tiers.driver.drain()
    return {
        "room": room,
        "total": total,
        "requests": work.fit_requests,
        "output_tokens": work.fit_requests * output,
        "alone_s": alone_s,
        "wall_s": wall_s,
        "alone_first_s": alone_first_s,
        "first_s": first_s,
        "long_tokens": gained,
    }


PARTS: Final[Mapping[str, Callable[[Tiers, TiersScenario], Figures]]] = {
    "fits": measure_fits,
    "ttft": measure_ttft,
    "itl": measure_itl,
    "shared": measure_shared,
    "parked": measure_parked,
    "rounds": measure_rounds,
    "long": measure_long,
    "streamed": measure_streamed,
    "together": measure_together,
    "prefixed": measure_prefixed,
    "beside": measure_beside,
}
"""By the name in scenario.tiers.parts."""
