"""A case of kernels.bench_kv, the sizes of its model, and tensors in pinned host memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 16
DTYPE = torch.bfloat16
TOKEN_BYTES = 2 * KV_HEADS * HEAD_SIZE * 2
"""Keys and values of a token in one layer."""
SCALE = HEAD_SIZE**-0.5


@dataclass(frozen=True, slots=True)
class KVCase:
    """One thing to time.

    Attributes:
        name: what runs.
        variant: how.
        run: enqueues it, once for each of num_layers layers.
        num_layers: layers that a call goes over, so that no cache holds what it reads.
        kind: which rate num_bytes are held against, "copy" or "in place".
        num_bytes: bytes of that kind, of one layer.
        num_host_bytes: bytes read in host memory, of one layer.
        beside: what, with num_host_bytes at the in-place rate, a layer is held against.
        check: tells whether the result has the bits of the reference.
    """

    name: str
    variant: str
    run: Callable[[], object]
    num_layers: int
    kind: str
    num_bytes: int
    num_host_bytes: int = 0
    beside: "KVCase | None" = None
    check: Callable[[], bool] | None = None


class _HostArray:
    """Pinned host memory, described to torch as memory of the card."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": (pinned.numel() * pinned.element_size(),),
            "typestr": "|u1",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate pinned host memory.

    Args:
        shape: of the tensor.
        dtype: of the tensor.

    Returns:
        The host tensor, which must outlive all use, and a CUDA tensor over the same memory.
    """
    pinned = torch.zeros(shape, dtype=dtype, pin_memory=True)
    view = torch.as_tensor(_HostArray(pinned), device="cuda").view(dtype).view(shape)
    return pinned, view


def randn(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Draw a tensor of DTYPE.

    Args:
        shape: of the tensor.
        device: where it lies.
    """
    return torch.randn(shape, dtype=DTYPE, device=device)
