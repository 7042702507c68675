import asyncio

import pytest

from harness.systems.fake import ScriptedClock


@pytest.mark.parametrize("up_s", [0.0, 1e5, 1e8, 3e10])
def test_timers_end_however_long_the_machine_has_been_up(up_s):
    clock = ScriptedClock(up_s)
    ends = []

    async def wait(seconds):
        await asyncio.sleep(seconds)
        ends.append((seconds, clock() - up_s))

    async def main():
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for seconds in (0.02, 0.005, 2.0):
                group.create_task(wait(seconds))

    clock.run(main())
    assert [seconds for seconds, _ in ends] == [0.005, 0.02, 2.0]
    for seconds, end_s in ends:
        assert end_s == pytest.approx(seconds, abs=2e-5)


def test_sums_of_scripted_times_are_exact():
    clock = ScriptedClock()
    for _ in range(1000):
        clock.wait_until(clock() + 0.0033)
    assert clock() == 3.3
    clock.wait_until(1.0)
    assert clock() == 3.3  # never back
