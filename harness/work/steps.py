"""Single steps of an engine: decodes by batch, prompts, chunks, and the link's counter beside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import mean, median
from typing import Any, Final

from engine.errors import EngineError, RequestError
from engine.model.formats import EMBEDDING
from engine.plan.rates import Rates
from engine.plan.times import Shape, decode_step_s, prefill_s, shape_of
from harness.config.study import StepsScenario
from harness.observe.link import LinkCounter
from harness.work.drive import Clock, DrivenStep, Driver
from harness.work.offline import engine_prompts
from harness.work.times import RequestTimes
from harness.work.watch import expert_counts

Figures = dict[str, Any]
SETTLE_STEPS: Final = 3
"""Decode steps that are not timed by themselves: the first of a batch, and those behind a break."""
SPARE_TOKENS: Final = 3
"""Tokens of a sequence beyond its timed steps: the prefill's, and those at its end."""
MOST_REPLAYS: Final = 20
LEAST_REPLAYS: Final = 3
REPLAY_S: Final = 0.5
"""Replays of a graph last about so long."""
REPEATS: Final = 5
"""Repeats of prefills, after one that is not counted."""
NUM_COUNTED_TOKENS: Final = 256
"""Output tokens of a sequence that decodes beside the counter."""


@dataclass(frozen=True, kw_only=True)
class FirstTokens:
    """What prompts needed until each had its first token; None: they are too long."""

    seconds: float | None = None
    """Median of the repeats."""
    tokens: list[int] | None = None
    """The token of each prompt."""
    expert_bytes: float | None = None
    """Bytes of experts that crossed the link, the mean of the repeats."""


@dataclass
class DecodeGaps:
    """Times between the ends of steps in which every sequence of a batch decodes.

    The first SETTLE_STEPS behind any other step are left out, and the first `warmup_steps` of all.
    """

    batch: int
    warmup_steps: int = 0
    seconds: list[float] = field(default_factory=list)
    stats: list[Any] = field(default_factory=list)
    """What the engine says of the steps that are timed."""
    decoded: list[int] = field(default_factory=list)
    """Tokens that each sequence had decoded after them."""
    in_a_row: int = 0
    """Such steps since the last break; 0 makes a break."""
    num_decoded: int = 0

    def add(self, step: DrivenStep) -> None:
        """Take up one step."""
        if not step.only_decodes(self.batch):
            self.in_a_row = 0
            return
        self.num_decoded += 1
        self.in_a_row += 1
        if self.in_a_row > SETTLE_STEPS and self.num_decoded > self.warmup_steps:
            self.seconds.append(step.end_s - step.begin_s)
            self.stats.append(step.stats)
            self.decoded.append(self.num_decoded)


