"""Outlook: where sequences will stand once the plan in force is committed."""

from collections.abc import Iterable
from typing import NamedTuple

from engine.asked.request import Sequence, SequenceStatus
from engine.schedule.step import ScheduledSequence, StepPlan

NO_ROWS = range(0)


class Stand(NamedTuple):
    """Where a sequence stands, and how much of it could run next."""

    sequence: Sequence
    computed: int
    """Leading tokens that are in the cache."""
    known: int
    """Tokens of prompt and output."""
    token_rows: range
    """Rows of its newest tokens among those that the plan in force samples; empty: none of them."""
    is_decode: bool
    """Whether all tokens but the last are computed, and the last is generated."""

    def schedule(self, num_tokens: int, yields: tuple[int, int]) -> ScheduledSequence:
        """Return the sequence's next part of `num_tokens` tokens, of which so many come."""
        start = self.computed
        samples = start + num_tokens == self.known
        rows = self.token_rows[:num_tokens]
        return ScheduledSequence(self.sequence, start, num_tokens, samples, rows, yields)


class Outlook:
    """Positions of sequences behind an uncommitted plan; without one, where they stand now.

    Tokens that the plan samples for certain count as known, though their values are on the device
    only. Of a sequence that may get more or fewer tokens nobody knows where it will stand.

    Args:
        plan: The plan in force, or None.
        max_model_len: Most tokens of prompt and output.
    """

    def __init__(self, plan: StepPlan | None, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._parts: dict[int, ScheduledSequence] = {}
        self._rows: dict[int, range] = {}
        self._unsure: dict[int, int] = {}
        """The most tokens that come of those of which it is not certain how many."""
        if plan is None:
            return
        self._parts = {item.sequence.seq_id: item for item in plan.scheduled}
        row = 0
        for item in plan.sampling:
            (least, most), seq_id = item.yields, item.sequence.seq_id
            self._rows[seq_id] = range(row, row + least)
            if least < most:
                self._unsure[seq_id] = most
            row += most

    def stand(self, sequence: Sequence) -> Stand:
        """Return where a sequence will stand, of which that is certain."""
        seq_id = sequence.seq_id
        part = self._parts.get(seq_id)
        rows = self._rows.get(seq_id, NO_ROWS)
        computed = sequence.num_computed if part is None else part.stop
        known = sequence.num_tokens + len(rows)
        is_decode = computed == known - 1 and known > sequence.num_prompt_tokens
        return Stand(sequence, computed, known, rows, is_decode)

    def stands(self, running: Iterable[Sequence]) -> list[Stand]:
        """Return where those stand that could run.

        Not those that wait for content, nor those whose last token the plan samples for certain,
        nor those of which it is not certain where they will stand.
        """
        found = []
        for sequence in running:
            if sequence.status is SequenceStatus.RUNNING and sequence.seq_id not in self._unsure:
                stand = self.stand(sequence)
                if not stand.token_rows or stand.known < sequence.max_length(self._max_model_len):
                    found.append(stand)
        return found

    def known(self, sequence: Sequence) -> int:
        """Return the most tokens that prompt and output will have."""
        seq_id = sequence.seq_id
        most = self._unsure.get(seq_id, len(self._rows.get(seq_id, NO_ROWS)))
        return min(sequence.num_tokens + most, sequence.max_length(self._max_model_len))
