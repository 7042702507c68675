"""Which products of which layers are taken to free so many bytes. Pure arithmetic, no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from engine.placement import spread_layers
from engine.plan import align
from engine.spec import ModelSpec

QKV, OUT, GATE_UP, DOWN = (
    "self_attn.qkv_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_up_proj.weight",
    "mlp.down_proj.weight",
)
GRANULES: Final = {
    "whole layers": (),
    "mlp": (GATE_UP, DOWN),
    "attention products": (QKV, OUT),
    "mlp.gate_up_proj": (GATE_UP,),
    "mlp.down_proj": (DOWN,),
    "self_attn.qkv_proj": (QKV,),
    "self_attn.o_proj": (OUT,),
}
"""What is taken of a layer; nothing named: all of it."""


@dataclass(frozen=True)
class Granules:
    """The tensors of a layer; all layers are alike.

    Args:
        tensors: Short name -> bytes.
        num_layers: Of the model.
    """

    tensors: Mapping[str, int]
    num_layers: int

    def size(self, items: tuple[str, ...]) -> int:
        """Return the bytes of some tensors of one layer."""
        return sum(self.tensors[item] for item in items)

    def take(
        self, need: int, name: str, slots: int, *, or_all: bool
    ) -> list[tuple[str, ...]] | None:
        """Return what is taken of each layer so that `need` bytes are freed beside the slots.

        As few layers as do, at even distances; the last of them in part where that is enough.

        Args:
            need: Bytes; nothing is taken for none.
            name: Of a granule.
            slots: That hold as much as one layer gives, on the GPU.
            or_all: Take all whole layers where they are not enough.

        Returns:
            None where there are too few layers.
        """
        whole = GRANULES[name] or tuple(self.tensors)
        taken: list[tuple[str, ...]] = [()] * self.num_layers
        if need <= 0:
            return taken
        count = slots + math.ceil(need / self.size(whole))
        if count > self.num_layers:
            return [whole] * self.num_layers if or_all and not GRANULES[name] else None
        places = spread_layers(self.num_layers, count)
        for layer in places:
            taken[layer] = whole
        taken[places[-1]] = self._part(whole, need - (count - 1 - slots) * self.size(whole))
        return taken

    def _part(self, whole: tuple[str, ...], least: int) -> tuple[str, ...]:
        """Return the fewest bytes of products that reach `least`, or the whole."""
        products = [item for item in whole if item in {QKV, OUT, GATE_UP, DOWN}]
        options = [
            items
            for count in range(1, len(products) + 1)
            for items in combinations(products, count)
        ]
        enough = [items for items in options if self.size(items) >= least]
        part = min(enough, key=self.size, default=whole)
        return whole if len(part) == len(products) else part


def granules_of(spec: ModelSpec, dtype_bytes: int) -> Granules:
    """Return those of a model, each tensor aligned as a slab holds it."""
    tensors = {
        tensor.name.split(".", 3)[3]: align(tensor.numel * dtype_bytes)
        for tensor in spec.layer_tensors(0)
    }
    return Granules(tensors, spec.num_hidden_layers)
