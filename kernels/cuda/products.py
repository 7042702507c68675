"""Products of few tokens: one kernel with two loaders, plain weights and codes.

The order of the sums follows from the sizes and the card, never from the loader, so both give equal
bits; nor does it change among 1 to 16 tokens, 17 to 32, or 33 to 64.
"""

import functools
from dataclasses import dataclass

import torch

from kernels.arguments import Codes
from kernels.cuda.driver import HOPPER, Args, Kernel, capability, launch, max_shared_bytes
from kernels.sizes import LEAST_CAPABILITY, MAX_SMALL_TOKENS

_LARGE_SHARED_BYTES = 200 * 1024
"""A block of eight warps has room for its copies ahead from here on."""
_RESERVED_BYTES = 1024
"""Shared memory of a block that the driver keeps."""


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

    def waves(self, num_blocks: int, shared_bytes: int) -> int:
        """Return how often the card is filled with blocks.

        Args:
            num_blocks: of the grid.
            shared_bytes: of a block.
        """
        resident = (self.shared_bytes + _RESERVED_BYTES) // (shared_bytes + _RESERVED_BYTES)
        return -(-num_blocks // max(1, resident * self.multiprocessors))


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a product.

    Attributes:
        is_wide: whether groups of four warps multiply 64 rows each (Hopper).
        num_tiles: of 8 tokens.
        warps: that share the inputs of a row; groups where is_wide. The order of sums is theirs.
        rows: tiles of 16 rows of a warp, gates and ups counted apart.
        stages: steps of 64 inputs, one of which is multiplied while the others are copied.
    """

    is_wide: bool
    num_tiles: int
    warps: int
    rows: int
    stages: int

    def shared_bytes(self, *, has_codes: bool, is_gated: bool) -> int:
        """Return the shared memory of a block.

        Args:
            has_codes: whether weights are codes.
            is_gated: whether rows are gates and ups.
        """
        tile, x = (1536 if has_codes else 2048), self.num_tiles * 1024
        if self.is_wide:
            sums = self.warps * self.num_tiles * 8 * 68 * 4
            return max(self.warps * self.stages * (4 * tile + x), sums)
        sums = (2 if is_gated else 1) * self.warps * self.num_tiles * 8 * 20 * 4
        return max(self.warps * self.stages * (self.rows * tile + x), sums)

    def kernel(self, *, has_codes: bool, is_gated: bool, is_half: bool) -> Kernel:
        """Return the kernel of this shape.

        Args:
            has_codes: whether weights are codes.
            is_gated: whether rows are gates and ups.
            is_half: whether elements are float16.
        """
        kinds = f"{str(has_codes).lower()}, {str(is_gated).lower()}"
        if self.is_wide:
            expression = f"wide<{self.num_tiles}, {self.warps}, {self.stages}, {kinds}>"
            return Kernel(expression, self.warps * 128, is_half)
        shape = f"{self.num_tiles}, {self.warps}, {self.rows}, {self.stages}"
        return Kernel(f"narrow<{shape}, {kinds}>", self.warps * 32, is_half)

    def num_blocks(self, num_rows: int, *, is_gated: bool) -> int:
        """Return the blocks of a grid.

        Args:
            num_rows: of the result.
            is_gated: whether a row of the result is one of gates and one of ups.
        """
        per_block = 64 if self.is_wide else 16 * self.rows
        return -(-num_rows // (per_block // 2 if is_gated else per_block))


def tile_of(num_tokens: int, num_rows: int, card: Card, *, is_gated: bool, has_codes: bool) -> Tile:
    """Return the shape of a product of at most MAX_SMALL_TOKENS tokens.

    The order of sums follows from the tokens (to 16, to 32, more), the rows and the card; so chosen
    on an H200 from measurements of products of 19 sizes. Of the shapes with that order, the one
    whose blocks fill the card least often runs, with as much copied ahead as that allows.

    Args:
        num_tokens: tokens.
        num_rows: rows of the weight, gates and ups counted apart.
        card: where it runs.
        is_gated: whether they are gates and ups.
        has_codes: whether weights are codes.
    """
    num_tiles = 1 if num_tokens <= 8 else 2 if num_tokens <= 16 else 4 if num_tokens <= 32 else 8
    tiles = num_rows // 16
    has_room = card.shared_bytes >= _LARGE_SHARED_BYTES
    wide_from = 265 if num_tokens > 32 else 1500 if is_gated else 900
    if card.is_hopper and num_tokens > 16 and tiles >= wide_from:
        groups = 4 if tiles < 640 else 2
        if num_tokens > 32 and _waves(2, 3, num_rows, card) > _waves(1, 4, num_rows, card) == 1:
            groups = 1
        most = 5 if num_tiles == 8 else 4
        shapes = [Tile(True, num_tiles, groups, 1, stages) for stages in range(most, 2, -1)]
    else:
        few = 500 if num_tokens <= 16 else 264
        warps = 8 if has_room and tiles <= few else 4
        rows = (2,) if is_gated or (warps == 4 and num_tiles <= 2) else (1, 2)
        stages = (4, 3) if num_tiles <= 2 else (3, 2)
        shapes = [Tile(False, num_tiles, warps, r, each) for each in stages for r in rows]

    def bytes_of(tile: Tile) -> int:
        return tile.shared_bytes(has_codes=has_codes, is_gated=is_gated)

    def cost(tile: Tile) -> tuple[int, int]:
        blocks = tile.num_blocks(num_rows // 2 if is_gated else num_rows, is_gated=is_gated)
        per_processor = -(-blocks // card.multiprocessors)
        return card.waves(blocks, bytes_of(tile)), per_processor * tile.rows

    return min((tile for tile in shapes if bytes_of(tile) <= card.shared_bytes), key=cost)


def _waves(groups: int, stages: int, num_rows: int, card: Card) -> int:
    """Return how often 64 tokens times plain rows fill a card with blocks of so many groups."""
    tile = Tile(True, 8, groups, 1, stages)
    shared_bytes = tile.shared_bytes(has_codes=False, is_gated=False)
    return card.waves(tile.num_blocks(num_rows, is_gated=False), shared_bytes)


@functools.cache
def _launch_shape(
    num_tokens: int,
    num_rows: int,
    device: torch.device,
    is_gated: bool,
    has_codes: bool,
    is_half: bool,
) -> tuple[Kernel, int, int]:
    """Return the kernel of a product on a device, its blocks and the shared memory of each."""
    properties = torch.cuda.get_device_properties(device)
    is_hopper = capability(device)[0] == HOPPER
    card = Card(properties.multi_processor_count, max_shared_bytes(device), is_hopper)
    tile = tile_of(num_tokens, num_rows, card, is_gated=is_gated, has_codes=has_codes)
    kernel = tile.kernel(has_codes=has_codes, is_gated=is_gated, is_half=is_half)
    blocks = tile.num_blocks(num_rows // 2 if is_gated else num_rows, is_gated=is_gated)
    return kernel, blocks, tile.shared_bytes(has_codes=has_codes, is_gated=is_gated)


def can_run(x: torch.Tensor, weight: torch.Tensor, *, is_gated: bool) -> bool:
    """Tell whether a plain weight fills the tiles, on a card that has what the kernels need.

    Args:
        x: [T, K], on a GPU.
        weight: [N, K].
        is_gated: whether its rows are gates and ups.
    """
    num_rows, size_in = weight.shape
    return (
        capability(x.device) >= LEAST_CAPABILITY
        and num_rows % (32 if is_gated else 16) == 0
        and size_in % 64 == 0
        and weight.stride(0) % 8 == 0
        and weight.data_ptr() % 16 == 0
    )


def linear(
    x_TK: torch.Tensor,
    weight: torch.Tensor | Codes,
    bias: torch.Tensor | None,
    *,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> torch.Tensor:
    """Launch a product of 1 to MAX_SMALL_TOKENS tokens on the current stream.

    Args:
        x_TK: [T, K] bfloat16 or float16.
        weight: [N, K] for which can_run holds, of the same dtype; or codes of bfloat16. Also over
            pinned host memory.
        bias: [N] or None.
        is_gated: its rows are gates and then as many ups; return silu(gate) * up.
        is_gelu: of a gated product, gelu(gate) * up instead.

    Returns:
        A new tensor [T, N], or [T, N / 2] where gated.
    """
    num_tokens, size_in = x_TK.shape
    if num_tokens > MAX_SMALL_TOKENS:
        raise ValueError(f"linear.x: expected {MAX_SMALL_TOKENS} tokens at most, got {num_tokens}")
    if x_TK.stride(0) % 8 or x_TK.stride(1) != 1 or x_TK.data_ptr() % 16:
        x_TK = x_TK.clone(memory_format=torch.contiguous_format)
    device, has_codes = x_TK.device, isinstance(weight, Codes)
    num_rows = weight.shape[0]
    size_out = num_rows // 2 if is_gated else num_rows
    out = torch.empty((num_tokens, size_out), dtype=x_TK.dtype, device=device)
    if isinstance(weight, Codes):
        args = weight.launches.get("product")
        if args is None:
            args = weight.launches["product"] = Args(inputs=size_in)
            set_codes(args, weight)
    else:
        args = Args(weight=weight.data_ptr(), weight_stride=weight.stride(0), inputs=size_in)
    args.x, args.x_stride, args.tokens = x_TK.data_ptr(), x_TK.stride(0), num_tokens
    args.out, args.rows, args.is_gelu = out.data_ptr(), size_out, is_gelu
    args.bias = None if bias is None else bias.data_ptr()
    is_half = x_TK.dtype == torch.float16
    shape = _launch_shape(num_tokens, num_rows, device, is_gated, has_codes, is_half)
    launch(*shape, args, device)
    return out


def set_codes(args: Args, codes: Codes) -> None:
    """Point a kernel's argument to codes.

    Args:
        args: written.
        codes: on the device, or over pinned host memory.
    """
    args.bytes, args.codes = codes.bytes.data_ptr(), codes.codes.data_ptr()
    args.first, args.offsets = codes.first.data_ptr(), codes.offsets.data_ptr()
    args.table = codes.table.data_ptr()
