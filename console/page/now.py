"""The view Now: what a snapshot of the supervisor says, as texts and lengths of bars."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from console.page import texts
from console.page.charts import RANGES, Point, chart
from console.page.texts import KINDS, UNKNOWN

STEPS: Final = ("stopped", "loading", "ready", "stopping", "failed")
"""The state machine of a service, in order."""
MOVING: Final = frozenset({"loading", "stopping"})
"""States that end by themselves."""
SETTINGS: Final = (
    ("model", "model"),
    ("dtype", "type of weights"),
    ("weight_format", "weights as"),
    ("quantize", "weights rounded to"),
    ("offload", "offload"),
    ("offload_bytes", "weights in host memory"),
    ("max_model_len", "longest sequence, tokens"),
    ("max_num_seqs", "sequences at once"),
    ("kv_tokens", "KV on the GPU, tokens"),
    ("kv_host_bytes", "KV in host memory"),
    ("budget_bytes", "budget of the GPU"),
    ("gpu_memory_utilization", "share of the GPU's memory"),
    ("load_s", "load"),
)
"""What is asked of a service and what holds: key -> how it is called."""
FOUND: Final = frozenset(
    {"dtype", "offload_bytes", "kv_tokens", "kv_host_bytes", "budget_bytes", "load_s"}
)
"""Those of them that follow from others."""
BAR: Final = 1000
"""Length of a bar."""

Plain = Mapping[str, Any]


def live(snapshot: Plain, choices: Sequence[Plain], range_name: str) -> dict[str, Any]:
    """Return every value of the view.

    Args:
        snapshot: of the supervisor.
        choices: profiles that a service can switch to: value and label.
        range_name: of the charts, a key of RANGES.
    """
    machine = snapshot.get("machine") or {}
    services = snapshot.get("services") or []
    jobs = snapshot.get("jobs") or []
    found = {
        "services": [service(each, jobs, choices) for each in services],
        "has_services": bool(services),
        "load_s": load_time(services),
        "machine_s": machine.get("time_s"),
        "tiles": tiles(services),
        "gpus": [gpu(each) for each in machine.get("gpus") or []],
        "has_gpus": bool(machine.get("gpus")),
        "gpu_note": machine.get("gpu_reason") or "No GPU was found.",
        "ram": ram(machine),
        "disks": [disk(each) for each in machine.get("disks") or []],
        "charts": charts(machine, snapshot["time_s"], range_name),
        "jobs": [job(each) for each in jobs],
        "has_no_jobs": not jobs,
        "foreign": [foreign(each) for each in snapshot.get("foreign") or []],
        "has_no_foreign": not snapshot.get("foreign"),
    }
    return found | headline(services)


def headline(services: Sequence[Plain]) -> dict[str, str]:
    """Return what is served, in a line and what belongs to it."""
    if not services:
        return {"headline": "Nothing is served", "subline": ""}
    first = next((each for each in services if each["state"] == "ready"), services[0])
    model, state = first.get("model") or "no model", texts.word(first["state"])
    since = first.get("since_s")
    return {
        "headline": f"{model} is {state}" if first.get("model") else f"The service is {state}",
        "subline": "" if since is None else f"since {texts.moment(since)}",
    }


def service(found: Plain, jobs: Sequence[Plain], choices: Sequence[Plain]) -> dict[str, Any]:
    """Return a service: state, progress, settings, and which buttons can be pressed."""
    state, key = found["state"], found["id"]
    actions = {
        each["action"]
        for each in jobs
        if each["state"] in {"queued", "running"} and each.get("service_id") == key
    }
    is_busy = bool(actions - {"stop"})  # what comes behind a stop waits for it
    is_moving = state == "loading" or is_busy
    has_model = found.get("profile_id") is not None
    address = f"/api/services/{key}"
    reason, _, more = (found.get("reason") or "").partition("\n")
    asked, holds = found.get("requested") or {}, found.get("effective") or {}
    settings = [
        {
            "key": name,
            "label": label,
            "asked": setting(name, asked),
            "effective": said(name, holds.get(name)),
        }
        for name, label in SETTINGS
        if name in asked or name in holds
    ]
    return {
        "key": key,
        "title": found["name"],
        "where": place(found),
        "steps": steps(state),
        "is_settled": state not in MOVING,
        "progress": progress(found),
        "done": found.get("bytes_done") if found.get("bytes_total") else None,
        "total": found.get("bytes_total"),
        "reason": reason,
        "more": more,
        "has_no_more": not more,
        "log": found.get("log_tail") or "",
        "has_no_log": state != "failed" or not found.get("log_tail"),
        "address": address,
        **{name: f"{address}/{name}" for name in ("start", "stop", "restart", "switch", "reset")},
        "body_none": "{}",
        "start_held": is_moving or state == "ready" or not has_model,
        "stop_held": not is_busy and state in {"stopped", "stopping", "failed"},
        "restart_held": is_moving or state == "stopped" or not has_model,
        "reset_held": is_moving or not found.get("is_crash_loop"),
        "switch_held": is_moving or not choices,
        "is_unit": found["kind"] != "own",
        "auto_held": False,
        "auto_label": f"Restart by itself: {'on' if found.get('auto_restart') else 'off'}",
        "auto_body": json.dumps({"auto_restart": not found.get("auto_restart")}),
        "choices": [
            {**each, "selected": each["value"] == found.get("profile_id")} for each in choices
        ],
        "port": found.get("port"),
        "context": asked.get("max_model_len") or holds.get("max_model_len"),
        "settings": settings,
        "has_no_settings": not settings,
    }


def steps(state: str) -> list[dict[str, Any]]:
    """Return the state machine with the current state marked; one without a place comes last."""
    names = STEPS if state in STEPS else (*STEPS, state)
    return [
        {
            "key": name,
            "label": texts.word(name),
            "current": "step" if name == state else None,
            "kind": KINDS.get(name) if name == state else None,
        }
        for name in names
    ]


def place(found: Plain) -> str:
    """Return where a service listens and by what it is kept."""
    parts = [f"port {found['port']}"] if found.get("port") else []
    parts += [f"profile {found['profile']}"] if found.get("profile") else []
    parts += [f"systemd unit {found['unit']}"] if found.get("unit") else []
    parts += [f"process {found['pid']}"] if found.get("pid") else []
    if failures := len(found.get("failures") or []):
        parts.append(f"{failures} failure{'s' if failures > 1 else ''} of late")
    return ", ".join(parts)


def progress(found: Plain) -> str:
    """Return the phase of a load, with bytes and the time so far."""
    parts = [texts.word(found.get("phase") or found["state"])]
    if found.get("bytes_total"):
        parts.append(f"{texts.gib(found.get('bytes_done'))} of {texts.gib(found['bytes_total'])}")
    if found.get("spent_s") is not None:
        parts.append(texts.duration(found["spent_s"]))
    return ", ".join(parts)


def setting(name: str, asked: Plain) -> str:
    """Return what was asked for; what was not is the planner's choice."""
    value = asked.get(name)
    if value is None:
        return "" if name in FOUND else "as planned"
    return said(name, value)


