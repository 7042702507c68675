"""The decoder: functions of batch, weights and cache; families differ by the architecture table.

T tokens, N query heads, K KV heads, H head size, D hidden.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.device.base import Device
from engine.kv.memory import KVCache
from engine.model.formats import EMBEDDING, HEAD, Products
from engine.model.spec import W2, W2_BIAS, W13, W13_BIAS, ModelSpec
from engine.plan.memory import MemoryPlan
from engine.plan.sizes import pad_batch
from engine.run.inputs import Batch
from engine.run.routing import Routers
from engine.run.stages import Stages
from engine.weights.residence import ROUTED, RoutedExperts
from engine.weights.store import OPERATORS, WeightStore
from kernels.arguments import (
    AttentionCall,
    DecodeWorkspace,
    HostCache,
    PrefillWorkspace,
    decode_workspace,
    prefill_workspace,
)
from kernels.ops import attention, experts, kv, norm
from kernels.sizes import PREFILL_SPLIT_MAX_QUERIES

Weights = Mapping[str, Any]
"""A layer's tensors, each as the products of its format take it."""
Product = Callable[..., Tensor]
Hidden = tuple[Tensor, Tensor | None]
"""[T, D] twice: hidden states, and the residual that they are not yet added to, where that is."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """How one layer attends, and its products, each that of its weight's format."""

    rotary: Tensor
    """float32 [max_model_len, H]."""
    window: int | None
    """Most keys that a query sees, its own among them; None: all."""
    group: int
    """The group of layers whose slots and block tables it uses."""
    qkv: Product
    out: Product
    gate_up: Product | None
    """With the activation; of the shared expert where the layer has experts. None: it has none."""
    down: Product | None
    router: Product | None = None
    """None: the layer has no experts."""
    place: int = 0
    """Which of the layers with experts it is, where it has some."""
    shared_gate: Product | None = None
    """The gate of the shared expert; None: there is none."""


