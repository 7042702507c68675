"""How much of the KV cache sequences take, and how bytes are shared out; pure arithmetic, no torch.

Layers that attend to the whole context are one group, those with a window another; a model with
one kind of layer has one group. Of a window a sequence holds what a step of it can see.
"""

from dataclasses import dataclass
from typing import Any, Final

from engine.spec import ModelSpec

NO_LIMIT: Final = 2**60


def num_held(max_tokens: int, window: int | None, step_tokens: int, block_size: int) -> int:
    """Return the most blocks that a sequence holds while a step runs, expired ones given back.

    Args:
        max_tokens: The sequence's greatest length.
        window: Tokens that a token sees, itself included, at least 1; None: all.
        step_tokens: Most tokens of the sequence in one step.
        block_size: Tokens in a block, at least 1.
    """
    whole = -(-max_tokens // block_size)
    if window is None:
        return whole
    # The first token of the step sees window - 1 earlier ones; the span may begin at any offset.
    return min(whole, -(-(window + step_tokens - 2) // block_size) + 1)


@dataclass(frozen=True, kw_only=True)
class KVSizes:
    """Blocks and bytes of each group of layers, the one with a window last."""

    layers: tuple[tuple[int, ...], ...]
    """Of each group, in order."""
    windows: tuple[int | None, ...]
    """Most tokens that each group attends to; None: all."""
    block_bytes: tuple[int, ...]
    block_size: int
    max_model_len: int
    max_num_seqs: int
    step_tokens: int
    """Most tokens of a step."""
    keeps_idle: bool = False
    """Blocks that no sequence uses hold prefixes: any number has a use."""

    def blocks(self, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks of each group that one sequence of so many tokens takes at once."""
        step = min(self.step_tokens, num_tokens)
        return tuple(num_held(num_tokens, w, step, self.block_size) for w in self.windows)

    @property
    def useful(self) -> tuple[int, ...]:
        """The most blocks of each group that max_num_seqs sequences take, two steps in force."""
        whole = num_held(self.max_model_len, None, 1, self.block_size)
        steps = -(-2 * self.step_tokens // self.block_size)
        found = []
        for window in self.windows:
            each = num_held(self.max_model_len, window, 1, self.block_size)
            more = 0 if window is None else steps
            found.append(min(self.max_num_seqs * each + more, self.max_num_seqs * whole))
        return tuple(found)

    @property
    def most(self) -> tuple[int, ...]:
        """The most blocks of each group that are planned on the GPU, where it has room for them."""
        return (NO_LIMIT,) * len(self.windows) if self.keeps_idle else self.useful

    def num_bytes(self, pools: tuple[int, ...]) -> int:
        """Return the bytes of so many blocks of each group."""
        return sum(n * size for n, size in zip(pools, self.block_bytes, strict=True))

    def sequence_bytes(self, num_tokens: int) -> int:
        """Return the bytes that one sequence of so many tokens takes at once."""
        return self.num_bytes(self.blocks(num_tokens))

    def fit(self, room: int, in_place: int = 0) -> tuple[int, ...]:
        """Return the blocks of each group that bytes are shared out to.

        First one sequence of max_model_len gets its blocks; then both groups get equally many
        more, so that short sequences lack neither, until the windows have `most`.

        Args:
            room: Bytes.
            in_place: Of that sequence's blocks in the first group, how many can lie elsewhere.
        """
        if len(self.windows) == 1:
            return (min(room // self.block_bytes[0], self.most[0]),)
        need, most, (size, window_size) = self._least(in_place), self.most, self.block_bytes
        rest = room - self.num_bytes(need)
        if rest < 0:
            count = min(need[1], room // (size + window_size))
            first = (room - count * window_size) // size
            return min(max(0, first), need[0]), max(0, count)
        more = rest // (size + window_size)
        if need[1] + more < most[1]:
            return min(need[0] + more, most[0]), need[1] + more
        return min((room - most[1] * window_size) // size, most[0]), most[1]

    def room(self, num_blocks: int, in_place: int = 0) -> int:
        """Return the least bytes with which `fit` gives the first group so many blocks."""
        if len(self.windows) == 1:
            return num_blocks * self.block_bytes[0]
        need, (size, window_size) = self._least(in_place), self.block_bytes
        more = max(0, num_blocks - need[0])
        windows = min(need[1] + more, self.most[1])
        return (need[0] + more) * size + windows * window_size

    def _least(self, in_place: int) -> tuple[int, ...]:
        """Blocks of one sequence of max_model_len that must lie on the GPU."""
        need = self.blocks(self.max_model_len)
        return max(1, need[0] - in_place), min(need[1], self.useful[1])

    def longest(self, room: int, in_place: int = 0, limit: int | None = None) -> int:
        """Return the longest sequence that so many bytes hold, in whole blocks.

        Args:
            room: Bytes on the GPU.
            in_place: Blocks of the first group that can lie elsewhere, beside at least one here.
            limit: No longer than this; None: than max_model_len where there is a window.
        """
        size = self.block_size
        if len(self.windows) == 1 and self.windows[0] is None:
            count = max(0, room) // self.block_bytes[0]
            found = (count + in_place) * size if count else 0
            return found if limit is None else min(found, limit)

        def is_held(num_blocks: int) -> bool:
            first, *others = self.blocks(num_blocks * size)
            return self.num_bytes((max(1, first - in_place), *others)) <= room

        most = self.max_model_len if limit is None else limit
        low, high = 0, -(-most // size) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_held(middle) else (low, middle)
        return low * size if limit is None else min(low * size, limit)

    def sequences(self, pools: tuple[int, ...], num_tokens: int) -> float:
        """Return how many sequences of so many tokens the blocks hold."""
        found = []
        for count, need, window in zip(pools, self.blocks(num_tokens), self.windows, strict=True):
            is_whole = window is None
            found.append(count * self.block_size / num_tokens if is_whole else count / need)
        return min(found)

    def to_dict(self, pools: tuple[int, ...]) -> list[dict[str, Any]]:
        """Return each group as plain data."""
        return [
            {
                "layers": len(layers),
                "window": window,
                "block_bytes": size,
                "num_blocks": count,
                "tokens": count * self.block_size,
            }
            for layers, window, size, count in zip(
                self.layers, self.windows, self.block_bytes, pools, strict=True
            )
        ]


def kv_sizes(
    spec: ModelSpec,
    dtype: str,
    *,
    window: int | None,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    step_tokens: int,
    keeps_idle: bool,
) -> KVSizes:
    """Return the sizes of a model's KV cache.

    Args:
        spec: Sizes of the model.
        dtype: Of keys and values.
        window: The window in force; None: no layer has one.
        block_size: Tokens in a block.
        max_model_len: Longest sequence.
        max_num_seqs: Sequences that run at once.
        step_tokens: Most tokens of a step.
        keeps_idle: Whether blocks that no sequence uses hold prefixes.
    """
    count = spec.num_hidden_layers
    some = () if window is None else spec.window_layers
    rest = tuple(index for index in range(count) if index not in set(some))
    groups: list[tuple[tuple[int, ...], int | None]] = [(rest, None), (some, window)]
    groups = [(layers, limit) for layers, limit in groups if layers]
    layer_bytes = spec.kv_bytes_per_token(dtype) // count * block_size
    return KVSizes(
        layers=tuple(layers for layers, _ in groups),
        windows=tuple(limit for _, limit in groups),
        block_bytes=tuple(len(layers) * layer_bytes for layers, _ in groups),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        step_tokens=step_tokens,
        keeps_idle=keeps_idle,
    )
