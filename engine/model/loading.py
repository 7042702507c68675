"""LoadConfig: how a model's weights are loaded; formats of those that a load rounds; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Final

from engine.errors import ConfigError
from engine.model.formats import Format
from engine.model.quantised import ROUTERS, Quantisation
from engine.model.routing import check_routing
from engine.model.schemes import LINEAR, ROUNDED, Scheme
from engine.model.spec import ModelSpec
from engine.sealed import Sealed, choice

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


LOAD_FORMATS: Final = ("auto", "safetensors", "dummy")


@dataclass(kw_only=True)
class LoadConfig(Sealed):
    """How a model's weights are loaded."""

    section: ClassVar = "model"
    load_format: str = choice(LOAD_FORMATS, "auto")
    """auto (safetensors) | safetensors | dummy (random weights of the exact shape, no download)."""
    keep_lossless: bool = False
    """Keep what a load packs (engine.weight_format) in TIGHTFIT_HOME/lossless, at 0.75 of its size;
    later loads read that."""
    quantize: str | None = choice(tuple(BITS), None)
    """int8 | int4: round plain weights to integers at the load (to the nearest, groups of 128);
    embedding and head stay plain, and tokens differ from those of the checkpoint. null: weights
    stay as they are."""
    routing: str | None = None
    """Experts of dummy weights: dummy (null; what a random router chooses, without locality) |
    trace:FILE (as recorded) | synthetic:REUSE (a share of picks, 0 to 1, repeats an expert of the
    last 8 tokens)."""

    def check(self) -> None:
        """Raise ConfigError when a field has no effect beside another."""
        check_routing(self.routing, self.load_format)
        if self.keep_lossless and self.load_format == "dummy":
            raise ConfigError(
                "model.keep_lossless: expected false with load_format=dummy, got true: random "
                "weights are made anew each time. Remove it."
            )

    def loading(self) -> dict[str, Any]:
        """Return how the weights are loaded, as keywords of each class that has these fields."""
        return {item.name: getattr(self, item.name) for item in fields(LoadConfig)}
