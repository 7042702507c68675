"""The page docs/choosing.md: what every model of conf/ needs on cards of usual sizes."""

from typing import Any, Final

import yaml

from catalogue.cards import card_sheet
from catalogue.files import CONF
from engine.asked.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig, PlannerConfig
from engine.asked.offload import OffloadConfig
from engine.errors import CapacityError
from engine.model.spec import ModelSpec
from engine.plan.advise import lossless_resident, step_s
from engine.plan.memory import DeviceFacts, MemoryPlan, build_plan, plan_fits
from engine.plan.planner import asked_of, plan_memory
from engine.plan.policy import assign_resident
from engine.sealed import GIB
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


_HEAD: Final = f"""\
# What to offload

Written by `python -m harness --choosing`; every figure is
predicted from sizes and data sheets, none is measured. bfloat16, sequences of
{LENGTH} tokens (less where the model ends before), room for {SEQUENCES} of them,
0.9 of the card. Your own case: `tightfit plan +model=... gpu=...`.

## Every model on cards of usual sizes

Weights that `offload=auto` puts into host memory, GiB, and decode tokens/s at batch 1;
lossless where it keeps weights in 12-bit codes, restored to the bit (`engine.weight_format`).
The rates are those of an RTX 3060 up to 12 GB, RTX 4080 for 16, RTX 4090 for 24 and 48,
A100 for 80.

| model | weights | {" | ".join(f"{size} GB" for size in SIZES_GB)} |
{"|---" * (2 + len(SIZES_GB))}|
"""
_FITS: Final = f"""\

## What stays on the GPU of every card

plain: everything, as the checkpoint has it; lossless: everything, in codes
(`engine.weight_format=lossless`: the same tokens); each with its decode tokens/s at batch 1. Where
neither has room for one sequence: `offload=auto`, with the GiB of weights that it puts into host
memory, of lossless weights unless plain is said.

| model | {" | ".join(CARDS)} |
{"|---" * (1 + len(CARDS))}|
"""
_ADVICE: Final = """\

## Beside the published advice for 16 GB

The advice: `cpu_offload_gb` none for 1 to 4B, 8 GB for 7B, 12 GB or more from 12B on.
Least is the smallest `cpu_offload_gb` that leaves room for one sequence; auto as above.

| model | parameters | advice | least uva, GiB | tok/s | auto, GiB | tok/s |
|---|---|---|---|---|---|---|
"""
_DIFFERENCES: Final = """\

Where they differ:

- The advice names bytes for a size class; what is needed follows from the weights, the
  length and how many sequences must have room. Models of 8B and less with few KV heads
  need less than 8 GB, and every GiB more costs time in every step.
- uva reads layers in place, in order. auto first takes the embedding table, of which a
  step reads a row a token, then as few layers as are needed, copied ahead.
- auto makes room for as many tokens as are asked for (`planner.kv_tokens`), here for two
  sequences; the advice leaves what is over to the KV cache.

For many requests at once room for KV counts: `offload=auto planner.objective=throughput`
also moves weights of a model that fits, where a queue is predicted to gain a tenth by it
(1.18 to 1.60 times the tokens/s in three measured cases: performance.md, Predictions).
`mode=plan plan.verbose=true` of a scenario with throughput or serve shows it beside the others.

## A card that is not listed

`mode=plan` without `gpu=` shows a model on every card of conf/gpu; the tables above show some
of them. Any other card is described by settings, `gpu.memory_gib=12 gpu.link_gb_s=16`, with
`gpu.hbm_gb_s`, `gpu.bf16_tflops` and `gpu.compute_capability` where they are known, or by a
file of your own: copy conf/gpu/rtx3060_12gb.yaml to `FOLDER/gpu/mine.yaml`, change its values
and name, and add `--config-dir FOLDER gpu=mine`. Cards below compute capability 8.0 are planned
in float16 with plain weights.

## A number that another engine printed

vLLM ends with `Available KV cache memory: -3.44 GiB` where weights and buffers exceed its
budget. That figure is of vLLM's memory: it counts more for activations and CUDA graphs than
this engine takes, so the figures here are smaller. With `plan.reported_kv_gib=-3.44` the plan
says what that engine has to offload, which is the KV cache of one sequence and what it lacks
(2.00 + 3.44 = 5.44 GiB for OLMo-2-7B and 4096 tokens), as `--cpu-offload-gb 5.44` for vLLM and
as `max_memory` for accelerate, beside the settings of this engine.
"""


def page() -> str:
    """Return the page, as `python -m harness --choosing` prints it."""
    names = model_names()
    sizes, fits, advice = (
        "".join(f"{row(name)}\n" for name in names) for row in (model_row, card_row, _advice_row)
    )
    return _HEAD + sizes + _FITS + fits + _ADVICE + advice + _DIFFERENCES


