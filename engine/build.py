"""Build an engine from its configuration: read sizes, plan, place weights, capture."""

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Final

from engine.asked.config import EngineConfig, ModelConfig
from engine.asked.offload import OffloadWarning, warn_caller
from engine.asked.sampling import SamplingParams, penalty_tokens
from engine.clock import LoadReport, PhaseClock
from engine.device.base import TORCH_DTYPES, Device
from engine.device.cuda import open_device
from engine.errors import (
    CapacityError,
    CheckpointError,
    KernelError,
    PinningError,
    UnpackableError,
)
from engine.kv.memory import HostTier, KVCache
from engine.model.checkpoint import (
    ModelFolder,
    StoredTensor,
    copy_folder,
    find_tensors,
    read_folder,
    read_unpackable,
    write_unpackable,
)
from engine.model.formats import EMBEDDING, TensorFormats, TensorSpec
from engine.model.gguf import is_gguf
from engine.model.spec import W13, ModelSpec
from engine.plan.cards import DeviceFacts
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_again, plan_memory
from engine.plan.queue import QUEUE_REQUESTS, queue_of
from engine.plan.times import CONTEXT_TOKENS
from engine.run.core import EngineCore
from engine.run.decoder import Decoder
from engine.run.executor import DeviceExecutor
from engine.run.routing import Routers, read_routing
from engine.run.sampler import Sampler
from engine.text.tokenizer import eos_token_ids, load_tokenizer
from engine.weights.kept import DAMAGED, KeptCopy, Packed, keep, source_identity
from engine.weights.reader import CheckpointReader, DummyWeights, pack, unpack
from engine.weights.store import OPERATORS, WeightStore
from kernels.compile_time import Compilation, CudaError, count_compile_time

Progress = Callable[[str, int, int], None]
"""Called with the phase, the bytes done and the bytes in all."""


@dataclass(frozen=True)
class Engine:
    """The parts of a built engine."""

    config: EngineConfig
    spec: ModelSpec
    plan: MemoryPlan
    device: Device
    store: WeightStore
    tier: HostTier
    """The host tier of KV blocks; empty where there is none."""
    cache: KVCache
    executor: DeviceExecutor
    core: EngineCore
    routing: Routers
    """How tokens find their experts, and what keeps it."""
    tokenizer: Any | None
    load_report: LoadReport
    reference: bool

    def host_bytes(self) -> tuple[int, int]:
        """Return pinned and pageable host bytes of weights and KV blocks."""
        weights, blocks = self.store.host_bytes(), self.tier.num_bytes()
        return weights[0] + blocks[0], weights[1] + blocks[1]


def read_model(model: ModelConfig) -> ModelFolder:
    """Return the model's sizes, from its folder or as given, and notes on them.

    Raises:
        CheckpointError: There is no config.json, or it contradicts the sizes that were given.
    """
    if model.path is None:
        assert model.spec is not None
        return ModelFolder(model.spec)
    folder = Path(model.path)
    has_config = (folder / "config.json").is_file() or is_gguf(folder)
    if model.spec is not None and model.load_format == "dummy" and not has_config:
        return ModelFolder(model.spec)
    found = read_folder(folder)
    if model.spec is not None:
        _check_same(model, model.spec, found)
    return found


def _check_same(model: ModelConfig, given: ModelSpec, folder: ModelFolder) -> None:
    found = replace(folder.spec, tie_word_embeddings=True) if folder.is_untied else folder.spec
    for name in (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
        "tie_word_embeddings",
        "rope_theta",
    ):
        if getattr(given, name) != getattr(found, name):
            raise CheckpointError(
                f"{model.path}: config.json has {name}={getattr(found, name)!r}, model "
                f"{model.name!r} says {getattr(given, name)!r}. Is this the folder of that model?"
            )


@contextlib.contextmanager
def _kernel_errors() -> Iterator[None]:
    """Raise what kernels raise as an error of the engine."""
    try:
        yield
    except CudaError as error:
        raise KernelError(str(error)) from error


