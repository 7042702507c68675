"""Experts in host memory made real: banks of slots on the GPU, and counts of what is read in place.

T tokens, k experts of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from kernels.expert_arguments import ExpertArrays, ExpertCache
from kernels.ops import expert_cache
from kernels.sizes import num_expert_parts

ROUTED: Final = "mlp.experts.routed"
"""Short name, among a layer's tensors, of its RoutedExperts; none where all lie on the GPU."""


class RoutedExperts(Protocol):
    """Brings experts to where a layer's matrices of experts have them, or counts them there."""

    @property
    def arriving(self) -> ExpertCache | None:
        """Whose missing experts may still be copied when products begin."""

    def parts(self, ids_Tk: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield for each part of a step the blocks of rows of its experts, int32 [T, k].

        -1 where an expert is of another part. A part's products must be enqueued before the next
        one is asked for.

        Stream: enqueued on the current stream; waits for nothing.
        """


class CountedExperts:
    """Experts that are read in place: one part, its blocks are the experts themselves."""

    arriving: ExpertCache | None = None

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache

    def parts(self, ids_Tk: torch.Tensor) -> Iterator[torch.Tensor]:
        """Count each expert once, and yield the ids."""
        expert_cache.count_routed(ids_Tk, self._cache)
        yield ids_Tk


class ExpertBank:
    """The slots of one layer, and the experts in host memory that are copied into them."""

    def __init__(self, cache: ExpertCache, arrays: ExpertArrays) -> None:
        self.cache, self.arrays = cache, arrays

    @property
    def arriving(self) -> ExpertCache:
        """Its state: experts are copied beside the products with others."""
        return self.cache

    def parts(self, ids_Tk: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give slots to the experts of each part and copy those that are missing."""
        cache = self.cache
        count = num_expert_parts(ids_Tk.numel(), cache.num_experts, cache.num_slots)
        for part in range(count):
            slots = expert_cache.claim(ids_Tk, part, cache)
            expert_cache.gather(self.arrays, cache)
            yield slots


class CachedUnits:
    """The experts of all layers that have a bank, in the order of the layers."""

    copied_bytes = 0
    """Experts count apart, on the device."""
    in_place_bytes = 0

    def __init__(self, banks: Sequence[ExpertBank], operands: Sequence[Mapping[str, Any]]) -> None:
        self.banks = banks
        self._places = [
            [{**each, ROUTED: bank}] for bank, each in zip(banks, operands, strict=True)
        ]
        self._is_within = False
        """A step has begun and not ended."""

    def places(self, k: int) -> Sequence[Mapping[str, Any]]:
        """Return what `acquire` of layer k chooses from: its bank."""
        return self._places[k]

    def begin_step(self, *, is_staged: bool) -> None:  # noqa: ARG002
        """Forget what is in the slots if a step failed: some may be claimed and not filled."""
        if self._is_within:
            for bank in self.banks:
                bank.cache.forget()
        self._is_within = True

    def acquire(self, k: int) -> int:  # noqa: ARG002
        """Return the number of the only place."""
        return 0

    def release(self, k: int) -> None:
        """Nothing is copied ahead."""

    def end_step(self) -> None:
        """Say that all of the step is enqueued."""
        self._is_within = False
