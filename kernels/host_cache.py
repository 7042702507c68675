"""HostCache: the blocks of one layer that lie beside its cache, as the operators see them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HostCache:
    """Keys and values of blocks that have the numbers after those of the cache.

    A block table or slot that names block B + c, where the cache has B blocks, means block c here.
    On a GPU these are CUDA tensors: over pinned host memory, which kernels then read and write in
    place, or over memory of the card, as a buffer that host blocks were copied into.

    Attributes:
        k: [C, K, P, H], dtype and device of the cache; the strides of head, token and element are
            the cache's, that of blocks is free.
        v: [C, K, P, H], as k beside the cache of values.
    """

    k: torch.Tensor
    v: torch.Tensor
