"""Records of the shapes that the harness writes; the figures in them are made up."""

import random

from reports.record.record import RunRecord, summarise

GIB = 2**30


def gib(value):
    return int(value * GIB)


def config(offload="uva", gpu="rtx4080_16gb", memory_gib=16.0):
    return {
        "mode": "run",
        "timeout_s": 1800,
        "system": "native",
        "model": {"name": "olmo7b", "source": "allenai/OLMo-2-1124-7B-Instruct", "num_layers": 32},
        "gpu": {"name": gpu, "memory_gib": memory_gib, "device": "cuda:0"},
        "offload": {
            "offload_backend": "auto" if offload == "none" else offload,
            "uva": {"cpu_offload_gb": 8 if offload == "uva" else 0, "cpu_offload_params": []},
            "prefetch": {"offload_group_size": 8 if offload == "prefetch" else 0},
        },
        "kv": {"block_size": 16, "enable_prefix_caching": False},
        "engine": {"gpu_memory_utilization": 0.85, "dtype": "bfloat16", "max_num_seqs": 64},
        "scenario": {"name": "quick"},
    }


def plan(weights=5.61, kv=6.2, budget=13.6, pinned=8.01):
    gpu = {
        "weights": gib(weights),
        "prefetch_slots": 0,
        "staging_slots": gib(0.17),
        "kv_cache": gib(kv),
        "activations": gib(0.41),
        "logits": gib(0.1),
        "graphs": gib(0.22),
        "runtime": gib(0.5),
    }
    total = sum(gpu.values())
    budget_bytes = gib(budget)
    host = {"pinned_weights": gib(pinned), "pageable_weights": 0}
    return {
        "gpu": {
            "budget_bytes": budget_bytes,
            "items": gpu,
            "total_bytes": total,
            "free_bytes": budget_bytes - total,
        },
        "host": {"limit_bytes": gib(118), "items": host, "total_bytes": sum(host.values())},
        "kv": {"num_gpu_blocks": 793, "block_size": 16, "tokens": 12688, "max_concurrency": 3.1},
        "placements": {
            "resident": gib(weights),
            "uva": gib(pinned),
            "prefetch": 0,
            "on_demand": 0,
        },
        "bytes_per_step": gib(pinned),
    }


def environment():
    return {
        "emulated": False,
        "gpu": {
            "name": "NVIDIA H200",
            "memory_bytes": 143771 * 2**20,
            "driver": "580.159.04",
            "pcie": {"gen": 5, "width": 16},
        },
        "torch": "2.11.0+cu130",
        "python": "3.12.3",
        "cpu": {"name": "Intel Xeon", "num_cores": 16},
    }


def latency_rows(count=20, ttft_ms=210.0, tpot_ms=157.0, seed=1):
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        first = ttft_ms * draw.uniform(0.96, 1.12)
        gaps = [tpot_ms * draw.lognormvariate(0, 0.02) for _ in range(31)]
        rows.append(
            {
                "ttft_ms": first,
                "tpot_ms": sum(gaps) / len(gaps),
                "e2e_ms": first + sum(gaps),
                "itl_ms": gaps,
                "num_prompt_tokens": 128,
                "num_output_tokens": 32,
            }
        )
    return rows


def load_rows():
    """Two starts whose phases sum to 16.9 and 9.1 seconds."""
    shared = {"import": 1.3, "plan": 0.2, "tokenizer": 0.4, "pin": 0.7, "convert": 0.0}
    rest = {"copy": 0.4, "allocate": 0.1, "warm_up": 3.8, "build": 0.0, "first_token": 0.2}
    rows = []
    for start, read_s in (("cold", 9.8), ("warm", 2.0)):
        phases = {**shared, "read": read_s, **rest}
        rows.append(
            {
                "start": start,
                "is_cold": start == "cold",
                "phases": phases,
                "busy": {"read": read_s, "copy": 2.2},
                "total_s": sum(phases.values()),
            }
        )
    return rows


def latency_metrics(rows):
    metrics = {}
    for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
        values = [row[key] for row in rows if row[key] is not None]
        metrics |= {f"latency/{key}/{stat}": value for stat, value in summarise(values).items()}
    gaps = [gap for row in rows for gap in row["itl_ms"]]
    return metrics | {f"latency/itl_ms/{stat}": value for stat, value in summarise(gaps).items()}


