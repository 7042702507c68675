"""/metrics: what requests took, and the engine's counts, under vLLM's names and ours."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.shapes import Shape
from server.wire import Start, Token

_SECONDS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
)
_TOKENS: Final = tuple(float(2**power) for power in range(18))
_COUNTS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


@dataclass
class RequestTimes:
    """When tokens of one request came, seconds of one clock."""

    arrival_s: float
    first_s: float | None = None
    last_s: float | None = None
    end_s: float = 0.0
    gaps_s: list[tuple[float, int]] = field(default_factory=list)
    """Between parts, each with the tokens of the later one."""
    start: Start | None = None
    """Of the prompt that was first to have a token."""

    @property
    def ttft_s(self) -> float | None:
        """To the first token; None where none came."""
        return None if self.first_s is None else self.first_s - self.arrival_s

    def note(self, now_s: float, tokens: Sequence[Token]) -> None:
        """Take in tokens that came together."""
        if self.start is None:
            self.start = next((token.start for token in tokens if token.start is not None), None)
        if self.last_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append((now_s - self.last_s, len(tokens)))
        self.last_s = now_s


@dataclass(frozen=True)
class _Row:
    """A figure of the engine's under a metric's name."""

    name: str
    count: str
    """Its name among the engine's counts."""
    kind: str
    """gauge | counter."""
    help: str


_ROWS: Final = (
    _Row("vllm:num_requests_running", "running", "gauge", "Answers that have KV blocks."),
    _Row("vllm:num_requests_waiting", "waiting", "gauge", "Answers that wait for them."),
    _Row("vllm:kv_cache_usage_perc", "gpu_kv_usage", "gauge", "Share of KV blocks in use, 0 to 1."),
    _Row("vllm:num_preemptions", "preemptions", "counter", "Answers that gave their blocks up."),
    _Row("vllm:prefix_cache_queries", "prefix_queried_tokens", "counter",
         "Tokens of prompts that were looked up."),
    _Row("vllm:prefix_cache_hits", "prefix_hit_tokens", "counter", "Those that were found."),
    _Row("tightfit:prefill_tokens", "prefill_tokens", "counter",
         "Tokens that ran in prefills, recomputed ones included."),
    _Row("tightfit:decode_tokens", "decode_tokens", "counter", "Tokens that ran in decodes."),
    _Row("tightfit:steps", "steps", "counter", "Steps of the engine."),
    _Row("tightfit:step_seconds", "step_s", "counter", "Seconds that steps took."),
    _Row("tightfit:link_weight_bytes", "link_weight_bytes", "counter",
         "Bytes of weights that crossed the host link, copied or read in place, but for experts."),
    _Row("tightfit:link_expert_bytes", "link_expert_bytes", "counter",
         "Bytes of experts that crossed it because a token needed them."),
    _Row("tightfit:expert_hits", "expert_hits", "counter",
         "Experts that tokens needed and that lay on the GPU, each once a layer and step."),
    _Row("tightfit:expert_misses", "expert_misses", "counter", "Those that crossed the link."),
    _Row("tightfit:link_kv_bytes", "link_kv_bytes", "counter",
         "Bytes of keys and values that crossed it to the GPU, copied or read in place."),
    _Row("tightfit:link_bytes_per_step", "link_bytes_per_step", "gauge",
         "Bytes that the last steps brought over the host link, each."),
    _Row("tightfit:link_share", "link_share", "gauge",
         "Share of the host link's rate that the last steps used, 0 to 1."),
    _Row("tightfit:kv_host_blocks", "host_kv_blocks", "gauge", "KV blocks in host memory."),
    _Row("tightfit:kv_host_blocks_used", "host_kv_blocks_used", "gauge",
         "Those of them that answers have."),
    _Row("tightfit:swaps_out", "swaps_out", "counter", "Answers whose KV went to host memory."),
    _Row("tightfit:swaps_in", "swaps_in", "counter", "Answers whose KV came back from it."),
)  # fmt: skip


