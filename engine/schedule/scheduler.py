"""Decide what runs in each step of the engine: continuous batching, chunked prefill, preemption.

Pure bookkeeping over block ids; tensors and devices are elsewhere.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any

from engine.asked.request import (
    NO_TOKEN,
    FinishReason,
    NoToken,
    SampledToken,
    Sequence,
    SequenceStatus,
    TokenEvent,
    finish_reason,
)
from engine.errors import EngineError, RequestError
from engine.kv.pool import Room, Tier
from engine.kv.sequences import BlockGroups, kv_stats
from engine.schedule.admission import LONG_BLOCKS, Admission, Rounds
from engine.schedule.sharing import Sharing
from engine.schedule.step import Outlook, ScheduledSequence, Stand, StepPlan


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step."""

    max_num_seqs: int
    """Sequences that have blocks at once."""
    max_num_batched_tokens: int
    """Tokens of one step; at least max_num_seqs."""
    max_model_len: int
    """Most tokens of prompt and output."""
    yields: tuple[int, int] = (1, 1)
    """The least and the most tokens that a step may sample for a sequence."""


@dataclass(kw_only=True)
class SchedulerStats:
    """Counts since the scheduler was made."""

    num_steps: int = 0
    """Steps committed."""
    num_decode_tokens: int = 0
    """Tokens run as decodes."""
    num_prefill_tokens: int = 0
    """Tokens run as prefills, recomputed ones included."""
    num_recomputed_tokens: int = 0
    """Tokens that ran once more because of a preemption."""
    num_preemptions: int = 0
    """Sequences whose blocks were taken away."""
    num_turns: int = 0
    """Number of those that were preempted for one that had waited."""
    num_swaps_out: int = 0
    """Number of preempted ones whose content was to be kept in the host tier."""
    num_swaps_in: int = 0
    """Preempted sequences that went on behind content that was found."""
    num_recomputes: int = 0
    """Preempted sequences whose content was not kept."""
    num_overtaken: int = 0
    """Times that a sequence began before a long one that waits for room."""
    num_stalls: int = 0
    """Times that a running sequence sat out a step for want of a block."""
    num_finished: int = 0
    """Sequences that ended, aborted and failed ones included."""
    num_aborted: int = 0
    """Sequences that were aborted."""
    num_failed: int = 0
    """Sequences of requests that failed for unusable logits."""
    peak_running: int = 0
    """Most sequences that ran at once."""
    peak_blocks: int = 0
    """Most blocks in use."""


MOST_PREPARED = 4
"""Prompts whose keys are made before they are asked for."""


