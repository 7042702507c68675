"""transformers with accelerate's offload, behind the harness's door."""

import inspect
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import count
from typing import Any, Final

from engine.asked.config import EngineConfig
from engine.asked.request import FinishReason, Request, TokenEvent, check_request
from engine.asked.sampling import SamplingParams
from engine.clock import PhaseClock, StepStats
from engine.errors import CapacityError, EngineError, RequestError
from engine.model.formats import DUMMY_STD, FORMATS
from engine.model.spec import DTYPE_BYTES, ModelSpec
from engine.plan.advise import greatest
from engine.plan.cards import resolve_dtype, resolve_max_model_len
from engine.sealed import GIB
from engine.text.tokenizer import load_tokenizer
from harness.config.engine import require_package
from harness.systems.base import (
    PeerDevice,
    PeerPlan,
    config_json,
    model_spec,
    open_peer_device,
)
from harness.systems.door import BuildEngine, Progress

HOST: Final = "cpu"
WARM_UP_TOKENS: Final = 32
"""Tokens of the prompt of the request that a load runs."""
WARM_UP_STEPS: Final = 3
PACKAGES: Final = ("transformers", "accelerate", "torch")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes that decide what fits."""

    spec: ModelSpec
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    """Tokens of KV that must have room beside the weights."""
    room_bytes: int
    """Bytes of the GPU budget for weights, KV and activations."""

    @property
    def outer_bytes(self) -> int:
        """Weights outside of the decoder layers."""
        return sum(map(FORMATS[self.dtype].num_bytes, self.spec.outer_tensors()))

    @property
    def layer_bytes(self) -> int:
        """Weights of one decoder layer."""
        return sum(map(FORMATS[self.dtype].num_bytes, self.spec.layer_tensors(0)))

    @property
    def copy_bytes(self) -> int:
        """Room for the weight that is copied when it is needed: of the largest projection."""
        parts = (part for tensor in self.spec.layer_tensors(0) for part in tensor.parts)
        return 2 * max(map(FORMATS[self.dtype].num_bytes, parts))

    def resident_bytes(self, num_host: int) -> int:
        """Return the bytes of weights that the GPU holds with so many layers in host memory."""
        layers = (self.spec.num_hidden_layers - num_host) * self.layer_bytes
        return self.outer_bytes + layers + (self.copy_bytes if num_host else 0)

    def sequence_bytes(self, num_tokens: int) -> int:
        """KV of so many tokens, and what their prefill holds for a while."""
        spec = self.spec
        kv = spec.kv_bytes_per_token(self.dtype)
        # torch.cat makes a layer's keys and values anew for each token.
        kv += kv // spec.num_hidden_layers
        work = (4 * spec.intermediate_size + 6 * spec.hidden_size) * DTYPE_BYTES[self.dtype]
        return num_tokens * (kv + work) + 6 * spec.vocab_size


def host_layers(sizes: Sizes, config: EngineConfig) -> int:
    """Return how many of the last decoder layers go to host memory; CapacityError for the rest.

    With offload=auto the GPU is filled from the first layer on, else cpu_offload_gb is reached.
    """
    layers = sizes.spec.num_hidden_layers
    needed = sizes.sequence_bytes(sizes.kv_tokens)
    if config.planner.choose:
        left = sizes.room_bytes - needed - sizes.outer_bytes
        if left >= layers * sizes.layer_bytes:
            return 0
        on_gpu = max(0, (left - sizes.copy_bytes) // sizes.layer_bytes)
        num = layers - on_gpu
    else:
        asked = config.offload.uva.cpu_offload_gb * GIB
        num = min(layers, -(-int(asked) // sizes.layer_bytes))
    resident = sizes.resident_bytes(num)
    if resident + needed > sizes.room_bytes:
        raise CapacityError(
            f"accelerate: expected room for {resident / GIB:.3f} GiB of weights and "
            f"{needed / GIB:.3f} GiB for {sizes.kv_tokens} tokens, got "
            f"{sizes.room_bytes / GIB:.3f} GiB of the GPU budget. {_remedy(sizes, config)}"
        )
    return num


def _remedy(sizes: Sizes, config: EngineConfig) -> str:
    """Return what makes it fit: more layers in host memory where that is enough, or less KV."""
    room = sizes.room_bytes - sizes.outer_bytes - sizes.copy_bytes  # with no layer on the GPU
    if sizes.sequence_bytes(sizes.kv_tokens) <= room:
        return "Choose offload=auto, or a larger cpu_offload_gb with offload=uva."
    tokens = greatest(1, sizes.kv_tokens, lambda count: sizes.sequence_bytes(count) <= room) or 0
    name = "engine.max_model_len" if config.planner.kv_tokens is None else "planner.kv_tokens"
    if tokens >= (config.request_tokens or 2):
        return f"{'Set' if config.planner.choose else 'Choose offload=auto with'} {name}={tokens}."
    return "All layers in host memory are not enough for the requests either: use a larger card."


def device_map(num_layers: int, num_host: int, device: str | int) -> dict[str, str | int]:
    """Return accelerate's device map with the last `num_host` decoder layers in host memory.

    The other layers, and all that is no layer, go to `device`.
    """
    if not num_host:
        return {"": device}
    found: dict[str, str | int] = {"model.embed_tokens": device}
    for index in range(num_layers):
        found[f"model.layers.{index}"] = HOST if index >= num_layers - num_host else device
    others = ("model.norm", "model.rotary_emb", "lm_head")
    return found | dict.fromkeys(others, device)


def described(placed: Iterable[str], host_modules: Collection[str]) -> dict[str, list[str]]:
    """Return a device map as devices with their modules; layers in a row are `first-last`."""
    found: dict[str, list[str]] = {}
    for name in placed:
        modules = found.setdefault("cpu" if name in host_modules else "gpu", [])
        stem, _, last = name.rpartition(".")
        before, _, number = (modules or [""])[-1].rpartition(".")
        first, _, end = number.partition("-")
        if last.isdecimal() and before == stem and int(end or first) + 1 == int(last):
            modules[-1] = f"{stem}.{first}-{last}"
        else:
            modules.append(name or "all")
    return found


def largest_batch(sizes: Sizes, num_host: int, lengths: Mapping[str, int]) -> int:
    """Return how many of the sequences of these lengths fit beside the weights, in order."""
    left = sizes.room_bytes - sizes.resident_bytes(num_host)
    longest = num = 0
    for length in list(lengths.values())[: sizes.max_num_seqs]:
        longest = max(longest, length)
        if (num + 1) * sizes.sequence_bytes(longest) > left:
            break
        num += 1
    return num


_TILE: Final = 2**20
"""Random values that dummy weights repeat: their times do not depend on them."""


@dataclass(frozen=True, kw_only=True)
class PlacedModel:
    """The model, and where its weights are as found in its modules."""

    model: Any
    host_bytes: int
    """Weights that a forward pass copies to the device."""
    device_bytes: int
    host_modules: tuple[str, ...]
    attention: str
    device_map: Mapping[str, list[str]]
    """Modules by device: gpu | cpu."""


def load_model(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: str,
    device: PeerDevice,
    num_host: int,
    load: PhaseClock,
) -> PlacedModel:
    """Build the model with `num_host` layers in host memory, and check that they are there."""
    target = 0 if device.kind == "cuda" else "cpu"
    placed = device_map(spec.num_hidden_layers, num_host, target)
    first = spec.num_hidden_layers - num_host
    host_modules = tuple(f"model.layers.{index}" for index in range(first, spec.num_hidden_layers))
    if config.model.load_format == "dummy":
        with load.phase("convert"):
            model = _random_model(config, spec, dtype, host_modules, device)
        _dispatch(model, placed, host_modules, device)
    else:
        with load.phase("read"):
            model = _stored_model(config, dtype, placed, device)
        if device.kind != "cuda":
            _dispatch(model, placed, host_modules, device)
    model.eval()
    return _check(model, spec, dtype, host_modules, described(placed, host_modules))


def _stored_model(
    config: EngineConfig, dtype: str, placed: dict[str, str | int], device: PeerDevice
) -> Any:
    import torch  # noqa: PLC0415  takes seconds
    from transformers import AutoModelForCausalLM

    where: dict[str, Any] = {"device_map": placed} if device.kind == "cuda" else {}
    return AutoModelForCausalLM.from_pretrained(
        str(config.model.path), dtype=getattr(torch, dtype), local_files_only=True, **where
    )


def _random_model(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: str,
    host_modules: tuple[str, ...],
    device: PeerDevice,
) -> Any:
    """Return the model with random weights, each made where it stays."""
    import torch  # noqa: PLC0415  takes seconds
    from accelerate import init_empty_weights  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = getattr(torch, dtype)
    sizes = config_json(spec)
    asked = AutoConfig.for_model(**{**sizes, "dtype": dtype})
    with init_empty_weights():
        classes: Any = AutoModelForCausalLM
        model = classes.from_config(asked, dtype=kind)
    model.tie_weights()
    draw = torch.Generator().manual_seed(config.engine.seed)
    tile = (torch.randn(_TILE, generator=draw) * DUMMY_STD).to(kind)
    made: dict[int, Any] = {}
    for name, module in model.named_modules():
        is_host = any(name == top or name.startswith(f"{top}.") for top in host_modules)
        where = "cpu" if is_host else device.torch_name
        for key, param in module.named_parameters(recurse=False):
            if id(param) not in made:
                made[id(param)] = _filled(param.shape, tile, where, is_norm="norm" in name)
            setattr(module, key, made[id(param)])
    model.tie_weights()
    return model


def _filled(shape: Any, tile: Any, where: str, *, is_norm: bool) -> Any:
    import torch  # noqa: PLC0415  takes seconds

    tensor = torch.empty(shape, dtype=tile.dtype, device=where)
    flat, source = tensor.view(-1), tile.to(where)
    for start in range(0, flat.numel(), source.numel()):
        part = flat[start : start + source.numel()]
        part.copy_(source[: part.numel()])
    if is_norm:
        tensor.fill_(1.0)
    return torch.nn.Parameter(tensor, requires_grad=False)


def _dispatch(
    model: Any, placed: dict[str, str | int], host_modules: tuple[str, ...], device: PeerDevice
) -> None:
    """Let accelerate copy the modules in host memory when they run."""
    from accelerate import dispatch_model  # noqa: PLC0415  an extra
    from accelerate.hooks import attach_align_device_hook  # noqa: PLC0415
    from accelerate.utils import OffloadedWeightsLoader  # noqa: PLC0415

    if device.kind == "cuda":
        skip = model._skip_keys_device_placement  # noqa: SLF001  transformers' own way to say it
        dispatch_model(model, placed, skip_keys=skip)
        return
    # Where the device is the CPU, dispatch_model keeps nothing apart: the hooks are attached here.
    for name in host_modules:
        module = model.get_submodule(name)
        weights = OffloadedWeightsLoader(state_dict=dict(module.state_dict()))
        attach_align_device_hook(module, execution_device="cpu", offload=True, weights_map=weights)


def _check(
    model: Any,
    spec: ModelSpec,
    dtype: str,
    host_modules: tuple[str, ...],
    device_map: Mapping[str, list[str]],
) -> PlacedModel:
    """Count the weights by where they are; weights that a pass copies lie on no device."""
    params = list(model.parameters())  # each once, tied or not
    host = sum(param.nbytes for param in params if param.device.type == "meta")
    resident = sum(param.nbytes for param in params) - host
    layer = sum(map(FORMATS[dtype].num_bytes, spec.layer_tensors(0)))
    expected = len(host_modules) * layer
    if host != expected:
        raise EngineError(
            f"accelerate: expected {expected} bytes of {len(host_modules)} layers in host memory, "
            f"found {host}. This version of transformers or accelerate places them otherwise."
        )
    attention = str(getattr(model.config, "_attn_implementation", None))
    return PlacedModel(
        model=model,
        host_bytes=host,
        device_bytes=resident,
        host_modules=host_modules,
        attention=attention,
        device_map=device_map,
    )


def host_tensors(model: Any) -> Iterator[Any]:
    """Yield the tensors that accelerate's hooks copy in a forward pass."""
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if getattr(each, "offload", False):
                for name, _ in module.named_parameters(recurse=False):
                    yield each.weights_map[name]


