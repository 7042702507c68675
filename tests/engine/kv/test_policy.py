import pytest

from engine.errors import EngineError
from engine.kv.prefix import swap_or_recompute
from engine.plan.kv_memory import SwapRates

RATES = SwapRates(store_bytes_s=50.0, load_bytes_s=100.0)


@pytest.mark.parametrize(
    ("store", "load", "recompute_s", "expected"),
    [
        (100, 100, 2.9, "recompute"),
        (100, 100, 3.0, "swap"),
        (0, 100, 1.1, "swap"),
        (0, 0, 0.0, "swap"),
        (100, 0, 1.9, "recompute"),
    ],
)
def test_the_cheaper_way(store, load, recompute_s, expected):
    assert swap_or_recompute(store, load, RATES, recompute_s) == expected


def test_what_runs_beside_compute_costs_nothing():
    rates = SwapRates(store_bytes_s=50.0, load_bytes_s=100.0, overlap=0.5)
    assert swap_or_recompute(100, 100, rates, 1.5) == "swap"
    assert swap_or_recompute(100, 100, rates, 1.4) == "recompute"


@pytest.mark.parametrize(
    "rates",
    [
        SwapRates(store_bytes_s=0.0, load_bytes_s=1.0),
        SwapRates(store_bytes_s=1.0, load_bytes_s=-1.0),
        SwapRates(store_bytes_s=1.0, load_bytes_s=1.0, overlap=1.5),
    ],
)
def test_impossible_rates_are_refused(rates):
    with pytest.raises(EngineError, match="expected positive bytes per second"):
        swap_or_recompute(1, 1, rates, 1.0)


def test_negative_sizes_are_refused():
    with pytest.raises(EngineError, match="-1 bytes to store"):
        swap_or_recompute(-1, 0, RATES, 1.0)
