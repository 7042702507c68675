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
    """pre: the norm's output enters the sub-layer; post: it is taken of the sub-layer's output."""
    sliding_window: str = "never"
    """never | config (when sliding_window is set) | flag (when use_sliding_window is true too)."""
    window_default: int | None = None
    """transformers' default of sliding_window where a config.json leaves it out."""
    eps_default: float = 1e-6
    """transformers' default of rms_norm_eps where a config.json leaves it out."""
    kv_heads_default: int | None = None
    """transformers' default of num_key_value_heads; None: as many as query heads."""
    head_dim_default: int | None = None
    """transformers' default of head_dim; None: hidden_size over heads."""
    positions_default: int = 2048
    """transformers' default of max_position_embeddings."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(qkv_bias=None, o_bias=None, mlp_bias=None),
    "mistral": Architecture(
        sliding_window="config", window_default=4096, kv_heads_default=8, positions_default=131072
    ),
    "qwen2": Architecture(
        qkv_bias=True, sliding_window="flag", kv_heads_default=32, positions_default=32768
    ),
    "qwen3": Architecture(
        qkv_bias=None,
        o_bias=None,
        qk_norm="head",
        sliding_window="flag",
        kv_heads_default=32,
        head_dim_default=128,
        positions_default=32768,
    ),
    "olmo2": Architecture(
        qkv_bias=None, o_bias=None, qk_norm="full", norms="post", eps_default=1e-5
    ),
}
