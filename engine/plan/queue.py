"""Predicted time of a queue of equal requests: the steps that the scheduler would make of it."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Final

from engine.plan.sizes import KVSizes, pad_batch
from engine.plan.times import Shape, step_s

QUEUE_REQUESTS: Final = 200
QUEUE_PROMPT_TOKENS: Final = 128
QUEUE_OUTPUT_TOKENS: Final = 128
"""The queue that throughput is predicted for (shorter where max_model_len is)."""
FIRST_SHARE: Final = 32
"""A preempted sequence goes on when all have room for this part of its length more."""
MOST_DOUBLINGS: Final = 5
"""That room doubles with each preemption after the first, at most so often."""


@dataclass(kw_only=True)
class Cohort:
    """Sequences that are equally far."""

    count: int
    length: int
    """Known tokens of each."""
    left: int
    """Tokens that each will still generate."""
    num_preemptions: int = 0


@dataclass(frozen=True)
class Stretch:
    """Equal steps that follow one another."""

    steps: int
    decodes: int
    """Sequences that decode a token in each."""
    prefill: int = 0
    """Tokens of prompts in each."""
    rows: int = 0
    """Prompts that end among them."""


def queue_of(max_model_len: int) -> tuple[int, int]:
    """Return prompt and output tokens of the requests that throughput is predicted for."""
    prompt = min(QUEUE_PROMPT_TOKENS, max(1, max_model_len // 2))
    return prompt, min(QUEUE_OUTPUT_TOKENS, max(1, max_model_len - prompt))


def queue_s(shape: Shape, requests: int, prompt: int, output: int) -> float:
    """Return the time of `requests` requests that are offered at once.

    Equal requests begin together and grow together, so that those begun last give way before the
    others end; what they leave is counted step by step, as the scheduler would decide it, while
    steps cost what one of the mean length costs.
    """
    context = prompt + output / 2

    most = shape.plan.max_num_seqs

    @cache
    def once_s(decodes: int, prefill: int, rows: int) -> float:
        rows = max(1, rows) if prefill else 0
        return step_s(shape, decodes=decodes, context=context, prefill=prefill, rows=rows)

    def stretch_s(each: Stretch) -> float:
        decodes = min(most, pad_batch(each.decodes)) if each.decodes else 0
        return each.steps * once_s(decodes, each.prefill, each.rows)

    return sum(map(stretch_s, queue_steps(shape, requests, prompt, output)))


def queue_steps(shape: Shape, requests: int, prompt: int, output: int) -> tuple[Stretch, ...]:
    """Return the steps of a queue of equal requests without common prefixes, in order."""
    # What all sequences take at most is as good as more: placements that leave it share steps.
    kv = shape.plan.kv.with_host(0, 0, in_place=False)
    need, most = kv.blocks(prompt + max(1, output) - 1), min(requests, kv.max_num_seqs)
    pools = [min(n, most * each) for n, each in zip(kv.pools, need, strict=True)]
    return _steps(kv.with_pools(pools), requests, prompt, max(1, output))


@lru_cache(maxsize=128)
def _steps(kv: KVSizes, requests: int, prompt: int, output: int) -> tuple[Stretch, ...]:
    return tuple(_Queue(kv, Cohort(count=requests, length=prompt, left=output)).steps())


class _Queue:
    """The scheduler's queues, told of cohorts instead of sequences."""

    def __init__(self, kv: KVSizes, offered: Cohort) -> None:
        self._kv, self._pools = kv, kv.pools
        self._longest = offered.length + offered.left - 1
        self._waiting = deque([offered])
        self._running: list[Cohort] = []
        """Oldest first."""
        self._part: Cohort | None = None
        """One sequence whose prompt is not computed to its end."""
        self._lacking = 0
        """Tokens of it that are not."""
        self._needs: dict[int, tuple[int, ...]] = {}
        need = self._need(self._longest)
        self._most_whole = min(n // each for each, n in zip(need, self._pools, strict=True) if each)
        """Sequences that have blocks to their end at once."""

    def steps(self) -> Iterator[Stretch]:
        """Yield stretches until nothing waits or runs."""
        while self._waiting or self._running:
            self._give_way()
            decodes = self._num_running - (self._part is not None)
            room = max(1, self._kv.step_tokens - decodes)
            begun = self._begin(room - self._lacking)
            yield self._prompts(begun, decodes, room) if begun or self._part else self._decode()
            self._running = [cohort for cohort in self._running if cohort.left > 0]

    @property
    def _num_running(self) -> int:
        return sum(cohort.count for cohort in self._running)

    def _need(self, tokens: int) -> tuple[int, ...]:
        """Blocks of each group that one sequence takes."""
        tokens = min(tokens, self._longest)
        if tokens not in self._needs:
            self._needs[tokens] = self._kv.blocks(tokens)
        return self._needs[tokens]

    def _soon(self, length: int, more_tokens: int) -> tuple[int, ...]:
        """Blocks that a sequence is to have room for: its part more, or one where it can grow."""
        if more_tokens:
            return self._need(length + more_tokens)
        now, most = self._need(length), self._need(self._longest)
        return tuple(min(n + 1, m) for n, m in zip(now, most, strict=True))

    def _left(self, needs: Iterable[tuple[Cohort, tuple[int, ...]]]) -> list[int]:
        """Blocks of each group beside those that running sequences need."""
        left = list(self._pools)
        for cohort, need in needs:
            for group, each in enumerate(need):
                left[group] -= cohort.count * each
        return left

    def _has_room(self, count: int) -> bool:
        """Whether so many sequences have blocks to their end; one alone is given what it lacks."""
        return count <= max(1, self._most_whole)

    def _give_way(self) -> None:
        """Preempt those begun last until all others have blocks for their next token."""
        while not self._has_room(self._num_running):
            left = self._left((cohort, self._need(cohort.length)) for cohort in self._running)
            last = self._running[-1]
            held = self._need(last.length)
            count = max(math.ceil(-n / each) for n, each in zip(left, held, strict=True))
            if count <= 0:
                return
            count = min(count, last.count, self._num_running - 1)
            last.count -= count
            times = last.num_preemptions + 1
            self._waiting.appendleft(replace(last, count=count, num_preemptions=times))
            if last is self._part:
                self._part, self._lacking = None, 0
            if not last.count:
                self._running.pop()

    def _begin(self, budget: int) -> list[Cohort]:
        """Let those that wait begin, as many as have room, until their prompts fill a step."""
        begun: list[Cohort] = []
        while self._waiting and budget > 0:
            front = self._waiting[0]
            count = min(self._num_admitted(front), math.ceil(budget / front.length))
            if not count:
                break
            budget -= count * front.length
            front.count -= count
            begun.append(replace(front, count=count))
            self._running.append(begun[-1])
            if front.count:
                break
            self._waiting.popleft()
        return begun

    def _num_admitted(self, front: Cohort) -> int:
        """How many of a cohort that waits may begin."""
        running, more = self._num_running, 0
        most = min(front.count, self._kv.max_num_seqs - running)
        if self._has_room(running + most):
            return most
        if front.num_preemptions and running:
            share = max(self._kv.block_size, front.length // FIRST_SHARE)
            more = share << min(front.num_preemptions - 1, MOST_DOUBLINGS)
        left = self._left((cohort, self._soon(cohort.length, more)) for cohort in self._running)
        first, then = self._need(front.length + more), self._soon(front.length, more)
        held = min(
            1 + (n - one) // each if n >= one else 0
            for n, one, each in zip(left, first, then, strict=True)
        )
        return min(most, held if running else max(1, held))

    def _prompts(self, begun: list[Cohort], decodes: int, room: int) -> Stretch:
        """Compute prompts, beside those that decode."""
        if self._lacking > room and self._has_room(self._num_running):
            return self._one_prompt(decodes, room)
        tokens = self._lacking + sum(cohort.count * cohort.length for cohort in begun)
        rows = sum(cohort.count for cohort in begun) + (self._part is not None)
        before, self._lacking = self._lacking, max(0, tokens - room)
        if before <= room:
            self._part = None
        if self._lacking and begun:
            self._part = replace(begun[-1], count=1)
            begun[-1].count -= 1
            self._running.append(self._part)
        for cohort in self._running:
            if cohort is not self._part:
                cohort.length += 1
                cohort.left -= 1
        self._running = [cohort for cohort in self._running if cohort.count]
        rows -= self._part is not None
        return Stretch(1, decodes, min(room, tokens), rows)

    def _one_prompt(self, decodes: int, room: int) -> Stretch:
        """Compute a prompt that fills steps, until its last one or until some end."""
        others = [cohort for cohort in self._running if cohort is not self._part]
        steps = min([(self._lacking - 1) // room, *(cohort.left for cohort in others)])
        self._lacking -= steps * room
        for cohort in others:
            cohort.length += steps
            cohort.left -= steps
        return Stretch(steps, decodes, room)

    def _decode(self) -> Stretch:
        """Decode until some end or have to give way; no others can begin before."""
        decodes = self._num_running
        low, high = 1, min(cohort.left for cohort in self._running)
        steps = high
        while low < high and not self._has_room(decodes):
            needs = ((c, self._need(c.length + steps - 1)) for c in self._running)
            low, high = (steps, high) if min(self._left(needs)) >= 0 else (low, steps - 1)
            steps = (low + high + 1) // 2
        for cohort in self._running:
            cohort.length += steps
            cohort.left -= steps
        return Stretch(steps, decodes)
