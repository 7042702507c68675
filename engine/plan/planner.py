"""plan_memory: from what was asked and what a machine has to a MemoryPlan, or a refusal.

Pure arithmetic: nothing is allocated, no torch is imported.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from engine.asked.config import EngineConfig
from engine.errors import CapacityError, ConfigError
from engine.model.formats import Format
from engine.model.loading import weight_formats
from engine.model.routing import check_experts
from engine.model.spec import ModelSpec
from engine.plan.advise import (
    LOSSLESS_WORDS,
    choose_fields,
    gib,
    lossless_resident,
    no_offload,
    room_beyond,
    short_step_s,
    spread_that_fits,
    waste_notes,
    with_default_length,
    with_least_swap_space,
)
from engine.plan.answer import Answer, Planned, ShortageError, answer_of, explained
from engine.plan.cards import DeviceFacts, resolve_dtype, resolve_max_model_len
from engine.plan.choose import NOTHING, Chooser
from engine.plan.host_times import predict_host_kv, with_rates
from engine.plan.memory import Asked, MemoryPlan, build_plan, plan_fits, takes_swap_space
from engine.plan.policy import (
    Assignment,
    assign,
    assign_layers_on_demand,
    assign_resident,
    assign_spread,
)
from engine.plan.queue import QUEUE_REQUESTS, queue_of, queue_s
from engine.plan.rates import Rates
from engine.plan.times import (
    PREFILL_TOKENS,
    decode_step_s,
    load_s,
    prefill_s,
    shape_of,
)
from engine.plan.weight_format import (
    CODES_WORTH,
    LOSSLESS,
    MIXED,
    NOTHING_KNOWN,
    PLAIN,
    best_mix,
    better,
    layers_alone,
    stored,
    ways,
)
from engine.sealed import GIB


def predict(plan: MemoryPlan, spec: ModelSpec, rates: Rates) -> dict[str, Any]:
    """Return the predicted times of a plan as plain data, with the rates that they follow from."""
    shape = shape_of(plan, spec, rates)
    context = shape.context_tokens
    full = plan.kv.concurrency(context)
    one_s, full_s = (decode_step_s(shape, batch, context) for batch in (1, full))
    prefill = min(PREFILL_TOKENS, plan.max_model_len)
    prompt, output = queue_of(plan.max_model_len)
    prefill_time_s = prefill_s(shape, prefill)
    queue_time_s = queue_s(shape, QUEUE_REQUESTS, prompt, output)
    return {
        "context_tokens": context,
        "decode_step_ms": one_s * 1e3,
        "decode_tokens_s": 1 / one_s,
        "full_batch": full,
        "decode_step_full_ms": full_s * 1e3,
        "decode_tokens_full_s": full / full_s,
        "long_context_tokens": plan.max_model_len,
        "decode_step_long_ms": decode_step_s(shape, 1, plan.max_model_len) * 1e3,
        "prefill_tokens": prefill,
        "prefill_ms": prefill_time_s * 1e3,
        "ttft_ms": prefill_s(shape, prompt) * 1e3,
        "ttft_prompt_tokens": prompt,
        "queue": {
            "requests": QUEUE_REQUESTS,
            "batch": min(QUEUE_REQUESTS, plan.kv.concurrency(prompt + output / 2)),
            "prompt_tokens": prompt,
            "output_tokens": output,
            "total_s": queue_time_s,
            "output_tokens_s": QUEUE_REQUESTS * output / queue_time_s,
        },
        "load_s": load_s(shape),
        "bytes_per_step": plan.bytes_per_step(),
        "rates": asdict(rates),
    }


def plan_memory(
    config: EngineConfig,
    spec: ModelSpec,
    facts: DeviceFacts,
    *,
    reference: bool = False,
    tensor_formats: Mapping[str, Format] | None = None,
    unpackable: Mapping[str, str] = NOTHING_KNOWN,
    explain: bool = True,
) -> MemoryPlan:
    """Return a plan of every byte that fits, with its predicted times.

    Args:
        config: What was asked.
        spec: Sizes of the model.
        facts: What the machine has.
        reference: Ignore the offload settings and copy every layer on demand, eagerly, plain.
        tensor_formats: Formats of tensors that are not kept in that of the dtype, by name; None:
            as engine.weight_format says.
        unpackable: Why tensors of this checkpoint cannot be kept in codes, by name.
        explain: Say what would fit where it does not, for which other settings are planned, and
            list the candidates of a choice.

    Raises:
        ConfigError: The settings contradict each other or would have no effect.
        CapacityError: It does not fit; the message says what would.
    """
    with _explained(explain=explain):
        if tensor_formats is None:
            [plan] = _plans(
                config, spec, facts, 1, unpackable, reference=reference, is_listed=explain
            )
            return plan
        asked, notes = _ask(config, spec, facts, tensor_formats, reference=reference)
        asked.formats.check(spec.tensors())
        return _finished(_plan(asked), asked, notes)


@contextmanager
def _explained(*, explain: bool = True) -> Iterator[None]:
    """Say what would fit where something inside does not."""
    try:
        yield
    except ShortageError as error:
        if not explain:
            raise
        raise explained(error, _planned(error.asked)) from None


def plan_again(
    plan: MemoryPlan,
    config: EngineConfig,
    spec: ModelSpec,
    facts: DeviceFacts,
    tensor_formats: Mapping[str, Format],
    unpackable: Mapping[str, str] = NOTHING_KNOWN,
    *,
    reference: bool = False,
) -> MemoryPlan:
    """Return a plan with the same placements and limits, on a machine or in formats that changed.

    Args:
        plan: The plan as it was.
        config: What was asked.
        spec: Sizes of the model.
        facts: What the machine has.
        tensor_formats: Formats as for plan_memory.
        unpackable: Reasons as for plan_memory.
        reference: Whether all is copied on demand, as for plan_memory.

    Raises:
        CapacityError: It does not fit any more.
    """
    names = ("max_model_len", "max_num_seqs")
    limits = {name: getattr(plan, name) for name in names}
    planner = replace(config.planner, auto_fields=[])
    config = replace(config, engine=replace(config.engine, **limits), planner=planner)
    length, dtype = plan.max_model_len, plan.dtype
    asked = Asked(config, spec, facts, dtype, length, reference, tensor_formats, unpackable)
    with _explained():
        again = _finished(_fit(asked, replace(_assigned(plan, asked), notes=[])), asked, [])
    record = plan.weight_format and plan.weight_format | stored(asked)
    notes = tuple(dict.fromkeys((*plan.notes, *again.notes)))
    return replace(again, notes=notes, choice=plan.choice, weight_format=record)


def plan_candidates(
    config: EngineConfig,
    spec: ModelSpec,
    facts: DeviceFacts,
    count: int,
    unpackable: Mapping[str, str] = NOTHING_KNOWN,
) -> list[MemoryPlan]:
    """Plan the best `count` placements that are chosen, the best predicted first.

    Fewer where fewer fit, and one where everything stays on the GPU; all in one weight format.

    Raises:
        ConfigError: The settings contradict each other or would have no effect.
        CapacityError: Nothing fits; the message says what would.
    """
    with _explained():
        return _plans(config, spec, facts, count, unpackable, reference=False)


def _plans(
    config: EngineConfig,
    spec: ModelSpec,
    facts: DeviceFacts,
    count: int,
    unpackable: Mapping[str, str],
    *,
    reference: bool,
    is_listed: bool = True,
) -> list[MemoryPlan]:
    """Plan in each weight format that is asked for, and keep the better one's best `count`."""
    word = PLAIN if reference else config.weight_format
    dtype = resolve_dtype(config, spec, facts.kind, facts.compute_capability)
    found: dict[str, tuple[MemoryPlan, Asked, list[str]]] = {}
    refused: CapacityError | None = None
    for name, formats in ways(word, spec, dtype, facts, unpackable).items():
        asked, notes = _ask(
            config, spec, facts, formats, reference=reference, unpackable=unpackable
        )
        try:
            plan = _plan(asked, is_listed=is_listed)
            found[name] = _finished(plan, asked, notes), asked, notes
        except CapacityError as error:
            refused = error
        if word == "auto" and name == LOSSLESS:
            mixed = _mixed_as_chosen if config.planner.choose else _mixed_as_set
            mix = mixed({name: plan for name, (plan, _, _) in found.items()}, asked)
            if mix is not None:
                found[MIXED] = _finished(mix[0], mix[1], notes), mix[1], notes
    if not found:
        assert refused is not None
        raise refused
    name, why = better({name: plan for name, (plan, _, _) in found.items()}, config)
    first, asked, notes = found[name]
    chooser = Chooser(asked) if count > 1 else None
    ranked = chooser.ranked() if chooser and not chooser.moves_nothing else ()
    others = ((plan, rest) for plan, rest in ranked if plan.placements != first.placements)
    chosen = [
        replace(plan, choice=chooser.record(rest))
        for plan, rest in islice(others, count - 1)
        if chooser
    ]
    plans = [first, *(_finished(plan, asked, notes) for plan in chosen)]
    if word == PLAIN:
        return plans
    record = {"asked": word, "chosen": name, "why": why} | stored(asked)
    return [replace(plan, weight_format=record) for plan in plans]


