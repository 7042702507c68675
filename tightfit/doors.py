"""LLM and plan, whose models are names of the catalogue, folders, or a model hub's OWNER/NAME."""

from dataclasses import replace
from pathlib import Path
from typing import Final, Unpack, cast

from catalogue.cards import card_names, card_sheet, like_card
from catalogue.checkpoint import ModelUnavailableError
from catalogue.files import note_folders
from catalogue.models import describe, find, located
from engine import llm as engine_llm
from engine.asked.config import GPUConfig, ModelConfig
from engine.asked.keyword_types import Keywords
from engine.asked.keywords import (
    Door,
    as_keywords,
    config_from_keywords,
    in_keywords,
    takes_keywords,
)
from engine.device.machine import has_gpu
from engine.errors import CapacityError, ConfigError
from engine.plan.cards import DeviceFacts
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory
from reports.record.folders import load_run
from reports.record.judging import believed
from reports.record.record import RunRecord
from tightfit.runs import LATEST, find_run

OF_ONE_S_OWN: Final = (
    "A card that is not listed: leave gpu out and give gpu_memory_gib=12, link_gb_s=16 (hbm_gb_s, "
    "bf16_tflops and compute_capability too where they are known)."
)

PLAN_DOOR: Final = Door("plan", own=("gpu",))


class LLM(engine_llm.LLM):
    """`engine.LLM` that takes names too; a model that is not on this machine is fetched."""

    @takes_keywords
    def __init__(self, model: str, **keywords: Unpack[Keywords]) -> None:
        """Build an engine.

        Args:
            model: a folder with config.json and weights, a name of conf/model, or OWNER/NAME of a
                model hub.
            **keywords: those of `engine.LLM`.

        Raises:
            ConfigError: there is no such model, or a keyword is refused.
            ModelUnavailableError: its weights are absent and cannot be fetched.
            CapacityError: it does not fit; the message has the figures.
        """
        with in_keywords(ModelUnavailableError):
            here = _located(model, keywords)
        super().__init__(here, **_noting(keywords))


@takes_keywords
def plan(model: str, gpu: str | None = None, **keywords: Unpack[Keywords]) -> MemoryPlan:
    """Plan an engine without building it: what lies where, every other byte, predicted times.

    Args:
        model: as for LLM; its weights need not be here.
        gpu: a card of conf/gpu, which need not be here; None: this machine's device, or where it
            has no GPU the card that gpu_memory_gib and link_gb_s describe, else its CPU.
        **keywords: those of `engine.LLM`.

    Raises:
        CapacityError: it does not fit; the message and the error's plan have the figures.
        ConfigError: there is no such model or card, or a keyword is refused.
    """
    with in_keywords(ModelUnavailableError):
        found = _planned(model, gpu, keywords)
    return replace(found, notes=tuple(map(as_keywords, found.notes)))


def read_run(run: str | Path = LATEST) -> RunRecord:
    """Return the record of a run; one with a rate that no link can carry is not valid.

    Args:
        run: latest, an id or its beginning, ID/POINT for a point of a sweep, or a folder.

    Raises:
        ConfigError: there is no such run.
        RecordError: it has no record that can be read.
    """
    return believed(load_run(find_run(str(run))))


def _planned(model: str, gpu: str | None, keywords: Keywords) -> MemoryPlan:
    entry = find(_named(model))
    spec = describe(entry).spec
    loading = entry.loading() | {"load_format": keywords.get("load_format", entry.load_format)}
    sizes = ModelConfig.of_sizes(entry.name, spec, entry.path, **loading)
    config = config_from_keywords(sizes, _noting(keywords), door=PLAN_DOOR)
    if gpu is not None:
        config = replace(config, gpu=_card(gpu, config.gpu))
    asked = config.gpu
    if gpu is not None and asked.is_described and asked.memory_gib is not None:
        return plan_memory(config, spec, DeviceFacts.of_card(asked))
    try:
        return engine_llm.LLM.plan_for_sizes(config)
    except CapacityError as error:
        if asked.is_described or asked.device == "cpu" or has_gpu():
            raise
        note = (
            "This machine has no GPU, so this plan is for the CPU. gpu='rtx4080_16gb' plans for "
            "that card."
        )
        raise CapacityError(f"{error}\n{note}", error.plan) from None


def _named(model: object) -> str:
    """Return what names a model as text."""
    if not isinstance(model, str | Path):
        raise ConfigError(
            "model: expected a folder, a name that `tightfit models list` shows, or OWNER/NAME of "
            f"a model hub, got {model!r}."
        )
    return str(model)


def _noting(keywords: Keywords) -> Keywords:
    """Return keywords with the folders in which loads note what they find out, and keep weights."""
    return cast("Keywords", {**note_folders(), **keywords})


def _located(model: str, keywords: Keywords) -> ModelConfig:
    """Return the model with its weights on this machine, fetched now when absent."""
    return ModelConfig(**located(_named(model), keywords.get("load_format")))


def _card(name: str, asked: GPUConfig) -> GPUConfig:
    """Return a card of conf/gpu; what the keywords ask of it wins."""
    known = ["auto", "cpu", *card_names()]
    if name not in known:
        raise ConfigError(f"{like_card(str(name), known)} {OF_ONE_S_OWN}")
    return asked.on_card(card_sheet(name))