class Metrics:
    """The registry of one server.

    Args:
        counts: Returns the engine's counts as of the last sign of life.
        facts: Returns sizes of the engine for vllm:cache_config_info; empty until it is ready.
        memory: Returns what `server.wire.Ready` tells of memory; empty until it is ready.
    """

    def __init__(self, model: str, counts: Any, facts: Any, memory: Any) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCounts(model, counts, facts))
        self._registry.register(_EngineMemory(model, memory))

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            found = Histogram(
                f"vllm:{name}", text, ["model_name"], registry=self._registry, buckets=buckets
            )
            return found.labels(model)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name", *labels], registry=self._registry)

        self._ttft = histogram("time_to_first_token_seconds", "To the first token.", _SECONDS)
        self._gap = histogram("inter_token_latency_seconds", "Between two tokens.", _SECONDS)
        self._e2e = histogram("e2e_request_latency_seconds", "To the end.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "To the first step.", _SECONDS)
        self._prefill = histogram(
            "request_prefill_time_seconds", "First step to first token.", _SECONDS
        )
        self._decode = histogram("request_decode_time_seconds", "First to last token.", _SECONDS)
        self._inference = histogram(
            "request_inference_time_seconds", "First step to last token.", _SECONDS
        )
        self._prompt = histogram("request_prompt_tokens", "Tokens of prompts.", _TOKENS)
        self._output = histogram("request_generation_tokens", "Tokens of answers.", _TOKENS)
        self._n = histogram("request_params_n", "n of requests.", _COUNTS)
        self._limit = histogram("request_params_max_tokens", "max_tokens of requests.", _TOKENS)
        self._prompt_total = counter("prompt_tokens", "Tokens of prompts.").labels(model)
        self._output_total = counter("generation_tokens", "Tokens of answers.").labels(model)
        self._success = counter("request_success", "Answers that ended.", "finished_reason")

    def note_prompt(self, num_tokens: int) -> None:
        """Count the tokens of a request's prompts as it is accepted."""
        self._prompt_total.inc(num_tokens)

    def note_tokens(self, num_tokens: int) -> None:
        """Count tokens as they come."""
        self._output_total.inc(num_tokens)

    def note_request(
        self,
        times: RequestTimes,
        shape: Shape,
        reasons: Sequence[str],
        limits: tuple[int, int | None],
    ) -> None:
        """Take in a request that ended; `limits` are the n and max_tokens that it asked for."""
        n, max_tokens = limits
        self._n.observe(n)
        if max_tokens is not None:
            self._limit.observe(max_tokens)
        if times.first_s is not None and times.last_s is not None:
            self._ttft.observe(times.first_s - times.arrival_s)
            self._decode.observe(times.last_s - times.first_s)
        if times.start is not None:
            self._queue.observe(times.start.queue_s)
            self._prefill.observe(times.start.prefill_s)
            if times.first_s is not None and times.last_s is not None:
                decode_s = times.last_s - times.first_s
                self._inference.observe(times.start.prefill_s + decode_s)
        for gap_s, num_tokens in times.gaps_s:
            for _ in range(num_tokens):
                self._gap.observe(gap_s / num_tokens)
        self._e2e.observe(times.end_s - times.arrival_s)
        self._prompt.observe(shape.num_prompt_tokens)
        self._output.observe(shape.num_tokens)
        for reason in reasons:
            self._success.labels(self._model, reason).inc()

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCounts(Collector):
    """The engine's counts, read when they are asked for."""

    def __init__(self, model: str, counts: Any, facts: Any) -> None:
        self._model, self._counts, self._facts = model, counts, facts

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are known when they are collected."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield every count that the engine has told."""
        counts: Mapping[str, float] = self._counts()
        for row in _ROWS:
            if row.count in counts:
                kind = GaugeMetricFamily if row.kind == "gauge" else CounterMetricFamily
                family = kind(row.name, row.help, labels=["model_name"])
                family.add_metric([self._model], counts[row.count])
                yield family
        facts: Mapping[str, object] = self._facts()
        if facts:
            info = GaugeMetricFamily(
                "vllm:cache_config_info", "Sizes of the KV cache.", labels=["model_name", *facts]
            )
            info.add_metric([self._model, *map(str, facts.values())], 1)
            yield info


class _EngineMemory(Collector):
    """Where the engine's memory went when it was built."""

    def __init__(self, model: str, memory: Any) -> None:
        self._model, self._memory = model, memory

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are known when they are collected."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield bytes on both sides."""
        memory: Mapping[str, Any] = self._memory()
        if not memory:
            return
        budget = GaugeMetricFamily(
            "tightfit:gpu_budget_bytes",
            "Memory of the GPU that the engine may take.",
            labels=["model_name", "gpu_uuid"],
        )
        budget.add_metric([self._model, memory["gpu_uuid"] or ""], memory["gpu_budget_bytes"])
        yield budget
        for side, name in (("gpu", "GPU"), ("host", "host")):
            items = GaugeMetricFamily(
                f"tightfit:{side}_plan_bytes",
                f"Bytes that the plan takes on the {name}, by part.",
                labels=["model_name", "item"],
            )
            for item, num_bytes in memory[f"{side}_items"].items():
                items.add_metric([self._model, item], num_bytes)
            yield items
        for kind in ("pinned", "pageable"):
            host = GaugeMetricFamily(
                f"tightfit:host_{kind}_bytes",
                f"Host memory that the engine holds, {kind}.",
                labels=["model_name"],
            )
            host.add_metric([self._model], memory[f"host_{kind}_bytes"])
            yield host
