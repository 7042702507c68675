"""Turns: sequences that together have more blocks than the GPU give their places to each other."""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf

from engine.asked.request import Sequence, SequenceStatus
from engine.kv.sequences import BlockGroups

ROUND_STEPS = 48
"""Steps between two changes of places."""
PAUSE_STEPS = 4
"""Steps between two questions whether there are few enough."""
MOST_EXCESS = 0.5
"""Sequences take turns where all of them together exceed the GPU's room by this share at most."""


class Rounds:
    """Says who gives way to those that wait, so that few that exceed the GPU end together.

    Without turns some would run to their end first, and the rest would then leave most of the GPU
    idle. Where many wait, nothing is won: others take every place that becomes free. So turns are
    taken only while all unfinished sequences exceed the GPU's room by a part of it, and half of
    each group's host tier holds what exceeds it: the rest takes what leaves before the others are
    back. Those that have generated most give way, to such as have generated less.

    Args:
        groups: Where blocks come from.
        max_num_seqs: Sequences that have blocks at once.
    """

    def __init__(self, groups: BlockGroups, max_num_seqs: int) -> None:
        self._groups, self._max_num_seqs = groups, max_num_seqs
        self._next_step = ROUND_STEPS

    def is_due(
        self, step: int, waiting: Collection[Sequence], running: SequenceOf[Sequence]
    ) -> bool:
        """Return whether places are to be changed before a step.

        Args:
            step: Number of the step.
            waiting: Those without blocks.
            running: Those with blocks.
        """
        if step < self._next_step or not self._groups.content.has_host:
            return False
        if not waiting or not 1 < len(running) < self._max_num_seqs:
            return False
        total = self._little_more((*waiting, *running))
        if total is not None:
            # New ones that fit need no place of another.
            pools = self._groups.pools
            is_more = any(n > p.num_gpu_blocks for n, p in zip(total, pools, strict=True))
            if is_more or any(sequence.num_preemptions for sequence in waiting):
                return True
        self._next_step = step + PAUSE_STEPS
        return False

    def leavers(
        self, step: int, waiting: Iterable[Sequence], running: SequenceOf[Sequence]
    ) -> list[Sequence]:
        """Return who gives way, the first to do so first; to be asked where places are due."""
        self._next_step = step + ROUND_STEPS
        groups = self._groups
        ready = [
            s
            for s in running
            if s.status is SequenceStatus.RUNNING
            and s.num_computed >= s.num_tokens - 1
            and groups.content.would_swap(s)
        ]
        ready.sort(key=lambda s: s.num_output_tokens)
        left = groups.num_spare(running, ROUND_STEPS)
        leaving: list[Sequence] = []
        for sequence in waiting:
            need = groups.need(sequence.num_tokens + ROUND_STEPS)
            chosen: list[Sequence] = []
            most = sequence.num_output_tokens + ROUND_STEPS // 2
            while any(n < w for n, w in zip(left, need, strict=True)):
                if not ready or ready[-1].num_output_tokens < most:
                    return leaving
                chosen.append(ready.pop())
                freed = groups.need(chosen[-1].num_tokens + ROUND_STEPS)
                left = [n + f for n, f in zip(left, freed, strict=True)]
            left = [n - w for n, w in zip(left, need, strict=True)]
            leaving += chosen
        return leaving

    def _little_more(self, sequences: Iterable[Sequence]) -> list[int] | None:
        """Blocks of each group that all of them need soon, at most somewhat more than the GPU has.

        None where it is more, or one sequence is longer than the GPU's room.
        """
        groups = self._groups
        total = [0] * len(groups.pools)
        most = [
            pool.num_gpu_blocks + min(MOST_EXCESS * pool.num_gpu_blocks, pool.num_cpu_blocks / 2)
            for pool in groups.pools
        ]
        for sequence in sequences:
            if groups.num_over(sequence.num_tokens):
                return None
            for group, need in enumerate(groups.need(sequence.num_tokens + ROUND_STEPS)):
                total[group] += need
            if any(n > m for n, m in zip(total, most, strict=True)):
                return None
        return total
