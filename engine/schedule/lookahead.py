"""Outlook: where sequences will stand once the plan in force is committed."""

from collections.abc import Iterable
from typing import NamedTuple

from engine.asked.request import Sequence, SequenceStatus
from engine.schedule.step import ScheduledSequence, StepPlan


class Stand(NamedTuple):
    """Where a sequence stands, and how much of it could run next."""

    sequence: Sequence
    computed: int
    """Leading tokens that are in the cache."""
    known: int
    """Tokens of prompt and output."""
    token_row: int | None
    """Row of its newest token among those that the plan in force samples; None: none of them."""
    is_decode: bool
    """Whether all tokens but the last are computed, and the last is generated."""

    def schedule(self, num_tokens: int) -> ScheduledSequence:
        """Return the sequence's next part of `num_tokens` tokens."""
        start = self.computed
        return ScheduledSequence(
            self.sequence, start, num_tokens, start + num_tokens == self.known, self.token_row
        )


class Outlook:
    """Positions of sequences behind an uncommitted plan; without one, where they stand now.

    A token that the plan samples counts as known, though its value is on the device only.

    Args:
        plan: The plan in force, or None.
        max_model_len: Most tokens of prompt and output.
    """

    def __init__(self, plan: StepPlan | None, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._parts: dict[int, ScheduledSequence] = {}
        self._rows: dict[int, int] = {}
        if plan is not None:
            self._parts = {item.sequence.seq_id: item for item in plan.scheduled}
            self._rows = {item.sequence.seq_id: row for row, item in enumerate(plan.sampling)}

    def stand(self, sequence: Sequence) -> Stand:
        """Return where a sequence will stand."""
        seq_id = sequence.seq_id
        part = self._parts.get(seq_id)
        row = self._rows.get(seq_id)
        computed = sequence.num_computed if part is None else part.stop
        known = sequence.num_tokens + (row is not None)
        is_decode = computed == known - 1 and known > sequence.num_prompt_tokens
        return Stand(sequence, computed, known, row, is_decode)

    def stands(self, running: Iterable[Sequence]) -> list[Stand]:
        """Return where those stand that could run.

        Not those that wait for content, nor those whose last token the plan samples for certain.
        """
        found = []
        for sequence in running:
            if sequence.status is SequenceStatus.RUNNING:
                stand = self.stand(sequence)
                if stand.token_row is None or stand.known < sequence.max_length(
                    self._max_model_len
                ):
                    found.append(stand)
        return found

    def known(self, sequence: Sequence) -> int:
        """Return how many tokens prompt and output will have."""
        return sequence.num_tokens + (sequence.seq_id in self._rows)
