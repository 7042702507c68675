"""Quantised checkpoints of tiny models, and what a slow reading of each format gives."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.model.formats import EMBEDDING, HEAD, TensorSpec
from kernels.arguments import Joined, Quantised
from kernels.ops import quantised
from tests.tiny import hf_model, save

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Arrays = dict[str, torch.Tensor]
Maker = Callable[[torch.Tensor, torch.Generator], tuple[Arrays, torch.Tensor]]
"""From a weight [N, K] to arrays of a checkpoint by suffix, and the weight that they mean."""


@dataclass(frozen=True)
class Way:
    """How a checkpoint is quantised."""

    config: dict[str, Any]
    """The content of quantization_config."""
    make: Maker


def _rounded(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to the nearest; return values 0 to 2^bits - 1, zeros and scales, [N, K] and [N, G]."""
    rows, columns = weight.shape
    most = 2**bits - 1
    groups = weight.view(rows, -1, group or columns)
    if symmetric:
        scale = (groups.abs().amax(-1) * 2 / most).clamp(min=1e-5).to(dtype)
        zero = torch.full_like(scale, 2 ** (bits - 1)).float()
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / most).clamp(min=1e-5).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, most)
    values = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, most)
    return values.view(rows, columns).long(), zero.long(), scale


def _packed(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack along the last dimension into int32, one value after the other."""
    count = 32 // bits
    order = order or tuple(range(count))
    parts = values.view(*values.shape[:-1], -1, count)
    words = torch.zeros(parts.shape[:-1], dtype=torch.int64)
    for at, column in enumerate(order):
        words |= parts[..., column] << bits * at
    return (words - (words >> 31 << 32)).int()


def awq(group: int) -> Way:
    """Return AWQ's gemm layout."""

    def make(weight: torch.Tensor, _: torch.Generator) -> tuple[Arrays, torch.Tensor]:
        values, zero, scale = _rounded(weight, 4, group, symmetric=False, dtype=torch.float16)
        size = group if group > 0 else weight.shape[1]
        meant = (values - zero.repeat_interleave(size, 1)) * scale.double().repeat_interleave(
            size, 1
        )
        return {
            "qweight": _packed(values.T.contiguous(), 4, AWQ_ORDER),
            "qzeros": _packed(zero.T.contiguous(), 4, AWQ_ORDER),
            "scales": scale.T.contiguous(),
        }, meant

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
    }
    return Way(config, make)


