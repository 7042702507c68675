"""ModelSpec: the sizes of a model, its parameters by checkpoint name; pure arithmetic, no torch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from engine.errors import CheckpointError, ConfigError
from engine.model.families import (
    ARCHITECTURES,
    FULL,
    MAX_LAYERS,
    ROPE_OPTIONS,
    ROPE_TYPES,
    WINDOW,
    Architecture,
    sizes_of,
)
from engine.model.formats import (
    EMBEDDING,
    FORMATS,
    HEAD,
    NO_FORMATS,
    Format,
    ParamSpec,
    TensorFormats,
    TensorSpec,
)
from engine.model.quantised import Quantisation, interleaved
from engine.sealed import Sealed, check_choice, check_flag, check_number, choice, number

DTYPES = tuple(FORMATS)
DTYPE_BYTES = {name: each.element_bytes for name, each in FORMATS.items()}
"""Bytes of an element that is computed or kept in KV blocks; weights have formats."""
NORMS = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "post": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Norms of a layer's hidden states."""
W13, W2 = "mlp.experts.w13_weight", "mlp.experts.w2_weight"
"""Matrices of all experts of a layer: gates and ups, and what follows them."""
W13_BIAS, W2_BIAS = "mlp.experts.w13_bias", "mlp.experts.w2_bias"
"""Biases of their products."""


