"""Metrics that are shown nowhere but on a run's page, which lists them by name."""

from collections.abc import Mapping
from typing import Final

LISTED: Final[Mapping[str, str]] = {
    "throughput/hit_share": "as latency/hit_share",
    "latency/hit_share": (
        "prompt tokens found in a prefix cache, as the engine or server counts them / "
        "prompt tokens of the requests that were sent; missing if they are not reported"
    ),
    "serve/hit_share": "as latency/hit_share; of a search, at the rate whose figures are shown",
    "serve/total_tok_s": "sum(prompt and output tokens of completed requests) / serve/wall_s",
    "serve/wall_s": "t(last token of a completed request) - t(first arrival after the ramp)",
    "serve/window_s": "t(last arrival) - t(first arrival after the ramp)",
    "serve/window_output_tok_s": (
        "tokens that came within that window, of any request / serve/window_s; ramp and drain"
        " are left out"
    ),
    "load/import_s": "t(engine construction starts) - t(start of the process)",
    "load/plan_s": "time to read the model's sizes, open the device and plan every byte",
    "load/tokenizer_s": "time to load the tokenizer",
    "load/touch_s": "time to map the weights' place in host memory and make its pages present",
    "load/pin_s": "time to register that memory with the device",
    "load/read_s": (
        "time to load the checkpoint, less load/convert_s and load/copy_s: threads read, "
        "convert and copy at once, and the time is divided by their work"
    ),
    "load/convert_s": "time of dtype conversion, or of making random weights",
    "load/copy_s": "time of copies of weights to the GPU, as far as reading waits for them",
    "load/keep_s": "time to write weights that were packed, for later loads (model.keep_lossless)",
    "load/allocate_s": "time to allocate GPU memory: weights, KV cache and work buffers",
    "load/warm_up_s": "time of a first prefill and decode, in which kernels are loaded",
    "load/compile_s": "time of compiling kernels during warm-up and capture",
    "load/capture_s": "time to capture decode steps as graphs",
    "load/weights_gb_s": (
        "bytes of the weights in their source / (load/read_s + load/convert_s + load/copy_s)"
    ),
    "load/pin_gb_s": "bytes pinned / (load/touch_s + load/pin_s), GB = 10^9 bytes",
    "load/build_s": "rest of the engine's construction that no other phase names",
    "load/first_token_s": "t(first token on the host) - t(engine is built), one short prompt",
    "load/busy": "time the phase was active; busy times overlap and do not sum to total_s",
    "memory/gpu_peak_global_gib": "highest device memory in use by all processes",
    "memory/gpu_baseline_gib": "device memory in use by all processes before the run began",
    "memory/gpu_allocated_gib": "device memory of live tensors after the last request",
    "memory/budget_margin_gib": "budget - memory/gpu_peak_gib; negative is over budget",
    "memory/host_tree_peak_gib": (
        "highest sum of the resident sets of the worker and the processes below it; memory that"
        " they share counts in each"
    ),
    "memory/host_anon_gib": (
        "highest resident anonymous memory of the worker and the processes below it; it "
        "includes offloaded weights, pinned or not"
    ),
    "memory/host_shmem_gib": (
        "highest resident shared memory of the worker and the processes below it"
    ),
    "link/d2h_gb_s": (
        "device to host copy rate: median of 20 copies of 256 MiB to registered memory, GB ="
        " 10^9 bytes, measured in this run"
    ),
    "link/two_way_gb_s": "sum of both directions copied at once, GB = 10^9 bytes",
    "link/in_place_gb_s": "rate at which a kernel reads registered host memory in place",
    "link/in_place_many_gb_s": "as link/in_place_gb_s, by a product of 128 rows with its weight",
    "link/blocks_gb_s": "rate at which a kernel moves scattered KV blocks of 2 MiB",
    "link/block_overhead_s": "fixed time of moving such a block, beyond that of its bytes",
    "link/rows_gb_s": "host to device copies of scattered rows of 64 KiB, 512 at a time",
    "link/rows_overhead_s": "fixed time of such a copy, beyond that of its bytes; 16 rows each",
    "link/hbm_copy_gb_s": "copy within device memory, bytes read + bytes written",
    "link/launch_us": (
        "time that the host takes to launch one small kernel: median of 20 rounds of 500"
    ),
    **{
        f"link/{name}_after_gb_s": f"link/{name}_gb_s, probed again after the scenarios"
        for name in ("h2d", "d2h", "two_way", "in_place", "hbm_copy")
    },
    "link/nvml_h2d_gb_s": (
        "bytes that the GPU's own counter received over PCIe per second of the last timed "
        "part of latency, throughput, serve: mean of five or more windows of 20 ms, one "
        "every 5 s or more, scaled as copies and in-place reads of known size compared "
        "with its reading before"
    ),
    "link/pcie_rx_gb_s": (
        "bytes that the GPU received over PCIe, packet headers included: mean of the windows of"
        " 20 ms that were read in the last timed part, one every 5 s or more"
    ),
    "link/pcie_tx_gb_s": "as link/pcie_rx_gb_s, bytes that the GPU sent",
    "offload/copied_bytes_per_step": "of offload/bytes_per_step, those that were copied",
    "offload/in_place_bytes_per_step": "of offload/bytes_per_step, those read in place",
    "offload/planned_bytes_per_step": (
        "offload/bytes_per_step as the memory plan has it, for the same steps"
    ),
    "offload/planned_copied_bytes_per_step": "of offload/planned_bytes_per_step, copied",
    "offload/planned_in_place_bytes_per_step": "of offload/planned_bytes_per_step, in place",
    "experts/hits_per_step": (
        "experts of all layers that were on the GPU, per step that only decodes"
    ),
    "experts/planned_hit_share": "experts/hit_share as the memory plan has it for one sequence",
    "experts/planned_bytes_per_step": (
        "experts/bytes_per_step as the memory plan has it for one sequence"
    ),
    "energy/total_j": (
        "difference of the GPU's energy counter over the last timed part of latency,"
        " throughput, serve; warm-up is left out"
    ),
    "kv/gpu_hit_tokens": (
        "prompt tokens of the last timed part (of latency, throughput, serve) that were found"
        " in blocks on the GPU"
    ),
    "kv/cpu_hit_tokens": "as kv/gpu_hit_tokens, found in the host tier, loaded or read in place",
    "kv/missed_tokens": "as kv/gpu_hit_tokens, in full blocks that were asked for and not found",
    "kv/gpu_hit_gib": "bytes of the blocks found for kv/gpu_hit_tokens, of all kinds of layers",
    "kv/cpu_hit_gib": "bytes of the blocks found for kv/cpu_hit_tokens",
    "kv/gpu_evictions": "blocks evicted from the GPU in that part",
    "kv/gpu_evictions_lost": "of these, blocks whose content no tier had afterwards",
    "kv/cpu_evictions": "blocks evicted from the host tier and held nowhere else",
    "kv/swaps_out": "preempted sequences whose blocks were kept, in that part",
    "kv/swaps_in": "sequences of kv/swaps_out that resumed with some of these blocks",
    "kv/recomputes": "preempted sequences whose blocks were dropped, to be computed again",
    "kv/preemptions": "sequences that lost their blocks while they ran",
    "kv/stores_skipped": "blocks that were not stored because the host tier had no room",
    "kv/stored_gib": "bytes of blocks copied from the GPU to the host tier in that part",
    "kv/copied_ahead_gib": "bytes of host blocks that were copied to the GPU ahead of decodes",
    "kv/staged_prefill_gib": "bytes of host blocks that prefills copied to the GPU to read",
    "kv/transfer_gb_s": (
        "bytes of keys and values over the link in that part, both directions, copied and read"
        " in place / its time, GB = 10^9 bytes"
    ),
    "kv/h2d_gb_s": "of kv/transfer_gb_s, from host to device",
    "kv/link_share": "kv/h2d_gb_s / mean of link/h2d_gb_s and link/h2d_after_gb_s",
    "kv/gpu_used_share": (
        "mean share of the GPU's blocks that are owned or hold a reusable prefix, read after steps"
        " of that part, at most four times a second"
    ),
    "kv/gpu_used_peak_share": "highest value of it",
    "kv/gpu_owned_share": "mean share of the GPU's blocks that sequences owned",
    "kv/cpu_used_share": "as kv/gpu_used_share, of the host tier, with blocks under way",
    "kv/cpu_used_peak_share": "as kv/gpu_used_peak_share, of the host tier",
    "gpu/sm_clock_mhz": "clock of the SMs over the rows of the last timed part",
    "gpu/memory_clock_mhz": "median clock of the GPU's memory over the last timed part",
    "gpu/temperature_c": "highest temperature of the GPU in the last timed part",
    "gpu/power_w": "mean of the power readings of the last timed part; see energy for the sum",
    "gpu/busy_pct": "mean share of time in which a kernel ran, over the last timed part, %",
    "gpu/throttled_share": (
        "share of the rows with a busy GPU in which it was slowed down by heat, power brake or"
        " another hardware slowdown; the power limit is not one"
    ),
    "gpu/power_capped_share": "share of the rows with a busy GPU at its power limit",
    "host/cpu_cores": "CPU time of the worker and the processes below it / time",
    "host/busy_cores": "CPU time of the whole machine / time",
    "host/major_faults": "page faults of the worker that read a disk, in the last timed part",
    "host/read_gib": "bytes that the worker read from disks in the last timed part",
    "host/disk_read_gib": "bytes read from the machine's disks in the last timed part",
    "host/swapped_gib": "bytes swapped in and out on the machine in the last timed part",
    "telemetry/rows_hz": (
        "(rows of telemetry in the last timed part - 1) / (t(last row) - t(first row))"
    ),
    "telemetry/cpu_pct": "CPU time of the sampler's process / time, % of one core",
}
"""Name -> definition."""
