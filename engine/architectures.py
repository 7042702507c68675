"""The table of architecture differences, keyed by transformers' `model_type`; no torch."""

from dataclasses import dataclass


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
    """Of the gate of the MLP: silu | gelu_tanh."""
    scales_embedding: bool = False
    """Hidden states start as the embedding times the root of hidden_size."""
    sliding_window: str = "never"
    """never | all (every layer, when sliding_window is set) | flag (when use_sliding_window is true
    too: layers from max_window_layers on) | pattern (all but every sixth layer); the last two
    unless layer_types says otherwise."""
    window_default: int | None = 4096
    """transformers' default of sliding_window where a config.json leaves it out."""
    theta_default: float = 10000.0
    """transformers' default of rope_theta."""
    local_theta_default: float | None = None
    """transformers' default of rope_local_base_freq; None: window layers rotate as the others."""
    tied_default: bool = False
    """transformers' default of tie_word_embeddings."""
    vocab_default: int
    """transformers' default of vocab_size."""
    hidden_default: int = 4096
    """transformers' default of hidden_size."""
    intermediate_default: int
    """transformers' default of intermediate_size."""
    layers_default: int = 32
    """transformers' default of num_hidden_layers."""
    heads_default: int = 32
    """transformers' default of num_attention_heads."""
    eps_default: float = 1e-6
    """transformers' default of rms_norm_eps where a config.json leaves it out."""
    kv_heads_default: int | None = None
    """transformers' default of num_key_value_heads; None: as many as query heads."""
    head_dim_default: int | None = None
    """transformers' default of head_dim; None: hidden_size over heads."""
    positions_default: int = 2048
    """transformers' default of max_position_embeddings."""
    heads_divide_hidden: bool = False
    """Whether transformers refuses heads that do not divide hidden_size beside a head_dim too."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        qkv_bias=None,
        o_bias=None,
        mlp_bias=None,
        vocab_default=32000,
        intermediate_default=11008,
        heads_divide_hidden=True,
    ),
    "mistral": Architecture(
        sliding_window="all",
        vocab_default=32000,
        intermediate_default=14336,
        kv_heads_default=8,
        positions_default=131072,
    ),
    "qwen2": Architecture(
        qkv_bias=True,
        sliding_window="flag",
        vocab_default=151936,
        intermediate_default=22016,
        kv_heads_default=32,
        positions_default=32768,
    ),
    "qwen3": Architecture(
        qkv_bias=None,
        o_bias=None,
        qk_norm="head",
        sliding_window="flag",
        vocab_default=151936,
        intermediate_default=22016,
        kv_heads_default=32,
        head_dim_default=128,
        positions_default=32768,
    ),
    "olmo2": Architecture(
        qkv_bias=None,
        o_bias=None,
        qk_norm="full",
        norms="post",
        vocab_default=50304,
        intermediate_default=11008,
        eps_default=1e-5,
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
        theta_default=1e6,
        local_theta_default=1e4,
        tied_default=True,
        vocab_default=262208,
        hidden_default=2304,
        intermediate_default=9216,
        layers_default=26,
        heads_default=8,
        kv_heads_default=4,
        head_dim_default=256,
        positions_default=131072,
        heads_divide_hidden=True,
    ),
}

WINDOW, FULL = "sliding_attention", "full_attention"
"""Kinds of attention of a layer, as config.json names them."""
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Kind of rotary scaling -> the factors that it needs."""
ROPE_OPTIONS: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
"""Kind of rotary scaling -> what may stand beside the factors."""
