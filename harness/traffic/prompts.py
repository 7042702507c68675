"""Token ids of planned requests: drawn from a seed, or those of a file of prompts."""

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from harness.prompts import PromptError
from harness.traffic.scenario import ServeScenario
from harness.traffic.schedule import PlannedRequest, Schedule
from harness.traffic.trace import block_lengths


def fill_tokens(
    schedule: Schedule,
    config: ServeScenario,
    *,
    vocab_size: int,
    avoid: Collection[int] = (),
    rows: Sequence[Sequence[int]] = (),
    stream: str = "serve",
) -> Schedule:
    """Return the schedule with the token ids of every request; the same for the same arguments.

    No two synthetic prompts are equal. Prompts of a trace are equal as far as its hash_ids are.

    Args:
        schedule: of `plan_requests`.
        config: what is asked.
        vocab_size: ids are below it.
        avoid: ids that are not used (special tokens).
        rows: the encoded rows of the file of prompts.
        stream: with seeds.prompts it keys the draws; two streams share no prompt in practice.

    Raises:
        PromptError: the vocabulary is too small for that many different prompts.
    """
    if config.prompts_file is not None:
        return replace(schedule, requests=tuple(_of_file(item, rows) for item in schedule.requests))
    allowed = sorted(set(range(vocab_size)) - set(avoid))
    if not allowed:
        raise PromptError(f"prompts: expected usable token ids, got none of {vocab_size}.")
    source = _Source(allowed, f"tightfit/{stream}/{config.seeds.prompts}")
    scale = config.trace.length_scale if config.trace is not None else 1.0
    filled = {}
    for request in sorted(schedule.requests, key=lambda request: request.place):
        if request.hash_ids:
            ids = source.of_blocks(request, scale)
        else:
            ids = source.prefix(request.prefix, config.prefixes.tokens)
            ids += source.new(request.own_tokens or 0)
        filled[request.request_id] = replace(request, prompt_token_ids=tuple(ids))
    return replace(schedule, requests=tuple(filled[r.request_id] for r in schedule.requests))


def _of_file(request: PlannedRequest, rows: Sequence[Sequence[int]]) -> PlannedRequest:
    ids = tuple(rows[request.row or 0])
    return replace(
        request,
        prompt_token_ids=ids,
        own_tokens=len(ids),
        num_prompt_tokens=None if request.follows else len(ids),
    )


class _Source:
    """Draws token ids; what is asked for by a number is the same each time."""

    def __init__(self, allowed: list[int], key: str) -> None:
        self._allowed, self._key = allowed, key
        self._draw = random.Random(f"{key}/own")
        self._seen: set[tuple[int, ...]] = set()
        self._counts: dict[int, int] = {}

    def new(self, num_tokens: int) -> list[int]:
        """Return tokens that were not returned before.

        Raises:
            PromptError: every sequence of that length is used.
        """
        count = self._counts[num_tokens] = self._counts.get(num_tokens, 0) + 1
        if len(self._allowed) ** min(num_tokens, 64) < count:
            raise PromptError(
                f"prompts: expected room for {count} different prompts of {num_tokens} tokens, got "
                f"{len(self._allowed)} usable token ids. Raise the length of the prompts or ask "
                "for fewer requests."
            )
        while True:
            ids = self._draw.choices(self._allowed, k=num_tokens)
            if tuple(ids) not in self._seen:
                self._seen.add(tuple(ids))
                return ids

    def prefix(self, number: int | None, num_tokens: int) -> list[int]:
        """Return the shared prefix of that number."""
        if number is None:
            return []
        return self._keyed(f"prefix/{number}", num_tokens)

    def of_blocks(self, request: PlannedRequest, scale: float) -> list[int]:
        """Return a prompt made of the blocks of a trace, and of new tokens where they end."""
        total = request.num_prompt_tokens or 0
        lengths = block_lengths(total, len(request.hash_ids), scale)
        ids: list[int] = []
        for number, length in zip(request.hash_ids, lengths, strict=True):
            ids += self._keyed(f"block/{number}", length)
        lacking = total - len(ids)
        return ids + self.new(lacking) if lacking else ids

    def _keyed(self, name: str, num_tokens: int) -> list[int]:
        """Return the first tokens of an endless draw of that name."""
        return random.Random(f"{self._key}/{name}").choices(self._allowed, k=num_tokens)