@_kernel_errors()
def build_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    *,
    reference: bool = False,
    plan: MemoryPlan | None = None,
) -> Engine:
    """Build an engine, ready for its first request; every byte is planned before any is allocated.

    Args:
        config: What was asked.
        progress: Called as weights come into place.
        reference: Ignore the offload settings: every layer on demand, eager.
        plan: What to build, made of this configuration on this machine; None: it is planned here.
            Its placements are kept where it has to be planned again.

    Raises:
        CapacityError: It does not fit.
        CheckpointError: The checkpoint is absent or does not match.
        KernelError: A CUDA kernel does not compile, load or launch here.
    """
    clock = PhaseClock()
    with clock.phase("plan"):
        model = read_model(config.model)
        spec = model.spec.shard(rank=0, world_size=1)
        device = open_device(config.gpu.device)
        planning = _Planning(config, spec, reference=reference, is_given=plan is not None)
        if plan is None:
            plan = planning.made(device.facts())
    with clock.phase("read"):
        stored, note = _find_weights(config.model, spec, plan.formats)
    with clock.phase("tokenizer"):
        folder = None if config.model.path is None else Path(config.model.path)
        tokenizer, eos_ids = load_tokenizer(folder), eos_token_ids(folder, spec.vocab_size)
    with clock.phase("plan"):
        picked = read_routing(config, spec)
    with contextlib.ExitStack() as undo:
        undo.callback(device.close)
        compiling = Compilation(_kernels_of(spec, plan, device), device.torch_device)
        undo.callback(compiling.close)
        loader = _Loader(planning, stored, device, clock, progress)
        plan, store, tier = loader.fill(plan)
        undo.callback(tier.close)
        plan = replace(plan, notes=(*plan.notes, *model.notes, *([note] if note else [])))
        for note in plan.notes:
            warn_caller(note)
        with clock.phase("allocate"):
            device.count_working(plan.gpu_items["activations"] + plan.gpu_items["logits"])
            cache = KVCache(plan, spec, device, tier.blocks)
            tier.connect(cache)
            routers = Routers.of(config, spec, picked, device)
            sampler = Sampler(
                spec.vocab_size,
                device.torch_device,
                max_rows=plan.max_num_seqs,
                penalty_tokens=penalty_tokens(plan.max_num_seqs, plan.max_model_len),
                host_tensor=device.upload_buffer,
                reach=device.reach if tier.movers else None,
            )
            executor = DeviceExecutor(
                [(device, plan)],
                Decoder.of(spec, plan, device, store, cache, routers),
                sampler,
                seed=config.engine.seed,
                eos_token_ids=eos_ids,
            )
        if compiling.kernels:
            with clock.phase("compile"):
                clock.add_busy("compile", compiling.join())
        _warm_up(executor, tier, plan, clock)
        core = EngineCore(
            plan,
            executor,
            eos_token_ids=eos_ids,
            movers=tier.movers,
            identity=_identity(config, spec, plan, routers),
            is_routed=routers.table is not None,
        )
        undo.pop_all()
    parts = config, spec, plan, device, store, tier, cache, executor, core, routers, tokenizer
    return Engine(*parts, clock.report(), reference)


def _identity(
    config: EngineConfig, spec: ModelSpec, plan: MemoryPlan, routers: Routers
) -> tuple[str, ...]:
    """Return what keys and values depend on beside tokens: weights, dtype, windows, routing."""
    model = config.model
    if model.load_format == "dummy":
        weights = f"dummy, seed {config.engine.seed}"
    else:
        weights = str(Path(model.path or "").resolve())
    return (
        weights,
        json.dumps(asdict(spec), sort_keys=True, default=str),
        plan.dtype,
        f"window {plan.window}",
        f"routing {json.dumps(routers.facts, sort_keys=True)}",
        *(f"{name} in {form}" for name, form in plan.formats.to_dict().items()),
    )


GATED: Final = ("gate_up_proj.weight", W13)
"""The end of names of matrices whose rows are gates and ups."""