def _mixed_as_set(plans: Mapping[str, MemoryPlan], asked: Asked) -> tuple[MemoryPlan, Asked] | None:
    """Return a plan with the best mix of formats and what it was made from; None: no mix fits.

    Args:
        plans: Plans that fit, plain and with all in codes that gain.
        asked: What the latter was made from.
    """
    mix, coded = layers_alone(asked), plans.get(LOSSLESS)
    if coded is not None:
        mix = best_mix(asked, _assigned(coded, asked), Chooser(asked).mixed_s)
    try:
        return None if mix is None else (_plan(mix), mix)
    except CapacityError:
        return None


def _mixed_as_chosen(
    plans: Mapping[str, MemoryPlan], asked: Asked
) -> tuple[MemoryPlan, Asked] | None:
    """Return the same where placements are chosen.

    Mixes are tried where no layer leaves the GPU, and in the placements of plain weights; else the
    mix that takes the least room has its own.
    """
    chooser, plain = Chooser(asked), plans.get(PLAIN)
    tried = chooser.without_moves()
    if plain is not None and plain.offloaded_layers:
        tried[(plain.choice or {})["chosen"]] = _assigned(plain, asked)
    found = [
        (label, mix, assignment)
        for label, assignment in tried.items()
        if (mix := best_mix(asked, assignment, chooser.mixed_s)) is not None
    ]
    least = None if chooser.resident_fits else layers_alone(asked)
    best = None if least is None else Chooser(least).best()
    if least is not None and best is not None:
        plan, candidates = best
        label = candidates[0].label if candidates else NOTHING
        found.append((label, least, _assigned(plan, least)))
    if not found:
        return None
    label, mix, assignment = min(found, key=lambda item: chooser.mixed_s(*item[1:]))
    choice = chooser.mixed_record(label, mix, assignment)
    plan = build_plan(mix, assignment)
    notes = dict.fromkeys((*plan.notes, *waste_notes(plan, mix)))
    return replace(plan, choice=choice, notes=tuple(notes)), mix


