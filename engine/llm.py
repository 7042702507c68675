"""LLM: the synchronous door to the engine."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, replace
from typing import Any, Self, Unpack, cast

from engine.asked.config import EngineConfig, ModelConfig
from engine.asked.keyword_types import Keywords
from engine.asked.keywords import (
    config_from_keywords,
    describe_keywords,
    in_keywords,
    takes_keywords,
)
from engine.asked.request import RequestOutput, TokenEvent
from engine.asked.sampling import SamplingParams, StructuredOutput
from engine.build import (
    NUM_CANDIDATES,
    Engine,
    Progress,
    build_engine,
    judge,
    known_unpackable,
    read_model,
)
from engine.clock import LoadReport, StepStats
from engine.device.cuda import open_device
from engine.errors import ConfigError, EngineError
from engine.kv.pool import Tier
from engine.model.routing import RoutingTrace, expert_sizes
from engine.model.spec import ModelSpec
from engine.plan.cards import DeviceFacts
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_candidates, plan_memory
from engine.snapshot import Snapshot, take_snapshot
from engine.text.messages import Messages, is_conversation
from engine.text.sessions import Prompt, Sessions, interrupt_afterwards
from engine.text.tokenizer import chat_tokens

_LOG = logging.getLogger("tightfit")


def describe(engine: Engine) -> dict[str, Any]:
    """Return plain data: device, dtype, placements, attention, graphs, fallbacks, notes."""
    plan, device = engine.plan, engine.device
    pinned, pageable = engine.host_bytes()
    is_cuda, captured = device.kind == "cuda", engine.executor.captured
    return {
        "device": device.name,
        "device_kind": device.kind,
        "emulated": plan.facts.emulated,
        "reference": engine.reference,
        "dtype": plan.dtype,
        "backend": "auto" if engine.config.planner.choose else engine.config.offload.backend,
        "placement_bytes": plan.placed_bytes(),
        "offloaded_layers": [layer.index for layer in plan.offloaded_layers],
        "num_slots": plan.num_slots,
        "slot_bytes": plan.slot_bytes,
        "stage_tokens": plan.stage_tokens,
        "host_pinned_bytes": pinned,
        "host_pageable_bytes": pageable,
        "pinned": pinned > 0,
        "attention": "triton paged" if is_cuda else "torch paged",
        "graphs": sorted(x.decodes for x in captured if not x.tokens and not x.reads_host),
        "prefill_graphs": sorted([x.decodes, x.tokens] for x in captured if x.tokens),
        "load_format": engine.config.model.load_format,
        **({"quantize": plan.quantize} if plan.quantize else {}),
        "routing": engine.routing.facts,
        "max_model_len": plan.max_model_len,
        "num_gpu_blocks": plan.num_gpu_blocks,
        "num_window_blocks": sum(plan.kv.pools[1:]),
        "window": plan.window,
        "kv": _kv(engine),
        "block_size": plan.block_size,
        "fallbacks": [note for note in plan.notes if note.startswith("fallback")],
        "warnings": [
            *engine.config.offload.ignored(),
            *(note for note in plan.notes if not note.startswith("fallback")),
        ],
    }


def _kv(engine: Engine) -> dict[str, Any]:
    """Where KV blocks are, in blocks of all groups of layers."""
    plan, host = engine.plan, engine.plan.host_kv
    pinned = sum(blocks.num_pinned for blocks in engine.tier.blocks)
    pageable = sum(blocks.num_pageable for blocks in engine.tier.blocks)
    return {
        "tiers": ["gpu"] if host is None else ["gpu", "cpu"],
        "num_gpu_blocks": sum(plan.kv.pools),
        "num_pinned_blocks": pinned,
        "num_pageable_blocks": pageable,
        "in_place": engine.executor.is_tiered,
        "stage_blocks": 0 if host is None or not engine.executor.is_tiered else host.stage_blocks,
        "prefix_caching": plan.prefix_caching,
    }


def loaded_line(engine: Engine) -> str:
    """Return a line on where weights and KV lie, and what fell back."""
    fallbacks = [note for note in engine.plan.notes if note.startswith("fallback")]
    return (
        f"{engine.config.model.name} on {engine.device.name}: {engine.plan.where()}; "
        f"{'; '.join(fallbacks) or 'no fallback'}"
    )


class LLM:
    """Loads a model within a GPU budget and answers prompts.

    Use `LLM(model=..., ...)`, or `LLM.from_config`; `with` closes it. One thread at a time may use
    it; a second one is refused. AsyncLLM serves many clients.
    """

    @takes_keywords
    def __init__(self, model: str | ModelConfig, **keywords: Unpack[Keywords]) -> None:
        """Build an engine from keywords.

        Args:
            model: Folder with config.json, and safetensors unless load_format="dummy"; or a
                ModelConfig. Names and ids of a hub are for tightfit.LLM.
            **keywords: Settings by the names of their fields in engine.asked.

        Raises:
            ConfigError: A keyword is unknown, out of bounds or would have no effect.
            CapacityError: The model does not fit; the message has the figures.
            CheckpointError: The folder is not a supported checkpoint.
        """
        with in_keywords():
            config = config_from_keywords(model, keywords)
            _check_emulated(config)
            self._open(build_engine(config, plan=_refereed(config)))

    @staticmethod
    def keywords() -> str:
        """Return a line for each keyword: its name, default, type and meaning."""
        return describe_keywords()

    @classmethod
    def from_config(
        cls, config: EngineConfig, progress: Progress | None = None, *, reference: bool = False
    ) -> "LLM":
        """Build an engine from a configuration.

        Args:
            config: What is asked.
            progress: Called with phase, bytes done and bytes in all while weights load.
            reference: Ignore the offload settings: every layer is copied on demand, eagerly. The
                yardstick of equality.
        """
        plan = None if reference else _refereed(config)
        return cls._of(build_engine(config, progress, reference=reference, plan=plan))

    @classmethod
    def plan_for(cls, config: EngineConfig) -> MemoryPlan:
        """Return the plan that `from_config` begins with; nothing is allocated or read.

        Raises:
            CapacityError: It does not fit; the message and the error's plan have the figures.
            CheckpointError: There is no config.json, or it contradicts the sizes that were given.
            ConfigError: A setting does not suit the model or this machine.
        """
        model = read_model(config.model)
        facts, known = open_device(config.gpu.device).facts(), known_unpackable(config)
        plan = plan_memory(config, model.spec, facts, unpackable=known)
        return replace(plan, notes=(*plan.notes, *model.notes))

    @classmethod
    def plan_for_sizes(cls, config: EngineConfig) -> MemoryPlan:
        """Return the plan for the sizes of `config.model.spec`; its folder is not looked at.

        Where no GPU is here the plan is for the card that `config.gpu` describes, if it does.

        Raises:
            CapacityError: It does not fit; the message and the error's plan have the figures.
            ConfigError: A setting does not suit the model or this machine.
        """
        asked, spec = config.gpu, config.model.spec
        assert spec is not None
        facts = open_device(asked.device).facts()
        if facts.emulated and asked.is_described and asked.memory_gib is not None:
            facts = DeviceFacts.of_card(asked)
        return plan_memory(config, spec, facts, unpackable=known_unpackable(config))

    @classmethod
    def _of(cls, engine: Engine) -> "LLM":
        llm = cls.__new__(cls)
        llm._open(engine)  # noqa: SLF001
        return llm

    def _open(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._lock, self._owner = threading.RLock(), os.getpid()
        self._sessions = Sessions(engine.core, engine.tokenizer, engine.spec.vocab_size)
        _LOG.info("%s", loaded_line(engine))

    def __enter__(self) -> Self:
        _ = self.engine  # refuses where it was closed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if getattr(self, "_engine", None) is None:
            return f"{type(self).__name__}(closed)"
        return f"{type(self).__name__}({loaded_line(self.engine)})"

    @property
    def engine(self) -> Engine:
        """Its parts, for measurement; the door is what stands below.

        Raises:
            EngineError: It was closed.
        """
        engine: Engine | None = getattr(self, "_engine", None)
        if engine is None:
            raise EngineError("LLM: it was closed. Build a new one.")
        return engine

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads out, whose steps would mix, and forks, which lack the engine's own."""
        _ = self.engine  # raises where it was closed
        if os.getpid() != self._owner:
            raise EngineError(
                f"LLM: expected process {self._owner}, which built the engine, got {os.getpid()}, "
                "a fork of it without its threads and its device. Build the engine after the fork."
            )
        if not self._lock.acquire(blocking=False):
            raise EngineError(
                "LLM: expected one thread at a time, got a second one. Use AsyncLLM, which many "
                "clients may share."
            )
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Do the same, and let Ctrl-C wait: what it cuts short might not go on."""
        with interrupt_afterwards(), self._alone():
            yield

    @property
    def config(self) -> EngineConfig:
        """What was asked."""
        return self.engine.config

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan in force."""
        return self.engine.plan

    @property
    def spec(self) -> ModelSpec:
        """Sizes of the model."""
        return self.engine.spec

    @property
    def load_report(self) -> LoadReport:
        """Where the time of the load went."""
        return self.engine.load_report

    @property
    def tokenizer(self) -> Any | None:
        """The tokenizer, or None: prompts must be token ids then."""
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, tokens."""
        return self.engine.plan.max_model_len

    @property
    def last_step(self) -> StepStats | None:
        """What the newest step did."""
        return self.engine.core.last_step

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts; a prompt that cannot be served fails alone.

        Args:
            prompts: A string, a list of token ids, or a list of either.
            sampling_params: One for all, or one for each prompt; None: the defaults.
            use_tqdm: Show a progress bar of finished prompts.

        Returns:
            One output for each prompt, in order. One that cannot be served has `error` set and
            finish_reason "error".

        Raises:
            ConfigError: The number of sampling params differs from that of prompts.
        """
        with self._alone():
            return self._sessions.generate(prompts, sampling_params, self.step, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Messages | SequenceOf[Messages],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = False,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, written as prompts by the checkpoint's chat template.

        Args:
            messages: One conversation, or a list of them: dicts with `role` and `content`.
            sampling_params: As for `generate`.
            use_tqdm: As for `generate`.
            **template: For transformers' apply_chat_template, such as chat_template, tools or
                add_generation_prompt (True unless given).

        Returns:
            One output for each conversation, in order.

        Raises:
            RequestError: There is no tokenizer or template, or it refuses the messages.
        """
        several = cast(
            "SequenceOf[Messages]", [messages] if is_conversation(messages) else messages
        )
        prompts = [chat_tokens(self.tokenizer, each, **template) for each in several]
        return self.generate(prompts, sampling_params, use_tqdm)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a prompt, whose tokens come from `step`; return the request's id.

        Requests of a lower `priority` are served first, and lose their KV blocks last.

        Raises:
            RequestError: It cannot be served.
        """
        with self._whole():
            session = self._sessions.add(prompt, params, request_id, priority)
            return session.request.request_id

    def prepare_form(self, form: StructuredOutput) -> object:
        """Compile a form ahead of requests that ask for it; any thread may call it.

        It stays compiled at least as long as the caller keeps what this returns.

        Raises:
            RequestError: The form is not valid, or the model has no tokenizer that can be used.
        """
        _ = self.engine
        return self._sessions.constraints.compiled(form)

    def step(self) -> list[TokenEvent]:
        """Return the tokens of one step of the engine, as they became known.

        The step behind it is launched before its tokens are waited for, and runs while the caller
        handles them. So a request that is added between calls begins behind the step in flight.
        Tokens that came while `generate` ran, of requests that were added, come first.
        Ctrl-C is raised behind the step, and the next call returns its tokens; a second one is
        raised at once, and the engine may have to be built anew.
        """
        events = list[TokenEvent]()
        try:
            with self._whole():
                sessions = self._sessions
                kept, sessions.kept = sessions.kept, []
                events += kept or sessions.apply(self.engine.core.step())
        except KeyboardInterrupt:
            self._sessions.keep(events)
            raise
        return events

    def has_unfinished(self) -> bool:
        """Whether a call of `step` has work: a request waits or runs, or its tokens are kept."""
        return self.engine.core.scheduler.has_unfinished or bool(self._sessions.kept)

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown and finished ids are ignored."""
        with self._whole():
            self._sessions.abort(request_id)

    def effective(self) -> dict[str, Any]:
        """Return what is really used: device, dtype, placements, graphs, fallbacks."""
        return describe(self.engine)

    def stats(self) -> dict[str, Any]:
        """Return totals since the load."""
        core, executor = self.engine.core, self.engine.executor
        first, *others = core.pools
        return {
            "steps": core.num_steps,
            "overlapped_steps": core.overlapped_steps,
            "graph_steps": executor.graph_steps,
            "h2d_bytes": executor.moved.h2d_bytes,
            "in_place_bytes": executor.moved.in_place_bytes,
            **{
                name.removeprefix("num_"): value
                for name, value in asdict(core.scheduler.stats).items()
                if name != "num_steps"
            },
            "free_blocks": first.num_free,
            "num_blocks": first.num_gpu_blocks,
            "free_window_blocks": sum(pool.num_free for pool in others),
            "num_window_blocks": sum(pool.num_gpu_blocks for pool in others),
            "kv": self._kv_stats(),
            **self._expert_stats(),
        }

    def snapshot(self) -> Snapshot:
        """Return the counts that metrics show; cheap, and for any thread at any time.

        Raises:
            EngineError: It was closed.
        """
        return take_snapshot(self.engine)

    def _expert_stats(self) -> dict[str, Any]:
        """Return hits, misses and bytes by layer with experts, where some are not resident."""
        meter, sizes = self.engine.executor.meter, expert_sizes(self.spec)
        if meter is None or sizes is None:
            return {}
        found = {name: each.tolist() for name, each in asdict(meter.totals).items()}
        return {"experts": {"layers": list(sizes.layers), **found}}

    def _kv_stats(self) -> dict[str, Any]:
        """Return use of both tiers and what was found, moved and read in place."""
        engine, groups = self.engine, self.engine.plan.kv.groups
        found = engine.core.scheduler.kv_stats()
        found["cpu"]["pinned"] = sum(group.num_pinned for group in groups)
        found["cpu"]["pageable"] = sum(group.num_pageable for group in groups)
        return {
            **found,
            "moved": asdict(engine.tier.moved()),
            "in_place_bytes": engine.executor.moved.kv_in_place_bytes,
            "copied_ahead_bytes": engine.executor.moved.kv_copied_bytes,
            "staged_prefill_bytes": engine.executor.staged_prefill_bytes,
        }

    def reset_cache(self, tier: Tier | None = None) -> None:
        """Forget the content of KV blocks, so that no prompt finds any; sequences go on.

        The tier is gpu or cpu; None: both.

        Raises:
            EngineError: There is no such tier.
        """
        if tier not in {None, "gpu", "cpu"}:
            raise EngineError(f"reset_cache: expected tier gpu, cpu or None, got {tier!r}.")
        with self._whole():
            core = self.engine.core
            core.scheduler.reset_cache(tier)
            if not core.scheduler.has_unfinished:
                core.transfers.drain()  # no step comes that would ask what is done

    def evict_gpu_cache(self) -> None:
        """Take content that no sequence uses off the GPU, to the host tier where that has room.

        For measurement, between calls of `step`: what is found afterwards is found in the host
        tier. Blocks until it is stored.
        """
        with self._whole():
            core = self.engine.core
            core.scheduler.evict_gpu_cache()
            core.transfers.drain()

    def forget_routing(self) -> None:
        """Forget the experts that were recorded so far."""
        recorder = self.engine.routing.recorder
        if recorder is not None:
            recorder.clear()

    def routing_trace(self) -> RoutingTrace:
        """Return the experts of tokens that ran since the load, or since forget_routing.

        They are recorded with record_routing=True.
        One sequence follows the other, each in order of position; write_trace makes a file of it.

        Raises:
            ConfigError: They were not recorded.
        """
        recorder = self.engine.routing.recorder
        if recorder is None:
            raise ConfigError("routing_trace: expected record_routing=True, got False. Set it.")
        return recorder.trace(self.engine.config.model.name)

    def memory(self) -> dict[str, int]:
        """Return bytes on both sides, from the engine's own ledger and the device."""
        engine = self.engine
        pinned, pageable = engine.host_bytes()
        return {
            "gpu_peak_bytes": engine.device.peak_bytes(),
            "gpu_budget_bytes": engine.plan.gpu_budget_bytes,
            "gpu_allocated_bytes": engine.device.allocated_bytes(),
            "host_pinned_bytes": pinned,
            "host_pageable_bytes": pageable,
        }

    def close(self) -> None:
        """Release GPU and host memory; the engine cannot be used afterwards."""
        if getattr(self, "_engine", None) is None:
            return
        with self._whole():
            engine, self._engine = self.engine, None
            device = engine.device
            device.synchronize()
            engine.executor.close()
            engine.tier.stop()
            engine.cache.close()
            engine.tier.close()
            engine.store.close()
            del engine, self._sessions
            device.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _check_emulated(config: EngineConfig) -> None:
    """Raise ConfigError for a size of an emulated GPU where there is a real one."""
    tokens = config.emulated_kv_tokens
    if tokens is not None and not open_device(config.gpu.device).facts().emulated:
        raise ConfigError(
            f"emulated_kv_tokens: expected None on a GPU, got {tokens}: it bounds the KV cache of "
            "an emulated one. Remove it, or set device='cpu'."
        )


def _refereed(config: EngineConfig) -> MemoryPlan | None:
    """Return the plan that planner.referee keeps; None where it is off."""
    if not config.planner.referee:
        return None
    spec = read_model(config.model).spec
    facts = open_device(config.gpu.device).facts()
    plans = plan_candidates(config, spec, facts, NUM_CANDIDATES, known_unpackable(config))
    # Times do not depend on the weights' values, and random ones are there sooner than files.
    model = replace(config.model, load_format="dummy", keep_lossless=False)
    timed = replace(config, model=model)

    def open_engine(plan: MemoryPlan) -> LLM:
        return LLM._of(build_engine(timed, plan=plan))  # noqa: SLF001

    return judge(plans, spec.vocab_size, open_engine)