def kv_rows(cpu_blocks=800, seconds=40):
    """A GPU tier that fills in 10 s, and a host tier that takes what it gives away."""
    rows = []
    for second in range(seconds):
        owned = min(200, 20 * second)
        away = min(cpu_blocks, 15 * max(0, second - 10))
        loaded = gib(0.25) * max(0, second - 20)
        rows.append([second, owned, 50, 0, away, away and 8, gib(0.002) * away, loaded, 0])
    return {
        "part": "throughput",
        "columns": [
            *("time_s", "gpu.owned", "gpu.cached", "cpu.owned", "cpu.cached", "cpu.in_transit"),
            *("moved.stored_bytes", "moved.loaded_bytes", "in_place_bytes"),
        ],
        "rows": rows,
        "gpu_blocks": 256,
        "cpu_blocks": cpu_blocks,
        "block_bytes": 2**21,
    }


def expert_rows(seconds=10):
    """Experts of three layers: the longer it runs, the more of them are found."""
    rows = [[s, 30 * s + 2 * s * s, 20 * s, gib(0.01) * s] for s in range(seconds)]
    last = seconds - 1
    return {
        "part": "latency",
        "columns": ["time_s", "hits", "misses", "bytes"],
        "rows": rows,
        "layers": {
            "layer": [1, 2, 5],
            "hits": [rows[last][1], 0, 0],
            "misses": [0, rows[last][2], 0],
            "bytes": [0, rows[last][3], 0],
        },
    }


def ok_record(**changes):
    latency = latency_rows()
    loads = load_rows()
    fields = {
        "run_id": "20261127-101500-3f2a",
        "name": "olmo7b-uva-rtx4080_16gb",
        "status": "ok",
        "valid": True,
        "started_at": "2026-11-27T10:15:00+00:00",
        "duration_s": 312.4,
        "config": config(),
        "overrides": ["+model=olmo7b", "offload=uva", "gpu=rtx4080_16gb"],
        "plan": plan(),
        "environment": environment(),
        "effective": {
            "attention": "triton paged",
            "graphs": True,
            "pinned": True,
            "placement_bytes": {"resident": gib(5.61), "uva": gib(8.01)},
            "fallbacks": [],
            "warnings": [],
        },
        "metrics": {
            "load/total_s": loads[1]["total_s"],
            "load/cold_total_s": loads[0]["total_s"],
            "load/read_s": 2.0,
            "load/pin_s": 0.7,
            "load/busy/copy_s": 2.2,
            **latency_metrics(latency),
            "throughput/output_tok_s": 402.7,
            "throughput/total_tok_s": 806.1,
            "throughput/decode_tok_s": 411.3,
            "throughput/prefill_tok_s": 11876.0,
            "throughput/requests_s": 3.15,
            "memory/gpu_peak_gib": 12.94,
            "memory/host_pinned_gib": 8.01,
            "memory/host_rss_peak_gib": 9.7,
            "link/h2d_gb_s": 55.5,
            "link/share": 0.985,
            "offload/bytes_per_step": gib(8.01),
            "energy/j_per_token": None,
            "kv/cpu_hit_tokens": 81920,
            "kv/loaded_gib": 10.0,
            "experts/hits_per_step": 30.0,
        },
        "samples": {
            "latency": latency,
            "load": loads,
            "throughput": {"num_requests": 100},
            "kv": kv_rows(),
            "experts": expert_rows(),
        },
    }
    return RunRecord(**(fields | changes))


def no_fit_record(**changes):
    """The resident plan of the same model: over its budget, nothing measured."""
    refused = plan(weights=13.6, kv=0.5, pinned=0)
    fields = {
        "run_id": "20261127-101200-77aa",
        "name": "olmo7b-none-rtx4080_16gb",
        "status": "no_fit",
        "error": {
            "type": "CapacityError",
            "message": (
                "GPU: need 15.5 GiB, have 13.6 GiB; the largest item is weights 13.6 GiB."
                " Set uva.cpu_offload_gb=2 or more."
            ),
            "phase": "plan",
            "traceback": None,
        },
        "valid": None,
        "duration_s": 0.9,
        "config": config("none"),
        "overrides": ["+model=olmo7b", "offload=none", "gpu=rtx4080_16gb"],
        "plan": refused,
        "effective": {},
        "metrics": {},
        "samples": {},
    }
    return ok_record(**(fields | changes))
