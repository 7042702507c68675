"""The KV cache of a part: its use by tier over time, and what was counted meanwhile."""

from types import SimpleNamespace

import pytest

from engine.sealed import GIB
from harness.work.kv import KVWatch, kv_series
from harness.work.predicted import kv_link_share
from tests.harness.fakes import FakeClock

pytestmark = pytest.mark.usefixtures("clock_start_s")


class Counting:
    """Every step takes 0.1 s and moves a block; before the first, something was counted already."""

    def __init__(self, clock):
        self.clock, self.count = clock, 0
        self.plan = SimpleNamespace(block_size=16)

    def step(self):
        self.clock.advance(0.1)
        self.count += 1
        return ["event"]

    def stats(self):
        count = self.count
        return {
            "kv": {
                "gpu": {"blocks": 10, "owned": min(10, count), "cached": 0, "free": 0},
                "cpu": {"blocks": 40, "owned": 0, "cached": count, "in_transit": 1},
                "block_bytes": GIB,
                "prefix": {
                    "hits_gpu_tokens": 500 + 16 * count,
                    "hits_cpu_tokens": 8 * count,
                    "missed_tokens": 24 * count,
                    "hits_gpu_bytes": 3 * GIB + count,
                    "hits_cpu_bytes": GIB * count // 2,
                },
                "evictions": {"gpu_kept": 2 * count, "gpu_lost": count, "cpu": 7},
                "swaps_out": 3 + count,
                "moved": {"stored_bytes": GIB * count, "loaded_bytes": 2 * GIB * count},
                "in_place_bytes": 4 * GIB * count,
                "copied_ahead_bytes": GIB * count,
                "staged_prefill_bytes": 0,
            }
        }


def run(steps):
    clock = FakeClock()
    llm = Counting(clock)
    watch = KVWatch(llm, clock)
    for _ in range(steps):
        assert watch.step() == ["event"]
    result = {"metrics": {}, "samples": {}}
    watch.note("serve", result)
    return result["metrics"], result["samples"]["kv"]


def test_counts_are_those_since_it_was_made():
    metrics, _ = run(10)  # of 0.1 s
    assert metrics["kv/gpu_hit_tokens"] == 160
    assert metrics["kv/hit_share"] == pytest.approx(0.5)
    assert (metrics["kv/gpu_hit_gib"], metrics["kv/cpu_hit_gib"]) == (10 / GIB, 5)
    assert (metrics["kv/gpu_evictions"], metrics["kv/gpu_evictions_lost"]) == (30, 10)
    assert (metrics["kv/cpu_evictions"], metrics["kv/swaps_out"]) == (0, 10)
    assert (metrics["kv/stored_gib"], metrics["kv/loaded_gib"]) == (10, 20)
    assert metrics["kv/transfer_gb_s"] == pytest.approx(80 * GIB / 1e9)
    assert metrics["kv/h2d_gb_s"] == pytest.approx(70 * GIB / 1e9)
    assert (metrics["kv/in_place_gib"], metrics["kv/copied_ahead_gib"]) == (40, 10)
    assert metrics["kv/recomputes"] == 0


def test_use_is_noted_a_few_times_a_second():
    metrics, rows = run(10)
    assert [row[0] for row in rows["rows"]] == pytest.approx([0, 0.1, 0.4, 0.7, 1.0, 1.0])
    place = rows["columns"].index("gpu.owned")
    assert [row[place] for row in rows["rows"]] == [0, 1, 4, 7, 10, 10]
    assert (rows["part"], rows["gpu_blocks"], rows["cpu_blocks"]) == ("serve", 10, 40)
    assert metrics["kv/gpu_used_share"] == pytest.approx(22 / 4 / 10)
    assert metrics["kv/gpu_used_peak_share"] == 1
    assert metrics["kv/cpu_used_peak_share"] == 11 / 40


@pytest.mark.parametrize(("steps", "used"), [(0, None), (1, 0.1), (2, 0.1)])
def test_use_is_that_of_steps_however_short_the_part(steps, used):
    metrics, _ = run(steps)
    names = ["kv/gpu_used_share", "kv/gpu_used_peak_share", "kv/gpu_owned_share"]
    assert [metrics[name] for name in names] == [used] * 3


def test_long_parts_keep_fewer_rows(monkeypatch):
    monkeypatch.setattr("harness.work.watch.MOST_ROWS", 8)
    _, rows = run(200)
    times = [row[0] for row in rows["rows"]]
    assert len(times) <= 9
    assert times[0] == 0
    assert times[-1] == pytest.approx(20)
    assert times == sorted(times)


def test_an_engine_that_tells_nothing_of_kv_gives_no_metrics():
    clock = FakeClock()
    result = {"metrics": {}, "samples": {}}
    KVWatch(SimpleNamespace(stats=dict), clock).note("serve", result)
    assert result == {"metrics": {}, "samples": {}}


def test_the_rest_is_the_engines_own():
    llm = Counting(FakeClock())
    assert KVWatch(llm, llm.clock).plan is llm.plan


def test_the_links_share_is_over_both_probes():
    rates = {"link/h2d_gb_s": 50.0, "link/h2d_after_gb_s": 30.0}
    assert kv_link_share({"kv/h2d_gb_s": 10.0} | rates) == {"kv/link_share": 0.25}
    assert kv_link_share({"kv/h2d_gb_s": 10.0}) == {"kv/link_share": None}
    assert kv_link_share(rates) == {}


def test_rows_become_time_series_of_one_row_a_second(monkeypatch):
    monkeypatch.setattr("harness.work.watch.PERIOD_S", 0.35)  # no row is on a full second
    _, rows = run(30)  # 3 s of 0.1 s; a block has 1 GiB
    found = list(kv_series(rows))
    used = [(time_s, gib) for name, time_s, gib in found if name == "kv_gpu_used_gib"]
    assert [time_s for time_s, _ in used] == pytest.approx([0, 1.3, 2.5])
    assert [gib for _, gib in used] == [0, 10, 10]
    host = [gib for name, _, gib in found if name == "kv_cpu_used_gib"]
    assert host == [1, 14, 26]
    assert list(kv_series(None)) == []
