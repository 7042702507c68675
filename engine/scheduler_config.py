"""Limits that the scheduler keeps to."""

from dataclasses import dataclass

from engine.errors import EngineError
from engine.kv.blocks import BlockPool


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step."""

    max_num_seqs: int
    """Sequences that run at once."""
    max_num_batched_tokens: int
    """Tokens of one step; at least max_num_seqs."""
    max_model_len: int
    """Most tokens of prompt and output."""
    block_size: int
    """Tokens in a KV block; the pool's."""

    def check(self, pool: BlockPool) -> None:
        """Return if the limits agree with each other and with the pool.

        Raises:
            EngineError: They do not, or the pool cannot hold one sequence of max_model_len tokens.
        """
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name}: expected at least 1, got {getattr(self, name)}.")
        if self.max_model_len < 2:
            raise EngineError(
                f"max_model_len: expected at least 2 (one token of prompt, one of output), got "
                f"{self.max_model_len}. Raise it."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineError(
                f"max_num_batched_tokens: expected at least max_num_seqs={self.max_num_seqs}, got "
                f"{self.max_num_batched_tokens}. Raise it or lower max_num_seqs."
            )
        if self.block_size != pool.block_size:
            raise EngineError(
                f"block_size: expected the pool's {pool.block_size}, got {self.block_size}."
            )
        room = pool.num_free * pool.block_size
        if room < self.max_model_len:
            raise EngineError(
                f"KV blocks: expected room for one sequence of max_model_len={self.max_model_len} "
                f"tokens, got {pool.num_free} free blocks of {pool.block_size} tokens = {room}. "
                "Lower engine.max_model_len or give the KV cache more blocks."
            )
