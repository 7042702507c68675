"""A prefix cache without blocks, for engines and servers that stand in."""

from collections.abc import Sequence


class PrefixCache:
    """Keeps every beginning of what was asked for."""

    def __init__(self) -> None:
        self._kept: set[tuple[object, ...]] = set()

    def find(self, salt: str | None, tokens: Sequence[int]) -> int:
        """How many tokens an earlier prompt of that salt began with; the prompt is kept."""
        beginnings = [(salt, *tokens[:end]) for end in range(1, len(tokens) + 1)]
        num_found = sum(beginning in self._kept for beginning in beginnings)
        self._kept.update(beginnings)
        return num_found
