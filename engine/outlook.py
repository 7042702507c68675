"""Outlook: where sequences will stand once the plan in force is committed."""

from engine.request import Sequence
from engine.step_plan import ScheduledSequence, StepPlan


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

    def computed(self, sequence: Sequence) -> int:
        """Return how many leading tokens will be in the cache."""
        part = self._parts.get(sequence.seq_id)
        return sequence.num_computed if part is None else part.stop

    def known(self, sequence: Sequence) -> int:
        """Return how many tokens prompt and output will have."""
        return sequence.num_tokens + (sequence.seq_id in self._rows)

    def token_row(self, sequence: Sequence) -> int | None:
        """Return the row of the sequence among those that the plan samples; None: none of them."""
        return self._rows.get(sequence.seq_id)

    def ends(self, sequence: Sequence) -> bool:
        """Return whether the plan's token is the sequence's last, whatever it is."""
        most = sequence.max_length(self._max_model_len)
        return sequence.seq_id in self._rows and self.known(sequence) >= most

    def is_decode(self, sequence: Sequence) -> bool:
        """Return whether all tokens but the last will be computed, and the last is generated."""
        known = self.known(sequence)
        return known > sequence.num_prompt_tokens and self.computed(sequence) == known - 1

    def schedule(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        """Return the sequence's next part of `num_tokens` tokens."""
        start = self.computed(sequence)
        return ScheduledSequence(
            sequence,
            start,
            num_tokens,
            samples=start + num_tokens == self.known(sequence),
            token_row=self.token_row(sequence),
        )