def timed_copies(model: Any, device: PeerDevice) -> dict[str, Any]:
    """Copy what a forward pass copies, tensor by tensor as hooks do; return how long it took.

    What a token takes beyond that is of the hooks, of the allocator, which accelerate empties at
    each copy, and of the launches. Without a GPU nothing is copied.
    """
    tensors = list(host_tensors(model))
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    found = {
        "num_tensors": len(tensors),
        "num_bytes": num_bytes,
        "is_pinned": any(tensor.is_pinned() for tensor in tensors),
        "seconds": None,
        "gb_s": None,
    }
    if device.kind != "cuda" or not tensors:
        return found
    begin_s = time.perf_counter()
    for tensor in tensors:
        tensor.to(device.torch_name)  # returns when it is there
    seconds = time.perf_counter() - begin_s
    return found | {"seconds": seconds, "gb_s": num_bytes / seconds / 1e9}


def warm_up(model: Any, spec: ModelSpec, max_model_len: int, device: PeerDevice) -> None:
    """Run one request: what a process does for the first time belongs to the load."""
    length = max(1, min(WARM_UP_TOKENS, max_model_len - WARM_UP_STEPS))
    prompt = [index % spec.vocab_size for index in range(length)]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=WARM_UP_STEPS)
    request = Request(request_id="warm-up", prompt_token_ids=prompt, params=params)
    batch = StaticBatch(model, [BatchRow(request=request)], device.torch_name)
    while not batch.is_done:
        batch.step()


