"""PoolView: what can be asked of a pool of two tiers; nothing here changes it."""

from collections.abc import Iterable

from engine.kv.pool_types import Room, Tier, TierUse
from engine.kv.states import BlockStates


class PoolView:
    """Sizes, use and content of a pool.

    Args:
        states: What every block is.
        block_size: Tokens in a block.
        window: Most tokens that its layers attend to; None: all.
        block_bytes: Bytes of a block in these layers.
    """

    def __init__(
        self, states: BlockStates, block_size: int, window: int | None, block_bytes: int
    ) -> None:
        self._states = states
        self.block_size, self.window, self.block_bytes = block_size, window, block_bytes
        self.num_gpu_blocks = states.num_gpu
        self.num_cpu_blocks = states.num_cpu
        self.num_in_place = states.num_in_place
        """Host blocks that compute can read and write where they are, the first ones."""
        self.num_blocks = states.num_gpu + states.num_cpu

    @property
    def num_free(self) -> int:
        """GPU blocks without an owner: what `allocate` can hand out."""
        return self._states.num_available_gpu

    @property
    def num_used(self) -> int:
        """GPU blocks with an owner."""
        return self._states.num_owned_gpu

    @property
    def num_changes(self) -> int:
        """Counts GPU blocks that became owned, free or findable."""
        return self._states.num_gpu_changes

    @property
    def idle_gpu(self) -> tuple[int, ...]:
        """GPU blocks that are findable and have no owner, the next to give way first."""
        return tuple(self._states.gpu_idle)

    def num_owned_gpu(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks lie on the GPU and have an owner."""
        owners, first_host = self._states.owners, self.num_gpu_blocks
        return len([b for b in block_ids if b < first_host and owners[b]])

    def num_allocatable(self, room: Room) -> int:
        """Return how many blocks `allocate` can hand out now."""
        host = self._states.num_available_in_place if room == "either" else 0
        return self._states.num_available_gpu + host

    def use(self, tier: Tier) -> TierUse:
        """Return how a tier is used."""
        states = self._states
        if tier == "gpu":
            return TierUse(states.num_owned_gpu, len(states.gpu_idle), len(states.gpu_free), 0)
        free = sum(len(blocks) for blocks in states.cpu_free)
        cached = sum(len(blocks) for blocks in (*states.cpu_spare, *states.cpu_only))
        owned = states.num_owned_cpu
        return TierUse(owned, cached, free, self.num_cpu_blocks - owned - cached - free)

    def ref_count(self, block_id: int) -> int:
        """Return the number of owners of a block.

        Raises:
            EngineError: There is no such block.
        """
        self._states.check_id(block_id)
        return self._states.owners[block_id]

    def key_of(self, block_id: int) -> bytes | None:
        """Return the key by which a block is found, if it is.

        Raises:
            EngineError: There is no such block.
        """
        self._states.check_id(block_id)
        return self._states.keys[block_id]

    def findable(self, keys: Iterable[bytes]) -> list[bool]:
        """Return for each key whether a block of either tier has it."""
        gpu, cpu = self._states.gpu_index, self._states.cpu_index
        return [key in gpu or key in cpu for key in keys]

    def is_pending(self, move_ids: Iterable[int]) -> bool:
        """Return whether any of these moves is not complete."""
        return not self._states.ledger.are_done(move_ids)

    @property
    def num_moves(self) -> int:
        """Moves that are not complete."""
        return self._states.ledger.num_in_flight
