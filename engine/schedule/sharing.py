"""How sequences that the GPU cannot hold share it: which of them decode in a step, and its blocks.

A sequence is long where the GPU has hardly room for it (`BlockGroups.is_long`).
"""

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from engine.asked.request import Sequence, SequenceStatus
from engine.kv.sequences import BlockGroups
from engine.plan import host_times
from engine.plan.sizes import NO_LIMIT
from engine.schedule.admission import Admission
from engine.schedule.step import Stand, StepPlan

SPARE_PARTS = 8
"""Long sequences take GPU blocks that became free once they are one in so many of the room."""
GIVEN_PARTS = 32
"""One of so many parts of the room is given beyond what is asked for, so that little is asked."""


class Sharing:
    """Lets sequences beyond the GPU's room run beside others.

    Each owns blocks of both tiers, and keeps them while it does not decode. A step reads the host
    blocks of those that decode, over the link, which is slow; whose blocks the GPU holds does not
    matter for a step in which all decode. So by the plan's rates one of two ways is chosen:

    - together: each decodes in every step, where a step beside the reads is what costs;
    - in turns: one decodes, and has all GPU blocks that can be had; then the next one in the order
      of their last turns. A turn has as many tokens as make its moves cheap.

    Short ones have their blocks on the GPU: long ones give theirs for it. Where both decode, steps
    of short ones alone come between, so that those keep a share of the time. Long ones whose turn
    it is decode in every step that computes a prompt of a long one, and turns pass on meanwhile.

    So the bounds are: a short one decodes in every step. Of n long ones each decodes once in n
    turns, also after its first token, each of at most MOST_TURN tokens, and in its turn once in
    MOST_SKIPPED + 1 steps (engine/plan/host_times.py). That is while both tiers hold what runs, and
    but for steps of moves.

    Decisions are made for a step that is planned with none in force, as blocks change.
    """

    def __init__(self, groups: BlockGroups, admission: Admission, max_num_seqs: int) -> None:
        self._groups, self._pool, self._admission = groups, groups.pools[0], admission
        self._max_num_seqs = max_num_seqs
        self._known: tuple[int, ...] = ()
        """Long sequences that decode, when it was last decided."""
        self._holder: Sequence | None = None
        """The sequence that has the turn; None: long ones decode together."""
        self._until = (0, 0)
        """Tokens of output and step at which it is to be decided again."""
        self._turns: dict[int, int] = {}
        """By seq_id the number of the last turn; of one that had none, the newest but one when it
        came: it goes before the one that had the turn then."""
        self._num_turns = 0
        self._skips = 0
        self._next_step = 0
        self._refused = (0, -1)
        """Blocks that were asked for in vain, and how often some had been given back then."""
        self._last_steps: dict[int, int] = {}
        self.num_turns = 0
        """Times that GPU blocks went to the next one."""
        self.most_waited_steps = 0
        """Most steps from one token of a long sequence to its next."""

    def longs(self, sequences: Collection[Sequence]) -> list[Sequence]:
        """Return those that are long."""
        limit = self._groups.long_tokens
        if limit == NO_LIMIT:
            return []
        return [sequence for sequence in sequences if sequence.num_tokens > limit]

    def is_due(
        self, step: int, waiting: Collection[Sequence], running: SequenceOf[Sequence]
    ) -> bool:
        """Return whether blocks are to be moved, or it is to be decided who decodes."""
        longs = self.longs(running)
        if not longs:
            return False
        ready = _ready(longs)
        if tuple(s.seq_id for s in ready) != self._known:
            return True
        is_over = ready and self._is_over(step, ready)
        if is_over and (len(ready) > 1 or self._num_spare(waiting, running)):
            return True
        return self._num_lacking(waiting, running) > 0

    def decide(
        self, step: int, waiting: Collection[Sequence], running: SequenceOf[Sequence]
    ) -> None:
        """Let long sequences give blocks to short ones, and say which decode from now on."""
        longs = self.longs(running)
        if not longs:
            self._known, self._holder = (), None
            return
        ready = _ready(longs)
        known = tuple(s.seq_id for s in ready)
        lacking = self._num_lacking(waiting, running)
        if lacking or (known != self._known and len(running) > 1):
            self._give(longs, lacking)
        if not ready:
            self._known, self._holder = (), None
        elif known != self._known or self._is_over(step, ready):
            self._known = known
            self._choose(step, ready, self.num_kept(waiting, running))
        _wait_for_moves(self._groups, longs)

    def chosen(self, stands: list[Stand], step: int, *, is_ahead: bool) -> list[Stand]:
        """Return the parts that run in a step: all but decodes of long sequences that do not.

        `is_ahead` says whether a step in force decodes a long one.
        """
        longs = self.longs([stand.sequence for stand in stands])
        if not longs:
            return stands
        ids = {sequence.seq_id for sequence in longs}
        mine = [s for s in stands if s.sequence.seq_id in ids]
        computes_long = any(not s.is_decode for s in mine)
        has_short = any(s.sequence.seq_id not in ids for s in stands)
        next_step = step + self._skips if is_ahead else self._next_step
        if has_short and not computes_long and step < next_step:
            return [s for s in stands if s.sequence.seq_id not in ids]
        # Those whose prompt has just ended wait for the decision: most of their blocks may lie in
        # the host tier.
        who = self._known if self._holder is None else (self._holder.seq_id,)
        others = ids.difference(who) if who else set[int]()
        return [s for s in stands if not s.is_decode or s.sequence.seq_id not in others]

    @property
    def awaits_moves(self) -> bool:
        """Whether the one whose turn it is waits for its blocks."""
        return self._holder is not None and self._holder.status is SequenceStatus.LOADING

    def note(self, plan: StepPlan) -> None:
        """Note which sequences got tokens in a step that ran."""
        if self._groups.long_tokens == NO_LIMIT:
            return
        step = plan.step
        if self.longs([item.sequence for item in plan.decodes]):
            self._next_step = step + 1 + self._skips
        for sequence in self.longs([item.sequence for item in plan.sampling]):
            waited = step - self._last_steps.get(sequence.seq_id, step)
            self.most_waited_steps = max(self.most_waited_steps, waited)
            if not sequence.is_finished:
                self._last_steps[sequence.seq_id] = step

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that ended."""
        self._last_steps.pop(sequence.seq_id, None)

    # Blocks for short sequences

    def num_kept(self, waiting: Collection[Sequence], running: Collection[Sequence]) -> int:
        """Return the GPU blocks that short sequences need soon, beside those that they have."""
        groups, limit = self._groups, self._groups.long_tokens
        more, count, left = groups.block_size, 0, self._max_num_seqs - len(running)
        for sequence in waiting:
            if left <= 0:
                break
            if sequence.num_tokens > limit:
                continue
            if not count:
                more = max(more, self._admission.more_tokens(sequence))
            need = groups.need(sequence.num_tokens + more)[0]
            if count and count + need > groups.gpu_room:
                break
            count, left = count + need, left - 1
        for sequence in running:
            if sequence.num_tokens <= limit:  # two steps may be planned before the next question
                count += groups.num_lacking(sequence, sequence.num_tokens + more + 2)
        return count

    def _num_lacking(self, waiting: Collection[Sequence], running: Collection[Sequence]) -> int:
        """Return how many of them are not free, if it was not in vain to ask for them."""
        count = self.num_kept(waiting, running) - self._pool.num_free
        most, given_back = self._refused
        is_in_vain = count >= most and given_back == self._groups.num_given_back
        return 0 if is_in_vain else max(0, count)

    def _num_spare(self, waiting: Collection[Sequence], running: Collection[Sequence]) -> int:
        """Return the GPU blocks that are free for long ones, if they are worth a move."""
        count = self._pool.num_free - self.num_kept(waiting, running)
        return count if count >= max(1, self._groups.gpu_room // SPARE_PARTS) else 0

    def _give(self, longs: SequenceOf[Sequence], count: int) -> None:
        """Free GPU blocks of long sequences; those go first that fewest of them read.

        The next ones are copied ahead, so that who decodes does not wait for it.
        """
        here = [s for s in longs if s.status is SequenceStatus.RUNNING]
        near, _ = self._groups.movable(here)
        part = max(1, self._groups.gpu_room // GIVEN_PARTS)
        if count:
            count += part
        order = _fewest_readers(near)
        copies = dict(zip(order, self._pool.states.copies_of(order), strict=True))
        order.sort(key=lambda block_id: (near[block_id], copies[block_id] is None))
        lacking = count - part - self._groups.demote(here, order[:count]) if count else 0
        self._groups.copy(order[count : count + part])
        if lacking > 0:
            self._refused = lacking, self._groups.num_given_back

    # Turns

    def _is_over(self, step: int, ready: SequenceOf[Sequence]) -> bool:
        tokens, last = self._until
        if step >= last:
            return True
        holder = self._holder
        if holder is None:
            return False
        return holder not in ready or holder.num_output_tokens >= tokens

    def _choose(self, step: int, ready: SequenceOf[Sequence], num_kept: int) -> None:
        """Decide who decodes, and move blocks for it."""
        for seq_id in self._turns.keys() - {s.seq_id for s in ready}:
            del self._turns[seq_id]
        for sequence in ready:
            self._turns.setdefault(sequence.seq_id, self._num_turns - 1)
        here = [s for s in ready if s.status is SequenceStatus.RUNNING]
        if not here:
            self._known = ()
            return
        near, far = self._groups.movable(here)
        spare = max(0, self._pool.num_free - num_kept)
        costs = {s.seq_id: self._cost_s(s, near, far, spare + len(near)) for s in here}
        rates, num_read = self._groups.policy.costs.read_rates, sum(map(self._num_read, here))
        together_s = host_times.read_step_s(rates, self._bytes(num_read - spare)) / len(here)
        in_turns_s = sum(seconds for seconds, _ in costs.values()) / len(here)
        if len(here) == 1 or together_s <= in_turns_s:
            self._holder, self._until = None, (0, step + host_times.MOST_TURN)
            if spare >= max(1, self._groups.gpu_room // SPARE_PARTS):
                self._groups.promote(here, _fewest_readers(far)[: -spare - 1 : -1])
            read = sum(map(self._num_read, here))
        else:
            if self._holder not in here or self._is_over(step, ready):
                self._begin_turn(here, near, far, spare)
                assert self._holder is not None
                tokens = costs[self._holder.seq_id][1]
                end = self._holder.num_output_tokens + tokens
                self._until = end, step + tokens * (host_times.MOST_SKIPPED + 1)
            read = self._num_read(self._holder)
        self._skips = host_times.num_skipped(rates, self._bytes(read))

    def _begin_turn(
        self, here: SequenceOf[Sequence], near: Counter[int], far: Counter[int], spare: int
    ) -> None:
        """Give the GPU blocks to the one whose last turn is longest ago."""
        holder = min(here, key=lambda s: self._turns[s.seq_id])
        self.num_turns += holder is not self._holder
        self._num_turns += 1
        self._holder, self._turns[holder.seq_id] = holder, self._num_turns
        mine = set(holder.block_table)
        wanted = [block_id for block_id in holder.block_table if block_id in far]
        others = [block_id for block_id in _fewest_readers(near) if block_id not in mine]
        spare += self._groups.demote(here, others[: max(0, len(wanted) - spare)])
        self._groups.promote(here, wanted[:spare])

    def _num_read(self, sequence: Sequence) -> int:
        """Return the host blocks that a decode of a sequence reads."""
        first_host = self._pool.num_gpu_blocks
        return sum(block_id >= first_host for block_id in sequence.block_table)

    def _bytes(self, num_blocks: int) -> int:
        return num_blocks * self._pool.block_bytes

    def _cost_s(
        self, sequence: Sequence, near: Counter[int], far: Counter[int], room: int
    ) -> tuple[float, int]:
        """Return the time of a token in a sequence's turn, and the turn's tokens.

        `room` are the GPU blocks that it can have.
        """
        table = sequence.block_table
        held = sum(block_id in near for block_id in table)
        gained = min(sum(block_id in far for block_id in table), max(0, room - held))
        read = self._bytes(self._num_read(sequence) - gained)
        return host_times.turn_of(self._groups.policy.costs, read, self._bytes(gained))


def _ready(longs: Collection[Sequence]) -> list[Sequence]:
    """Return those whose prompt is computed."""
    return [s for s in longs if s.num_output_tokens and s.num_computed >= s.num_tokens - 1]


def _fewest_readers(blocks: Counter[int]) -> list[int]:
    """Return blocks, first those that fewest sequences own, of equal ones the last in tables."""
    places = {block_id: place for place, block_id in enumerate(blocks)}
    return sorted(blocks, key=lambda block_id: (blocks[block_id], -places[block_id]))


def _wait_for_moves(groups: BlockGroups, longs: Collection[Sequence]) -> None:
    """Let those not run whose blocks are on their way."""
    for sequence in longs:
        if sequence.status is SequenceStatus.RUNNING and groups.is_pending(sequence):
            sequence.status = SequenceStatus.LOADING
