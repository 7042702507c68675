"""Block ids of one tier of the KV cache and their reference counts. The tensors are elsewhere."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from engine.errors import EngineError


class BlockPool:
    """Hands out block ids of one tier; a block is free again when its last owner frees it.

    Free blocks are handed out in the order in which they became free, at first by id.

    Args:
        num_blocks: Blocks in the tier, at least 1.
        block_size: Tokens in a block, at least 1.
        tier: Where the blocks are, for messages and records.

    Raises:
        EngineError: A size is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int, *, tier: str = "gpu") -> None:
        if num_blocks < 1 or block_size < 1:
            raise EngineError(
                f"block pool ({tier}): expected at least 1 block of at least 1 token, got "
                f"{num_blocks} blocks of {block_size} tokens."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tier = tier
        self._counts = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def ref_count(self, block_id: int) -> int:
        """Return the number of owners of a block.

        Raises:
            EngineError: There is no such block.
        """
        self._check_id(block_id)
        return self._counts[block_id]

    def can_allocate(self, n: int) -> bool:
        """Return whether `allocate(n)` would succeed."""
        return 0 <= n <= len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take `n` free blocks, each with one owner, all or none.

        Raises:
            EngineError: Fewer than `n` blocks are free; ask `can_allocate` first.
        """
        if not self.can_allocate(n):
            raise EngineError(
                f"block pool ({self.tier}): expected at most {self.num_free} blocks (free of "
                f"{self.num_blocks}), got a demand for {n}. Ask can_allocate first."
            )
        taken = [self._free.popleft() for _ in range(n)]
        for block_id in taken:
            self._counts[block_id] = 1
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Give each block one more owner.

        Raises:
            EngineError: A block is free or does not exist; then none is changed.
        """
        for block_id in block_ids:
            self._check_id(block_id)
            if self._counts[block_id] == 0:
                raise EngineError(
                    f"block pool ({self.tier}): expected an allocated block to share, got block "
                    f"{block_id}, which is free."
                )
        for block_id in block_ids:
            self._counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Take one owner from each block; those without owners become free in the given order.

        Raises:
            EngineError: A block has fewer owners than are taken, or does not exist; then none is
                changed.
        """
        ids = list(block_ids)
        for block_id, times in Counter(ids).items():
            self._check_id(block_id)
            if self._counts[block_id] < times:
                raise EngineError(
                    f"block pool ({self.tier}): expected block {block_id} to have at least "
                    f"{times} owners, got {self._counts[block_id]}. It is freed twice."
                )
        for block_id in ids:
            self._counts[block_id] -= 1
            if self._counts[block_id] == 0:
                self._free.append(block_id)

    def _check_id(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise EngineError(
                f"block pool ({self.tier}): expected a block id from 0 to {self.num_blocks - 1}, "
                f"got {block_id}."
            )