def _assigned(plan: MemoryPlan, asked: Asked) -> Assignment:
    """Return the placements of a plan for one in other formats, with what was noted of them.

    Banks of experts get the room that the same KV blocks leave, unless their slots are set.
    """
    notes = [note for note in plan.notes if note.startswith("fallback")]
    found = replace(plan.assignment, notes=notes, kv_blocks=plan.num_gpu_blocks)
    is_set = asked.config.offload.experts.expert_slots is not None
    return found if is_set else replace(found, bank_slots=())


def answer(
    config: EngineConfig,
    spec: ModelSpec,
    facts: DeviceFacts,
    unpackable: Mapping[str, str] = NOTHING_KNOWN,
) -> Answer:
    """Return what is said of a configuration that fits: how fast it is, and what is faster.

    Raises:
        ConfigError: The settings contradict each other or would have no effect.
        CapacityError: It does not fit; the message says what would, in the same form.
    """
    plan = plan_memory(config, spec, facts, unpackable=unpackable)
    asked = asked_of(config, spec, facts, unpackable)
    return answer_of(asked, plan, _planned(asked))


def _planned(asked: Asked) -> Planned:
    """Return what plans other configurations of the same model on the same machine."""
    return lambda config: plan_if_fits(config, asked.spec, asked.facts, asked.unpackable)