def gptq(
    bits: int,
    group: int,
    *,
    version: str = "gptq",
    symmetric: bool = False,
    ordered: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Way:
    """Return a layout of GPTQ."""

    def make(weight: torch.Tensor, rng: torch.Generator) -> tuple[Arrays, torch.Tensor]:
        columns = weight.shape[1]
        size = group if group > 0 else columns
        order = torch.randperm(columns, generator=rng) if ordered else torch.arange(columns)
        values, zero, scale = _rounded(
            weight[:, order], bits, size, symmetric=symmetric, dtype=dtype
        )
        if version == "gptq":
            zero = zero.clamp(min=1)  # the first version cannot say 0
        back = order.argsort()
        groups = (torch.arange(columns) // size)[back]
        values = values[:, back]
        meant = (values - zero[:, groups]) * scale.double()[:, groups]
        stored = zero - 1 if version == "gptq" else zero
        return {
            "qweight": _packed(values, bits).T.contiguous(),
            "qzeros": _packed(stored.T.contiguous(), bits),
            "scales": scale.T.contiguous(),
            "g_idx": groups.int(),
        }, meant

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": ordered,
        "sym": symmetric,
        "checkpoint_format": version,
    }
    return Way(config, make)


def _compressed(kind: str, weights: dict[str, Any], make: Maker) -> Way:
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return Way(config, make)


def packed(
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    ordered: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Way:
    """Return pack-quantized of compressed-tensors; a group of -1 is a row."""

    def make(weight: torch.Tensor, rng: torch.Generator) -> tuple[Arrays, torch.Tensor]:
        rows, columns = weight.shape
        size = group if group > 0 else columns
        order = torch.randperm(columns, generator=rng) if ordered else torch.arange(columns)
        values, zero, scale = _rounded(
            weight[:, order], bits, size, symmetric=symmetric, dtype=dtype
        )
        groups = (torch.arange(columns) // size)[order.argsort()]
        values = values[:, order.argsort()]
        meant = (values - zero[:, groups]) * scale.double()[:, groups]
        arrays = {
            "weight_packed": _packed(values, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            arrays["weight_zero_point"] = _packed(zero.T.contiguous(), bits).T.contiguous()
        if ordered:
            arrays["weight_g_idx"] = groups.int()
        return arrays, meant

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group > 0 else "channel",
        "group_size": group if group > 0 else None,
        "actorder": "group" if ordered else None,
    }
    return _compressed("pack-quantized", weights, make)


def int8(*, symmetric: bool = True) -> Way:
    """Return int-quantized of compressed-tensors."""

    def make(weight: torch.Tensor, _: torch.Generator) -> tuple[Arrays, torch.Tensor]:
        values, zero, scale = _rounded(
            weight, 8, weight.shape[1], symmetric=symmetric, dtype=torch.bfloat16
        )
        arrays = {"weight": (values - 128).to(torch.int8), "weight_scale": scale}
        if not symmetric:
            arrays["weight_zero_point"] = (zero - 128).to(torch.int8)
        return arrays, (values - zero) * scale.double()

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    return _compressed("int-quantized", weights, make)


def float8(strategy: str, dtype: torch.dtype = torch.float32, method: str = "") -> Way:
    """Return float-quantized of compressed-tensors, or the method fp8."""
    block = {"block": (32, 64), "channel": (1, 0), "tensor": (0, 0)}[strategy]

    def make(weight: torch.Tensor, _: torch.Generator) -> tuple[Arrays, torch.Tensor]:
        rows, columns = weight.shape
        high, wide = block[0] or rows, block[1] or columns
        tiles = weight.view(-1, high, columns // wide, wide)
        scale = (tiles.abs().amax((1, 3)) / 448).to(dtype)
        spread = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
        values = (weight / spread.float()).to(torch.float8_e4m3fn)
        suffix = "weight_scale_inv" if method and strategy == "block" else "weight_scale"
        if strategy == "tensor":
            scale = scale.view(()) if method else scale.view(1)
        arrays = {"weight": values, suffix: scale, "input_scale": torch.ones(1)}
        return arrays, values.float() * spread.float()

    if method:
        size = {"weight_block_size": list(block)} if strategy == "block" else {}
        return Way({"quant_method": method, "activation_scheme": "dynamic", **size}, make)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights |= {"block_structure": list(block)} if strategy == "block" else {}
    return _compressed("float-quantized", weights, make)


NF4_MAP = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ]
)


def nf4(*, nested: bool) -> Way:
    """Return bitsandbytes' 4 bits, with scales of their own scales."""

    def make(weight: torch.Tensor, rng: torch.Generator) -> tuple[Arrays, torch.Tensor]:
        blocks = weight.reshape(-1, 64)
        scale = blocks.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": 64,
            "dtype": "float32",
            "shape": list(weight.shape),
        }
        arrays: Arrays = {"weight.absmax": scale}
        if nested:
            offset = scale.mean()
            code = torch.rand(256, generator=rng).sort().values * 2 - 1
            rest = scale - offset
            padded = torch.nn.functional.pad(rest, (0, -rest.numel() % 256)).view(-1, 256)
            own = padded.abs().amax(1)
            spread = own.repeat_interleave(256)[: rest.numel()]
            found = ((rest / spread)[:, None] - code).abs().argmin(1)
            arrays = {
                "weight.absmax": found.to(torch.uint8),
                "weight.nested_absmax": own,
                "weight.nested_quant_map": code,
            }
            scale = code[found] * spread + offset
            state |= {"nested_blocksize": 256, "nested_offset": offset.item()}
        chosen = ((blocks / scale[:, None])[..., None] - NF4_MAP).abs().argmin(-1).view(-1)
        text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        arrays |= {
            "weight": (chosen[::2] << 4 | chosen[1::2]).to(torch.uint8).view(-1, 1),
            "weight.quant_map": NF4_MAP.clone(),
            "weight.quant_state.bitsandbytes__nf4": text.clone(),
        }
        return arrays, (NF4_MAP[chosen].view(-1, 64) * scale[:, None]).view(weight.shape)

    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": "uint8",
    }
    return Way(config, make)


COMPRESSED: dict[str, Way] = {
    "packed 4, groups of 64": packed(4, 64),
    "packed 4, zero points, float16": packed(4, 32, symmetric=False, dtype=torch.float16),
    "packed 4, in order of activations": packed(4, 64, ordered=True),
    "packed 8, whole rows": packed(8, -1),
    "packed 8, zero points": packed(8, 64, symmetric=False),
    "int8": int8(),
    "int8, zero points": int8(symmetric=False),
    "float8 of rows": float8("channel", torch.bfloat16),
    "float8 of matrices": float8("tensor"),
    "float8 of blocks": float8("block"),
}
WAYS: dict[str, Way] = COMPRESSED | {
    "nf4": nf4(nested=False),
    "nf4, nested": nf4(nested=True),
    "fp8 of matrices": float8("tensor", method="fp8"),
    "fp8 of blocks": float8("block", method="fp8"),
    "awq, groups of 32": awq(32),
    "awq, groups of 64": awq(64),
    "gptq 4, groups of 64": gptq(4, 64),
    "gptq 4, v2, in order of activations": gptq(4, 64, version="gptq_v2", ordered=True),
    "gptq 4, symmetric, whole rows": gptq(4, -1, symmetric=True),
    "gptq 8, v2": gptq(8, 32, version="gptq_v2"),
    "gptq 8, v1, in order of activations": gptq(8, 64, ordered=True, symmetric=True),
    "gptq 4, bfloat16": gptq(4, 32, dtype=torch.bfloat16),
}


def write(
    folder: Path,
    way: Way,
    variant: str = "llama",
    *,
    keep: tuple[str, ...] = (),
    dtype: str = "float32",
    **changes: Any,
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """Write a tiny model quantised, and once more plain with the weights that this means.

    Args:
        folder: For both.
        way: How.
        variant: Of tests.tiny.
        keep: Modules that stay plain.
        dtype: Of what stays plain.
        changes: Of the sizes.

    Returns:
        The quantised folder, the plain one in float32, and the weights of quantised modules.
    """
    model = hf_model(variant, **(SIZES | changes))
    plain = save(model, folder / "plain")
    quantised_folder = folder / "quantised"
    shutil.copytree(plain, quantised_folder)
    rng = torch.Generator().manual_seed(5)
    tensors, meant = load_file(plain / "model.safetensors"), {}
    stored = {name: each.to(getattr(torch, dtype)) for name, each in tensors.items()}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        is_router = module.endswith((".gate", ".shared_expert_gate"))
        if weight.dim() != 2 or name in {EMBEDDING, HEAD} or module in keep or is_router:
            continue
        arrays, meant[name] = way.make(weight, rng)
        del stored[name]
        stored |= {f"{module}.{suffix}": each for suffix, each in arrays.items()}
        tensors[name] = meant[name].float()
        assert (tensors[name] - weight).abs().max() < 0.5 * weight.abs().max()
    save_file(stored, quantised_folder / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    change_config(quantised_folder, quantization_config=way.config, dtype=dtype)
    return quantised_folder, plain, meant


def change_config(folder: Path, **changes: Any) -> None:
    """Change keys of a config.json; None removes one."""
    file = folder / "config.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def _restored(operand: Any) -> torch.Tensor:
    if isinstance(operand, Joined):
        return torch.cat([_restored(part) for part in operand.parts])
    if isinstance(operand, torch.Tensor):
        return operand
    assert isinstance(operand, Quantised)
    weight = quantised.restore(operand)
    if operand.columns is not None:
        weight = torch.empty_like(weight).index_copy_(1, operand.columns.long(), weight)
    return weight


def read_back(llm: LLM, num_tokens: int = 1) -> dict[str, torch.Tensor]:
    """Return what products of a step would read of quantised tensors, restored, by parameter."""
    assert llm._engine is not None
    store, found = llm._engine.store, {}
    operands: dict[str, Any] = {}
    store.begin_step(num_tokens)
    for layer in range(llm.spec.num_hidden_layers):
        for short, operand in store.acquire(layer).items():
            if isinstance(operand, Quantised | Joined):
                operands[f"model.layers.{layer}.{short}"] = _restored(operand).clone()
        store.release(layer)
    for name in (EMBEDDING, HEAD):
        if name in llm.plan.formats.others:
            operands[name] = _restored(store.outer(name)).clone()
    store.end_step()
    specs: Mapping[str, TensorSpec] = {tensor.name: tensor for tensor in llm.spec.tensors()}
    for name, weight in operands.items():
        row = 0
        for part in specs[name].parts:
            found[part.name] = weight[row : row + part.shape[0]]
            row += part.shape[0]
    return found
