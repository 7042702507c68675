"""planner.auto_fields: settings that are chosen so that it fits. Pure arithmetic, no torch."""

import math
from dataclasses import replace

from engine.accounting import (
    GIB,
    Asked,
    build_plan,
    fits,
    has_kv_room,
    resolve_dtype,
    resolve_max_model_len,
    served,
)
from engine.choose import Chooser, largest
from engine.config import EngineConfig
from engine.placement import Assignment, assign, assign_resident
from engine.plan import DeviceFacts
from engine.rates import rates_for
from engine.spec import ModelSpec
from engine.swap_space import assign_as_set


def choose_fields(
    config: EngineConfig, spec: ModelSpec, facts: DeviceFacts
) -> tuple[EngineConfig, list[str]]:
    """Return the configuration with planner.auto_fields chosen, and a note for each.

    max_num_seqs is halved, and then max_model_len lowered, only where no offload is enough;
    cpu_offload_gb is the least with which it fits. Where nothing fits the configuration is returned
    as it is, and planning it refuses with the figures. The objective context chooses max_model_len
    too where none is set.
    """
    planner = config.planner
    names = set(planner.auto_fields)
    if planner.choose and planner.objective == "context" and config.engine.max_model_len is None:
        names.add("max_model_len")
    if not names:
        return config, []
    search = _Search(config, spec, facts, names)
    found = search.run()
    return config if found is None else found, search.notes(found)


def fields_fit(config: EngineConfig, spec: ModelSpec, facts: DeviceFacts) -> bool:
    """Whether planner.auto_fields can be chosen so that it fits."""
    return _Search(config, spec, facts, set(config.planner.auto_fields)).can_fit


def with_least_uva(asked: Asked) -> EngineConfig | None:
    """Return the configuration with the least cpu_offload_gb that fits, to 0.01; None: none does.

    Args:
        asked: Its uva selectors stay; of 0 GiB, which everything fits with, they are removed.
    """
    config, node = asked.config, asked.config.offload.uva

    def moved(hundredths: int) -> Asked:
        # The backend stays as asked: uva with 0 GiB moves nothing and would be refused.
        backend = config.offload.offload_backend if hundredths else "auto"
        selectors = node.cpu_offload_params if hundredths else []
        uva = replace(node, cpu_offload_gb=hundredths / 100, cpu_offload_params=selectors)
        offload = replace(config.offload, offload_backend=backend, uva=uva)
        return replace(asked, config=replace(config, offload=offload))

    def placed(wanted: Asked) -> Assignment:
        return served(wanted, assign(wanted.spec, wanted.config.offload, wanted.dtype))

    def is_short(hundredths: int) -> bool:
        wanted = moved(hundredths)
        return not has_kv_room(build_plan(wanted, placed(wanted)))

    most = math.ceil(asked.spec.weight_bytes(asked.dtype) / GIB * 100)
    short = largest(0, most, is_short)
    if short == most:
        return None
    found = moved(0 if short is None else short + 1)
    return found.config if fits(found, placed(found)) else None  # it may lack host memory


class _Search:
    def __init__(
        self, config: EngineConfig, spec: ModelSpec, facts: DeviceFacts, names: set[str]
    ) -> None:
        self._config, self._spec, self._facts, self._names = config, spec, facts, names
        self._limit = resolve_max_model_len(config, spec)

    def run(self) -> EngineConfig | None:
        """Return the first configuration that fits."""
        most = self._config.engine.max_num_seqs
        counts = [most]
        while "max_num_seqs" in self._names and counts[-1] > 1:
            counts.append(counts[-1] // 2)
        for count in counts:
            found = self._offloaded(self._with(count, self._limit))
            if found is not None:
                return self._with_kept_seqs(found)
        if "max_model_len" not in self._names:
            return None
        length = largest(2, self._limit, lambda n: self._offloaded(self._least(n)) is not None)
        if length is None:
            return None
        found = self._offloaded(self._least(length))
        return None if found is None else self._with_kept_seqs(found)

    @property
    def can_fit(self) -> bool:
        """Whether the least that may be chosen fits."""
        length = 2 if "max_model_len" in self._names else self._limit
        return self._offloaded(self._least(length)) is not None

    def notes(self, found: EngineConfig | None) -> list[str]:
        """Return what was chosen in words."""
        if found is None:
            return []
        values = {
            "cpu_offload_gb": f"offload.uva.cpu_offload_gb={found.offload.uva.cpu_offload_gb:g}",
            "max_model_len": f"engine.max_model_len={found.engine.max_model_len}",
            "max_num_seqs": f"engine.max_num_seqs={found.engine.max_num_seqs}",
        }
        chosen = ", ".join(values[name] for name in sorted(self._names))
        return [f"planner.auto_fields: {chosen}."]

    def _with(self, max_num_seqs: int, max_model_len: int) -> EngineConfig:
        engine = replace(
            self._config.engine, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        return replace(self._config, engine=engine)

    def _least(self, length: int) -> EngineConfig:
        """The fewest sequences that may be chosen, of that length."""
        few = 1 if "max_num_seqs" in self._names else self._config.engine.max_num_seqs
        return self._with(few, length)

    def _asked(self, config: EngineConfig) -> Asked:
        dtype = resolve_dtype(config, self._spec, self._facts.kind)
        length = config.engine.max_model_len or self._limit
        return Asked(config, self._spec, self._facts, dtype, length, reference=False)

    def _offloaded(self, config: EngineConfig) -> EngineConfig | None:
        """Return the configuration with the least offload that fits, or None."""
        asked = self._asked(config)
        if "cpu_offload_gb" in self._names:
            return with_least_uva(asked)
        if config.planner.choose:
            rates = rates_for(config.gpu, self._facts, config.measured_rates)
            chooser = Chooser(asked, rates)
            return config if chooser.can_fit else None
        placed = assign_as_set(asked)
        return config if placed is not None and fits(asked, placed) else None

    def _with_kept_seqs(self, config: EngineConfig) -> EngineConfig:
        """Lower max_num_seqs to what the KV cache holds at full length, where it is chosen."""
        if "max_num_seqs" not in self._names:
            return config
        asked = self._asked(config)
        if config.planner.choose:
            rates = rates_for(config.gpu, self._facts, config.measured_rates)
            chooser = Chooser(asked, rates)
            found = None if chooser.moves_nothing else chooser.best()
            plan = chooser.resident if found is None else found[0]
        else:
            placed = assign_as_set(asked) or assign_resident(self._spec)
            plan = build_plan(asked, served(asked, placed))
        held = max(1, math.floor(plan.max_concurrency))
        count = min(held, config.engine.max_num_seqs)
        return replace(config, engine=replace(config.engine, max_num_seqs=count))
