"""Choose the placement of every tensor by predicted times.

Candidates are what the engine can run: an untied embedding table read in place, which costs
nothing; then as few layers as free the room that is needed, spread evenly, whole or some products
of each, copied ahead into slots or read in place; the last of them only in part where that is
enough; or all experts of all layers, cached in banks. Pure arithmetic, no torch.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, Final

from engine.model.formats import EMBEDDING, HEAD, align
from engine.model.spec import DTYPE_BYTES, W2, W13
from engine.plan.memory import (
    Asked,
    MemoryPlan,
    asked_tier,
    build_plan,
    plan_fits,
    step_blocks,
)
from engine.plan.policy import Assignment, assign_cached, assign_resident, spread_layers
from engine.plan.queue import QUEUE_REQUESTS, queue_of, queue_s
from engine.plan.sizes import captured_bytes
from engine.plan.times import CONTEXT_TOKENS, Shape, decode_step_s, shape_of, step_s
from engine.plan.units import CACHED, ON_DEMAND, PREFETCH, UVA, Residence
from engine.sealed import GIB

TIE: Final = 0.002
"""Times that differ by less count as equal; then fewer bytes in host memory decide."""
NUM_LISTED: Final = 5
NOTHING: Final = "everything in GPU memory"
GAIN: Final = 1.1
"""How much faster a queue must be predicted to move something where nothing has to be."""


@dataclass(frozen=True)
class Candidate:
    """One placement; its times are predicted when they are asked for."""

    label: str
    asked: Asked
    assignment: Assignment
    context_tokens: int
    """Length of the sequence whose decode step counts."""

    @cached_property
    def plan(self) -> MemoryPlan:
        """The plan of this placement, which may not fit."""
        return build_plan(self.asked, self.assignment)

    @cached_property
    def shape(self) -> Shape:
        """What its times depend on."""
        return shape_of(self.plan, self.asked.spec, self.asked.rates)

    @property
    def host_bytes(self) -> int:
        """Bytes of weights in host memory."""
        return self.plan.host_items["pinned_weights" if self.plan.pin else "pageable_weights"]

    @cached_property
    def decode_s(self) -> float:
        """The time of a decode step at batch 1."""
        return decode_step_s(self.shape, 1, self.context_tokens)

    @cached_property
    def queue_s(self) -> float:
        """The time of a queue of requests."""
        prompt, output = queue_of(self.plan.max_model_len)
        return queue_s(self.shape, QUEUE_REQUESTS, prompt, output)

    @cached_property
    def waves_s(self) -> float:
        """Roughly queue_s: as many at once as have room at their mean length, all alike."""
        prompt, output = queue_of(self.plan.max_model_len)
        batch = min(QUEUE_REQUESTS, self.plan.kv.concurrency(prompt + output / 2))
        part = min(batch * prompt, self.plan.max_num_batched_tokens)
        first_s = step_s(self.shape, prefill=part, rows=max(1, part // prompt))
        then_s = decode_step_s(self.shape, batch, prompt + output / 2)
        wave_s = batch * prompt / part * first_s + (output - 1) * then_s
        return QUEUE_REQUESTS / batch * wave_s

    def score(self, objective: str) -> tuple[int, int]:
        """Return what is least for the best candidate."""
        seconds = self.queue_s if objective == "throughput" else self.decode_s
        return round(math.log(seconds) / TIE), self.host_bytes

    def row(self) -> dict[str, Any]:
        """Return plain data for the record."""
        prompt, output = queue_of(self.plan.max_model_len)
        return {
            "label": self.label,
            "host_gib": self.host_bytes / GIB,
            "kv_tokens": self.plan.kv_tokens,
            "decode_step_ms": self.decode_s * 1e3,
            "queue_output_tokens_s": QUEUE_REQUESTS * output / self.queue_s,
            "queue_prompt_tokens": prompt,
        }


def label_of(
    taken: list[tuple[str, ...]], outer: tuple[str, ...], kind: Residence, slots: int, name: str
) -> str:
    """Return what a candidate is called, with the granule `name` of each layer in `taken`."""
    parts = []
    if outer:
        parts.append(f"{' and '.join(['embedding', 'output head'][: len(outer)])} read in place")
    if used := [items for items in taken if items]:
        what = f"{len(used)} layers" if name == "whole layers" else f"{name} of {len(used)} layers"
        if used[-1] != used[0]:
            last = (item.removesuffix(".weight").split(".")[-1] for item in used[-1])
            what += f" (of the last: {', '.join(last)})"
        parts.append(f"{what} {kind.label(slots)}")
    return "; ".join(parts)


QKV, OUT, GATE_UP, DOWN = (
    "self_attn.qkv_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_up_proj.weight",
    "mlp.down_proj.weight",
)
PRODUCTS: Final = (QKV, OUT, GATE_UP, DOWN, W13, W2)
"""What may be taken of a layer alone."""
GRANULES: Final = {
    "whole layers": (),
    "mlp": (GATE_UP, DOWN),
    "attention products": (QKV, OUT),
    "mlp.gate_up_proj": (GATE_UP,),
    "mlp.down_proj": (DOWN,),
    "self_attn.qkv_proj": (QKV,),
    "self_attn.o_proj": (OUT,),
    "experts": (W13, W2),
}
"""What is taken of a layer; nothing named: all of it."""
NEAR: Final = (0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.35, 1.5, 1.75)
"""Shares of the best candidate's KV blocks at which better ones for a queue are looked for."""
NUM_CLOSE: Final = 12
"""Candidates for a queue whose steps are counted one by one."""


