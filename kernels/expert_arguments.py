"""What operators of cached experts take: the state of a bank, and what is copied into its slots.

Shape letters: E experts, S slots, A arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertCache:
    """Which experts of a layer lie in the slots of its bank; all tensors lie on the device.

    Attributes:
        expert_of_slot: int32 [S], -1 where a slot is empty.
        slot_of_expert: int32 [E], -1 where an expert is in no slot.
        last_used: int64 [S], the tick in which a slot was used last, 0: never.
        tick: int64 [1], calls so far.
        wanted: int64 [E], the tick in which an expert was last routed to.
        served: int64 [E], the tick in which an expert was last given a slot, or found in one.
        missing: int32 [S, 2], of the newest call: experts that are not in their slots yet, and
            those slots.
        num_missing: int32 [1], how many those are.
        copied: int32 [2], of the newest call: programs that have copied their share of all missing
            experts' first matrices, and of their second ones, as each of EXPERT_COPIERS does.
        multiplied: int32 [S], of the newest call: rows of each first matrix that are multiplied.
        counts: int64 [2], experts that were found in slots so far, and others.
    """

    expert_of_slot: torch.Tensor
    slot_of_expert: torch.Tensor
    last_used: torch.Tensor
    tick: torch.Tensor
    wanted: torch.Tensor
    served: torch.Tensor
    missing: torch.Tensor
    num_missing: torch.Tensor
    copied: torch.Tensor
    multiplied: torch.Tensor
    counts: torch.Tensor

    @property
    def num_experts(self) -> int:
        """E."""
        return self.slot_of_expert.shape[0]

    @property
    def num_slots(self) -> int:
        """S."""
        return self.expert_of_slot.shape[0]

    def forget(self) -> None:
        """Say that every slot is empty; what was counted stays.

        Stream: enqueued on the current stream.
        """
        self.expert_of_slot.fill_(-1)
        self.slot_of_expert.fill_(-1)
        self.last_used.zero_()


def expert_cache(
    num_experts: int, num_slots: int, memory: torch.Tensor, counts: torch.Tensor
) -> ExpertCache:
    """Make the state of a cache whose slots are empty.

    Args:
        num_experts: of the layer.
        num_slots: of its bank; 0 where experts are only counted.
        memory: uint8 [expert_cache_bytes(num_experts, num_slots)], at a multiple of 8 bytes.
        counts: as the attribute; stays as it is.
    """
    memory.zero_()
    longs, at = memory.view(torch.int64), 0
    found = {"counts": counts}
    sizes = {"last_used": num_slots, "tick": 1, "wanted": num_experts, "served": num_experts}
    for name, size in sizes.items():
        found[name] = longs[at : at + size]
        at += size
    ints, at = longs[at:].view(torch.int32), 0
    for name, size in {
        "expert_of_slot": num_slots,
        "slot_of_expert": num_experts,
        "missing": 2 * num_slots,
        "num_missing": 1,
        "copied": 2,
        "multiplied": num_slots,
    }.items():
        found[name] = ints[at : at + size]
        at += size
    cache = ExpertCache(**found | {"missing": found["missing"].view(num_slots, 2)})
    cache.forget()
    return cache


@dataclass(frozen=True, slots=True)
class ExpertArrays:
    """Arrays with a part for each expert, and those of a bank with a part for each slot.

    Attributes:
        sources: uint8 [E, n] each, contiguous, of any n; on a GPU also CUDA tensors over pinned
            host memory.
        targets: uint8 [S, n] each, contiguous, with the n of its source.
        num_first: how many of them, from the first on, are of the first matrix of each expert; less
            than A.
        width: bytes that are copied at a time: 16 or 4 where all parts are multiples of it, else 1.
        table: int64 [A, 3] on the device: where a source and its target begin, and n / width.
    """

    sources: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    num_first: int
    width: int
    table: torch.Tensor

    @classmethod
    def of(
        cls, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], num_first: int
    ) -> "ExpertArrays":
        """Make the table; it waits for the device.

        Args:
            sources: as the attribute, but of any dtype and shape behind the first dimension.
            targets: likewise.
            num_first: as the attribute.
        """
        read, written = ([_bytes_of(each) for each in every] for every in (sources, targets))
        ends = [
            (s.shape[1], s.data_ptr(), t.data_ptr()) for s, t in zip(read, written, strict=True)
        ]
        width = next(w for w in (16, 4, 1) if not any(n % w for each in ends for n in each))
        rows = [[source, target, size // width] for size, source, target in ends]
        table = torch.tensor(rows, dtype=torch.int64).to(written[0].device)
        return cls(tuple(read), tuple(written), num_first, width, table)

    def __post_init__(self) -> None:
        """Raise ValueError unless the arrays are those of one bank."""
        if not 0 <= self.num_first < len(self.sources):
            raise ValueError(
                f"experts: expected 0 to {len(self.sources) - 1} arrays of first matrices and "
                f"others behind them, got {self.num_first} of {len(self.sources)}."
            )
        experts, slots = self.num_experts, self.num_slots
        for source, target in zip(self.sources, self.targets, strict=True):
            got = source.shape, target.shape
            if got != ((experts, source.shape[1]), (slots, source.shape[1])):
                raise ValueError(
                    f"experts: expected arrays of {experts} experts and {slots} slots with equal "
                    f"parts, got shapes {tuple(got[0])} and {tuple(got[1])}."
                )

    @property
    def num_experts(self) -> int:
        """E."""
        return self.sources[0].shape[0]

    @property
    def num_slots(self) -> int:
        """S."""
        return self.targets[0].shape[0]


def _bytes_of(array: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each part of a contiguous array."""
    if not array.is_contiguous():
        raise ValueError(f"experts: expected contiguous arrays, got strides {array.stride()}.")
    return array.view(array.shape[0], -1).view(torch.uint8)
