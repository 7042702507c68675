"""The views Models and Add: cards of models, one model with its profiles, what a delete takes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from catalogue.models import entries, state
from console.page import texts
from console.page.texts import KINDS, UNKNOWN
from console.registry.holdings import Removal
from console.registry.tables import Model, Performance, Profile
from reports.record.metrics import metric_text
from reports.record.text import number

PAGE: Final = 24
"""Cards of a page."""
OFFLOADS: Final = (
    ("", "chosen by the planner"),
    ("none", "none: all on the GPU"),
    ("auto", "auto: the fastest that fits"),
    ("uva", "uva: read in place"),
    ("prefetch", "prefetch: copied ahead"),
    ("experts", "experts: of mixtures, some kept on the GPU"),
)
FORMATS: Final = (
    ("", "chosen by the planner"),
    ("checkpoint", "as stored"),
    ("lossless", "lossless codes"),
    ("auto", "auto: codes where they help"),
)
ROUNDINGS: Final = (
    ("", "not rounded"),
    ("int8", "int8: other tokens, half the size"),
    ("int4", "int4: other tokens, a quarter of the size"),
)
STATES: Final[Mapping[str, str]] = {"present": "yes", "partial": "in part", "absent": "no"}
"""Whether files of a model are on this machine."""
SETTINGS: Final = (
    *("max_model_len", "offload", "cpu_offload_gb", "max_num_seqs", "gpu_memory_utilization"),
    *("kv_cpu_gib", "weight_format", "quantize"),
)
"""Settings of a profile that the form has."""
NO_FILES: Final[dict[str, Any]] = {"has_files": False, "freed": ""}
HEADLINES: Final = ("throughput/output_tok_s", "serve/output_tok_s", "latency/tpot_ms")
"""What a card says of the last measurement, the first two that there are."""
MOST_FIGURES: Final = 6

Fit = Mapping[str, Any]
"""A verdict: brief, kind, why; empty: not known."""


def chosen(rows: Sequence[Model], words: str) -> list[Model]:
    """Return the models that have the words in their name, source or state."""
    found = words.lower()
    return [row for row in rows if found in f"{row.name} {row.source} {row.state}".lower()]


def default_profile(model: Model) -> Profile | None:
    """Return the profile that is meant where none is named."""
    return next((each for each in model.profiles if each.is_default), None)


def card(
    model: Model,
    fit: Fit,
    measured: Sequence[Performance],
    service: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the card of a model.

    Args:
        model: with its profiles.
        fit: of its default profile on this card.
        measured: its last measurements.
        service: the service that would serve it; None: there is none.
    """
    profile = default_profile(model)
    is_here = model.state not in {"missing", "downloading"}
    is_served = (
        service is not None and service.get("model_id") == model.id and service["state"] == "ready"
    )
    is_moving = service is None or service["state"] in {"loading", "stopping"}
    return {
        "key": model.id,
        "name": model.name,
        "address": f"/models/{model.id}",
        "source": model.source,
        "state": "served" if is_served else model.state,
        "kind": "good" if is_served else KINDS.get(model.state),
        "size": size_line(model),
        "fit": fit.get("brief", UNKNOWN),
        "fit_kind": fit.get("kind"),
        "fit_why": "\n".join(fit.get("why", ())) or None,
        "profile": UNKNOWN if profile is None else profile_line(profile),
        "speed": speed_line(measured),
        "is_settled": model.state != "downloading",
        "progress": f"{texts.gib(model.done_bytes)} of {texts.gib(model.total_bytes)}",
        "done": model.done_bytes if model.total_bytes else None,
        "total": model.total_bytes,
        "reason": model.reason,
        "serve": "" if service is None else f"/api/services/{service['id']}/switch",
        "serve_body": "{}" if profile is None else f'{{"profile_id": {profile.id}}}',
        "serve_held": not is_here
        or is_moving
        or is_served
        or profile is None
        or model.state == "testing",
        "download": f"/api/models/{model.id}/download",
        "download_held": model.state == "downloading",
        "is_here": is_here,
        "test": f"/tests?model={model.id}",
        "delete": f"/models/{model.id}/delete",
    }


def size_line(model: Model) -> str:
    """Return bytes of weights, parameters and type."""
    count = (
        None
        if model.num_parameters is None
        else f"{number(model.num_parameters / 1e9)} billion parameters"
    )
    parts = [texts.gib(model.weights_bytes), count, model.format]
    return ", ".join(part for part in parts if part)


def profile_line(profile: Profile) -> str:
    """Return a profile's name, and its offload where it sets one."""
    offload, size = profile.settings.get("offload"), profile.settings.get("cpu_offload_gb")
    parts = [
        profile.name,
        None if offload is None else f"offload {offload}",
        None if size is None else f"{size} GiB",
    ]
    return ", ".join(part for part in parts if part)


