"""Stage buffers in steps of any mixture: what is copied into them when, and what waits for what.

Copies and launches run at once, as they are enqueued, on blocks that say which they are and how
often they were written. Beside that, each stream knows how much of the other one it waits for: so
an access that no wait orders is found, whatever ran first.
"""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.plan.sizes import NUM_STAGES
from engine.run.stages import (
    PIECE_KEYS,
    AheadDecode,
    StagedPrefill,
    Stages,
    cut_ahead,
    cut_pieces,
    host_places,
    with_runs,
)
from kernels.ops import attention

NUM_GPU = 60
NUM_HOST = 480
LONGEST = 1500
HEADS = SimpleNamespace(num_attention_heads=1, head_dim=1)


class RaceError(Exception):
    """Something is read or written too early."""


@dataclass
class Streams:
    """A compute stream and a copy stream, and how far each has waited for the other."""

    launched: int = 0
    copied: int = 0
    launches_before_copy: int = 0
    copies_before_launch: int = 0
    reads: dict[Any, int] = field(default_factory=dict)
    """By what a launch reads or writes, the newest such launch."""
    copies: dict[Any, int] = field(default_factory=dict)
    """By what a copy reads or writes, the newest such copy."""

    def launch(self, touched: set[Any]) -> None:
        """Enqueue a kernel."""
        for each in touched:
            if self.copies.get(each, 0) > self.copies_before_launch:
                raise RaceError(f"a launch does not wait for the copy of {each}")
        self.launched += 1
        self.reads |= dict.fromkeys(touched, self.launched)

    def copy_into(self, touched: set[Any]) -> None:
        """Enqueue a copy."""
        for each in touched:
            if self.reads.get(each, 0) > self.launches_before_copy:
                raise RaceError(f"a copy does not wait for the launch with {each}")
        self.copied += 1
        self.copies |= dict.fromkeys(touched, self.copied)