class Sender:
    """Sends prompts to an engine through the step driver."""

    def __init__(self, llm: Any, clock: Clock) -> None:
        self.llm, self.clock = llm, clock
        self.driver = Driver(llm, clock)
        self._ids = count()

    def prompts(self, num: int, num_tokens: int, stream: str) -> list[list[int]]:
        """Return prompts of random tokens, the same for the same stream."""
        return engine_prompts(self.llm, num, num_tokens, seed=0, stream=stream)

    def prompt(self, num_tokens: int, stream: str) -> list[int]:
        """Return one such prompt."""
        return self.prompts(1, num_tokens, stream)[0]

    def send(self, prompt: Sequence[int], num_tokens: int) -> RequestTimes:
        """Queue a prompt for so many tokens; RequestError where the engine refuses it."""
        times = self.driver.offer(prompt, num_tokens, f"sent-{next(self._ids)}")
        if times.error is not None:
            raise RequestError(times.error)
        return times

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Send all prompts at once; return the seconds until the last has all of its tokens."""
        return self.answers(prompts, num_tokens)[0]

    def answers(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> tuple[float, list[list[int]]]:
        """Return what `run` does, and the tokens of each prompt."""
        begin_s = self.clock()
        sent = [self.send(prompt, num_tokens) for prompt in prompts]
        self.driver.drain()
        took_s = self.clock() - begin_s
        check_ended(sent, num_tokens)
        return took_s, [list(times.token_ids) for times in sent]


def check_ended(sent: Sequence[RequestTimes], num_tokens: int) -> None:
    """Raise RequestError unless each request has so many tokens."""
    failed = next((times for times in sent if len(times.token_ids) != num_tokens), None)
    if failed is not None:
        raise RequestError(f"{failed.error or 'it ended'} after {len(failed.token_ids)} tokens")


def measure_steps(
    llm: Any, config: StepsScenario, *, clock: Clock, counter: LinkCounter | None = None
) -> Figures:
    """Measure everything that a configuration asks for.

    `counter` is the link's; None: there is none.
    """
    sender = Sender(llm, clock)
    decodes = {str(batch): decode(sender, batch, config) for batch in config.batches}
    prefills = {str(num): _prefill(sender, num, config) for num in config.prefills}
    chunks = {str(length): _chunk(sender, length) for length in config.chunks}
    return {
        "decode": decodes,
        "prefill": prefills,
        "chunk_s": {length: chunk.seconds for length, chunk in chunks.items()},
        "chunk_tokens": {length: chunk.tokens for length, chunk in chunks.items()},
        "chunk_expert_bytes": {length: chunk.expert_bytes for length, chunk in chunks.items()},
        "counter": count_link(sender, config, counter) if config.counter_s else None,
        "read_bytes": read_bytes(llm),
        "prompt_tokens": config.prompt_tokens,
        "prefill_tokens": config.prefill_tokens,
        "memory": llm.memory(),
    }


def read_bytes(llm: Any) -> int:
    """Return the bytes of weights that a step of one token reads.

    Not read are the embedding table, unless it is tied, and experts that it is not routed to.
    """
    spec, formats = llm.spec, llm.plan.formats
    unread = None if spec.tie_word_embeddings else EMBEDDING
    read = [tensor for tensor in spec.tensors() if tensor.name != unread]
    experts = formats.total_bytes(tensor for tensor in read if tensor.num_experts)
    routed = experts * spec.num_experts_per_tok // max(1, spec.num_experts)
    return int(formats.total_bytes(read) - experts + routed)


def decode(sender: Sender, batch: int, config: StepsScenario) -> Figures:
    """Time steps in which every one of `batch` sequences decodes, and bare replays among them.

    Where the KV cache does not hold them, `no_room` says so instead.
    """
    llm, plan = sender.llm, sender.llm.plan
    prefill_steps = -(-batch * config.prompt_tokens // plan.max_num_batched_tokens)
    warmup_steps = -(-config.warmup_tokens // batch)
    # So many that enough steps decode all of the sequences.
    timed_steps = warmup_steps + config.steps + 2 * SETTLE_STEPS
    tokens = timed_steps + SPARE_TOKENS + prefill_steps - 1
    length = config.prompt_tokens + tokens
    needed = batch * -(-length // plan.block_size) * plan.block_size
    if plan.kv_tokens < needed or plan.max_num_seqs < batch:
        return {"no_room": f"{needed} tokens of KV are needed, {plan.kv_tokens} fit"}
    for prompt in sender.prompts(batch, config.prompt_tokens, f"decode {batch}"):
        sender.send(prompt, tokens)
    gaps, replay, digest = DecodeGaps(batch, warmup_steps), None, list[int]()
    size = next((size for size in llm.effective()["graphs"] if size >= batch), None)
    while sender.driver.has_unfinished:
        step = sender.driver.step()
        digest += [event.token_id for event in step.events]
        gaps.add(step)
        if size is not None and replay is None and len(gaps.seconds) == config.steps // 2:
            replay = replay_s(llm, size, median(gaps.seconds))
            gaps.in_a_row = 0
    timed = slice(config.steps)
    stats, context = gaps.stats[timed], config.prompt_tokens + mean(gaps.decoded[timed])
    planned = plan.moved_per_step(batch)
    return {
        "step_s": median(gaps.seconds[timed]),
        "least_s": min(gaps.seconds[timed]),
        "steps": len(gaps.seconds[timed]),
        "wait_s": median(step.wait_s for step in stats),
        "h2d_bytes": stats[-1].h2d_bytes,
        "in_place_bytes": stats[-1].in_place_bytes,
        "expert_hits": mean(step.expert_hits for step in stats),
        "expert_misses": mean(step.expert_misses for step in stats),
        "expert_bytes": mean(step.expert_bytes for step in stats),
        "planned_h2d_bytes": planned[0],
        "planned_in_place_bytes": planned[1],
        "kv_bytes": round(batch * context * llm.spec.kv_bytes_per_token(plan.dtype)),
        "used_graph": stats[-1].used_graph,
        "is_overlapped": stats[-1].is_overlapped,
        "replay_s": replay,
        "predicted_s": _predicted(llm, lambda shape: decode_step_s(shape, batch, context)),
        "tokens": digest,
    }


def _predicted(llm: Any, of: Callable[[Shape], float]) -> float | None:
    """Return what the plan's rates say; None where it has none."""
    predicted = llm.plan.predicted
    if not predicted:
        return None
    return of(shape_of(llm.plan, llm.spec, Rates(**predicted["rates"])))


