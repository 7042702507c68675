"""Rates of a machine: probed, by a data sheet, or assumed; and thresholds that follow from them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from engine.asked.config import ANY_CARD, GPUConfig
from engine.plan.cards import CARDS, UNKNOWN_CARD, DeviceFacts, Sheet
from kernels.sizes import MAX_SMALL_TOKENS

LINK_SHARE: Final = 0.86
"""Copy rate from pinned memory over the sheet's link rate: 54.8 (H100) and 55.5 (H200) of 64."""
COPY_SHARES: Final[Mapping[str, float]] = MappingProxyType(
    {
        "d2h_gb_s": 1.0,
        # 50.7 of 54.8 (H100), 51 of 55.5 (H200).
        "in_place_gb_s": 0.92,
        # 74.0 ms where products of few rows took 65.3 at 50.7 GB/s, copies carry 55.1 (H200).
        "in_place_many_gb_s": 0.81,
        # 49 to 51 of 54.9 GB/s for blocks of 256 KiB to 8 MiB (H200).
        "blocks_gb_s": 0.90,
        # 512 rows of 64 KiB at 55.0 of 55.3 GB/s (H200).
        "rows_gb_s": 0.995,
    }
)
"""Rates of the link over the copy rate from pinned memory, by their names in Rates."""
STAGE_GAIN: Final = 1.15
"""What reading weights in place must take of the time of copying them to be worse: less is no
reason to copy, as copies take slots and leave nothing in place."""
BLOCK_OVERHEAD_S: Final = 3.7e-6
"""DMA copy of a block beside its bytes: 2 MiB at 50 of 54.9 GB/s, 8 MiB at 54 (H200). Both ways at
once DMA carries more: 97 against 61 GB/s for blocks of 8 MiB."""
ROWS_OVERHEAD_S: Final = 3e-6
"""Copy of one of many rows that lie apart, beside its bytes: 8, 16 and 32 rows of 64 KiB at 41.7,
48.3 and 51.6 of 55.3 GB/s (H200)."""
HBM_SHARE: Final = 0.86
"""Device copy (read and write) over the sheet's: 2850 of 3350 (H100), 4257 of 4800 (H200)."""
MATRIX_SHARE: Final = 0.60
"""bf16 products of a prefill of 2048 tokens over the sheet's dense rate: 590 of 989 (H100)."""
FLOAT32_SHARE: Final = 0.07
"""float32 without TF32 over bf16: 67 of 989 on the sheet of the H100."""
PAGEABLE_GB_S: Final = 8.9
"""Copies from pageable memory (H200)."""
FILE_READ_GB_S: Final = 5.0
"""Checkpoint files from the page cache; assumed."""
PIN_GB_S: Final = 4.0
"""First touch and registration of slabs: 8.6 GB in 2.3 s (H100)."""
COPY_OVERHEAD_S: Final = 16e-6
"""What a copy takes beside its bytes: 1, 4, 16, 64 MiB at 28.7, 47.4, 52.1, 54.8 GB/s (H200)."""
LAYER_OVERHEAD_S: Final = 12e-6
"""Kernels of one layer beside their bytes, in graphs: beginnings and ends of four products,
attention of few keys, norms (H200: 10 to 12 us in OLMo-2 of 7B and 13B, plain and lossless)."""
STEP_OVERHEAD_S: Final = 0.1e-3
"""One step beside its graph (H200: 0.08 to 0.11 ms): sampling, inputs, outputs."""
EAGER_LAYER_OVERHEAD_S: Final = 0.48e-3
"""Launches of one layer without graphs, where none were probed: half of the 0.82 to 1.16 ms that
steps of 1024 prompt tokens took a layer when Triton looked at every argument of a launch (qwen3_4b,
36 layers, six runs on one host of an H200, docs/performance.md). Half is an estimate: no study has
measured it since."""
EAGER_LAYER_LAUNCHES: Final = 50
"""Their time over one launch of torch's addition, as a probe times it: half of 84 to 123, where the
latter took 7.1 to 10.5 us."""
HBM_COPY_SHARES: Final[Mapping[str, float]] = MappingProxyType(
    {
        # A layer of OLMo-2-7B in 80.0 us, 95.7 in bf16 (H200).
        "lossless_gb_s": 0.90,
        # 2.18 TB/s (H200); of each weight 1.5 bytes are read and 2 written.
        "restore_gb_s": 0.52,
    }
)
"""Rates of weights in codes over the copy rate of HBM, by their names in Rates."""
IN_PLACE_TILE_ROWS: Final = 256
"""Rows after which a product reads a weight in host memory again (vLLM's prefill of 2048 tokens,
docs/performance.md: 1.41 s with uva, 0.177 with prefetch)."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a machine carries; GB are 10^9 bytes."""

    h2d_gb_s: float
    """Copies from pinned host memory."""
    d2h_gb_s: float
    in_place_gb_s: float
    """Kernels that read pinned host memory."""
    in_place_many_gb_s: float
    """Products of 128 rows whose weight lies in pinned host memory, bytes of the weight."""
    blocks_gb_s: float
    """Kernels that copy scattered blocks of KV from pinned host memory."""
    rows_gb_s: float
    """Copies of one layer of neighbouring host blocks from pinned memory: rows that lie apart."""
    pageable_gb_s: float
    """Copies from pageable host memory."""
    hbm_gb_s: float
    """Device copies, read and write counted."""
    bf16_tflops: float
    """Large products, as reached."""
    float32_tflops: float
    lossless_gb_s: float
    """Codes read by products of one token."""
    restore_gb_s: float
    """bfloat16 weights written where matrices are restored whole."""
    file_read_gb_s: float
    pin_gb_s: float
    copy_overhead_s: float = COPY_OVERHEAD_S
    rows_overhead_s: float = ROWS_OVERHEAD_S
    block_overhead_s: float = BLOCK_OVERHEAD_S
    layer_overhead_s: float = LAYER_OVERHEAD_S
    eager_layer_overhead_s: float = EAGER_LAYER_OVERHEAD_S
    step_overhead_s: float = STEP_OVERHEAD_S
    sequence_overhead_s: float = 0.0
    """Time of a layer for each sequence of a step, beside bytes: a CPU takes one after another."""
    is_cpu: bool = False
    """Products of few rows read their weight first, copies run in the thread that computes, and a
    step is over when it was launched: its launches are in layer_overhead_s."""
    source: str
    """Sheet, probe or assumption, in words."""

    def measured(self, probe: Mapping[str, float | None]) -> "Rates":
        """Replace what a probe of this machine found; None and names of no rate are left out.

        An overhead of 0 was found too: it is below what the probe can tell.
        """
        others = {"source", "is_cpu", "eager_layer_overhead_s"}
        names = [name for name in asdict(self) if name not in others]
        found = {
            name: rate
            for name in names
            if (rate := probe.get(name)) or (rate == 0 and name.endswith("_overhead_s"))
        }
        if hbm := probe.get("hbm_copy_gb_s"):
            found["hbm_gb_s"] = hbm
            if not self.is_cpu:
                found = _shares(hbm, HBM_COPY_SHARES) | found
        if launch_us := probe.get("launch_us"):
            found["eager_layer_overhead_s"] = EAGER_LAYER_LAUNCHES * launch_us * 1e-6
        if h2d := found.get("h2d_gb_s"):
            found = _shares(h2d, COPY_SHARES) | found
        source = f"probe of this machine; the rest: {self.source}"
        if "sequence_overhead_s" in probe:  # of a CPU, where nothing but times of files is assumed
            source = "probe of this CPU, whose memory stands in for a GPU"
        return Rates(**{**asdict(self), **found, "source": source})