class Chooser:
    """Enumerates candidates for one question."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._layers = asked.spec.num_hidden_layers
        self._objective = asked.config.planner.objective
        self._tensors: list[dict[str, int]] = [
            {
                tensor.name.split(".", 3)[3]: align(asked.formats.num_bytes(tensor))
                for tensor in asked.spec.layer_tensors(layer)
            }
            for layer in range(self._layers)
        ]
        """Bytes that taking a tensor of each layer frees, by its short name."""
        outer = asked.spec.outer_tensors()
        self._outer = {tensor.name: align(asked.formats.num_bytes(tensor)) for tensor in outer}
        self.resident = build_plan(asked, assign_resident(asked.spec))
        self._tier = asked_tier(asked, 0)
        self._prefill_graphs = _prefill_graph_bytes(asked, self.resident)

    @cached_property
    def _stages(self) -> bool:
        """Whether steps can be large enough to stage layers that are read in place."""
        slabs = [layer.resident for layer in self.resident.layers]
        return self._asked.stage_tokens(slabs) is not None

    @cached_property
    def _least_blocks(self) -> int:
        """KV blocks on the GPU that one step fills, or that cannot lie in the host tier."""
        alone = max(step_blocks(self.resident.kv), self._sequence_blocks - self._tier.reach)
        return max(min(self._sequence_blocks, alone), self._wanted_blocks)

    @cached_property
    def _fewest_blocks(self) -> int:
        """KV blocks that must have room on the GPU: beside a host tier, of a short sequence."""
        short = self.resident.kv.blocks(min(CONTEXT_TOKENS, self._asked.max_model_len))[0] + 1
        alone = max(short, self._sequence_blocks - self._tier.reach)
        return max(min(self._least_blocks, alone), self._wanted_blocks)

    @property
    def _wanted_blocks(self) -> int:
        return math.ceil((self._asked.config.planner.kv_tokens or 0) / self.resident.block_size)

    @property
    def _sequence_blocks(self) -> int:
        """KV blocks of one sequence of max_model_len, as those below in the first group."""
        return self.resident.kv.blocks(self._asked.max_model_len)[0]

    @property
    def most_kv_tokens(self) -> int:
        """Tokens of KV that have a use: of max_num_seqs sequences, unless prefixes are kept."""
        return self.resident.kv.most[0] * self.resident.block_size

    @property
    def resident_fits(self) -> bool:
        """Whether everything fits the GPU."""
        return self.resident.num_gpu_blocks >= self._least_blocks and plan_fits(self.resident)

    @property
    def moves_nothing(self) -> bool:
        """Whether everything stays on the GPU: it fits, and more room for KV serves no queue."""
        return self.resident_fits and self._objective != "throughput"

    @property
    def can_fit(self) -> bool:
        """Whether everything fits the GPU, or some candidate does."""
        found = self._candidates(self._block_targets("latency"))
        return self.resident_fits or any(map(self._fits, found))

    def best(self) -> tuple[MemoryPlan, list[Candidate]] | None:
        """Return the plan of the best candidate that fits, and it and all behind it, in order.

        Where everything stays on the GPU there are no candidates.
        """
        return (self.resident, []) if self.moves_nothing else next(self.ranked(), None)

    def ranked(self) -> Iterator[tuple[MemoryPlan, list[Candidate]]]:
        """Yield plans that fit, the best first, each with its candidate and all behind it."""
        is_queue, nothing = self._objective == "throughput", []
        if is_queue and self.resident_fits:
            nothing = [self._named(NOTHING, assign_resident(self._asked.spec))]
        targets = self._block_targets(self._objective)
        ranked = self._in_order([*nothing, *self._candidates(targets)])
        if is_queue:
            best = next((x for x in ranked if x.label != NOTHING), None)  # all of them fit
            near = [] if best is None else self._candidates(self._near(best))
            known = {item.label for item in ranked}
            ranked = self._in_order([*ranked, *(x for x in near if x.label not in known)])
        if nothing and ranked[0].queue_s * GAIN > nothing[0].queue_s:
            ranked = [*nothing, *(item for item in ranked if item.label != NOTHING)]
        for index, candidate in enumerate(ranked):
            if self._fits(candidate):
                yield candidate.plan, ranked[index:]

    def without_moves(self) -> dict[str, Assignment]:
        """Return where weights lie if no layer leaves the GPU, by a label; nothing: no room."""
        resident = assign_resident(self._asked.spec)
        in_place = replace(resident, placements=resident.placements | {EMBEDDING: UVA})
        options = {NOTHING: resident}
        if any(self._outer_options()):
            options[label_of([], (EMBEDDING,), UVA, 0, "")] = in_place
        for label, found in options.items():
            if self.mixed_s(self._asked, found) < math.inf:
                return {label: found}
        return {}

    def mixed_s(self, mix: Asked, assignment: Assignment) -> float:
        """Return the time that the objective counts, with other formats; infinite: no room."""
        found = replace(self._named("", assignment), asked=mix)
        if found.plan.num_gpu_blocks < self._least_blocks or not plan_fits(found.plan):
            return math.inf
        return found.queue_s if self._objective == "throughput" else found.decode_s

    def mixed_record(self, label: str, mix: Asked, assignment: Assignment) -> dict[str, Any]:
        """Return what `record` does, of a placement that was tried with other formats."""
        found = replace(self._named(label, assignment), asked=mix)
        return {
            "objective": self._objective,
            "chosen": found.label,
            "why": f"with what is in codes best there (predicted; {self._asked.rates.source})",
            "candidates": [found.row()],
        }

    def _named(self, label: str, assignment: Assignment) -> Candidate:
        context = self._asked.max_model_len
        if self._objective != "context":
            context = min(CONTEXT_TOKENS, context)
        return Candidate(label, self._asked, assignment, context)

    def _in_order(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return them, the best first; of a queue those that may be are looked at closely."""
        if self._objective != "throughput":
            return sorted(candidates, key=lambda item: item.score(self._objective))
        rough = sorted(filter(self._fits, candidates), key=lambda item: item.waves_s)
        head = sorted(rough[:NUM_CLOSE], key=lambda item: item.score(self._objective))
        return head + rough[NUM_CLOSE:]

    def record(self, candidates: list[Candidate], *, is_listed: bool = True) -> dict[str, Any]:
        """Return what was chosen and why as plain data: the first candidate; of none, nothing.

        Others behind it may leave enough of the GPU and still lack host memory. With `is_listed`
        the best are listed with their times, of which that of a queue takes long to predict.
        """
        objective, fitting = self._objective, list(filter(self._fits, candidates))
        if not fitting:
            why = "it fits the GPU budget"
            return {"objective": objective, "chosen": NOTHING, "why": why, "candidates": []}
        what = {
            "latency": "the shortest decode step at batch 1",
            "throughput": f"the most output tokens/s of a queue of {QUEUE_REQUESTS} requests",
            "context": "the longest sequence, then the shortest decode step at its end",
        }[objective]
        why = f"{what} of {len(fitting)} placements that fit"
        if fitting[0].label == NOTHING:
            why = f"it fits, and none of {len(fitting)} placements has {GAIN - 1:.0%} more tokens/s"
        return {
            "objective": objective,
            "chosen": fitting[0].label,
            "why": f"{why} (predicted; {self._asked.rates.source})",
            "candidates": [candidate.row() for candidate in fitting[: is_listed * NUM_LISTED]],
        }

    def _fits(self, candidate: Candidate) -> bool:
        plan = candidate.plan
        return plan_fits(plan) and plan.num_gpu_blocks >= self._fewest_blocks

    def _candidates(self, targets: list[int]) -> Iterator[Candidate]:
        """Yield what makes room for so many KV blocks each, every placement once."""
        facts, seen = self._asked.facts, set()
        kinds: list[Residence] = [ON_DEMAND]
        if facts.can_pin:
            kinds = [PREFETCH, *([UVA] if facts.can_uva else [])]
        for blocks in targets:
            for outer in self._outer_options():
                found = False
                for item in self._sorts(blocks, outer, kinds):
                    found |= item.plan.num_gpu_blocks >= self._fewest_blocks
                    if item.label and item.label not in seen:
                        seen.add(item.label)
                        yield item
                if found:
                    break  # the head is read from the host only where nothing else is enough

    def _sorts(
        self, blocks: int, outer: tuple[str, ...], kinds: list[Residence]
    ) -> Iterator[Candidate]:
        """Yield of each sort the candidate that leaves room for so many KV blocks."""
        for kind in kinds:
            for lookahead in (1, 2) if kind is PREFETCH else (1,):
                for name in GRANULES:
                    item = self._candidate(blocks, outer, kind, lookahead, name)
                    if item is not None:
                        yield item
        if (cached := self._cached(blocks, outer)) is not None:
            yield cached

    def _block_targets(self, objective: str) -> list[int]:
        asked, least = self._asked, self._least_blocks
        alone = {least, max(least, self._sequence_blocks)}
        fewest = self._fewest_blocks
        alone |= {fewest * step for step in (1, 2, 4) if fewest * step < least}
        if objective != "throughput":
            return sorted(alone)
        most = asked.config.engine.max_num_seqs
        each = self.resident.kv.blocks(sum(queue_of(asked.max_model_len)))[0]
        counts = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
        useful = self.resident.kv.useful[0]
        return sorted(alone | {max(least, min(count * each, useful)) for count in counts})

    def _near(self, best: Candidate) -> list[int]:
        """KV blocks around those of a candidate, to look at more closely."""
        blocks, least = best.plan.num_gpu_blocks, self._least_blocks
        useful = self.resident.kv.useful[0]
        return sorted({max(least, min(int(share * blocks), useful)) for share in NEAR})

    def _outer_options(self) -> list[tuple[str, ...]]:
        """Tensors outside the layers that are read in place; a tied table never is."""
        if not self._asked.facts.can_uva or self._asked.spec.tie_word_embeddings:
            return [()]
        return [(EMBEDDING,), (EMBEDDING, HEAD)]

    def _candidate(
        self, blocks: int, outer: tuple[str, ...], kind: Residence, lookahead: int, name: str
    ) -> Candidate | None:
        """Return the least offload of one sort that leaves the blocks free, or None."""
        plan = self.resident
        other = plan.gpu_total_bytes - plan.gpu_items["kv_cache"]
        other -= plan.gpu_items.get("packing", 0)  # that takes the place of KV blocks, where any is
        if "kv_stages" in plan.gpu_items:
            other -= plan.gpu_items["kv_stages"] + self._tier.graph_bytes
        freed = sum(self._outer[item] for item in outer)
        need = other + self._room(blocks) - freed - plan.gpu_budget_bytes
        if need > 0:  # steps with prompts are captured only where no layer is moved
            need = max(1, need - self._prefill_graphs)
        slots = kind.num_slots(self._layers, lookahead=lookahead, stages=self._stages)
        taken = self._choose_layers(need, name, slots)
        if taken is None:
            return None
        slots = min(slots, sum(1 for items in taken if items))
        label = label_of(taken, outer, kind, slots, name)
        item = self._named(label, self._assignment(taken, outer, kind, lookahead))
        # Layers that every step stages are copied ahead, which other candidates do.
        return None if kind is UVA and item.plan.always_staged else item

    def _cached(self, blocks: int, outer: tuple[str, ...]) -> Candidate | None:
        """Return what caches experts in the room that the blocks leave; None: it cannot be."""
        asked = self._asked
        if not asked.spec.expert_layers or not asked.facts.can_uva:
            return None
        found = assign_cached(asked.spec)
        placements = found.placements | dict.fromkeys(outer, UVA)
        item = self._named("", replace(found, placements=placements, kv_blocks=blocks))
        experts = item.plan.experts
        assert experts is not None
        least, most = min(experts.slots), max(experts.slots)
        words = f"experts cached, {least}{f' to {most}' if most > least else ''} slots a layer"
        label = label_of([], outer, CACHED, 0, "")
        return replace(item, label="; ".join(filter(None, (label, words))))

    def _room(self, blocks: int) -> int:
        """Bytes on the GPU with which there are so many blocks, and stages where they are few."""
        kv, tier = self.resident.kv, self._tier
        if not tier.reach or blocks >= self._sequence_blocks:
            return kv.room(blocks)
        room = least = kv.room(blocks, tier.reach)
        for _ in range(4):  # buffers are a small share of the room that they are part of
            room = least + tier.in_place_bytes(room)
        return room + 2 * tier.layer_bytes

    def _choose_layers(self, need: int, name: str, slots: int) -> list[tuple[str, ...]] | None:
        """Return what is taken of each layer so that `need` bytes are freed beside the slots."""
        none: list[tuple[str, ...]] = [()] * self._layers
        if need <= 0:
            return none
        wholes = [GRANULES[name] or tuple(each) for each in self._tensors]
        having = [at for at, each in enumerate(self._tensors) if each.keys() >= {*wholes[at]}]
        if not having:
            return None
        size = min(sum(self._tensors[at][item] for item in wholes[at]) for at in having)
        count = slots + math.ceil(need / size)
        if count > len(having):
            # A queue takes as much room as there is.
            is_queue = self._objective == "throughput"
            return wholes if is_queue and not GRANULES[name] else None
        taken = none
        places = [having[at] for at in spread_layers(len(having), count)]
        for layer in places:
            taken[layer] = wholes[layer]
        last = places[-1]
        taken[last] = self._part(last, wholes[last], need - (count - 1 - slots) * size)
        return taken

    def _part(self, layer: int, whole: tuple[str, ...], least: int) -> tuple[str, ...]:
        """Return the fewest bytes of a layer's products that reach `least`, or the whole."""
        products = [item for item in whole if item in PRODUCTS]
        counts = range(1, len(products) + 1)
        options = [items for count in counts for items in combinations(products, count)]
        tensors = self._tensors[layer]
        sizes = {items: sum(tensors[item] for item in items) for items in options}
        enough = [items for items in options if sizes[items] >= least]
        part = min(enough, key=sizes.__getitem__, default=whole)
        return whole if len(part) == len(products) else part

    def _assignment(
        self, taken: list[tuple[str, ...]], outer: tuple[str, ...], kind: Residence, lookahead: int
    ) -> Assignment:
        facts = self._asked.facts
        placements = self.resident.placements | dict.fromkeys(outer, UVA)
        for layer, items in enumerate(taken):
            for item in items:
                placements[f"model.layers.{layer}.{item}"] = kind
        notes = []
        if not facts.can_pin:
            notes.append(
                f"fallback: copying ahead and reading in place are not possible ({facts.reason}), "
                "so offloaded layers are copied on demand from pageable host memory."
            )
        elif not facts.can_uva:
            notes.append(
                f"fallback: reading in place is not possible ({facts.reason}), so everything but "
                "the layers stays in GPU memory."
            )
        return Assignment(placements, lookahead, notes)


def _prefill_graph_bytes(asked: Asked, plan: MemoryPlan) -> int:
    """GPU bytes that a plan without offloaded layers takes to capture steps with prompts."""
    sizes = plan.graph_sizes if plan.use_graphs else ()
    size, kind = DTYPE_BYTES[asked.dtype], asked.facts.kind
    with_prompts, without = (
        sum(captured_bytes(asked.spec, kind, sizes, prefills, size))
        for prefills in (plan.captured_prefills, ())
    )
    return with_prompts - without
