"""What a model needs on every card of conf/gpu, where no GPU is here and no card is chosen."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from catalogue.cards import card_names, card_sheet
from catalogue.terminal import columns
from engine.asked.config import EngineConfig, GPUConfig
from engine.lines import labelled, wrapped
from engine.plan.advise import DEFAULT_TOKENS, LOSSLESS_WORDS, lossless_resident
from engine.plan.answer import WORTH, Way, rate
from engine.plan.cards import DeviceFacts
from engine.plan.memory import MemoryPlan
from engine.plan.planner import asked_of, placed, plan_if_fits
from engine.plan.resolve import BFLOAT16_CAPABILITY
from engine.sealed import GIB
from harness.forecast.rows import Forecast

AUTO_WORDS: Final = "offload=auto"
HEADER: Final = ("card", "GiB", "as set", "fastest", "tok/s", "GiB in host memory")
LEGEND: Final = (
    "as set: tok/s with the settings as given; no: the card is too small. fastest: as set, "
    f"lossless ({LOSSLESS_WORDS}, same tokens), or where neither fits auto (offload=auto)."
)
_SHORT: Final = {(): "as set", (LOSSLESS_WORDS,): "lossless", (AUTO_WORDS,): "auto"}


@dataclass(frozen=True)
class OnCard:
    """How a model fits a card."""

    gpu: GPUConfig
    as_set: Way | None
    """None: the settings as given do not fit."""
    best: Way | None
    """The fastest of those that are looked at; None: it does not fit."""


def card_lines(found: Forecast) -> list[str]:
    """Return what is said where no GPU is here and no card is chosen, as lines of text."""
    text = (
        "No GPU is here and no card is chosen. gpu=NAME plans one of those below, in the dtype of "
        "the checkpoint; gpu=cpu plans this CPU."
    )
    lines = ["", *wrapped(text), *labelled("Here", _cpu(found))]
    most = found.config.gpu.memory_gib
    if most is not None:
        part = f"gpu.memory_gib={most:g} uses no more than that of each card; with gpu.link_gb_s it"
        lines += labelled("Note", f"{part} describes a card of its own.")
    length = found.config.engine.max_model_len or found.spec.max_position_embeddings
    least = f"KV cache for at least {min(length, DEFAULT_TOKENS):,} tokens"
    on_cards = dict(ways_by_card(found))
    if all(each.best is None for each in on_cards.values()):
        part = "any card of conf/gpu" if most is None else f"{most:g} GiB of any card of conf/gpu"
        fewer = "A smaller engine.max_model_len needs less."
        return [*lines, *wrapped(f"It does not fit {part} with {least}. {fewer}")]
    lines += columns([HEADER, *map(_row, on_cards.items())], left={0, 3})
    end = f"tok/s of one sequence, with {least}; predicted from data sheets."
    return [*lines, *wrapped(f"{LEGEND} {end}")]


def _cpu(found: Forecast) -> str:
    """Say what a run of the same settings does here."""
    return f"a run lets the CPU stand in for a GPU: {found.lines[0]}"


def _row(item: tuple[str, OnCard]) -> Sequence[str]:
    name, found = item
    way, gib = found.best, f"{found.gpu.memory_gib or 0:.2f}"
    as_set = "no" if found.as_set is None else rate(found.as_set.tokens_s())
    if way is None:
        return (name, gib, as_set, "does not fit", "-", "-")
    moved = f"{way.moved_bytes / GIB:.2f}" if way.moved_bytes else "none"
    return (name, gib, as_set, _SHORT[tuple(way.settings)], rate(way.tokens_s()), moved)


def ways_by_card(found: Forecast) -> Iterator[tuple[str, OnCard]]:
    """Yield each card, smallest first, and how the model fits it: as set, lossless, or chosen.

    Cards of one size, to a GiB, share the placement that is chosen for the one with the least
    memory, and have their own rates.
    """
    chosen: dict[tuple[int | None, bool], MemoryPlan | None] = {}
    cards = {name: _gpu(found, name) for name in card_names()}
    for name, gpu in cards.items():
        base = replace(found.base, gpu=gpu, measured_rates={})
        as_set, coded = _whole(base, found)
        way = _faster(as_set, coded)
        if way is None:
            key = _size(gpu)
            if key not in chosen:
                alike = (each for each in cards.values() if _size(each) == key)
                least = min(alike, key=lambda each: each.memory_gib or 0)
                chosen[key] = _plan(replace(base, gpu=least).choosing(), found)
            plan = chosen[key]
            if plan is not None:
                asked = asked_of(base, found.spec, DeviceFacts.of_card(gpu))
                way = Way(settings=(AUTO_WORDS,), asked=asked, plan=plan)
        yield name, OnCard(gpu=gpu, as_set=as_set, best=way)


def _gpu(found: Forecast, name: str) -> GPUConfig:
    """Return a card, no more of it than gpu.memory_gib, beside gpu.host_gib."""
    asked, sheet = found.config.gpu, card_sheet(name)
    most = min(sheet["memory_gib"], asked.memory_gib or sheet["memory_gib"])
    return GPUConfig(**{**sheet, "memory_gib": most, "host_gib": asked.host_gib})


def _size(gpu: GPUConfig) -> tuple[int, bool]:
    version = gpu.compute_capability or 0.0
    return round(gpu.memory_gib or 0), version >= BFLOAT16_CAPABILITY[0]


def _plan(config: EngineConfig, found: Forecast) -> MemoryPlan | None:
    return plan_if_fits(config, found.spec, DeviceFacts.of_card(config.gpu))


def _whole(base: EngineConfig, found: Forecast) -> tuple[Way | None, Way | None]:
    """Return the settings as they are, and everything on the card in codes; None: no room."""
    asked = asked_of(base, found.spec, DeviceFacts.of_card(base.gpu))
    if base.planner.choose or base.weight_format == "auto":
        plan, coded = _plan(base, found), None
    else:
        plan, coded = placed(asked), lossless_resident(asked)
    return (
        None if plan is None else Way(settings=(), asked=asked, plan=plan),
        None if coded is None else Way(settings=(LOSSLESS_WORDS,), asked=asked, plan=coded),
    )


def _faster(as_set: Way | None, coded: Way | None) -> Way | None:
    """Return lossless weights where the settings as they are do not fit, or are slower."""
    if as_set is None or coded is None:
        return as_set or coded
    return coded if coded.tokens_s() > WORTH * as_set.tokens_s() else as_set
