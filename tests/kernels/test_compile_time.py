"""Compile times are counted while asked for, and others who listen still hear."""

from types import SimpleNamespace
from typing import Any

import pytest

from kernels.compile_time import LISTENER, count_compile_time


def tell(listener: Any, microseconds: int, *, cache_hit: bool = False) -> None:
    """Call a listener as Triton does."""
    listener(
        src=None,
        metadata={},
        metadata_group={},
        times=SimpleNamespace(total=microseconds),
        cache_hit=cache_hit,
    )


def test_kernels_are_counted_while_open(monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = pytest.importorskip("triton.knobs").compilation
    heard: list[int] = []
    monkeypatch.setattr(compilation, "listener", lambda **facts: heard.append(facts["times"].total))
    before = compilation.listener
    with count_compile_time(enabled=True) as counted:
        tell(compilation.listener, 1_500_000)
        tell(compilation.listener, 500_000, cache_hit=True)
        assert counted.take_s() == 2.0
        assert counted.take_s() == 0.0
        tell(compilation.listener, 250_000)
    assert compilation.listener is before
    assert counted.take_s() == 0.25
    assert counted.num_kernels == 2
    assert heard == [1_500_000, 500_000, 250_000]


def test_cuda_kernels_are_counted_too() -> None:
    assert LISTENER.get() is None
    with count_compile_time(enabled=True) as counted:
        listener = LISTENER.get()
        assert listener is not None
        listener(0.5)
        listener(0.25)
    assert LISTENER.get() is None
    assert (counted.take_s(), counted.num_kernels) == (0.75, 2)
    with count_compile_time(enabled=False):
        assert LISTENER.get() is None


def test_the_listener_is_put_back_where_the_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = pytest.importorskip("triton.knobs").compilation
    monkeypatch.setattr(compilation, "listener", None)

    def fail() -> None:
        with count_compile_time(enabled=True):
            assert compilation.listener is not None
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert compilation.listener is None


def test_nothing_is_counted_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = pytest.importorskip("triton.knobs").compilation
    monkeypatch.setattr(compilation, "listener", None)
    with count_compile_time(enabled=False) as counted:
        assert compilation.listener is None
    assert counted.take_s() == 0.0
    monkeypatch.setattr("kernels.compile_time._compilation_knobs", lambda: None)
    with count_compile_time(enabled=True) as counted:
        assert compilation.listener is None
    assert counted.take_s() == 0.0
