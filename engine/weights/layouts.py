"""From the arrays of a quantised checkpoint to those of kernels.arguments.Quantised.

Shape letters: N rows, K columns, G groups of columns.
"""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from engine.errors import CheckpointError
from engine.model.quantised import Source
from engine.model.schemes import (
    EXPERT_ROWS,
    GGUF_NORM,
    GGUF_ROWS,
    GGUF_TYPES,
    MXFP4,
    ROUNDED,
    ROWS_BIAS,
)
from kernels.ops import quantised

Arrays = dict[str, torch.Tensor]
WHOLE: Final = ("columns", "table")
"""Arrays that all rows have in common."""
NF4: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of bitsandbytes' nf4."""
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLES: Final = MappingProxyType({"nf4": NF4, MXFP4: (*_E2M1, *(-each for each in _E2M1))})
"""The values that 4 bits choose from, by layout."""
_NESTED_BLOCK: Final = 256
"""Scales that have a scale of their own there."""
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, among eight, of each nibble of a word."""


def make(
    source: Source, stored: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor]
) -> None:
    """Make some rows of a tensor, and copy them into place.

    Args:
        source: What they are.
        stored: Arrays of the checkpoint by suffix, on the device that makes them.
        views: Arrays of the tensor, on any device.

    Raises:
        CheckpointError: The arrays contradict each other.
    """
    made, row = _MAKERS[source.scheme.layout](source, stored), source.row
    if any(not _is_finite(made[name]) for name in ("scale", "low") if name in made):
        raise CheckpointError(
            f"{source.parameters[0][1].name}: expected finite scales, got some that are not. Fetch "
            "the checkpoint again."
        )
    for name, each in (in_tiles(made, source.scheme.bits) if "values" in made else made).items():
        view = views[source.prefix + name]
        place = view if name in WHOLE else view[row : row + len(each)]
        place.copy_(each, non_blocking=True)


def _is_finite(scales: torch.Tensor) -> bool:
    """Whether all scales are; 255 is the NaN of e8m0, which is read as uint8."""
    return bool((scales != 255 if scales.dtype == torch.uint8 else scales.isfinite()).all())


def in_tiles(made: Mapping[str, torch.Tensor], bits: int) -> Arrays:
    """Put arrays that lie row after row into the order of kernels.arguments.Quantised.

    Args:
        made: Its arrays by name, [N, G]; `values` uint8 [N, K], of all bits.
        bits: Bits of a value.
    """
    values, high = quantised.pack(made["values"], bits)
    found = {"values": values} | ({} if high is None else {"high": high})
    for name, each in made.items():
        if name != "values":
            found[name] = each if name in WHOLE else quantised.pack_groups(each)
    return found


def split(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Split int32 into the values in them, the lowest bits first, along a new last dimension.

    Args:
        words: int32 [..., W], contiguous.
        bits: 4 or 8.

    Returns:
        uint8 [..., W, 32 / bits].
    """
    found = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 8:
        return found
    return torch.stack([found & 15, found >> 4], -1).flatten(-2)


def _awq(_: Source, stored: Mapping[str, torch.Tensor]) -> Arrays:
    order = torch.tensor(_AWQ_ORDER).argsort().to(stored["qweight"].device)

    def columns_of(words: torch.Tensor) -> torch.Tensor:
        """Unpack [X, N / 8] to [N, X]."""
        return split(words, 4).index_select(-1, order).flatten(-2).T.contiguous()

    return {
        "values": columns_of(stored["qweight"]),
        "zero": columns_of(stored["qzeros"]),
        "scale": stored["scales"].T,
    }


