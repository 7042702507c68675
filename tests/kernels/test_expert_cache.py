"""The cache of experts beside a slow one in Python, with poison wherever nothing may be read."""

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.expert_arguments import ExpertArrays, expert_cache
from kernels.ops import expert_cache as ops
from kernels.ops.checks import KernelArgumentError
from kernels.ref import expert_cache as ref
from kernels.sizes import expert_cache_bytes, num_expert_parts

POISON = 0xA5


@dataclass
class SlowCache:
    """Least recently used, written down as one would explain it."""

    num_slots: int
    slots: dict[int, int] = field(default_factory=dict)
    """Slot of each expert that is there."""
    used: dict[int, int] = field(default_factory=dict)
    """When each slot was used last."""
    now: int = 0
    hits: int = 0
    misses: int = 0

    def step(self, ids):
        """Return of each part the slot of each of its experts, and which of them were missing."""
        waiting, parts = set(ids) - {-1}, []
        most = -(-min(len(ids), self.num_experts) // self.num_slots)
        for _ in range(most):
            self.now += 1
            here = {e for e in waiting if e in self.slots}
            absent = sorted(waiting - here)[: self.num_slots - len(here)]
            missing = {}
            for expert in absent:
                needed = {self.slots[e] for e in here} | set(missing.values())
                free = [slot for slot in range(self.num_slots) if slot not in needed]
                victim = min(free, key=lambda slot: (self.used.get(slot, 0), slot))
                self.slots = {e: slot for e, slot in self.slots.items() if slot != victim}
                self.slots[expert] = missing[expert] = victim
            taken = here | set(absent)
            for expert in taken:
                self.used[self.slots[expert]] = self.now
            self.hits, self.misses = self.hits + len(here), self.misses + len(absent)
            parts.append(({e: self.slots[e] for e in taken}, missing))
            waiting -= taken
        assert not waiting
        return parts

    num_experts: int = 0


@dataclass
class World:
    """A cache, the experts in host memory and a bank, of some arrays with sizes in bytes."""

    num_experts: int
    num_slots: int
    sizes: tuple[int, ...]
    device: torch.device
    beside: object = staticmethod(torch.clone)

    def __post_init__(self):
        size = expert_cache_bytes(self.num_experts, self.num_slots)
        memory = torch.full((size,), POISON, dtype=torch.uint8, device=self.device)
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.cache = expert_cache(self.num_experts, self.num_slots, memory, counts)
        rng = torch.Generator().manual_seed(7)
        host = [
            torch.randint(256, (self.num_experts, n), dtype=torch.uint8, generator=rng)
            for n in self.sizes
        ]
        self.host = [self.beside(each.to(self.device)) for each in host]
        self.bank = [
            torch.full((self.num_slots, n), POISON, dtype=torch.uint8, device=self.device)
            for n in self.sizes
        ]
        self.arrays = ExpertArrays.of(self.host, self.bank, len(self.sizes) - 1)

    def run(self, door, ids):
        """Run one step; return the slots of each part and who was missing."""
        parts = []
        for part in range(num_expert_parts(ids.numel(), self.num_experts, self.num_slots)):
            slots = door.claim(ids.to(self.device), part, self.cache)
            count = int(self.cache.num_missing)
            missing = self.cache.missing[:count].tolist()
            for _, slot in missing:  # what was there may not be read any more
                for array in self.bank:
                    array[slot] = POISON
            before = [array.clone() for array in self.bank]
            door.gather(self.arrays, self.cache)
            others = [slot for slot in range(self.num_slots) if slot not in dict(missing).values()]
            for array, then in zip(self.bank, before, strict=True):
                assert torch.equal(array[others], then[others])
            self._check_content(ids, slots.cpu())
            parts.append((slots.cpu(), dict(missing)))
        return parts

    def _check_content(self, ids, slots):
        """Every pair of the part reads its own expert."""
        is_here = slots >= 0
        for host, bank in zip(self.host, self.bank, strict=True):
            read = bank.cpu()[slots[is_here].long()]
            assert torch.equal(read, host.cpu()[ids[is_here].long()])


@pytest.fixture(scope="module")
def kernels(device):
    """The kernels; an interpreter takes its time for each program."""
    from kernels.triton import expert_cache as triton_kernels

    few = partial(triton_kernels.gather, num_programs=2 if device.type == "cpu" else 100)
    return SimpleNamespace(
        claim=triton_kernels.claim, gather=few, count_routed=triton_kernels.count_routed
    )


def check_steps(world, door, steps):
    slow = SlowCache(world.num_slots, num_experts=world.num_experts)
    for ids in steps:
        expected = slow.step(ids.flatten().tolist())
        found = world.run(door, ids)
        assert len(found) == len(expected)
        pairs = 0
        for (slots, missing), (taken, absent) in zip(found, expected, strict=True):
            assert missing == absent
            wanted = [taken.get(expert, -1) for expert in ids.flatten().tolist()]
            assert slots.flatten().tolist() == wanted
            pairs += int((slots >= 0).sum())
        assert pairs == int((ids >= 0).sum())  # each pair in one part
        assert world.cache.counts.tolist() == [slow.hits, slow.misses]
    owners = world.cache.expert_of_slot.tolist()
    assert {e: s for s, e in enumerate(owners) if e >= 0} == slow.slots
    places = world.cache.slot_of_expert.tolist()
    assert {e: s for e, s in enumerate(places) if s >= 0} == slow.slots


@st.composite
def routings(draw):
    num_experts = draw(st.integers(1, 12))
    num_slots, k = draw(st.integers(1, num_experts)), draw(st.integers(1, num_experts))
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        rows = draw(
            st.lists(
                st.one_of(
                    st.permutations(range(num_experts)).map(lambda order: list(order[:k])),
                    st.just([-1] * k),
                ),
                min_size=1,
                max_size=5,
            )
        )
        steps.append(torch.tensor(rows, dtype=torch.int32))
    return num_experts, num_slots, steps


@given(case=routings())
@settings(max_examples=30, deadline=None)
def test_twin_is_the_slow_cache(case):
    num_experts, num_slots, steps = case
    check_steps(World(num_experts, num_slots, (8, 3), torch.device("cpu")), ref, steps)


@pytest.mark.thorough
@given(case=routings())
@settings(max_examples=5, deadline=None)
def test_kernels_are_the_slow_cache(case, kernels, device):
    num_experts, num_slots, steps = case
    check_steps(World(num_experts, num_slots, (8, 3), device), kernels, steps)


def routed(rng, num_tokens, num_experts, k):
    scores = torch.rand((num_tokens, num_experts), generator=rng)
    return scores.topk(k).indices.int()


# experts, slots, k, tokens of each step
SHAPES = [
    pytest.param((128, 42, 8, (1, 1, 1, 4, 1)), id="few tokens", marks=pytest.mark.slow),
    pytest.param((40, 13, 8, (24, 1, 24)), id="more experts than slots"),
    pytest.param((128, 42, 8, (64, 1, 64)), id="many more", marks=pytest.mark.slow),
    pytest.param((16, 3, 8, (1, 2, 1)), id="fewer slots than k"),
    pytest.param((8, 8, 8, (2, 1)), id="k is all, all have slots"),
    pytest.param((60, 1, 1, (1, 1, 3)), id="one slot"),
    pytest.param((20, 5, 2, (600, 1)), id="more ids than are looked at at a time"),
]


@pytest.mark.thorough_but("k is all, all have slots", "one slot")
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_real_sizes(shape, kernels, device):
    num_experts, num_slots, k, tokens = shape
    rng = torch.Generator().manual_seed(3)
    steps = [routed(rng, count, num_experts, k) for count in tokens]
    steps.append(torch.zeros((3, 1), dtype=torch.int32))  # all to one expert
    check_steps(World(num_experts, num_slots, (16,), device), kernels, steps)


@pytest.mark.thorough_but("words")
@pytest.mark.parametrize(
    ("sizes", "width"),
    [((70_000, 16, 48), 16), ((40, 16), 4), ((5, 1, 16_390), 1)],
    ids=["wide", "words", "bytes"],
)
def test_arrays_of_any_size_are_copied(sizes, width, kernels, device, beside):
    world = World(5, 3, sizes, device, beside=beside)
    assert world.arrays.width == width
    rng = torch.Generator().manual_seed(5)
    check_steps(world, kernels, [routed(rng, 1, 5, 2) for _ in range(6)])
    before = [array.clone() for array in world.bank]
    kernels.gather(world.arrays, world.cache)  # again
    assert all(map(torch.equal, world.bank, before))


def test_copies_do_not_depend_on_programs(kernels, device):
    from kernels.triton import expert_cache as triton_kernels

    world = World(6, 4, (50_000, 16), device)
    kernels.claim(torch.tensor([[5, 0, 3]], dtype=torch.int32, device=device), 0, world.cache)
    found = []
    for programs in (1, 2, 7):
        for array in world.bank:
            array.fill_(POISON)
        triton_kernels.gather(world.arrays, world.cache, num_programs=programs)
        found.append([array.clone() for array in world.bank])
    assert all(all(map(torch.equal, each, found[0])) for each in found[1:])
    assert torch.equal(found[0][0][:3], world.host[0][[0, 3, 5]])


@pytest.mark.parametrize("name", ["kernel", "twin"])
def test_a_stale_slot_is_found(name, kernels, device):
    """The check above is one: a cache that forgets to copy fails it."""
    door = kernels if name == "kernel" else ref
    world = World(4, 2, (16,), device)

    class Forgetful:
        claim = staticmethod(door.claim)

        @staticmethod
        def gather(arrays, cache):
            cache.num_missing.zero_()
            door.gather(arrays, cache)

    with pytest.raises(AssertionError):
        world.run(Forgetful, torch.tensor([[1]], dtype=torch.int32))


@pytest.mark.parametrize("name", ["kernel", "twin"])
def test_forgotten_slots_are_filled_again(name, kernels, device):
    door = kernels if name == "kernel" else ref
    world, ids = World(4, 2, (16,), device), torch.tensor([[1, 2]], dtype=torch.int32)
    world.run(door, ids)
    world.cache.forget()
    for array in world.bank:
        array.fill_(POISON)
    [(_, missing)] = world.run(door, ids)
    assert missing == {1: 0, 2: 1}
    assert world.cache.counts.tolist() == [0, 4]


@pytest.mark.parametrize("name", ["kernel", "twin"])
def test_routed_experts_are_counted_once(name, kernels, device):
    door = kernels if name == "kernel" else ref
    memory = torch.empty(expert_cache_bytes(9, 0), dtype=torch.uint8, device=device)
    cache = expert_cache(9, 0, memory, torch.zeros(2, dtype=torch.int64, device=device))
    for rows, total in (([[0, 8], [8, -1]], 2), ([[8, 0], [-1, -1]], 4), ([[-1, -1]], 4)):
        door.count_routed(torch.tensor(rows, dtype=torch.int32, device=device), cache)
        assert cache.counts.tolist() == [0, total]


def test_sizes_are_those_of_the_state():
    for experts, slots in ((1, 1), (128, 42), (7, 3), (5, 0)):
        memory = torch.empty(expert_cache_bytes(experts, slots), dtype=torch.uint8)
        cache = expert_cache(experts, slots, memory, torch.zeros(2, dtype=torch.int64))
        assert (cache.num_experts, cache.num_slots) == (experts, slots)
        own = set(cache.__dataclass_fields__) - {"counts"}
        total = sum(getattr(cache, name).nbytes for name in own)
        assert 0 <= expert_cache_bytes(experts, slots) - total < 8


@pytest.mark.parametrize(
    ("ids", "experts", "slots", "parts"),
    [(8, 128, 42, 1), (512, 128, 42, 4), (8, 128, 3, 3), (1, 5, 5, 1), (9, 8, 8, 1)],
)
def test_parts(ids, experts, slots, parts):
    assert num_expert_parts(ids, experts, slots) == parts


def test_doors_run_the_twins_on_the_cpu():
    world = World(4, 2, (16,), torch.device("cpu"))
    [(slots, missing)] = world.run(ops, torch.tensor([[3, 1]], dtype=torch.int32))
    assert (slots.tolist(), missing) == ([[1, 0]], {1: 0, 3: 1})
    ops.count_routed(torch.tensor([[3, 1]], dtype=torch.int32), world.cache)
    assert world.cache.counts.tolist() == [0, 4]


def test_doors_refuse():
    world = World(4, 2, (16,), torch.device("cpu"))
    ids = torch.zeros((2, 2), dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match=r"claim\.ids: expected torch\.int32, got"):
        ops.claim(ids.long(), 0, world.cache)
    with pytest.raises(KernelArgumentError, match=r"claim\.ids: expected a contiguous tensor"):
        ops.claim(torch.zeros((2, 4), dtype=torch.int32)[:, ::1][:, :2], 0, world.cache)
    with pytest.raises(KernelArgumentError, match=r"claim\.part: expected 0 or more, got -1"):
        ops.claim(ids, -1, world.cache)
    memory = torch.empty(expert_cache_bytes(4, 0), dtype=torch.uint8)
    none = expert_cache(4, 0, memory, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(KernelArgumentError, match=r"claim\.cache: expected at least one slot"):
        ops.claim(ids, 0, none)
    other = World(4, 3, (16,), torch.device("cpu"))
    with pytest.raises(KernelArgumentError, match=r"arrays of 4 experts and 2 slots, got of 4 and"):
        ops.gather(other.arrays, world.cache)
    with pytest.raises(KernelArgumentError, match=r"count_routed\.ids: expected shape"):
        ops.count_routed(ids[0], none)


def test_arrays_of_other_parts_are_refused():
    with pytest.raises(ValueError, match=r"equal parts, got shapes \(4, 8\) and \(2, 16\)"):
        ExpertArrays.of([torch.zeros((4, 2))], [torch.zeros((2, 4))], 0)
    with pytest.raises(ValueError, match=r"expected contiguous arrays"):
        ExpertArrays.of([torch.zeros((4, 2)).mT], [torch.zeros((2, 4))], 0)
    with pytest.raises(ValueError, match=r"0 to 0 arrays of first matrices .*, got 1 of 1"):
        ExpertArrays.of([torch.zeros((4, 2))], [torch.zeros((2, 2))], 1)


@pytest.mark.gpu
def test_a_captured_step_routes_anew(kernels, device, beside):
    """One graph, replayed with other ids: misses, victims and copies are those of a slow cache."""
    world = World(64, 20, (9_437_184 // 64, 512), device, beside=beside)
    ids = torch.zeros((4, 8), dtype=torch.int32, device=device)
    parts = num_expert_parts(ids.numel(), 64, 20)
    out = [torch.empty_like(ids) for _ in range(parts)]
    read = [torch.empty((parts, 32, array.shape[1]), device=device) for array in world.bank]

    def step():
        for part in range(parts):
            slots = kernels.claim(ids, part, world.cache)
            kernels.gather(world.arrays, world.cache)
            out[part].copy_(slots)
            for array, found in zip(world.bank, read, strict=True):
                found[part].copy_(array[slots.flatten().clamp(min=0).long()])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    world.cache.forget()
    world.cache.counts.zero_()
    slow, rng = SlowCache(20, num_experts=64), torch.Generator().manual_seed(11)
    for _ in range(40):
        routing = routed(rng, 4, 64, 8)
        ids.copy_(routing)
        graph.replay()
        for part, (taken, _) in enumerate(slow.step(routing.flatten().tolist())):
            slots = out[part].cpu().flatten()
            assert slots.tolist() == [taken.get(e, -1) for e in routing.flatten().tolist()]
            is_here = slots >= 0
            for host, found in zip(world.host, read, strict=True):
                wanted = host.cpu()[routing.flatten()[is_here].long()]
                assert torch.equal(found[part].cpu()[is_here].to(torch.uint8), wanted)
    assert world.cache.counts.tolist() == [slow.hits, slow.misses]
