"""Batch: the device tensors of one step."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of a step, packed: one per decode, then the prefills' parts.

    T tokens, S sequences (rows of the block table: decodes, then prefills), M blocks a sequence.
    Padded decode rows have slot -1 and length 0.
    """

    input_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]."""
    slots: torch.Tensor
    """int64 [T]: where a token's key and value go, block * block_size + offset; -1: nowhere."""
    block_tables: torch.Tensor
    """int32 [S, M]."""
    window_slots: torch.Tensor | None
    """As slots, in the cache of layers with a window; None where all layers share one cache."""
    window_tables: torch.Tensor | None
    """As block_tables, of layers with a window; entries before the window are not valid."""
    seq_lens: torch.Tensor
    """int32 [S]: tokens in the cache once this step's are written."""
    num_decodes: int
    """Decode rows, padding included."""
    max_decode_len: int
    """Upper bound of the decodes' lengths; sizes the grid only."""
    prefill_starts: torch.Tensor | None
    """int32 [prefills + 1]: first token of each prefill, counted from the first prefill's."""
    max_prefill_tokens: int
    """Most tokens of one prefill."""
    logits_rows: torch.Tensor | None
    """int64 [R]: tokens whose logits are wanted; None: all."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return int(self.input_ids.shape[0])
