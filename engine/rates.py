"""Rates that predicted times follow from: of a card's sheet, or as measured on this machine.

Every constant of the time model is here, with where it was measured. No torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from engine.config import GPUConfig
from engine.plan import DeviceFacts

LINK_SHARE: Final = 0.86
"""Copy rate from pinned memory over the sheet's link rate: 54.8 (H100) and 55.5 (H200) of 64."""
IN_PLACE_SHARE: Final = 0.92
"""In-place reads by kernels over the copy rate: 50.7 of 54.8 (H100), 51 of 55.5 (H200)."""
TWO_WAY_SHARE: Final = 1.82
"""Both directions at once, in sum, over the copy rate: 100.8 of 55.5 (H200)."""
HBM_SHARE: Final = 0.86
"""Device copy (read and write) over the sheet's: 2850 of 3350 (H100), 4257 of 4800 (H200)."""
MATRIX_SHARE: Final = 0.60
"""bf16 products of a prefill of 2048 tokens over the sheet's dense rate: 590 of 989 (H100)."""
FLOAT32_SHARE: Final = 0.07
"""float32 without TF32 over bf16: 67 of 989 on the sheet of the H100."""
PAGEABLE_GB_S: Final = 8.9
"""Copies from pageable memory (H200)."""
HOST_READ_GB_S: Final = 102.0
"""Host memory read by 16 threads (H200 machine)."""
FILE_READ_GB_S: Final = 5.0
"""Checkpoint files from the page cache; assumed."""
PIN_GB_S: Final = 4.0
"""First touch and registration of slabs: 8.6 GB in 2.3 s (H100)."""
COPY_OVERHEAD_S: Final = 16e-6
"""Beside the bytes of one copy: 1, 4, 16, 64 MiB at 28.7, 47.4, 52.1, 54.8 GB/s (H200)."""
WEIGHT_SHARE: Final = 1.0
"""Products of few rows, bytes of weights read over the copy rate of HBM, which writes half of its
bytes. Fitted with LAYER_OVERHEAD_S to cuts of six models, 3B to 14B (H200, within 7 %)."""
KV_SHARE: Final = 0.60
"""Decode attention and what else grows with the batch, KV bytes over the copy rate (H100)."""
LAYER_OVERHEAD_S: Final = 28e-6
"""Kernels of one layer beside their bytes, in graphs: beginnings and ends of four products,
attention of few keys, norms (H200, as WEIGHT_SHARE)."""
STEP_OVERHEAD_S: Final = 0.1e-3
"""One step beside its graph (H200: 0.08 to 0.11 ms): sampling, inputs, outputs."""
EAGER_LAYER_OVERHEAD_S: Final = 0.95e-3
"""Launches of one layer without graphs, where none were probed: steps of 1024 prompt tokens that
they bound took 0.82 to 1.16 ms a layer (qwen3_4b, 36 layers, six runs on one host of an H200)."""
EAGER_LAYER_LAUNCHES: Final = 100
"""The same over one launch of torch's addition, as `engine.probe` times it: 84 to 123 in those
runs, where the latter took 7.1 to 10.5 us."""
IN_PLACE_TILE_ROWS: Final = 256
"""Rows after which a product reads a weight in host memory again (vLLM's prefill of 2048 tokens,
docs/performance.md: 1.41 s with uva, 0.177 with prefetch)."""
PACKED_READS: Final = 3.0
"""Reads of a float32 weight that a CPU's product of several rows takes beside its operations, as it
lays the weight out anew: 2.5 to 4 for 2 to 16 rows (two cores)."""
START_S: Final = 8.0
"""Start of a process, warm-up and captures: 6.5 to 9.4 s (qwen3_4b, dummy weights, H200s)."""
CPU_START_S: Final = 4.5
"""The same without a GPU: 4.8 s with 0.25 GiB of weights to read (smollm2_135m, two cores)."""


@dataclass(frozen=True)
class Sheet:
    """What a vendor states of a card."""

    link_gb_s: float
    """One direction."""
    hbm_gb_s: float
    bf16_tflops: float
    """Dense."""