def said(name: str, value: Any) -> str:
    """Return the value of a setting with its unit."""
    if value is None:
        return UNKNOWN
    if name.endswith("_bytes"):
        return texts.gib(value)
    if name.endswith("_s"):
        return texts.duration(value)
    return (
        texts.number(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        else texts.word(value)
    )


def load_time(services: Sequence[Plain]) -> float | None:
    """Return as of when the load of the running service is; None: nothing is told of it."""
    return next((load["time_s"] for each in services if (load := each.get("load"))), None)


def tiles(services: Sequence[Plain]) -> list[dict[str, Any]]:
    """Return the load of the service that tells of it."""
    load: Plain = next((each["load"] for each in services if each.get("load")), {})
    blocks, used = load.get("host_blocks"), load.get("host_blocks_used")
    rows = (
        ("running", "running", texts.number(load.get("running")), "answers with KV blocks"),
        ("waiting", "waiting", texts.number(load.get("waiting")), "answers in the queue"),
        ("prefill", "prefill", texts.number(load.get("prefill_tokens_s")), "tokens/s of prompts"),
        ("decode", "decode", texts.number(load.get("decode_tokens_s")), "tokens/s of answers"),
        ("kv", "KV in use", texts.share(load.get("kv_usage")), "of the blocks on the GPU"),
        ("link", "link", texts.share(load.get("link_share")), "of the host link's rate"),
        (
            "blocks",
            "host blocks",
            texts.number(used),
            f"of {texts.number(blocks)} blocks of KV in use",
        ),
        (
            "preemptions",
            "preemptions",
            texts.number(load.get("preemptions")),
            "answers that gave their blocks up",
        ),
    )
    return [dict(zip(("key", "label", "value", "note"), row, strict=True)) for row in rows]


def stacked(parts: Mapping[str, float | None], total: float | None) -> dict[str, Any]:
    """Return where each part lies in a bar, one behind the other; unknown ones have no length."""
    found: dict[str, Any] = {}
    begin = 0.0
    for name, size in parts.items():
        width = 0.0 if not total or not size else min(BAR * size / total, BAR - begin)
        found |= {f"{name}_x": round(begin, 1), f"{name}_width": round(max(width, 0.0), 1)}
        begin += max(width, 0.0)
    return found


def gpu(found: Plain) -> dict[str, Any]:
    """Return the bar of a GPU: weights, KV, other of ours, others, free, and the budget's line."""
    total, budget = found.get("total_bytes"), found.get("budget_bytes")
    names = {
        "weights": "weights",
        "kv": "KV",
        "ours": "other of ours",
        "others": "others",
        "free": "free",
    }
    parts = {name: found.get(f"{name}_bytes") for name in names}
    used = found.get("used_bytes")
    known = sum(size for name, size in parts.items() if size and name != "free")
    rest = (
        None
        if used is None or all(size is not None for size in parts.values())
        else max(0, used - known)
    )
    lengths = stacked(
        {name: parts[name] for name in names if name != "free"} | {"rest": rest}, total
    )
    facts = [
        f"{texts.gib(found.get('used_bytes'))} of {texts.gib(total)} in use",
        f"busy {texts.share(found.get('utilization'))}",
    ]
    if found.get("temperature_c") is not None:
        facts.append(f"{found['temperature_c']:.0f} \N{DEGREE SIGN}C")
    if found.get("power_w") is not None:
        facts.append(f"{found['power_w']:.0f} W")
    line = None if not total or budget is None else round(min(BAR * budget / total, BAR), 1)
    return {
        "key": found.get("uuid") or found["index"],
        "title": f"GPU {found['index']}: {found.get('name') or UNKNOWN}",
        "facts": ", ".join(facts),
        **{name: texts.gib(size) for name, size in parts.items()},
        **lengths,
        "rest": texts.gib(rest),
        "has_no_rest": not rest,
        "budget": texts.gib(budget),
        "budget_x": line,
        "has_no_budget": line is None,
        "is_unknown": total is None or used is None,
        "spoken": ", ".join(f"{label} {texts.gib(parts[name])}" for name, label in names.items()),
    }


def ram(machine: Plain) -> dict[str, Any]:
    """Return the bar of host memory: pinned, other of ours, others, available; and swap."""
    found, swap = machine.get("ram") or {}, machine.get("swap") or {}
    total, free = found.get("total_bytes"), found.get("available_bytes")
    pinned, ours = found.get("pinned_bytes"), found.get("ours_bytes")
    rest = None if ours is None else max(0, ours - (pinned or 0))
    others = (
        None
        if total is None or free is None
        else max(0, total - free - (pinned or 0) - (rest or 0))
    )
    parts = {"pinned": pinned, "ours": rest, "others": others}
    said_parts = {name: texts.gib(size) for name, size in (parts | {"free": free}).items()}
    return {
        "facts": f"{texts.gib(free)} of {texts.gib(total)} available",
        **said_parts,
        **stacked(parts, total),
        "swap": f"{texts.gib(swap.get('used_bytes'))} of {texts.gib(swap.get('total_bytes'))}",
        "is_unknown": total is None,
        "spoken": f"pinned {said_parts['pinned']}, other of ours {said_parts['ours']}, "
        f"others {said_parts['others']}, available {said_parts['free']}",
    }


def disk(found: Plain) -> dict[str, Any]:
    """Return the bar of a file system that holds models."""
    total, free, ours = found.get("total_bytes"), found.get("free_bytes"), found.get("models_bytes")
    others = None if total is None or free is None else max(0, total - free - (ours or 0))
    parts = {"ours": ours, "others": others}
    return {
        "key": found["path"],
        "title": "Disk of models",
        "facts": found["path"],
        **{name: texts.gib(size) for name, size in (parts | {"free": free}).items()},
        **stacked(parts, total),
        "is_unknown": total is None,
        "spoken": f"models {texts.gib(ours)}, other files {texts.gib(others)}, "
        f"free {texts.gib(free)}",
    }


CHARTS: Final = (
    ("decode", "Decode", "tokens/s", ("decode_tokens_s",), None),
    ("prefill", "Prefill", "tokens/s", ("prefill_tokens_s",), None),
    ("queue", "Running and waiting", "", ("running", "waiting"), None),
    ("link", "Host link", "%", ("link_share",), 1.0),
    ("gpu", "GPU memory in use", "GiB", ("gpu_used_bytes",), None),
    ("ram", "Host memory available", "GiB", ("ram_available_bytes",), None),
)
"""Key, label, unit, names in the history's rows, upper edge."""


def charts(machine: Plain, now_s: float, range_name: str) -> list[dict[str, Any]]:
    """Return the charts of the last minutes."""
    range_s = RANGES[range_name][1]
    rows = [row for row in machine.get("history") or [] if row["time_s"] >= now_s - range_s]

    def series(name: str) -> list[Point]:
        return [(row["time_s"], row.get(name)) for row in rows]

    return [
        chart(
            *(key, label, unit, [series(name) for name in names]),
            now_s=now_s,
            range_name=range_name,
            top=top,
        )
        for key, label, unit, names, top in CHARTS
    ]


def job(found: Plain) -> dict[str, Any]:
    """Return a row of the jobs."""
    arguments = found.get("arguments") or {}
    what = " ".join(
        [found["action"].replace("_", " "), *(str(value) for value in arguments.values())]
    )
    ended = found.get("ended_s")
    took = None if ended is None else ended - found["created_s"]
    return {
        "key": found["id"],
        "what": what,
        "state": texts.word(found["state"]),
        "kind": KINDS.get(found["state"]),
        "phase": found.get("reason") or texts.word(found["phase"])
        if found.get("phase") or found.get("reason")
        else "",
        "took": "" if took is None else texts.duration(took),
    }


def foreign(found: Plain) -> dict[str, Any]:
    """Return a row of the servers that others started."""
    return {
        "key": f"{found.get('port')}-{found.get('pid')}",
        "port": str(found["port"]),
        "model": texts.word(found.get("model")),
        "pid": texts.word(found.get("pid")),
        "command": texts.word(found.get("command")),
    }
