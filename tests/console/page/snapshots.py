"""A scripted snapshot of the supervisor: a card of 16 GiB that serves a model too large for it."""

import math
from typing import Any

GIB = 2**30
HOSTILE = "<img src=x onerror=alert(1)>"


def history(now_s: float, minutes: int = 60) -> list[dict[str, Any]]:
    """A row each two seconds, with a gap of a minute half an hour ago."""
    rows = []
    for step in range(minutes * 30):
        time_s = now_s - minutes * 60 + 2 * step
        wave = 1 + 0.4 * math.sin(step / 40) + 0.1 * math.sin(step / 3)
        is_known = not 840 < step < 870
        rows.append(
            {
                "time_s": time_s,
                "decode_tokens_s": 41.0 * wave if is_known else None,
                "prefill_tokens_s": max(0.0, 900.0 * math.sin(step / 25)) if is_known else None,
                "running": step // 60 % 4 if is_known else None,
                "waiting": step // 90 % 3 if is_known else None,
                "link_share": min(1.0, 0.62 * wave) if is_known else None,
                "gpu_used_bytes": (13.1 + 0.5 * wave) * GIB,
                "ram_available_bytes": (38 - 4 * wave) * GIB,
            }
        )
    return rows


def snapshot(now_s: float) -> dict[str, Any]:
    """Two services, a card with a budget, a second that says little, a foreign server, jobs."""
    load = {
        "time_s": now_s - 1,
        "running": 3,
        "waiting": 0,
        "prefill_tokens_s": 912.4,
        "decode_tokens_s": 41.2,
        "kv_usage": 0.42,
        "link_share": 0.71,
        "host_blocks": 4096,
        "host_blocks_used": 120,
        "preemptions": None,
    }
    return {
        "time_s": now_s,
        "services": [
            {
                "id": 1,
                "name": "main",
                "kind": "own",
                "model_id": 1,
                "model": "llama31_8b",
                "profile_id": 1,
                "profile": "default",
                "port": 8000,
                "wanted": "running",
                "auto_restart": True,
                "state": "ready",
                "since_s": now_s - 3000,
                "pid": 4242,
                "requested": {
                    "model": "llama31_8b",
                    "offload": "auto",
                    "max_model_len": 16384,
                    "gpu_memory_utilization": 0.9,
                },
                "effective": {
                    "model": "llama31_8b",
                    "dtype": "bfloat16",
                    "offload": "prefetch",
                    "offload_bytes": int(4.2 * GIB),
                    "max_model_len": 16384,
                    "max_num_seqs": 8,
                    "kv_tokens": 21_504,
                    "budget_bytes": int(14.4 * GIB),
                    "load_s": 31.4,
                },
                "load": load,
            },
            {
                "id": 2,
                "name": HOSTILE,
                "kind": "systemd",
                "unit": "tightfit-serve.service",
                "model_id": 2,
                "model": HOSTILE,
                "profile_id": 2,
                "profile": "default",
                "port": 8001,
                "wanted": "running",
                "auto_restart": False,
                "state": "failed",
                "since_s": now_s - 30,
                "reason": "GPU: 19.20 GiB are needed (weights 15.0, kv_cache 4.0), but 14.40 GiB "
                "are in the budget. Fits with: offload=uva.",
                "log_tail": "INFO load: reading\nERROR server: CapacityError",
                "failures": [now_s - 200, now_s - 100, now_s - 30],
                "is_crash_loop": True,
            },
        ],
        "jobs": [
            {
                "id": 7,
                "action": "set_context",
                "arguments": {"service": "main"},
                "state": "done",
                "phase": "ready",
                "created_s": now_s - 60,
                "ended_s": now_s - 20,
            },
            {
                "id": 8,
                "action": "download",
                "arguments": {"model": HOSTILE},
                "state": "running",
                "phase": "downloading",
                "created_s": now_s - 60,
                "ended_s": None,
            },
        ],
        "machine": {
            "time_s": now_s - 1,
            "gpus": [
                {
                    "index": 0,
                    "uuid": "GPU-0",
                    "name": "NVIDIA GeForce RTX 4080",
                    "total_bytes": 16 * GIB,
                    "used_bytes": int(13.9 * GIB),
                    "weights_bytes": int(9.4 * GIB),
                    "kv_bytes": int(2.6 * GIB),
                    "ours_bytes": int(1.1 * GIB),
                    "others_bytes": int(0.8 * GIB),
                    "free_bytes": int(2.1 * GIB),
                    "budget_bytes": int(14.4 * GIB),
                    "utilization": 0.93,
                    "temperature_c": 61.0,
                    "power_w": 212.0,
                },
                {
                    "index": 1,
                    "uuid": "GPU-1",
                    "name": "NVIDIA T1000",
                    "total_bytes": 4 * GIB,
                    "used_bytes": None,
                },
            ],
            "ram": {
                "total_bytes": 64 * GIB,
                "available_bytes": 38 * GIB,
                "pinned_bytes": int(4.6 * GIB),
                "ours_bytes": int(6.2 * GIB),
            },
            "swap": {"total_bytes": 8 * GIB, "used_bytes": 0},
            "disks": [
                {
                    "path": "/srv/models",
                    "total_bytes": 500 * GIB,
                    "free_bytes": 120 * GIB,
                    "models_bytes": 90 * GIB,
                }
            ],
            "history": history(now_s),
        },
        "foreign": [
            {
                "port": 11434,
                "pid": 991,
                "model": HOSTILE,
                "command": "/usr/bin/other serve --port 11434",
            },
        ],
    }


def bare(now_s: float) -> dict[str, Any]:
    """A machine without a GPU where nothing was done yet, and little can be read."""
    machine = {
        "time_s": now_s,
        "gpus": [],
        "gpu_reason": "NVML is not installed.",
        "ram": {},
        "disks": [],
    }
    return {"time_s": now_s, "services": [], "jobs": [], "machine": machine, "foreign": []}
