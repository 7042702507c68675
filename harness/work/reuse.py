"""Prompt tokens that an engine found in a prefix cache: their share, and where it speaks against.

Requests of another part, repeat or trial have another salt, so a part finds its own prefixes alone.
A server that does not know salts may still find those of earlier requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from harness.work.drive import Outcome
from harness.work.kv import counts
from harness.work.times import RequestTimes

LEAST_EXCESS_SHARE: Final = 0.01
"""Share of the prompt tokens up to which more hits than prompts share are taken for another way of
counting: of blocks, of a template, of a text that a server encodes itself."""

Sent = tuple[Sequence[int], Sequence[int]]
"""Prompt and output tokens of a request."""


def hit_tokens(stats: Mapping[str, Any]) -> float | None:
    """Return the prompt tokens found in a prefix cache since the start; None where it is not told.

    Args:
        stats: of an engine: its KV cache's, or `prefix_hit_tokens` of a peer.
    """
    known = counts(stats)
    names = [name for name in known if name in {"prefix.hits_gpu_tokens", "prefix.hits_cpu_tokens"}]
    if names:
        return sum(known[name] for name in names)
    told: float | None = stats.get("prefix_hit_tokens")
    return told


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """What one part, repeat or trial found in a prefix cache."""

    prompt_tokens: int
    """Prompt tokens of all requests that were sent."""
    hit_tokens: float | None
    """Number of these that were found; None: the engine does not tell."""
    shared_tokens: int
    """Number of these that another request of the part has before the same tokens."""

    @property
    def share(self) -> float | None:
        """Found / prompt tokens; None where either is not known."""
        if self.hit_tokens is None or not self.prompt_tokens:
            return None
        return self.hit_tokens / self.prompt_tokens

    @property
    def is_foreign(self) -> bool:
        """Whether more was found than requests of this part can have left."""
        excess = (self.hit_tokens or 0.0) - self.shared_tokens
        return excess > LEAST_EXCESS_SHARE * self.prompt_tokens


def reuse_since(
    before: float | None,
    stats: Mapping[str, Any],
    requests: Sequence[RequestTimes],
    sent: Callable[[], list[Sent]],
) -> Reuse:
    """Return what requests found.

    Args:
        before: hit_tokens before them.
        stats: of the engine after them.
        requests: those that were sent.
        sent: returns their tokens; called only where something was found.
    """
    after = hit_tokens(stats)
    hits = None if after is None else after - (before or 0.0)
    return Reuse(
        prompt_tokens=sum(request.num_prompt_tokens for request in requests),
        hit_tokens=hits,
        shared_tokens=_shared_tokens(sent()) if hits else 0,
    )


def with_outputs(prompts: Sequence[Sequence[int]], requests: Sequence[RequestTimes]) -> list[Sent]:
    """Return the tokens of requests of these prompts, as far as they were sent."""
    pairs = zip(prompts, requests, strict=False)
    return [(prompt, request.token_ids) for prompt, request in pairs]


def _shared_tokens(sent: Sequence[Sent]) -> int:
    """Return how many tokens of prompts another request leaves, in whatever order they run.

    In sorted order each neighbour has the longest common beginning, and the sum over neighbours
    counts a beginning once less than requests have it.
    """
    ordered = sorted(
        ((*prompt, *output), len(prompt))
        for prompt, output in sent  # a later turn holds outputs
    )
    return sum(
        min(_common(first, second), max(num_first, num_second))
        for (first, num_first), (second, num_second) in pairwise(ordered)
    )


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    least = min(len(first), len(second))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), least)


def note_reuse(outcome: Outcome, part: str, found: Reuse) -> None:
    """Add the share to an outcome, and a reason where prompts were not computed as was meant.

    Args:
        outcome: of the part.
        part: latency, throughput or serve.
        found: by its requests.
    """
    outcome.metrics[f"{part}/hit_share"] = found.share if outcome.num_measured else None
    if not found.hit_tokens:
        return
    what = (
        f"{part}: {found.hit_tokens:,.0f} of {found.prompt_tokens:,} prompt tokens were found in a "
        "prefix cache"
    )
    if found.is_foreign:
        outcome.reasons.append(
            f"{what}, where requests of this part share {found.shared_tokens:,}: earlier requests "
            "had left them there, and the figures are not of computing these prompts. Restart the "
            "server, turn its prefix cache off, or send other prompts (a seed, a prompts_file)."
        )
    elif part != "serve":
        outcome.notes.append(f"{what}, because the prompts begin alike: they were computed once.")
