"""What every block is at the moment: owned, findable, free or under way.

Ids 0 to num_gpu - 1 lie on the GPU, those from num_gpu on in the host tier. Of the host tier the
first num_in_place blocks can be read and written by compute where they are; the rest only by moves.
"""

from collections.abc import Iterable, Sequence

from engine.errors import EngineError
from engine.kv.lru import BlockList, Clock
from engine.kv.moves import MoveKind, MoveLedger


class BlockStates:
    """Owners, keys and lists of all blocks, kept in agreement.

    Invariants, between calls:
        - A block without an owner is in exactly one list, but for host blocks that a move in
          flight touches: those are in none. A block with an owner is in none.
        - A key names at most one block of each tier, and `gpu_index` and `cpu_index` name exactly
          the blocks whose `keys` entry is set.
        - A host block is in a `spare` list if its key names a GPU block too, in an `only` list
          if not.

    Args:
        num_gpu: Blocks on the GPU.
        num_cpu: Blocks of the host tier.
        num_in_place: Of those, how many compute can reach.
    """

    def __init__(self, num_gpu: int, num_cpu: int, num_in_place: int) -> None:
        self.num_gpu, self.num_cpu, self.num_in_place = num_gpu, num_cpu, num_in_place
        self.ledger = MoveLedger()
        self.owners = [0] * (num_gpu + num_cpu)
        self.keys: list[bytes | None] = [None] * (num_gpu + num_cpu)
        self.gpu_index: dict[bytes, int] = {}
        self.cpu_index: dict[bytes, int] = {}
        self.num_owned_gpu = self.num_owned_cpu = 0
        self.num_gpu_changes = self.num_key_changes = 0
        clock = Clock()
        self.gpu_free, self.gpu_idle = BlockList(clock), BlockList(clock)
        # Of the host tier: blocks that compute reaches, then the others.
        self.cpu_free = (BlockList(clock), BlockList(clock))
        self.cpu_spare = (BlockList(clock), BlockList(clock))
        self.cpu_only = (BlockList(clock), BlockList(clock))
        self._where: list[BlockList | None] = [None] * (num_gpu + num_cpu)
        self.settle(*range(num_gpu + num_cpu))

    def is_gpu(self, block_id: int) -> bool:
        """Return whether a block lies on the GPU."""
        return block_id < self.num_gpu

    def is_in_place(self, block_id: int) -> bool:
        """Return whether compute can read and write a block where it is."""
        return block_id < self.num_gpu + self.num_in_place

    @property
    def num_available_gpu(self) -> int:
        """GPU blocks that can be handed out."""
        return len(self.gpu_free) + len(self.gpu_idle)

    @property
    def num_available_in_place(self) -> int:
        """Host blocks that can be handed out to compute."""
        return len(self.cpu_free[0]) + len(self.cpu_spare[0]) + len(self.cpu_only[0])

    def copy_of(self, block_id: int) -> int | None:
        """Return the block of the other tier with the same key, if there is one."""
        key = self.keys[block_id]
        if key is None:
            return None
        return (self.cpu_index if block_id < self.num_gpu else self.gpu_index).get(key)

    def copies_of(self, gpu_ids: Iterable[int]) -> list[int | None]:
        """Return for each GPU block the host block with the same key, if there is one."""
        keys, cpu = self.keys, self.cpu_index
        return [None if (key := keys[block_id]) is None else cpu.get(key) for block_id in gpu_ids]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest run of leading keys that are findable."""
        gpu, cpu, found = self.gpu_index, self.cpu_index, []
        for key in keys:
            block_id = gpu.get(key)
            if block_id is None:
                block_id = cpu.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def own(self, block_ids: Iterable[int]) -> None:
        """Give each block one more owner; the first takes it out of its list."""
        owners, lists, num_gpu = self.owners, self._where, self.num_gpu
        gpu = cpu = 0
        for block_id in block_ids:
            owners[block_id] += 1
            if owners[block_id] > 1:
                continue
            where = lists[block_id]
            if where is not None:
                del where[block_id]
                lists[block_id] = None
            if block_id < num_gpu:
                gpu += 1
            else:
                cpu += 1
        self.num_owned_gpu += gpu
        self.num_gpu_changes += gpu
        self.num_owned_cpu += cpu

    def disown(self, block_ids: Iterable[int]) -> list[int]:
        """Take one owner from each block; return those that lost the last: `settle` them."""
        owners, idle = self.owners, []
        for block_id in block_ids:
            owners[block_id] -= 1
            if not owners[block_id]:
                idle.append(block_id)
        gpu = len([block_id for block_id in idle if block_id < self.num_gpu])
        self.num_owned_gpu -= gpu
        self.num_owned_cpu -= len(idle) - gpu
        return idle

    def move(self, kind: MoveKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Begin to copy blocks with keys to owned blocks of the other tier, found there at once.

        The host blocks lose an owner: the move keeps them out of the lists.

        Args:
            kind: From the GPU to the host tier, or back.
            sources: They have an owner or lie on the GPU.
            targets: Without keys.
        """
        self.ledger.start(kind, sources, targets)
        keys = self.keys
        index = self.cpu_index if kind == "store" else self.gpu_index
        for source, target in zip(sources, targets, strict=True):
            key = keys[source]
            assert key is not None
            keys[target] = key
            index[key] = target
        self.num_key_changes += 1
        self.disown(targets if kind == "store" else sources)

    def set_key(self, block_id: int, key: bytes) -> None:
        """Let a key name a block; none of its tier has that key."""
        self.num_key_changes += 1
        self.keys[block_id] = key
        (self.gpu_index if self.is_gpu(block_id) else self.cpu_index)[key] = block_id
        self.settle(block_id)
        copy = self.copy_of(block_id)
        if copy is not None:
            self.settle(copy)

    def drop_key(self, block_id: int) -> None:
        """Let a block be found no more."""
        key = self.keys[block_id]
        if key is None:
            return
        copy = self.copy_of(block_id)
        self.num_key_changes += 1
        self.keys[block_id] = None
        del (self.gpu_index if self.is_gpu(block_id) else self.cpu_index)[key]
        self.settle(block_id)
        if copy is not None:
            self.settle(copy)

    def settle(self, *block_ids: int) -> None:
        """Put blocks into the lists where they belong; in the right one they keep their age."""
        lists, num_gpu, home_of = self._where, self.num_gpu, self._home
        for block_id in block_ids:
            home, where = home_of(block_id), lists[block_id]
            if home is where:
                continue
            if block_id < num_gpu:
                self.num_gpu_changes += 1
            if where is not None:
                del where[block_id]
            if home is not None:
                home.push(block_id)
            lists[block_id] = home

    def check_id(self, block_id: int) -> None:
        """Raise EngineError if there is no such block."""
        if not 0 <= block_id < len(self.owners):
            raise EngineError(
                f"block pool: expected a block id from 0 to {len(self.owners) - 1}, got {block_id}."
            )

    def check_owned(self, *block_ids: int) -> None:
        """Raise EngineError unless blocks have an owner each."""
        owners, count = self.owners, len(self.owners)
        for block_id in block_ids:
            if not 0 <= block_id < count:
                self.check_id(block_id)
            if not owners[block_id]:
                raise EngineError(
                    f"block pool: expected a block with an owner, got block {block_id}, which is "
                    "free."
                )

    def check_key(self, block_id: int, key: bytes) -> None:
        """Raise EngineError unless a block has an owner, and this key or none."""
        self.check_owned(block_id)
        known = self.keys[block_id]
        if known is not None and known != key:
            raise EngineError(
                f"block pool: expected block {block_id} to keep its key, got another one. Only a "
                "block's owner may name it, once, when it is full."
            )

    def _home(self, block_id: int) -> BlockList | None:
        if self.owners[block_id]:
            return None
        key = self.keys[block_id]
        if block_id < self.num_gpu:
            return self.gpu_free if key is None else self.gpu_idle
        if self.ledger.is_touched(block_id):
            return None
        part = 0 if block_id < self.num_gpu + self.num_in_place else 1
        if key is None:
            return self.cpu_free[part]
        return (self.cpu_spare if key in self.gpu_index else self.cpu_only)[part]
