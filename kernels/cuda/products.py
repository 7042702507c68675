"""Products of few tokens: one kernel with loaders for plain weights, codes and quantised ones.

The order of the sums follows from the sizes and the card, never from the loader, so all give equal
bits; nor does it change among 1 to 16 tokens, 17 to 32, or 33 to 64.
"""

import functools
from dataclasses import dataclass
from typing import Final

import torch

from kernels.arguments import Codes, Quantised
from kernels.cuda.driver import HOPPER, Args, Kernel, capability, launch, max_shared_bytes
from kernels.cuda.loaders import CODES, PLAIN, Loader, args_of, loader_of
from kernels.sizes import LEAST_CAPABILITY, MAX_SMALL_TOKENS

_LARGE_SHARED_BYTES = 200 * 1024
"""A block of eight warps has room for its copies ahead from here on."""
_COPIED_BYTES = 20 * 1024
"""Most shared memory of a share of the inputs of a quantised weight, for one token."""
_RESERVED_BYTES = 1024
"""Shared memory of a block that the driver keeps."""
_MOST_WARPS = 24
"""Warps that the registers of a multiprocessor hold."""
_OF_ALL = (3, 2)
"""Warps with the same share of one token's inputs, and tiles of each, of a block that has a
multiprocessor for itself."""
_FEW_TILES, _SOME_TILES = 264, 640
"""Tiles of 16 rows up to which a card is only filled where many warps share the inputs of a row."""


TOKEN_TILES: Final = {8: 1, 16: 2, 32: 4, 40: 5, MAX_SMALL_TOKENS: 8}
"""The tiles of 8 tokens of a kernel, by the most tokens that it serves. Of 40 tokens a block of
eight warps has room for three steps of copies, of more for two."""


