"""Sequences that wait and sequences that have blocks, and how much of each runs in a step."""

from collections import deque
from itertools import islice

from engine.admission import LONG_BLOCKS, Admission
from engine.kv.groups import BlockGroups
from engine.outlook import Outlook, Stand
from engine.request import Sequence, SequenceStatus
from engine.rounds import Rounds
from engine.scheduler_config import SchedulerConfig, SchedulerStats
from engine.step_plan import ScheduledSequence

MOST_PREPARED = 4
"""Prompts whose keys are made before they are asked for."""


class Queues:
    """Decides what runs next, takes the blocks for it, and preempts where there are none.

    Args:
        config: Limits of a step.
        groups: Where blocks come from.
        stats: What is counted.
    """

    def __init__(self, config: SchedulerConfig, groups: BlockGroups, stats: SchedulerStats) -> None:
        self.waiting: deque[Sequence] = deque()
        """Next first."""
        self.running: list[Sequence] = []
        """Those that have blocks, oldest first, those included that are LOADING."""
        self._config, self._groups, self._stats = config, groups, stats
        self._admission = Admission(groups, config.max_model_len)
        self._rounds = Rounds(groups, config.max_num_seqs)
        self._is_turn = False
        self._swapped: set[int] = set()
        """Those that wait and were swapped out."""

    @property
    def is_alone(self) -> bool:
        """Whether one sequence has all blocks that are in use."""
        return len(self.running) == 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self._swapped.discard(sequence.seq_id)
        else:
            self.running.remove(sequence)

    def prepare(self) -> bool:
        """Make some keys of the next prompt that lacks them, ahead of the step that admits it.

        Returns:
            Whether there was one among the first in the queue.
        """
        content = self._groups.content
        for sequence in islice(self.waiting, MOST_PREPARED):
            if content.num_unnamed(sequence) > 0:
                content.prepare(sequence)
                return True
        return False

    def note_loaded(self) -> None:
        """Let sequences run whose content has come."""
        for sequence in self.running:
            is_loading = sequence.status is SequenceStatus.LOADING
            if is_loading and not self._groups.content.is_pending(sequence):
                sequence.status, sequence.pending = SequenceStatus.RUNNING, ()

    def is_round_due(self, step: int) -> bool:
        """Return whether sequences are to change places before a step."""
        return self._rounds.is_due(step, self.waiting, self.running)

    def change_places(self, step: int) -> None:
        """Let running sequences give way to waiting ones, if it is time."""
        self._is_turn = self.is_round_due(step)
        if self._is_turn:
            for sequence in self._rounds.leavers(step, self.waiting, self.running):
                self._leave(sequence)
                sequence.num_turns += 1
                self._stats.num_turns += 1
                self.waiting.append(sequence)

    def wants(self, outlook: Outlook) -> list[tuple[Stand, int]]:
        """Return the running sequences that are to run, oldest first, and how many tokens each.

        Decodes are counted first, as a prefill need not be the newest: the content of another
        may have come sooner.
        """
        stands = outlook.stands(self.running)
        left = self._config.max_num_batched_tokens
        left -= sum(stand.is_decode for stand in stands)
        wants = []
        for stand in stands:
            want = 1
            if not stand.is_decode:
                want = min(left, stand.known - stand.computed)
                left -= want
            if want > 0:
                wants.append((stand, want))
        return wants

    def make_step(
        self, outlook: Outlook, wants: list[tuple[Stand, int]]
    ) -> tuple[list[ScheduledSequence], list[ScheduledSequence]]:
        """Take blocks for what is to run, let others begin; return decodes and prefills."""
        decodes: list[ScheduledSequence] = []
        prefills: list[ScheduledSequence] = []
        for stand, want in wants:
            if stand.sequence.status is not SequenceStatus.RUNNING:
                continue  # it was preempted for an older one
            granted = self._grow(stand, want)
            if granted:
                (decodes if stand.is_decode else prefills).append(stand.schedule(granted))
        left = self._config.max_num_batched_tokens - len(decodes)
        left -= sum(item.num_tokens for item in prefills)
        is_busy = left < self._config.max_num_batched_tokens
        while left > 0 and (sequence := self._begin_next(outlook, is_busy=is_busy)) is not None:
            if sequence.status is SequenceStatus.LOADING:
                continue
            stand = outlook.stand(sequence)
            granted = self._grow(stand, min(left, stand.known - stand.computed))
            if granted:
                (decodes if stand.is_decode else prefills).append(stand.schedule(granted))
                left -= granted
        self._is_turn = False
        self._groups.store_ahead(self._config.max_num_batched_tokens - left)
        return decodes, prefills

    def _begin_next(self, outlook: Outlook, *, is_busy: bool) -> Sequence | None:
        """Let the sequence at the front of the queue begin, if limits and blocks allow.

        Args:
            outlook: Where those that run will stand.
            is_busy: Others run in this step; they do not wait for the keys of a long prompt.
        """
        if not self.waiting or len(self.running) >= self._config.max_num_seqs:
            return None
        sequence = self.waiting[0]
        if is_busy and self._groups.content.num_unnamed(sequence) >= LONG_BLOCKS:
            return None
        if not self._admission.begin(sequence, self.running, outlook, is_turn=self._is_turn):
            return None
        self.waiting.popleft()
        self.running.append(sequence)
        if sequence.seq_id in self._swapped:
            self._swapped.remove(sequence.seq_id)
            self._stats.num_swaps_in += sequence.num_computed > 0
        is_pending = self._groups.content.is_pending(sequence)
        sequence.status = SequenceStatus.LOADING if is_pending else SequenceStatus.RUNNING
        return sequence

    def _grow(self, stand: Stand, want: int) -> int:
        """Give a running sequence blocks for up to `want` more tokens; return for how many."""
        sequence = stand.sequence
        while True:
            granted = self._groups.extend(sequence, stand.computed, want, alone=self.is_alone)
            if granted:
                return granted
            newest = self.running[-1]
            if newest is sequence:
                self._stats.num_stalls += 1
                return 0
            self._preempt(newest)

    def _preempt(self, sequence: Sequence) -> None:
        """Take the newest running sequence's blocks and put it at the front of the queue."""
        self._leave(sequence)
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks."""
        self.running.remove(sequence)
        if self._groups.preempt(sequence) == "swap":
            self._stats.num_swaps_out += 1
            self._swapped.add(sequence.seq_id)
        else:
            self._stats.num_recomputes += 1
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self._stats.num_preemptions += 1
