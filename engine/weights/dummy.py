"""Random weights of the exact shape: seeded per parameter, the same on every device and place."""

import hashlib
from collections.abc import Callable, Iterable

import torch

from engine.spec import ParamSpec

POOL_SIZE = 4_194_301
"""Normal draws that all parameters are cut from; a prime, so that rows do not repeat in step."""
STD = 0.02


def fill_dummy(
    parameters: Iterable[tuple[ParamSpec, torch.Tensor]],
    seed: int,
    progress: Callable[[int], None],
) -> None:
    """Fill every parameter: norms with 1 plus noise, biases and weights with normal noise.

    Values are read cyclically from one pool of draws at an offset hashed from seed and name.

    Args:
        parameters: Name and shape with the tensor to fill, on any device.
        seed: Changes every value.
        progress: Called with the bytes of each parameter when it is enqueued.
    """
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(POOL_SIZE, generator=generator, dtype=torch.float32) * STD
    pools: dict[tuple[torch.device, torch.dtype, bool], torch.Tensor] = {}
    for spec, target in parameters:
        is_norm = spec.name.endswith("norm.weight")
        key = (target.device, target.dtype, is_norm)
        if key not in pools:
            values = base + 1.0 if is_norm else base
            pools[key] = values.to(target.dtype).to(target.device)
        _fill(target.view(-1), pools[key], _offset(spec.name, seed))
        progress(target.numel() * target.element_size())


def _offset(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % POOL_SIZE


def _fill(flat: torch.Tensor, pool: torch.Tensor, offset: int) -> None:
    head = min(flat.numel(), POOL_SIZE - offset)
    flat[:head].copy_(pool[offset : offset + head])
    done = head
    while done < flat.numel():
        size = min(POOL_SIZE, flat.numel() - done)
        flat[done : done + size].copy_(pool[:size])
        done += size