def _shares(copy_gb_s: float, shares: Mapping[str, float]) -> dict[str, Any]:
    return {name: copy_gb_s * share for name, share in shares.items()}


def sheet_rates(sheet: Sheet, source: str) -> Rates:
    """Return what a card of that sheet can be expected to reach."""
    link, hbm = sheet.link_gb_s * LINK_SHARE, sheet.hbm_gb_s * HBM_SHARE
    return Rates(
        **_shares(link, COPY_SHARES),
        **_shares(hbm, HBM_COPY_SHARES),
        h2d_gb_s=link,
        pageable_gb_s=min(link, PAGEABLE_GB_S),
        hbm_gb_s=hbm,
        bf16_tflops=sheet.bf16_tflops * MATRIX_SHARE,
        float32_tflops=sheet.bf16_tflops * MATRIX_SHARE * FLOAT32_SHARE,
        file_read_gb_s=FILE_READ_GB_S,
        pin_gb_s=PIN_GB_S,
        source=source,
    )


def cpu_rates() -> Rates:
    """Return assumed rates of a CPU on which the GPU tier is emulated."""
    return Rates(
        h2d_gb_s=8.0,
        d2h_gb_s=8.0,
        in_place_gb_s=12.0,
        in_place_many_gb_s=12.0,
        blocks_gb_s=7.2,
        rows_gb_s=8.0,
        pageable_gb_s=8.0,
        hbm_gb_s=15.0,
        bf16_tflops=0.05,
        float32_tflops=0.1,
        lossless_gb_s=0.2,
        restore_gb_s=0.3,
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
    """
    given = (gpu.link_gb_s, gpu.hbm_gb_s, gpu.bf16_tflops)
    if facts.emulated:
        if any(given):
            card = sheet_rates(_sheet(gpu), f"{_stated(gpu)}, which a CPU stands in for")
            return replace(card, eager_layer_overhead_s=0.0)
        return cpu_rates().measured(probe) if probe else cpu_rates()
    if facts.name in CARDS:
        rates = sheet_rates(CARDS[facts.name], f"data sheet of {facts.name}")
    elif any(given):
        rates = sheet_rates(_sheet(gpu), _stated(gpu))
    else:
        rates = sheet_rates(UNKNOWN_CARD, f"assumed: no data sheet of {facts.name} is known")
    return rates.measured(probe) if probe else rates


def _stated(gpu: GPUConfig) -> str:
    """Say where the rates of a configuration come from."""
    if gpu.name != ANY_CARD:
        return f"data sheet of {gpu.name}"
    used = _sheet(gpu)
    assumed = [
        f"gpu.{key}={getattr(used, key):g}"
        for key in ("link_gb_s", "hbm_gb_s", "bf16_tflops")
        if getattr(gpu, key) is None
    ]
    return "the card as described" + (f" ({', '.join(assumed)} assumed)" if assumed else "")


def _sheet(gpu: GPUConfig) -> Sheet:
    """The rates that a configuration states; those that it leaves out are assumed."""
    return Sheet(
        gpu.link_gb_s or UNKNOWN_CARD.link_gb_s,
        gpu.hbm_gb_s or UNKNOWN_CARD.hbm_gb_s,
        gpu.bf16_tflops or UNKNOWN_CARD.bf16_tflops,
    )


def stage_tokens(rates: Rates) -> int:
    """Return from how many tokens on weights in host memory are staged, not read in place.

    There a product that reads its weight in place takes STAGE_GAIN of the time of a copy: of up to
    64 rows at `in_place_gb_s`, of up to 256 at `in_place_many_gb_s`, of more once for each 256. A
    CPU, which copies as it computes, takes the second.
    """
    copy_gb_s = rates.h2d_gb_s / STAGE_GAIN
    if not rates.is_cpu and rates.in_place_gb_s <= copy_gb_s:
        return 1
    if rates.is_cpu or rates.in_place_many_gb_s <= copy_gb_s:
        return MAX_SMALL_TOKENS + 1
    reads = max(2, math.ceil(rates.in_place_many_gb_s / copy_gb_s))
    return IN_PLACE_TILE_ROWS * (reads - 1) + 1


MOST_RUN_BYTES: Final = 2**30
"""Neighbouring blocks of so many bytes go by DMA on any card."""


def dma_run_bytes(rates: Rates) -> int:
    """Return from which size on neighbouring blocks are moved by one DMA copy, not by a kernel.

    There both take as long: bytes / `blocks_gb_s` = `block_overhead_s` + bytes / `h2d_gb_s`;
    rounded to a power of two, so that plans do not differ by noise of a probe.
    """
    gain_s = 1e-9 / rates.blocks_gb_s - 1e-9 / rates.h2d_gb_s
    if gain_s <= 0:
        return MOST_RUN_BYTES
    most = min(MOST_RUN_BYTES, max(1.0, rates.block_overhead_s / gain_s))
    return int(2 ** round(math.log2(most)))
