"""ModelSpec: the sizes of a model, its parameters by checkpoint name; pure arithmetic, no torch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.architectures import ARCHITECTURES, Architecture
from engine.errors import CheckpointError, ConfigError
from engine.sealed import Sealed, check_choice, check_flag, check_number

DTYPES = ("bfloat16", "float16", "float32")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""Kind of rotary scaling -> its factors."""


@dataclass(frozen=True)
class ParamSpec:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the engine: parameters joined along dimension 0, placed as a whole."""

    name: str
    parts: tuple[ParamSpec, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined tensor."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(kw_only=True)
class ModelSpec(Sealed):
    """Sizes of one decoder model, under the names of its config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    """Empty, or rope_type (linear | llama3) with its factors."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    """Window of attention in tokens; null: the whole context."""
    dtype: str = "bfloat16"
    """dtype of the checkpoint."""

    def check(self) -> None:
        """Raise ConfigError when the sizes contradict each other."""
        check_choice(
            "model.spec.model_type",
            self.model_type,
            tuple(ARCHITECTURES),
            "Other architectures are not supported.",
        )
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            check_number(f"model.spec.{name}", getattr(self, name), low=1, integer=True)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "model.spec.num_key_value_heads: expected a divisor of num_attention_heads="
                f"{self.num_attention_heads}, got {self.num_key_value_heads}."
            )
        if self.head_dim % 2 or not 16 <= self.head_dim <= 256:
            raise ConfigError(
                f"model.spec.head_dim: expected an even number from 16 to 256, got {self.head_dim}."
            )
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            check_flag(f"model.spec.{name}", getattr(self, name))
        check_choice("model.spec.dtype", self.dtype, DTYPES)
        check_number("model.spec.rope_theta", self.rope_theta, low=0, low_open=True)
        check_number("model.spec.rms_norm_eps", self.rms_norm_eps, low=0)
        if self.sliding_window is not None:
            check_number("model.spec.sliding_window", self.sliding_window, low=1, integer=True)
        self._check_rope_scaling()

    def _check_rope_scaling(self) -> None:
        kind = self.rope_scaling.get("rope_type", "default")
        check_choice("model.spec.rope_scaling.rope_type", kind, tuple(ROPE_TYPES))
        for name in ROPE_TYPES[kind]:
            value = self.rope_scaling.get(name)
            check_number(f"model.spec.rope_scaling.{name}", value, low=0, low_open=True)
        ignored = sorted(self.rope_scaling.keys() - {"rope_type", *ROPE_TYPES[kind]})
        if kind == "default" and ignored:
            raise ConfigError(
                f"model.spec.rope_scaling: expected a rope_type (linear or llama3) for "
                f"{', '.join(ignored)}, got none. Set model.spec.rope_scaling.rope_type."
            )
        if ignored:
            raise ConfigError(
                f"model.spec.rope_scaling: expected only {', '.join(ROPE_TYPES[kind])} with "
                f"rope_type={kind}, got {', '.join(ignored)}. Remove it."
            )

    @property
    def architecture(self) -> Architecture:
        """The family's differences."""
        return ARCHITECTURES[self.model_type]

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.num_key_value_heads * self.head_dim

    def layer_tensors(self, layer: int) -> tuple[TensorSpec, ...]:
        """Return one decoder layer's tensors in declaration order."""
        return tuple(self._layer_tensors(f"model.layers.{layer}."))

    def _layer_tensors(self, prefix: str) -> Iterator[TensorSpec]:
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
        if arch.qk_norm != "none":
            head = arch.qk_norm == "head"
            yield vector(f"{att}q_norm", self.head_dim if head else q)
            yield vector(f"{att}k_norm", self.head_dim if head else kv)
        mlp_bias = self.mlp_bias if arch.mlp_bias is None else arch.mlp_bias
        gate_up = {"mlp.gate_proj": ffn, "mlp.up_proj": ffn}
        yield from linear("mlp.gate_up_proj", gate_up, hidden, mlp_bias)
        yield from linear("mlp.down_proj", {"mlp.down_proj": hidden}, ffn, mlp_bias)
        if arch.norms == "pre":
            yield vector("input_layernorm", hidden)
            yield vector("post_attention_layernorm", hidden)
        else:
            yield vector("post_attention_layernorm", hidden)
            yield vector("post_feedforward_layernorm", hidden)

    def _has_bias(self, rule: bool | None) -> bool:
        return self.attention_bias if rule is None else rule

    def outer_tensors(self) -> tuple[TensorSpec, ...]:
        """Return the tensors outside the layers: embedding, final norm, head if untied."""
        embed = ParamSpec("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))
        norm = ParamSpec("model.norm.weight", (self.hidden_size,))
        specs = [embed, norm]
        if not self.tie_word_embeddings:
            specs.append(ParamSpec("lm_head.weight", (self.vocab_size, self.hidden_size)))
        return tuple(TensorSpec(spec.name, (spec,)) for spec in specs)

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield every tensor: embedding, layers in order, final norm, head."""
        outer = self.outer_tensors()
        yield outer[0]
        for layer in range(self.num_hidden_layers):
            yield from self.layer_tensors(layer)
        yield from outer[1:]

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""
        layer = sum(tensor.numel for tensor in self.layer_tensors(0))
        return layer * self.num_hidden_layers + sum(t.numel for t in self.outer_tensors())

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Bytes of all parameters in `dtype` (default: the checkpoint's)."""
        return self.num_parameters * DTYPE_BYTES[dtype or self.dtype]

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_hidden_layers * self.kv_size * DTYPE_BYTES[dtype or self.dtype]

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "ModelSpec":
        """Read the sizes from the content of a config.json.

        Raises:
            CheckpointError: The architecture, activation or rotary scaling is not supported, or a
                size is missing.
        """
        if not isinstance(config, Mapping):
            raise CheckpointError(f"config.json: expected an object, got {type(config).__name__}.")
        kind = config.get("model_type")
        if not isinstance(kind, str) or kind not in ARCHITECTURES:
            raise CheckpointError(
                f"config.json: expected model_type among {', '.join(ARCHITECTURES)}, got {kind!r}. "
                "Other architectures are not supported."
            )
        try:
            _check_supported(config)
            heads = _size(config, "num_attention_heads")
            hidden = _size(config, "hidden_size")
            rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
            theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
            arch = ARCHITECTURES[kind]
            # The family's defaults are for a key that is absent; null means as in Llama.
            kv_default = None if "num_key_value_heads" in config else arch.kv_heads_default
            dim_default = None if "head_dim" in config else arch.head_dim_default
            return cls(
                model_type=kind,
                vocab_size=_size(config, "vocab_size"),
                hidden_size=hidden,
                intermediate_size=_size(config, "intermediate_size"),
                num_hidden_layers=_size(config, "num_hidden_layers"),
                num_attention_heads=heads,
                num_key_value_heads=_size(config, "num_key_value_heads", kv_default or heads),
                head_dim=_size(config, "head_dim", dim_default or hidden // max(1, heads)),
                max_position_embeddings=_size(
                    config, "max_position_embeddings", arch.positions_default
                ),
                rms_norm_eps=float(config.get("rms_norm_eps") or arch.eps_default),
                rope_theta=float(theta),
                rope_scaling=_rope_scaling(rope),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                sliding_window=_sliding_window(config, arch),
                dtype=str(
                    config.get("dtype") or config.get("torch_dtype") or "float32"
                ).removeprefix("torch."),
            )
        except KeyError as error:
            raise CheckpointError(f"config.json: expected the key {error}, found none.") from error
        except ConfigError as error:
            raise CheckpointError(f"config.json: {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"config.json: a value is of the wrong kind ({error}). Fetch it again."
            ) from error


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        if default is None:
            raise KeyError(name)
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"config.json: {name}: expected an integer, got {value!r}.")
    return value


def _check_supported(config: Mapping[str, Any]) -> None:
    act = config.get("hidden_act", "silu")
    if act not in {"silu", "swish"}:
        raise CheckpointError(f"config.json: expected hidden_act silu, got {act!r}; not supported.")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"config.json: quantised checkpoints are not supported, got quant_method={method!r}. "
            "Use the bfloat16, float16 or float32 checkpoint."
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"config.json: expected rotary scaling among {', '.join(ROPE_TYPES)}, got {kind!r}."
        )
    factor = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if float(factor) != 1.0:
        raise CheckpointError(
            f"config.json: expected partial_rotary_factor 1, got {factor}; not supported."
        )


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    return {"rope_type": kind} | {key: rope.get(key) for key in ROPE_TYPES[kind]}


def _sliding_window(config: Mapping[str, Any], arch: Architecture) -> int | None:
    if arch.sliding_window == "never":
        return None
    if arch.sliding_window == "flag" and not config.get("use_sliding_window", False):
        return None
    types = config.get("layer_types")
    if types and "sliding_attention" not in types:
        return None
    if config.get("sliding_window", arch.window_default) is None:
        return None
    return _size(config, "sliding_window", arch.window_default)
