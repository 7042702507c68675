"""How much of the KV cache sequences take, and how bytes are shared out; pure arithmetic, no torch.

Layers that attend to equally many tokens are one group. Of a window a sequence holds what a step
of it can see.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
class KVGroup:
    """Layers that attend to equally many tokens; they share block ids and block tables."""

    layers: tuple[int, ...]
    """In order."""
    window: int | None
    """Most tokens that a token sees, itself included; None: all."""
    block_bytes: int
    """Keys and values of one block in all of these layers."""
    num_gpu_blocks: int = 0
    num_pinned: int = 0
    """Host blocks in pinned memory, the first ones of the host tier."""
    num_pageable: int = 0
    """Host blocks behind them, in memory that is reached by staging only."""
    in_place: bool = False
    """Compute reads and writes the pinned ones where they are."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier."""
        return self.num_pinned + self.num_pageable

    @property
    def num_in_place(self) -> int:
        """Host blocks that sequences own."""
        return self.num_pinned if self.in_place else 0

    @property
    def layer_bytes(self) -> int:
        """Keys and values of one block in one layer."""
        return self.block_bytes // len(self.layers)


@dataclass(frozen=True, kw_only=True)
class KVSizes:
    """Groups of layers, and what sequences take of each.

    The first group attends to most: to all where any layer does. Sequences own host blocks of
    the first group only.
    """

    groups: tuple[KVGroup, ...]
    """Ordered by how much they attend to, most first; without blocks until `with_pools`."""
    block_size: int
    max_model_len: int
    max_num_seqs: int
    step_tokens: int
    """Most tokens of a step."""
    keeps_idle: bool = False
    """Blocks that no sequence uses hold prefixes: any number has a use."""

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Most tokens that each group attends to; None: all."""
        return tuple(group.window for group in self.groups)

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each group."""
        return tuple(group.block_bytes for group in self.groups)

    @property
    def pools(self) -> tuple[int, ...]:
        """Blocks of each group on the GPU."""
        return tuple(group.num_gpu_blocks for group in self.groups)

    @property
    def host_blocks(self) -> tuple[int, ...]:
        """Blocks of each group in the host tier."""
        return tuple(group.num_host_blocks for group in self.groups)

    def with_pools(self, pools: Sequence[int]) -> "KVSizes":
        """Return the same groups with so many blocks each on the GPU."""
        pairs = zip(self.groups, pools, strict=True)
        return replace(self, groups=tuple(replace(g, num_gpu_blocks=n) for g, n in pairs))

    def with_host(self, num_pinned: int, num_pageable: int, *, in_place: bool) -> "KVSizes":
        """Return the same groups with so many host blocks each.

        Args:
            num_pinned: In pinned memory.
            num_pageable: Behind them.
            in_place: Sequences use pinned blocks of the first group where they are.
        """
        groups = tuple(
            replace(
                group,
                num_pinned=num_pinned,
                num_pageable=num_pageable,
                in_place=in_place and not number,
            )
            for number, group in enumerate(self.groups)
        )
        return replace(self, groups=groups)

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
        return (NO_LIMIT,) * len(self.groups) if self.keeps_idle else self.useful

    def num_bytes(self, counts: Sequence[int]) -> int:
        """Return the bytes of so many blocks of each group."""
        return sum(n * size for n, size in zip(counts, self.block_bytes, strict=True))

    def sequence_bytes(self, num_tokens: int) -> int:
        """Return the bytes that one sequence of so many tokens takes at once."""
        return self.num_bytes(self.blocks(num_tokens))

    def fit(self, room: int, in_place: int = 0) -> tuple[int, ...]:
        """Return the blocks of each group that bytes are shared out to.

        First one sequence of max_model_len gets its blocks; then all groups get equally many
        more, so that short sequences lack none, until those behind the first have `most`.

        Args:
            room: Bytes.
            in_place: Of that sequence's blocks in the first group, how many can lie elsewhere.
        """
        need, most = self._least(in_place), self.most
        rest = room - self.num_bytes(need)
        if rest >= 0:
            first, *others = self._share(rest, need, most)
            return min(first, most[0]), *others
        _, *others = self._share(max(0, room), (0,) * len(need), need)
        left = room - self.num_bytes((0, *others))
        return min(max(0, left // self.block_bytes[0]), need[0]), *others

    def _share(self, room: int, start: Sequence[int], most: Sequence[int]) -> list[int]:
        """Add equally many blocks to each group; `most` caps those behind the first."""
        sizes, counts, growing = self.block_bytes, list(start), set(range(len(start)))
        while True:
            more = room // sum(sizes[group] for group in growing)
            full = {group for group in growing if group and start[group] + more >= most[group]}
            if not full:
                break
            for group in full:
                counts[group] = most[group]
                room -= (most[group] - start[group]) * sizes[group]
            growing -= full
        for group in growing:
            counts[group] += more
        return counts

    def room(self, num_blocks: int, in_place: int = 0) -> int:
        """Return the least bytes with which `fit` gives the first group so many blocks."""
        need, most = self._least(in_place), self.most
        more = max(0, num_blocks - need[0])
        others = (min(n + more, limit) for n, limit in zip(need[1:], most[1:], strict=True))
        return self.num_bytes((need[0] + more, *others))

    def _least(self, in_place: int) -> tuple[int, ...]:
        """Blocks of one sequence of max_model_len that must lie on the GPU."""
        first, *others = self.blocks(self.max_model_len)
        useful = self.useful[1:]
        return max(1, first - in_place), *map(min, others, useful)

    def longest(self, room: int, in_place: int = 0, limit: int | None = None) -> int:
        """Return the longest sequence that so many bytes hold, in whole blocks.

        Args:
            room: Bytes on the GPU.
            in_place: Blocks of the first group that can lie elsewhere, beside at least one here.
            limit: No longer than this; None: than max_model_len where there is a window.
        """
        size = self.block_size
        if self.windows == (None,):
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

    def to_dict(self) -> list[dict[str, Any]]:
        """Return each group as plain data."""
        return [
            {
                "layers": len(group.layers),
                "window": group.window,
                "block_bytes": group.block_bytes,
                "num_blocks": group.num_gpu_blocks,
                "tokens": group.num_gpu_blocks * self.block_size,
            }
            for group in self.groups
        ]


def kv_sizes(
    spec: ModelSpec,
    dtype: str,
    *,
    windows: Sequence[int | None],
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
        windows: The window in force in each layer; None: it attends to all.
        block_size: Tokens in a block.
        max_model_len: Longest sequence.
        max_num_seqs: Sequences that run at once.
        step_tokens: Most tokens of a step.
        keeps_idle: Whether blocks that no sequence uses hold prefixes.
    """
    layer_bytes = spec.kv_bytes_per_token(dtype) // spec.num_hidden_layers * block_size
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    wider_first = sorted(layers, key=lambda window: NO_LIMIT if window is None else window)[::-1]
    return KVSizes(
        groups=tuple(
            KVGroup(
                layers=tuple(layers[window]),
                window=window,
                block_bytes=len(layers[window]) * layer_bytes,
            )
            for window in wider_first
        ),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        step_tokens=step_tokens,
        keeps_idle=keeps_idle,
    )
