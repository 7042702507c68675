"""What benches measure: single steps, work without an engine, and what the harness itself takes."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from catalogue.checkpoint import check_disk, write_json
from catalogue.files import tightfit_home
from engine.asked.config import EngineConfig
from engine.asked.sampling import SamplingParams
from engine.device.gpu import Gpu
from engine.errors import EngineError, RequestError
from engine.model.formats import EMBEDDING
from engine.model.spec import ModelSpec
from engine.plan.rates import Rates
from engine.plan.resolve import resolve_dtype
from engine.plan.times import decode_step_s, prefill_s, shape_of
from harness.config.serve import Arrivals, Lengths, ServeScenario
from harness.config.study import BareScenario, OverheadScenario, StepsScenario
from harness.observe.link import LinkCounter
from harness.observe.machine_rates import is_disturbing, watched, write_rates
from harness.observe.statistics import Interval, Quantile, interval
from harness.work.drive import Clock, DrivenStep, Driver, Engine, OnEnd, OnProgress
from harness.work.offline import engine_prompts, measure_latency, measure_throughput
from harness.work.schedule import Load
from harness.work.serve import measure_serve
from harness.work.times import RequestTimes
from reports.record.text import number

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
        failed = next((times for times in sent if len(times.token_ids) != num_tokens), None)
        if failed is not None:
            raise RequestError(f"{failed.error or 'it ended'} after {len(failed.token_ids)} tokens")
        return took_s, [list(times.token_ids) for times in sent]


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
        "chunk_s": {length: seconds for length, (seconds, _) in chunks.items()},
        "chunk_tokens": {length: tokens for length, (_, tokens) in chunks.items()},
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
        "predicted_s": _predicted(
            llm, lambda shape, rates: decode_step_s(shape, rates, batch, context)
        ),
        "tokens": digest,
    }


def _predicted(llm: Any, of: Callable[[Any, Rates], float]) -> float | None:
    """Return what the plan's rates say; None where it has none."""
    predicted = llm.plan.predicted
    return of(shape_of(llm.plan, llm.spec), Rates(**predicted["rates"])) if predicted else None


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
    expected = _predicted(sender.llm, lambda shape, rates: prefill_s(shape, rates, length, num))
    return {"seconds": _first_tokens(sender, num, length)[0], "predicted_s": expected}


def _chunk(sender: Sender, length: int) -> tuple[float | None, list[int] | None]:
    """Time a step that prefills one prompt of this length; None: it is too long."""
    if length >= sender.llm.max_model_len:
        return None, None
    return _first_tokens(sender, 1, length)


def _first_tokens(sender: Sender, num: int, length: int) -> tuple[float, list[int]]:
    """Time new prompts until each has its token, once more than is counted.

    Return the median, and the token of each prompt.
    """
    repeats = [sender.prompts(num, length, f"prefill-{k}") for k in range(REPEATS + 1)]
    ran = [sender.answers(prompts, 1) for prompts in repeats]
    tokens = [token for _, answers in ran for answer in answers for token in answer]
    return median([seconds for seconds, _ in ran[1:]]), tokens


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


ATTENTION: Final = "paged_decode_attention"
ATTENTION_SHAPE: Final = "32 x 4096 keys"
"""Begins the shape of the case that is timed."""


def measure_bare(config: BareScenario, engine: EngineConfig, gpu: Gpu | None) -> Figures:
    """Measure the parts that a configuration asks for.

    Blocks are those of `engine`'s model. Rates are kept as those of `gpu`; None: of the CPU.
    """
    spec, device = engine.model.spec, "cpu" if gpu is None else "cuda"
    found = Figures()
    for part in config.parts:
        match part:
            case "attention" | "restore" | "experts" if gpu is None:
                found[part] = {"no_room": "operators are timed on a GPU only"}
            case "attention":
                found[part] = _attention()
            case "experts":
                found[part] = _experts()
            case "rates":
                found[part] = _rates(device, gpu)
            case _ if spec is None:
                found[part] = {"no_room": "the model's sizes are not known"}
            case "moves":
                found[part] = _moves(engine, spec, device)
            case "restore":
                found[part] = _restore(spec)
            case _:
                found[part] = _checkpoint(engine.model.name, spec)
    if gpu is not None:
        import torch  # noqa: PLC0415  takes seconds

        torch.cuda.empty_cache()  # no part of an engine's peak
    return found


def _moves(engine: EngineConfig, spec: ModelSpec, device: str) -> Figures:
    """Time moves of blocks of the model."""
    from harness.observe.probe import probe_moves  # noqa: PLC0415  imports torch

    dtype = resolve_dtype(engine, spec, device)
    block_bytes = engine.kv.block_size * spec.kv_bytes_per_token(dtype)
    return {"block_bytes": block_bytes} | probe_moves(block_bytes, device)


def _card() -> Any:
    """Return the device of this process."""
    import torch  # noqa: PLC0415  takes seconds

    return torch.device("cuda", torch.cuda.current_device())


