"""Numbers, sizes, times, settings and MLflow's addresses as people read them."""

import json
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import quote, urlencode

ABSENT: Final = "n/a"
GIB: Final = 2**30
LOCAL: Final = "http://127.0.0.1:5000"
"""Where `tightfit ui` serves them."""
SWEEPS: Final = "harness.sweep_ids"
"""Tag of a point: the sweeps that it is of, those that took it over too."""


def number(value: float | None) -> str:
    """Return a number with three or four significant digits, `n/a` for None."""
    if value is None:
        return ABSENT
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.095:
        return f"{value:.2f}"
    return f"{value:.3g}" if value else "0"


def gib(num_bytes: float | None) -> str:
    """Return bytes as GiB with its unit, as MiB below 0.1 GiB, as KiB below 0.1 MiB."""
    if num_bytes is None:
        return ABSENT
    if 0 < abs(num_bytes) < 2**20 / 10:
        return f"{number(num_bytes / 2**10)} KiB"
    if 0 < abs(num_bytes) < GIB / 10:
        return f"{number(num_bytes / 2**20)} MiB"
    return f"{number(num_bytes / GIB)} GiB"


def duration(seconds: float | None) -> str:
    """Return seconds as `12.3 s`, `4 min 05 s` or `2 h 03 min`."""
    if seconds is None:
        return ABSENT
    if seconds < 100:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def seconds(value: float | None) -> str:
    """Return seconds to the millisecond below 1 s, else as `number`, without the unit."""
    return number(value) if value is None or abs(value) >= 1 else f"{value:.3f}"


def label_of(part: str) -> str:
    """Return the name of a part or a phase as people read it."""
    return part.removesuffix("_s").replace("_", " ")


def flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, leaf) of nested mappings; empty mappings and lists are leaves."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, name)
        else:
            yield name, value


def leaf(value: object) -> str:
    """Return one configuration or environment value as text, JSON for all but text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def shorten(text: str, length: int) -> str:
    """Return the text on one line of at most `length` characters, cut in the middle."""
    line = " ".join(text.split())
    if len(line) <= length:
        return line
    head = (length - 3 + 1) // 2
    tail = length - 3 - head
    return f"{line[:head]}...{line[len(line) - tail :]}"


def last_keys(text: str) -> str:
    """Return overrides with the last part of each dotted key; two where one would not tell apart.

    What a figure has room for: `offload.uva.cpu_offload_gb=4` becomes `cpu_offload_gb=4`.
    """
    pairs = [word.partition("=") for word in text.split(" ")]
    ends = [key.rpartition(".")[2] for key, _, _ in pairs]
    found = []
    for (key, sign, value), end in zip(pairs, ends, strict=True):
        kept = ".".join(key.split(".")[-2:]) if ends.count(end) > 1 else end
        found.append((kept if sign else key) + sign + value)
    return " ".join(found)


def runs_search(tag: str, value: str) -> str:
    """Return what MLflow searches to find runs with a value in a tag."""
    return f"tags.`{tag}` LIKE '%{value}%'"


def experiment_page(
    base: str, experiment_id: str | None, search: str = "", *, is_chart: bool = False
) -> str:
    """Return the address of an experiment's runs in the UI, all or those of a search.

    MLflow opens on its pages for traces unless the address says otherwise.

    Args:
        base: the server's address.
        experiment_id: None: the page of all experiments.
        search: which runs; empty: all.
        is_chart: whether the page shows charts first.
    """
    query = {"workflowType": "machine_learning"}
    if is_chart:
        query["compareRunsMode"] = "CHART"
    query["searchFilter"] = search  # empty too: the page would keep the search of its last visit
    if is_chart:
        # Sorted by time, points are folded into their sweep, and its charts lack them.
        query |= {"orderByKey": "tags.`mlflow.runName`", "orderByAsc": "true"}
    place = "experiments" if experiment_id is None else f"experiments/{experiment_id}/runs"
    return f"{base.rstrip('/')}/#/{place}?{urlencode(query, quote_via=quote)}"
