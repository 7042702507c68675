"""Limits that the scheduler keeps to, and what it counts."""

from dataclasses import dataclass

from engine.errors import EngineError
from engine.kv.groups import BlockGroups


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step."""

    max_num_seqs: int
    """Sequences that have blocks at once."""
    max_num_batched_tokens: int
    """Tokens of one step; at least max_num_seqs."""
    max_model_len: int
    """Most tokens of prompt and output."""
    block_size: int
    """Tokens in a KV block; the pool's."""

    def check(self, groups: BlockGroups) -> None:
        """Return if the limits agree with each other and with the pools.

        Raises:
            EngineError: They do not, or a pool cannot hold one sequence of max_model_len tokens.
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
        if self.block_size != groups.block_size:
            raise EngineError(
                f"block_size: expected the pool's {groups.block_size}, got {self.block_size}."
            )
        groups.check(self.max_model_len)


@dataclass(kw_only=True)
class SchedulerStats:
    """Counts since the scheduler was made."""

    num_steps: int = 0
    """Steps committed."""
    num_decode_tokens: int = 0
    """Tokens run as decodes."""
    num_prefill_tokens: int = 0
    """Tokens run as prefills, recomputed ones included."""
    num_recomputed_tokens: int = 0
    """Tokens that ran once more because of a preemption."""
    num_preemptions: int = 0
    """Sequences whose blocks were taken away."""
    num_turns: int = 0
    """Of those, sequences that gave way to one that had waited."""
    num_swaps_out: int = 0
    """Of the preempted ones, those whose content was to be kept in the host tier."""
    num_swaps_in: int = 0
    """Preempted sequences that went on behind content that was found."""
    num_recomputes: int = 0
    """Preempted sequences whose content was not kept."""
    num_stalls: int = 0
    """Times that a running sequence sat out a step for want of a block."""
    num_finished: int = 0
    """Sequences that ended, aborted and failed ones included."""
    num_aborted: int = 0
    """Sequences that were aborted."""
    num_failed: int = 0
    """Sequences of requests that failed for unusable logits."""
    peak_running: int = 0
    """Most sequences that ran at once."""
    peak_blocks: int = 0
    """Most blocks in use."""