def speed_line(measured: Sequence[Performance]) -> str:
    """Return the speeds of the last measurements, and when they were made."""
    metrics = {name: value for row in reversed(measured) for name, value in row.metrics.items()}
    found = [
        metric_text(name, metrics[name])
        for name in HEADLINES
        if isinstance(metrics.get(name), (int, float))
    ]
    if not found:
        return "not measured" if not measured else f"see {texts.moment(measured[0].created_s)[:10]}"
    return f"{', '.join(found[:2])} ({texts.moment(max(row.created_s for row in measured))[:10]})"


def figures(metrics: Mapping[str, Any]) -> str:
    """Return some measured figures in a line."""
    known = [
        f"{name} {metric_text(name, value)}"
        for name, value in metrics.items()
        if isinstance(value, (int, float))
    ]
    more = len(known) - MOST_FIGURES
    return ", ".join([*known[:MOST_FIGURES], *([f"and {more} more"] if more > 0 else [])])


def measured_rows(rows: Sequence[Performance], model: Model) -> list[dict[str, str]]:
    """Return what was measured of a model, a row for each part of each test."""
    names = {profile.id: profile.name for profile in model.profiles}
    return [
        {
            "moment": texts.moment(row.created_s)[:16],
            "profile": "removed" if row.profile_id is None else names.get(row.profile_id, UNKNOWN),
            "card": row.card,
            "part": row.part,
            "figures": figures(row.metrics),
        }
        for row in rows
    ]


def facts(model: Model) -> list[tuple[str, str]]:
    """Return what is known of a model."""
    return [
        ("source", model.source),
        ("kind", model.kind),
        ("revision", texts.word(model.revision)),
        ("folder", model.path or "not on this machine"),
        ("family", texts.word(model.family)),
        ("size", size_line(model)),
        ("longest sequence", texts.number(model.max_model_len, "tokens")),
        ("added", texts.moment(model.created_s)),
    ]


def profile_choices(rows: Sequence[Model]) -> list[dict[str, Any]]:
    """Return the profiles of models that are on this machine, to choose one."""
    return [
        {
            "key": profile.id,
            "id": profile.id,
            "value": profile.id,
            "model_id": model.id,
            "model": model.name,
            "label": f"{model.name}: {profile_line(profile)}",
        }
        for model in rows
        if model.state not in {"missing", "downloading"}
        for profile in model.profiles
    ]


def sweeps(choices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the models of profiles that can be chosen, with how many they have."""
    names = {each["model_id"]: each["model"] for each in choices}
    counts = Counter(each["model_id"] for each in choices)
    return [
        {"id": key, "label": f"{name}, {counts[key]} profile{'s' if counts[key] > 1 else ''}"}
        for key, name in names.items()
    ]


def catalogue_rows() -> list[dict[str, str]]:
    """Return the models of the catalogue, as they can be added."""
    return [
        {
            "name": entry.name,
            "source": entry.source.repo or entry.source.package or entry.path or "made up",
        }
        | {"state": STATES[state(entry).kind]}
        for entry in entries()
    ]


def removal_of(model: Model, found: Removal | str) -> dict[str, Any]:
    """Return what a delete takes, in words, and why it is not possible where it is not.

    Args:
        model: to delete.
        found: what goes, or why it cannot.
    """
    if isinstance(found, str):
        return {
            "answer": f"{model.name} cannot be deleted now",
            "lines": [],
            "held": found,
        } | NO_FILES
    freed = texts.gib(found.num_bytes)
    profiles = f"profile{'s' if len(found.profiles) != 1 else ''} {', '.join(found.profiles)}"
    counts = f"{found.num_tests:,} tests and {found.num_measurements:,} measurements"
    lines = [f"from the registry: {profiles}; {counts}"]
    if found.copy is not None:
        size = texts.gib(found.copy_bytes)
        lines.append(f"from the disk: its copy in lossless codes, {found.copy}, {size}")
    if found.folder is None:
        where = f"what is in {model.path} is yours and stays" if model.path else "none is here"
        lines.append(f"no {'other ' if found.copy else ''}files: {where}")
        what = f" and frees {freed}" if found.copy else "; no file goes"
        return {
            "answer": f"This deletes {model.name}{what}",
            "lines": lines,
            "held": None,
        } | NO_FILES
    size = texts.gib(found.num_bytes - found.copy_bytes)
    lines.append(f"from the disk: {found.folder}, {size}")
    return {
        "answer": f"This deletes {model.name} and frees {freed}",
        "lines": lines,
        "held": None,
        "has_files": True,
        "freed": size,
    }