@dataclass(kw_only=True)
class ModelSpec(Sealed):
    """Sizes of one decoder model, under the names of its config.json."""

    section: ClassVar = "model.spec"
    model_type: str
    vocab_size: int = number(low=1)
    hidden_size: int = number(low=1)
    intermediate_size: int = number(low=1)
    num_hidden_layers: int = number(low=1, high=MAX_LAYERS)
    num_attention_heads: int = number(low=1)
    num_key_value_heads: int = number(low=1)
    head_dim: int = number(low=1)
    max_position_embeddings: int = number(low=1)
    rms_norm_eps: float = number(1e-6, low=0)
    rope_theta: float = number(10000.0, low=0, low_open=True)
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    """Empty, or rope_type (linear | llama3 | yarn) with its factors."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = number(None, low=1)
    """Most tokens that a layer with a window attends to, the query's own among them; null: every
    layer attends to the whole context."""
    layer_types: list[str] = field(default_factory=list)
    """sliding_attention or full_attention for each layer; empty: all alike, with a window where
    sliding_window is set."""
    rope_local_base_freq: float | None = number(None, low=0, low_open=True)
    """rope_theta of layers with a window, which then have no rope_scaling; null: as the others."""
    query_pre_attn_scalar: float | None = number(None, low=0, low_open=True)
    """Attention scores are divided by its root; null: head_dim."""
    num_experts: int = number(0, low=0)
    """Experts of a layer that has them; 0: every layer is dense."""
    num_experts_per_tok: int = number(0, low=0)
    """Experts that run for each token."""
    moe_intermediate_size: int = number(0, low=0)
    """Feed-forward size of an expert."""
    shared_expert_intermediate_size: int = number(0, low=0)
    """Feed-forward size of an expert that runs for every token; 0: there is none."""
    norm_topk_prob: bool = False
    """Whether weights of the chosen experts are divided by their sum."""
    decoder_sparse_step: int = number(1, low=1)
    """One layer in this many has experts."""
    mlp_only_layers: list[int] = field(default_factory=list)
    """Layers that are dense whatever decoder_sparse_step says."""
    dtype: str = choice(DTYPES, "bfloat16")
    """dtype of the checkpoint."""
    quantization: dict[str, Any] = field(default_factory=dict)
    """Empty, or how a checkpoint's weights are quantised: method, schemes (each with layout, bits
    and more) and ignore, the modules that stay plain (docs/quantised.md)."""

    def check(self) -> None:
        """Raise ConfigError when the sizes contradict each other."""
        check_choice(
            "model.spec.model_type",
            self.model_type,
            tuple(ARCHITECTURES),
            "Other architectures are not supported.",
        )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "model.spec.num_key_value_heads: expected a divisor of num_attention_heads="
                f"{self.num_attention_heads}, got {self.num_key_value_heads}."
            )
        if self.head_dim % 2 or not 16 <= self.head_dim <= 256:
            raise ConfigError(
                f"model.spec.head_dim: expected an even number from 16 to 256, got {self.head_dim}."
            )
        self._check_experts()
        if self.quantization:
            self.formats(self.dtype)
        self._check_window()
        self._check_rope_scaling()

    def _check_experts(self) -> None:
        sizes = {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "moe_intermediate_size": self.moe_intermediate_size,
        }
        others = {
            "shared_expert_intermediate_size": self.shared_expert_intermediate_size,
            "norm_topk_prob": self.norm_topk_prob,
            "mlp_only_layers": self.mlp_only_layers,
        }
        if self.architecture.experts is None:
            for name, value in (sizes | others).items():
                if value:
                    raise ConfigError(
                        f"model.spec.{name}: expected nothing of experts with model_type="
                        f"{self.model_type}, got {value}: it would have no effect. Remove it."
                    )
            return
        for name, value in sizes.items():
            if not value:
                raise ConfigError(
                    f"model.spec.{name}: expected 1 or more with model_type={self.model_type}, "
                    "got 0. Set it."
                )
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                "model.spec.num_experts_per_tok: expected at most num_experts="
                f"{self.num_experts}, got {self.num_experts_per_tok}."
            )
        if bool(self.shared_expert_intermediate_size) != self.architecture.has_shared_expert:
            wanted = "1 or more" if self.architecture.has_shared_expert else "0"
            raise ConfigError(
                f"model.spec.shared_expert_intermediate_size: expected {wanted} with model_type="
                f"{self.model_type}, got {self.shared_expert_intermediate_size}."
            )

    def _check_window(self) -> None:
        window, types = self.sliding_window, list(self.layer_types)
        if window is None and (types or self.rope_local_base_freq is not None):
            name = "layer_types" if types else "rope_local_base_freq"
            raise ConfigError(
                f"model.spec.{name}: expected a sliding_window beside it, got none: it would have "
                "no effect. Set model.spec.sliding_window, or remove it."
            )
        if not types:
            return
        for kind in types:
            check_choice("model.spec.layer_types", kind, (WINDOW, FULL))
        if len(types) != self.num_hidden_layers or WINDOW not in types:
            raise ConfigError(
                f"model.spec.layer_types: expected one of {self.num_hidden_layers} layers each, "
                f"{WINDOW} among them, got {len(types)}: {', '.join(types)}."
            )

    def _check_rope_scaling(self) -> None:
        kind = self.rope_scaling.get("rope_type", "default")
        check_choice("model.spec.rope_scaling.rope_type", kind, tuple(ROPE_TYPES))
        for name in ROPE_TYPES[kind]:
            value = self.rope_scaling.get(name)
            check_number(f"model.spec.rope_scaling.{name}", value, low=0, low_open=True)
        options = ROPE_OPTIONS.get(kind, ())
        for name in (option for option in options if option in self.rope_scaling):
            if name == "truncate":
                check_flag(f"model.spec.rope_scaling.{name}", self.rope_scaling[name])
            else:
                check_number(f"model.spec.rope_scaling.{name}", self.rope_scaling[name], low=0)
        known = (*ROPE_TYPES[kind], *options)
        ignored = sorted(self.rope_scaling.keys() - {"rope_type", *known})
        if kind == "default" and ignored:
            raise ConfigError(
                f"model.spec.rope_scaling: expected a rope_type (linear, llama3 or yarn) for "
                f"{', '.join(ignored)}, got none. Set model.spec.rope_scaling.rope_type."
            )
        if ignored:
            raise ConfigError(
                f"model.spec.rope_scaling: expected only {', '.join(known)} with "
                f"rope_type={kind}, got {', '.join(ignored)}. Remove it."
            )

    @property
    def architecture(self) -> Architecture:
        """The family's differences."""
        return ARCHITECTURES[self.model_type]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Most tokens that each layer attends to, the query's own among them; None: all."""
        kinds = self.layer_types or [WINDOW] * self.num_hidden_layers
        return tuple(self.sliding_window if kind == WINDOW else None for kind in kinds)

    @property
    def embedding_scale(self) -> float | None:
        """Multiplies the embedding where hidden states start; None: nothing does."""
        return math.sqrt(self.hidden_size) if self.architecture.scales_embedding else None

    @property
    def attention_scale(self) -> float:
        """Multiplies attention scores."""
        scalar = self.query_pre_attn_scalar
        return 1 / math.sqrt(self.head_dim if scalar is None else scalar)

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.num_key_value_heads * self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a router and experts."""
        return (
            self.num_experts > 0
            and (layer + 1) % self.decoder_sparse_step == 0
            and layer not in self.mlp_only_layers
        )

    @cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers whose MLP is a router and experts; none in a dense model."""
        return tuple(filter(self.has_experts, range(self.num_hidden_layers)))

    def layer_tensors(self, layer: int) -> tuple[TensorSpec, ...]:
        """Return one decoder layer's tensors in declaration order."""
        return self._all_layer_tensors[layer]

    @cached_property
    def layer_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of each decoder layer's tensors."""
        return tuple(tuple(t.name for t in tensors) for tensors in self._all_layer_tensors)

    @cached_property
    def _all_layer_tensors(self) -> tuple[tuple[TensorSpec, ...], ...]:
        return tuple(map(self._layer_tensors, range(self.num_hidden_layers)))

    def _layer_tensors(self, layer: int) -> tuple[TensorSpec, ...]:
        return tuple(self._tensors_of(layer, f"model.layers.{layer}."))

    def _tensors_of(self, layer: int, prefix: str) -> Iterator[TensorSpec]:
        arch, hidden, ffn = self.architecture, self.hidden_size, self.intermediate_size
        q, kv = self.q_size, self.kv_size

        def linear(
            fused: str, outs: dict[str, int], width: int, bias: bool
        ) -> Iterator[TensorSpec]:
            for kind, tail in (("weight", (width,)), ("bias", ())):
                if kind == "weight" or bias:
                    parts = tuple(
                        ParamSpec(f"{prefix}{name}.{kind}", (rows, *tail))
                        for name, rows in outs.items()
                    )
                    yield TensorSpec(f"{prefix}{fused}.{kind}", parts)

        def vector(name: str, size: int) -> TensorSpec:
            return TensorSpec(
                f"{prefix}{name}.weight", (ParamSpec(f"{prefix}{name}.weight", (size,)),)
            )

        att = "self_attn."
        qkv = {f"{att}q_proj": q, f"{att}k_proj": kv, f"{att}v_proj": kv}
        yield from linear(f"{att}qkv_proj", qkv, hidden, self._has_bias(arch.qkv_bias))
        yield from linear(f"{att}o_proj", {f"{att}o_proj": hidden}, q, self._has_bias(arch.o_bias))
        if arch.has_sinks:
            sinks = ParamSpec(f"{prefix}{att}sinks", (self.num_attention_heads,))
            yield TensorSpec(sinks.name, (sinks,))
        if arch.qk_norm != "none":
            head = arch.qk_norm == "head"
            yield vector(f"{att}q_norm", self.head_dim if head else q)
            yield vector(f"{att}k_norm", self.head_dim if head else kv)
        mlp_bias = self.mlp_bias if arch.mlp_bias is None else arch.mlp_bias
        mlp = "mlp."
        if self.has_experts(layer):
            yield from self._expert_tensors(prefix)
            mlp, ffn = "mlp.shared_expert.", self.shared_expert_intermediate_size
        if ffn:
            gate_up = {f"{mlp}gate_proj": ffn, f"{mlp}up_proj": ffn}
            yield from linear(f"{mlp}gate_up_proj", gate_up, hidden, mlp_bias)
            yield from linear(f"{mlp}down_proj", {f"{mlp}down_proj": hidden}, ffn, mlp_bias)
        for name in NORMS[arch.norms]:
            yield vector(name, hidden)

    def _expert_tensors(self, prefix: str) -> Iterator[TensorSpec]:
        """Yield router and experts: of each expert gates, then ups, then the next expert's."""
        names, experts = self.architecture.experts, self.num_experts
        assert names is not None
        hidden, ffn = self.hidden_size, self.moe_intermediate_size

        def param(name: str, *shape: int) -> ParamSpec:
            kind = "weight" if len(shape) == 2 else "bias"
            return ParamSpec(f"{prefix}{name}.{kind}", shape)

        router = param(names.router, experts, hidden)
        yield TensorSpec(f"{prefix}mlp.gate.weight", (router,))
        has_biases = self.architecture.has_expert_biases
        if has_biases:
            yield TensorSpec(f"{prefix}mlp.gate.bias", (param(names.router, experts),))
        if self.architecture.has_shared_expert:
            gate = param("mlp.shared_expert_gate", 1, hidden)
            yield TensorSpec(gate.name, (gate,))
        both = 2 * ffn // len(names.gates)
        gates = [name.format(expert) for expert in range(experts) for name in names.gates]
        downs = [names.down.format(expert) for expert in range(experts)]
        w13, w2 = (
            (param(name, both, hidden) for name in gates),
            (param(name, hidden, ffn) for name in downs),
        )
        yield TensorSpec(f"{prefix}{W13}", tuple(w13), experts)
        yield TensorSpec(f"{prefix}{W2}", tuple(w2), experts)
        if has_biases:
            w13, w2 = (param(name, both) for name in gates), (param(name, hidden) for name in downs)
            yield TensorSpec(f"{prefix}{W13_BIAS}", tuple(w13), experts)
            yield TensorSpec(f"{prefix}{W2_BIAS}", tuple(w2), experts)

    def _has_bias(self, rule: bool | None) -> bool:
        return self.attention_bias if rule is None else rule

    def outer_tensors(self) -> tuple[TensorSpec, ...]:
        """Return the tensors outside the layers: embedding, final norm, head if untied."""
        embed = ParamSpec(EMBEDDING, (self.vocab_size, self.hidden_size))
        norm = ParamSpec("model.norm.weight", (self.hidden_size,))
        specs = [embed, norm]
        if not self.tie_word_embeddings:
            specs.append(ParamSpec(HEAD, (self.vocab_size, self.hidden_size)))
        return tuple(TensorSpec(spec.name, (spec,)) for spec in specs)

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield every tensor: embedding, layers in order, final norm, head."""
        outer = self.outer_tensors()
        yield outer[0]
        for layer in range(self.num_hidden_layers):
            yield from self.layer_tensors(layer)
        yield from outer[1:]

    def formats(self, dtype: str, rounded: Quantisation | None = None) -> Mapping[str, Format]:
        """Return the formats of the tensors that are quantised or stored in another order, by name.

        Args:
            dtype: What the engine computes in.
            rounded: How a load rounds a plain checkpoint; None: as the checkpoint keeps them.

        Raises:
            ConfigError: A matrix has sizes that its scheme cannot keep.
        """
        names, how = self.architecture.experts, rounded
        if how is None and self.quantization:
            how = self.quantisation
        is_interleaved = names is not None and names.is_interleaved
        if how is None and not is_interleaved:
            return NO_FORMATS
        key = dtype, rounded
        if key not in self._formats:
            found = interleaved(self.tensors(), dtype) if is_interleaved else {}
            self._formats[key] = found | (how.formats(self.tensors(), dtype) if how else {})
        return self._formats[key]

    @cached_property
    def _formats(self) -> dict[tuple[str, Quantisation | None], Mapping[str, Format]]:
        return {}

    @cached_property
    def quantisation(self) -> Quantisation:
        """What `quantization` says, which must not be empty."""
        return Quantisation.of(self.quantization)

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""
        return sum(tensor.numel for tensor in self.tensors())

    def shard(self, rank: int, world_size: int) -> "ModelSpec":
        """Return the sizes of the part of the model that one rank of several holds: of one, all.

        Raises:
            ConfigError: There is more than one rank, or not this one.
        """
        if (rank, world_size) != (0, 1):
            raise ConfigError(
                f"shard: expected rank 0 of 1, got rank {rank} of {world_size}: a model is not "
                "split over devices. Set tensor_parallel_size=1."
            )
        return self

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Bytes of all parameters, plain ones in `dtype` (default: the checkpoint's)."""
        dtype = dtype or self.dtype
        return TensorFormats(FORMATS[dtype], self.formats(dtype)).total_bytes(self.tensors())

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_hidden_layers * self.kv_size * DTYPE_BYTES[dtype or self.dtype]

    @classmethod
    def from_hf_config(
        cls, config: Mapping[str, Any], stored_dtype: str | None = None
    ) -> "ModelSpec":
        """Read the sizes from the content of a config.json (see `sizes_of`).

        Raises:
            CheckpointError: The architecture, activation or rotary scaling is not supported, or a
                value is of the wrong kind.
        """
        if not isinstance(config, Mapping):
            raise CheckpointError(f"config.json: expected an object, got {type(config).__name__}.")
        try:
            return cls(**sizes_of(config, stored_dtype))
        except KeyError as error:
            raise CheckpointError(f"config.json: expected the key {error}, found none.") from error
        except ConfigError as error:
            raise CheckpointError(f"config.json: {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"config.json: a value is of the wrong kind ({error}). Fetch it again."
            ) from error
