"""Server-sent events of values that change: all of them first, then those that are others."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from starlette.responses import StreamingResponse

QUIET_S: Final = 5.0
"""A stream says at least so often that it lives."""
HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}


def respond(live: Callable[[], dict[str, Any]], changes: AsyncIterator[Any]) -> StreamingResponse:
    """Return a response with an event `snapshot` of all values, then events `change`.

    Args:
        live: returns the values by name; it may block.
        changes: yields at once, and again after each change.
    """
    return StreamingResponse(
        _events(live, changes), media_type="text/event-stream", headers=HEADERS
    )


async def _events(
    live: Callable[[], dict[str, Any]], changes: AsyncIterator[Any]
) -> AsyncIterator[str]:
    told: dict[str, Any] | None = None
    told_s = 0.0
    async for _ in changes:
        values = await asyncio.to_thread(live)
        before = told or {}
        changed = {
            name: value
            for name, value in values.items()
            if name not in before or before[name] != value
        }
        now_s = time.time()
        if told is not None and not changed and now_s - told_s < QUIET_S:
            continue
        kind = "snapshot" if told is None else "change"
        told, told_s = values, now_s
        yield f"event: {kind}\ndata: {json.dumps({**changed, 'now_s': now_s})}\n\n"
