"""Cases of prefill over parts of the keys, for kernels.bench_kv."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels import ops
from kernels.bench_kv_base import (
    BLOCK,
    DTYPE,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    SCALE,
    TOKEN_BYTES,
    KVCase,
    host_tensor,
    randn,
)
from kernels.host_cache import HostCache


def prefill(device: torch.device) -> Iterator[KVCase]:
    """Yield cases of a chunk of a prompt whose earlier keys all lie in host memory.

    Args:
        device: the card.
    """
    num_queries = 2048
    for num_keys, part_keys in ((8192, 2048), (32_768, 4096), (32_768, 16_384)):
        chunk = _Chunk.of(num_queries, num_keys, part_keys, device)
        name = f"prefill, {num_queries} queries of {num_keys} keys"
        num_bytes = num_keys * TOKEN_BYTES + 2 * chunk.q.nbytes
        whole = KVCase(name, "one pass", chunk.run_whole, 1, "copy", num_bytes)
        yield whole
        yield replace(
            whole,
            variant=f"parts of {part_keys}",
            run=chunk.run_parts,
            beside=whole,
            check=chunk.has_bits_of_one_pass,
        )
        host_bytes = chunk.host_ids.numel() * BLOCK * TOKEN_BYTES
        yield KVCase(
            name,
            f"parts of {part_keys}, copied before each",
            partial(chunk.run_parts, is_copied=True),
            1,
            "in place",
            host_bytes,
            host_bytes,
            beside=whole,
        )


@dataclass(frozen=True)
class _Chunk:
    """A prompt's last queries; its blocks once in one cache, and once in host memory."""

    q: torch.Tensor
    out: torch.Tensor
    one_tier: torch.Tensor
    host: torch.Tensor
    host_ids: torch.Tensor
    stage: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    state: ops.PrefillState
    part_keys: int

    @classmethod
    def of(cls, num_queries: int, num_keys: int, part_keys: int, device: torch.device) -> "_Chunk":
        """Draw a prompt of so many tokens."""
        shape = (2, KV_HEADS, BLOCK, HEAD_SIZE)
        one_tier = randn((num_keys // BLOCK, *shape), device)
        _, host = host_tensor(((num_keys - num_queries) // BLOCK, *shape), DTYPE)
        host.copy_(one_tier[: len(host)])
        q = randn((num_queries, HEADS, HEAD_SIZE), device)
        return cls(
            q=q,
            out=torch.empty_like(q),
            one_tier=one_tier,
            host=host,
            host_ids=torch.arange(len(host), device=device),
            stage=randn((part_keys // BLOCK, *shape), device),
            lens=torch.tensor([num_keys], dtype=torch.int32, device=device),
            starts=torch.tensor([0, num_queries], dtype=torch.int32, device=device),
            state=ops.prefill_state(num_queries, HEADS, HEAD_SIZE, device),
            part_keys=part_keys,
        )

    def run_whole(self) -> None:
        """Attend in one pass."""
        table = torch.arange(len(self.one_tier), dtype=torch.int32, device=self.q.device)[None]
        ops.paged_prefill_attention(
            *(self.q, self.one_tier[:, 0], self.one_tier[:, 1], table, self.starts, self.lens),
            SCALE,
            max_query_len=len(self.q),
            out=self.out,
        )

    def run_parts(self, *, is_copied: bool = False) -> None:
        """Attend part after part; the stage holds what was copied last."""
        num_keys, num_stage = len(self.one_tier) * BLOCK, len(self.stage)
        own = self.one_tier[len(self.host) :]
        words = [rows.view(torch.int32).flatten(1) for rows in (self.stage, self.host)]
        table = torch.arange(len(self.one_tier), dtype=torch.int32, device=self.q.device)[None]
        # The chunk's own blocks have the numbers from 0 on, and slots those after them.
        is_host = table < len(self.host)
        table = torch.where(is_host, len(own) + table % num_stage, table - len(self.host))
        for begin in range(0, num_keys, self.part_keys):
            ids = self.host_ids[begin // BLOCK : begin // BLOCK + num_stage]
            if is_copied:
                ops.copy_blocks(words[0], words[1], ids % num_stage, ids)
            end = begin + self.part_keys
            ops.paged_prefill_part(
                *(self.q, own[:, 0], own[:, 1], table, self.starts, self.lens, SCALE),
                stage=HostCache(self.stage[:, 0], self.stage[:, 1]),
                begin_key=begin,
                end_key=end,
                state=self.state,
                is_last=end >= num_keys,
                max_query_len=len(self.q),
                out=self.out,
            )

    def has_bits_of_one_pass(self) -> bool:
        """Tell whether parts, each copied first, give what one pass gives."""
        self.run_whole()
        expected = self.out.clone()
        self.out.zero_()
        self.run_parts(is_copied=True)
        return torch.equal(self.out, expected)
