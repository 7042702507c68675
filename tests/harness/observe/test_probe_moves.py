"""Rates of block moves: on the emulated device here, against the link's copies on a GPU."""

import itertools

import pytest

from harness.observe import probe
from harness.observe.probe import probe_link


def test_moves_are_timed_each_way_and_both_at_once(monkeypatch):
    monkeypatch.setattr(probe, "EMULATED_MOVED_BYTES", 2**18)
    found = probe.probe_moves(2**14, "cpu")
    assert set(found) == set(probe.MOVE_RATES)
    assert all(rate > 0 for rate in found.values())


def test_no_two_neighbours_stay_neighbours_by_plan():
    pairs = probe._pairs(64, first=64, seed=1)
    assert sorted(gpu for gpu, _ in pairs) == list(range(64, 128))
    assert sorted(host for _, host in pairs) == list(range(64, 128))
    apart = [(b[0] - a[0], b[1] - a[1]) != (1, 1) for a, b in itertools.pairwise(pairs)]
    assert all(apart)


def test_without_pinned_memory_nothing_is_probed(monkeypatch):
    monkeypatch.setenv("TIGHTFIT_DISABLE_PIN_MEMORY", "1")
    assert set(probe.probe_moves(2**14, "cpu").values()) == {None}


@pytest.mark.gpu
@pytest.mark.alone
def test_moves_of_an_8b_models_blocks_keep_the_link_busy():
    link, found = probe_link("cuda"), probe.probe_moves(2**21, "cuda")
    assert found["store_gb_s"] > 0.5 * link["d2h_gb_s"]
    assert found["load_gb_s"] > 0.5 * link["h2d_gb_s"]
    assert found["both_gb_s"] > 0.5 * link["two_way_gb_s"]
