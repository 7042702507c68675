"""StepPlan, what runs in one step of the engine; Outlook, where sequences stand behind it.

The scheduler makes a plan, the executor runs it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.asked.request import Sequence, SequenceStatus
from engine.errors import EngineError


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The part of one sequence that runs in a step: positions start to start + num_tokens - 1."""

    sequence: Sequence
    """The sequence of the tokens; its block_table covers them."""
    start: int
    """First position; tokens before it are in the cache."""
    num_tokens: int
    """How many tokens run, at least 1."""
    samples: bool
    """Whether the part reaches the last known token, so that new ones are sampled."""
    token_rows: range = range(0)
    """Where the step before samples the tokens that run: their rows among all that it may sample,
    of each of its `sampling` as many as `yields` allows. They are read on the device, because the
    host does not know them when the step is prepared. Empty: the host knows every token that
    runs."""
    yields: tuple[int, int] = (1, 1)
    """The least and the most tokens that come of it, where it samples."""

    @property
    def stop(self) -> int:
        """Position after the last one."""
        return self.start + self.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """The tokens that run, a new list.

        Raises:
            EngineError: The step before samples them (`token_rows`).
        """
        if self.token_rows:
            raise EngineError(
                f"step plan: expected tokens that the host knows, got position {self.start} of "
                f"sequence {self.sequence.seq_id}, which the step before samples. Read it on the "
                "device."
            )
        return self.sequence.tokens(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's decision. Rows of a batch are decodes first, then prefills."""

    step: int
    """Number of the step, from 0."""
    decodes: tuple[ScheduledSequence, ...]
    """One token each, the last known one; each has generated at least one token before."""
    prefills: tuple[ScheduledSequence, ...]
    """Parts of prompts, or of prompt and output after a preemption."""

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """Decodes, then prefills."""
        return self.decodes + self.prefills

    @property
    def sampling(self) -> tuple[ScheduledSequence, ...]:
        """Parts of `scheduled` that sample tokens, in the same order."""
        return tuple(item for item in self.scheduled if item.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens that run in the step."""
        return len(self.decodes) + sum(item.num_tokens for item in self.prefills)

    @property
    def is_dead(self) -> bool:
        """Whether every sequence in it has ended since it was made."""
        return all(item.sequence.is_finished for item in self.scheduled)


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
    """

    def __init__(self, plan: StepPlan | None, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._parts = {item.sequence.seq_id: item for item in plan.scheduled} if plan else {}
        self._rows: dict[int, range] = {}
        self._unsure: dict[int, int] = {}
        """The most tokens that come of those of which it is not certain how many."""
        row = 0
        for item in plan.sampling if plan else ():
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
        nor those of which it is not certain where they will stand, nor those whose next token
        depends on one that the plan samples in a way that the host must find out.
        """
        found = []
        for sequence in running:
            if sequence.status is SequenceStatus.RUNNING and sequence.seq_id not in self._unsure:
                stand = self.stand(sequence)
                if not stand.token_rows or (
                    sequence.constraint is None
                    and stand.known < sequence.max_length(self._max_model_len)
                ):
                    found.append(stand)
        return found

    def known(self, sequence: Sequence) -> int:
        """Return the most tokens that prompt and output will have."""
        seq_id = sequence.seq_id
        most = self._unsure.get(seq_id, len(self._rows.get(seq_id, NO_ROWS)))
        return min(sequence.num_tokens + most, sequence.max_length(self._max_model_len))