def replay_s(llm: Any, size: int, step_s: float) -> float:
    """Time bare replays of the newest step's graph of `size` rows, on a GPU."""
    import torch  # noqa: PLC0415  not for the parent

    def replay() -> None:
        if not llm.engine.executor.replay_newest(size):
            raise EngineError(
                f"replay: expected the newest step to be a decode of {size} rows with a graph, got "
                "another one. Step until it is; use fewer sequences where blocks lie on the host."
            )

    num = min(MOST_REPLAYS, max(LEAST_REPLAYS, round(REPLAY_S / step_s)))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    replay()  # the step in flight ends before the clock starts
    begin.record()
    for _ in range(num):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / num


def _prefill(sender: Sender, num: int, config: StepsScenario) -> Figures:
    """Time until each of `num` prompts has its first token; `no_room` where they do not fit."""
    plan = sender.llm.plan
    length = min(config.prefill_tokens, sender.llm.max_model_len - 1)
    if plan.kv_tokens < num * (length + plan.block_size):
        return {"no_room": "does not fit the KV cache"}
    expected = _predicted(sender.llm, lambda shape: prefill_s(shape, length, num))
    return {"seconds": _first_tokens(sender, num, length).seconds, "predicted_s": expected}


def _chunk(sender: Sender, length: int) -> FirstTokens:
    """Time a step that prefills one prompt of this length."""
    if length >= sender.llm.max_model_len:
        return FirstTokens()
    return _first_tokens(sender, 1, length)


def _first_tokens(sender: Sender, num: int, length: int) -> FirstTokens:
    """Time new prompts until each has its token, once more than is counted."""
    repeats = [sender.prompts(num, length, f"prefill-{k}") for k in range(REPEATS + 1)]
    ran = [sender.answers(repeats[0], 1)]
    before = expert_counts(sender.llm)
    ran += [sender.answers(prompts, 1) for prompts in repeats[1:]]
    after = expert_counts(sender.llm)
    copied = sum(after.get("bytes", ())) - sum(before.get("bytes", ()))
    return FirstTokens(
        seconds=median([seconds for seconds, _ in ran[1:]]),
        tokens=[token for _, answers in ran for answer in answers for token in answer],
        expert_bytes=copied / REPEATS,
    )


def count_link(sender: Sender, config: StepsScenario, counter: LinkCounter | None) -> Figures:
    """Decode one sequence after another for `counter_s` beside NVML's counter."""
    tokens = min(NUM_COUNTED_TOKENS, sender.llm.max_model_len - config.prompt_tokens)
    prompt = sender.prompt(config.prompt_tokens, "counter")
    return counted(sender, config.counter_s, counter, lambda: sender.send(prompt, tokens))


def counted(
    sender: Sender, seconds: float, counter: LinkCounter | None, send: Callable[[], object]
) -> Figures:
    """Run steps for a while; hold the engine's bytes against NVML's counter of the link.

    Bytes are those of weights, copied and in place, and of KV that is read in place or loaded.

    Args:
        sender: What sends prompts to the engine.
        seconds: How long.
        counter: The link's; None: there is none.
        send: Sends a request; called whenever none is left.
    """
    llm, clock = sender.llm, sender.clock

    def moved() -> tuple[int, int]:
        """Return the bytes that were copied, and those that were read in place."""
        stats = llm.stats()
        kv = stats["kv"]
        copied = int(stats["h2d_bytes"]) + int(kv["moved"]["loaded_bytes"])
        ahead = int(kv["copied_ahead_bytes"]) + int(kv["staged_prefill_bytes"])
        return copied + ahead, int(stats["in_place_bytes"]) + int(kv["in_place_bytes"])

    def decode_on() -> tuple[int, int, float]:
        begin_s, before = clock(), moved()
        while clock() - begin_s < seconds:
            if not sender.driver.has_unfinished:
                send()
            sender.driver.step()
        after = moved()
        return after[0] - before[0], after[1] - before[1], clock() - begin_s

    factor = counted_gb_s = None
    if counter is None:
        copied, in_place, wall_s = decode_on()
    else:
        (copied, in_place, wall_s), counted_gb_s = counter.measured(decode_on)
        factor = counter.factors.of(copied, in_place)
    sender.driver.cancel("its time is over")
    sender.driver.drain()
    return {
        "wall_s": wall_s,
        "engine_gb_s": (copied + in_place) / wall_s / 1e9,
        "nvml_gb_s": None if counted_gb_s is None or factor is None else counted_gb_s * factor,
        "factor": factor,
    }
