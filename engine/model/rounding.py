"""Plain weights that a load rounds to integers of groups of columns (model.quantize); no torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from engine.errors import ConfigError
from engine.model.formats import Format
from engine.model.quantised import ROUTERS, Quantisation
from engine.model.schemes import LINEAR, ROUNDED, Scheme
from engine.model.spec import ModelSpec

GROUP: Final = 128
"""Columns of one scale."""
BITS: Final[Mapping[str, int]] = MappingProxyType({"int8": 8, "int4": 4})
"""Values of model.quantize -> bits of a value."""


def described(quantize: str | None) -> str | None:
    """Return what records call it."""
    return None if quantize is None else f"{quantize} (round to nearest, group {GROUP})"


def weight_formats(quantize: str | None, spec: ModelSpec, dtype: str) -> Mapping[str, Format]:
    """Return the formats of those tensors that are not plain: quantised ones, or rounded ones.

    A load rounds every matrix of a layer but routers. Embedding and head stay as they are, which
    most quantised checkpoints leave plain too. A scale has the dtype of the checkpoint.

    Args:
        quantize: A key of BITS; None: nothing is rounded.
        spec: Sizes of the model.
        dtype: What the engine computes in.

    Raises:
        ConfigError: The checkpoint is quantised already, or keeps experts in another order.
    """
    if quantize is None:
        return spec.formats(dtype)
    if spec.quantization:
        raise ConfigError(
            f"model.quantize={quantize}: expected a checkpoint of plain weights, got one that is "
            f"quantised ({spec.quantization['method']}). Remove model.quantize, or choose the "
            "bfloat16, float16 or float32 checkpoint."
        )
    if spec.formats(dtype):
        raise ConfigError(
            f"model.quantize={quantize}: expected matrices row after row, got experts of "
            f"{spec.model_type} in another order; not supported. Remove model.quantize, or choose "
            "the MXFP4 checkpoint."
        )
    scheme = Scheme(ROUNDED, BITS[quantize], GROUP, spec.dtype)
    rounded = Quantisation(quantize, (((LINEAR,), scheme),), ("lm_head", *ROUTERS))
    return spec.formats(dtype, rounded)
