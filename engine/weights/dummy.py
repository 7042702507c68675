"""Random weights of the exact shape: seeded per parameter, the same on every device and place."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

import torch

from engine.device.host import worker_pool
from engine.model.formats import ParamSpec

POOL_SIZE = 4_194_301
"""Normal draws that all parameters are cut from; a prime, so that rows do not repeat in step."""
STD = 0.02


def fill_dummy(
    parameters: Iterable[tuple[ParamSpec, torch.Tensor]],
    seed: int,
    progress: Callable[[int], None],
    norm: float = 1.0,
    embedding_scale: float = 1.0,
) -> None:
    """Fill every parameter: norms with `norm` plus noise, biases and weights with normal noise.

    Values are read cyclically from one pool of draws at an offset hashed from seed and name. Host
    memory is filled by threads; work for a GPU is enqueued on the current stream.

    Args:
        parameters: Name and shape with the tensor to fill, on any device.
        seed: Changes every value.
        progress: Called with bytes that are in place or enqueued.
        norm: Mean of the weights of norms.
        embedding_scale: What the embedding is multiplied by when it is read; its noise is divided
            by it, because a tied table would otherwise repeat the last token for ever.
    """
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(POOL_SIZE, generator=generator, dtype=torch.float32) * STD
    pools: dict[tuple[torch.device, torch.dtype, str], torch.Tensor] = {}
    values_of = {"norm": base + norm, "embedding": base / embedding_scale, "other": base}
    pending: list[tuple[Future[torch.Tensor], int]] = []
    with worker_pool() as workers:
        for spec, target in parameters:
            key = (target.device, target.dtype, _kind(spec.name))
            if key not in pools:
                pools[key] = values_of[key[2]].to(target.dtype).to(target.device)
            for part, values in _cut(target.view(-1), pools[key], _offset(spec.name, seed)):
                num_bytes = part.numel() * part.element_size()
                if part.device.type == "cpu":
                    pending.append((workers.submit(part.copy_, values), num_bytes))
                else:
                    part.copy_(values)
                    progress(num_bytes)
        for future, num_bytes in pending:
            future.result()
            progress(num_bytes)


def _kind(name: str) -> str:
    if name.endswith("norm.weight"):
        return "norm"
    return "embedding" if name.endswith("embed_tokens.weight") else "other"


def _offset(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % POOL_SIZE


def _cut(
    flat: torch.Tensor, pool: torch.Tensor, offset: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of a tensor with their values: the pool from `offset` on, then over again."""
    done, start = 0, offset
    while done < flat.numel():
        size = min(POOL_SIZE - start, flat.numel() - done)
        yield flat[done : done + size], pool[start : start + size]
        done, start = done + size, 0