def _attention() -> Figures:
    """Time decode attention of one layer, all its blocks on the GPU."""
    from kernels import bench, bench_timing  # noqa: PLC0415  import torch

    card = _card()
    rates = bench_timing.measure_rates(card, in_place=False)
    for case in bench.OPERATORS[ATTENTION](card):
        if ATTENTION_SHAPE in case.name:
            timing = bench_timing.time_case(case, rates)
            return {
                "shape": case.name.removeprefix(f"{ATTENTION} "),
                "ms": timing.kernel_ms,
                "gb_s": timing.gb_per_s,
                "copy_gb_s": rates["copy"],
            }
    return {"no_room": f"kernels.bench has no case of {ATTENTION_SHAPE}"}


def _restore(spec: ModelSpec) -> Figures:
    """Time the largest matrix of a layer of the model, in codes, written as bf16."""
    from kernels import bench_timing, bench_weights  # noqa: PLC0415  import torch

    card, size_in, size_out = _card(), spec.hidden_size, 2 * spec.intermediate_size
    timing = bench_timing.time_case(
        bench_weights.restore_case(size_in, size_out, card),
        bench_timing.measure_rates(card, in_place=False),
    )
    written_bytes = 2 * size_in * size_out * bench_timing.num_copies(size_in, size_out)
    return {
        "shape": timing.name.removeprefix("restore "),
        "ms": timing.kernel_ms,
        "gb_s": timing.gb_per_s,
        "written_gb_s": written_bytes / timing.kernel_ms / 1e6,
        "is_equal": timing.is_equal,
    }


EXPERT_CASES: Final = {
    "gather": ("experts", "8 experts, bfloat16, 32 programs"),
    "products": ("experts_products", "experts 30B-A3B plain, 1 tokens"),
}
"""What is timed of experts: names of the benchmark of operators, and of its cases."""


def _experts() -> Figures:
    """Time copies of experts out of host memory, and the products of those of one token."""
    from kernels import bench, bench_timing  # noqa: PLC0415  import torch

    card, found = _card(), Figures()
    rates = bench_timing.measure_rates(card)
    for name, (operator, wanted) in EXPERT_CASES.items():
        case = next((case for case in bench.CASES[operator](card) if case.name == wanted), None)
        if case is None:
            return {"no_room": f"kernels.bench has no case {wanted}"}
        timing = bench_timing.time_case(case, rates)
        found[name] = {
            "shape": case.name,
            "ms": timing.kernel_ms,
            "gb_s": timing.gb_per_s,
            "rate_gb_s": rates[case.kind],
        }
    return found


POOL_SIZE: Final = 4_194_301
"""Draws that random weights are cut from; a prime, so that rows do not repeat in step."""
DRAWS_STD: Final = 0.02
READ_BYTES: Final = 1 << 24