@dataclass(frozen=True, slots=True)
class Card:
    """What shapes depend on.

    Attributes:
        multiprocessors: of the card.
        shared_bytes: shared memory of a block at most.
        is_hopper: whether it is of compute capability 9.0.
    """

    multiprocessors: int
    shared_bytes: int
    is_hopper: bool

    def resident(self, shared_bytes: int, num_warps: int) -> int:
        """Return how many blocks a multiprocessor holds."""
        by_memory = (self.shared_bytes + _RESERVED_BYTES) // (shared_bytes + _RESERVED_BYTES)
        return max(1, min(by_memory, _MOST_WARPS // num_warps))


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a product.

    Attributes:
        is_wide: whether groups of four warps multiply 64 rows each (Hopper).
        num_tiles: of 8 tokens; 8 where is_wide.
        splits: shares of the inputs, each of a warp, or of a group where is_wide. The order of sums
            is theirs.
        sharing: warps or groups with other rows and the same share, whose tokens they copy once.
        rows: tiles of 16 rows of a warp, gates and ups counted apart; 1 where is_wide.
        stages: steps of 64 inputs, of which a loader's steps are multiplied while the others are
            copied.
        is_alone: whether it is of one token with values of fewer than 8 bits.
    """

    is_wide: bool
    num_tiles: int
    splits: int
    sharing: int
    rows: int
    stages: int
    is_alone: bool = False

    @property
    def num_warps(self) -> int:
        """Warps of a block."""
        return self.splits * self.sharing * (4 if self.is_wide else 1)

    @property
    def num_rows(self) -> int:
        """Rows of a block, gates and ups counted apart."""
        return self.sharing * (64 if self.is_wide else 16 * self.rows)

    def steps(self, loader: Loader) -> int:
        """Return how many steps are multiplied between two waits."""
        if self.is_wide or self.num_tiles > 2 or loader.steps == 1:
            return 1
        is_deep = self.num_tiles == 1 and self.stages >= 8 and self.stages % 4 == 0
        return loader.steps if is_deep else 2

    def shared_bytes(self, loader: Loader, num_tokens: int = 8) -> int:
        """Return the shared memory of a block.

        Args:
            loader: of the weight.
            num_tokens: tokens, whose rows alone a loader of several steps keeps where they are
                fewer than a tile.
        """
        is_few = self.num_tiles == 1 and loader.steps > 1
        rows, steps = num_tokens if is_few else 8 * self.num_tiles, self.steps(loader)
        if self.is_wide:
            weights = self.stages * -(-self.sharing * 4 * loader.chunk_bytes(1) // 1024) * 1024
        else:
            chunk = loader.chunk_bytes(steps * self.rows)
            weights = self.stages // steps * self.sharing * chunk
        if self.is_alone:  # every warp has the token
            rows = self.sharing
        copied = self.splits * (weights + self.stages * rows * 128)
        row_sums = 68 if self.is_wide else 20 * self.rows
        return max(copied, self.sharing * self.splits * self.num_tiles * 8 * row_sums * 4)

    def kernel(
        self, loader: Loader, *, is_gated: bool, is_half: bool, has_experts: bool = False
    ) -> Kernel:
        """Return the kernel of this shape.

        Args:
            loader: of the weight.
            is_gated: whether rows are gates and ups.
            is_half: whether elements are float16.
            has_experts: whether rows are those of experts; not where is_wide.
        """
        kinds = f"{loader.expression}, {str(is_gated).lower()}"
        kinds += ", true" if has_experts else ""
        if self.is_wide:
            name = f"wide<{self.splits}, {self.sharing}, {self.stages}, {kinds}>"
        else:
            shape = f"{self.num_tiles}, {self.splits}, {self.sharing}, {self.rows}, {self.stages}"
            name = f"narrow<{shape}, {self.steps(loader)}, {kinds}>"
            if self.is_alone:
                name = f"alone<{shape.partition(', ')[2]}, {self.steps(loader)}, {kinds}>"
        is_deep = loader.steps > 1 and self.num_tiles <= 2
        warps = self.num_warps
        if self.is_alone:  # with more rows a warp needs the registers of several
            warps *= self.rows // 2 if is_gated else self.rows
        least_blocks = max(1, _MOST_WARPS // warps) if is_deep else 1
        return Kernel(name, self.num_warps * 32, is_half, least_blocks=least_blocks)

    def num_blocks(self, num_rows: int, *, is_gated: bool) -> int:
        """Return the blocks of a grid.

        Args:
            num_rows: of the result.
            is_gated: whether a row of the result is one of gates and one of ups.
        """
        return -(-num_rows // (self.num_rows // 2 if is_gated else self.num_rows))


def tile_of(
    num_tokens: int, num_rows: int, card: Card, *, is_gated: bool, loader: Loader = PLAIN
) -> Tile:
    """Return the shape of a product of at most MAX_SMALL_TOKENS tokens.

    The order of sums follows from the tokens (to 16, to 32, more), the rows and the card. Of the
    shapes with that order the one runs whose busiest multiprocessor has the fewest rows, in the
    fewest waves, which it fills: so chosen on an H200 by timing every shape of eight products of
    7B models at 8, 16, 32 and 64 tokens (`python -m kernels.bench linear_codes` times those of an
    8B model).

    Args:
        num_tokens: tokens.
        num_rows: rows of the weight, gates and ups counted apart.
        card: where it runs.
        is_gated: whether they are gates and ups.
        loader: of the weight.
    """
    num_tiles = next(tiles for most, tiles in TOKEN_TILES.items() if num_tokens <= most)
    tiles = num_rows // 16
    if loader.steps > 1 and num_tiles <= 2:
        return _deep_tile(num_tokens, num_rows, card, is_gated=is_gated, loader=loader)
    is_wide = card.is_hopper and num_tiles > 4 and tiles > _FEW_TILES
    if is_wide:
        splits = 4 if tiles <= _SOME_TILES else 2
        shapes = [Tile(True, 8, splits, each, 1, n) for n in (4, 3) for each in (1, 2, 3)]
    else:
        splits = _splits(num_tiles, tiles, card)
        ahead: tuple[int, ...] = (4, 3, 2)
        sharing = tuple(n for n in (1, 2) if n * splits >= 4)
        if num_tiles > 4:  # the kernel that follows starts early: few warps leave it registers
            sharing = sharing[:1]
        elif loader == CODES and num_tiles == 4:
            ahead, sharing = (3, 4, 5, 2), (*sharing, 4)
        shapes = [
            Tile(False, num_tiles, splits, each, rows, n)
            for n in ahead
            for each in sharing
            for rows in ((2,) if is_gated else (1, 2))
        ]

    def bytes_of(tile: Tile) -> int:
        return tile.shared_bytes(loader)

    def cost(tile: Tile) -> tuple[int, int, int, int]:
        blocks = tile.num_blocks(num_rows // 2 if is_gated else num_rows, is_gated=is_gated)
        per_wave = card.multiprocessors * card.resident(bytes_of(tile), tile.num_warps)
        waves, each = -(-blocks // per_wave), per_wave // card.multiprocessors
        if waves == 1:
            each = -(-blocks // card.multiprocessors)
        return (
            waves * each * tile.num_rows,
            waves,
            -round(10 * blocks / (waves * per_wave)),
            -tile.sharing,
        )

    # The first of equals: what is copied ahead is in order of preference.
    return min((tile for tile in shapes if bytes_of(tile) <= card.shared_bytes), key=cost)


def _splits(num_tiles: int, tiles: int, card: Card) -> int:
    """Return the shares of the inputs of a product that is not wide."""
    few, some = (500, 10**9) if num_tiles <= 2 else (_FEW_TILES, _SOME_TILES)
    has_room = card.shared_bytes >= _LARGE_SHARED_BYTES
    return 8 if tiles <= few and has_room else 4 if tiles <= some else 2


def _deep_tile(
    num_tokens: int, num_rows: int, card: Card, *, is_gated: bool, loader: Loader
) -> Tile:
    """Return the shape of a product of at most 16 tokens with a quantised weight.

    Such weights are small: where a block has most of a multiprocessor, as many steps are copied
    ahead as there is room for, so that they arrive while earlier kernels run. Tokens of more than
    one tile are more bytes than the weights: few blocks of many warps read them. Few rows are left
    to each block where blocks are few. For one token, a warp takes several tiles of a light weight,
    which share what it does for the token (so chosen on an H200 by timing steps of a 7B model).
    """
    num_tiles, is_alone = -(-num_tokens // 8), num_tokens == 1 and loader.steps > 2
    splits = _splits(num_tiles, num_rows // 16, card)
    rows, result_rows = (2, num_rows // 2) if is_gated else (1, num_rows)
    shapes = [(2, rows)]  # warps with the same share, and tiles of each
    if num_tiles == 2:
        shapes = [(n, rows) for n in ((6, 3, 2, 1) if is_gated else (3, 2, 1))]
    elif is_alone and loader.is_light and splits == 4 and card.shared_bytes >= _LARGE_SHARED_BYTES:
        shapes = [(1, 4)] if is_gated else [_OF_ALL, *shapes]
    # Weights that take many instructions arrive in time with fewer steps ahead.
    is_deepest = splits == 8 and (loader.is_light or not is_alone)
    ahead = (12, 8, 6, 4) if is_deepest else (8, 6, 4)

    def tile_of_shape(sharing: int, rows: int) -> Tile:
        tiles = [Tile(False, num_tiles, splits, sharing, rows, n, is_alone) for n in ahead]
        room = card.shared_bytes if (sharing, rows) == _OF_ALL else splits * _COPIED_BYTES
        return next(
            (
                tile
                for tile in tiles
                if tile.shared_bytes(loader, 1) <= room
                and tile.shared_bytes(loader) <= card.shared_bytes
            ),
            tiles[-1],
        )

    def rows_of_busiest(tile: Tile) -> int:
        blocks = tile.num_blocks(result_rows, is_gated=is_gated)
        return -(-blocks // card.multiprocessors) * tile.num_rows

    def fits(tile: Tile) -> bool:
        return tile.num_warps <= _MOST_WARPS and tile.shared_bytes(loader) <= card.shared_bytes

    tiles = [tile_of_shape(*each) for each in shapes]
    return min(filter(fits, tiles), key=rows_of_busiest, default=tiles[-1])


@functools.cache
def launch_shape(
    num_tokens: int,
    num_rows: int,
    device: torch.device,
    is_gated: bool,
    loader: Loader,
    is_half: bool,
) -> tuple[Kernel, int, int]:
    """Return the kernel of a product on a device, its blocks and the shared memory of each."""
    properties = torch.cuda.get_device_properties(device)
    is_hopper = capability(device)[0] == HOPPER
    card = Card(properties.multi_processor_count, max_shared_bytes(device), is_hopper)
    tile = tile_of(num_tokens, num_rows, card, is_gated=is_gated, loader=loader)
    kernel = tile.kernel(loader, is_gated=is_gated, is_half=is_half)
    blocks = tile.num_blocks(num_rows // 2 if is_gated else num_rows, is_gated=is_gated)
    return kernel, blocks, tile.shared_bytes(loader, num_tokens)


def token_counts(max_tokens: int) -> list[int]:
    """Return a number of tokens for each kernel that products of so many tokens or fewer launch."""
    counts = [most for most in (1, *TOKEN_TILES) if most < max_tokens]
    return [*counts, min(max_tokens, MAX_SMALL_TOKENS)]


def kernels_of(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_gated: bool,
    max_tokens: int,
    loader: Loader = PLAIN,
) -> set[Kernel]:
    """Return the kernels that `linear` launches with a weight, so that they can be compiled before.

    Args:
        shape: of the weight.
        dtype: of the tokens.
        device: where they run.
        is_gated: whether its rows are gates and then as many ups.
        max_tokens: of a product.
        loader: of the weight.
    """
    num_rows, size_in = shape
    if dtype == torch.float32 or not fills_tiles(num_rows, size_in, device, is_gated=is_gated):
        return set()
    is_half = dtype == torch.float16
    counts = token_counts(max_tokens)
    shapes = (launch_shape(n, num_rows, device, is_gated, loader, is_half) for n in counts)
    return {kernel for kernel, *_ in shapes}


def fills_tiles(num_rows: int, size_in: int, device: torch.device, *, is_gated: bool) -> bool:
    """Whether a weight fills the tiles, on a card that has what the kernels need.

    Args:
        num_rows: of the weight.
        size_in: its columns.
        device: where it lies.
        is_gated: whether its rows are gates and ups.
    """
    return (
        capability(device) >= LEAST_CAPABILITY
        and num_rows % (32 if is_gated else 16) == 0
        and size_in % 64 == 0
    )


def can_run(x: torch.Tensor, weight: torch.Tensor, *, is_gated: bool) -> bool:
    """Tell whether a plain weight fills the tiles, on a card that has what the kernels need.

    Args:
        x: [T, K], on a GPU.
        weight: [N, K].
        is_gated: whether its rows are gates and ups.
    """
    num_rows, size_in = weight.shape
    return (
        fills_tiles(num_rows, size_in, x.device, is_gated=is_gated)
        and weight.stride(0) % 8 == 0
        and weight.data_ptr() % 16 == 0
    )


def linear(
    x_TK: torch.Tensor,
    weight: torch.Tensor | Codes | Quantised,
    bias: torch.Tensor | None,
    *,
    is_gated: bool = False,
    is_gelu: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch a product of 1 to MAX_SMALL_TOKENS tokens on the current stream.

    Args:
        x_TK: [T, K] bfloat16 or float16.
        weight: [N, K] for which can_run holds, of the same dtype; or codes of bfloat16; or
            quantised, for which fills_tiles holds. Also over pinned host memory.
        bias: [N] or None.
        is_gated: its rows are gates and then as many ups; return silu(gate) * up.
        is_gelu: of a gated product, gelu(gate) * up instead.
        out: [T, N], or [T, N / 2] where gated, columns of a tensor; allocated if None.

    Returns:
        The result, as `out`.
    """
    num_tokens, size_in = x_TK.shape
    if num_tokens > MAX_SMALL_TOKENS:
        raise ValueError(f"linear.x: expected {MAX_SMALL_TOKENS} tokens at most, got {num_tokens}")
    if x_TK.stride(0) % 8 or x_TK.stride(1) != 1 or x_TK.data_ptr() % 16:
        x_TK = x_TK.clone(memory_format=torch.contiguous_format)
    device, loader = x_TK.device, PLAIN
    num_rows = weight.shape[0]
    size_out = num_rows // 2 if is_gated else num_rows
    if out is None:
        out = torch.empty((num_tokens, size_out), dtype=x_TK.dtype, device=device)
    if isinstance(weight, torch.Tensor):
        args = Args(weight=weight.data_ptr(), weight_stride=weight.stride(0), inputs=size_in)
    elif isinstance(weight, Codes):
        loader, args = CODES, args_of(weight, "product")
    else:
        loader, args = loader_of(weight), args_of(weight, "product")
    args.x, args.x_stride, args.tokens = x_TK.data_ptr(), x_TK.stride(0), num_tokens
    args.out, args.out_stride = out.data_ptr(), out.stride(0)
    args.rows, args.is_gelu = size_out, is_gelu
    args.bias = None if bias is None else bias.data_ptr()
    is_half = x_TK.dtype == torch.float16
    shape = launch_shape(num_tokens, num_rows, device, is_gated, loader, is_half)
    launch(*shape, args, device)
    return out