class World:
    """Sequences over both tiers, and the steps that compute them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.size = chance.choice((16, 32, 64))
        self.streams = Streams()
        self.num_layers = chance.choice((1, 3, 5))
        count = max(1, self.num_layers - chance.randrange(2))
        host_layers = sorted(chance.sample(range(self.num_layers), count))
        words = 2 * self.size
        self.hosts = {
            layer: torch.zeros((NUM_HOST, words), dtype=torch.int32) for layer in host_layers
        }
        for layer, blocks in self.hosts.items():
            blocks[:, 0], blocks[:, 1] = layer, torch.arange(NUM_HOST)
        cache = SimpleNamespace(
            tensor=torch.zeros((NUM_GPU, 1, 2, 1, self.size, 1)),
            layer_bytes=4 * words,
            host_layers=host_layers,
            host_rows=self.hosts.__getitem__,
            host_bytes=lambda layer: self.hosts[layer].view(torch.uint8),
        )
        self.stage_blocks = PIECE_KEYS // self.size + chance.choice((0, 1, 5, 9))
        plan = SimpleNamespace(
            host_kv=SimpleNamespace(stage_blocks=self.stage_blocks), max_num_batched_tokens=8
        )
        device = SimpleNamespace(
            empty=lambda count: torch.zeros(count, dtype=torch.uint8),
            count_working=lambda count: None,
            torch_device=torch.device("cpu"),
            copy_stream=lambda: self,
        )
        self.stages = Stages(plan, HEADS, device, cache)  # type: ignore[arg-type]
        starts = [rows.data_ptr() for rows in self.stages._rows]
        self.buffer_of = {start: number for number, start in enumerate(starts)}
        monkeypatch.setattr(attention, "paged_prefill_part", self.attend_prefill)
        monkeypatch.setattr(attention, "paged_decode_part", self.attend_decode)
        gpu, host = list(range(NUM_GPU)), list(range(NUM_GPU, NUM_GPU + NUM_HOST))
        self.tables = []
        for _ in range(5):
            count = -(-LONGEST // self.size)
            if chance.random() < 0.5:  # neighbours, else none
                chance.shuffle(host)
            is_gpu = [bool(gpu) and chance.random() < 0.3 for _ in range(count)]
            bounds = chance.randrange(count), chance.randrange(count)
            table = []
            for place, here in enumerate(is_gpu):
                source = gpu if gpu and (here or min(bounds) <= place < max(bounds)) else host
                table.append(source.pop(0))
            self.tables.append(table)
        self.lengths = [chance.randrange(LONGEST // 2) for _ in self.tables]
        self.tiers: set[str] = set()
        self.num_taken = 0

    # What the stages see of a copy stream.

    def after_compute(self) -> None:
        self.streams.launches_before_copy = self.streams.launched

    def record(self) -> int:
        return self.streams.copied

    def compute_after(self, event: int) -> None:
        self.streams.copies_before_launch = max(self.streams.copies_before_launch, event)

    def copy_rows(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        blocks = src.view(torch.int32)
        self._note_copy(dst, [(int(row[0]), int(row[1])) for row in blocks])
        dst.copy_(src)

    def run(self, work: Any) -> None:
        words, rows, _, sources = work.args
        self._note_copy(words, [(int(row[0]), int(row[1])) for row in rows[sources]])
        work()

    def _note_copy(self, buffer: torch.Tensor, blocks: list[tuple[int, int]]) -> None:
        start = buffer.untyped_storage().data_ptr()
        self.streams.copy_into({("buffer", self.buffer_of[start]), *blocks})

    # Steps.

    def step(self) -> None:
        """Run one step of some sequences; one in ten fails amid its layers."""
        chance, prefills, ahead, written = self.chance, [], [], []
        for number in chance.sample(range(len(self.tables)), chance.randint(1, len(self.tables))):
            length, is_decode = self.lengths[number], chance.random() < 0.5
            count = 1 if is_decode and length else chance.choice((1, 7, 130, 300))
            if length + count > LONGEST:
                self.lengths[number] = chance.randrange(LONGEST // 2)
                continue
            self.lengths[number] = stop = length + count
            part = self.tables[number][length // self.size : -(-stop // self.size)]
            written.append([block - NUM_GPU for block in part if block >= NUM_GPU])
            if is_decode and length:
                ahead.append((number, stop, *self.decode(number, stop)))
            elif (places := self.places(number, stop)).size:
                prefills.append((number, stop, self.prefill(number, length, stop, places)))
        ahead = [each for each in ahead if each[2].num_copied]
        fails_at = chance.randrange(self.num_layers) if chance.random() < 0.1 else None
        self.stages.begin_step([each[-1] for each in prefills], [each[2] for each in ahead])
        for layer in range(self.num_layers):
            if layer == fails_at:
                self.streams.copies.clear()  # nobody reads what is left
                self.streams.copies_before_launch = self.streams.copied
                return
            if layer in self.hosts:
                self.run_layer(layer, prefills, ahead, written)
            self.streams.launch(set())
        assert self.stages._next is None
        assert not self.stages._ready

    def run_layer(self, layer: int, prefills: list, ahead: list, written: list) -> None:
        self.streams.launch({(layer, block) for blocks in written for block in blocks})
        for blocks in written:
            self.hosts[layer][blocks, 2] += 1
        for number, _, decode, read in ahead:
            call = Call(layer, number, read, "in place")
            self.stages.decode(layer, call, decode, None)  # type: ignore[arg-type]
        for number, _, staged in prefills:
            call = Call(layer, number, staged.table[0].numpy(), None)
            self.stages.prefill(layer, call, staged)  # type: ignore[arg-type]

    def places(self, number: int, stop: int) -> np.ndarray:
        return host_places(self.tables[number], stop, self.size, NUM_GPU)

    def decode(self, number: int, stop: int) -> tuple[AheadDecode, np.ndarray]:
        table = np.array(self.tables[number][: -(-stop // self.size)])
        sizes = {"stage_blocks": self.stage_blocks, "least_run": self.chance.choice((1, 2))}
        pieces, read = cut_ahead(table, stop, self.size, NUM_GPU, **sizes)
        return AheadDecode(number, pieces), read

    def prefill(self, number: int, start: int, stop: int, places: np.ndarray) -> StagedPrefill:
        """Return what TieredInputs.stage makes of it."""
        table = np.array(self.tables[number][: -(-stop // self.size)])
        hosts = table[places] - NUM_GPU
        table[places] = NUM_GPU + np.arange(places.size) % self.stage_blocks
        pieces = cut_pieces(places, stop, self.size, self.stage_blocks)
        if self.chance.random() < 0.7:
            pieces = with_runs(pieces, hosts, self.chance.choice((1, 2, 4)))
        none = torch.empty(0)
        at = torch.from_numpy(table)[None]
        return StagedPrefill(
            0, stop - start, start, at, none, none, torch.from_numpy(hosts), pieces
        )

    # What the stages launch.

    def attend_prefill(self, call: Any, starts: Any, part: Any, *, max_query_len: int) -> None:
        self.tiers.add(part.tiers)
        table = self.attend(call, part)
        is_host = table >= NUM_GPU
        assert {"cache": not is_host.any(), "host": is_host.all(), "both": True}[part.tiers]

    def attend_decode(self, call: Any, part: Any) -> None:
        self.attend(call, part)

    def attend(self, call: Any, part: Any) -> np.ndarray:
        """Read the blocks of a part; return how its table names them."""
        own = slice(part.begin_key // self.size, -(-part.end_key // self.size))
        true, read = np.array(self.tables[call.number][own]), call.table[own]
        hosts = true[true >= NUM_GPU] - NUM_GPU
        layer = self.hosts[call.layer]
        np.testing.assert_array_equal(true >= NUM_GPU, read >= NUM_GPU)
        np.testing.assert_array_equal(true[true < NUM_GPU], read[read < NUM_GPU])
        if call.host == "in place":
            np.testing.assert_array_equal(true, read)
            self.streams.launch(set())
        elif hosts.size:
            buffer = next(at for at, host in enumerate(self.stages._hosts) if host is call.host)
            self.streams.launch({("buffer", buffer)})
            self.num_taken += 1
            found = self.stages._words[buffer][read[read >= NUM_GPU] - NUM_GPU]
            if not torch.equal(found[:, :3], layer[hosts][:, :3]):
                raise RaceError("a buffer holds other blocks, or older ones")
        else:
            self.streams.launch(set())
        return read


@dataclass(frozen=True)
class Call:
    """What stages change of an AttentionCall, and whose it is."""

    layer: int
    number: int
    table: np.ndarray
    host: Any


def run(monkeypatch: pytest.MonkeyPatch, seeds: range) -> list[World]:
    worlds = []
    for seed in seeds:
        world = World(monkeypatch, seed)
        for _ in range(25):
            world.step()
        worlds.append(world)
    return worlds


def test_no_buffer_is_read_before_its_copy_nor_written_while_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worlds = run(monkeypatch, range(24))
    assert set.union(*(world.tiers for world in worlds)) == {"cache", "host", "both"}
    assert sum(world.num_taken for world in worlds) > 24 * 25 * NUM_STAGES


# Faults put in on purpose.


def copies_wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "after_compute", lambda self: None)


def launches_wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "compute_after", lambda self, event: None)


def one_copy_more_than_buffers(patch: pytest.MonkeyPatch) -> None:
    fill = Stages._fill

    def fill_more(self: Stages, layer: int | None) -> None:
        fill(self, layer)
        if self._next is not None and len(self._ready) == NUM_STAGES:
            copy, self._turn = self._next, (self._turn + 1) % NUM_STAGES
            self._stream.after_compute()
            copy.enqueue(self._turn)
            self._ready.append((self._turn, self._stream.record()))
            self._next = next(self._left, None)

    patch.setattr(Stages, "_fill", fill_more)


def a_buffer_is_filled_before_the_launch_that_reads_it(patch: pytest.MonkeyPatch) -> None:
    take = Stages._take

    def take_and_fill(self: Stages, layer: int) -> Any:
        found = take(self, layer)
        self._fill(layer)
        return found

    patch.setattr(Stages, "_take", take_and_fill)


def keys_are_copied_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    fill = Stages._fill
    patch.setattr(
        Stages, "_fill", lambda self, _: fill(self, self._next.layer if self._next else None)
    )


def prefills_are_copied_before_decodes(patch: pytest.MonkeyPatch) -> None:
    copies = Stages._copies

    def others_first(self: Stages, staged: Any, ahead: Any) -> Any:
        for layer in self._cache.host_layers:
            both = [copies(self, staged, ()), copies(self, (), ahead)]
            yield from (copy for part in both for copy in part if copy.layer == layer)

    patch.setattr(Stages, "_copies", others_first)


@pytest.mark.parametrize(
    "fault",
    [
        copies_wait_for_nothing,
        launches_wait_for_nothing,
        one_copy_more_than_buffers,
        a_buffer_is_filled_before_the_launch_that_reads_it,
        keys_are_copied_before_they_are_written,
        prefills_are_copied_before_decodes,
    ],
)
def test_control_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    with pytest.raises(RaceError):
        run(monkeypatch, range(8))
