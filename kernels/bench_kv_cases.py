"""What kernels.bench_kv times, with inputs of the sizes that it says."""

from collections.abc import Callable, Iterator
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
from kernels.bench_kv_prefill import prefill
from kernels.host_cache import HostCache
from kernels.triton import block_copy, decode_attention
from kernels.triton.tiles import DecodeTile, decode_tile

_GPU_TOKENS = 42_000

_TILES = (
    decode_tile(HEAD_SIZE, DTYPE),
    DecodeTile(64, 4, 2),
    DecodeTile(64, 4, 4),
    DecodeTile(64, 8, 3),
    DecodeTile(32, 4, 3),
    DecodeTile(32, 4, 5),
    DecodeTile(32, 2, 3),
    DecodeTile(128, 4, 2),
    DecodeTile(128, 8, 2),
    DecodeTile(128, 8, 3),
    DecodeTile(64, 4, 3, split=512),
    DecodeTile(32, 4, 3, split=512),
    DecodeTile(64, 4, 3, sum_rows=16),
)
_TIERED_TILES = (
    decode_tile(HEAD_SIZE, DTYPE),
    DecodeTile(64, 8, 3),
    DecodeTile(32, 4, 3),
    DecodeTile(128, 8, 2),
)
_DECODE_SHAPES = ((32, 4096), (1, 131_072), (8, 16_384), (1, 4096), (64, 512))


def _label(tile: DecodeTile) -> str:
    return f"{tile.keys}/{tile.num_warps}/{tile.num_stages} split {tile.split} sum {tile.sum_rows}"