def _kernels_of(spec: ModelSpec, plan: MemoryPlan, device: Device) -> set[Any]:
    """Return the kernels of a plan's products that are compiled beside its load."""
    found: set[Any] = set()
    tables = set() if spec.tie_word_embeddings else {EMBEDDING}
    for tensor in spec.tensors():
        if tensor.num_experts and spec.architecture.has_expert_biases:
            continue  # kernels.ops.experts multiplies with them in Triton
        if len(tensor.shape) == 2 and tensor.name not in tables:
            shape = tensor.shape
            if tensor.num_experts:
                shape = tensor.expert_rows, shape[1]
            found |= (
                plan.formats[tensor.name]
                .products(OPERATORS)
                .kernels_of(
                    shape,
                    TORCH_DTYPES[plan.dtype],
                    device.torch_device,
                    is_gated=tensor.name.endswith(GATED),
                    max_tokens=plan.max_num_batched_tokens,
                    has_experts=tensor.num_experts > 0,
                )
            )
    return found


def _warm_up(executor: DeviceExecutor, tier: HostTier, plan: MemoryPlan, clock: PhaseClock) -> None:
    """Run a first step and capture graphs, compiling kernels on the way."""
    emulated = plan.facts.emulated
    with count_compile_time(enabled=not emulated) as compiled:
        with clock.phase("warm_up"):
            tier.warm_up()
            # A CPU has no kernels to compile; a GPU's largest step also sizes its allocator.
            executor.warm_up(16 if emulated else plan.max_num_batched_tokens)
            clock.part("compile", compiled.take_s())
        if plan.use_graphs:
            with clock.phase("capture"):
                executor.capture()
                clock.part("compile", compiled.take_s())
    if executor.meter is not None:
        executor.meter.start()


@dataclass(frozen=True)
class _Planning:
    """Plans, and plans again: what was handed in keeps its placements."""

    config: EngineConfig
    spec: ModelSpec
    reference: bool
    is_given: bool
    """The plan was handed in."""

    def made(self, facts: DeviceFacts, **formats: Any) -> MemoryPlan:
        """Return a plan of the configuration; `formats`: as plan_memory's."""
        known = known_unpackable(self.config) if not formats else {}
        formats = formats or {"unpackable": known}
        return plan_memory(self.config, self.spec, facts, reference=self.reference, **formats)

    def _again(self, plan: MemoryPlan, *changes: Any) -> MemoryPlan:
        return plan_again(plan, self.config, self.spec, *changes, reference=self.reference)

    def unpinned(self, plan: MemoryPlan, reason: str) -> MemoryPlan:
        """Return the plan again for a machine that cannot pin, in the same formats."""
        facts = replace(plan.facts, can_pin=False, can_uva=False, reason=reason)
        formats = plan.formats.others
        if self.is_given:
            return self._again(plan, facts, formats)
        again = self.made(facts, tensor_formats=formats)
        return replace(again, weight_format=plan.weight_format)

    def with_plain(self, plan: MemoryPlan, reasons: dict[str, str]) -> MemoryPlan:
        """Return the plan again with tensors plain that codes cannot hold, and note them."""
        known = known_unpackable(self.config) | reasons
        if self.config.model.load_format != "dummy":
            write_unpackable(self.config.facts_folder, self.config.model.path or "", known)
        if self.is_given:
            others = plan.formats.others.items()
            formats = {name: form for name, form in others if name not in reasons}
            again = self._again(plan, plan.facts, formats, known)
        else:
            again = self.made(plan.facts, unpackable=known)
        note = (
            f"engine.weight_format: {len(reasons)} tensors have values that codes cannot hold and "
            f"stay plain ({', '.join(sorted(reasons))}); the weights were loaded a second time."
        )
        return replace(again, notes=(*again.notes, note))


def known_unpackable(config: EngineConfig) -> dict[str, str]:
    """Return why tensors of a checkpoint cannot be kept in codes, as earlier loads found."""
    if config.weight_format == "checkpoint" or config.model.load_format == "dummy":
        return {}
    return read_unpackable(config.facts_folder, config.model.path)


def _note_host(clock: PhaseClock, seconds: tuple[float, float], sizes: tuple[int, int]) -> None:
    """Count host memory: seconds of touching and of pinning, bytes pinned and pageable."""
    for name, each, num_bytes in zip(
        ("touch", "pin"), seconds, (sum(sizes), sizes[0]), strict=True
    ):
        clock.part(name, each)
        clock.add_bytes(name, num_bytes)


