"""What each metric means, in one line; names are `area/quantity_unit[/statistic]`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

METRIC_DEFINITIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "load/total_s": (
            "t(first token on the host) - t(start of the process); mean over the warm starts,"
            " equals the sum of the phases"
        ),
        "load/import_s": "t(engine construction starts) - t(start of the process)",
        "load/plan_s": "time to read the model's sizes, open the device and plan every byte",
        "load/tokenizer_s": "time to load the tokenizer",
        "load/touch_s": "time to map the weights' place in host memory and make its pages present",
        "load/pin_s": "time to register that memory with the device",
        "load/read_s": (
            "time of bringing a checkpoint into place, less load/convert_s and load/copy_s: its"
            " threads read, convert and copy at once, and share its time by what they did"
        ),
        "load/convert_s": "time of dtype conversion, or of making random weights",
        "load/copy_s": "time of copies of weights to the GPU, as far as reading waits for them",
        "load/allocate_s": "time to allocate GPU memory: weights, KV cache and work buffers",
        "load/warm_up_s": "time of a first prefill and decode, in which kernels are loaded",
        "load/compile_s": "time of compiling Triton kernels during warm-up and capture",
        "load/capture_s": "time to capture decode steps as graphs",
        "load/weights_gb_s": (
            "bytes of the weights in their source / (load/read_s + load/convert_s + load/copy_s)"
        ),
        "load/pin_gb_s": "bytes pinned / (load/touch_s + load/pin_s), GB = 10^9 bytes",
        "load/build_s": "rest of the engine's construction that no other phase names",
        "load/first_token_s": "t(first token on the host) - t(engine is built), one short prompt",
        "load/busy": "time the phase was active; busy times overlap and do not sum to total_s",
        "latency/ttft_ms": "time to first token: t(first token on the host) - t(submit)",
        "latency/tpot_ms": (
            "time per output token of a request: (E2E - TTFT) / (output tokens - 1);"
            " missing below 2 output tokens"
        ),
        "latency/itl_ms": (
            "inter-token latency: gap between consecutive tokens of a request,"
            " all gaps pooled over requests; TTFT is not a gap"
        ),
        "latency/e2e_ms": "end to end: t(last token on the host) - t(submit)",
        "latency/hit_share": (
            "prompt tokens found in a prefix cache, as the engine or server counts them / prompt"
            " tokens of the requests that were sent; missing where they are not told"
        ),
        "throughput/output_tok_s": "sum(output tokens) / (t(last token) - t(first submit))",
        "throughput/total_tok_s": (
            "(sum(prompt tokens) + sum(output tokens)) / (t(last token) - t(first submit))"
        ),
        "throughput/prefill_tok_s": (
            "sum(prompt tokens that were not found in a prefix cache) / wall time of the steps with"
            " prefill work"
        ),
        "throughput/hit_share": "as latency/hit_share",
        "throughput/decode_tok_s": (
            "output tokens of the steps that only decode / wall time of those steps; a step that"
            " also does prefill counts as prefill"
        ),
        "throughput/requests_s": "completed requests / (t(last token) - t(first submit))",
        "throughput/wall_s": "t(last token) - t(first submit)",
        "serve/ttft_ms": (
            "time to first token of a request that arrives by itself: t(first token on the host)"
            " - t(scheduled arrival); waiting at the client and in the queue is in it"
        ),
        "serve/tpot_ms": "as latency/tpot_ms, of requests that arrive by themselves",
        "serve/itl_ms": "as latency/itl_ms, of requests that arrive by themselves",
        "serve/e2e_ms": "t(last token on the host) - t(scheduled arrival)",
        "serve/schedule_lag_ms": (
            "t(request is handed to the engine) - t(scheduled arrival); with max_concurrency it"
            " holds the wait for a free place"
        ),
        "serve/requested_requests_s": (
            "arrivals asked for per second: arrivals.rate_per_s, or those of the trace; with"
            " several turns, of conversations"
        ),
        "serve/planned_requests_s": (
            "(arrivals - 1) / (last - first planned arrival) as drawn; the ramp and later turns"
            " are left out"
        ),
        "serve/sent_requests_s": (
            "(requests sent - 1) / (t(last sent) - t(first sent)); the ramp and later turns are"
            " left out"
        ),
        "serve/requests_s": "completed requests / serve/wall_s",
        "serve/output_tok_s": "sum(output tokens of completed requests) / serve/wall_s",
        "serve/total_tok_s": ("sum(prompt and output tokens of completed requests) / serve/wall_s"),
        "serve/wall_s": "t(last token of a completed request) - t(first arrival after the ramp)",
        "serve/hit_share": "as latency/hit_share; of a search, at the rate whose figures are shown",
        "serve/window_s": "t(last arrival) - t(first arrival after the ramp)",
        "serve/window_output_tok_s": (
            "tokens that came within that window, of any request / serve/window_s; ramp and drain"
            " are left out"
        ),
        "serve/good_share": (
            "requests that completed within every bound of the SLO / planned requests; failed and"
            " cancelled ones are bad; a bound on TPOT does not apply to one output token"
        ),
        "serve/good_requests_s": "requests that completed within every bound / serve/wall_s",
        "serve/peak_requests_s": (
            "highest rate tried at which the share search.good_share of requests was good"
        ),
        "memory/gpu_peak_gib": "highest device memory in use by the run",
        "memory/gpu_peak_global_gib": "highest device memory in use by all processes",
        "memory/gpu_baseline_gib": "device memory in use by all processes before the run began",
        "memory/gpu_allocated_gib": "device memory of live tensors after the last request",
        "memory/gpu_budget_gib": "device memory the run was allowed",
        "memory/budget_margin_gib": "budget - memory/gpu_peak_gib; negative is over budget",
        "memory/host_pinned_gib": "host bytes registered with the device (engine's ledger)",
        "memory/host_rss_peak_gib": "highest resident set of the worker process",
        "memory/host_tree_peak_gib": (
            "highest sum of the resident sets of the worker and the processes below it; memory that"
            " they share counts in each"
        ),
        "memory/host_anon_gib": (
            "highest resident anonymous memory of the worker and the processes below it; the slab"
            " of offloaded weights is in it, pinned or not"
        ),
        "memory/host_shmem_gib": (
            "highest resident shared memory of the worker and the processes below it"
        ),
        "link/h2d_gb_s": (
            "host to device copy rate: median of 20 copies of 256 MiB from registered memory,"
            " GB = 10^9 bytes, measured in this run"
        ),
        "link/d2h_gb_s": (
            "device to host copy rate: median of 20 copies of 256 MiB to registered memory,"
            " GB = 10^9 bytes, measured in this run"
        ),
        "link/two_way_gb_s": "sum of both directions copied at once, GB = 10^9 bytes",
        "link/in_place_gb_s": "rate at which a kernel reads registered host memory in place",
        "link/hbm_copy_gb_s": "copy within device memory, bytes read + bytes written",
        "link/launch_us": (
            "time that the host takes to launch one small kernel: median of 20 rounds of 500"
        ),
        "link/h2d_after_gb_s": "link/h2d_gb_s, probed again after the scenarios",
        "link/in_place_after_gb_s": "link/in_place_gb_s, probed again after the scenarios",
        "link/nvml_h2d_gb_s": (
            "bytes that the GPU's own counter received over PCIe per second of the last timed part"
            " of latency, throughput, serve: mean of five or more windows of 20 ms, one every 5 s"
            " or more, x what copies of known size are of its reading before"
        ),
        "link/share": (
            "(bytes moved host to device in the steps that only decode / wall time of those steps)"
            " / mean of link/h2d_gb_s and link/h2d_after_gb_s"
        ),
        "offload/bytes_per_step": (
            "bytes host to device, copied or read in place, per step that only decodes, as the"
            " engine counts them"
        ),
        "offload/copied_bytes_per_step": "of offload/bytes_per_step, those that were copied",
        "offload/in_place_bytes_per_step": "of offload/bytes_per_step, those read in place",
        "offload/planned_bytes_per_step": (
            "what the memory plan says of offload/bytes_per_step, for the same steps"
        ),
        "offload/planned_copied_bytes_per_step": "of offload/planned_bytes_per_step, copied",
        "offload/planned_in_place_bytes_per_step": "of offload/planned_bytes_per_step, in place",
        "kv/gpu_hit_tokens": (
            "prompt tokens of the last timed part (of latency, throughput, serve) that were found"
            " in blocks on the GPU"
        ),
        "kv/cpu_hit_tokens": "likewise, found in the host tier, loaded or read in place",
        "kv/missed_tokens": "likewise, in full blocks that were asked for and not found",
        "kv/hit_share": "(kv/gpu_hit_tokens + kv/cpu_hit_tokens) / (those + kv/missed_tokens)",
        "kv/gpu_hit_gib": "bytes of the blocks found for kv/gpu_hit_tokens, of all kinds of layers",
        "kv/cpu_hit_gib": "likewise, of kv/cpu_hit_tokens",
        "kv/gpu_evictions": "blocks whose content gave way on the GPU in that part",
        "kv/gpu_evictions_lost": "of these, blocks whose content no tier had afterwards",
        "kv/cpu_evictions": "blocks whose content gave way in the host tier and was in no other",
        "kv/swaps_out": "preempted sequences whose blocks were kept, in that part",
        "kv/swaps_in": "sequences of kv/swaps_out that went on with some of these blocks",
        "kv/recomputes": "preempted sequences whose blocks were dropped, to be computed again",
        "kv/preemptions": "sequences that lost their blocks while they ran",
        "kv/stores_skipped": "blocks that were to be stored and found no place in the host tier",
        "kv/stored_gib": "bytes of blocks copied from the GPU to the host tier in that part",
        "kv/loaded_gib": "bytes of blocks copied from the host tier to the GPU",
        "kv/in_place_gib": "bytes of keys and values that decodes read in the host tier",
        "kv/staged_prefill_gib": "bytes of host blocks that prefills copied to the GPU to read",
        "kv/transfer_gb_s": (
            "bytes of keys and values over the link in that part, both directions, copied and read"
            " in place / its time, GB = 10^9 bytes"
        ),
        "kv/h2d_gb_s": "of kv/transfer_gb_s, from host to device",
        "kv/link_share": "kv/h2d_gb_s / mean of link/h2d_gb_s and link/h2d_after_gb_s",
        "kv/gpu_used_share": (
            "mean over that part of the share of the GPU's blocks with an owner or findable content"
        ),
        "kv/gpu_used_peak_share": "highest value of it; read at most four times a second",
        "kv/gpu_owned_share": "mean share of the GPU's blocks that sequences owned",
        "kv/cpu_used_share": "as kv/gpu_used_share, of the host tier, with blocks under way",
        "kv/cpu_used_peak_share": "as kv/gpu_used_peak_share, of the host tier",
        "predicted/tpot_ms": (
            "what the plan predicts of latency/tpot_ms: a decode step of one sequence halfway"
            " through its output, at the rates of plan.predicted.rates"
        ),
        "predicted/ttft_ms": "what the plan predicts of latency/ttft_ms",
        "predicted/output_tok_s": "what the plan predicts of throughput/output_tok_s",
        "predicted/load_s": "what the plan predicts of load/total_s",
        "predicted/gpu_peak_gib": "sum of the plan's parts on the GPU",
        "predicted/tpot_ms_difference_pct": (
            "(predicted / measured - 1) x 100; measured: the median, where it has none the mean"
        ),
        "predicted/ttft_ms_difference_pct": "as predicted/tpot_ms_difference_pct",
        "predicted/output_tok_s_difference_pct": "as predicted/tpot_ms_difference_pct",
        "predicted/load_s_difference_pct": "as predicted/tpot_ms_difference_pct",
        "predicted/gpu_peak_gib_difference_pct": "as predicted/tpot_ms_difference_pct",
        "link/pcie_rx_gb_s": (
            "bytes that the GPU received over PCIe, packet headers included: mean of the windows of"
            " 20 ms that were read in the last timed part, one every 5 s or more"
        ),
        "link/pcie_tx_gb_s": "as link/pcie_rx_gb_s, bytes that the GPU sent",
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
        "energy/j_per_token": (
            "energy/total_j / output tokens of the part of the scenario that it was measured over"
        ),
        "energy/total_j": (
            "difference of the GPU's energy counter over the last timed part of latency,"
            " throughput, serve; warm-up is left out"
        ),
    }
)
"""Metric name without its statistic (load/busy: without its phase) -> definition."""

PREDICTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tpot_ms": "latency/tpot_ms",
        "ttft_ms": "latency/ttft_ms",
        "output_tok_s": "throughput/output_tok_s",
        "load_s": "load/total_s",
        "gpu_peak_gib": "memory/gpu_peak_gib",
    }
)
"""Quantity that the plan predicts (area predicted) -> what it is held against."""

STATISTIC_DEFINITIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mean": "arithmetic mean",
        "p50": "median; needs 11 samples",
        "p90": "90th percentile; needs 64 samples",
        "p95": "95th percentile; needs 130 samples",
        "p99": "99th percentile; needs 662 samples",
        "min": "smallest sample",
        "max": "largest sample",
        "std": "sample standard deviation (ddof=1); needs 2 samples",
        "repeat_std": "sample standard deviation of the repeats' means (ddof=1); needs 2 repeats",
        "ci95_low": "lower end of the mean's 95 % interval over repeats (Student's t, n - 1)",
        "ci95_high": "upper end of it; needs 2 repeats",
    }
)
"""Last part of a metric name -> what it means."""

CONVENTIONS: Final[tuple[str, ...]] = (
    "Percentiles interpolate linearly between the two nearest samples (numpy's default).",
    "A percentile is n/a below its sample floor: p50 needs 11 samples, p90 64, p95 130, p99 662.",
    "n/a means not measured or too few samples. It is never written as 0.",
    "GiB is 2^30 bytes; GB is 10^9 bytes; tokens are counted from token ids.",
    "The link bound of TPOT is offload bytes per step / measured host to device rate.",
)


COLD: Final = "cold_"
"""Prefix of a load quantity measured with the checkpoint dropped from the page cache."""


AB: Final = "ab"
"""Area of the figures of a comparison of two sides."""


def _ab_definition(name: str) -> str | None:
    """Return the definition of `AREA_QUANTITY_ratio` or `AREA_QUANTITY_noise_share`."""
    known = {key.replace("/", "_", 1): key for key in METRIC_DEFINITIONS} | {"total_s": "total_s"}
    base = known.get(name.removesuffix("_ratio").removesuffix("_noise_share"))
    if base is None:
        return None
    if name.endswith("_ratio"):
        return f"b / a of {base}: geometric mean over the pairs of runs of both sides"
    return (
        f"share by which b / a of {base} may differ from 1 by chance: of side a against itself,"
        " 95 %, as many pairs"
    )


def definition(metric: str) -> str | None:
    """Return the definition of a metric name, looked up by its longest known prefix.

    Args:
        metric: a full name, such as `latency/ttft_ms/p50`.
    """
    parts = metric.split("/")
    if parts[0] == AB:
        return _ab_definition(parts[1])
    if parts[0] == "load" and parts[-1].startswith(COLD):
        warm = definition("/".join([*parts[:-1], parts[-1].removeprefix(COLD)]))
        if warm is None:
            return None
        warm = warm.replace("warm starts", "cold starts")
        return f"{warm}; the checkpoint was dropped from the page cache first"
    for length in range(len(parts), 0, -1):
        text = METRIC_DEFINITIONS.get("/".join(parts[:length]))
        if text is not None:
            return text
    return None
