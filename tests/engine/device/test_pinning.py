"""Registration with CUDA, with a driver of ours in its place: limits, failures, forks, order."""

import gc
import os
import resource
from typing import Any

import pytest

from engine.device import cuda
from engine.device.cuda import RegisteredBuffer, probe_pinning
from engine.errors import PinningError

MIB = 2**20


class Driver:
    """Registers memory, or refuses; counts it as locked where told."""

    def __init__(self, *, counts: bool = False, most_bytes: int | None = None) -> None:
        self.held: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self._counts, self._most_bytes = counts, most_bytes

    def register(self, address: int, num_bytes: int) -> int:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        self.calls.append(("register", soft))
        if self._counts and soft != resource.RLIM_INFINITY and num_bytes > soft:
            return 2
        if self._most_bytes is not None and num_bytes > self._most_bytes:
            return 2
        self.held[address] = num_bytes
        return 0

    def unregister(self, address: int, keep: Any, owner: int) -> None:
        assert keep.data_ptr() == address  # the memory is still there
        self.calls.append(("unregister", owner))
        del self.held[address]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(**behaviour: Any) -> Driver:
        driver = Driver(**behaviour)
        monkeypatch.setattr(cuda, "_register", driver.register)
        monkeypatch.setattr(cuda, "_unregister", driver.unregister)
        return driver

    return put


@pytest.mark.parametrize(
    ("room", "behaviour", "expected"),
    [
        (None, {}, ("", None)),
        (8 * MIB, {}, ("", None)),
        (8 * MIB, {"counts": True}, ("", 8 * MIB)),
        (None, {"counts": True}, ("", None)),
        (8 * MIB, {"most_bytes": 0}, ("4096 bytes failed with CUDA error 2", 8 * MIB)),
    ],
)
def test_the_driver_is_asked_with_one_page(
    install: Any,
    monkeypatch: pytest.MonkeyPatch,
    room: int | None,
    behaviour: dict[str, Any],
    expected: tuple[str, int | None],
) -> None:
    driver = install(**behaviour)
    monkeypatch.setattr(cuda, "memlock_room", lambda: room)
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    refusal, limit = probe_pinning()
    assert expected[0] in refusal
    assert bool(refusal) is bool(expected[0])
    assert limit == expected[1]
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before
    assert driver.held == {}
    asked = [soft for call, soft in driver.calls if call == "register"]
    assert asked == ([before[0], 0] if room is not None and not refusal else [before[0]])


def test_a_sandbox_that_keeps_limits_as_they_are(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(counts=True)
    monkeypatch.setattr(cuda, "memlock_room", lambda: 8 * MIB)

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(cuda.resource, "setrlimit", refuse)
    assert probe_pinning() == ("", None)


def test_memory_is_registered_once_and_unregistered_before_it_goes(install: Any) -> None:
    driver = install()
    buffer = RegisteredBuffer(33 * MIB + 5)
    assert list(driver.held.values()) == [33 * MIB + 5]
    buffer.close()
    assert driver.held == {}
    buffer.close()
    RegisteredBuffer(5)
    gc.collect()  # dropped without close
    assert [call for call, _ in driver.calls] == ["register", "unregister"] * 2


def test_a_registration_that_fails_names_its_size(install: Any) -> None:
    driver = install(most_bytes=MIB)
    with pytest.raises(PinningError, match=f"{2 * MIB} bytes failed.*TIGHTFIT_DISABLE_PIN_MEMORY"):
        RegisteredBuffer(2 * MIB)
    gc.collect()
    assert driver.held == {}


def test_a_child_does_not_unregister_what_its_parent_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    class Runtime:
        def cudaHostUnregister(self, address: int) -> None:  # noqa: N802  CUDA's name
            called.append(address)

    monkeypatch.setattr(cuda.torch.cuda, "cudart", Runtime)
    cuda._unregister(5, None, os.getpid() + 1)
    assert called == []
    cuda._unregister(5, None, os.getpid())
    assert called == [5]
