"""The tables of rotary cosines and sines."""

import math
from typing import Any

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