def _gptq(source: Source, stored: Mapping[str, torch.Tensor]) -> Arrays:
    scheme, columns, bits = source.scheme, source.shape[1], source.scheme.bits
    values = split(stored["qweight"], bits)  # [K / n, N, n]
    values = values.permute(1, 0, 2).reshape(source.shape)
    zeros = split(stored["qzeros"], bits).flatten(-2).T  # [N, G]
    if scheme.zeros_from_one:
        zeros = zeros + 1 & 2**bits - 1
    found = {"zero": zeros, "scale": stored["scales"].T}
    if not scheme.index_dtype:
        return found | {"values": values}
    groups = stored["g_idx"].long()
    in_order = torch.arange(columns, device=groups.device) // (scheme.group or columns)
    if not scheme.ordered:
        if not torch.equal(groups, in_order):
            raise _odd_groups(source, "config.json has desc_act=false: they follow each other")
        return found | {"values": values}
    places = _places(source, groups)
    return found | {"values": values.index_select(1, places), "columns": places.int()}


def _by_columns(each: torch.Tensor, source: Source) -> torch.Tensor:
    """Return what belongs to blocks of rows, for every row: [N, G]."""
    num_rows, rows = source.shape[0], source.scheme.rows
    if not rows:
        return each.reshape(1, 1).expand(num_rows, 1)
    return each if rows == 1 else each.repeat_interleave(rows, 0)[:num_rows]


def _packed(source: Source, stored: Mapping[str, torch.Tensor]) -> Arrays:
    scheme, (num_rows, columns) = source.scheme, source.shape
    shape = stored["weight_shape"].tolist()
    if shape != [num_rows, columns]:
        name = source.parameters[0][1].name.rpartition(".")[0]
        raise CheckpointError(
            f"{name}.weight_shape: expected {[num_rows, columns]} as config.json says, got {shape}."
        )
    values = split(stored["weight_packed"], scheme.bits).flatten(-2)[:, :columns]
    found = {"scale": _by_columns(stored["weight_scale"], source)}
    if not scheme.symmetric:
        zeros = split(stored["weight_zero_point"].T, scheme.bits).flatten(-2)
        found["zero"] = zeros[:, :num_rows].T
    if scheme.ordered:
        places = _places(source, stored["weight_g_idx"].long())
        values = values.index_select(1, places)
        found["columns"] = places.int()
    return found | {"values": values}


def _bytes(source: Source, stored: Mapping[str, torch.Tensor]) -> Arrays:
    values = stored["weight"].view(torch.uint8)
    found = {"scale": _by_columns(stored["weight_scale"], source)}
    is_integer = source.scheme.layout == "int-quantized"
    # NaN of e4m3 are 127 and 255: the largest bytes with and without a sign.
    if not is_integer and (values.max() == 255) | (values.view(torch.int8).max() == 127):
        raise CheckpointError(
            f"{source.parameters[0][1].name}: expected finite weights, got NaN. Fetch the "
            "checkpoint again."
        )
    if is_integer:
        values = values ^ 128  # from two's complement to an offset of 128
        if "weight_zero_point" in stored:
            zeros = stored["weight_zero_point"].view(torch.uint8) ^ 128
            found["zero"] = _by_columns(zeros, source)
    return found | {"values": values}


