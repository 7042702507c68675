"""vLLM behind the harness's door: its own engine, stepped in this process."""

import gc
import json
import os
import tempfile
import time
from collections.abc import Collection
from dataclasses import asdict, fields
from itertools import count
from pathlib import Path
from typing import Any, Final

from engine.asked.config import EngineConfig
from engine.asked.request import TokenEvent
from engine.asked.sampling import SamplingParams
from engine.clock import PhaseClock, StepStats
from engine.errors import CapacityError, ConfigError, EngineError, RequestError
from engine.model.spec import ModelSpec
from engine.sealed import GIB
from engine.text.tokenizer import load_tokenizer
from harness.systems.base import (
    PeerDevice,
    PeerPlan,
    config_json,
    model_spec,
    open_peer_device,
)
from harness.systems.door import BuildEngine, Progress

RUNNER_VARIABLE: Final = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's switch between its two model runners: 0 | 1, unset: as vLLM chooses for the model."""
_NO_KV_TEXTS: Final = ("no available memory for the cache blocks", "kv cache is needed")
"""What vLLM's error says where weights leave no room for its KV cache."""


def choose_runner(config: EngineConfig) -> str:
    """Set the model runner that honours an offload; return what runs, in words for the record.

    The second runner of vLLM 0.25 accepts offload options and offloads nothing. A runner that the
    user set stays.
    """
    asked = os.environ.get(RUNNER_VARIABLE)
    if asked is not None:
        return f"{RUNNER_VARIABLE}={asked}, as the environment sets it"
    if config.offload.backend == "none":
        return "as vLLM chooses"
    os.environ[RUNNER_VARIABLE] = "0"
    return f"{RUNNER_VARIABLE}=0, set for offload={config.offload.backend}"


def vllm_arguments(config: EngineConfig, folder: str, share: float) -> dict[str, Any]:
    """Return the arguments that say what a configuration asks.

    Settings that are left at what means "as vLLM does" are left out. `folder` has config.json, and
    weights unless they are random; the budget is `share` of the card's memory.
    """
    engine, kv = config.engine, config.kv
    found: dict[str, Any] = {
        "model": folder,
        "skip_tokenizer_init": True,
        "load_format": config.model.load_format,
        "dtype": engine.dtype,
        "seed": engine.seed,
        "gpu_memory_utilization": share,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enforce_eager": engine.enforce_eager,
        "block_size": kv.block_size,
        "enable_prefix_caching": kv.enable_prefix_caching,
    }
    if engine.max_model_len is not None:
        found["max_model_len"] = engine.max_model_len
    if kv.disable_sliding_window:
        found["disable_sliding_window"] = True
    if kv.cpu_gib:  # 0: no host tier
        found |= {"kv_offloading_size": kv.cpu_gib, "kv_offloading_backend": "native"}
    return found | _offload_arguments(config)


def _offload_arguments(config: EngineConfig) -> dict[str, Any]:
    backend = config.offload.backend
    if backend == "none":
        return {}
    asked = asdict(getattr(config.offload, backend))  # under vLLM's own names, but for one
    if not asked.get("experts_first", True):
        del asked["experts_first"]
    chosen = {name: set(v) if isinstance(v, list) else v for name, v in asked.items()}
    return {"offload_backend": backend, **chosen}


def check_arguments(arguments: Collection[str], known: Collection[str], version: str) -> None:
    """Raise ConfigError unless the installed vLLM has every argument."""
    lacking = sorted(set(arguments) - set(known))
    if lacking:
        raise ConfigError(
            f"system=vllm: expected {', '.join(lacking)} among the settings of vLLM {version}, "
            "found none. Install a newer vLLM, or remove what asks for them."
        )