def plan_if_fits(
    config: EngineConfig,
    spec: ModelSpec,
    facts: DeviceFacts,
    unpackable: Mapping[str, str] = NOTHING_KNOWN,
) -> MemoryPlan | None:
    """Return the plan of plan_memory; None: it does not fit, or the settings do not agree."""
    try:
        return plan_memory(config, spec, facts, unpackable=unpackable, explain=False)
    except (CapacityError, ConfigError):
        return None


def asked_of(
    config: EngineConfig,
    spec: ModelSpec,
    facts: DeviceFacts,
    unpackable: Mapping[str, str] = NOTHING_KNOWN,
) -> Asked:
    """Return what a plan is made from, in the weight format that takes the least room.

    Raises:
        ConfigError: The settings contradict each other or would have no effect.
    """
    dtype = resolve_dtype(config, spec, facts.kind, facts.compute_capability)
    *_, formats = ways(config.weight_format, spec, dtype, facts, unpackable).values()
    return _ask(config, spec, facts, formats, reference=False, unpackable=unpackable)[0]


def placed(asked: Asked) -> MemoryPlan | None:
    """Return where the weights go as it is set, in one weight format; None: it does not fit.

    The plan has no predicted times and no notes.
    """
    try:
        if takes_swap_space(asked):
            return _plan_with_swap_space(asked, [])
        return _fit(asked, assign(asked.spec, asked.config.offload, asked.formats))
    except (CapacityError, ConfigError):
        return None


def _ask(
    config: EngineConfig,
    spec: ModelSpec,
    facts: DeviceFacts,
    tensor_formats: Mapping[str, Format],
    *,
    reference: bool,
    unpackable: Mapping[str, str] = NOTHING_KNOWN,
) -> tuple[Asked, list[str]]:
    """Resolve what is asked; return what to note beside it."""
    if config.gpu.host_gib is not None:
        most = int(config.gpu.host_gib * GIB)
        facts = replace(facts, host_available_bytes=min(most, facts.host_available_bytes))
    check_experts(spec, config.model.routing, is_recorded=config.record_routing)
    dtype = resolve_dtype(config, spec, facts.kind, facts.compute_capability)
    weight_formats(config.model.quantize, spec, dtype)  # refuses what is quantised already
    length = resolve_max_model_len(config, spec)
    asked = Asked(config, spec, facts, dtype, length, reference, tensor_formats, unpackable)
    chosen, notes = choose_fields(asked)
    length = resolve_max_model_len(chosen, spec)
    asked, cut = with_default_length(replace(asked, config=chosen, max_model_len=length))
    return asked, [*notes, *cut]


def _finished(plan: MemoryPlan, asked: Asked, notes: list[str]) -> MemoryPlan:
    rates = asked.rates
    if plan.host_kv is not None:
        plan = replace(plan, host_kv=with_rates(plan, asked.spec, rates))
    predicted = predict(plan, asked.spec, rates) | {
        "host_kv": predict_host_kv(plan, asked.spec, rates)
    }
    if orders := _orders(asked, plan):
        predicted |= {"orders": orders}
    longest = _longest_tokens(asked, plan)
    return replace(plan, notes=(*plan.notes, *notes), predicted=predicted, longest_tokens=longest)