def model_names() -> list[str]:
    """Return the models of conf/ with sizes, the smallest first."""
    found = {path.stem: _node(path.stem) for path in sorted((CONF / "model").glob("*.yaml"))}
    sized = {
        name: ModelSpec(**node["spec"])
        for name, node in found.items()
        if "spec" in node and "fake" not in node
    }
    return sorted(sized, key=lambda name: sized[name].num_parameters)


def _node(name: str) -> dict[str, Any]:
    text = (CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    node: dict[str, Any] = yaml.safe_load(text)
    return node


def spec_of(name: str) -> ModelSpec:
    """Return the sizes of a model of conf/, in bfloat16."""
    return ModelSpec(**(_node(name)["spec"] | {"dtype": "bfloat16"}))


def _card(name: str, **changes: Any) -> GPUConfig:
    return GPUConfig(**{**card_sheet(name), **changes})


def _config(spec: ModelSpec, gpu: GPUConfig, planner: PlannerConfig) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(name="model", load_format="dummy", spec=spec),
        gpu=gpu,
        engine=EngineSettings(max_model_len=min(LENGTH, spec.max_position_embeddings)),
        offload=OffloadConfig(),
        planner=planner,
    )


def _planned(spec: ModelSpec, gpu: GPUConfig, planner: PlannerConfig) -> MemoryPlan | None:
    try:
        return plan_memory(_config(spec, gpu, planner), spec, DeviceFacts.of_card(gpu))
    except CapacityError:
        return None


def _plan(spec: ModelSpec, size_gb: int, planner: PlannerConfig) -> MemoryPlan | None:
    return _planned(spec, _card(SIZES_GB[size_gb], memory_gib=float(size_gb)), planner)


def _auto(spec: ModelSpec, size_gb: int) -> MemoryPlan | None:
    tokens = SEQUENCES * min(LENGTH, spec.max_position_embeddings)
    return _plan(spec, size_gb, PlannerConfig(choose=True, kv_tokens=tokens))


def _host(plan: MemoryPlan) -> str:
    placed = plan.placed_bytes()
    num_bytes = sum(placed.values()) - placed["resident"]
    return f"{num_bytes / GIB:.1f}" if num_bytes else "none"


def _tokens_s(plan: MemoryPlan) -> str:
    return number((plan.predicted or {})["decode_tokens_s"])


def _figures(plan: MemoryPlan) -> list[str]:
    lossless = ["lossless"] if plan.formats.has_codes else []
    return [_host(plan), _tokens_s(plan), *lossless]


def model_row(name: str) -> str:
    """Return a model's row of the first table."""
    spec = spec_of(name)
    cells = [name, f"{spec.weight_bytes() / GIB:.1f}"]
    for size in SIZES_GB:
        plan = _auto(spec, size)
        cells.append("no" if plan is None else ", ".join(_figures(plan)))
    return f"| {' | '.join(cells)} |"


def card_row(name: str) -> str:
    """Return a model's row of the table of cards."""
    spec = spec_of(name)
    cells = [name, *(_where(spec, _card(card)) for card in CARDS)]
    return f"| {' | '.join(cells)} |"


def _where(spec: ModelSpec, gpu: GPUConfig) -> str:
    asked = asked_of(_config(spec, gpu, PlannerConfig()), spec, DeviceFacts.of_card(gpu))
    plain = build_plan(asked, assign_resident(spec))
    plans = {"plain": plain if plan_fits(plain) else None, "lossless": lossless_resident(asked)}
    found = [
        f"{word} {number(1 / step_s(plan, asked))}"
        for word, plan in plans.items()
        if plan is not None
    ]
    chosen = None if found else _planned(spec, gpu, PlannerConfig(choose=True))
    if chosen is not None:
        word = "" if chosen.formats.has_codes else "plain, "
        found = [f"{word}{_host(chosen)} GiB off {_tokens_s(chosen)}"]
    return ", ".join(found) or "no"


def _advice_row(name: str) -> str:
    spec = spec_of(name)
    advice = next(text for limit, text in PUBLISHED_16_GB if spec.num_parameters < limit)
    least = _plan(spec, 16, PlannerConfig(auto_fields=["cpu_offload_gb"]))
    chosen = _auto(spec, 16)
    cells = [name, f"{spec.num_parameters / 1e9:.2f} B", advice]
    for plan in (least, chosen):
        cells += ["no", "-"] if plan is None else [_host(plan), ", ".join(_figures(plan)[1:])]
    return f"| {' | '.join(cells)} |"
