"""Batch: the device tensors of one step."""

from dataclasses import dataclass

import torch

from engine.kv.pieces import PrefillPiece


@dataclass(frozen=True, slots=True)
class StagedPrefill:
    """The part of a sequence that has blocks in the host tier: they are copied to the GPU first."""

    first: int
    """Of the step's tokens, its first one."""
    stop: int
    """The one after its last."""
    table: torch.Tensor
    """int32 [1, M]; blocks of the host tier are named by their place in a staging buffer, counted
    from the number of blocks on the GPU."""
    starts: torch.Tensor
    """int32 [2]: 0 and its number of tokens."""
    seq_len: torch.Tensor
    """int32 [1]."""
    host_ids: torch.Tensor
    """int64 [n]: its blocks of the host tier in order of position, numbered within the tier."""
    pieces: tuple[PrefillPiece, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of a step, packed: one per decode, then the prefills' parts, staged ones last.

    T tokens, S sequences (rows of the block table: decodes, then prefills), M blocks a sequence.
    Padded decode rows have slot -1 and length 0.
    """

    input_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]."""
    slots: tuple[torch.Tensor, ...]
    """int64 [T] for each group of layers: where a token's key and value go, block * block_size +
    offset; -1: nowhere."""
    block_tables: tuple[torch.Tensor, ...]
    """int32 [S, M] for each group; entries before its window are not valid."""
    seq_lens: torch.Tensor
    """int32 [S]: tokens in the cache once this step's are written."""
    num_decodes: int
    """Decode rows, padding included."""
    max_decode_len: int
    """Upper bound of the decodes' lengths; sizes the grid only."""
    prefill_starts: torch.Tensor | None
    """int32 [prefills + 1]: first token of each prefill, counted from the first prefill's; without
    those that are staged, None where there are no others."""
    max_prefill_tokens: int
    """Most tokens of one prefill."""
    logits_rows: torch.Tensor | None
    """int64 [R]: tokens whose logits are wanted; None: all."""
    staged: tuple[StagedPrefill, ...] = ()
    """Prefills over blocks of both tiers."""
    reads_host: bool = False
    """Whether a decode reads blocks in the host tier."""

    @property
    def is_decode(self) -> bool:
        """Whether it has no prefill."""
        return self.prefill_starts is None and not self.staged

    @property
    def num_rows(self) -> int:
        """Rows of the block tables but for staged prefills, whose rows follow."""
        return int(self.seq_lens.shape[0]) - len(self.staged)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return int(self.input_ids.shape[0])