def _orders(asked: Asked, plan: MemoryPlan) -> dict[str, Any]:
    """Return what reading in place costs where layers are taken in order, and experts first.

    Empty unless cpu_offload_gb takes tensors of a model with experts in either order.
    """
    config, uva = asked.config, asked.config.offload.uva
    is_uva = config.offload.backend == "uva" and not config.planner.choose and not asked.reference
    if plan.experts is None or not is_uva or uva.cpu_offload_params:
        return {}
    found = {}
    for name, is_first in (("layers", False), ("experts_first", True)):
        each = plan
        if is_first != uva.experts_first:
            offload = replace(config.offload, uva=replace(uva, experts_first=is_first))
            each = build_plan(asked, assign(asked.spec, offload, asked.formats))
        assert each.experts is not None
        found[name] = {
            "bytes_per_step": each.bytes_per_step() + each.experts.bytes_per_step(),
            "decode_step_ms": short_step_s(each, asked) * 1e3,
        }
    return found


def _longest_tokens(asked: Asked, plan: MemoryPlan) -> int:
    """Return the longest max_model_len with which the same placements fit.

    Other bytes than those of its blocks grow with it too, so it is not that of `plan`.
    """
    assignment, length = plan.assignment, plan.longest_tokens
    good, bad = asked.max_model_len, asked.spec.max_position_embeddings + 1
    while bad - good > 1:
        if not good < length < bad:
            length = (good + bad) // 2
        longer = build_plan(replace(asked, max_model_len=length), assignment)
        good, bad = (length, bad) if longer.holds_one else (good, length)
        if longer.longest_tokens == length:
            break
        length = longer.longest_tokens
    return good


def _plan(asked: Asked, *, is_listed: bool = True) -> MemoryPlan:
    config, spec = asked.config, asked.spec
    if asked.reference:
        return _fit(asked, assign_layers_on_demand(spec))
    backend = config.offload.backend
    assignment = assign(spec, config.offload, asked.formats)
    if config.planner.choose:
        plan = _plan_chosen(asked, is_listed=is_listed)
        backend = "auto"
    elif takes_swap_space(asked):
        plan = _plan_with_swap_space(asked, assignment.notes)
    else:
        plan = _fit(asked, assignment)
    is_asked = backend in {"uva", "prefetch"}
    needless = _not_needed(asked, plan) if is_asked else []
    in_codes = _not_needed_in_codes(asked, plan) if is_asked else []
    notes = needless or [*in_codes, *waste_notes(plan, asked)]
    return replace(plan, notes=(*plan.notes, *notes))


_SMALL = 0.01
"""Share of a step below which a predicted difference is none."""


def _not_needed(asked: Asked, plan: MemoryPlan) -> list[str]:
    """Say what an offload costs where everything would fit the GPU."""
    resident = build_plan(asked, assign_resident(asked.spec))
    if not plan_fits(resident):
        return []
    shapes = [shape_of(item, asked.spec, asked.rates) for item in (plan, resident)]
    with_ms, without_ms = (decode_step_s(shape, 1, 0) * 1e3 for shape in shapes)
    moved = plan.bytes_per_step()
    beyond = room_beyond(plan, asked)
    is_hidden = with_ms < (1 + _SMALL) * without_ms
    more = f"{with_ms - without_ms:.3g} ms more than {without_ms:.3g} ms at batch 1"
    cost = (
        f"A decode step takes about as long ({without_ms:.3g} ms at batch 1; predicted; "
        f"{asked.rates.source}), but moves {gib(moved)} over the link needlessly."
        if moved and is_hidden
        else f"Each decode step takes about {more} (predicted; {asked.rates.source}), as "
        f"{gib(moved)} are moved over the link needlessly."
        if moved
        else f"Slots hold all of the {len(plan.offloaded_layers)} offloaded layers, so nothing is "
        "streamed, and their copies in host memory are never read again."
    )
    return [
        f"offload={asked.config.offload.backend} is not needed: everything fits the GPU budget of "
        f"{plan.gpu_budget_bytes / GIB:.2f} GiB{beyond and f', and {beyond}'}. {cost} Set "
        f"{' '.join(no_offload(asked.config.kv))}."
    ]


