"""The GPU's counter of received bytes, its calibration, and what records say of transfers."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.device.gpu import Gpu
from harness.observe.link import LinkCounter, LinkFactors, Reading, calibrate, mean_gb_s
from harness.systems.door import LinkWatch
from harness.work.drive import StepTotals
from harness.work.predicted import link_notes, transfer_metrics, transfer_reasons
from tests.harness.fakes import Script, fake_door

# ruff: noqa: N802  some names are NVML's


class Counter:
    """A counter whose windows take 0.02 s of a clock of its own and read 5 % above the payload."""

    def __init__(self, payload_gb_s=50.0, overhead=1.05):
        self.now_s, self.payload, self.overhead = 0.0, payload_gb_s, overhead
        self.windows = threading.Semaphore(0)

    def clock(self):
        return self.now_s

    def read(self):
        self.now_s += 0.02
        self.windows.release()
        return None if self.payload is None else self.payload * self.overhead

    def await_windows(self):
        """Return when ten windows have passed since this was called."""
        while self.windows.acquire(blocking=False):
            pass
        return all(self.windows.acquire(timeout=10) for _ in range(10))

    def stream(self, seconds):
        begin_s = self.now_s
        assert self.await_windows()
        end_s = self.now_s
        return round((end_s - begin_s) * self.payload * 1e9), begin_s, end_s


def test_the_factor_is_known_bytes_over_the_reading():
    counter = Counter()
    factor = calibrate(counter.read, counter.stream, clock=counter.clock)
    assert factor == pytest.approx(1 / 1.05)


def test_what_the_counter_told_meanwhile_is_returned():
    counter = Counter(payload_gb_s=40.0)
    meter = LinkCounter(counter.read, LinkFactors(copied=1 / 1.05), clock=counter.clock)
    done, counted_gb_s = meter.measured(counter.await_windows)
    assert done
    assert counted_gb_s == pytest.approx(40 * 1.05)


@pytest.mark.parametrize(
    ("copied", "in_place", "factor"),
    [
        (10, 0, 0.9),
        (0, 10, 0.6),
        (0, 0, 0.9),
        (9, 6, 15 / 20),  # 9 bytes are counted as 10, and 6 as 10
    ],
)
def test_traffic_of_two_kinds_has_a_factor_between_theirs(copied, in_place, factor):
    factors = LinkFactors(copied=0.9, in_place=0.6)
    assert factors.of(copied, in_place) == pytest.approx(factor)


def test_a_kind_that_was_not_calibrated_has_no_factor():
    assert LinkFactors(copied=0.9).of(10, 1) is None
    assert LinkFactors(in_place=0.6).of(10, 1) is None
    assert LinkFactors(in_place=0.6).of(0, 1) == 0.6


def test_no_counter_is_none_and_copies_nothing():
    counter = Counter(payload_gb_s=None)
    assert calibrate(counter.read, lambda seconds: pytest.fail("copied")) is None
    assert LinkCounter(counter.read, LinkFactors()).measured(lambda: 7) == (7, None)


def test_a_counter_that_stands_still_calibrates_nothing():
    counter = Counter(overhead=0.0)
    assert calibrate(counter.read, counter.stream, clock=counter.clock) is None


def test_a_counter_that_ends_meanwhile_is_none():
    counter = Counter()
    values = iter([1.0, 1.0])
    factors = LinkFactors(copied=1.0)
    reader = LinkCounter(lambda: next(values, None), factors, clock=counter.clock)
    assert reader.measured(lambda: 1) == (1, None)


def test_reading_ends_when_the_work_fails():
    counter = Counter()
    meter = LinkCounter(counter.read, LinkFactors(copied=1.0), clock=counter.clock)

    def work():
        assert counter.await_windows()
        raise ValueError("work")

    with pytest.raises(ValueError, match="work"):
        meter.measured(work)
    assert "pcie-counter" not in [thread.name for thread in threading.enumerate()]


def test_readings_across_an_edge_do_not_count():
    readings = [Reading(k / 10, (k + 1) / 10, 100.0 * k) for k in range(10)]
    assert mean_gb_s(readings, 0.15, 0.75) == pytest.approx(400)  # 2 .. 6
    assert mean_gb_s(readings, 0.15, 0.65) is None  # four are too few


class PcieNvml:
    NVML_PCIE_UTIL_RX_BYTES = 1

    def __init__(self):
        self.asked = threading.Semaphore(0)

    def nvmlDeviceGetUUID(self, handle):
        return "GPU-1"

    def await_readings(self, count):
        """Return when so many readings were begun since this was called."""
        while self.asked.acquire(blocking=False):
            pass
        assert all(self.asked.acquire(timeout=10) for _ in range(count))

    def nvmlDeviceGetPcieThroughput(self, handle, direction):
        assert direction == 1
        self.asked.release()
        return 52_000_000


def test_nvml_counts_kilobytes_that_the_gpu_received():
    assert Gpu(PcieNvml(), 0).link_rx_gb_s() == pytest.approx(52 * 1.024)


@pytest.mark.parametrize("can_read", [True, False])
def test_the_counter_is_calibrated_for_copies_and_for_reads_in_place(can_read):
    door, _ = fake_door(Script())
    nvml, asked = PcieNvml(), []

    def stream(config, seconds, *, in_place=False):
        asked.append(in_place)
        begin_s = time.perf_counter()
        nvml.await_readings(7)
        end_s = time.perf_counter()
        gb_s = 25 if in_place else 50
        return round(gb_s * 1e9 * (end_s - begin_s)), begin_s, end_s

    rates = {"h2d_gb_s": 50.0, "in_place_gb_s": 25.0 if can_read else None}
    watch = LinkWatch(replace(door, stream=stream, probe=lambda config: rates), None)
    watch.before(Gpu(nvml, 0))
    assert watch.factors.copied == pytest.approx(50 / (52 * 1.024))
    assert watch.factors.in_place == (pytest.approx(25 / (52 * 1.024)) if can_read else None)
    assert asked == ([False, True] if can_read else [False])


def test_nothing_is_copied_for_a_counter_that_is_not_there():
    door, _ = fake_door(Script())
    watch = LinkWatch(replace(door, stream=lambda *_, **__: pytest.fail("copied")), None)
    watch.before(Gpu(SimpleNamespace(), 0))
    assert watch.factors == LinkFactors()


def test_nothing_is_copied_where_nothing_can_be_pinned():
    door, _ = fake_door(Script())
    nothing = {"h2d_gb_s": None, "in_place_gb_s": None}
    stream = lambda *_, **__: pytest.fail("copied")  # noqa: E731
    door = replace(door, probe=lambda config: nothing, stream=stream)
    watch = LinkWatch(door, None)
    assert watch.before(Gpu(PcieNvml(), 0)) == nothing
    assert watch.factors == LinkFactors()


def test_without_a_gpu_nothing_is_counted():
    door, _ = fake_door(Script())
    watch = LinkWatch(door, None)
    assert watch.before(None)["h2d_gb_s"] == 0.00002
    assert watch.factors == LinkFactors()
    others = dict.fromkeys(
        f"link/{k}_after_gb_s" for k in ("d2h", "two_way", "in_place", "hbm_copy")
    )
    assert watch.after() == {"link/h2d_after_gb_s": 0.00002, **others}


def totals(**changes):
    fields = {
        "num_decode_steps": 4,
        "decode_s": 2.0,
        "decode_copied_bytes": 4000,
        "decode_read_bytes": 2000,
        "planned_copied_bytes": 4000,
        "planned_read_bytes": 2000,
    }
    return StepTotals(**(fields | changes))


def test_transfers_of_known_sizes():
    rates = {"link/h2d_gb_s": 4e-6, "link/h2d_after_gb_s": 2e-6}
    assert transfer_metrics(totals(), rates) == {
        "offload/bytes_per_step": 1500,
        "offload/copied_bytes_per_step": 1000,
        "offload/in_place_bytes_per_step": 500,
        "offload/planned_bytes_per_step": 1500,
        "offload/planned_copied_bytes_per_step": 1000,
        "offload/planned_in_place_bytes_per_step": 500,
        "link/share": pytest.approx(1.0),  # 3000 bytes/s over the mean of 4000 and 2000
    }
    assert transfer_metrics(totals(), {})["link/share"] is None
    assert set(transfer_metrics(StepTotals(), rates).values()) == {None}


@pytest.mark.parametrize(("counted", "num_reasons"), [(4060, 0), (3940, 0), (4061, 1), (0, 1)])
def test_planned_and_counted_bytes_agree_within_one_percent(counted, num_reasons):
    assert len(transfer_reasons(totals(decode_copied_bytes=counted))) == num_reasons


def test_bytes_that_nobody_planned_are_a_reason():
    assert transfer_reasons(StepTotals()) == []
    [reason] = transfer_reasons(totals(planned_copied_bytes=0, planned_read_bytes=0))
    assert "counted 1,500 bytes" in reason
    assert "plan says 0" in reason


def test_a_link_that_changed_is_noted():
    assert link_notes({"link/h2d_gb_s": 50.0, "link/h2d_after_gb_s": 52.0}) == []
    assert link_notes({"link/h2d_gb_s": 50.0, "link/h2d_after_gb_s": None}) == []
    [note] = link_notes({"link/h2d_gb_s": 50.0, "link/h2d_after_gb_s": 47.0})
    assert "50.0 GB/s host to device before the scenarios, 47.0 after them" in note
