"""The page docs/choosing.md: what every model of conf/ needs on cards of usual sizes."""

import functools
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from catalogue.cards import card_sheet
from catalogue.models import entries, named
from engine.asked.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig, PlannerConfig
from engine.asked.offload import OffloadConfig
from engine.model.spec import ModelSpec
from engine.plan.advise import lossless_resident, off_gpu_bytes, short_step_s
from engine.plan.cards import DeviceFacts
from engine.plan.memory import Asked, MemoryPlan, build_plan, plan_fits
from engine.plan.planner import asked_of, plan_if_fits
from engine.plan.policy import assign_resident
from engine.sealed import GIB
from harness.config.compose import Composer
from harness.config.schema import RunConfig
from reports.record.text import number

SIZES_GB: Final = {
    8: "rtx3060_12gb",
    10: "rtx3060_12gb",
    12: "rtx3060_12gb",
    16: "rtx4080_16gb",
    24: "rtx4090_24gb",
    48: "rtx4090_24gb",
    80: "a100_80gb",
}
"""Memory in GiB -> the card whose rates are taken."""
LENGTH: Final = 4096
SEQUENCES: Final = 2
"""Sequences of that length that must have room."""
PUBLISHED_16_GB: Final = ((5e9, "none"), (9e9, "8 GB"), (1e15, "12 GB or more"))
"""The published advice for cpu_offload_gb on a card of 16 GB, by parameters below a limit."""
CARDS: Final = (
    *("a100_80gb", "h100_80gb", "h200_141gb", "l4_24gb"),
    *("rtx3060_12gb", "rtx4080_16gb", "rtx4090_24gb"),
)
"""Cards of conf/gpu that the page shows; `mode=plan` without gpu= shows all of them."""
ROUTING: Final = "synthetic:0.8"
"""Routing that is expected of experts: 0.8 of the picks repeat one of the last 8 tokens."""
EXPERT_SIZES_GB: Final = (12, 16, 24, 48)
EXPERT_WAYS: Final = ("none", "experts", "experts_in_place", "experts_prefetch")
"""Choices of conf/offload."""


