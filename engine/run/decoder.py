"""The decoder: functions of batch, weights and cache; families differ by the architecture table.

T tokens, N query heads, K KV heads, H head size, D hidden.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from engine.kv.memory import KVCache
from engine.model.formats import EMBEDDING, HEAD, Products, TensorFormats
from engine.model.spec import ModelSpec
from engine.run.batch import Batch
from engine.run.stages import PrefillStages
from engine.weights.store import WeightStore
from kernels.arguments import AttentionCall, DecodeWorkspace, PrefillWorkspace
from kernels.ops import attention, kv, linear, norm

Weights = Mapping[str, Any]
"""A layer's tensors, each as the products of its format take it."""
Product = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends."""

    rotary: torch.Tensor
    """float32 [max_model_len, H]."""
    window: int | None
    """Most keys that a query sees, its own among them; None: all."""
    group: int = 0
    """The group of layers whose slots and block tables it uses."""


@dataclass(frozen=True, slots=True)
class LayerProducts:
    """The products of one layer, each that of its weight's format."""

    qkv: Product
    out: Product
    gate_up: Product
    """With the activation."""
    down: Product


@dataclass(frozen=True, slots=True)
class ModelProducts:
    """Every product of a model."""

    embedding: Product
    layers: tuple[LayerProducts, ...]
    head: Product


def model_products(spec: ModelSpec, formats: TensorFormats) -> ModelProducts:
    """Ask the format of every weight for the operator that takes it."""
    is_gelu = spec.architecture.activation == "gelu_tanh"

    def layer(index: int) -> LayerProducts:
        def of(name: str) -> Products:
            return formats[f"model.layers.{index}.{name}.weight"].products(linear)

        gated = of("mlp.gate_up_proj")
        return LayerProducts(
            of("self_attn.qkv_proj").linear,
            of("self_attn.o_proj").linear,
            gated.linear_gelu_mul if is_gelu else gated.linear_silu_mul,
            of("mlp.down_proj").linear,
        )

    return ModelProducts(
        formats[EMBEDDING].products(linear).embedding,
        tuple(map(layer, range(spec.num_hidden_layers))),
        formats[EMBEDDING if spec.tie_word_embeddings else HEAD].products(linear).linear,
    )


