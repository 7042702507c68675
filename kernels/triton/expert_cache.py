"""The cache of experts. T tokens, k experts of each, E experts, S slots, A arrays."""

import torch
import triton
import triton.language as tl

from kernels.expert_arguments import ExpertArrays, ExpertCache
from kernels.sizes import EXPERT_COPIERS
from kernels.triton.dependent import launch_options, release, wait

_NEVER: tl.constexpr = tl.constexpr(2**62)
"""A tick that never comes: slots used then make no room."""
_FEW_IDS, _MANY_IDS = 64, 1024
"""Ids that are looked at at a time: of a decode, and of more tokens. There are no other sizes, so
that none is compiled in the middle of a run."""
_TILE_BYTES = 16384


@triton.jit
def _mark(wanted, ids, num_ids, tick, IDS: tl.constexpr):
    """Note the tick with every expert that is routed to, and make that visible to all threads."""
    for start in range(0, num_ids, IDS):
        at = start + tl.arange(0, IDS)
        expert = tl.load(ids + at, mask=at < num_ids, other=-1)
        tl.store(wanted + expert, tl.zeros([IDS], tl.int64) + tick, mask=expert >= 0)
    tl.debug_barrier()


# One program: what it does takes less than the copy of one expert, of which each turn of its loop
# is followed.
@triton.jit(
    do_not_specialize=["num_ids", "part", "E", "S"],
    do_not_specialize_on_alignment=[
        "expert_of_slot",
        "slot_of_expert",
        "last_used",
        "tick_at",
        "wanted",
        "served",
        "missing",
        "num_missing",
        "copied",
        "multiplied",
        "counts",
    ],
)
def _claim_kernel(
    ids,
    slots,
    expert_of_slot,
    slot_of_expert,
    last_used,
    tick_at,
    wanted,
    served,
    missing,
    num_missing,
    copied,
    multiplied,
    counts,
    num_ids,
    part,
    E,
    S,
    IDS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        wait()
        release()
    tick = tl.load(tick_at) + 1
    begun = tick - part  # what was served from this tick on belongs to an earlier part
    e, s = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    is_expert, is_slot = e < E, s < S
    before = tl.load(served + e, mask=is_expert, other=0)
    slot = tl.load(slot_of_expert + e, mask=is_expert, other=-1)
    owner = tl.load(expert_of_slot + s, mask=is_slot, other=-1)
    used = tl.load(last_used + s, mask=is_slot, other=_NEVER)
    hits, misses = tl.load(counts), tl.load(counts + 1)
    _mark(wanted, ids, num_ids, tick, IDS)
    is_wanted = (tl.load(wanted + e, mask=is_expert, other=0) == tick) & (before < begun)
    has_owner = owner >= 0
    is_hit = (tl.load(wanted + owner, mask=has_owner, other=0) == tick) & (
        tl.load(served + owner, mask=has_owner, other=0) < begun
    )
    num_hits = tl.sum(is_hit.to(tl.int32), 0)
    used = tl.where(is_hit, _NEVER, used)
    is_miss = is_wanted & (slot < 0)
    number = tl.cumsum(is_miss.to(tl.int32), 0) - 1
    is_miss = is_miss & (number < S - num_hits)
    num_misses = tl.sum(is_miss.to(tl.int32), 0)
    is_taken = is_miss | (is_wanted & (slot >= 0))
    for i in range(num_misses):
        victim = tl.argmin(used, 0)
        expert = tl.sum(tl.where(is_miss & (number == i), e, 0), 0)
        evicted = tl.sum(tl.where(s == victim, owner, 0), 0)
        slot = tl.where(e == evicted, -1, slot)
        slot = tl.where(e == expert, victim, slot)
        owner = tl.where(s == victim, expert, owner)
        used = tl.where(s == victim, _NEVER, used)
        tl.store(missing + 2 * i, expert)
        tl.store(missing + 2 * i + 1, victim)
    # Every thread has read what is written now.
    tl.debug_barrier()
    tl.store(served + e, tl.where(is_taken, tick, before), mask=is_expert)
    tl.store(slot_of_expert + e, slot, mask=is_expert)
    tl.store(expert_of_slot + s, owner, mask=is_slot)
    tl.store(last_used + s, tl.where(used == _NEVER, tick, used), mask=is_slot)
    tl.store(counts, hits + num_hits)
    tl.store(counts + 1, misses + num_misses)
    tl.store(num_missing, num_misses)
    tl.store(copied + tl.arange(0, 2), tl.zeros([2], tl.int32))
    tl.store(multiplied + s, tl.zeros([SLOTS], tl.int32), mask=is_slot)
    tl.store(tick_at, tick)
    # Every thread sees what others have written.
    tl.debug_barrier()
    for start in range(0, num_ids, IDS):
        at = start + tl.arange(0, IDS)
        expert = tl.load(ids + at, mask=at < num_ids, other=-1)
        is_here = expert >= 0
        is_here = tl.load(served + expert, mask=is_here, other=0) == tick
        found = tl.load(slot_of_expert + expert, mask=is_here, other=-1)
        tl.store(slots + at, found, mask=at < num_ids)


@triton.jit(
    do_not_specialize=["num_ids", "E"],
    do_not_specialize_on_alignment=["tick_at", "wanted", "counts"],
)
def _count_kernel(
    ids,
    tick_at,
    wanted,
    counts,
    num_ids,
    E,
    IDS: tl.constexpr,
    EXPERTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        wait()
        release()
    tick, misses = tl.load(tick_at) + 1, tl.load(counts + 1)
    _mark(wanted, ids, num_ids, tick, IDS)
    e = tl.arange(0, EXPERTS)
    is_wanted = tl.load(wanted + e, mask=e < E, other=0) == tick
    tl.store(counts + 1, misses + tl.sum(is_wanted.to(tl.int32), 0))
    tl.store(tick_at, tick)


@triton.jit
def _note(counter):
    """Count this program, after all that it has written."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


# Tables and states of layers lie at any multiple of their element; one compiled variant serves all.
@triton.jit(
    do_not_specialize=["num_first", "num_arrays"],
    do_not_specialize_on_alignment=["table", "missing", "num_missing", "copied"],
)
def _gather_kernel(
    table,
    missing,
    num_missing,
    copied,
    num_first,
    num_arrays,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        wait()
        release()  # products may start now
    WORD: tl.constexpr = tl.uint8 if WIDTH == 1 else tl.int32
    WORDS: tl.constexpr = WIDTH if WIDTH == 1 else WIDTH // 4
    count, programs = tl.load(num_missing), tl.num_programs(0)
    turn = tl.program_id(0)  # the first tile of this program: they go round over all arrays
    for array in range(num_arrays):
        if (array == num_first) & (count > 0):
            _note(copied)
        source = tl.load(table + 3 * array).to(tl.pointer_type(WORD))
        target = tl.load(table + 3 * array + 1).to(tl.pointer_type(WORD))
        source, target = tl.multiple_of(source, WIDTH), tl.multiple_of(target, WIDTH)
        words = tl.load(table + 3 * array + 2).to(tl.int32) * WORDS
        tiles = (words + TILE - 1) // TILE
        for unit in range(turn, count * tiles, programs):
            item = unit // tiles
            at = (unit % tiles) * TILE + tl.arange(0, TILE)
            expert = tl.load(missing + 2 * item).to(tl.int64)
            slot = tl.load(missing + 2 * item + 1).to(tl.int64)
            mask = at < words
            found = tl.load(source + expert * words + at, mask=mask)
            tl.store(target + slot * words + at, found, mask=mask)
        turn = (turn + programs - (count * tiles) % programs) % programs
    if count > 0:
        _note(copied + 1)


def _blocks(num_ids: int, num_experts: int) -> dict[str, int]:
    """Return the sizes of what the one program of a kernel looks at, and its warps."""
    ids = _FEW_IDS if num_ids <= _FEW_IDS else _MANY_IDS
    experts = triton.next_power_of_2(num_experts)
    # One warp reduces without a barrier; what is long takes more.
    return {"IDS": ids, "EXPERTS": experts, "num_warps": 1 if max(ids, experts) <= 512 else 4}


def claim(ids_Tk: torch.Tensor, part: int, cache: ExpertCache) -> torch.Tensor:
    """Launch kernels.ops.expert_cache.claim."""
    slots = torch.empty_like(ids_Tk)
    _claim_kernel[(1,)](
        ids_Tk,
        slots,
        cache.expert_of_slot,
        cache.slot_of_expert,
        cache.last_used,
        cache.tick,
        cache.wanted,
        cache.served,
        cache.missing,
        cache.num_missing,
        cache.copied,
        cache.multiplied,
        cache.counts,
        ids_Tk.numel(),
        part,
        cache.num_experts,
        cache.num_slots,
        SLOTS=triton.next_power_of_2(cache.num_slots),
        **launch_options(ids_Tk.device),
        **_blocks(ids_Tk.numel(), cache.num_experts),
    )
    return slots


def count_routed(ids_Tk: torch.Tensor, cache: ExpertCache) -> None:
    """Launch kernels.ops.expert_cache.count_routed."""
    _count_kernel[(1,)](
        ids_Tk,
        cache.tick,
        cache.wanted,
        cache.counts,
        ids_Tk.numel(),
        cache.num_experts,
        **launch_options(ids_Tk.device),
        **_blocks(ids_Tk.numel(), cache.num_experts),
    )


def gather(arrays: ExpertArrays, cache: ExpertCache, *, num_programs: int = EXPERT_COPIERS) -> None:
    """Launch kernels.ops.expert_cache.gather, with other programs where they are measured."""
    _gather_kernel[(num_programs,)](
        arrays.table,
        cache.missing,
        cache.num_missing,
        cache.copied,
        arrays.num_first,
        len(arrays.sources),
        WIDTH=arrays.width,
        TILE=_TILE_BYTES if arrays.width == 1 else _TILE_BYTES // 4,
        **launch_options(arrays.table.device),
        num_warps=8,
    )
