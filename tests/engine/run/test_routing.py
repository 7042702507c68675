"""Tables of experts in the place of a router's choice, and the recorder."""

import numpy as np
import pytest
import torch

from engine.device.cpu import CPUDevice
from engine.model.routing import (
    TABLE_ROWS,
    WINDOW_TOKENS,
    ExpertSizes,
    first_row,
    reuse_share,
)
from engine.run.routing import (
    RecordedPart,
    RoutingRecorder,
    RoutingTable,
    synthetic_ids,
)

SIZES = ExpertSizes(layers=(0, 1, 3), num_experts=128, top_k=8)


def counted_reuse(ids: np.ndarray) -> float:
    """The share of picks that repeat, pick by pick."""
    hits = total = 0
    for token in range(WINDOW_TOKENS, len(ids)):
        for layer in range(ids.shape[1]):
            recent = set(ids[token - WINDOW_TOKENS : token, layer].reshape(-1).tolist())
            picks = ids[token, layer].tolist()
            hits += sum(pick in recent for pick in picks)
            total += len(picks)
    return hits / total


@pytest.mark.parametrize("reuse", [0, 0.3, 0.8, 1])
def test_measured_reuse_is_the_stated_one(reuse: float) -> None:
    ids = synthetic_ids(SIZES, reuse, seed=3, num_rows=600)
    assert ids.shape == (600, 3, 8)
    assert 0 <= ids.min() <= ids.max() < 128
    assert all(len(set(row)) == 8 for row in ids.reshape(-1, 8).tolist())
    measured = reuse_share(ids)
    assert measured == counted_reuse(ids)
    # 14,208 picks: four standard deviations.
    assert measured == pytest.approx(reuse, abs=4 * (reuse * (1 - reuse) / 14208) ** 0.5)


def test_picks_are_uniform() -> None:
    ids = synthetic_ids(SIZES, 0.5, seed=0, num_rows=2000)
    counts = np.bincount(ids.reshape(-1), minlength=128)
    assert counts.min() > 0.6 * counts.mean()
    assert counts.max() < 1.4 * counts.mean()
    # Neither is a place among a token's picks bound to an expert.
    assert len(np.unique(ids[..., 0])) == 128


def test_a_used_up_set_gives_way_to_the_other() -> None:
    few = ExpertSizes(layers=(0,), num_experts=8, top_k=2)
    ids = synthetic_ids(few, 0.0, seed=0, num_rows=200)
    assert all(len(set(row)) == 2 for row in ids[:, 0].tolist())
    measured = reuse_share(ids)
    assert measured is not None
    assert measured > 0.8  # the last 8 tokens have nearly all experts
    every = ExpertSizes(layers=(0,), num_experts=4, top_k=4)
    assert reuse_share(synthetic_ids(every, 0.2, seed=0, num_rows=50)) == 1
    assert len(np.unique(synthetic_ids(few, 1.0, seed=0, num_rows=50))) == 2


def test_seeds_differ_and_repeat() -> None:
    tables = [synthetic_ids(SIZES, 0.5, seed, 20) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(tables[0], tables[1])
    assert (tables[0] != tables[2]).any()


def test_a_short_table_has_no_reuse() -> None:
    assert reuse_share(synthetic_ids(SIZES, 0.5, 0, WINDOW_TOKENS)) is None


def test_a_table_gives_each_token_its_row() -> None:
    ids = synthetic_ids(SIZES, 0.8, seed=5, num_rows=50)
    table = RoutingTable.of(ids, 16, CPUDevice())
    assert table.num_rows == 50
    rows = torch.tensor([7, 0, 49, 7])
    taken = table.take(rows)
    assert taken.dtype == torch.int32
    np.testing.assert_array_equal(taken.numpy(), ids[rows.numpy()].transpose(1, 0, 2))
    assert table.take(rows[:1]).data_ptr() == taken.data_ptr()  # a graph finds it there


def test_sequences_use_different_parts() -> None:
    prompts = [[number, *range(100, 130)] for number in range(64)]
    rows = [first_row(prompt) % TABLE_ROWS for prompt in prompts]
    assert len(set(rows)) > 60
    assert min(rows) < TABLE_ROWS // 8
    assert max(rows) > TABLE_ROWS * 7 // 8


def test_the_recorder_keeps_sequences_apart_and_in_order() -> None:
    sizes = ExpertSizes(layers=(0, 2), num_experts=64, top_k=2)
    recorder = RoutingRecorder.of(sizes, 8, CPUDevice())
    truth = {seq: synthetic_ids(sizes, 0.5, seq, 6) for seq in (3, 9)}

    def step(*parts: tuple[int, int, int]) -> None:
        """Run parts of sequences: number, start, tokens; a step of padding follows."""
        at, found = 0, []
        for seq, start, count in parts:
            found.append(RecordedPart(seq, start, at, count))
            at += count
        for place in range(2):
            picked = [truth[seq][start : start + n, place] for seq, start, n in parts]
            recorder.note(place, torch.from_numpy(np.concatenate(picked)).to(torch.int32))
        sent = recorder.send(at)
        recorder.note(0, torch.zeros((8, 2), dtype=torch.int32))  # the step behind
        recorder.keep(sent, found)

    step((9, 0, 3))
    step((9, 3, 1), (3, 0, 4))
    step((3, 4, 1), (9, 4, 1))
    step((3, 0, 2))  # computed again
    step((9, 5, 1), (3, 5, 1))
    trace = recorder.trace("mine")
    assert trace.model == "mine"
    assert trace.sizes == sizes
    assert trace.ids.dtype == np.int16
    np.testing.assert_array_equal(trace.ids, np.concatenate([truth[3], truth[9]]))


def test_nothing_recorded_is_an_empty_trace() -> None:
    trace = RoutingRecorder.of(SIZES, 8, CPUDevice()).trace("mine")
    assert trace.ids.shape == (0, 3, 8)
