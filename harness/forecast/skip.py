"""Points that are certain not to fit, because one that asks for less did not."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from catalogue.models import describe
from engine.errors import CapacityError, EngineError
from engine.plan.planner import plan_memory
from harness.config.engine import sizes_config
from harness.config.schema import RunConfig
from harness.forecast.rows import running_facts
from harness.point.describe import NOT_IDENTITY
from harness.systems.fake import plan_fake
from reports.record.record import RunRecord
from reports.record.text import flatten

_MEMORY: Final = ("gpu.memory_gib", "engine.gpu_memory_utilization")
HARDER_LOW: Final = (
    *_MEMORY,
    "offload.uva.cpu_offload_gb",
    "offload.prefetch.offload_num_in_group",
)
"""Settings of which less asks for more room on the GPU."""
HARDER_HIGH: Final = (
    "engine.max_model_len",
    "engine.max_num_seqs",
    "engine.max_num_batched_tokens",
)
"""Settings of which more asks for more room on the GPU."""
_NO_ROOM: Final = ("gpu.name", "gpu.link_gb_s", "gpu.hbm_gb_s", "gpu.bf16_tflops")
"""Settings that change times and no bytes."""


def certain_not_to_fit(config: RunConfig, ended: Sequence[RunRecord]) -> str | None:
    """Return why a point cannot fit, naming the point that proves it; None where it may.

    A point proves it that had status no_fit and differs in nothing but settings of which this one
    asks for more room; the plan of this one, which is arithmetic, must say the same. One that ran
    out of GPU memory proves it for the same settings in less memory. `ended` are the sweep's points
    so far.
    """
    if config.system.kind != "native":
        return None
    asked = _flat(config.to_dict())
    for record in ended:
        kind = (record.error or {}).get("type")
        is_oom = record.status == "oom" and kind != "HostOutOfMemory"
        if not is_oom and record.status != "no_fit":
            continue
        harder = _harder_settings(asked, _flat(record.config))
        if not harder:
            continue
        what = ", ".join(f"{key}={asked[key]} ({was})" for key, was in harder.items())
        reason = f"{record.name} had status {record.status}, and this point asks for more: {what}."
        if is_oom:
            if set(harder) <= set(_MEMORY):
                return reason
            continue
        shortage = planned_shortage(config)
        if shortage is not None:
            return f"{reason} The plan: {str(shortage).splitlines()[0]}"
    return None


def planned_shortage(config: RunConfig) -> CapacityError | None:
    """Return why the plan of a point does not fit where it would run, here; None: it does.

    Nothing is built or allocated. None too where there is nothing to plan with: another system,
    or a model whose sizes are not here yet.
    """
    if config.system.kind != "native":
        return None
    try:
        spec = describe(config.model).spec
        engine = sizes_config(config, spec)
        if config.model.fake is not None:
            plan_fake(config.model.fake, engine)
        else:
            plan_memory(engine, spec, running_facts(config))
    except CapacityError as error:
        return error
    except EngineError:
        return None  # the point itself will say what is wrong
    return None


def _harder_settings(asked: Mapping[str, Any], easy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which a point asks for more, with the other's values.

    Empty where it does not, or where anything else differs too.
    """
    keys = dict.fromkeys([*asked, *easy])
    differing = [key for key in keys if asked.get(key) != easy.get(key)]
    moves_less = _moves(easy) and not _moves(asked)
    is_unchosen = easy.get("planner.choose") and not asked.get("planner.choose")
    if not (moves_less or is_unchosen):
        return _compare(differing, asked, easy) or {}
    # No offload moves fewer bytes than any, and no settings fit where the planner found none.
    others = [key for key in differing if key.split(".")[0] not in {"offload", "planner"}]
    rest = _compare(others, asked, easy)
    if rest is None:
        return {}
    return {key: easy.get(key) for key in differing if key not in others} | rest


def _compare(
    differing: Sequence[str], asked: Mapping[str, Any], easy: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the harder ones among settings that differ; None where one is not harder."""
    found = {}
    for key in differing:
        if key in _NO_ROOM:
            continue
        mine, other = asked.get(key), easy.get(key)
        if not isinstance(mine, int | float) or not isinstance(other, int | float):
            return None
        is_harder = mine < other if key in HARDER_LOW else mine > other
        if key not in (*HARDER_LOW, *HARDER_HIGH) or not is_harder:
            return None
        found[key] = other
    return found


def _moves(flat: Mapping[str, Any]) -> bool:
    """Return whether the offload settings move weights; automatic choices count as moving."""
    amounts = ("offload.uva.cpu_offload_gb", "offload.prefetch.offload_group_size")
    return bool(flat.get("planner.choose") or any(flat.get(key) for key in amounts))


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in flatten(config) if key.partition(".")[0] not in NOT_IDENTITY
    }
