"""Lengths and counts of what the engines of the KV rows are given. Plain data."""

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class KVWork:
    """Lengths in tokens and counts of what the engines of these rows are given."""

    prefix_tokens: int = 8192
    """Of the prefix whose first token is timed."""
    own_tokens: int = 32
    """Behind a prefix, or new in a turn."""
    shared_tokens: int = 10_000
    """Of the prefix that many requests share."""
    shared_requests: int = 50
    shared_output: int = 128
    fit_requests: int = 32
    """That fit the GPU together."""
    fit_prompt: int = 512
    fit_output: int = 128
    rounds_output: int = 512
    """Of each of the sequences that together exceed the GPU's room."""
    rounds_fill: int = 10
    """So many of them fill the GPU's room."""
    rounds_excess: float = 1.3
    """All of them together, in multiples of the GPU's room."""
    parked_tokens: int = 4000
    """Of a conversation before its timed turn."""
    parked_excess: float = 52_000 / 39_344
    """All conversations together, in multiples of the GPU's room."""
    turn_output: int = 128
    conversations: int = 64
    turns: int = 8
    chat_input: int = 384
    """New tokens of each turn of these conversations."""
    chat_output: int = 64
    running: int = 8
    """Sequences that decode while a prefix loads."""
    loads: int = 60
    alone_steps: int = 200
    """Their steps without a load."""
    beyond: tuple[float, ...] = (1.3, 3.0)
    """Length of one sequence in multiples of the GPU's room; the longest that there is stands for
    the last of them."""
    streamed_tokens: int = 34_000
    """Of one sequence beyond the GPU's room, where weights are streamed too."""
    steps: int = 22
    """Decode steps that are timed."""

    def scaled(self, factor: float) -> "KVWork":
        """Return the work with all lengths and counts times a factor, each at least 2.

        Args:
            factor: 1 changes nothing.
        """
        if factor == 1:
            return self
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, int)}
        kept = {"steps": numbers.pop("steps")}
        small = {name: max(2, round(value * factor)) for name, value in numbers.items()}
        return KVWork(**asdict(self) | small | kept)

    @property
    def rounds_sequences(self) -> int:
        """Sequences that exceed the GPU's room together."""
        return math.ceil(self.rounds_excess * self.rounds_fill)

    @property
    def most_sequences(self) -> int:
        """The most sequences that are sent at once."""
        return max(
            self.shared_requests,
            self.fit_requests,
            self.rounds_sequences,
            self.conversations,
            self.running + 1,
        )