def page() -> str:
    """Return the page, as `python -m harness --choosing` prints it."""
    names = model_names()
    mixtures = [name for name in names if spec_of(name).num_experts]
    others = [name for name in names if name not in mixtures]
    environment = Environment(  # noqa: S701  it is Markdown
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("choosing.md.j2").render(
        num_sequences=SEQUENCES,
        length=LENGTH,
        sizes_gb=list(SIZES_GB),
        cards=CARDS,
        routing=ROUTING,
        expert_sizes_gb=EXPERT_SIZES_GB,
        sizes=map(model_row, others),
        fits=map(card_row, others),
        experts=chain.from_iterable(map(expert_rows, mixtures)),
        advice=map(_advice_row, others),
    )


def model_names() -> list[str]:
    """Return the models of conf/ with sizes, the smallest first."""
    sized = [each for each in entries() if each.spec is not None]
    return [each.name for each in sorted(sized, key=lambda each: spec_of(each.name).num_parameters)]


def spec_of(name: str) -> ModelSpec:
    """Return the sizes of a model of conf/, in bfloat16."""
    spec = named(name).spec
    assert spec is not None
    return replace(spec, dtype="bfloat16")


@functools.cache
def _way(name: str) -> RunConfig:
    """Return a configuration with a choice of conf/offload for experts."""
    return Composer().plan(["+model=olmoe_1b_7b", f"offload={name}"]).points[0].config


def _card(name: str, **changes: Any) -> GPUConfig:
    return GPUConfig(**{**card_sheet(name), **changes})


def _config(
    spec: ModelSpec,
    gpu: GPUConfig,
    planner: PlannerConfig,
    offload: OffloadConfig | None = None,
) -> EngineConfig:
    routing = ROUTING if spec.num_experts else None
    return EngineConfig(
        model=ModelConfig(name="model", load_format="dummy", spec=spec, routing=routing),
        gpu=gpu,
        engine=EngineSettings(max_model_len=min(LENGTH, spec.max_position_embeddings)),
        offload=offload or OffloadConfig(),
        planner=planner,
    )


def _planned(
    spec: ModelSpec,
    gpu: GPUConfig,
    planner: PlannerConfig,
    offload: OffloadConfig | None = None,
) -> MemoryPlan | None:
    config = _config(spec, gpu, planner, offload)
    return plan_if_fits(config, spec, DeviceFacts.of_card(gpu))


def _plan(spec: ModelSpec, size_gb: int, planner: PlannerConfig) -> MemoryPlan | None:
    return _planned(spec, _card(SIZES_GB[size_gb], memory_gib=float(size_gb)), planner)


def _auto(spec: ModelSpec, size_gb: int) -> MemoryPlan | None:
    tokens = SEQUENCES * min(LENGTH, spec.max_position_embeddings)
    return _plan(spec, size_gb, PlannerConfig(choose=True, kv_tokens=tokens))


def _host(plan: MemoryPlan) -> str:
    num_bytes = off_gpu_bytes(plan)
    return f"{num_bytes / GIB:.1f}" if num_bytes else "none"


def _tokens_s(plan: MemoryPlan) -> str:
    return number((plan.predicted or {})["decode_tokens_s"])


def _figures(plan: MemoryPlan) -> list[str]:
    lossless = ["lossless"] if plan.formats.has_codes else []
    return [_host(plan), _tokens_s(plan), *lossless]


def model_row(name: str) -> list[str]:
    """Return a model's row of the first table."""
    spec = spec_of(name)
    cells = [name, f"{spec.weight_bytes() / GIB:.1f}"]
    for size in SIZES_GB:
        plan = _auto(spec, size)
        cells.append("no" if plan is None else ", ".join(_figures(plan)))
    return cells


def card_row(name: str) -> list[str]:
    """Return a model's row of the table of cards."""
    spec = spec_of(name)
    return [name, *(_where(spec, _card(card)) for card in CARDS)]


def _where(spec: ModelSpec, gpu: GPUConfig) -> str:
    asked = asked_of(_config(spec, gpu, PlannerConfig()), spec, DeviceFacts.of_card(gpu))
    plain = build_plan(asked, assign_resident(spec))
    plans = {"plain": plain if plan_fits(plain) else None, "lossless": lossless_resident(asked)}
    found = [
        f"{word} {number(1 / short_step_s(plan, asked))}"
        for word, plan in plans.items()
        if plan is not None
    ]
    chosen = None if found else _planned(spec, gpu, PlannerConfig(choose=True))
    if chosen is not None:
        word = "" if chosen.formats.has_codes else "plain, "
        found = [f"{word}{_host(chosen)} GiB off {_tokens_s(chosen)}"]
    if plans["plain"] is None and not spec.quantization:
        found += _rounded(asked)
    return ", ".join(found) or "no"


def _rounded(asked: Asked) -> list[str]:
    """Return the rate of everything on the GPU in 4 bits, where that fits."""
    model = replace(asked.config.model, quantize="int4")
    rounded = replace(asked, config=replace(asked.config, model=model))
    plan = build_plan(rounded, assign_resident(asked.spec))
    return [f"4-bit {number(1 / short_step_s(plan, rounded))}"] if plan_fits(plan) else []


def expert_rows(name: str) -> list[list[str]]:
    """Return the rows of a model with experts in their table, one a way."""
    spec, rows = spec_of(name), []
    for way in EXPERT_WAYS:
        asked = _way(way)
        cells = [name, way]
        for size in EXPERT_SIZES_GB:
            gpu = _card(SIZES_GB[size], memory_gib=float(size))
            plan = _planned(spec, gpu, asked.planner, asked.offload)
            cells.append("no" if plan is None else _with_hits(plan))
        rows.append(cells)
    return rows


def _with_hits(plan: MemoryPlan) -> str:
    found = plan.to_dict().get("experts") or {}
    share = found.get("hit_share")
    return _tokens_s(plan) + ("" if share is None else f" ({100 * share:.0f} %)")


def _advice_row(name: str) -> list[str]:
    spec = spec_of(name)
    advice = next(text for limit, text in PUBLISHED_16_GB if spec.num_parameters < limit)
    least = _plan(spec, 16, PlannerConfig(auto_fields=["cpu_offload_gb"]))
    chosen = _auto(spec, 16)
    cells = [name, f"{spec.num_parameters / 1e9:.2f} B", advice]
    for plan in (least, chosen):
        cells += ["no", "-"] if plan is None else [_host(plan), ", ".join(_figures(plan)[1:])]
    return cells
