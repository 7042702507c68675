"""StepPlan: what runs in one step of the engine. The scheduler makes it, the executor runs it."""

from dataclasses import dataclass

from engine.asked.request import Sequence
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