def _find_weights(
    model: ModelConfig, spec: ModelSpec, formats: TensorFormats
) -> tuple[dict[str, StoredTensor], str]:
    """Where every tensor lies on disk, checked, and a note; empty where weights are made up."""
    if model.load_format == "dummy":
        return {}, ""
    return find_tensors(Path(model.path or ""), spec, formats)


class _Told:
    """Tells how much of a load is done; on the way there may come to be more."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._done, self.total = progress, 0, 0

    def expect(self, num_bytes: int) -> None:
        """Add to what is to be done."""
        self.total += num_bytes
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        """Add to what is done."""
        self._done += num_bytes
        if self._progress is not None:
            self._progress("load", self._done, self.total)


@dataclass(frozen=True)
class _Loader:
    """Places weights and fills them in; where a plan cannot be kept, it is made again."""

    planning: _Planning
    stored: dict[str, StoredTensor]
    """Where tensors lie on disk; empty where weights are made up."""
    device: Device
    clock: PhaseClock
    progress: Progress | None

    def fill(
        self, plan: MemoryPlan, *, is_last: bool = False
    ) -> tuple[MemoryPlan, WeightStore, HostTier]:
        """Place weights and load them; where codes cannot hold some, once more with these plain."""
        plan, store, tier = self._place(plan)
        with contextlib.ExitStack() as undo:
            undo.callback(store.close)
            undo.callback(tier.close)
            try:
                told = _Told(self.progress)
                is_dummy = self.planning.config.model.load_format == "dummy"
                notes = self._make_up(store, told) if is_dummy else self._read(store, told)
                store.loaded()
            except UnpackableError as error:
                if is_last:
                    raise
                reasons = error.reasons
            else:
                undo.pop_all()
                return replace(plan, notes=(*plan.notes, *notes)), store, tier
        with self.clock.phase("plan"):
            plan = self.planning.with_plain(plan, reasons)
        return self.fill(plan, is_last=True)

    def _place(self, plan: MemoryPlan) -> tuple[MemoryPlan, WeightStore, HostTier]:
        """Allocate the weights' places and host blocks; where pinning fails, plan without it."""
        try:
            return plan, *self._allocate(plan)
        except PinningError as error:
            reason = str(error)
        # Not above: there the error holds the memory that could not be pinned, as large as the
        # weights.
        with self.clock.phase("plan"):
            plan = self.planning.unpinned(plan, reason)
        return plan, *self._allocate(plan)

    def _allocate(self, plan: MemoryPlan) -> tuple[WeightStore, HostTier]:
        """Allocate the weights' places on both sides, and host blocks; pinned as planned."""
        self.device.enforce_budget(plan.allocator_bytes)
        with self.clock.phase("allocate"):
            store = WeightStore(plan, self.device)
            _note_host(self.clock, store.host_seconds(), store.host_bytes())
            tier = HostTier(plan, self.device)
            _note_host(self.clock, tier.seconds(), tier.num_bytes())
        return store, tier

    def _make_up(self, store: WeightStore, told: _Told) -> list[str]:
        """Fill the weights' places with dummy values; there is nothing to note."""
        spec, formats = self.planning.spec, store.plan.formats
        parts, packed = list(store.parameters()), list(store.packed())
        unpacked = list(store.unpacked())
        total = sum(tensor.nbytes for _, tensor in parts)
        total += sum(formats.num_bytes(tensor) for tensor, *_ in unpacked)
        told.expect(total + sum(formats.default.num_bytes(tensor) for tensor, _ in packed))
        with self.clock.phase("convert"):
            norm, scale = 1.0 - spec.architecture.norm_offset, spec.embedding_scale or 1.0
            dummy = DummyWeights(self.planning.config.engine.seed, told.advance, norm, scale)
            dummy.fill(parts)
            for tensor, form, views in unpacked:
                dummy.fill_arrays(tensor.name, form.dummies(tensor), views)
            pack(formats, packed, dummy.fill, self.device, self.clock)
            self.device.synchronize()
        self.clock.add_bytes("convert", told.total)
        return []

    def _read(self, store: WeightStore, told: _Told) -> list[str]:
        """Read what lies on disk as it is needed, pack the rest, and keep it where asked.

        Returns what is to be noted.
        """
        config, stored = self.planning.config, self.stored
        parts, formats = list(store.parameters()), store.plan.formats
        packed: list[Packed] = list(store.packed())

        def to_pack(is_chosen: Callable[[TensorSpec], bool]) -> list[Packed]:
            chosen = [each for each in packed if is_chosen(each[0])]
            of_chosen = (formats[tensor.name].parameters(tensor) for tensor, _ in chosen)
            told.expect(sum(stored[part.name].num_bytes for part in chain(*of_chosen)))
            return chosen

        with self.clock.phase("read"):
            copy = _open_copy(config) if packed else None
        arrays = [] if copy is None else list(copy.arrays(packed, formats))
        told.expect(sum(stored[part.name].num_bytes for part, _ in parts))
        told.expect(sum(source.num_bytes for _, _, source in arrays))
        rest = to_pack(lambda tensor: copy is None or not copy.holds(tensor, formats))
        unpacked = list(store.unpacked())
        told.expect(sum(s.num_bytes for tensor, form, _ in unpacked for s in form.sources(tensor)))
        reader = CheckpointReader(self.device, self.clock, told.advance, pin=store.plan.pin)
        with contextlib.closing(reader):
            damaged = reader.read(
                [*parts, *((part, target) for part, target, _ in arrays)],
                stored | {part.name: source for part, _, source in arrays},
            )
            if arrays:
                self.clock.add_bytes("kept", sum(source.num_bytes for _, _, source in arrays))
            if copy is not None and damaged:
                names = {name.rpartition(".")[0] for name in damaged}
                copy.drop(names, DAMAGED)
                rest += to_pack(lambda tensor: tensor.name in names)
            fill = partial(reader.read, stored=stored)
            unpack(unpacked, fill, self.device, self.clock)
            escapes = pack(formats, rest, fill, self.device, self.clock)
        if copy is None:
            return [NOTHING_PACKED] if config.model.keep_lossless else []
        if not (config.model.keep_lossless or copy.faults):
            return []
        with self.clock.phase("keep"):
            num_bytes, failure = keep(copy, formats, packed, escapes)
        self.clock.add_bytes("keep", num_bytes)
        return [note for note in (copy.note(), failure) if note]


