"""What rows of telemetry say against the figures of a timed part."""

import pytest

from harness.observe import window as verdict
from harness.observe.window import Span, Window, notes, num_foreign, reasons
from tests.harness.observe.telemetry.cases import table, window

MIB = 2**20
HEALTHY = {
    "gpu_busy_pct": 90,
    "gpu_throttle_bits": 0,
    "gpu_sm_clock_mhz": 1980,
    "gpu_temperature_c": 60,
    "gpu_num_processes": 1,
    "gpu_num_own_processes": 1,
    "host_swap_in_bytes": 5 * MIB,
    "host_swap_out_bytes": 7 * MIB,
    "pcie_gen": 5,
    "pcie_width": 16,
}


def judge(count=40, **columns):
    return reasons(window(count, **(HEALTHY | columns)), max_gen=5, max_width=16)


def test_a_healthy_machine_gives_no_reason():
    assert judge() == []
    assert notes(window(**HEALTHY)) == []


def test_a_machine_that_tells_nothing_gives_no_reason():
    assert reasons(window(), max_gen=None, max_width=None) == []
    assert notes(window()) == []


@pytest.mark.parametrize("bit", [0x8, 0x20, 0x40, 0x80])
@pytest.mark.parametrize(("num_rows", "num_reasons"), [(2, 0), (3, 1)])
def test_throttled_for_more_than_five_percent(bit, num_rows, num_reasons):
    found = judge(gpu_throttle_bits=lambda k: bit | 0x4 if k < num_rows else 0)
    assert len(found) == num_reasons


def test_a_throttled_card_says_why_and_what_to_do():
    [found] = judge(gpu_throttle_bits=0x20 | 0x8, gpu_temperature_c=lambda k: 80 + k / 10)
    assert found.startswith("latency: the GPU was slowed down in 100% of the busy time")
    assert "heat, by the driver" in found
    assert "a hardware slowdown" in found
    assert "up to 83.9 C" in found
    assert "cooling" in found


def test_the_power_limit_is_a_note():
    [note] = notes(window(**(HEALTHY | {"gpu_throttle_bits": 0x4})))
    assert "at its power limit in 100% of the busy time" in note
    assert judge(gpu_throttle_bits=0x4, gpu_sm_clock_mhz=lambda k: 1400 if k % 2 else 1980) == []


@pytest.mark.parametrize(("num_low", "num_reasons"), [(4, 0), (5, 1)])
def test_a_clock_that_drops_without_a_named_cause(num_low, num_reasons):
    found = judge(gpu_sm_clock_mhz=lambda k: 1700 if k < num_low else 1980)
    assert len(found) == num_reasons
    assert judge(gpu_sm_clock_mhz=lambda k: 1790 if k < 20 else 1980) == []  # within a tenth
    without_bits = judge(
        gpu_throttle_bits=None, gpu_sm_clock_mhz=lambda k: 1700 if k < num_low else 1980
    )
    assert len(without_bits) == num_reasons


def test_a_drop_says_how_far():
    [found] = judge(gpu_sm_clock_mhz=lambda k: 1200 if k < 10 else 1980)
    assert "its highest of 1,980 MHz in 25% of the busy time, down to 1,200 MHz" in found
    assert "nvidia-smi -lgc" in found


def test_clock_and_link_of_a_resting_gpu_do_not_count():
    resting = {"gpu_sm_clock_mhz": lambda k: 300 if k > 20 else 1980, "pcie_gen": 1}
    assert judge(gpu_busy_pct=3, **resting) == []
    assert judge(gpu_busy_pct=None, gpu_throttle_bits=0x1, **resting) == []


def test_a_second_of_rows_is_too_little_for_clock_and_link():
    assert judge(9, pcie_gen=3, gpu_throttle_bits=0x40) == []
    assert len(judge(10, pcie_gen=3, gpu_throttle_bits=0x40)) == 2


@pytest.mark.parametrize(("gen", "width"), [(4, 16), (5, 8)])
def test_a_link_below_its_maximum_while_busy(gen, width):
    [found] = judge(pcie_gen=gen, pcie_width=width)
    assert f"at generation {gen} with {width} lanes while the GPU was busy" in found
    assert "can do generation 5 with 16" in found
    assert judge(pcie_gen=lambda k: gen if k < 20 else 5, pcie_width=16) == []


def test_other_processes_on_the_gpu():
    [found] = judge(gpu_num_processes=lambda k: 3 if k == 7 else 1)
    assert found.startswith("latency: 2 other processes computed on this GPU")
    assert "nvidia-smi" in found
    [found] = judge(gpu_num_processes=2)
    assert "1 other process computed" in found


def test_processes_that_the_driver_numbers_otherwise():
    """In a container ours is never among those listed: one of them is taken for it."""
    hidden = {"gpu_num_own_processes": 0}
    assert num_foreign(window(gpu_num_processes=1, **hidden)) == 0
    assert num_foreign(window(gpu_num_processes=2, **hidden)) == 1
    assert num_foreign(window(gpu_num_processes=0, **hidden)) == 0
    assert num_foreign(window()) is None


@pytest.mark.parametrize(("grown", "num_reasons"), [(15 * MIB, 0), (16 * MIB, 1)])
def test_swapping_in_the_window(grown, num_reasons):
    half = {"host_swap_in_bytes": lambda k: 9 * MIB + grown // 2 * (k >= 30)}
    found = judge(
        **half, host_swap_out_bytes=lambda k: grown // 2 * (k >= 30), swapped_bytes=3 * MIB
    )
    assert len(found) == num_reasons
    assert all("16 MiB in and out; 3 MiB of the worker were out" in text for text in found)
    before = Window(
        table(**half, host_swap_out_bytes=0, swapped_bytes=3 * MIB),
        Span(part="latency", job="measure", begin_s=100, end_s=102),
    )
    assert reasons(before, max_gen=None, max_width=None) == []


def test_rows_of_other_jobs_and_times_are_not_in_the_window():
    rows = table(job=lambda k: "reference" if k < 10 else "measure", gpu_busy_pct=90)
    found = Window(rows, Span(part="serve", job="measure", begin_s=100.0, end_s=102.0))
    assert len(found) == found.num_busy == 11
    assert found.values("clock_s")[0] == pytest.approx(101.0)


def test_every_cause_has_a_bit_of_its_own():
    causes = verdict.THROTTLE_BITS
    assert len(set(causes.values())) == len(causes)
    assert all(bit & (bit - 1) == 0 for bit in (*causes, verdict.POWER_BIT))