class VLLMEngine:
    """vLLM's LLMEngine, its requests by token ids."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        device: PeerDevice,
        arguments: dict[str, Any],
        engine: Any,
        load: PhaseClock,
        runner: str,
    ) -> None:
        self.spec, self.load_report = spec, load.report()
        self._runner = runner
        self.tokenizer = load_tokenizer(config.model.path)
        self.last_step: StepStats | None = None
        self._config, self._device, self._engine = config, device, engine
        self._offloader, self._host_bytes = _offloaded(config, runner)
        is_read = config.offload.backend == "uva"
        settings: Any = engine.vllm_config
        self.max_model_len = int(settings.model_config.max_model_len)
        self._dtype = str(settings.model_config.dtype).removeprefix("torch.")
        self.plan = PeerPlan(
            max_model_len=self.max_model_len,
            copied_bytes=0 if is_read else self._host_bytes,
            read_bytes=self._host_bytes if is_read else 0,
            facts={
                "system": "vllm",
                "gpu_budget_bytes": device.budget_bytes,
                "weights": {"host_bytes": self._host_bytes},
                "arguments": {
                    name: sorted(value) if isinstance(value, set) else value
                    for name, value in arguments.items()
                },
            },
        )
        self._prompts: dict[str, int] = {}
        self._outputs: dict[str, int] = {}
        self._names, self._num_steps = count(), 0
        self._hit_tokens: int | None = None

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: Progress) -> "VLLMEngine":
        """Build vLLM's engine, or refuse a setting that the installed one lacks.

        Raises CapacityError where its weights leave no room for a KV cache.
        """
        runner = choose_runner(config)  # vLLM reads it while it builds
        from vllm import EngineArgs, LLMEngine, __version__  # noqa: PLC0415  takes seconds

        progress("load", 0, 0)
        device, spec = open_peer_device(config), model_spec(config.model)
        share = device.budget_bytes / device.card_bytes
        load = PhaseClock()
        with tempfile.TemporaryDirectory() as scratch, load.phase("read"):
            folder = config.model.path or _config_folder(Path(scratch), spec)
            arguments = vllm_arguments(config, folder, share)
            check_arguments(arguments, [item.name for item in fields(EngineArgs)], __version__)
            try:
                engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
            except (ValueError, RuntimeError) as error:
                if not any(text in _words(error) for text in _NO_KV_TEXTS):
                    raise
                raise CapacityError(_no_room(config, device, runner, error)) from error
        return cls(config, spec, device, arguments, engine, load, runner)

    def add_request(
        self, prompt: list[int], params: SamplingParams, request_id: str | None = None
    ) -> str:
        """Queue a request; RequestError where vLLM refuses it."""
        from vllm import SamplingParams as Theirs  # noqa: PLC0415  takes seconds
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        name = request_id or f"vllm-{next(self._names)}"
        try:
            asked = Theirs(
                temperature=params.temperature,
                max_tokens=params.max_tokens,
                ignore_eos=params.ignore_eos,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                prompt_logprobs=params.prompt_logprobs,
            )
            theirs: dict[str, Any] = {"prompt_token_ids": list(prompt)}
            if params.cache_salt is not None:
                theirs["cache_salt"] = params.cache_salt
            self._engine.add_request(name, theirs, asked)
        except ValueError as error:
            raise RequestError(f"vllm: {error}") from error
        self._prompts[name], self._outputs[name] = len(prompt), 0
        return name

    def step(self) -> list[TokenEvent]:
        """Run one step of vLLM; return the tokens that it gave.

        A step counts as prefill where a request got its first token, or none got any: vLLM does
        not say how a step was composed.
        """
        outputs = self._engine.step()
        now_s = time.perf_counter()
        self._num_steps += 1
        events: list[TokenEvent] = []
        num_prompt = num_decode = 0
        for output in outputs:
            name = output.request_id
            if name not in self._outputs or not output.outputs:
                continue
            if self._outputs[name] == 0:
                num_prompt += self._prompts[name]
                cached = getattr(output, "num_cached_tokens", None)
                if cached is not None:
                    self._hit_tokens = (self._hit_tokens or 0) + int(cached)
            else:
                num_decode += len(output.outputs[0].token_ids)
            events += self._events(output, now_s)
        self.last_step = StepStats(
            num_prefill_tokens=num_prompt or (0 if events else 1),
            num_decode_tokens=num_decode,
            h2d_bytes=self.plan.copied_bytes,
            in_place_bytes=self.plan.read_bytes,
        )
        return events

    def _events(self, output: Any, now_s: float) -> list[TokenEvent]:
        name, answer = output.request_id, output.outputs[0]
        tokens, events = list(answer.token_ids), []
        for index, token in enumerate(tokens):
            self._outputs[name] += 1
            is_last = output.finished and index == len(tokens) - 1
            events.append(
                TokenEvent(
                    request_id=name,
                    token_id=int(token),
                    position=self._prompts[name] + self._outputs[name] - 1,
                    finish_reason=answer.finish_reason if is_last else None,
                    time_s=now_s,
                    prompt_logprobs=_prompt_logprobs(output) if index == 0 else None,
                )
            )
        if output.finished:
            self._prompts.pop(name), self._outputs.pop(name)
        return events

    def has_unfinished(self) -> bool:
        """Return whether a step has work."""
        return bool(self._engine.has_unfinished_requests())

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        if self._outputs.pop(request_id, None) is not None:
            self._prompts.pop(request_id)
            self._engine.abort_request([request_id])

    def stats(self) -> dict[str, Any]:
        """Return totals since the load."""
        return {"steps": self._num_steps, "prefix_hit_tokens": self._hit_tokens}

    def memory(self) -> dict[str, Any]:
        """Return bytes in use."""
        return {
            "gpu_peak_bytes": self._device.peak_bytes(),
            "gpu_budget_bytes": self._device.budget_bytes,
            "host_pinned_bytes": self._host_bytes,
        }

    def effective(self) -> dict[str, Any]:
        """Return what is really used."""
        from vllm import __version__  # noqa: PLC0415  takes seconds

        cache: Any = self._engine.vllm_config.cache_config
        return {
            "system": "vllm",
            "system_version": f"vllm {__version__}",
            "device": self._device.name,
            "device_kind": self._device.kind,
            "emulated": self._device.kind == "cpu",
            "dtype": self._dtype,
            "backend": self._config.offload.backend,
            "offloader": self._offloader,
            "model_runner": self._runner,
            "host_pinned_bytes": self._host_bytes,
            "max_model_len": self.max_model_len,
            "num_gpu_blocks": getattr(cache, "num_gpu_blocks", None),
            "block_size": getattr(cache, "block_size", None),
            "load_format": self._config.model.load_format,
            "fallbacks": [],
            "warnings": [],
        }

    def close(self) -> None:
        """End vLLM's engine and free its memory."""
        core = getattr(self._engine, "engine_core", None)
        shutdown = getattr(core, "shutdown", None)
        if shutdown is not None:
            shutdown()
        self._engine = None
        gc.collect()


