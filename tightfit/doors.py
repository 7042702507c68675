"""LLM and plan, whose models are names of the catalogue, folders, or a model hub's OWNER/NAME."""

from dataclasses import replace
from typing import Any

from catalogue.cards import card_names, card_sheet, unknown_card
from catalogue.files import note_folders
from catalogue.models import describe, find, located
from engine import llm as engine_llm
from engine.asked.config import GPUConfig, ModelConfig
from engine.asked.keywords import config_from_keywords
from engine.errors import ConfigError
from engine.plan.memory import DeviceFacts, MemoryPlan
from engine.plan.planner import plan_memory


class LLM(engine_llm.LLM):
    """`engine.LLM` that takes names too; a model that is not on this machine is fetched."""

    def __init__(self, model: str, **keywords: Any) -> None:
        """Build an engine.

        Args:
            model: a folder with config.json and weights, a name of conf/model, or OWNER/NAME of a
                model hub.
            **keywords: those of `engine.LLM`.

        Raises:
            ConfigError: there is no such model, or a keyword is refused.
            ModelUnavailableError: its weights are not to be had.
            CapacityError: it does not fit; the message has the figures.
        """
        super().__init__(_located(model, keywords), **_noting(keywords))


def plan(model: str, gpu: str | None = None, **keywords: Any) -> MemoryPlan:
    """Plan an engine without building it: what lies where, every other byte, predicted times.

    Args:
        model: as for LLM; its weights need not be here.
        gpu: a card of conf/gpu, which need not be here; None: this machine's device.
        **keywords: those of `engine.LLM`.

    Raises:
        CapacityError: it does not fit; the message and the error's plan have the figures.
        ConfigError: there is no such model or card, or a keyword is refused.
    """
    entry = find(model)
    spec = describe(entry).spec
    load_format = keywords.get("load_format", entry.load_format)
    # Where files will be read from is of no account here, but that they will be.
    path = entry.path or (None if load_format == "dummy" else ".")
    sizes = ModelConfig(
        name=entry.name,
        path=path,
        load_format=load_format,
        keep_lossless=entry.keep_lossless,
        spec=spec,
    )
    config = config_from_keywords(sizes, _noting(keywords))
    if gpu is not None:
        config = replace(config, gpu=_card(gpu, config.gpu))
    if gpu is not None and config.gpu.memory_gib is not None and config.gpu.device != "cpu":
        return plan_memory(config, spec, DeviceFacts.of_card(config.gpu))
    return engine_llm.LLM.plan_for(config)


def _noting(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return keywords with the folders in which loads note what they find out, and keep weights."""
    return {**note_folders(), **keywords}


def _located(model: str, keywords: dict[str, Any]) -> ModelConfig:
    """Return the model with its weights on this machine, fetched now when absent."""
    return ModelConfig(**located(model, keywords.get("load_format")))


def _card(name: str, asked: GPUConfig) -> GPUConfig:
    """Return a card of conf/gpu; what the keywords ask of it wins."""
    known = ["auto", "cpu", *card_names()]
    if name not in known:
        raise ConfigError(unknown_card(name, known))
    sheet = card_sheet(name)
    default = GPUConfig()
    typed = {
        key: value for key, value in vars(asked).items() if value != getattr(default, key, value)
    }
    return GPUConfig(**(sheet | typed))
