"""Blocks of sequences in every group of layers: those that attend to all, those with a window.

Each group has a cache, a pool and a block table a sequence of its own. A table keeps its length:
position p lies in its entry p // block_size; entries whose blocks were given back are GONE, which
nothing reads.
"""

from collections.abc import Iterable

from engine.errors import EngineError
from engine.kv.policy import KVPolicy
from engine.kv.tiers import TieredBlockPool
from engine.kv.window import num_expired, num_held
from engine.request import Sequence

GONE = -1


class BlockGroups:
    """Takes and gives back the blocks of sequences, in all groups at once.

    Args:
        pool: Blocks of the first group.
        window_pool: Blocks of the group of layers with a window; None: there is one group.
        window: Most tokens that layers of the last group attend to; None: all.
        step_tokens: Most tokens of a step.
        policy: What content is remembered; None: none.

    Raises:
        EngineError: The pools differ in block_size, or there is no window for the second.
    """

    def __init__(
        self,
        pool: TieredBlockPool,
        window_pool: TieredBlockPool | None,
        window: int | None,
        step_tokens: int,
        policy: KVPolicy | None = None,
    ) -> None:
        self.policy = KVPolicy() if policy is None else policy
        self.pools = (pool,) if window_pool is None else (pool, window_pool)
        if len({each.block_size for each in self.pools}) > 1 or (window_pool and window is None):
            raise EngineError(
                f"block groups: expected pools of one block_size and a window for the second, got "
                f"{[each.block_size for each in self.pools]} and window={window}."
            )
        self.block_size = pool.block_size
        self._windows = (window,) if window_pool is None else (None, window)
        self._step_tokens = step_tokens

    def need(self, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks of each group that a sequence of so many tokens holds in a step."""
        step, size = self._step_tokens, self.block_size
        return tuple(num_held(num_tokens, window, step, size) for window in self._windows)

    def have_room(self, wanted: Iterable[tuple[Sequence, int]]) -> bool:
        """Return whether free blocks are enough for each sequence's so many leading tokens."""
        lack = [0] * len(self.pools)
        for sequence, num_tokens in wanted:
            for group, pool in enumerate(self.pools):
                more = pool.blocks_for(num_tokens) - len(sequence.block_tables[group])
                lack[group] += max(0, more)
        return all(pool.num_free >= n for pool, n in zip(self.pools, lack, strict=True))

    def can_admit(self, num_tokens: int, running: Iterable[tuple[Sequence, int, int]]) -> bool:
        """Return whether a sequence has room beside what running ones still need.

        Args:
            num_tokens: Known tokens of the one that waits.
            running: Sequences, their known tokens and the most that each will compute.
        """
        left = [pool.num_free for pool in self.pools]
        for sequence, known, most in running:
            for group, need in enumerate(self._reserve(sequence, known, most)):
                left[group] -= need
        return all(n >= need for n, need in zip(left, self.need(num_tokens), strict=True))

    def _reserve(self, sequence: Sequence, known: int, most: int) -> list[int]:
        """Blocks that a sequence lacks for its known tokens, and one if it can grow."""
        found = []
        for group, held in enumerate(self.need(most)):
            table = sequence.block_tables[group]
            gone = 0 if self._windows[group] is None else sequence.num_gone
            pool = self.pools[group]
            end = min(pool.blocks_for(most), pool.blocks_for(known) + 1)
            found.append(max(0, min(end - len(table), held - (len(table) - gone))))
        return found

    def capacity(self, sequence: Sequence) -> int:
        """Return for how many leading tokens a sequence has blocks, or could take free ones."""
        return self.block_size * min(
            len(table) + pool.num_free
            for table, pool in zip(sequence.block_tables, self.pools, strict=False)
        )

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence the blocks that its first `num_tokens` tokens lack.

        Raises:
            EngineError: They are not free; ask `capacity` first.
        """
        for table, pool in zip(sequence.block_tables, self.pools, strict=False):
            table.extend(pool.allocate(max(0, pool.blocks_for(num_tokens) - len(table))))

    def expire(self, sequence: Sequence) -> None:
        """Give back the blocks that no token of a sequence sees any more, once it has advanced.

        Blocks are judged by num_computed, the committed tokens. Every step in force or still to be
        planned begins there or later, the one in flight included, and so reads none of them: its
        first token, at position s >= num_computed, sees positions s - window + 1 and up. A
        preemption, after which a sequence begins at 0 again, drops the whole table. What was given
        back is written by its next owner in a step that is planned later, and steps run in order
        on one stream, behind all that may still read it.
        """
        window = self._windows[-1]
        if window is None:
            return
        table = sequence.block_tables[len(self.pools) - 1]
        end = min(len(table), num_expired(sequence.num_computed, window, self.block_size))
        if end > sequence.num_gone:
            self.pools[-1].free(table[sequence.num_gone : end])
            table[sequence.num_gone : end] = [GONE] * (end - sequence.num_gone)
            sequence.num_gone = end

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence."""
        for group, pool in enumerate(self.pools):
            gone = 0 if self._windows[group] is None else sequence.num_gone
            pool.free(sequence.block_tables[group][gone:])
        sequence.drop_blocks()

    def check(self, max_model_len: int) -> None:
        """Return if a sequence of max_model_len tokens can run to its end when it is alone.

        Raises:
            EngineError: A pool is too small.
        """
        for group, need in enumerate(self.need(max_model_len)):
            pool, window = self.pools[group], self._windows[group]
            if pool.num_free >= need:
                continue
            size, what = pool.block_size, f"one sequence of max_model_len={max_model_len} tokens"
            if window is not None:
                what += f" (a window of {window}, and a step)"
            raise EngineError(
                f"KV blocks: expected room for {what}, got {pool.num_free} free blocks of {size} "
                f"tokens = {pool.num_free * size}. Lower engine.max_model_len or give the KV cache "
                "more blocks."
            )
