"""The tables of rotary cosines and sines."""

import math

import torch

from engine.spec import ModelSpec


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
    head_dim: int, theta: float, scaling: dict[str, float], max_model_len: int
) -> torch.Tensor:
    half = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32)
    frequencies = _scale(1.0 / (theta ** (half / head_dim)), scaling)
    positions = torch.arange(max_model_len, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _scale(frequencies: torch.Tensor, scaling: dict[str, float]) -> torch.Tensor:
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return frequencies
    factor = scaling["factor"]
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
