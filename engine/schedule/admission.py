"""Which sequence may begin: the one at the front of the queue, if there is room for it."""

from collections.abc import Sequence as SequenceOf

from engine.asked.request import Sequence
from engine.kv.sequences import BlockGroups
from engine.plan.queue import FIRST_SHARE, MOST_DOUBLINGS
from engine.schedule.lookahead import Outlook

LONG_BLOCKS = 64
"""From so many blocks on, whether a sequence has room is not asked in every step, and it does not
begin beside others before its keys are made."""
PATIENCE = 8
"""Steps between questions while nothing was given back."""


class Admission:
    """Lets sequences begin, first come, first served.

    A sequence begins behind the longest prefix that is found in the cache, if blocks for all its
    known tokens are free on the GPU beside what running ones still need for theirs and one block
    for each of those that can grow further. One that was preempted goes on when there is room for
    a part of its length more for all that can grow, twice as much after each further preemption:
    else it would soon lose again what was just brought back. One that is alone begins always.

    Args:
        groups: Where blocks come from.
        max_model_len: Most tokens of prompt and output.
    """

    def __init__(self, groups: BlockGroups, max_model_len: int) -> None:
        self._groups, self._max_model_len = groups, max_model_len
        self._refused: tuple[int, int] | None = None
        self._num_asked = 0

    def begin(
        self,
        sequence: Sequence,
        running: SequenceOf[Sequence],
        outlook: Outlook,
        *,
        is_turn: bool = False,
    ) -> bool:
        """Give a waiting sequence the blocks found of it, if it may begin; return whether it does.

        Args:
            sequence: At the front of the queue, without blocks.
            running: Those that have blocks.
            outlook: Where they will stand.
            is_turn: Others have just given way; it needs no more room than a new one.
        """
        groups = self._groups
        if not running:
            return groups.begin(sequence, groups.find(sequence), alone=True)
        if groups.num_over(sequence.num_tokens) or self._is_in_vain(sequence):
            return False
        found = groups.find(sequence)
        limit = self._max_model_len
        # The last token of the longest output is never computed.
        others = ((s, outlook.known(s), s.max_length(limit) - 1) for s in running)
        most = sequence.max_length(limit) - 1
        more_tokens = 0 if is_turn else self._more_tokens(sequence)
        if groups.can_admit(sequence, most, found, others, more_tokens):
            return groups.begin(sequence, found, alone=False)
        self._refused = sequence.seq_id, groups.num_given_back
        self._num_asked = 0
        return False

    def _is_in_vain(self, sequence: Sequence) -> bool:
        """Whether a long sequence was refused a few steps ago, with no block given back since."""
        if self._refused != (sequence.seq_id, self._groups.num_given_back):
            return False
        self._num_asked += 1
        is_long = sequence.num_tokens >= LONG_BLOCKS * self._groups.block_size
        return is_long and self._num_asked < PATIENCE

    def _more_tokens(self, sequence: Sequence) -> int:
        times = sequence.num_preemptions - sequence.num_turns
        if not times:
            return 0
        share = max(self._groups.block_size, sequence.num_tokens // FIRST_SHARE)
        return share << min(times - 1, MOST_DOUBLINGS)