def _prompt_logprobs(output: Any) -> list[dict[int, float] | None] | None:
    """Return what TokenEvent has of a prompt; None where it was not asked for."""
    found = getattr(output, "prompt_logprobs", None)
    if not found:
        return None
    return [
        None if each is None else {int(token): float(x.logprob) for token, x in each.items()}
        for each in found
    ]


def load_code() -> BuildEngine:
    """Import vLLM, to run in this process: so its memory and its offload can be looked at."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        import vllm  # noqa: F401, PLC0415  takes seconds, and is measured
    except ImportError as error:
        raise EngineError(
            f"system=vllm: expected the package vllm, but its import failed ({error}). Install "
            "vLLM in this environment."
        ) from error
    return VLLMEngine.from_config


def _config_folder(folder: Path, spec: ModelSpec) -> str:
    text = json.dumps(config_json(spec))
    (folder / "config.json").write_text(text, encoding="utf-8")
    return str(folder)


def _words(error: BaseException) -> str:
    """Return the messages of an error and of what caused it, in lower case."""
    found = list[str]()
    now: BaseException | None = error
    while now is not None:
        found.append(str(now).lower())
        now = now.__cause__ or now.__context__
    return " ".join(found)


def _no_room(config: EngineConfig, device: PeerDevice, runner: str, error: Exception) -> str:
    """Say why vLLM found no memory for its KV cache, and what to set."""
    backend, budget = config.offload.backend, f"{device.budget_bytes / GIB:.2f} GiB"
    said = f'system=vllm: vLLM ended with "{str(error).strip()}" in a budget of {budget}.'
    if backend == "none":
        return (
            f"{said} offload=none keeps all weights on the GPU. Set offload=uva and "
            "offload.uva.cpu_offload_gb=SIZE, or raise gpu.memory_gib."
        )
    offloader, size = _offloader()
    if not size:
        return (
            f"{said} offload={backend} had no effect: vLLM's {offloader or 'model runner'} put no "
            f"weights in host memory (runner: {runner}). Set {RUNNER_VARIABLE}=0, or install a "
            "vLLM whose runner honours offload."
        )
    more = (
        "a larger offload.uva.cpu_offload_gb"
        if backend == "uva"
        else "a larger offload.prefetch.offload_num_in_group"
    )
    return (
        f"{said} {offloader} put {size / GIB:.2f} GiB of weights in host memory; the others "
        f"leave no memory for the KV cache. Set {more}, lower engine.max_model_len or "
        "engine.max_num_batched_tokens, or raise gpu.memory_gib."
    )


def _offloader() -> tuple[str | None, int]:
    """Return the name of vLLM's offloader and its bytes in host memory; None: it does not say."""
    try:
        from vllm.model_executor.offloader import get_offloader  # noqa: PLC0415  in newer versions
    except ImportError:
        return None, 0
    offloader = get_offloader()
    names = ("cpu_offload_bytes", "total_offloaded_bytes")
    found = next((value for key in names if (value := getattr(offloader, key, None))), 0)
    return type(offloader).__name__, int(found)


def _offloaded(config: EngineConfig, runner: str) -> tuple[str | None, int]:
    """Return vLLM's offloader and the bytes of weights on the host; EngineError without any."""
    if config.offload.backend == "none":
        return None, 0
    asked = f"system=vllm: offload.backend={config.offload.backend} was asked for"
    name, size = _offloader()
    if name is None:
        raise EngineError(
            f"{asked}, but this vLLM does not tell what it offloaded. Install a newer vLLM."
        )
    if not size:
        raise EngineError(
            f"{asked}, but vLLM's {name} put no weights in host memory (runner: {runner}). Set "
            f"{RUNNER_VARIABLE}=0, or check that the selectors match parameters of this model."
        )
    return name, size
