"""Time of a step whose layers are copied ahead through a ring of slots."""

from collections.abc import Sequence


def ring_s(
    compute_s: Sequence[float],
    copy_s: Sequence[float],
    num_slots: int,
    *,
    wrap: bool,
    after_s: float = 0.0,
    launch_s: float = 0.0,
) -> float:
    """Return the time of one step of the slot ring, exactly as engine.weights.residence runs it.

    Copies run one after another. Offloaded layer k waits for its copy; when it is done its slot is
    refilled with layer k + S, or, with `wrap`, after the last of that chain with its first. At the
    end of the step all copies are joined, so every step is like the one before.

    Args:
        compute_s: Seconds of compute of each layer.
        copy_s: Seconds of copies of each layer; 0 for those that are not offloaded.
        num_slots: S, at least 1.
        wrap: The first S layers lie in their slots when the step begins.
        after_s: Work after the last layer, beside which copies run on.
        launch_s: What the host takes to launch one layer. It runs ahead of the device from the
            beginning of the step, and the device can begin no layer that is not launched.
    """
    order = [index for index, seconds in enumerate(copy_s) if seconds > 0]
    count = len(order)
    held = list(range(min(num_slots, count)))
    ready, copied_at, now = [0.0] * len(held), 0.0, 0.0
    if not wrap:
        for slot in held:
            if slot + len(held) < count:  # else the slot has held its only layer since long
                copied_at += copy_s[order[slot]]
                ready[slot] = copied_at
    k = 0
    for index, seconds in enumerate(compute_s):
        now = max(now, (index + 1) * launch_s)
        if k == count or order[k] != index:
            now += seconds
            continue
        slot = k % len(held)
        now = max(now, ready[slot]) + seconds
        following = k + len(held)
        if following >= count:
            following = slot if wrap else k
        if held[slot] != following:
            copied_at = max(copied_at, now) + copy_s[order[following]]
            ready[slot], held[slot] = copied_at, following
        k += 1
    return max(now + after_s, copied_at)
