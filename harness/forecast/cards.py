"""What a model needs on every card of conf/gpu, where no GPU is here and no card is chosen."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from catalogue.cards import card_names, card_sheet, size_gb
from engine.asked.config import EngineConfig, GPUConfig
from engine.asked.offload import OffloadConfig
from engine.errors import CapacityError, ConfigError
from engine.plan.advise import DEFAULT_TOKENS, LOSSLESS_WORDS, lossless_resident
from engine.plan.answer import WORTH, Way, labelled, rate, wrapped
from engine.plan.memory import BFLOAT16_CAPABILITY, DeviceFacts, MemoryPlan
from engine.plan.planner import asked_of, plan_memory
from engine.sealed import GIB
from harness.console import columns
from harness.forecast.rows import Forecast

HEADER = ("card", "GiB", "needs", "tok/s", "GiB in host memory")


def card_lines(found: Forecast) -> list[str]:
    """Return what is said where no GPU is here and no card is chosen, as lines of text."""
    text = (
        "No GPU is here and no card is chosen. gpu=NAME plans one of those below, in the dtype of "
        "the checkpoint; gpu=cpu plans this CPU."
    )
    rows = [HEADER, *map(_row, ways_by_card(found))]
    lines = ["", *wrapped(text), *labelled("Here", _cpu(found)), *columns(rows, left={0, 2})]
    length = found.config.engine.max_model_len or found.spec.max_position_embeddings
    least = f"room for {min(length, DEFAULT_TOKENS):,} tokens at least"
    return [*lines, *wrapped(f"tok/s of one sequence, with {least}; predicted from data sheets.")]


def _cpu(found: Forecast) -> str:
    """Say what a run of the same settings does here."""
    return f"a run lets the CPU stand in for a GPU: {found.lines[0]}"


def _row(item: tuple[str, Way | None]) -> Sequence[str]:
    name, way = item
    gib = f"{card_sheet(name)['memory_gib']:.2f}"
    if way is None:
        return (name, gib, "does not fit", "-", "-")
    moved = f"{way.moved_bytes / GIB:.2f}" if way.moved_bytes else "none"
    return (name, gib, " ".join(way.settings) or "nothing", rate(way.tokens_s()), moved)


def ways_by_card(found: Forecast) -> Iterator[tuple[str, Way | None]]:
    """Yield each card, smallest first, and how the model fits it: as set, lossless, or chosen.

    Cards of one size share the placement that is chosen for the one with the least memory, and
    have their own rates.
    """
    chosen: dict[tuple[int | None, bool], MemoryPlan | None] = {}
    cards = {name: _gpu(found, name) for name in card_names()}
    for name, gpu in cards.items():
        base = replace(found.base, gpu=gpu, measured_rates={})
        way = _as_set(base, found) or _lossless(base, found)
        if way is None:
            key = _size(name, gpu)
            if key not in chosen:
                alike = (each for other, each in cards.items() if _size(other, each) == key)
                least = min(alike, key=lambda each: each.memory_gib or 0)
                chosen[key] = _plan(_auto(replace(base, gpu=least)), found)
            plan = chosen[key]
            asked = asked_of(base, found.spec, DeviceFacts.of_card(gpu))
            if plan is not None:
                way = Way(settings=("offload=auto",), asked=asked, plan=plan)
        yield name, way


def _gpu(found: Forecast, name: str) -> GPUConfig:
    """Return a card, no more of it than gpu.memory_gib, beside gpu.host_gib."""
    asked, sheet = found.config.gpu, card_sheet(name)
    most = min(sheet["memory_gib"], asked.memory_gib or sheet["memory_gib"])
    return GPUConfig(**{**sheet, "memory_gib": most, "host_gib": asked.host_gib})


def _size(name: str, gpu: GPUConfig) -> tuple[int | None, bool]:
    version = gpu.compute_capability or 0.0
    return size_gb(name), version >= BFLOAT16_CAPABILITY[0]


def _auto(base: EngineConfig) -> EngineConfig:
    planner = replace(base.planner, choose=True, auto_fields=[])
    return replace(base, planner=planner, offload=OffloadConfig())


def _plan(config: EngineConfig, found: Forecast) -> MemoryPlan | None:
    try:
        return plan_memory(config, found.spec, DeviceFacts.of_card(config.gpu), explain=False)
    except (CapacityError, ConfigError):
        return None


def _as_set(base: EngineConfig, found: Forecast) -> Way | None:
    """Return the settings as they are, or lossless weights where those are faster."""
    plan = _plan(base, found)
    if plan is None:
        return None
    asked = asked_of(base, found.spec, DeviceFacts.of_card(base.gpu))
    way, coded = Way(settings=(), asked=asked, plan=plan), _lossless(base, found)
    is_faster = coded is not None and coded.tokens_s() > WORTH * way.tokens_s()
    return coded if is_faster else way


def _lossless(base: EngineConfig, found: Forecast) -> Way | None:
    """Return everything on the card in codes; None: no room, or no use."""
    asked = asked_of(base, found.spec, DeviceFacts.of_card(base.gpu))
    plan = None if base.planner.choose else lossless_resident(asked)
    return None if plan is None else Way(settings=(LOSSLESS_WORDS,), asked=asked, plan=plan)