def _decode(device: torch.device) -> Iterator[KVCase]:
    """All blocks on the GPU; one cache serves all shapes."""
    tokens = max(seqs * length for seqs, length in _DECODE_SHAPES)
    cache = randn((tokens // BLOCK, 2, KV_HEADS, BLOCK, HEAD_SIZE), device)
    blocks = torch.randperm(len(cache), device=device).to(torch.int32)
    for seqs, length in _DECODE_SHAPES:
        tables = blocks[: seqs * length // BLOCK].view(seqs, -1)
        lens = torch.full((seqs,), length, dtype=torch.int32, device=device)
        q = randn((seqs, HEADS, HEAD_SIZE), device)
        out, workspace = torch.empty_like(q), _workspace(seqs, length, device)
        for tile in _TILES:
            yield KVCase(
                f"decode attention, {seqs} x {length} keys",
                _label(tile),
                partial(
                    decode_attention.paged_decode_attention,
                    q,
                    cache[:, 0],
                    cache[:, 1],
                    tables,
                    lens,
                    SCALE,
                    max_seq_len=length,
                    out=out,
                    workspace=workspace,
                    tile=tile,
                ),
                1,
                "copy",
                seqs * length * TOKEN_BYTES + 2 * q.nbytes,
            )


@dataclass(frozen=True)
class _Sequence:
    """One sequence of several layers: blocks of the GPU, then those of host memory.

    gpu and host are [B, L, 2, K, P, H]; the table has the GPU's blocks first.
    """

    gpu: torch.Tensor
    host: torch.Tensor
    table: torch.Tensor
    q: torch.Tensor
    workspace: ops.DecodeWorkspace

    @classmethod
    def of(cls, num_tokens: int, num_layers: int, device: torch.device) -> "_Sequence":
        """Draw one of so many tokens, of which _GPU_TOKENS lie on the GPU."""
        shape = (num_layers, 2, KV_HEADS, BLOCK, HEAD_SIZE)
        num_gpu = _GPU_TOKENS // BLOCK
        num_host = -(-num_tokens // BLOCK) - num_gpu
        gpu = randn((num_gpu, *shape), device)
        _, host = host_tensor((num_host, *shape), DTYPE)
        host.copy_(randn((num_host, *shape), device))
        on_gpu = torch.randperm(num_gpu, device=device)
        beside = num_gpu + torch.randperm(num_host, device=device)
        table = torch.cat([on_gpu, beside]).to(torch.int32)[None]
        q = randn((1, HEADS, HEAD_SIZE), device)
        return cls(gpu, host, table, q, _workspace(1, num_tokens, device))

    def attend(
        self, tile: DecodeTile, table: torch.Tensor, lens: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend in all layers; the last layer's result stays in out."""
        for layer in range(self.gpu.shape[1]):
            decode_attention.paged_decode_attention(
                self.q,
                self.gpu[:, layer, 0],
                self.gpu[:, layer, 1],
                table,
                lens,
                SCALE,
                max_seq_len=table.shape[1] * BLOCK,
                out=out,
                workspace=self.workspace,
                host=HostCache(self.host[:, layer, 0], self.host[:, layer, 1]),
                tile=tile,
            )

    def has_bits_of_one_tier(self, tile: DecodeTile, table: torch.Tensor) -> bool:
        """Tell whether the last layer's result is that of all blocks on the GPU."""
        lens = torch.full((1,), table.shape[1] * BLOCK, dtype=torch.int32, device=table.device)
        out, expected = torch.empty_like(self.q), torch.empty_like(self.q)
        self.attend(tile, table, lens, out)
        one_tier = torch.cat([self.gpu[:, -1], self.host[:, -1]])
        decode_attention.paged_decode_attention(
            self.q,
            one_tier[:, 0],
            one_tier[:, 1],
            table,
            lens,
            SCALE,
            max_seq_len=table.shape[1] * BLOCK,
            out=expected,
            tile=tile,
        )
        return torch.equal(out, expected)


def _tiered(device: torch.device) -> Iterator[KVCase]:
    yield from _tiered_of(55_000, 4, device)
    yield from _tiered_of(130_000, 2, device)


def _tiered_of(num_tokens: int, num_layers: int, device: torch.device) -> Iterator[KVCase]:
    sequence = _Sequence.of(num_tokens, num_layers, device)
    table, num_gpu = sequence.table, len(sequence.gpu)
    length = table.shape[1] * BLOCK
    host_bytes = (length - num_gpu * BLOCK) * TOKEN_BYTES

    def case(name: str, tile: DecodeTile, at: torch.Tensor, keys: int) -> KVCase:
        lens = torch.full((1,), keys, dtype=torch.int32, device=device)
        run = partial(sequence.attend, tile, at, lens, torch.empty_like(sequence.q))
        return KVCase(name, _label(tile), run, num_layers, "in place", host_bytes)

    alone = case("the blocks on the GPU", _TIERED_TILES[0], table, num_gpu * BLOCK)
    orders = {
        "end": table,
        "start": table.flip(1),
        "mixed": table[:, torch.randperm(table.shape[1], device=device)],
    }
    for where, at in orders.items():
        for tile in _TIERED_TILES if where == "end" else _TIERED_TILES[:1]:
            yield replace(
                case(f"decode, 1 x {num_tokens} keys, host's at the {where}", tile, at, length),
                num_host_bytes=host_bytes,
                beside=alone,
                check=partial(sequence.has_bits_of_one_tier, tile, at),
            )


def _cost(device: torch.device) -> Iterator[KVCase]:
    """All blocks on the GPU; a tier beside them that holds none of the sequences' blocks."""
    for seqs, length in ((32, 4096), (1, 4096), (256, 512)):
        cache = randn((seqs * length // BLOCK, 2, KV_HEADS, BLOCK, HEAD_SIZE), device)
        _, host = host_tensor((16, *cache.shape[1:]), DTYPE)
        tables = torch.randperm(len(cache), device=device).to(torch.int32).view(seqs, -1)
        lens = torch.full((seqs,), length, dtype=torch.int32, device=device)
        q = randn((seqs, HEADS, HEAD_SIZE), device)
        common = (q, cache[:, 0], cache[:, 1], tables, lens, SCALE)
        attend = partial(
            decode_attention.paged_decode_attention,
            *common,
            max_seq_len=length,
            out=torch.empty_like(q),
            workspace=_workspace(seqs, length, device),
        )
        num_bytes = seqs * length * TOKEN_BYTES + 2 * q.nbytes
        name = f"decode attention, {seqs} x {length} keys"
        plain = KVCase(name, "one tier", attend, 1, "copy", num_bytes)
        yield plain
        tiered = partial(attend, host=HostCache(host[:, 0], host[:, 1]))
        yield replace(plain, variant="two tiers", run=tiered, beside=plain)
        yield from _write_cost(seqs, HostCache(cache[:, 0], cache[:, 1]), host, device)


def _write_cost(
    num_tokens: int, cache: HostCache, host: torch.Tensor, device: torch.device
) -> Iterator[KVCase]:
    fused = randn((num_tokens, HEADS + 2 * KV_HEADS, HEAD_SIZE), device)
    q, k, v = fused[:, :HEADS], fused[:, HEADS:-KV_HEADS], fused[:, -KV_HEADS:]
    cos_sin = torch.ones((1, HEAD_SIZE), device=device)
    positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    slots = torch.randperm(len(cache.k) * BLOCK, device=device)[:num_tokens]
    repeats = 32

    def write(beside: HostCache | None) -> None:
        for _ in range(repeats):
            ops.rotary_write_kv_(
                *(q, k, v, None, None, 0.0, cos_sin, positions, cache.k, cache.v, slots),
                host=beside,
            )

    name = f"rotary and cache write, {num_tokens} tokens"
    run = partial(write, None)
    plain = KVCase(name, "one tier", run, repeats, "copy", 2 * fused.nbytes)
    yield plain
    run = partial(write, HostCache(host[:, 0], host[:, 1]))
    yield replace(plain, variant="two tiers", run=run, beside=plain)


def _gather(device: torch.device) -> Iterator[KVCase]:
    num_layers, words = 4, BLOCK * TOKEN_BYTES // 4
    _, host = host_tensor((1024, num_layers, words), torch.int32)
    stage = torch.zeros((512, words), dtype=torch.int32, device=device)
    slots = torch.arange(len(stage), device=device)
    ids = torch.randperm(len(host), device=device)[: len(stage)]

    def copy(*, is_store: bool, programs: int) -> None:
        for layer in range(num_layers):
            pair = (host[:, layer], stage, ids, slots)
            if not is_store:
                pair = (stage, host[:, layer], slots, ids)
            block_copy.copy_blocks(*pair, max_programs=programs)

    for is_store in (False, True):
        for programs in (16, 32, 64, 128):
            run = partial(copy, is_store=is_store, programs=programs)
            name = f"one layer of {len(stage)} blocks {'to' if is_store else 'from'} the host"
            yield KVCase(name, f"{programs} programs", run, num_layers, "in place", stage.nbytes)


def _workspace(num_seqs: int, length: int, device: torch.device) -> ops.DecodeWorkspace:
    return ops.decode_workspace(num_seqs, HEADS, HEAD_SIZE, length + BLOCK, device)


PARTS: dict[str, Callable[[torch.device], Iterator[KVCase]]] = {
    "decode": _decode,
    "tiered": _tiered,
    "cost": _cost,
    "gather": _gather,
    "prefill": prefill,
}
"""Part to the cases that are timed for it."""
