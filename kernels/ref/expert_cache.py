"""Twins of the cache of experts. T tokens, k experts of each, E experts, S slots."""

import torch

from kernels.expert_arguments import ExpertArrays, ExpertCache


def claim(ids_Tk: torch.Tensor, part: int, cache: ExpertCache) -> torch.Tensor:
    """Twin of kernels.ops.expert_cache.claim."""
    tick = int(cache.tick) + 1
    wanted = _routed(ids_Tk, cache.num_experts) & (cache.served < tick - part)
    hits = torch.nonzero(wanted & (cache.slot_of_expert >= 0)).flatten()
    absent = torch.nonzero(wanted & (cache.slot_of_expert < 0)).flatten()
    misses = absent[: cache.num_slots - len(hits)]
    order = cache.last_used.clone()
    order[cache.slot_of_expert[hits].long()] = torch.iinfo(torch.int64).max
    victims = torch.argsort(order, stable=True)[: len(misses)]
    evicted = cache.expert_of_slot[victims].long()
    cache.slot_of_expert[evicted[evicted >= 0]] = -1
    cache.slot_of_expert[misses] = victims.int()
    cache.expert_of_slot[victims] = misses.int()
    taken = torch.cat([hits, misses])
    cache.last_used[cache.slot_of_expert[taken].long()] = tick
    cache.served[taken] = tick
    cache.missing[: len(misses)] = torch.stack([misses, victims], 1).int()
    cache.num_missing.fill_(len(misses))
    cache.tick.fill_(tick)
    cache.counts.add_(torch.tensor([len(hits), len(misses)]))
    here = torch.where(cache.served == tick, cache.slot_of_expert, -1)
    return torch.where(ids_Tk >= 0, here[ids_Tk.clamp(min=0).long()], -1)


def gather(arrays: ExpertArrays, cache: ExpertCache) -> None:
    """Twin of kernels.ops.expert_cache.gather."""
    experts, slots = cache.missing[: int(cache.num_missing)].long().unbind(1)
    for source, target in zip(arrays.sources, arrays.targets, strict=True):
        target[slots] = source[experts]


def count_routed(ids_Tk: torch.Tensor, cache: ExpertCache) -> None:
    """Twin of kernels.ops.expert_cache.count_routed."""
    cache.tick.add_(1)
    cache.counts[1] += _routed(ids_Tk, cache.num_experts).sum()


def _routed(ids_Tk: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return bool [E]: which experts some token has."""
    routed = torch.zeros(num_experts, dtype=torch.bool)
    routed[ids_Tk[ids_Tk >= 0].long()] = True
    return routed