def _not_needed_in_codes(asked: Asked, plan: MemoryPlan) -> list[str]:
    """Say what an offload costs where lossless weights fit without it and are faster."""
    coded = lossless_resident(asked)
    times_ms = [short_step_s(each, asked) * 1e3 for each in (plan, coded) if each is not None]
    if coded is None or times_ms[0] < CODES_WORTH * times_ms[1]:
        return []
    with_ms, without_ms = times_ms
    return [
        f"offload={asked.config.offload.backend} is not needed with {LOSSLESS_WORDS}: everything "
        f"fits the GPU budget of {plan.gpu_budget_bytes / GIB:.2f} GiB in 12-bit codes, and the "
        f"tokens are the same. Each decode step takes about {with_ms - without_ms:.3g} ms more "
        f"than {without_ms:.3g} ms at batch 1 (predicted; {asked.rates.source}). Set "
        f"{' '.join((*no_offload(asked.config.kv), LOSSLESS_WORDS))}."
    ]


def _plan_chosen(asked: Asked, *, is_listed: bool) -> MemoryPlan:
    """The placement that the planner chooses: everything on the GPU, or the best that fits."""
    chooser = Chooser(asked)
    wanted, most = asked.config.planner.kv_tokens or 0, chooser.most_kv_tokens
    if wanted > most:
        raise ConfigError(
            f"planner.kv_tokens: expected at most the {most} tokens that engine.max_num_seqs="
            f"{asked.config.engine.max_num_seqs} sequences of {asked.max_model_len} can use, got "
            f"{wanted}. Lower it, or raise engine.max_num_seqs."
        )
    found = chooser.best()
    if found is None:
        raise ShortageError(chooser.resident, asked)
    plan, candidates = found
    return replace(plan, choice=chooser.record(candidates, is_listed=is_listed))


def _plan_with_swap_space(asked: Asked, notes: list[str]) -> MemoryPlan:
    """Offload as few layers, spread evenly, as make it fit; the rest of swap_space is KV blocks."""
    layers, size = asked.spec.num_hidden_layers, asked.config.kv.swap_space
    count = spread_that_fits(asked)
    if count is None:
        plan = build_plan(asked, assign_resident(asked.spec))
        text = f"kv.swap_space={size:g} GiB"
        enough = with_least_swap_space(asked)
        if enough is None:
            text += " does not help: it does not fit with every layer in host memory either."
        else:
            count = spread_that_fits(enough) or 0
            moved = build_plan(enough, assign_spread(asked.spec, count))
            text += (
                f" is not enough. {enough.config.kv.swap_space:g} GiB would hold {count} of "
                f"{layers} layers ({moved.swap_weights_bytes / GIB:.3f} GiB) and KV blocks."
            )
        raise ShortageError(plan, asked, also=text)
    plan = build_plan(asked, assign_spread(asked.spec, count))
    _check_host(plan, asked)
    weights, blocks = plan.swap_weights_bytes, plan.kv.host_blocks
    note = (
        f"swap_space={size:g} GiB: {count} of {layers} layers ({weights / GIB:.2f} GiB) are in "
        f"host memory; the rest holds {blocks[0]} KV blocks ({plan.kv.num_bytes(blocks) / GIB:.2f} "
        "GiB)."
    )
    return replace(plan, notes=(*plan.notes, *notes, note))


def _fit(asked: Asked, assignment: Assignment) -> MemoryPlan:
    plan = build_plan(asked, assignment)
    if not plan.holds_one:
        raise ShortageError(plan, asked)
    _check_host(plan, asked)
    return plan


def _check_host(plan: MemoryPlan, asked: Asked) -> None:
    if plan.memlock_lack:
        raise CapacityError(plan.memlock_lack, plan.to_dict())
    if plan.host_total_bytes <= plan.host_limit_bytes:
        return
    raise ShortageError(plan, asked, is_host=True)