@dataclass(frozen=True)
class Decoder:
    """What every step needs beside its batch."""

    spec: ModelSpec
    weights: WeightStore
    cache: KVCache
    attention: tuple[LayerAttention, ...]
    """Attention of each layer."""
    products: ModelProducts
    workspace: DecodeWorkspace
    prefill_workspace: PrefillWorkspace
    logits: torch.Tensor
    """float32 [most rows of a step, V], written by every step."""
    stages: PrefillStages | None = None
    """For prefills over blocks of both tiers; None where sequences own no host blocks."""

    def forward(self, batch: Batch, between: Callable[[], object] | None = None) -> torch.Tensor:
        """Run one step; return float32 logits [R, V] of the wanted rows, a view of `logits`.

        Args:
            batch: What runs.
            between: Called when a layer is enqueued; must return at once.

        Stream: everything is enqueued on the current stream; copies of offloaded weights run
        beside it and are joined before this returns. Keys and values are written to the cache.
        """
        spec, store = self.spec, self.weights
        store.begin_step(batch.num_tokens)
        table = store.outer(EMBEDDING)
        hidden = self.products.embedding(batch.input_ids, table, spec.embedding_scale)
        run = _LAYERS[spec.architecture.norms]
        residual: torch.Tensor | None = None
        for index in range(spec.num_hidden_layers):
            weights = store.acquire(index)
            hidden, residual = run(self, batch, weights, index, hidden, residual)
            store.release(index)
            if between is not None:
                between()
        rows = batch.num_tokens if batch.logits_rows is None else batch.logits_rows.shape[0]
        if rows:
            self._write_logits(batch, hidden, residual, self.logits[:rows])
        store.end_step()
        return self.logits[:rows]

    def _write_logits(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        if batch.logits_rows is not None:
            hidden = hidden.index_select(0, batch.logits_rows)
            if residual is not None:
                residual = residual.index_select(0, batch.logits_rows)
        weight = self.weights.outer("model.norm.weight")
        eps, offset = self.spec.rms_norm_eps, self.spec.architecture.norm_offset
        if residual is None:
            hidden = norm.rms_norm(hidden, weight, eps, offset)
        else:
            hidden = norm.add_rms_norm(hidden, residual, weight, eps, offset)
        head = self.weights.outer(EMBEDDING if self.spec.tie_word_embeddings else HEAD)
        out.copy_(self.products.head(hidden, head, workspace=self.workspace))


def _pre_norm_layer(
    model: Decoder,
    batch: Batch,
    weights: Weights,
    index: int,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Norms before the sub-layers; `hidden` is not yet added to `residual`."""
    eps = model.spec.rms_norm_eps
    weight = weights["input_layernorm.weight"]
    if residual is None:
        residual, hidden = hidden, norm.rms_norm(hidden, weight, eps)
    else:
        hidden = norm.add_rms_norm(hidden, residual, weight, eps)
    hidden = _attention(model, batch, weights, index, hidden)
    hidden = norm.add_rms_norm(hidden, residual, weights["post_attention_layernorm.weight"], eps)
    return _mlp(model, weights, index, hidden), residual


def _post_norm_layer(
    model: Decoder,
    batch: Batch,
    weights: Weights,
    index: int,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Norms of the sub-layers' outputs; `hidden` is the whole stream."""
    eps = model.spec.rms_norm_eps
    out = _attention(model, batch, weights, index, hidden)
    norm.rms_norm_add_(out, hidden, weights["post_attention_layernorm.weight"], eps)
    out = _mlp(model, weights, index, hidden)
    norm.rms_norm_add_(out, hidden, weights["post_feedforward_layernorm.weight"], eps)
    return hidden, residual


def _both_norms_layer(
    model: Decoder,
    batch: Batch,
    weights: Weights,
    index: int,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Norms of the sub-layers' inputs and of their outputs; `hidden` is the whole stream."""
    eps, offset = model.spec.rms_norm_eps, model.spec.architecture.norm_offset
    out = norm.rms_norm(hidden, weights["input_layernorm.weight"], eps, offset)
    out = _attention(model, batch, weights, index, out)
    norm.rms_norm_add_(out, hidden, weights["post_attention_layernorm.weight"], eps, offset)
    out = norm.rms_norm(hidden, weights["pre_feedforward_layernorm.weight"], eps, offset)
    out = _mlp(model, weights, index, out)
    norm.rms_norm_add_(out, hidden, weights["post_feedforward_layernorm.weight"], eps, offset)
    return hidden, residual


_LAYERS = MappingProxyType(
    {"pre": _pre_norm_layer, "post": _post_norm_layer, "both": _both_norms_layer}
)


def _attention(
    model: Decoder, batch: Batch, weights: Weights, index: int, hidden: torch.Tensor
) -> torch.Tensor:
    spec, products = model.spec, model.products.layers[index]
    qkv = products.qkv(
        hidden,
        weights["self_attn.qkv_proj.weight"],
        weights.get("self_attn.qkv_proj.bias"),
        workspace=model.workspace,
    )
    q, k, v = torch.split(qkv, [spec.q_size, spec.kv_size, spec.kv_size], dim=-1)
    tokens = batch.num_tokens
    q_TNH = q.view(tokens, spec.num_attention_heads, spec.head_dim)
    k_TKH = k.view(tokens, spec.num_key_value_heads, spec.head_dim)
    v_TKH = v.view(tokens, spec.num_key_value_heads, spec.head_dim)
    k_cache, v_cache = model.cache.layer(index)
    group = model.attention[index].group
    kv.rotary_write_kv_(
        q_TNH,
        k_TKH,
        v_TKH,
        weights.get("self_attn.q_norm.weight"),
        weights.get("self_attn.k_norm.weight"),
        spec.rms_norm_eps,
        model.attention[index].rotary,
        batch.positions,
        k_cache,
        v_cache,
        batch.slots[group],
        spec.architecture.norm_offset,
        model.cache.host_layer(index),
    )
    out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    _attend(model, batch, index, q_TNH, k_cache, v_cache, batch.block_tables[group], out)
    return products.out(
        out.flatten(-2),
        weights["self_attn.o_proj.weight"],
        weights.get("self_attn.o_proj.bias"),
        workspace=model.workspace,
    )


def _attend(
    model: Decoder,
    batch: Batch,
    index: int,
    q_TNH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Decodes by the split kernel, prefills by the varlen one; both read the cache."""
    scale, edge = model.spec.attention_scale, batch.num_decodes
    window = model.attention[index].window
    if edge:
        call = AttentionCall(
            q_TNH[:edge],
            k_cache,
            v_cache,
            tables[:edge],
            batch.seq_lens[:edge],
            scale,
            out[:edge],
            window,
            model.cache.host_layer(index) if batch.reads_host else None,
        )
        attention.paged_decode_attention(
            call, max_seq_len=batch.max_decode_len, workspace=model.workspace
        )
    rows = slice(edge, batch.num_rows)
    if batch.prefill_starts is not None:
        call = AttentionCall(
            q_TNH[edge:],
            k_cache,
            v_cache,
            tables[rows],
            batch.seq_lens[rows],
            scale,
            out[edge:],
            window,
        )
        attention.paged_prefill_attention(
            call,
            batch.prefill_starts,
            max_query_len=batch.max_prefill_tokens,
            workspace=model.prefill_workspace,
        )
    if batch.staged:
        call = AttentionCall(q_TNH, k_cache, v_cache, tables, batch.seq_lens, scale, out, window)
        _attend_staged(model, batch, index, call)


def _attend_staged(model: Decoder, batch: Batch, index: int, step: AttentionCall) -> None:
    """Prefills over blocks of both tiers; layers without host blocks have theirs on the GPU."""
    for row, staged in enumerate(batch.staged, start=batch.num_rows):
        is_tiered = model.cache.host_layer(index) is not None
        first, stop = staged.first, staged.stop
        call = replace(
            step,
            q=step.q[first:stop],
            block_tables=staged.table if is_tiered else step.block_tables[row : row + 1],
            seq_lens=staged.seq_len,
            out=step.out[first:stop],
        )
        if is_tiered:
            assert model.stages is not None
            model.stages.attend(index, call, staged)
        else:
            attention.paged_prefill_attention(
                call,
                staged.starts,
                max_query_len=stop - first,
                workspace=model.prefill_workspace,
            )


def _mlp(model: Decoder, weights: Weights, index: int, hidden: torch.Tensor) -> torch.Tensor:
    products = model.products.layers[index]
    gated = products.gate_up(
        hidden, weights["mlp.gate_up_proj.weight"], weights.get("mlp.gate_up_proj.bias")
    )
    return products.down(
        gated,
        weights["mlp.down_proj.weight"],
        weights.get("mlp.down_proj.bias"),
        workspace=model.workspace,
    )


def rotary_tables(
    spec: ModelSpec, max_model_len: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables of layers without and with a window, of most models the same tensor.

    Each is float32 [max_model_len, head_dim]: per position H/2 cosines, then H/2 sines.

    Frequencies and angles are computed in float32 on the CPU, as transformers does.
    """
    full = _table(spec.head_dim, spec.rope_theta, spec.rope_scaling, max_model_len).to(device)
    if spec.rope_local_base_freq is None:
        return full, full
    return full, _table(spec.head_dim, spec.rope_local_base_freq, {}, max_model_len).to(device)


def _table(
    head_dim: int, theta: float, scaling: dict[str, Any], max_model_len: int
) -> torch.Tensor:
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
    powers: torch.Tensor, head_dim: int, theta: float, scaling: dict[str, Any]
) -> tuple[torch.Tensor, float]:
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


def _scale(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
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
