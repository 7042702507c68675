"""What the content of a config.json says of a model's sizes; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import CheckpointError
from engine.model.quant_config import read_quantization


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls the modules of a layer with experts."""

    router: str
    gates: tuple[str, ...]
    """Names of gates and ups, with the expert's number in braces, as in `down`. One name: each gate
    is followed by its up."""
    down: str

    @property
    def is_interleaved(self) -> bool:
        """Whether gates and ups are rows of one matrix in turn; plain ones are then transposed."""
        return len(self.gates) == 1


QWEN_EXPERTS = ExpertNames(
    "mlp.gate",
    ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.{}.down_proj",
)
MIXTRAL_EXPERTS = ExpertNames(
    "block_sparse_moe.gate",
    ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "block_sparse_moe.experts.{}.w2",
)
GPT_OSS_EXPERTS = ExpertNames(
    "mlp.router", ("mlp.experts.{}.gate_up_proj",), "mlp.experts.{}.down_proj"
)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What sets one decoder family apart from the plain Llama layer."""

    qkv_bias: bool | None = False
    """Bias on q, k, v: always, never, or as the config's attention_bias says (None)."""
    o_bias: bool | None = False
    """Bias on the attention output: always, never, or as attention_bias says (None)."""
    mlp_bias: bool | None = False
    """Bias on the MLP: always, never, or as mlp_bias says (None)."""
    qk_norm: str = "none"
    """RMS norm of q and k before the rotation: none | head (per head) | full (all heads)."""
    norms: str = "pre"
    """pre: the norm's output enters the sub-layer; post: it is taken of the sub-layer's output;
    both: one before and one after each sub-layer."""
    norm_offset: float = 0.0
    """Added to the weight of every RMS norm."""
    activation: str = "silu"
    """Activation of the MLP's gate: silu | gelu_tanh."""
    scales_embedding: bool = False
    """Hidden states start as the embedding times the root of hidden_size."""
    sliding_window: str = "never"
    """never | all (every layer, when sliding_window is set) | flag (when use_sliding_window is true
    too: layers from max_window_layers on) | pattern (all but every sixth layer); the last two
    unless layer_types says otherwise | all_flag (every layer, when use_sliding_window is true too)
    | every_other (then of the layers before max_window_layers the first, the third and so on).
    """
    local_theta_default: float | None = None
    """transformers' default of rope_local_base_freq; None: window layers rotate as the others."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults of keys that a config.json may leave out, beside those of DEFAULTS."""
    heads_divide_hidden: bool = False
    """transformers refuses heads that do not divide hidden_size beside a head_dim too."""
    experts: ExpertNames | None = None
    """Names of experts; None: every layer is dense."""
    renormalises: bool | None = None
    """Whether weights of the chosen experts are divided by their sum; None: as norm_topk_prob says.
    """
    rounds_routing: bool = True
    """Weights of experts are rounded to the dtype of the model."""
    expert_size_key: str = "moe_intermediate_size"
    """What config.json calls the feed-forward size of an expert."""
    has_shared_expert: bool = False
    """One more expert runs for every token, through a sigmoid of its own."""
    has_expert_biases: bool = False
    """Router and experts have biases."""
    has_sinks: bool = False
    """Each head has a score that it gives to no key."""
    clamp: tuple[float, float] | None = None
    """Limit and alpha of the clamped SwiGLU of experts (kernels.ops.experts); None: of none."""
    qkv_bias_key: str = "attention_bias"
    """What config.json calls the bias of attention."""


DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""transformers' defaults of most families; num_key_value_heads and head_dim follow from others."""