@dataclass(frozen=True)
class Decoder:
    """What every step needs beside its batch."""

    spec: ModelSpec
    weights: WeightStore
    cache: KVCache
    layers: tuple[DecoderLayer, ...]
    embedding: Product
    head: Product
    workspace: DecodeWorkspace
    prefill_workspace: PrefillWorkspace
    logits: Tensor
    """float32 [most rows of a step, V], written by every step."""
    stages: Stages | None
    """For sequences with blocks of both tiers; None where sequences own no host blocks."""
    routers: Routers
    """How tokens find their experts."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        plan: MemoryPlan,
        device: Device,
        store: WeightStore,
        cache: KVCache,
        routers: Routers,
    ) -> "Decoder":
        """Allocate what steps need and ask every weight's format for the operator that takes it."""
        rows, at = pad_batch(plan.max_num_seqs), device.torch_device
        queries = min(plan.max_num_batched_tokens, PREFILL_SPLIT_MAX_QUERIES)
        sizes = spec.num_attention_heads, spec.head_dim, plan.max_model_len
        head = EMBEDDING if spec.tie_word_embeddings else HEAD
        return cls(
            spec,
            store,
            cache,
            _layers(spec, plan, at),
            plan.formats[EMBEDDING].products(OPERATORS).embedding,
            plan.formats[head].products(OPERATORS).linear,
            decode_workspace(rows, *sizes, at),
            prefill_workspace(queries, *sizes, at),
            torch.zeros((rows, spec.vocab_size), device=at),
            Stages(plan, spec, device, cache) if cache.host_layers else None,
            routers,
        )

    def forward(self, batch: Batch, between: Callable[[], object] | None = None) -> Tensor:
        """Run one step; return float32 logits [R, V] of the wanted rows, a view of `logits`.

        Args:
            batch: What runs.
            between: Called when a layer is enqueued; must return at once.

        Stream: everything is enqueued on the current stream; copies of offloaded weights run
        beside it and are joined before this returns. Keys and values are written to the cache.
        """
        store, table = self.weights, self.routers.table
        if table is not None:
            assert batch.routes is not None
            batch = replace(batch, chosen=table.take(batch.routes))
        with torch.inference_mode():
            store.begin_step(batch.num_tokens)
            if self.stages is not None:
                self.stages.begin_step(batch.staged, batch.ahead)
            hidden, residual = self._run_layers(batch, between)
            for tokens, take in batch.scored:
                self._score(tokens, hidden, residual, take)
            rows = batch.num_logits
            if rows:
                self._write_logits(batch, hidden, residual, self.logits[:rows])
            store.end_step()
        return self.logits[:rows]

    def _run_layers(self, batch: Batch, between: Callable[[], object] | None) -> Hidden:
        spec, store = self.spec, self.weights
        hidden = self.embedding(batch.input_ids, store.outer(EMBEDDING), spec.embedding_scale)
        run = self._pre_norm_layer if spec.architecture.norms == "pre" else self._post_norm_layer
        residual: Tensor | None = None
        for index in range(spec.num_hidden_layers):
            weights = store.acquire(index)
            hidden, residual = run(batch, weights, index, hidden, residual)
            store.release(index)
            if between is not None:
                between()
        return hidden, residual

    def _score(
        self,
        tokens: range,
        hidden: Tensor,
        residual: Tensor | None,
        take: Callable[[Tensor], None],
    ) -> None:
        """Hand logits of tokens over, as many at a time as `logits` holds."""
        most = len(self.logits)
        for first in range(tokens.start, tokens.stop, most):
            part = slice(first, min(first + most, tokens.stop))
            out = self.logits[: part.stop - part.start]
            rest = None if residual is None else residual[part].clone()  # the norm changes it
            self._project(hidden[part].clone(), rest, out)
            take(out)

    def _write_logits(
        self, batch: Batch, hidden: Tensor, residual: Tensor | None, out: Tensor
    ) -> None:
        if batch.logits_rows is not None:
            hidden = hidden.index_select(0, batch.logits_rows)
            if residual is not None:
                residual = residual.index_select(0, batch.logits_rows)
        self._project(hidden, residual, out)

    def _project(self, hidden: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """Write the logits of tokens: the last norm, then the head."""
        weight = self.weights.outer("model.norm.weight")
        eps, offset = self.spec.rms_norm_eps, self.spec.architecture.norm_offset
        if residual is None:
            hidden = norm.rms_norm(hidden, weight, eps, offset)
        else:
            hidden = norm.add_rms_norm(hidden, residual, weight, eps, offset)
        head = self.weights.outer(EMBEDDING if self.spec.tie_word_embeddings else HEAD)
        out.copy_(self.head(hidden, head, workspace=self.workspace))

    def _pre_norm_layer(
        self, batch: Batch, weights: Weights, index: int, hidden: Tensor, residual: Tensor | None
    ) -> Hidden:
        """Norms before the sub-layers; `hidden` is not yet added to `residual`."""
        eps = self.spec.rms_norm_eps
        weight = weights["input_layernorm.weight"]
        if residual is None:
            residual, hidden = hidden, norm.rms_norm(hidden, weight, eps)
        else:
            hidden = norm.add_rms_norm(hidden, residual, weight, eps)
        hidden = self._attention(batch, weights, index, hidden)
        weight = weights["post_attention_layernorm.weight"]
        hidden = norm.add_rms_norm(hidden, residual, weight, eps)
        return self._mlp(batch, weights, index, hidden), residual

    def _post_norm_layer(
        self, batch: Batch, weights: Weights, index: int, hidden: Tensor, residual: Tensor | None
    ) -> Hidden:
        """Norms of the sub-layers' outputs, or of both sides; `hidden` is the whole stream."""
        eps, offset = self.spec.rms_norm_eps, self.spec.architecture.norm_offset
        is_both, out = self.spec.architecture.norms == "both", hidden
        if is_both:
            out = norm.rms_norm(hidden, weights["input_layernorm.weight"], eps, offset)
        out = self._attention(batch, weights, index, out)
        norm.rms_norm_add_(out, hidden, weights["post_attention_layernorm.weight"], eps, offset)
        out = hidden
        if is_both:
            out = norm.rms_norm(hidden, weights["pre_feedforward_layernorm.weight"], eps, offset)
        out = self._mlp(batch, weights, index, out)
        norm.rms_norm_add_(out, hidden, weights["post_feedforward_layernorm.weight"], eps, offset)
        return hidden, residual

    def _attention(self, batch: Batch, weights: Weights, index: int, hidden: Tensor) -> Tensor:
        spec, layer, workspace = self.spec, self.layers[index], self.workspace
        bias, num_kv_heads = weights.get("self_attn.qkv_proj.bias"), spec.num_key_value_heads
        qkv = layer.qkv(hidden, weights["self_attn.qkv_proj.weight"], bias, workspace=workspace)
        heads = spec.num_attention_heads, num_kv_heads, num_kv_heads
        by_head = qkv.view(batch.num_tokens, -1, spec.head_dim)
        q_TNH, k_TKH, v_TKH = by_head.split_with_sizes(heads, 1)
        k_cache, v_cache = self.cache.layer(index)
        kv.rotary_write_kv_(
            q_TNH,
            k_TKH,
            v_TKH,
            weights.get("self_attn.q_norm.weight"),
            weights.get("self_attn.k_norm.weight"),
            spec.rms_norm_eps,
            layer.rotary,
            batch.positions,
            k_cache,
            v_cache,
            batch.slots[layer.group],
            spec.architecture.norm_offset,
            self.cache.host_layer(index),
        )
        out = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        call = AttentionCall(
            q_TNH,
            k_cache,
            v_cache,
            batch.block_tables[layer.group],
            batch.seq_lens,
            spec.attention_scale,
            out,
            layer.window,
            sinks=weights.get("self_attn.sinks"),
        )
        self._attend(batch, index, call)
        return layer.out(
            out.flatten(-2),
            weights["self_attn.o_proj.weight"],
            weights.get("self_attn.o_proj.bias"),
            workspace=workspace,
        )

    def _attend(self, batch: Batch, index: int, step: AttentionCall) -> None:
        """Decodes by the split kernel, prefills by the varlen one; both read the cache."""
        edge, host = batch.num_decodes, self.cache.host_layer(index)
        near: AttentionCall | None = step
        if batch.ahead and host is not None:
            near = None if batch.near_lens is None else replace(step, seq_lens=batch.near_lens)
        if edge and near is not None:
            call = _part(near, slice(edge), slice(edge), host if batch.reads_host else None)
            attention.paged_decode_attention(
                call, max_seq_len=batch.max_decode_len, workspace=self.workspace
            )
        if batch.prefill_starts is not None:
            rest = step
            if edge or batch.staged:
                rest = _part(step, slice(edge, None), slice(edge, batch.num_rows))
            attention.paged_prefill_attention(
                rest,
                batch.prefill_starts,
                max_query_len=batch.max_prefill_tokens,
                workspace=self.prefill_workspace,
            )
        for decode in batch.ahead if host is not None else ():
            assert self.stages is not None
            own = slice(decode.row, decode.row + 1)
            self.stages.decode(index, _part(step, own, own, host), decode, self.workspace)
        for row, staged in enumerate(batch.staged, start=batch.num_rows):
            call = _part(step, slice(staged.first, staged.stop), slice(row, row + 1))
            if host is not None:
                assert self.stages is not None
                self.stages.prefill(index, replace(call, block_tables=staged.table), staged)
            else:  # a layer without host blocks has all of the sequence's on the GPU
                attention.paged_prefill_attention(
                    call,
                    staged.starts,
                    max_query_len=staged.stop - staged.first,
                    workspace=self.prefill_workspace,
                )

    def _mlp(self, batch: Batch, weights: Weights, index: int, hidden: Tensor) -> Tensor:
        if self.layers[index].router is None:
            return self._dense(weights, index, "mlp", hidden)
        return self._experts(batch, weights, index, hidden)

    def _dense(self, weights: Weights, index: int, module: str, hidden: Tensor) -> Tensor:
        """Run the MLP of a layer, or its shared expert."""
        layer = self.layers[index]
        assert layer.gate_up is not None
        assert layer.down is not None
        bias = weights.get(f"{module}.gate_up_proj.bias")
        gated = layer.gate_up(hidden, weights[f"{module}.gate_up_proj.weight"], bias)
        weight, bias = (weights.get(f"{module}.down_proj.{kind}") for kind in ("weight", "bias"))
        return layer.down(gated, weight, bias, workspace=self.workspace)

    def _experts(self, batch: Batch, weights: Weights, index: int, hidden: Tensor) -> Tensor:
        ids, shares = self._route(batch, weights, index, hidden)
        products = hidden.new_empty((*ids.shape, self.spec.hidden_size))
        routed: RoutedExperts | None = weights.get(ROUTED)
        arch, biases = self.spec.architecture, None
        if arch.has_expert_biases:
            biases = weights[W13_BIAS], weights[W2_BIAS]
        arriving = None if routed is None else routed.arriving
        for blocks in (ids,) if routed is None else routed.parts(ids):
            experts.experts_products(
                hidden,
                weights[W13],
                weights[W2],
                blocks,
                products,
                biases=biases,
                clamp=arch.clamp,
                arriving=arriving,
            )
        shared = logits = None
        shared_gate = self.layers[index].shared_gate
        if shared_gate is not None:
            shared = self._dense(weights, index, "mlp.shared_expert", hidden)
            gate = weights["mlp.shared_expert_gate.weight"]
            logits = shared_gate(hidden, gate, workspace=self.workspace)
        return experts.experts_sum(products, shares, ids, shared, logits)

    def _route(
        self, batch: Batch, weights: Weights, index: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, int32 [T, k], of padding -1, and their weights."""
        spec, layer = self.spec, self.layers[index]
        assert layer.router is not None
        bias = weights.get("mlp.gate.bias")
        logits = layer.router(hidden, weights["mlp.gate.weight"], bias, workspace=self.workspace)
        ids, shares = experts.route(
            logits,
            spec.num_experts_per_tok,
            renormalise=spec.norm_topk_prob,
            rounds=spec.architecture.rounds_routing,
            rows_T=batch.slots[layer.group],
            chosen_Tk=None if batch.chosen is None else batch.chosen[layer.place],
        )
        if self.routers.recorder is not None:
            self.routers.recorder.note(layer.place, ids)
        return ids, shares


def _part(
    step: AttentionCall, tokens: slice, rows: slice, host: HostCache | None = None
) -> AttentionCall:
    """Return the call of some tokens of a step, those of some rows of its block tables."""
    tables, lens = step.block_tables[rows], step.seq_lens[rows]
    q, out, scale, window = step.q[tokens], step.out[tokens], step.scale, step.window
    caches = step.k_cache, step.v_cache
    return AttentionCall(q, *caches, tables, lens, scale, out, window, host, step.sinks)


def _layers(spec: ModelSpec, plan: MemoryPlan, device: torch.device) -> tuple[DecoderLayer, ...]:
    full, local = rotary_tables(spec, plan.max_model_len, device)
    groups = {layer: at for at, group in enumerate(plan.kv.groups) for layer in group.layers}
    is_gelu = spec.architecture.activation == "gelu_tanh"

    def products(index: int, name: str) -> Products:
        return plan.formats[f"model.layers.{index}.{name}.weight"].products(OPERATORS)

    found = []
    for index, window in enumerate(spec.windows):
        has_experts = spec.has_experts(index)
        has_shared = has_experts and spec.shared_expert_intermediate_size > 0
        mlp = "mlp.shared_expert" if has_experts else "mlp"
        gated = down = None
        if has_shared or not has_experts:
            of = products(index, f"{mlp}.gate_up_proj")
            gated = partial(of.linear_gated_mul, is_gelu=is_gelu)
            down = products(index, f"{mlp}.down_proj").linear
        layer = DecoderLayer(
            rotary=full if window is None else local,
            window=plan.kv.groups[groups[index]].window,
            group=groups[index],
            qkv=products(index, "self_attn.qkv_proj").linear,
            out=products(index, "self_attn.o_proj").linear,
            gate_up=gated,
            down=down,
            router=products(index, "mlp.gate").linear if has_experts else None,
            place=sum(map(spec.has_experts, range(index))),
            shared_gate=products(index, "mlp.shared_expert_gate").linear if has_shared else None,
        )
        found.append(layer)
    return tuple(found)


def rotary_tables(
    spec: ModelSpec, max_model_len: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the tables of layers without and with a window, of most models the same tensor.

    Each is float32 [max_model_len, head_dim]: per position H/2 cosines, then H/2 sines.

    Frequencies and angles are computed in float32 on the CPU, as transformers does.
    """
    full = _table(spec.head_dim, spec.rope_theta, spec.rope_scaling, max_model_len).to(device)
    if spec.rope_local_base_freq is None:
        return full, full
    return full, _table(spec.head_dim, spec.rope_local_base_freq, {}, max_model_len).to(device)


def _table(head_dim: int, theta: float, scaling: dict[str, Any], max_model_len: int) -> Tensor:
    half = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32)
    powers = torch.pow(theta, half / head_dim)
    factor = 1.0
    if scaling.get("rope_type") == "yarn":
        frequencies, factor = _yarn(powers, head_dim, theta, scaling)
    else:
        frequencies = _scale(1.0 / powers, scaling)
    positions = torch.arange(max_model_len, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]
    return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1)


def _yarn(
    powers: Tensor, head_dim: int, theta: float, scaling: dict[str, Any]
) -> tuple[Tensor, float]:
    """Return frequencies, and what cosines and sines are multiplied by (YaRN, Peng et al., 2023).

    Pairs that turn often within the context of training are kept, slow ones are slowed by
    `factor`, those between interpolated.
    """
    factor, old = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return head_dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - torch.clamp(ramp, 0, 1)
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept

    def strength(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if (given := scaling.get("attention_factor")) is not None:
        return frequencies, given
    weight, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if weight and all_dim:
        return frequencies, strength(weight) / strength(all_dim)
    return frequencies, strength(1)


def _scale(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return frequencies
    factor = float(scaling["factor"])
    if kind == "linear":
        return frequencies / factor
    # llama3 (Llama 3.1 release, 2024): long wavelengths are slowed by `factor`, short ones kept,
    # those between interpolated.
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    old = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    slowed = torch.where(wavelength > old / low, frequencies / factor, frequencies)
    smooth = (old / wavelength - low) / (high - low)
    between = (1 - smooth) * slowed / factor + smooth * slowed
    is_between = ~(wavelength < old / high) & ~(wavelength > old / low)
    return torch.where(is_between, between, slowed)
