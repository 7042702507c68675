"""What the pool of two tiers returns and counts."""

from dataclasses import dataclass, fields
from typing import Literal

Tier = Literal["gpu", "cpu"]
"""Where a block lies."""
Room = Literal["gpu", "either"]
"""Where new blocks may come from; either: from the host tier what the GPU has not."""
Retain = Literal["demote", "drop", "forget"]
"""What becomes of content without an owner: findable, and stored when its GPU block is taken;
findable until its GPU block is taken; gone at once in both tiers."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest run of leading blocks that are findable now; changes nothing."""

    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    """One block for each key, of the GPU where both tiers have it."""
    num_asked: int
    """Blocks that could have been found."""
    version: int
    """Counts changes of what is findable; while it stays, so does this."""

    def cut(self, num_blocks: int, *, missed: int) -> "Match":
        """Return the first blocks of it, with so many that were asked for beside them."""
        blocks = self.blocks[:num_blocks]
        return Match(self.keys[:num_blocks], blocks, len(blocks) + missed, self.version)


@dataclass(frozen=True, slots=True)
class Claim:
    """Blocks of a sequence that begins or goes on."""

    blocks: list[int]
    """Its block table: the blocks found."""
    pending: frozenset[int]
    """Moves in flight that bring this content; until they are complete it must not be read."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """Blocks of one tier by what they are; the four add up to the tier's size."""

    owned: int
    cached: int
    """Without an owner, findable."""
    free: int
    in_transit: int
    """Host blocks without an owner that a move in flight reads or writes."""


@dataclass(kw_only=True)
class PoolStats:
    """Counts of blocks since the pool was made."""

    hits_gpu: int = 0
    """Found on the GPU, those included that a move already brings."""
    hits_loaded: int = 0
    """Found in the host tier and brought to the GPU."""
    hits_in_place: int = 0
    """Found in the host tier and read there."""
    hits_unseen_gpu: int = 0
    """Blocks of prefixes behind which a sequence begins that no later token sees, so that they need
    not be there; the first block that is seen was found on the GPU, or there is none."""
    hits_unseen_cpu: int = 0
    """The same, where that block was found in the host tier."""
    misses: int = 0
    """Asked for and not found."""
    swapped_in_gpu: int = 0
    """Blocks of sequences that go on after a preemption, still on the GPU."""
    swapped_in_loaded: int = 0
    """The same, brought back."""
    swapped_in_in_place: int = 0
    """The same, read in the host tier."""
    lost: int = 0
    """The same, not found, so computed again."""
    swapped_out: int = 0
    """Blocks of preempted sequences, findable when those had lost them."""
    stores: int = 0
    """Moves to the host tier."""
    loads: int = 0
    """Moves from it."""
    stores_ahead: int = 0
    """Stores made before their block was needed."""
    stores_skipped: int = 0
    """Contents that were to be stored and found no host block."""
    evicted_kept: int = 0
    """GPU contents that gave way and stay in the host tier."""
    evicted_lost: int = 0
    """GPU contents that gave way and are gone."""
    evicted_spare: int = 0
    """Host contents that gave way and are on the GPU too."""
    evicted_cpu: int = 0
    """Host contents that gave way and are gone."""
    duplicates: int = 0
    """Blocks whose content was findable in the same tier when they became full; not findable
    themselves."""

    def count_claim(
        self, on_gpu: int, loaded: int, in_place: int, missed: int, *, resumed: bool
    ) -> None:
        """Count the blocks of one claim."""
        if resumed:
            self.swapped_in_gpu += on_gpu
            self.swapped_in_loaded += loaded
            self.swapped_in_in_place += in_place
            self.lost += missed
        else:
            self.hits_gpu += on_gpu
            self.hits_loaded += loaded
            self.hits_in_place += in_place
            self.misses += missed

    @property
    def hits_cpu(self) -> int:
        """Found in the host tier."""
        return self.hits_loaded + self.hits_in_place

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}