def _defaults(vocab_size: int, intermediate_size: int, **others: Any) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "intermediate_size": intermediate_size, **others}


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        qkv_bias=None,
        o_bias=None,
        mlp_bias=None,
        defaults=_defaults(32000, 11008),
        heads_divide_hidden=True,
    ),
    "mistral": Architecture(
        sliding_window="all",
        defaults=_defaults(32000, 14336, num_key_value_heads=8, max_position_embeddings=131072),
    ),
    "qwen2": Architecture(
        qkv_bias=True,
        sliding_window="flag",
        defaults=_defaults(151936, 22016, num_key_value_heads=32, max_position_embeddings=32768),
    ),
    "qwen3": Architecture(
        qkv_bias=None,
        o_bias=None,
        qk_norm="head",
        sliding_window="flag",
        defaults=_defaults(
            151936, 22016, num_key_value_heads=32, head_dim=128, max_position_embeddings=32768
        ),
    ),
    "olmo2": Architecture(
        qkv_bias=None,
        o_bias=None,
        qk_norm="full",
        norms="post",
        defaults=_defaults(50304, 11008, rms_norm_eps=1e-5),
    ),
    "gemma3_text": Architecture(
        qkv_bias=None,
        o_bias=None,
        qk_norm="head",
        norms="both",
        norm_offset=1.0,
        activation="gelu_tanh",
        scales_embedding=True,
        sliding_window="pattern",
        local_theta_default=1e4,
        defaults=_defaults(
            262208,
            9216,
            hidden_size=2304,
            num_hidden_layers=26,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=131072,
            rope_theta=1e6,
            tie_word_embeddings=True,
        ),
        heads_divide_hidden=True,
    ),
    "qwen3_moe": Architecture(
        qkv_bias=None,
        o_bias=None,
        qk_norm="head",
        sliding_window="all_flag",
        experts=QWEN_EXPERTS,
        defaults=_defaults(
            151936,
            6144,
            hidden_size=2048,
            num_hidden_layers=24,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
        ),
    ),
    "qwen2_moe": Architecture(
        qkv_bias=None,
        sliding_window="every_other",
        experts=QWEN_EXPERTS,
        has_shared_expert=True,
        qkv_bias_key="qkv_bias",
        defaults=_defaults(
            151936,
            5632,
            hidden_size=2048,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=32768,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
            qkv_bias=True,
        ),
    ),
    "mixtral": Architecture(
        sliding_window="all",
        experts=MIXTRAL_EXPERTS,
        renormalises=True,
        rounds_routing=False,
        expert_size_key="intermediate_size",
        defaults=_defaults(
            32000,
            14336,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            sliding_window=None,
            num_experts=8,
            num_experts_per_tok=2,
        ),
    ),
    "olmoe": Architecture(
        qkv_bias=None,
        o_bias=None,
        qk_norm="full",
        experts=QWEN_EXPERTS,
        expert_size_key="intermediate_size",
        defaults=_defaults(
            50304,
            2048,
            hidden_size=2048,
            num_hidden_layers=16,
            num_attention_heads=16,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            num_experts=64,
            num_experts_per_tok=8,
        ),
    ),
    "gpt_oss": Architecture(
        qkv_bias=None,
        o_bias=None,
        sliding_window="pattern",
        experts=GPT_OSS_EXPERTS,
        renormalises=True,
        expert_size_key="intermediate_size",
        has_expert_biases=True,
        has_sinks=True,
        clamp=(7.0, 1.702),
        defaults=_defaults(
            201088,
            2880,
            hidden_size=2880,
            num_hidden_layers=36,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=150000.0,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            sliding_window=128,
            sliding_window_pattern=2,
            attention_bias=True,
            num_local_experts=128,
            num_experts_per_tok=4,
        ),
    ),
}

WINDOW, FULL = "sliding_attention", "full_attention"
"""Kinds of attention of a layer, as config.json names them."""
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Kind of rotary scaling -> the factors that it needs."""
ROPE_OPTIONS: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
"""Kind of rotary scaling -> what may stand beside the factors."""


TEXT_PARTS = {"gemma3": "gemma3_text"}
"""model_type of a model of text and images -> that of its text_config."""
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
UNSUPPORTED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "clip_qkv",
)
WITH_FLAG = ("flag", "all_flag", "every_other")
"""Kinds of windows that use_sliding_window turns on."""
PATTERN = 6
"""transformers' default of sliding_window_pattern."""
MAX_LAYERS = 1024
"""More than any model has; planning takes seconds for so many."""


def _wrong(text: str) -> CheckpointError:
    return CheckpointError(f"config.json: {text}")


