"""A cache of experts: which of them lie in a bank of slots, who makes room, and copies of the rest.

All of it is decided and done on the device, with fixed grids, so that a captured step routes anew
each time it is replayed. Shape letters: T tokens, k experts of each, E experts, S slots, A arrays.
"""

import torch

from kernels.expert_arguments import ExpertArrays, ExpertCache
from kernels.ops.checks import KernelArgumentError, check_tensor
from kernels.ref import expert_cache as ref

# Triton is imported by the first call on a GPU: machines without one need not have it.
# ruff: noqa: PLC0415


def claim(ids_Tk: torch.Tensor, part: int, cache: ExpertCache) -> torch.Tensor:
    """Give slots to experts of one part of a step, and say which must be copied there.

    A step that routes to more experts than there are slots runs in parts: as many calls, with the
    same ids and parts from 0 on, as kernels.sizes.num_expert_parts says. A part takes the experts
    that no part before it took: those that lie in the bank, and then others, the lowest first, for
    as long as there are slots. The others take the slots that were used longest ago, of equally old
    ones the lowest; never one that this part needs. Written are the state, `cache.missing` with
    `cache.num_missing`, and counts: hits and misses grow by the experts taken.

    Between this call and the end of the products that read the slots, `gather` has to run.

    Args:
        ids_Tk: int32 [T, k], contiguous, 0 to E - 1, or -1 where a token has no expert; not
            checked.
        part: which part of the step, from 0 on.
        cache: the layer's.

    Returns:
        int32 [T, k]: the slot of each expert of this part, -1 where it belongs to another part, or
        where there is none.
    """
    _check_ids("claim", ids_Tk, cache)
    if part < 0:
        raise KernelArgumentError("claim.part", "0 or more", f"{part}")
    if not cache.num_slots:
        raise KernelArgumentError("claim.cache", "at least one slot", "none")
    if ids_Tk.is_cuda:
        from kernels.triton import expert_cache

        return expert_cache.claim(ids_Tk, part, cache)
    return ref.claim(ids_Tk, part, cache)


def gather(arrays: ExpertArrays, cache: ExpertCache) -> None:
    """Copy the experts that the newest `claim` found missing into their slots.

    Products that are given the cache as `arriving` may begin before the copies end.

    Args:
        arrays: of the experts and of the bank; slots that nothing is missing in stay as they are.
        cache: of E experts and S slots as the arrays.
    """
    sizes = arrays.num_experts, arrays.num_slots
    if sizes != (cache.num_experts, cache.num_slots):
        expected = f"arrays of {cache.num_experts} experts and {cache.num_slots} slots"
        raise KernelArgumentError("gather.arrays", expected, f"of {sizes[0]} and {sizes[1]}")
    if arrays.table.is_cuda:
        from kernels.triton import expert_cache

        expert_cache.gather(arrays, cache)
        return
    ref.gather(arrays, cache)


def count_routed(ids_Tk: torch.Tensor, cache: ExpertCache) -> None:
    """Count the experts that a step routes to as misses, each once: they are read where they lie.

    Args:
        ids_Tk: as claim's.
        cache: of any number of slots, which stay as they are.
    """
    _check_ids("count_routed", ids_Tk, cache)
    if ids_Tk.is_cuda:
        from kernels.triton import expert_cache

        expert_cache.count_routed(ids_Tk, cache)
        return
    ref.count_routed(ids_Tk, cache)


def _check_ids(name: str, ids_Tk: torch.Tensor, cache: ExpertCache) -> None:
    check_tensor(f"{name}.ids", ids_Tk, (None, None), torch.int32, cache.tick.device)
    if not ids_Tk.is_contiguous():
        raise KernelArgumentError(
            f"{name}.ids", "a contiguous tensor", f"strides {tuple(ids_Tk.stride())}"
        )