NOTHING_PACKED: Final = (
    "model.keep_lossless: no weights are in codes, so none are kept (engine.weight_format=lossless "
    "with engine.dtype=bfloat16 has them so)."
)


def _open_copy(config: EngineConfig) -> KeptCopy | None:
    """Return what was kept of a checkpoint; None where no folder was given for it."""
    if config.kept_folder is None:
        return None
    checkpoint = Path(config.model.path or "")
    folder = copy_folder(Path(config.kept_folder), checkpoint)
    return KeptCopy(folder, source_identity(checkpoint))


# The referee: times placements that the planner chose, and keeps the fastest.


NUM_CANDIDATES: Final = 2
SETTLE_STEPS: Final = 3
"""Decode steps that are not timed: the first of all sequences, and those behind a break."""
TIMED_STEPS: Final = 12
LONGEST_PROMPT: Final = 2048
"""Longest prompt of the objective context, so that the referee computes none at length."""

Clock = Callable[[], float]
OpenEngine = Callable[[MemoryPlan], Any]
"""Builds the engine.LLM of a plan."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one candidate is given."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    """At most; what is decoded beyond the timed steps is dropped."""


def judge(
    plans: Sequence[MemoryPlan],
    vocab_size: int,
    open_engine: OpenEngine,
    clock: Clock = time.perf_counter,
) -> MemoryPlan:
    """Return the plan that is fastest when it runs; `choice` holds both times.

    Engines are built one after another, with random weights; the memory of one is released before
    the next takes its own. One candidate alone, or one whose times cannot be had, is not timed
    against others: the best predicted plan stays, and `choice` says why.

    `plans` begin with the best predicted; each has its `choice`.
    """
    objective = str((plans[0].choice or {}).get("objective", "latency"))
    if len(plans) < NUM_CANDIDATES:
        return _noted(plans[0], "only one placement fits, so nothing was timed", [])
    rows = [_row(plan, objective, vocab_size, open_engine, clock) for plan in plans]
    seconds = [row["seconds"] for row in rows]
    if None in seconds:
        return _noted(plans[0], "not every candidate could be timed", rows)
    winner = seconds.index(min(seconds))
    words = "the best predicted" if winner == 0 else "the second best predicted"
    return _noted(plans[winner], f"{words} is the fastest of {len(plans)} that were timed", rows)


def workload_of(plan: MemoryPlan, objective: str) -> Workload:
    """Return what a candidate is timed with: the objective's batch and lengths."""
    spare = SETTLE_STEPS + TIMED_STEPS
    if objective == "throughput":
        prompt, output = queue_of(plan.max_model_len)
        full = (plan.predicted or {})["queue"]["batch"]
        return Workload(batch=full, prompt_tokens=prompt, output_tokens=output)
    most = LONGEST_PROMPT if objective == "context" else CONTEXT_TOKENS
    prompt = max(1, min(most, plan.max_model_len - spare - 2))
    output = min(spare + 2, plan.max_model_len - prompt)
    return Workload(batch=1, prompt_tokens=prompt, output_tokens=output)