def sizes_of(config: Mapping[str, Any], stored_dtype: str | None = None) -> dict[str, Any]:
    """Return the fields of a ModelSpec from the content of a config.json.

    Reads the text part of a model of text and images. A value that has an old and a new name is
    read from where transformers reads it. `stored_dtype`: where none is stated; None: float32.

    Raises:
        CheckpointError: The architecture, activation or rotary scaling is not supported.
        KeyError: There is no text_config.
        TypeError: A value is of the wrong kind; also ValueError, AttributeError.
    """
    config = text_part_of(config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        known = ", ".join([*ARCHITECTURES, *TEXT_PARTS])
        raise _wrong(
            f"expected model_type among {known}, got {kind!r}. "
            "Other architectures are not supported."
        )
    arch = ARCHITECTURES[kind]
    config = {
        **DEFAULTS,
        **arch.defaults,
        # Of positions, as of no other of them, null means the default.
        **{key: x for key, x in config.items() if (key, x) != ("max_position_embeddings", None)},
    }
    rope, local_theta = _rope(config, arch)
    _check_supported(config, arch, rope)
    scaling = _rope_scaling(config, arch, rope)
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    layers = _size(config, "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise _wrong(f"num_hidden_layers: expected at most {MAX_LAYERS}, got {layers}.")
    is_derived = config.get("head_dim") is None
    if heads > 0 and hidden % heads and (is_derived or arch.heads_divide_hidden):
        raise _wrong(
            f"num_attention_heads: expected a divisor of hidden_size={hidden}, got {heads}. Fetch "
            "it again."
        )
    window, layer_types = _window(config, arch, layers)
    dtype = (stated_dtype(config) or stored_dtype or "float32").removeprefix("torch.")
    return {
        "model_type": kind,
        "vocab_size": _size(config, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _size(config, "intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _size(config, "num_key_value_heads", heads),
        "head_dim": _size(config, "head_dim", hidden // max(1, heads)),
        "max_position_embeddings": _positions(config, scaling),
        "rms_norm_eps": float(config["rms_norm_eps"]),
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": scaling,
        "rope_local_base_freq": local_theta if window is not None else None,
        "query_pre_attn_scalar": _scalar(config, arch),
        "tie_word_embeddings": config["tie_word_embeddings"] or False,
        "attention_bias": config.get(arch.qkv_bias_key) or False,
        "mlp_bias": config.get("mlp_bias") or False,
        "sliding_window": window,
        "layer_types": layer_types,
        "dtype": dtype,
        "quantization": read_quantization(config, dtype),
        **(_experts(config, arch) if arch.experts else {}),
    }


def _experts(config: Mapping[str, Any], arch: Architecture) -> dict[str, Any]:
    """Read what a family with experts has beside the others."""
    # transformers writes either name, and reads both.
    given = config.get("num_local_experts")
    num_experts = _size(config, "num_experts" if given is None else "num_local_experts")
    sparse = arch.expert_size_key == "moe_intermediate_size"
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": _size(config, "num_experts_per_tok"),
        "moe_intermediate_size": _size(config, arch.expert_size_key),
        "shared_expert_intermediate_size": (
            _size(config, "shared_expert_intermediate_size") if arch.has_shared_expert else 0
        ),
        "norm_topk_prob": (
            bool(config.get("norm_topk_prob")) if arch.renormalises is None else arch.renormalises
        ),
        "decoder_sparse_step": _size(config, "decoder_sparse_step", 1) if sparse else 1,
        "mlp_only_layers": list(config.get("mlp_only_layers") or []) if sparse else [],
    }


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype under its new or its old name; None where neither is there."""
    found = config.get("dtype") or config.get("torch_dtype")
    return None if found is None else str(found)


def text_part_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text_config of a model of text and images, with what it takes from around it."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        return config
    text = dict(config["text_config"])
    # transformers ties as the whole model says, and loads in the dtype of the whole.
    shared = {"tie_word_embeddings": config.get("tie_word_embeddings", True)}
    if dtype := stated_dtype(config):
        shared["dtype"] = dtype
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            shared[key] = config[key]
    return {"model_type": TEXT_PARTS[kind]} | text | shared


def _scalar(config: Mapping[str, Any], arch: Architecture) -> float | None:
    """What attention is scaled by in place of head_dim, which other families read alone."""
    value = config.get("query_pre_attn_scalar")
    return float(256.0 if value is None else value) if arch.scales_embedding else None


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(f"{name}: expected an integer, got {value!r}.")
    return value


def _positions(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    """Most positions: yarn stretches those that the model was trained for by its factor."""
    positions = _size(config, "max_position_embeddings")
    if scaling.get("rope_type") != "yarn":
        return positions
    stretched = scaling["original_max_position_embeddings"] * scaling["factor"]
    return max(positions, int(stretched))


def _rope(config: Mapping[str, Any], arch: Architecture) -> tuple[Mapping[str, Any], float | None]:
    """Return the rotary parameters of full attention, and the theta of window layers.

    rope_parameters is the new name, rope_scaling beside a rope_theta the old one; of a model that
    was saved anew and given a scaling by hand, a config.json has both.
    """
    params, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    is_nested = WINDOW in params or FULL in params
    if arch.local_theta_default is not None:
        if params and not is_nested:
            raise _wrong(
                f"rope_parameters: expected {FULL} and {WINDOW} in it, got "
                f"{', '.join(sorted(params))}, which transformers does not read. Put them there."
            )
        return _rope_of_kinds(config, arch, params, scaling)
    if is_nested or WINDOW in scaling or FULL in scaling:
        raise _wrong(
            f"expected the same rotary parameters for all layers, got {FULL} or "
            f"{WINDOW}; not supported with model_type={config['model_type']}."
        )
    rope = {"rope_theta": config["rope_theta"], **(scaling or params)}
    # transformers drops rope_parameters beside rope_scaling, the model's own theta with it.
    if scaling and params.get("rope_theta", rope["rope_theta"]) != rope["rope_theta"]:
        raise _wrong(
            f"expected one rope_theta, got {params['rope_theta']} in rope_parameters "
            f"and {rope['rope_theta']} for rope_scaling. Move the keys of rope_scaling into "
            "rope_parameters."
        )
    return rope, None


def _rope_of_kinds(
    config: Mapping[str, Any],
    arch: Architecture,
    params: Mapping[str, Any],
    scaling: Mapping[str, Any],
) -> tuple[Mapping[str, Any], float]:
    """Read the rotary parameters that each kind of attention has of its own."""
    local, own = params.get(WINDOW) or {}, params.get(FULL) or {}
    if local.get("rope_type", local.get("type", "default")) != "default":
        raise _wrong(
            "expected no rotary scaling in layers with a window, got rope_type="
            f"{local.get('rope_type', local.get('type'))!r}; not supported."
        )
    if "type" in scaling and "rope_type" not in scaling:
        raise _wrong(
            f"rope_scaling: expected rope_type, got type={scaling['type']!r}, which "
            "transformers does not read here. Rename it."
        )
    default = config.get("rope_local_base_freq", arch.local_theta_default)
    local_theta = float(local.get("rope_theta", default))
    # transformers looks for truncate where it cannot be.
    merged = {name: value for name, value in {**own, **scaling}.items() if name != "truncate"}
    return {"rope_theta": config["rope_theta"], **merged}, local_theta


def _check_supported(
    config: Mapping[str, Any], arch: Architecture, rope: Mapping[str, Any]
) -> None:
    # Gemma writes its activation under a name of its own.
    is_gelu = arch.activation == "gelu_tanh"
    key, usual = ("hidden_activation", "gelu_pytorch_tanh") if is_gelu else ("hidden_act", "silu")
    act = config.get(key, usual)
    if ACTIVATIONS.get(act) != arch.activation:
        raise _wrong(f"expected {key} {usual}, got {act!r}; not supported.")
    for name, value in zip(("swiglu_limit", "swiglu_alpha"), arch.clamp or (), strict=False):
        if config.get(name, value) != value:
            raise _wrong(f"expected {name} {value}, got {config[name]!r}; not supported.")
    for name in UNSUPPORTED:
        if config.get(name):
            raise _wrong(f"expected no {name}, got {config[name]!r}; not supported.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise _wrong(f"expected rotary scaling among {', '.join(ROPE_TYPES)}, got {kind!r}.")
    factor = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if float(factor) != 1.0:
        raise _wrong(f"expected partial_rotary_factor 1, got {factor}; not supported.")


def _rope_scaling(
    config: Mapping[str, Any], arch: Architecture, rope: Mapping[str, Any]
) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    found = {name: rope.get(name) for name in ROPE_TYPES[kind]}
    name = "original_max_position_embeddings"
    if name in found:
        positions = _size(config, "max_position_embeddings")
        if name in config and arch.local_theta_default is None:
            found[name] = config[name]
        elif name not in rope:
            found[name] = positions
        if kind == "yarn" and "factor" in rope and found["factor"] is None:
            found["factor"] = positions / _size(found, name)
    options = {name: rope.get(name) for name in ROPE_OPTIONS.get(kind, ())}
    options = {name: value for name, value in options.items() if value is not None}
    return {"rope_type": kind} | found | options


def _window(
    config: Mapping[str, Any], arch: Architecture, layers: int
) -> tuple[int | None, list[str]]:
    """Return the window, and each layer's kind of attention where they differ."""
    if arch.sliding_window == "never":
        return None, []
    if arch.sliding_window in WITH_FLAG and not config.get("use_sliding_window", False):
        return None, []
    types = _layer_types(config, arch, layers)
    if WINDOW not in types:
        return None, []
    if config["sliding_window"] is None:
        if arch.sliding_window == "pattern":
            raise _wrong(
                "expected a sliding_window for its layers of sliding_attention, got "
                "null. Fetch it again."
            )
        return None, []
    return _size(config, "sliding_window"), types if FULL in types else []


def _layer_types(config: Mapping[str, Any], arch: Architecture, layers: int) -> list[str]:
    if arch.sliding_window in {"all", "all_flag"}:
        return [WINDOW] * layers
    if types := config.get("layer_types"):
        if not isinstance(types, list) or len(types) != layers or {*types} - {WINDOW, FULL}:
            raise _wrong(
                f"layer_types: expected {WINDOW} or {FULL} for each of {layers} "
                f"layers, got {types!r}."
            )
        return types
    if arch.sliding_window == "flag":
        first = config.get("max_window_layers")
        first = 28 if first is None else first  # transformers' default
        return [WINDOW if index >= first else FULL for index in range(layers)]
    if arch.sliding_window == "every_other":
        first = _size(config, "max_window_layers", 28)
        return [FULL if index % 2 or index >= first else WINDOW for index in range(layers)]
    every = _size(config, "sliding_window_pattern", PATTERN)
    return [WINDOW if (index + 1) % every else FULL for index in range(layers)]