def _checkpoint(name: str, spec: ModelSpec) -> Figures:
    """Write a checkpoint of random weights in the model's shape; read it where it is there.

    Either way the page cache has it afterwards, where there is room. A second folder has the same
    files: what is kept of one checkpoint is not found for the other. Weights and biases are normal
    with DRAWS_STD, norms the same about 1 (or 0, where 1 is added).
    """
    import numpy as np  # noqa: PLC0415  not for every worker

    from catalogue.conversions import bf16_bits  # noqa: PLC0415  brings NumPy

    folder = tightfit_home() / "bench" / f"random-{name}"
    tensors = [part for tensor in spec.tensors() for part in tensor.parts]
    sizes = [2 * math.prod(part.shape) for part in tensors]
    ends = list(accumulate(sizes))
    header: dict[str, Any] = {
        part.name: {"dtype": "BF16", "shape": part.shape, "data_offsets": (end - size, end)}
        for part, size, end in zip(tensors, sizes, ends, strict=True)
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    num_bytes, weights = 8 + len(text) + ends[-1], folder / "model.safetensors"
    linked = folder.with_name(f"{folder.name}-linked")
    found = {"folder": str(folder), "linked_folder": str(linked), "num_bytes": num_bytes}
    if weights.is_file() and weights.stat().st_size == num_bytes:
        with weights.open("rb", buffering=0) as stream:
            room = bytearray(READ_BYTES)
            while stream.readinto(room):
                pass
        _link(folder, linked)
        return found
    folder.mkdir(parents=True, exist_ok=True)
    check_disk(name, folder, num_bytes)
    write_json(folder / "config.json", asdict(spec) | {"dtype": "bfloat16"})
    draws = np.random.default_rng(0).standard_normal(POOL_SIZE, dtype=np.float32) * DRAWS_STD
    pools = {False: bf16_bits(draws), True: bf16_bits(draws + 1 - spec.architecture.norm_offset)}
    begun = weights.with_suffix(".begun")
    with begun.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        start = 0
        for part, size in zip(tensors, sizes, strict=True):
            pool, left = pools[part.name.endswith("norm.weight")], size // 2
            while left:
                piece = pool[start : start + left]
                stream.write(piece.data)
                start, left = (start + len(piece)) % POOL_SIZE, left - len(piece)
    begun.replace(weights)
    _link(folder, linked)
    return found


def _link(folder: Path, linked: Path) -> None:
    """Make a folder whose files are those of another."""
    linked.mkdir(exist_ok=True)
    for file in folder.iterdir():
        place = linked / file.name
        if not (place.exists() and place.samefile(file)):
            place.unlink(missing_ok=True)
            place.hardlink_to(file)


def rates_note(figures: Figures) -> str:
    """Return the rates that were kept as a line of text."""
    rates = figures["rates"].items()
    shown = [f"{name} {'not measured' if v is None else number(v)}" for name, v in rates]
    kept = f"rates of this machine: {', '.join(shown)}. Kept in {figures['file']}."
    if not is_disturbing(figures["others_cores"]):
        return kept
    return (
        f"{kept} Other processes used {figures['others_cores']:.1f} cores meanwhile, so the rates "
        "are lower than the machine's: end them and probe again."
    )


def _rates(device: str, gpu: Gpu | None) -> Figures:
    """Measure what plans of this machine use, and keep it."""
    from harness.observe.probe import probe_rates  # noqa: PLC0415  imports torch

    rates, others_cores = watched(lambda: probe_rates(device))
    file = write_rates(gpu, rates, others_cores)
    return {"rates": rates, "others_cores": others_cores, "file": str(file)}


BARE: Final = {"latency": "in turn", "throughput": "at once", "serve": "at once"}
"""Part -> the bare loop that sends the same requests in the same order."""


def measure_overhead(
    llm: Engine,
    config: OverheadScenario,
    *,
    clock: Clock,
    on_progress: OnProgress,
    on_end: OnEnd,
    served: Mapping[str, Any],
    t: Quantile,
) -> dict[str, Any]:
    """Return microseconds per request of one token, and per further token.

    `parts` has each part and bare loop, `own` what a part takes beyond its bare loop, each as the
    mean and half of its 95 % interval. The engine's steps take no time; `served` are further
    arguments of `measure_serve`.
    """
    prompts = engine_prompts(
        llm, config.num_requests, config.prompt_tokens, seed=0, stream="overhead"
    )
    reports: dict[str, Any] = {"clock": clock, "on_progress": on_progress, "on_end": on_end}

    def timed(part: str, num_tokens: int) -> float:
        run = _runner(part, llm, prompts, num_tokens, reports, served, t)
        begin_s = clock()
        run()
        return clock() - begin_s

    names = [*dict.fromkeys(BARE.values()), *BARE]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(config.repeats):
        for name in names:
            one_s, all_s = timed(name, 1), timed(name, config.output_tokens)
            per_token_s = (all_s - one_s) / (config.output_tokens - 1)
            found[name].append((1e6 * one_s / len(prompts), 1e6 * per_token_s / len(prompts)))
    own = {
        part: [
            (ours[0] - theirs[0], ours[1] - theirs[1])
            for ours, theirs in zip(found[part], found[bare], strict=True)
        ]
        for part, bare in BARE.items()
    }
    return {
        "parts": {name: _intervals(pairs, t) for name, pairs in found.items()},
        "own": {name: _intervals(pairs, t) for name, pairs in own.items()},
        "repeats": config.repeats,
        "num_requests": len(prompts),
        "output_tokens": config.output_tokens,
    }


def _intervals(pairs: Sequence[tuple[float, float]], t: Quantile) -> dict[str, dict[str, float]]:
    columns = dict(zip(("request_us", "token_us"), zip(*pairs, strict=True), strict=True))
    found: dict[str, Interval | None] = {name: interval(v, t) for name, v in columns.items()}
    return {
        name: {"mean": value.mean, "half": value.half_width}
        for name, value in found.items()
        if value is not None
    }


def _runner(
    part: str,
    llm: Engine,
    prompts: Sequence[list[int]],
    num_tokens: int,
    reports: Mapping[str, Any],
    served: Mapping[str, Any],
    t: Quantile,
) -> Callable[[], Any]:
    """Return what sends all requests for so many tokens, by a part or a bare loop."""
    match part:
        case "latency":
            return partial(measure_latency, llm, prompts, num_tokens, **reports, t=t)
        case "throughput":
            return partial(measure_throughput, llm, prompts, num_tokens, **reports)
        case "in turn" | "at once":
            return partial(_bare, llm, prompts, num_tokens, in_turn=part == "in turn")
        case _:
            config = ServeScenario(
                num_requests=len(prompts),
                warmup_requests=0,
                arrivals=Arrivals(process="at_once"),
                prompt=Lengths(tokens=len(prompts[0])),
                output=Lengths(tokens=num_tokens),
            )
            load = Load(config=config, vocab_size=llm.spec.vocab_size)
            return partial(measure_serve, llm, load, **reports, **served, t=t)


def _bare(llm: Engine, prompts: Sequence[list[int]], num_tokens: int, *, in_turn: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        llm.add_request(prompt, params, f"bare-{index}")
        while in_turn and llm.has_unfinished():
            llm.step()
    while llm.has_unfinished():
        llm.step()
