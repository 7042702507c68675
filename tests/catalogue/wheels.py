"""Tiny wheels in the layout of the two packages, and the NumPy forward of the glass layout."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    "vocab_size": 16,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "max_len": 32,
    "rope_base": 10000.0,
    "eps": 1e-6,
    "init_std": 0.02,
}
FFN = 24
ALPHABET = ["\n", "a", "b", "c", "d", "\N{LOWER ONE EIGHTH BLOCK}"]
MERGES = [["a", "b"], ["ab", "c"], ["\N{LOWER ONE EIGHTH BLOCK}", "d"], ["c", "c"], ["b", "a"]]
MERGES += [["d", "d"]]


def glass_arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Random float16-exact weights under the package's parameter names."""
    rng = np.random.default_rng(seed)
    width, kv_width = SIZES["d_model"], SIZES["d_model"] // 2
    shapes: dict[str, tuple[int, ...]] = {
        "E": (SIZES["vocab_size"], width),
        "norm_f.gamma": (width,),
    }
    for layer in range(SIZES["n_layers"]):
        block = {
            "norm1.gamma": (width,),
            "attn.W_Q": (width, width),
            "attn.W_K": (width, kv_width),
            "attn.W_V": (width, kv_width),
            "attn.W_O": (width, width),
            "norm2.gamma": (width,),
            "ffn.W1": (width, FFN),
            "ffn.W3": (width, FFN),
            "ffn.W2": (FFN, width),
        }
        shapes.update({f"blocks.{layer}.{name}": shape for name, shape in block.items()})
    return {
        name: (rng.normal(0, 0.5, shape) + (len(shape) == 1)).astype(np.float16)
        for name, shape in shapes.items()
    }


def write_glass_wheel(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """Write a wheel that holds the npz and the tokenizer, and return its path."""
    npz, wheel = folder / "en.npz", folder / "glassllm-0.0.0-py3-none-any.whl"
    np.savez_compressed(npz, __config__=np.array(json.dumps(SIZES)), **arrays)
    tokenizer = {"version": 1, "alphabet": ALPHABET, "merges": MERGES}
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(npz, "glassllm/weights/en.npz")
        archive.writestr("glassllm/weights/en.tokenizer.json", json.dumps(tokenizer))
    npz.unlink()
    return wheel


def glass_logits(arrays: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """[T, V] float64 logits of the glass layout: adjacent rotary pairs, tied embeddings."""
    weights: dict[str, Any] = {name: array.astype(np.float64) for name, array in arrays.items()}
    size = SIZES["d_model"] // SIZES["n_heads"]
    angle = np.outer(np.arange(len(ids)), SIZES["rope_base"] ** (-np.arange(0, size, 2) / size))[
        :, None, :
    ]

    def norm(x: np.ndarray, gamma: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + SIZES["eps"]) * gamma

    def rotate(x: np.ndarray) -> np.ndarray:
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = (
            even * np.cos(angle) - odd * np.sin(angle),
            even * np.sin(angle) + odd * np.cos(angle),
        )
        return np.stack(turned, -1).reshape(x.shape)

    x = weights["E"][ids]
    for layer in range(SIZES["n_layers"]):
        w = {
            key.split(".", 2)[2]: value
            for key, value in weights.items()
            if f"blocks.{layer}." in key
        }
        h = norm(x, w["norm1.gamma"])
        q, k, v = ((h @ w[f"attn.W_{letter}"]).reshape(len(ids), -1, size) for letter in "QKV")
        q, k, v = rotate(q), rotate(k).repeat(2, axis=1), v.repeat(2, axis=1)
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(size)
        scores[:, np.triu(np.ones((len(ids), len(ids)), dtype=bool), 1)] = -np.inf
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        x = x + np.einsum("nts,snh->tnh", share, v).reshape(len(ids), -1) @ w["attn.W_O"]
        h = norm(x, w["norm2.gamma"])
        gate = h @ w["ffn.W1"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn.W3"])) @ w["ffn.W2"]
    return norm(x, weights["norm_f.gamma"]) @ weights["E"].T