@dataclass(kw_only=True)
class BatchRow:
    """One request in a batch."""

    request: Request
    output: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """Log-probabilities as in TokenEvent; None: not asked for, or not known yet."""
    is_dropped: bool = False

    @property
    def limit(self) -> int:
        """Tokens of output at most."""
        return self.request.params.max_tokens or 1

    @property
    def is_done(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.is_dropped or len(self.output) >= self.limit

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it goes on."""
        return "length" if len(self.output) >= self.limit else None


class StaticBatch:
    """Prompts padded on the left to one length, prefilled at once, then decoded until all end.

    A row that ended is computed with the others until the last one ends, as `generate` does. Their
    tokens are appended to the rows.
    """

    def __init__(self, model: Any, rows: Sequence[BatchRow], device: str) -> None:
        self._model, self.rows, self._device = model, list(rows), device
        self._cache, self._cache_key = _new_cache(model)
        self._mask: Any = None
        self._last: Any = None

    @property
    def is_done(self) -> bool:
        """Whether every row ended."""
        return all(row.is_done for row in self.rows)

    @property
    def num_open(self) -> int:
        """Rows that go on."""
        return sum(not row.is_done for row in self.rows)

    def step(self) -> list[BatchRow]:
        """Compute one token of each row; return the rows that got one."""
        import torch  # noqa: PLC0415  takes seconds

        open_rows = [not row.is_done for row in self.rows]
        with torch.inference_mode():
            scored = [row for row in self.rows if row.request.params.prompt_logprobs is not None]
            is_scored = bool(scored) and self._last is None
            inputs = self._prompts() if self._last is None else self._next()
            out = self._model(
                **inputs,
                **{self._cache_key: self._cache},
                attention_mask=self._mask,
                use_cache=True,
                logits_to_keep=0 if is_scored else 1,  # 0: those of every token
            )
            if is_scored:
                for row, logits in zip(self.rows, out.logits, strict=True):
                    row.prompt_logprobs = _prompt_logprobs(row.request, logits)
            self._last = out.logits[:, -1].argmax(dim=-1)
            tokens = self._last.tolist()
        found = []
        for row, token, is_open in zip(self.rows, tokens, open_rows, strict=True):
            if is_open:
                row.output.append(token)
                found.append(row)
        return found

    def _prompts(self) -> dict[str, Any]:
        """Return the padded prompts and their positions; set the mask."""
        import torch  # noqa: PLC0415  takes seconds

        prompts = [row.request.prompt_token_ids for row in self.rows]
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._mask = torch.tensor(seen, device=self._device)
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        return {"input_ids": torch.tensor(ids, device=self._device), "position_ids": positions}

    def _next(self) -> dict[str, Any]:
        """Return the newest tokens and their positions; lengthen the mask."""
        import torch  # noqa: PLC0415  takes seconds

        one = self._mask.new_ones((len(self.rows), 1))
        self._mask = torch.cat([self._mask, one], dim=1)
        positions = self._mask.sum(-1, keepdim=True) - 1
        return {"input_ids": self._last[:, None], "position_ids": positions}


def _prompt_logprobs(request: Request, logits: Any) -> list[dict[int, float] | None] | None:
    """Return what TokenEvent has of a prompt, from the logits of its row."""
    width, prompt = request.params.prompt_logprobs, request.prompt_token_ids
    if width is None:
        return None
    found: list[dict[int, float] | None] = [None]
    own = logits[-len(prompt) :]
    for token, row in zip(prompt[1:], own, strict=False):
        logprobs = row.float().log_softmax(-1)
        top = logprobs.topk(width)
        named = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        found.append({token: float(logprobs[token])} | named)
    return found


def _new_cache(model: Any) -> tuple[Any, str]:
    """Return an empty KV cache and the name under which the model takes it."""
    from transformers import DynamicCache

    taken = inspect.signature(type(model).forward).parameters
    # Newer versions of transformers renamed it.
    return DynamicCache(config=model.config), "cache" if "cache" in taken else "past_key_values"


class AccelerateEngine:
    """Runs waiting requests in static batches, as many at once as fit the budget."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        device: PeerDevice,
        sizes: Sizes,
        placed: PlacedModel,
        copies: Mapping[str, Any],
        load: PhaseClock,
    ) -> None:
        self._copies = dict(copies)
        self.spec, self.load_report = spec, load.report()
        self.max_model_len = sizes.max_model_len
        self.last_step: StepStats | None = None
        self._config, self._device, self._sizes = config, device, sizes
        self._placed: PlacedModel | None = placed
        self.tokenizer = load_tokenizer(config.model.path)
        self.plan = PeerPlan(
            max_model_len=sizes.max_model_len,
            copied_bytes=placed.host_bytes if device.kind == "cuda" else 0,
            facts={
                "system": "accelerate",
                "dtype": sizes.dtype,
                "gpu_budget_bytes": device.budget_bytes,
                "weights": {"gpu_bytes": placed.device_bytes, "host_bytes": placed.host_bytes},
                "device_map": dict(placed.device_map),
            },
        )
        self._waiting: deque[BatchRow] = deque()
        self._batch: StaticBatch | None = None
        self._names, self._num_steps, self._largest = count(), 0, 0

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: Progress) -> "AccelerateEngine":
        """Load the model, or refuse what does not fit the GPU budget."""
        progress("load", 0, 0)
        load = PhaseClock()
        with load.phase("device"):
            device = open_peer_device(config)
        spec = model_spec(config.model)
        sizes = _sizes(config, spec, device)
        num_host = host_layers(sizes, config)
        device.enforce()
        placed = load_model(config, spec, sizes.dtype, device, num_host, load)
        with load.phase("warm_up"):
            copies = timed_copies(placed.model, device)
            warm_up(placed.model, spec, sizes.max_model_len, device)
        return cls(config, spec, device, sizes, placed, copies, load)

    def add_request(
        self, prompt: list[int], params: SamplingParams, request_id: str | None = None
    ) -> str:
        """Queue a request for greedy tokens of a set number; RequestError for others."""
        if not params.is_greedy or not params.ignore_eos or params.n != 1 or params.stop_strings:
            raise RequestError(
                "params: expected temperature=0, ignore_eos=true, n=1 and no stop strings with "
                f"system=accelerate, got {params}."
            )
        name = request_id or f"accelerate-{next(self._names)}"
        request = Request(request_id=name, prompt_token_ids=list(prompt), params=params)
        check_request(request, self.max_model_len, self.spec.vocab_size)
        self._waiting.append(BatchRow(request=request))
        return name

    def step(self) -> list[TokenEvent]:
        """Return one token of each request of the batch in work."""
        if self._batch is None or self._batch.is_done:
            self._batch = self._next_batch()
        batch = self._batch
        if batch is None:
            return []
        is_prefill = not any(row.output for row in batch.rows)
        open_rows = batch.num_open
        rows = batch.step()
        now_s = time.perf_counter()
        prompt = sum(len(row.request.prompt_token_ids) for row in batch.rows)
        self._num_steps += 1
        self.last_step = StepStats(
            num_prefill_tokens=prompt if is_prefill else 0,
            num_decode_tokens=0 if is_prefill else open_rows,
            h2d_bytes=self.plan.copied_bytes,
        )
        if batch.is_done:
            self._batch = None
        return [_event(row, now_s) for row in rows]

    def _next_batch(self) -> StaticBatch | None:
        while self._waiting and self._waiting[0].is_dropped:
            self._waiting.popleft()
        if not self._waiting or self._placed is None:
            return None
        lengths = {
            row.request.request_id: min(
                len(row.request.prompt_token_ids) + row.limit, self.max_model_len
            )
            for row in self._waiting
            if not row.is_dropped
        }
        num = max(1, largest_batch(self._sizes, len(self._placed.host_modules), lengths))
        rows = [self._waiting.popleft() for _ in range(min(num, len(self._waiting)))]
        rows = [row for row in rows if not row.is_dropped]
        self._largest = max(self._largest, len(rows))
        return StaticBatch(self._placed.model, rows, self._device.torch_name)

    def has_unfinished(self) -> bool:
        """Return whether a step has work."""
        is_running = self._batch is not None and not self._batch.is_done
        return is_running or any(not row.is_dropped for row in self._waiting)

    def abort(self, request_id: str) -> None:
        """Drop a request; its row is computed until its batch ends, and its tokens ignored."""
        running = self._batch.rows if self._batch is not None else []
        for row in (*self._waiting, *running):
            if row.request.request_id == request_id:
                row.is_dropped = True

    def stats(self) -> dict[str, Any]:
        """Return totals since the load."""
        return {"steps": self._num_steps, "largest_batch": self._largest, "prefix_hit_tokens": 0}

    def memory(self) -> dict[str, Any]:
        """Return bytes in use; on a CPU nothing stands apart, so the peak is not known."""
        host = self._placed.host_bytes if self._placed is not None else 0
        return {
            "gpu_peak_bytes": self._device.peak_bytes(),
            "gpu_budget_bytes": self._device.budget_bytes,
            "host_pinned_bytes": 0,
            "host_pageable_bytes": host,
        }

    def effective(self) -> dict[str, Any]:
        """Return what is really used."""
        placed = self._placed
        if placed is None:
            raise EngineError("accelerate: the engine was closed.")
        return {
            "system": "accelerate",
            "system_version": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
            "device": self._device.name,
            "device_kind": self._device.kind,
            "emulated": self._device.kind == "cpu",
            "dtype": self._sizes.dtype,
            "backend": "accelerate",
            "placement_bytes": {"resident": placed.device_bytes, "copied": placed.host_bytes},
            "host_pageable_bytes": placed.host_bytes,
            "device_map": dict(placed.device_map),
            "host_copies": self._copies,
            "offloaded_layers": [int(name.rsplit(".", 1)[-1]) for name in placed.host_modules],
            "attention": placed.attention,
            "batching": "static, padded on the left, ended rows computed until the last one ends",
            "max_model_len": self.max_model_len,
            "load_format": self._config.model.load_format,
            "fallbacks": [],
            "warnings": [],
        }

    def close(self) -> None:
        """Free the model."""
        self._placed = self._batch = None
        self._waiting.clear()


def load_code() -> BuildEngine:
    """Import what the engine needs, or refuse where accelerate is not installed."""
    require_package("accelerate")
    import accelerate  # noqa: F401, PLC0415  takes seconds, as the next two, and is measured
    import torch  # noqa: F401, PLC0415
    import transformers  # noqa: F401

    return AccelerateEngine.from_config


def _sizes(config: EngineConfig, spec: ModelSpec, device: PeerDevice) -> Sizes:
    longest = resolve_max_model_len(config, spec)
    return Sizes(
        spec=spec,
        dtype=resolve_dtype(config, spec, device.kind),
        max_model_len=longest,
        max_num_seqs=config.engine.max_num_seqs,
        kv_tokens=config.planner.kv_tokens or longest,
        room_bytes=device.tensor_bytes,
    )


def _event(row: BatchRow, now_s: float) -> TokenEvent:
    request, num = row.request, len(row.output)
    return TokenEvent(
        request_id=request.request_id,
        token_id=row.output[-1],
        position=len(request.prompt_token_ids) + num - 1,
        finish_reason=row.finish_reason,
        time_s=now_s,
        prompt_logprobs=row.prompt_logprobs if num == 1 else None,
    )