def _row(
    plan: MemoryPlan, objective: str, vocab_size: int, open_engine: OpenEngine, clock: Clock
) -> dict[str, Any]:
    """Time a candidate; `seconds` is what the objective minimises, None where that failed."""
    workload = workload_of(plan, objective)
    prefill_s = step_s = seconds = None
    failure = {}
    try:
        prefill_s, step_s = _times(plan, workload, vocab_size, open_engine, clock)
    except CapacityError as error:
        failure = {"error": str(error)}
    if prefill_s is not None and step_s is not None:
        seconds = step_s
        if objective == "throughput":
            _, output = queue_of(plan.max_model_len)
            waves = max(1.0, QUEUE_REQUESTS / workload.batch)
            seconds = waves * (prefill_s + (output - 1) * step_s)
    return {
        "label": (plan.choice or {}).get("chosen"),
        "batch": workload.batch,
        "prompt_tokens": workload.prompt_tokens,
        "predicted_decode_step_ms": (plan.predicted or {})["decode_step_ms"],
        "prefill_ms": None if prefill_s is None else prefill_s * 1e3,
        "decode_step_ms": None if step_s is None else step_s * 1e3,
        "seconds": seconds,
        **failure,
    }


def _times(
    plan: MemoryPlan, workload: Workload, vocab_size: int, open_engine: OpenEngine, clock: Clock
) -> tuple[float, float | None]:
    """Return the time of the prefill, and the median of steps in which all sequences decode.

    The second is None where there were too few of these.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)  # they come when the winner is built
        engine = open_engine(plan)
    params = SamplingParams(temperature=0, max_tokens=workload.output_tokens, ignore_eos=True)
    started: set[str] = set()
    gaps: list[float] = []
    prefill_s, in_a_row = 0.0, 0
    with contextlib.closing(engine):
        begin_s = last_s = clock()
        for row in range(workload.batch):
            prompt = [
                (7919 * row + 31 * index) % vocab_size for index in range(workload.prompt_tokens)
            ]
            engine.add_request(prompt, params)
        while engine.has_unfinished() and len(gaps) < TIMED_STEPS:
            started |= {event.request_id for event in engine.step()}
            now_s, step = clock(), engine.last_step
            if not prefill_s and len(started) == workload.batch:
                prefill_s = now_s - begin_s
            counts = None if step is None else (step.num_prefill_tokens, step.num_decode_tokens)
            is_full = counts == (0, workload.batch)
            in_a_row = in_a_row + 1 if is_full else 0
            if in_a_row > SETTLE_STEPS or (is_full and workload.output_tokens <= SETTLE_STEPS + 1):
                gaps.append(now_s - last_s)
            last_s = now_s
    return prefill_s, median(gaps) if gaps else None


def _noted(plan: MemoryPlan, words: str, rows: list[dict[str, Any]]) -> MemoryPlan:
    choice = dict(plan.choice or {})
    choice["referee"] = {"result": words, "timed": rows}
    return replace(plan, choice=choice)
