"""SampleRow: what is known of the sequence that a row of logits belongs to."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from engine.asked.request import Sequence
from engine.asked.sampling import SamplingParams

NO_ROWS = range(0)
SENT_BYTES: Final = 2**16
"""Most bytes that CUDA takes from pageable memory without waiting for the device."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What is known of the sequence that a row of logits belongs to."""

    sequence: Sequence
    params: SamplingParams
    """The sequence's own."""
    engine_seed: int
    """Keys the draws of requests without a seed, with their number in order of arrival."""
    eos_ids: Collection[int]
    """The model's end-of-sequence tokens."""
    position: int
    """Place of the new token in prompt and output, from 0."""
    num_output_tokens: int
    """Tokens of the output so far, with those that are sampled but not known to the host yet."""
    token_rows: range = NO_ROWS
    """The rows of these in the step before, which samples them."""
    mask: np.ndarray | None = None
    """int32, a bit for each token that its constraint allows, the lowest first; None: there is no
    constraint, or it failed."""

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        engine_seed: int,
        eos_ids: Collection[int],
        *,
        token_rows: range = NO_ROWS,
    ) -> "SampleRow":
        """Make the row of a sequence's next token; find out what its constraint allows, if any.

        The tokens before it that the host does not know yet are in `token_rows` of the step before.
        """
        constraint = sequence.constraint
        mask = None if constraint is None else constraint.mask()
        unknown = len(token_rows)
        counts = sequence.num_tokens + unknown, sequence.num_output_tokens + unknown
        return cls(sequence, sequence.params, engine_seed, eos_ids, *counts, token_rows, mask)

    def uniform(self) -> float:
        """Return the number in [0, 1) that decides the token."""
        index, arrival = self.sequence.index, self.sequence.request.arrival
        if self.params.seed is None:
            text = f"{self.engine_seed}|{index}|{self.position}|i{arrival}"
        else:
            text = f"{self.params.seed + index}|0|{self.position}|i0"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    @property
    def banned_ids(self) -> set[int]:
        """Tokens that would end the output before min_tokens."""
        params = self.params
        if self.num_output_tokens >= params.min_tokens:
            return set()
        banned = set(params.stop_token_ids or ())
        return banned if params.ignore_eos else banned.union(self.eos_ids)


def send(values: Any, dtype: type[np.generic], device: torch.device) -> Tensor:
    """Copy host numbers to a device without waiting for it, SENT_BYTES at a time.

    Stream: enqueued on the current stream.
    """
    host = torch.from_numpy(np.array(values, dtype=dtype))
    if host.nbytes <= SENT_BYTES:
        return host.to(device, non_blocking=True)
    sent, size = torch.empty_like(host, device=device), SENT_BYTES // host.itemsize
    for first in range(0, host.numel(), size):
        part = slice(first, first + size)
        sent.view(-1)[part].copy_(host.view(-1)[part], non_blocking=True)
    return sent