class Scheduler:
    """First come, first served, over pools of KV blocks, one for each group of layers.

    That is among requests of one priority; those of a lower number come first everywhere below,
    and so are "older", whenever they came.

    In a step each running sequence runs its newest token; what the token budget leaves goes to
    prefills, running ones first. Who may begin is said by `Admission`; blocks are taken chunk by
    chunk. A sequence whose prefix is on its way from the host tier is LOADING, and the others run.
    When a running sequence finds no free block on the GPU, the newest one loses its blocks and
    waits at the front of the queue. Its output is kept; its content is swapped out to the host
    tier, or computed again if that is cheaper or there is none. The newest itself waits in place,
    because losing its own blocks would only lose work. One that is alone, or long, takes host
    blocks; how long ones share the GPU is said by `Sharing`.

    A step may be planned while the one before it still runs (`plan_ahead`): as if that had been
    committed, tokens counted though not known. Nothing is taken from a sequence for such a plan.
    What is planned depends on lengths and blocks, and on time only where content comes from the
    host tier.

    Sequences that end give their blocks back before the next step is planned, not at once: for
    thousands of tokens that takes long, and others would wait for the tokens of the step meanwhile.
    The step in flight may still write them: steps run in order on the device, so a block's next
    owner writes it later, and moves run behind the steps before them.

    Blocks that were taken from the pools of `groups` before stay out of use.

    Raises:
        EngineError: A pool cannot hold one sequence of max_model_len tokens, or there is none.
    """

    def __init__(self, config: SchedulerConfig, groups: BlockGroups) -> None:
        if config.max_model_len < 2:
            raise EngineError(
                f"max_model_len: expected at least 2 (one token of prompt, one of output), got "
                f"{config.max_model_len}. Raise it."
            )
        groups.check(config.max_model_len)
        self.groups = groups
        self.config = config
        self.pools = groups.pools
        self.stats = SchedulerStats()
        self.waiting: deque[Sequence] = deque()
        """Next first: by priority, then in order of arrival, preempted ones before others."""
        self.running: list[Sequence] = []
        """Sequences that have blocks, LOADING ones included: by priority, then oldest first."""
        self._admission = Admission(groups, config.max_model_len)
        self._rounds = Rounds(groups, config.max_num_seqs)
        self._sharing = Sharing(groups, self._admission, config.max_num_seqs)
        self._is_turn = False
        self._swapped: set[int] = set()
        """Sequences that wait and were swapped out."""
        self._unfinished: dict[str, list[Sequence]] = {}
        self._ended: list[tuple[Sequence, bool]] = []
        """Sequences that ended and still have their blocks, and whether what those hold is bad."""
        self.planned: list[StepPlan] = []
        """Plans in force, oldest first: at most two."""

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_swapped(self) -> int:
        """Sequences that wait and whose content went to the host tier."""
        return len(self._swapped)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            RequestError: Its prompt can never run here.
            EngineError: It is not new, or its seq_id is taken.
        """
        if sequence.status is not SequenceStatus.WAITING or sequence.num_computed:
            raise EngineError(
                f"scheduler: expected a new sequence, got {sequence.seq_id}, which is "
                f"{sequence.status.value}."
            )
        siblings = self._unfinished.get(sequence.request.request_id, [])
        if any(other.seq_id == sequence.seq_id for other in siblings):
            raise EngineError(f"scheduler: sequence {sequence.seq_id} was added twice.")
        limit = self.config.max_model_len - 1
        if not 1 <= sequence.num_tokens <= limit:
            raise RequestError(
                f"prompt: expected 1 to {limit} tokens (max_model_len="
                f"{self.config.max_model_len} less one to generate), got {sequence.num_tokens}. "
                "Change the prompt or raise max_model_len.",
                param="prompt",
                code=RequestError.CONTEXT_LENGTH,
            )
        self._unfinished.setdefault(sequence.request.request_id, []).append(sequence)
        self._queue(sequence)

    def _queue(self, sequence: Sequence, *, first: bool = False) -> None:
        """Let a sequence wait behind all of its priority, or before them."""
        waiting, mine = self.waiting, sequence.priority
        at = len(waiting)
        if first:
            at = next((i for i, other in enumerate(waiting) if other.priority >= mine), at)
        else:
            while at and waiting[at - 1].priority > mine:
                at -= 1
        waiting.insert(at, sequence)

    def abort(self, request_id: str) -> list[Sequence]:
        """End the unfinished sequences of a request with reason abort and return them.

        May be called between `plan_step` and `commit`. An unknown or finished request is no error.
        """
        aborted = list(self._unfinished.get(request_id, ()))
        for sequence in aborted:
            self.finish(sequence, "abort")
        self.stats.num_aborted += len(aborted)
        return aborted

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        *,
        length: int | None = None,
    ) -> None:
        """End a sequence; one that ended already ends otherwise.

        For decisions made outside, such as a stop string in the decoded text. With reason error
        what its blocks held is forgotten. Of a step that samples tokens beyond the one that ends it
        the first `length` tokens of prompt and output remain.

        Raises:
            EngineError: The sequence was never added.
        """
        if not sequence.is_finished:
            request_id = sequence.request.request_id
            siblings = self._unfinished.get(request_id, [])
            if sequence not in siblings:
                raise EngineError(
                    f"scheduler: expected a sequence that was added, got {sequence.seq_id} of "
                    f"request {request_id!r}."
                )
            siblings.remove(sequence)
            if not siblings:
                del self._unfinished[request_id]
            if sequence.status is SequenceStatus.WAITING:
                self.waiting.remove(sequence)
                self._swapped.discard(sequence.seq_id)
            else:
                self.running.remove(sequence)
            self._ended.append((sequence, reason == "error"))
            self._sharing.forget(sequence)
            sequence.status = SequenceStatus.FINISHED
            self.stats.num_finished += 1
            if not self.has_unfinished:  # nothing waits, and no step may follow
                self._release_ended()
        if length is not None:
            sequence.cut(length)
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason

    def _release_ended(self) -> None:
        """Give back the blocks of sequences that ended since the last plan."""
        while self._ended:
            sequence, is_bad = self._ended.pop(0)
            self.groups.release(sequence, is_bad=is_bad)

    def plan_step(self) -> StepPlan | None:
        """Decide the next step and take its blocks.

        Returns:
            The plan; None if no sequence waits or runs, or if all that could run wait for moves:
            take and submit the moves, complete some, and plan again.

        Raises:
            EngineError: The last plan was neither committed nor discarded.
        """
        if self.planned:
            raise EngineError(
                f"scheduler: expected step {self.planned[0].step} to be committed or discarded "
                "before the next is planned."
            )
        self._release_ended()
        if not self.has_unfinished:
            return None
        self._change_places(self.stats.num_steps)
        self._sharing.decide(self.stats.num_steps, self.waiting, self.running)
        outlook = Outlook(None, self.config.max_model_len)
        plan = self._plan(outlook, self._wants(outlook))
        if plan is None and not any(pool.ledger.num_in_flight for pool in self.pools):
            raise EngineError(
                f"scheduler: expected a sequence that can run, got {len(self.running)} with "
                f"blocks and {len(self.waiting)} that wait, and no move that would change it."
            )
        return plan

    def plan_ahead(self) -> StepPlan | None:
        """Decide the step behind the plan in force, as if that had been committed.

        Sequences that the plan in force ends whatever it samples are left out; they keep their
        place among the running ones until it is committed. Likewise those of which it is not
        certain how many tokens come, and those with a constraint, whose tokens the host must know.
        Those that it may end are in; their tokens are ignored then.

        Returns:
            The plan; None where that of now must be committed first: nothing would run, a running
            sequence would find no free block, or places are to be changed.

        Raises:
            EngineError: Not exactly one plan is in force.
        """
        if len(self.planned) != 1:
            raise EngineError(
                f"scheduler: expected one step in force to plan behind, got {len(self.planned)}."
            )
        self._release_ended()
        step = self.stats.num_steps + 1
        if self._rounds.is_due(step, self.waiting, self.running):
            return None
        if self._sharing.is_due(step, self.waiting, self.running):
            return None
        outlook = Outlook(self.planned[0], self.config.max_model_len)
        wants = self._wants(outlook)
        lacking: dict[Room, int] = {"gpu": 0, "either": 0}
        for stand, want in wants:
            lacking[self._room_of(stand.sequence)] += self.groups.num_lacking(
                stand.sequence, stand.computed + want
            )
        room = self.groups.num_allocatable
        if lacking["gpu"] > room("gpu") or sum(lacking.values()) > room("either"):
            return None
        return self._plan(outlook, wants)

    def _plan(self, outlook: Outlook, wants: list[tuple[Stand, int]]) -> StepPlan | None:
        decodes, prefills = self._make_step(outlook, wants)
        if not decodes and not prefills and not self.planned and not self._sharing.awaits_moves:
            # Those that were chosen have no block; others may still have room.
            others = [(stand, 1) for stand in outlook.stands(self.running) if stand.is_decode]
            decodes, prefills = self._make_step(outlook, others)
        if not decodes and not prefills:
            return None
        self.stats.peak_running = max(self.stats.peak_running, len(self.running))
        self.stats.peak_blocks = max(self.stats.peak_blocks, self.pools[0].num_used)
        step = self.stats.num_steps + len(self.planned)
        plan = StepPlan(step=step, decodes=tuple(decodes), prefills=tuple(prefills))
        self.planned.append(plan)
        return plan

    def _change_places(self, step: int) -> None:
        """Let running sequences give way to waiting ones, if it is time."""
        self._is_turn = self._rounds.is_due(step, self.waiting, self.running)
        if self._is_turn:
            for sequence in self._rounds.leavers(step, self.waiting, self.running):
                self._leave(sequence)
                sequence.num_turns += 1
                self.stats.num_turns += 1
                self._queue(sequence)

    def _wants(self, outlook: Outlook) -> list[tuple[Stand, int]]:
        """Return the running sequences that are to run, oldest first, and how many tokens each.

        Decodes are counted first, as a prefill need not be the newest: the content of another
        may have come sooner. A prompt of a long sequence leaves others up to half of what is left.
        """
        is_long = self.groups.is_long
        stands = self._chosen(outlook.stands(self.running))
        left = self.config.max_num_batched_tokens
        left -= sum(stand.is_decode for stand in stands)
        prefills = [stand for stand in stands if not stand.is_decode]
        kept = left
        if any(is_long(stand.sequence) for stand in prefills):
            short = [stand for stand in prefills if not is_long(stand.sequence)]
            asked = sum(stand.known - stand.computed for stand in short) + self._num_expected()
            kept = min(asked, left - left // 2)
        lefts = {False: kept, True: left - kept}
        wants = []
        for stand in stands:
            want = 1
            if not stand.is_decode:
                kind = is_long(stand.sequence)
                want = min(lefts[kind], stand.known - stand.computed)
                lefts[kind] -= want
            if want > 0:
                wants.append((stand, want))
        return wants

    def _num_expected(self) -> int:
        """Return the tokens of short sequences that wait and may begin in this step."""
        free, seats = self.pools[0].num_free, self.config.max_num_seqs - len(self.running)
        tokens = 0
        for sequence in islice(self.waiting, max(0, seats)):
            if not self.groups.is_long(sequence):
                free -= self.groups.need(sequence.num_tokens)[0]
                if free < 0:
                    break
                tokens += sequence.num_tokens
        return tokens

    def _chosen(self, stands: list[Stand]) -> list[Stand]:
        """Leave out decodes of long sequences that are not to run."""
        step = self.stats.num_steps + len(self.planned)
        is_ahead = any(self.groups.is_long(i.sequence) for p in self.planned for i in p.decodes)
        return self._sharing.chosen(stands, step, is_ahead=is_ahead)

    def _make_step(
        self, outlook: Outlook, wants: list[tuple[Stand, int]]
    ) -> tuple[list[ScheduledSequence], list[ScheduledSequence]]:
        """Take blocks for what is to run, let others begin; return decodes and prefills."""
        decodes: list[ScheduledSequence] = []
        prefills: list[ScheduledSequence] = []
        left = most = self.config.max_num_batched_tokens

        def run(stand: Stand, want: int, *, may_preempt: bool = True) -> int:
            granted = self._grow(stand, want, may_preempt=may_preempt)
            if granted:
                part = stand.schedule(granted, self.config.yields)
                (decodes if stand.is_decode else prefills).append(part)
            return granted

        for stand, want in wants:
            if stand.sequence.status is SequenceStatus.RUNNING:  # not preempted for an older one
                left -= run(stand, want)
        is_busy, kept = left < most, min(self._num_expected(), most - most // 2)
        while left > 0 and (sequence := self._begin_next(outlook, is_busy=is_busy)) is not None:
            if sequence.status is not SequenceStatus.LOADING:
                stand = outlook.stand(sequence)
                # It had room when it began; others of this step keep their blocks.
                want, is_long = stand.known - stand.computed, self.groups.is_long(sequence)
                want = min(left - kept if is_long else left, want)
                if want > 0:
                    granted = run(stand, want, may_preempt=False)
                    left, kept = left - granted, kept if is_long else max(0, kept - granted)
        self._is_turn = False
        self.groups.store_ahead(most - left)
        return decodes, prefills

    def _next(self) -> Iterator[Sequence]:
        """Yield who may begin next: the front of the queue, and the first short one behind it.

        The latter where the front is long and waits for others like it, or for its keys, or was not
        refused yet beside others. It comes first where a place is left for the front, which could
        take GPU blocks with a prefix.
        """
        first, is_long = self.waiting[0], self.groups.is_long
        short: list[Sequence] = []
        if is_long(first) and (
            any(map(is_long, self.running))
            or self._lacks_keys(first)
            or (self.running and not self._admission.has_refused(first))
        ):
            mine = (s for s in self.waiting if s.priority == first.priority and not is_long(s))
            short = list(islice(mine, 1))
        has_two_places = len(self.running) + 1 < self.config.max_num_seqs
        yield from (*short, first) if has_two_places else (first, *short)

    def _lacks_keys(self, sequence: Sequence) -> bool:
        """Return whether making the keys of a sequence takes longer than others are to wait."""
        return self.groups.num_unnamed(sequence) >= LONG_BLOCKS

    def _begin(self, sequence: Sequence, outlook: Outlook, *, is_busy: bool) -> bool:
        """Give a sequence that waits its blocks, if it may begin; return whether it does."""
        if self._awaits_prompt(sequence):
            return False
        if is_busy and self._lacks_keys(sequence):
            return False
        is_long, keep = self.groups.is_long(sequence), 0
        if is_long:
            keep = self._sharing.num_kept(self.waiting, self.running)
        return self._admission.begin(
            sequence, self.running, outlook, is_turn=self._is_turn, keep=keep
        )

    def _begin_next(self, outlook: Outlook, *, is_busy: bool) -> Sequence | None:
        """Let the next sequence of the queue begin, if limits and blocks allow.

        If others run in this step (`is_busy`), they do not wait for the keys of a long prompt.
        """
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return None
        sequence = next((s for s in self._next() if self._begin(s, outlook, is_busy=is_busy)), None)
        if sequence is None:
            return None
        self.stats.num_overtaken += sequence is not self.waiting[0]
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=attrgetter("priority"))
        if sequence.seq_id in self._swapped:
            self._swapped.remove(sequence.seq_id)
            self.stats.num_swaps_in += sequence.num_computed > 0
        if sequence.begin_s is None:
            sequence.num_cached_tokens = sequence.num_computed
        is_pending = self.groups.is_pending(sequence)
        sequence.status = SequenceStatus.LOADING if is_pending else SequenceStatus.RUNNING
        return sequence

    def _awaits_prompt(self, sequence: Sequence) -> bool:
        """Whether another answer to the same prompt computes blocks of it that this one can find.

        It runs, so this one begins a few steps later, and computes little of the prompt.
        """
        request, size = sequence.request, self.groups.block_size
        num_blocks = (sequence.num_prompt_tokens - 1) // size
        if request.params.n == 1 or not self.groups.policy.prefix_caching:
            return False
        return any(s.request is request and s.num_named < num_blocks for s in self.running)

    def _grow(self, stand: Stand, want: int, *, may_preempt: bool) -> int:
        """Give a running sequence blocks for up to `want` more tokens; return for how many."""
        sequence, room, keep = stand.sequence, self._room_of(stand.sequence), 0
        if self.groups.is_long(sequence) and self.groups.num_lacking(
            sequence, stand.computed + want
        ):
            keep = self._sharing.num_kept(self.waiting, self.running)
        while True:
            granted = self.groups.extend(sequence, stand.computed, want, room, keep)
            if granted:
                return granted
            newest = self._newest_after(sequence) if may_preempt else None
            if newest is None:
                self.stats.num_stalls += 1
                return 0
            self._leave(newest)
            self._queue(newest, first=True)
            room = self._room_of(sequence)

    def _room_of(self, sequence: Sequence) -> Room:
        """Return where a running sequence may take blocks from."""
        is_free = len(self.running) == 1 or self.groups.is_long(sequence)
        return "either" if is_free else "gpu"

    def _newest_after(self, sequence: Sequence) -> Sequence | None:
        """Return the newest sequence, if newer than this one, that has blocks which serve it."""
        takes_host = self.groups.is_long(sequence)
        for other in reversed(self.running):
            if other is sequence:
                return None
            if takes_host or not self.groups.is_long(other):
                return other
            if self.pools[0].num_owned_gpu(other.block_table):
                return other
        return None

    def _leave(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks."""
        self.running.remove(sequence)
        if self.groups.preempt(sequence) == "swap":
            self.stats.num_swaps_out += 1
            self._swapped.add(sequence.seq_id)
        else:
            self.stats.num_recomputes += 1
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self.stats.num_preemptions += 1

    def complete_moves(self, group: int, move_ids: Iterable[int]) -> None:
        """Note that moves of a group are done; let sequences run whose content has come.

        Raises:
            EngineError: One was completed before, or never taken.
        """
        ids = tuple(move_ids)
        self.pools[group].complete(ids)
        self.groups.num_given_back += bool(ids)
        for sequence in self.running:
            is_loading = sequence.status is SequenceStatus.LOADING
            if is_loading and not self.groups.is_pending(sequence):
                sequence.status, sequence.pending = SequenceStatus.RUNNING, ()

    def prepare(self) -> bool:
        """Make keys of a prompt that waits near the front; return whether one lacked some."""
        for sequence in islice(self.waiting, MOST_PREPARED):
            if self.groups.num_unnamed(sequence) > 0:
                self.groups.prepare(sequence)
                return True
        return False

    def reset_cache(self, tier: Tier | None = None) -> None:
        """Forget the content of a tier, or of both; sequences keep the blocks that they have."""
        for pool in self.pools:
            pool.reset(tier)
        self.groups.num_given_back += 1

    def evict_gpu_cache(self) -> None:
        """Take all content that no sequence has off the GPU, as if its blocks were needed."""
        self._release_ended()
        for pool in self.pools:
            pool.evict_idle()

    def kv_stats(self) -> dict[str, Any]:
        """Return use of both tiers, hits, evictions and swaps, in sum and for each group."""
        return kv_stats(self.groups) | {
            "swaps_out": self.stats.num_swaps_out,
            "swaps_in": self.stats.num_swaps_in,
            "recomputes": self.stats.num_recomputes,
            "preemptions": self.stats.num_preemptions,
            "long_turns": self._sharing.num_turns,
            "long_waited_steps": self._sharing.most_waited_steps,
        }

    def discard(self, plan: StepPlan) -> None:
        """Forget a plan that did not run; its sequences stay as they were, with their blocks.

        Raises:
            EngineError: It is not the newest plan in force.
        """
        self._check_plan(plan, newest=True)
        self.planned.pop()

    def commit(
        self,
        plan: StepPlan,
        sampled: Mapping[int, SequenceOf[SampledToken] | NoToken],
        eos_token_ids: Collection[int],
    ) -> list[TokenEvent]:
        """Record that a planned step ran, append its tokens and end sequences that are done.

        Args:
            plan: The plan in force, the oldest of two.
            sampled: By seq_id the tokens of each sequence that samples, in order and as many as
                the part's `yields` allows; or why there is none: its request fails. Those of
                sequences that ended since the plan was made may be absent and are ignored, as are
                tokens beyond the one that ends a sequence.
            eos_token_ids: The model's end-of-sequence tokens.

        Returns:
            One event for each appended token, in the order of the plan, and one with finish_reason
            "error" for each unfinished sequence of a request that failed.

        Raises:
            EngineError: It is not that plan, tokens are missing or are fewer or more than may come,
                or some are for a sequence that does not sample.
        """
        self._check_plan(plan, newest=False)
        self._check_sampled(plan, sampled)
        self.planned.pop(0)
        self.stats.num_steps += 1
        self.stats.num_decode_tokens += len(plan.decodes)
        self.stats.num_prefill_tokens += plan.num_tokens - len(plan.decodes)
        events = []
        for item in plan.scheduled:
            if item.sequence.is_finished:
                continue
            tokens = sampled[item.sequence.seq_id] if item.samples else ()
            if isinstance(tokens, NoToken):
                events += self._fail(item.sequence, tokens)
                continue
            new = self._append(item.sequence, tokens, eos_token_ids)
            self._advance(item)
            if new and (reason := new[-1].finish_reason) is not None:
                self.finish(item.sequence, reason, new[-1].stop_reason)
            events += new
        self._sharing.note(plan)
        self.prepare()
        return events

    def _check_sampled(
        self, plan: StepPlan, sampled: Mapping[int, SequenceOf[SampledToken] | NoToken]
    ) -> None:
        items = {item.sequence.seq_id: item for item in plan.sampling}
        open_ids = {i for i, item in items.items() if not item.sequence.is_finished}
        if open_ids - sampled.keys() or sampled.keys() - items.keys():
            raise EngineError(
                f"scheduler: expected tokens for sequences {sorted(open_ids)} of step "
                f"{plan.step}, got them for {sorted(sampled)}."
            )
        for seq_id, tokens in sampled.items():
            least, most = items[seq_id].yields
            if not isinstance(tokens, NoToken) and not least <= len(tokens) <= most:
                raise EngineError(
                    f"scheduler: expected {least} to {most} tokens for sequence {seq_id} of step "
                    f"{plan.step}, got {len(tokens)}."
                )

    def _fail(self, failed: Sequence, fault: NoToken) -> list[TokenEvent]:
        """End a request of which a sequence got no token; nothing of its content is kept."""
        why = (
            f"logits: expected finite logits for the token at position {failed.num_tokens} of "
            f"answer {failed.index}, got NaN, infinity or nothing finite. The weights or a kernel "
            "are at fault."
        )
        if fault is NoToken.FORM and failed.constraint is not None:
            why = failed.constraint.error or (
                f"structured: expected a token of the vocabulary that may come at position "
                f"{failed.num_tokens} of answer {failed.index}, got none. Change the form."
            )
        sequences = list(self._unfinished[failed.request.request_id])
        self.stats.num_failed += len(sequences)
        for sequence in sequences:
            self.finish(sequence, "error")
        none = SampledToken(NO_TOKEN, math.nan)
        events = [_event(each, none, each.num_tokens, "error", why) for each in sequences]
        return [replace(event, failure=fault) for event in events]

    def _advance(self, item: ScheduledSequence) -> None:
        """Count a part as computed; name full blocks and give back what no later one sees.

        The newest token is computed by the next step, also where none came of this one. What a
        part has computed beyond that is given back.
        """
        sequence, stop = item.sequence, item.stop
        if item.samples:
            stop = min(stop, sequence.num_tokens - 1)
        again = min(item.stop, sequence.num_computed_peak) - item.start
        self.stats.num_recomputed_tokens += max(0, again)
        sequence.num_computed = stop
        sequence.num_computed_peak = max(sequence.num_computed_peak, stop)
        self.groups.advance(sequence)
        if stop < item.stop:
            self.groups.truncate(sequence, stop)

    def _append(
        self,
        sequence: Sequence,
        tokens: SequenceOf[SampledToken],
        eos_token_ids: Collection[int],
    ) -> list[TokenEvent]:
        """Append tokens up to one that ends the sequence; return an event for each."""
        events, limit = [], self.config.max_model_len
        for token in tokens:
            sequence.append(token)
            reason, stop_reason = finish_reason(sequence, token.token_id, eos_token_ids, limit)
            is_whole = sequence.constraint and sequence.constraint.accept(token.token_id)
            if is_whole and reason != "stop":
                reason, stop_reason = "stop", None
            events.append(_event(sequence, token, sequence.num_tokens - 1, reason, stop_reason))
            if reason is not None:
                break
        return events

    def _check_plan(self, plan: StepPlan, *, newest: bool) -> None:
        if not self.planned or plan is not self.planned[-1 if newest else 0]:
            which = "newest" if newest else "oldest"
            raise EngineError(
                f"scheduler: expected the {which} plan in force, got that of step {plan.step}."
            )


def _event(
    sequence: Sequence,
    token: SampledToken,
    position: int,
    reason: FinishReason | None,
    stop_reason: int | str | None,
) -> TokenEvent:
    is_first = position == sequence.num_prompt_tokens and token.token_id != NO_TOKEN
    return TokenEvent(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_id=token.token_id,
        position=position,
        finish_reason=reason,
        stop_reason=stop_reason,
        logprob=token.logprob,
        top_logprobs=token.top_logprobs,
        rank=token.rank,
        begin_s=sequence.begin_s if is_first else None,
        num_cached_tokens=sequence.num_cached_tokens if is_first else None,
        prompt_logprobs=sequence.known_prompt_logprobs if is_first else None,
    )
