"""What notebooks show of a plan."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from engine.sealed import GIB


def plan_html(title: str, plan: Mapping[str, Any]) -> str:
    """Return a table of a plan as plain data: where weights lie, KV, both memories by part."""
    cells = (f"<tr><th>{escape(x)}</th><td>{escape(y)}</td></tr>" for x, y in _rows(plan))
    return f"<table><caption>{escape(title)}</caption>{''.join(cells)}</table>"


def _rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    sides = {"weights": plan["placements"], "GPU": plan["gpu"]["items"]}
    for side, items in (sides | {"host": plan["host"]["items"]}).items():
        for name, num_bytes in items.items():
            if num_bytes:
                yield f"{side}, {name}", f"{num_bytes / GIB:.3g} GiB"
    yield "GPU, budget", f"{plan['gpu']['budget_bytes'] / GIB:.3g} GiB"
    yield "KV on the GPU", f"{plan['kv']['tokens']:,} tokens"
    if plan["predicted"] is not None:
        yield "a token, predicted", f"{plan['predicted']['decode_step_ms']:.4g} ms"
