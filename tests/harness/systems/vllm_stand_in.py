"""A module with the published signatures of vLLM that the adapter uses; its tokens are scripted.

Fields of EngineArgs: vllm/engine/arg_utils.py; LLMEngine: vllm/v1/engine/llm_engine.py;
offloaders: vllm/model_executor/offloader/.
"""

import dataclasses
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from tests.harness.prefixes import PrefixCache
from tests.harness.systems.server import next_token


@dataclasses.dataclass
class EngineArgs:
    model: str = "m"
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.92
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    disable_sliding_window: bool = False
    kv_offloading_size: float | None = None
    kv_offloading_backend: str = "native"
    offload_backend: str = "auto"
    cpu_offload_gb: float = 0
    cpu_offload_params: set[str] = dataclasses.field(default_factory=set)
    offload_group_size: int = 0
    offload_num_in_group: int = 1
    offload_prefetch_step: int = 1
    offload_params: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    detokenize: bool = True
    output_kind: str = "cumulative"
    prompt_logprobs: int | None = None


class NoopOffloader:
    """What vLLM has where nothing is offloaded."""


class UVAOffloader:
    cpu_offload_bytes = 3_000_000


class PrefetchOffloader:
    total_offloaded_bytes = 5_000_000


class LLMEngine:
    """Prefills one request a step, then decodes all that run."""

    opened: ClassVar[list["LLMEngine"]] = []
    fails_with: ClassVar[Exception | None] = None
    runner: ClassVar[str | None] = None
    """What the environment says of the runner when an engine is built."""

    def __init__(self, args: EngineArgs) -> None:
        self.args, self.requests, self.is_shut = args, {}, False
        self.cache, self.found = PrefixCache(), {}
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=args.max_model_len or 512, dtype="torch.bfloat16"
            ),
            cache_config=SimpleNamespace(num_gpu_blocks=7, block_size=args.block_size),
        )
        self.engine_core = SimpleNamespace(shutdown=self.shut)

    def shut(self) -> None:
        self.is_shut = True

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLMEngine":
        cls.runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
        if cls.fails_with is not None:
            raise cls.fails_with
        engine = cls(engine_args)
        cls.opened.append(engine)
        return engine

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        if len(prompt["prompt_token_ids"]) >= self.vllm_config.model_config.max_model_len:
            raise ValueError("The decoder prompt is longer than the maximum model length")
        self.requests[request_id] = [prompt["prompt_token_ids"], params, 0]
        ids = prompt["prompt_token_ids"]
        self.found[request_id] = self.cache.find(prompt.get("cache_salt"), ids)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self.requests.pop(name, None)

    def step(self) -> list[Any]:
        fresh = [name for name, (_, _, num) in self.requests.items() if num == 0]
        names = fresh[:1] or list(self.requests)
        outputs = []
        for name in names:
            prompt, params, num = self.requests[name]
            self.requests[name][2] = num + 1
            is_last = num + 1 == params.max_tokens
            answer = SimpleNamespace(
                token_ids=[next_token(prompt, num)], finish_reason="length" if is_last else None
            )
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    outputs=[answer],
                    finished=is_last,
                    num_cached_tokens=self.found[name],
                    prompt_logprobs=_prompt_logprobs(prompt, params) if num == 0 else None,
                )
            )
            if is_last:
                del self.requests[name]
        return outputs


def _prompt_logprobs(prompt, params):
    """Each token with a probability of 1/2, every other one below another token's."""
    if params.prompt_logprobs is None:
        return None
    rows = [None]
    for index, token in enumerate(prompt[1:]):
        other = {token + 1: SimpleNamespace(logprob=-0.1)} if index % 2 else {}
        rows.append({token: SimpleNamespace(logprob=-0.6931471805599453), **other})
    return rows


def install(monkeypatch, offloader=None, args=EngineArgs, fails_with=None, runner=None):
    """Put the stand-in where `import vllm` finds it.

    Building its engine raises `fails_with` if given; `runner` is what the environment says.
    """
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "")  # restored after the test
    if runner is None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    else:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    monkeypatch.setattr(LLMEngine, "fails_with", fails_with)
    vllm, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    executor, where = ModuleType("vllm.model_executor"), ModuleType("vllm.model_executor.offloader")
    vllm.EngineArgs, vllm.LLMEngine, vllm.SamplingParams = args, LLMEngine, SamplingParams
    vllm.__version__ = "0.33.0"
    sampling.RequestOutputKind = SimpleNamespace(DELTA="delta")
    modules = {"vllm": vllm, "vllm.sampling_params": sampling, "vllm.model_executor": executor}
    if offloader is not None:
        where.get_offloader = lambda: offloader
        modules["vllm.model_executor.offloader"] = where
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(LLMEngine, "opened", [])
