"""The machine that a plan is for: a card of conf/gpu, the GPU that is here, or the CPU."""

from engine.asked.config import GPUConfig
from engine.device.facts import available_bytes, gpu_holders, num_threads
from engine.plan.memory import DeviceFacts
from engine.plan.times import CARDS
from harness.config.schema import RunConfig
from harness.observe.gpu import Gpu, open_gpu
from harness.observe.machine_rates import Probed, read_rates

ANY_CARD = "auto"
"""Name in conf/gpu of whatever card is here."""


def machine_facts(config: RunConfig) -> tuple[DeviceFacts, Probed | None]:
    """Return what a plan must know of the machine, and what was probed on it.

    gpu.device=cpu, or auto where no GPU is here and no card is named: the CPU. A card with
    memory_gib that is not here: that card, free of others' memory, in a machine with any host
    memory. Else the GPU that is here, of which gpu.memory_gib is the part that is used. Nothing is
    allocated, and nothing probed now.
    """
    gpu = config.gpu
    here = open_gpu() if gpu.device != "cpu" else None
    if here is not None and (gpu.memory_gib is None or _is_here(gpu, here)):
        found = _facts_here(here)
        if found is not None:
            return found, read_rates(here)
    if gpu.device != "cpu" and gpu.memory_gib is not None:
        return DeviceFacts.of_card(gpu), None
    return _cpu_facts(), read_rates(None)


def running_facts(config: RunConfig) -> DeviceFacts:
    """Return what a plan must know of the device that a run takes here.

    Without a GPU that is the CPU, whatever card is named: it stands in for that one.
    """
    return _cpu_facts() if open_gpu() is None else machine_facts(config)[0]


def _cpu_facts() -> DeviceFacts:
    host = available_bytes()
    return DeviceFacts(
        kind="cpu",
        name="CPU",
        total_bytes=host // 2,
        free_bytes=host,
        host_available_bytes=host,
        num_threads=num_threads(),
    )


def _is_here(gpu: GPUConfig, here: Gpu) -> bool:
    """Whether the card that is asked for is the one in this machine, by name or by its sheet."""
    sheet = CARDS.get(str(here.facts().get("name")))
    asked = (gpu.link_gb_s, gpu.hbm_gb_s, gpu.bf16_tflops)
    if gpu.name == ANY_CARD and not any(asked):
        return True
    return sheet is not None and asked == (sheet.link_gb_s, sheet.hbm_gb_s, sheet.bf16_tflops)


def _facts_here(here: Gpu) -> DeviceFacts | None:
    """Return the facts of the GPU in this machine; None where its driver does not tell."""
    facts = here.facts()
    memory = facts.get("memory_bytes")
    if not memory:
        return None
    used = here.sample()["gpu_used_bytes"] or 0
    return DeviceFacts(
        kind="cuda",
        name=str(facts["name"]),
        total_bytes=int(memory),
        free_bytes=int(memory) - int(used),
        host_available_bytes=available_bytes(),
        num_threads=num_threads(),
        holders=gpu_holders(here.uuid),
    )