def _places(source: Source, groups: torch.Tensor) -> torch.Tensor:
    """Return the columns in the order of their groups."""
    columns, size = source.shape[1], source.scheme.group or source.shape[1]
    places = groups.argsort(stable=True)
    if not torch.equal(groups[places], torch.arange(columns, device=groups.device) // size):
        raise _odd_groups(source, f"each of {size} columns")
    return places


def _odd_groups(source: Source, expected: str) -> CheckpointError:
    name = source.parameters[0][1].name.rpartition(".")[0]
    return CheckpointError(
        f"{name}.g_idx: expected groups of columns as {expected}, got others. The checkpoint is "
        "damaged, or of a kind that is not supported."
    )


def _nf4(source: Source, stored: Mapping[str, torch.Tensor]) -> Arrays:
    rows, columns = source.shape
    name = source.parameters[0][1].name
    text = stored["weight.quant_state.bitsandbytes__nf4"].cpu().numpy().tobytes().decode("latin-1")
    wanted: dict[str, object] = {"quant_type": "nf4", "blocksize": 64, "shape": [rows, columns]}
    if source.scheme.nested:
        wanted["nested_blocksize"] = _NESTED_BLOCK
    try:
        state, _ = json.JSONDecoder().raw_decode(text)
        differs = {key: state.get(key) for key, value in wanted.items() if state.get(key) != value}
        offset = float(state["nested_offset"]) if source.scheme.nested else 0.0
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name}: its quant_state cannot be read ({error!r}).") from error
    if differs:
        raise CheckpointError(f"{name}: its quant_state has {differs}, expected {wanted}.")
    table = stored["weight.quant_map"]
    if not torch.equal(table.cpu(), torch.tensor(NF4)):
        raise CheckpointError(f"{name}.quant_map: expected the values of nf4, got others.")
    raw, scale = stored["weight"].view(rows, -1), stored["weight.absmax"]
    if source.scheme.nested:
        scale = stored["weight.nested_quant_map"][scale.int()]
        blocks = stored["weight.nested_absmax"].repeat_interleave(_NESTED_BLOCK)[: scale.numel()]
        scale = scale * blocks + offset
    values = torch.stack([raw >> 4, raw & 15], 2).view(rows, columns)
    return {"values": values, "scale": scale.view(rows, -1), "table": table}


def _rounded(source: Source, stored: Mapping[str, torch.Tensor]) -> Arrays:
    """Round to the nearest of 2^bits values between the least and the greatest of a group.

    The scale is rounded to its dtype first, and zero is one of the values.
    """
    scheme, (rows, columns) = source.scheme, source.shape
    weight = stored["weight"].to(torch.float32, copy=True)
    if rest := -columns % scheme.group:
        weight = torch.nn.functional.pad(weight, (0, rest))
    groups = weight.view(rows, -1, scheme.group)
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    most = 2**scheme.bits - 1
    # Not by a number, which a GPU multiplies with the inverse of: other bits than a CPU's.
    span = (high - low) / torch.full_like(low, most)
    scale = span.to(stored["weight"].dtype)
    if not torch.isfinite(scale).all():
        name = source.parameters[0][1].name
        raise CheckpointError(
            f"{name}: expected finite weights for model.quantize, got some that are not, or a "
            "group whose range exceeds float32. Set model.quantize=null."
        )
    step = torch.where(scale == 0, 1, scale.float())  # all of such a group is zero
    zero = (-low / step).round_().clamp_(max=most)
    values = groups.div_(step[..., None]).round_().add_(zero[..., None]).clamp_(0, most)
    return {
        "values": values.to(torch.uint8).view(rows, -1)[:, :columns],
        "zero": zero.to(torch.uint8),
        "scale": scale,
    }


