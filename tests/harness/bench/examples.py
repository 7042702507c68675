"""Figures of cases by hand: 8 GB a step in 0.2 s is 40 GB/s."""


def decode(step_s, copied=0, read=0, **changes):
    fields = {
        "step_s": step_s,
        "h2d_bytes": copied,
        "in_place_bytes": read,
        "planned_h2d_bytes": copied,
        "planned_in_place_bytes": read,
        "kv_bytes": 0,
        "replay_s": None,
        "tokens": [1, 2, 3],
    }
    return fields | changes


def case(title, decodes, **changes):
    fields = {
        "title": title,
        "before": {"h2d_gb_s": 41.0, "in_place_gb_s": 36.0, "hbm_copy_gb_s": 2100.0},
        "after": {"h2d_gb_s": 39.0, "in_place_gb_s": 34.0, "hbm_copy_gb_s": 1900.0},
        "decode": {str(batch): figures for batch, figures in decodes.items()},
        "prefill_s": {},
        "prefill_tokens": 2048,
        "chunk_s": {},
        "counter": None,
        "load_s": 5.0,
        "phases": {"touch": 1.0, "pin": 1.0, "allocate": 0.5, "convert": 1.5, "plan": 9.0},
        "utilization": 0.85,
        "asked_utilization": 0.85,
        "asked_kv_tokens": 8000,
        "memory": {"host_pinned_bytes": 8 * 2**30, "gpu_peak_bytes": 13 * 2**30},
        "plan": {
            "read_bytes": 6_000_000_000,
            "num_slots": 3,
            "slot_bytes": 2**29,
            "kv_tokens": 9000,
            "chosen": None,
        },
    }
    return fields | changes
