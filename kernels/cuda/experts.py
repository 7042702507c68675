"""Products of few tokens with experts: the kernel of products, a block for rows of one expert.

Inputs are shared by as many warps whatever the tokens are, so that a row has the same bits in every
batch of 1 to MAX_SMALL_TOKENS tokens; and with every kind of weight, as of other products.
"""

import functools
from typing import Final

import torch

from kernels.arguments import Codes, Quantised
from kernels.cuda.driver import Args, Kernel, capability, launch, max_shared_bytes
from kernels.cuda.loaders import CODES, PLAIN, Loader, args_of, loader_of
from kernels.cuda.products import TOKEN_TILES, Tile, token_counts
from kernels.expert_arguments import ExpertCache
from kernels.sizes import EXPERT_COPIERS, LEAST_CAPABILITY, MAX_SMALL_TOKENS

_SPLITS: Final = 4
_STATIC_BYTES: Final = 1024
"""Shared memory that the kernel has beside that of the launch: the tokens of its expert."""
_FOUR_BLOCKS, _THREE_BLOCKS = 55 * 1024, 74 * 1024
_TWO_BLOCKS, _ONE_BLOCK = 112 * 1024, 226 * 1024
"""Shared memory of a block where a multiprocessor of a large card holds so many."""


def can_run(x: torch.Tensor, w13: object, w2: object, ffn: int) -> bool:
    """Tell whether few tokens can be multiplied with experts here.

    Args:
        x: [T, D], on a GPU.
        w13: of blocks of 2 * ffn rows.
        w2: of blocks of D rows.
        ffn: inputs of w2.
    """
    hidden = x.shape[1]
    fits = hidden % 64 == 0 and ffn % 64 == 0 and 0 < x.shape[0] <= MAX_SMALL_TOKENS
    if x.dtype == torch.float32 or not fits or capability(x.device) < LEAST_CAPABILITY:
        return False
    return _is_read(w13) and _is_read(w2)


