"""What the choice of one token depends on, beside the logits."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine import request
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleKey:
    """What the draws of a sequence depend on, beside the position."""

    seed: int
    """The request's seed, or the engine's if it has none."""
    request: int | str
    """The request's number in order of arrival; 0 if it has a seed of its own."""
    index: int
    """Which of the n answers."""

    def uniform(self, position: int) -> float:
        """Return the number in [0, 1) that decides the token at `position`."""
        kind = "s" if isinstance(self.request, str) else "i"
        text = f"{self.seed}|{self.index}|{position}|{kind}{self.request}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What is known of the sequence that a row of logits belongs to."""

    params: SamplingParams
    """How its tokens are chosen; checked."""
    key: SampleKey
    """What its draws depend on."""
    position: int
    """Place of the new token in prompt and output, from 0."""
    prompt_ids: Sequence[int]
    """Tokens of the prompt."""
    output_ids: Sequence[int]
    """Tokens of the output so far; read for repetition_penalty only."""
    num_output_tokens: int
    """Tokens of the output so far, with one that is sampled but not known to the host yet."""
    eos_ids: Collection[int]
    """The model's end-of-sequence tokens."""

    @classmethod
    def of(
        cls,
        sequence: request.Sequence,
        engine_seed: int,
        eos_ids: Collection[int],
        *,
        num_unknown: int = 0,
    ) -> "SampleRow":
        """Make the row of a sequence; the token lists are not copied.

        Args:
            sequence: Whose next token is sampled.
            engine_seed: Keys the draws of requests without a seed.
            eos_ids: The model's end-of-sequence tokens.
            num_unknown: Tokens before it that the host does not know yet, 0 or 1.
        """
        params = sequence.params
        if params.seed is None:
            key = SampleKey(engine_seed, sequence.request.arrival, sequence.index)
        else:
            key = SampleKey(params.seed, 0, sequence.index)
        return cls(
            params=params,
            key=key,
            position=sequence.num_tokens + num_unknown,
            prompt_ids=sequence.prompt_token_ids,
            output_ids=sequence.output_token_ids,
            num_output_tokens=sequence.num_output_tokens + num_unknown,
            eos_ids=eos_ids,
        )

    @property
    def banned_ids(self) -> set[int]:
        """Tokens that would end the output before min_tokens."""
        params = self.params
        if self.num_output_tokens >= params.min_tokens:
            return set()
        banned = set(params.stop_token_ids or ())
        return banned if params.ignore_eos else banned.union(self.eos_ids)
