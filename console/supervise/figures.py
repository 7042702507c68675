"""What a server tells of itself over HTTP: its state, what is in force, how much it serves."""

import json
import os
import time
from collections import deque
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from server.settings import API_KEY_VARIABLE

Plain = dict[str, Any]
RATE_S: Final = 5.0
"""Seconds over which tokens per second are counted."""
_GAUGES: Final = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "link_share": "tightfit:link_share",
    "host_blocks": "tightfit:kv_host_blocks",
    "host_blocks_used": "tightfit:kv_host_blocks_used",
    "preemptions": "vllm:num_preemptions_total",
}
"""Figure of the load -> metric of the server."""
_COUNTERS: Final = {
    "prefill_tokens_s": "tightfit:prefill_tokens_total",
    "decode_tokens_s": "tightfit:decode_tokens_total",
}
"""Rate -> the metric that counts for it."""
_METRICS: Final = (*_GAUGES.values(), *_COUNTERS.values())
_COUNTS: Final = frozenset({"running", "waiting", "host_blocks", "host_blocks_used", "preemptions"})


class Figures:
    """Asks one server, on the event loop; what is not to be had is None.

    Args:
        client: asks; it has a timeout.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._counts: deque[tuple[float, dict[str, float]]] = deque()

    def forget(self) -> None:
        """Begin to count anew: another process serves."""
        self._counts.clear()

    async def health(self, url: str) -> Plain | None:
        """Return what /health says, ready or not."""
        return await self._get(f"{url}/health")

    async def info(self, url: str) -> Plain | None:
        """Return what is in force, as /info says."""
        return await self._get(f"{url}/info")

    async def load(self, url: str) -> Plain | None:
        """Return how much is served: time_s, the keys of _GAUGES, and tokens per second."""
        text = await self._fetch(f"{url}/metrics")
        if text is None:
            return None
        values, now_s = metric_values(text), time.time()
        found: Plain = {"time_s": now_s}
        for name, metric in _GAUGES.items():
            value = values.get(metric)
            found[name] = int(value) if value is not None and name in _COUNTS else value
        self._counts.append((now_s, values))
        while len(self._counts) > 2 and now_s - self._counts[1][0] > RATE_S:
            self._counts.popleft()
        first_s, first = self._counts[0]
        for name, metric in _COUNTERS.items():
            total, before = values.get(metric), first.get(metric)
            if total is None or before is None or now_s <= first_s:
                found[name] = None
            else:
                found[name] = max(0.0, total - before) / (now_s - first_s)
        return found

    async def _get(self, url: str) -> Plain | None:
        text = await self._fetch(url)
        try:
            found = None if text is None else json.loads(text)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    async def _fetch(self, url: str) -> str | None:
        """Return what a server answers; None where it does not."""
        key = os.environ.get(API_KEY_VARIABLE, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            answer = await self._client.get(url, headers=headers)
        except httpx.HTTPError:
            return None
        return answer.text if answer.status_code in {200, 503} else None


def metric_values(text: str) -> dict[str, float]:
    """Return the sums of the metrics that are shown, from Prometheus' text format."""
    lines = [line for line in text.splitlines() if line.startswith(_METRICS)]
    found: dict[str, float] = {}
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def effective_of(info: Plain) -> Plain:
    """Return the settings in force, as a server's /info has them; what it does not say is None."""
    memory, placed = info.get("memory") or {}, info.get("placement_bytes")
    host, blocks = memory.get("host_items"), info.get("num_gpu_blocks")
    kv_host = None if host is None else host.get("pinned_kv", 0) + host.get("pageable_kv", 0)
    off = None if placed is None else sum(placed.values()) - placed.get("resident", 0)
    return {
        "model": info.get("model"),
        "dtype": info.get("dtype"),
        "offload": info.get("backend"),
        "offload_bytes": off,
        "max_model_len": info.get("max_model_len"),
        "max_num_seqs": info.get("max_num_seqs"),
        "kv_tokens": None if blocks is None else blocks * info["block_size"],
        "kv_host_bytes": kv_host,
        "budget_bytes": memory.get("gpu_budget_bytes"),
    }


def holds_of(pid: int | None, info: Plain) -> Plain | None:
    """Return what a process holds of the machine, as its /info says; None: it does not say."""
    memory = info.get("memory") or {}
    if pid is None or not memory:
        return None
    items = memory.get("gpu_items") or {}
    return {
        "pid": pid,
        "gpu_uuid": memory.get("gpu_uuid"),
        "weights_bytes": items.get("weights"),
        "kv_bytes": items.get("kv_cache"),
        "budget_bytes": memory.get("gpu_budget_bytes"),
        "pinned_bytes": memory.get("host_pinned_bytes"),
    }
