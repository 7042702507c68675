"""What a plan must know of the machine that it is for: a GPU that is here, a card, or the CPU."""

from dataclasses import dataclass

from engine.asked.config import ANY_CARD, GPUConfig
from engine.device.facts import available_bytes, num_threads
from engine.device.gpu import Gpu, open_gpu
from engine.plan.cards import CARDS, DeviceFacts


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device that a plan is for."""

    facts: DeviceFacts
    gpu: Gpu | None
    """The GPU where it is one that is here."""
    is_here: bool
    """Whether it is a device of this machine."""


def machine_of(asked: GPUConfig) -> Machine:
    """Return the device that a configuration asks for; nothing is allocated, and nothing probed.

    gpu.device=cpu, or auto where no GPU is here and no card is described: the CPU, as a run takes
    it. A card that is described and not here: that card, free of others' memory, in a machine with
    any host memory. Else the GPU that is here, of which gpu.memory_gib is the part that is used.
    """
    here = open_gpu() if asked.device != "cpu" else None
    if here is not None and (asked.memory_gib is None or _is_here(asked, here)):
        facts = _facts_here(here)
        if facts is not None:
            return Machine(facts=facts, gpu=here, is_here=True)
    if asked.memory_gib is not None and (here is not None or asked.is_described):
        return Machine(facts=DeviceFacts.of_card(asked), gpu=None, is_here=False)
    return Machine(facts=cpu_facts(), gpu=None, is_here=True)


def has_gpu() -> bool:
    """Return whether this machine has a GPU that CUDA would show."""
    return open_gpu() is not None


def cpu_facts() -> DeviceFacts:
    """Return what a plan must know of this machine without a GPU."""
    host = available_bytes()
    return DeviceFacts(
        kind="cpu",
        name="CPU",
        total_bytes=host // 2,
        free_bytes=host,
        host_available_bytes=host,
        num_threads=num_threads(),
    )


def _is_here(asked: GPUConfig, here: Gpu) -> bool:
    """Whether the card that is asked for is the one in this machine, by name or by its sheet."""
    sheet = CARDS.get(str(here.facts().get("name")))
    rates = (asked.link_gb_s, asked.hbm_gb_s, asked.bf16_tflops)
    if asked.name == ANY_CARD and not any(rates):
        return True
    return sheet is not None and rates == (sheet.link_gb_s, sheet.hbm_gb_s, sheet.bf16_tflops)


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
        compute_capability=here.compute_capability(),
        num_threads=num_threads(),
        holders=here.holders(),
    )
