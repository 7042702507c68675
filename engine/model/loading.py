"""LoadConfig: how a model's weights are loaded, as the catalogue and the engine are asked."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

from engine.errors import ConfigError
from engine.model.rounding import BITS
from engine.model.routing import check_routing
from engine.sealed import Sealed, choice

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