def _unrotated(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Put rows that rotate together, which follow each other, half a head apart."""
    if not heads:
        return rows
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _mxfp4(source: Source, stored: Mapping[str, torch.Tensor]) -> Arrays:
    rows = _unrotated(stored["blocks"], source.heads)
    values = torch.stack([rows & 15, rows >> 4], -1).flatten(1)
    return {
        "values": values,
        "scale": _unrotated(stored["scales"], source.heads),
        "table": torch.tensor(TABLES[MXFP4]),
    }


def _expert_rows(source: Source, stored: Mapping[str, torch.Tensor]) -> Arrays:
    return {"": _unrotated(stored["weight"].T, source.heads)}


def _rows_bias(source: Source, stored: Mapping[str, torch.Tensor]) -> Arrays:
    return {"": _unrotated(stored["bias"], source.heads)}


def _gguf_rows(source: Source, stored: Mapping[str, torch.Tensor]) -> Arrays:
    return {"": _unrotated(stored["weight"], source.heads)}


def _gguf_norm(_: Source, stored: Mapping[str, torch.Tensor]) -> Arrays:
    return {"": stored["weight"] - 1}


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return one float16 of each block, [N, B]."""
    return blocks[:, :, start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(blocks: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return values of 4 bits, all low ones of a block first: [N, B, 2 * count]."""
    found = blocks[:, :, start : start + count]
    return torch.cat([found & 15, found >> 4], 2)


def _one_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return 32 values of one bit of each block, [N, B, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (blocks[:, :, start : start + 4, None] >> shifts & 1).flatten(2)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 8 scales and minima of 6 bits of each block of Q4_K and Q5_K, [N, B * 8]."""
    words = blocks[:, :, 4:16]
    first, second, third = words[:, :, :4], words[:, :, 4:8], words[:, :, 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], 2)
    lows = torch.cat([second & 63, third >> 4 | second >> 6 << 4], 2)
    return scales.flatten(1), lows.flatten(1)


def _gguf(source: Source, stored: Mapping[str, torch.Tensor]) -> Arrays:
    word, num_rows = source.scheme.gguf_type, source.shape[0]
    block_bytes = GGUF_TYPES[word][1]
    blocks = _unrotated(stored["weight"], source.heads).view(num_rows, -1, block_bytes)
    if word in {"Q4_K", "Q5_K"}:
        return _k_quant(word, blocks)
    if word == "Q6_K":
        low = blocks[:, :, :128].reshape(num_rows, -1, 2, 64)
        high = blocks[:, :, 128:192].reshape(num_rows, -1, 2, 1, 32)
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(4, 1)
        values = torch.cat([low & 15, low >> 4], 3)  # [N, B, 2, 128]
        values = values | (high >> shifts & 3).flatten(3) << 4
        return {
            "values": values.reshape(num_rows, -1),
            "scale": _halves(blocks, 208),
            "subscale": blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1),
        }
    found = {"scale": _halves(blocks, 0)}
    if word == "Q8_0":
        return found | {"values": (blocks[:, :, 2:] ^ 128).flatten(1)}
    start = 2
    if word in {"Q4_1", "Q5_1"}:
        found["low"], start = -_halves(blocks, 2), 4
    if word in {"Q4_0", "Q4_1"}:
        return found | {"values": _nibbles(blocks, start, 16).flatten(1)}
    values = _nibbles(blocks, start + 4, 16) | _one_bits(blocks, start) << 4
    return found | {"values": values.flatten(1)}


def _k_quant(word: str, blocks: torch.Tensor) -> Arrays:
    scales, lows = _k_scales(blocks)
    found = {
        "scale": _halves(blocks, 0),
        "low": _halves(blocks, 2),
        "subscale": scales.view(torch.int8),
        "sublow": lows,
    }
    start = 16 if word == "Q4_K" else 48
    low = blocks[:, :, start:].reshape(*blocks.shape[:2], 4, 32)
    values = torch.stack([low & 15, low >> 4], 3).flatten(2, 3)  # [N, B, 8, 32]
    if word == "Q5_K":
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
        values = values | (blocks[:, :, None, 16:48] >> shifts & 1) << 4
    return found | {"values": values.flatten(1)}


_MAKERS: Final[Mapping[str, Callable[[Source, Mapping[str, torch.Tensor]], Arrays]]] = (
    MappingProxyType(
        {
            **{f"gguf-{word.lower()}": _gguf for word in GGUF_TYPES},
            ROUNDED: _rounded,
            GGUF_ROWS: _gguf_rows,
            GGUF_NORM: _gguf_norm,
            EXPERT_ROWS: _expert_rows,
            ROWS_BIAS: _rows_bias,
            MXFP4: _mxfp4,
            "awq": _awq,
            "nf4": _nf4,
            "gptq": _gptq,
            "pack-quantized": _packed,
            "int-quantized": _bytes,
            "float-quantized": _bytes,
            "fp8": _bytes,
        }
    )
)