CARDS: Final = {
    "NVIDIA GeForce RTX 3060": Sheet(32.0, 360.0, 25.5),
    "NVIDIA GeForce RTX 4080": Sheet(32.0, 716.8, 97.5),
    "NVIDIA GeForce RTX 4090": Sheet(32.0, 1008.0, 165.2),
    "NVIDIA L4": Sheet(32.0, 300.0, 121.0),
    "NVIDIA A100-SXM4-80GB": Sheet(32.0, 2039.0, 312.0),
    "NVIDIA H100 80GB HBM3": Sheet(64.0, 3350.0, 989.0),
    "NVIDIA H200": Sheet(64.0, 4800.0, 989.0),
}
"""Sheets by the name that the driver gives; the values and sources of conf/gpu."""
UNKNOWN_CARD: Final = Sheet(32.0, 500.0, 60.0)
"""A card of which nothing is known: PCIe 4 x16, GDDR6, some tensor cores."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a machine carries; GB are 10^9 bytes."""

    h2d_gb_s: float
    """Copies from pinned host memory."""
    d2h_gb_s: float
    two_way_gb_s: float
    """Both directions at once, in sum."""
    in_place_gb_s: float
    """Kernels that read pinned host memory."""
    pageable_gb_s: float
    """Copies from pageable host memory."""
    hbm_gb_s: float
    """Device copies, read and write counted."""
    bf16_tflops: float
    """Large products, as reached."""
    float32_tflops: float
    host_read_gb_s: float
    file_read_gb_s: float
    pin_gb_s: float
    copy_overhead_s: float = COPY_OVERHEAD_S
    layer_overhead_s: float = LAYER_OVERHEAD_S
    eager_layer_overhead_s: float = EAGER_LAYER_OVERHEAD_S
    step_overhead_s: float = STEP_OVERHEAD_S
    sequence_overhead_s: float = 0.0
    """Of one layer for each sequence of a step, beside bytes: a CPU takes one after another."""
    is_cpu: bool = False
    """Products of few rows read their weight first, copies run in the thread that computes, and a
    step is over when it was launched: its launches are in layer_overhead_s."""
    source: str
    """Sheet, probe or assumption, in words."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a record."""
        return asdict(self)

    def measured(self, probe: Mapping[str, float | None]) -> "Rates":
        """Replace what a probe of this machine found.

        Args:
            probe: By the names of engine.probe.probe_link and engine.probe_rates; None and names
                that are no rate are left out.
        """
        others = {"source", "is_cpu", "eager_layer_overhead_s"}
        names = [name for name in asdict(self) if name not in others]
        found = {name: rate for name in names if (rate := probe.get(name))}
        if hbm := probe.get("hbm_copy_gb_s"):
            found["hbm_gb_s"] = hbm
        if launch_us := probe.get("launch_us"):
            found["eager_layer_overhead_s"] = EAGER_LAYER_LAUNCHES * launch_us * 1e-6
        h2d = found.get("h2d_gb_s")
        if h2d:
            found.setdefault("d2h_gb_s", h2d)
            found.setdefault("two_way_gb_s", h2d * TWO_WAY_SHARE)
            found.setdefault("in_place_gb_s", h2d * IN_PLACE_SHARE)
        source = f"probe of this machine; the rest: {self.source}"
        if "sequence_overhead_s" in probe:  # of a CPU, where nothing but times of files is assumed
            source = "probe of this CPU, whose memory stands in for a GPU"
        return Rates(**{**asdict(self), **found, "source": source})


def sheet_rates(sheet: Sheet, source: str) -> Rates:
    """Return what a card of that sheet can be expected to reach."""
    link = sheet.link_gb_s * LINK_SHARE
    return Rates(
        h2d_gb_s=link,
        d2h_gb_s=link,
        two_way_gb_s=link * TWO_WAY_SHARE,
        in_place_gb_s=link * IN_PLACE_SHARE,
        pageable_gb_s=min(link, PAGEABLE_GB_S),
        hbm_gb_s=sheet.hbm_gb_s * HBM_SHARE,
        bf16_tflops=sheet.bf16_tflops * MATRIX_SHARE,
        float32_tflops=sheet.bf16_tflops * MATRIX_SHARE * FLOAT32_SHARE,
        host_read_gb_s=HOST_READ_GB_S,
        file_read_gb_s=FILE_READ_GB_S,
        pin_gb_s=PIN_GB_S,
        source=source,
    )


def cpu_rates() -> Rates:
    """Return assumed rates of a CPU on which the GPU tier is emulated."""
    return Rates(
        h2d_gb_s=8.0,
        d2h_gb_s=8.0,
        two_way_gb_s=8.0,
        in_place_gb_s=12.0,
        pageable_gb_s=8.0,
        hbm_gb_s=15.0,
        bf16_tflops=0.05,
        float32_tflops=0.1,
        host_read_gb_s=15.0,
        file_read_gb_s=1.0,
        pin_gb_s=2.0,
        copy_overhead_s=5e-6,
        layer_overhead_s=4e-4,
        eager_layer_overhead_s=0.0,
        step_overhead_s=2e-3,
        sequence_overhead_s=1e-4,
        is_cpu=True,
        source="assumed for a CPU; its memory stands in for a GPU",
    )


def rates_for(
    gpu: GPUConfig, facts: DeviceFacts, probe: Mapping[str, float | None] | None = None
) -> Rates:
    """Return the rates of the machine that a plan is for.

    On a CUDA device: the probe, over the sheet of that very card where it is known, else over the
    rates of `gpu`. On a CPU: the rates of `gpu` where it names a card (the emulated one; without
    launches, which its graphs would save and an emulation has none of), else the probe, over
    assumptions. What was used is said in `source`.

    Args:
        gpu: The budget's card.
        facts: The machine; its name decides which sheet holds.
        probe: What engine.probe.probe_link or engine.probe_rates measured here, or None.
    """
    given = (gpu.link_gb_s, gpu.hbm_gb_s, gpu.bf16_tflops)
    if facts.emulated:
        if any(given):
            card = sheet_rates(_sheet(gpu), f"sheet of {gpu.name}, which a CPU stands in for")
            return replace(card, eager_layer_overhead_s=0.0)
        return cpu_rates().measured(probe) if probe else cpu_rates()
    if facts.name in CARDS:
        rates = sheet_rates(CARDS[facts.name], f"sheet of {facts.name}")
    elif any(given):
        rates = sheet_rates(_sheet(gpu), f"sheet of {gpu.name}")
    else:
        rates = sheet_rates(UNKNOWN_CARD, f"assumed: no sheet of {facts.name} is known")
    return rates.measured(probe) if probe else rates


def _sheet(gpu: GPUConfig) -> Sheet:
    """The rates that a configuration states; those that it leaves out are assumed."""
    return Sheet(
        gpu.link_gb_s or UNKNOWN_CARD.link_gb_s,
        gpu.hbm_gb_s or UNKNOWN_CARD.hbm_gb_s,
        gpu.bf16_tflops or UNKNOWN_CARD.bf16_tflops,
    )
