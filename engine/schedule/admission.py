"""Which sequence may begin, and which give their places to those that wait."""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf

from engine.asked.request import Sequence, SequenceStatus
from engine.kv.sequences import BlockGroups
from engine.plan.queue import FIRST_SHARE, MOST_DOUBLINGS
from engine.schedule.step import Outlook

LONG_BLOCKS = 64
"""From so many blocks on, whether a sequence has room is not asked in every step, and it does not
begin beside others before its keys are made."""
PATIENCE = 8
"""Steps between questions while nothing was given back."""
ROUND_STEPS = 48
"""Steps between two changes of places."""
PAUSE_STEPS = 4
"""Steps between two questions whether there are few enough."""
MOST_EXCESS = 0.5
"""Sequences take turns where all of them together exceed the GPU's room by this share at most."""


class Admission:
    """Lets sequences begin, first come, first served.

    A sequence begins behind the longest prefix that is found in the cache, if blocks for all its
    known tokens are free on the GPU beside what running ones still need for theirs and one block
    for each of those that can grow further. One that was preempted goes on when there is room for
    a part of its length more for all that can grow, twice as much after each further preemption:
    else it would soon lose again what was just brought back. One that is long needs its blocks on
    both tiers together. One that is alone begins always.
    """

    def __init__(self, groups: BlockGroups, max_model_len: int) -> None:
        self._groups, self._max_model_len = groups, max_model_len
        self._refused: dict[bool, tuple[int, int, int]] = {}
        """By whether it is long, of the sequence that was refused last: its number, how often
        blocks had been given back then, and how often it was asked since."""

    def begin(
        self,
        sequence: Sequence,
        running: SequenceOf[Sequence],
        outlook: Outlook,
        *,
        is_turn: bool = False,
        keep: int = 0,
    ) -> bool:
        """Give a waiting sequence the blocks found of it, if it may begin; return whether it does.

        If others have just given way (`is_turn`), it needs no more room than a new one. A long one
        leaves `keep` blocks on the GPU, as far as what it begins behind is in the host tier too.
        """
        groups, limit = self._groups, self._max_model_len
        if not running:
            return groups.begin(sequence, groups.find(sequence), alone=True)
        if self._is_in_vain(sequence):
            return False
        found = groups.find(sequence)
        # The last token of the longest output is never computed.
        others = ((s, outlook.known(s), s.max_length(limit) - 1) for s in running)
        most = sequence.max_length(limit) - 1
        more_tokens = 0 if is_turn else self.more_tokens(sequence)
        if groups.can_admit(sequence, most, found, others, more_tokens):
            return groups.begin(sequence, found, alone=False, keep=keep)
        self._refused[groups.is_long(sequence)] = sequence.seq_id, groups.num_given_back, 0
        return False

    def has_refused(self, sequence: Sequence) -> bool:
        """Whether a sequence was the last of its kind that was refused."""
        return self._refused.get(self._groups.is_long(sequence), (-1, 0, 0))[0] == sequence.seq_id

    def _is_in_vain(self, sequence: Sequence) -> bool:
        """Whether a long sequence was refused a few steps ago, with no block given back since."""
        groups = self._groups
        seq_id, given_back, asked = self._refused.get(groups.is_long(sequence), (-1, 0, 0))
        if (seq_id, given_back) != (sequence.seq_id, groups.num_given_back):
            return False
        self._refused[groups.is_long(sequence)] = seq_id, given_back, asked + 1
        has_many = sequence.num_tokens >= LONG_BLOCKS * groups.block_size
        return has_many and asked + 1 < PATIENCE

    def more_tokens(self, sequence: Sequence) -> int:
        """Return for how many tokens beyond the known ones it and all others are to have room."""
        times = sequence.num_preemptions - sequence.num_turns
        if not times:
            return 0
        share = max(self._groups.block_size, sequence.num_tokens // FIRST_SHARE)
        return share << min(times - 1, MOST_DOUBLINGS)


class Rounds:
    """Says who gives way to those that wait, so that few that exceed the GPU end together.

    Without turns some would run to their end first, and the rest would then leave most of the GPU
    idle. Where many wait, nothing is won: others take every place that becomes free. So turns are
    taken only while all unfinished sequences exceed the GPU's room by a part of it, and half of
    each group's host tier holds what exceeds it: the rest takes what leaves before the others are
    back. Those that have generated most give way, to such as have generated less and do not have
    a higher number as their priority.
    """

    def __init__(self, groups: BlockGroups, max_num_seqs: int) -> None:
        self._groups, self._max_num_seqs = groups, max_num_seqs
        self._next_step = ROUND_STEPS

    def is_due(
        self, step: int, waiting: Collection[Sequence], running: SequenceOf[Sequence]
    ) -> bool:
        """Return whether places are to be changed before a step."""
        if step < self._next_step or not self._groups.has_host:
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
            and groups.would_swap(s)
        ]
        ready.sort(key=lambda s: (s.priority, s.num_output_tokens))
        left = groups.num_spare(
            ((s, s.num_tokens, s.num_tokens + ROUND_STEPS) for s in running), ROUND_STEPS
        )
        leaving: list[Sequence] = []
        for sequence in waiting:
            need = groups.need(sequence.num_tokens + ROUND_STEPS)
            chosen: list[Sequence] = []
            most = sequence.num_output_tokens + ROUND_STEPS // 2
            while any(n < w for n, w in zip(left, need, strict=True)):
                if not ready or ready[-1].num_output_tokens < most:
                    return leaving
                if ready[-1].priority < sequence.priority:
                    return leaving
                chosen.append(ready.pop())
                freed = groups.need(chosen[-1].num_tokens + ROUND_STEPS)
                left = [n + f for n, f in zip(left, freed, strict=True)]
            left = [n - w for n, w in zip(left, need, strict=True)]
            leaving += chosen
        return leaving

    def _little_more(self, sequences: Iterable[Sequence]) -> list[int] | None:
        """Blocks of each group that all of them need soon, at most somewhat more than the GPU has.

        None where it is more, or one sequence is long.
        """
        groups = self._groups
        total = [0] * len(groups.pools)
        most = [
            pool.num_gpu_blocks + min(MOST_EXCESS * pool.num_gpu_blocks, pool.num_cpu_blocks / 2)
            for pool in groups.pools
        ]
        for sequence in sequences:
            if groups.is_long(sequence):
                return None
            for group, need in enumerate(groups.need(sequence.num_tokens + ROUND_STEPS)):
                total[group] += need
            if any(n > m for n, m in zip(total, most, strict=True)):
                return None
        return total