def _is_read(weight: object) -> bool:
    """Tell whether there is a loader of a weight as it lies."""
    if isinstance(weight, torch.Tensor):
        return weight.stride(0) % 8 == 0 and weight.stride(1) == 1 and weight.data_ptr() % 16 == 0
    return not isinstance(weight, Quantised) or weight.scale.dtype != torch.uint8


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return tokens whose rows begin at multiples of 16 bytes: themselves, or a copy."""
    if x.stride(0) % 8 or x.stride(1) != 1 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def experts_tile(num_tokens: int, loader: Loader, shared_bytes: int, *, is_gated: bool) -> Tile:
    """Return the shape of a product with experts.

    As many steps are copied ahead as let a multiprocessor of a large card hold three blocks, or two
    of many tokens, or one of the most; on a card with less shared memory fewer are. Four blocks of
    codes and at most 8 tokens that are not gated: all of 8 experts run at once (H200, 30B-A3B: 9.2
    us instead of 12.5).

    Args:
        num_tokens: tokens, 1 to MAX_SMALL_TOKENS.
        loader: of the weight.
        shared_bytes: of a block at most.
        is_gated: whether rows are gates and ups.
    """
    num_tiles = next(tiles for most, tiles in TOKEN_TILES.items() if num_tokens <= most)
    shapes: list[tuple[int, int]] = [(1, 2), *(() if is_gated else ((1, 1),))]
    room = _FOUR_BLOCKS if loader == CODES and num_tiles == 1 and not is_gated else _THREE_BLOCKS
    if num_tiles == 4:
        room = _TWO_BLOCKS
    if num_tiles > 4:
        shapes, room = [(2, 2), *shapes], _ONE_BLOCK
    is_deep = loader.steps > 1 and num_tiles <= 2
    stages = (8, 6, 4) if is_deep else (4, 3, 2)
    every = [Tile(False, num_tiles, _SPLITS, *shape, each) for shape in shapes for each in stages]
    found = next((tile for tile in every if tile.shared_bytes(loader, num_tokens) <= room), None)
    most = shared_bytes - _STATIC_BYTES
    if found is None or found.shared_bytes(loader, num_tokens) > most:
        fitting = (tile for tile in every if tile.shared_bytes(loader, num_tokens) <= most)
        found = next(fitting, every[-1])
    return found


@functools.cache
def _launch_shape(
    num_tokens: int,
    num_rows: int,
    device: torch.device,
    is_gated: bool,
    loader: Loader,
    is_half: bool,
) -> tuple[Kernel, int, int]:
    """Return the kernel, the blocks of an expert and the shared memory of each."""
    tile = experts_tile(num_tokens, loader, max_shared_bytes(device), is_gated=is_gated)
    kernel = tile.kernel(loader, is_gated=is_gated, is_half=is_half, has_experts=True)
    blocks = tile.num_blocks(num_rows, is_gated=is_gated)
    return kernel, blocks, tile.shared_bytes(loader, num_tokens)


def kernels_of(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_gated: bool,
    max_tokens: int,
    loader: Loader = PLAIN,
) -> set[Kernel]:
    """Return the kernels that products with a matrix of experts launch, to be compiled before.

    Args:
        shape: rows of one expert, and inputs.
        dtype: of the tokens.
        device: where they run.
        is_gated: whether rows are gates and then as many ups.
        max_tokens: of a product.
        loader: of the weight.
    """
    num_rows, size_in = shape
    if is_gated:
        num_rows //= 2
    if dtype == torch.float32 or num_rows % 64 or size_in % 64:
        return set()
    if capability(device) < LEAST_CAPABILITY:
        return set()
    is_half, counts = dtype == torch.float16, token_counts(max_tokens)
    return {_launch_shape(n, num_rows, device, is_gated, loader, is_half)[0] for n in counts}


def product(
    x: torch.Tensor,
    weight: torch.Tensor | Codes | Quantised,
    slots_Tk: torch.Tensor,
    out: torch.Tensor,
    *,
    is_gated: bool,
    is_gelu: bool = False,
    arriving: ExpertCache | None = None,
) -> None:
    """Launch a product of at most MAX_SMALL_TOKENS tokens with experts on the current stream.

    Args:
        x: [T, K] where gated, else [T * k, K]; bfloat16 or float16; as `aligned` returns it.
        weight: of blocks of N rows, or of N gates and N ups, for which can_run holds.
        slots_Tk: int32, contiguous: the block of each pair, or -1.
        out: [T * k, N], dtype of x, contiguous; written where there is a block.
        is_gated: act(gate) * up.
        is_gelu: of gelu, approximated by tanh, not of silu.
        arriving: as of kernels.ops.experts.experts_products; of both its products or of neither.
    """
    (num_tokens, top_k), (num_pairs, size_out) = slots_Tk.shape, out.shape
    num_slots = weight.shape[0] // (2 * size_out if is_gated else size_out)
    loader = PLAIN
    if isinstance(weight, torch.Tensor):
        args = Args(weight=weight.data_ptr(), weight_stride=weight.stride(0), inputs=x.shape[1])
    elif isinstance(weight, Codes):
        loader, args = CODES, args_of(weight, "experts")
    else:
        loader, args = loader_of(weight), args_of(weight, "experts")
    is_half, device = x.dtype == torch.float16, x.device
    shape = _launch_shape(num_tokens, size_out, device, is_gated, loader, is_half)
    kernel, row_blocks, shared_bytes = shape
    args.x, args.x_stride, args.tokens = x.data_ptr(), x.stride(0), num_tokens
    args.out, args.out_stride = out.data_ptr(), size_out
    args.rows, args.is_gelu = size_out, is_gelu
    args.slots, args.top_k, args.row_blocks = slots_Tk.data_ptr(), top_k, row_blocks
    args.is_by_pair = num_pairs <= num_slots
    args.missing = None
    if arriving is not None:
        args.missing, args.copiers = arriving.missing.data_ptr(), EXPERT_COPIERS
        args.num_missing = arriving.num_missing.data_ptr()
        args.copied = arriving.copied[0 if is_gated else 1 :].data_ptr()
        args.multiplied = arriving.multiplied.data_ptr()
    launch(kernel, min(num_pairs, num_slots) * row_blocks, shared_bytes, args, device)
