"""The table of what the KV cache holds: blocks and tokens of each tier, sequences, lengths."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from harness.columns import columns

__all__ = ["capacity_lines"]

GIB: Final = 2**30
_COLUMNS: Final = ("KV cache", "blocks", "tokens", "GiB")


def capacity_lines(kv: Mapping[str, Any]) -> list[str]:
    """Return the table as lines of text.

    Args:
        kv: `plan.kv` of a record.
    """
    length = kv["max_model_len"]
    found = f"  longest sequence {kv['longest_tokens']:,} tokens (max_model_len {length:,})"
    found += f"; of {length:,} tokens {kv['max_concurrency']:.1f} run at once"
    if kv["host"] is not None:
        found += f", {kv['max_kept']:.1f} are kept"
    return [*columns([_COLUMNS, *_rows(kv)]), found]


def _rows(kv: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    groups, host = kv["groups"], kv["host"]
    for index, group in enumerate(groups):
        name = _group_name(groups, index)
        yield _row(f"GPU{name}", group["num_blocks"], group, kv)
        if host is None:
            continue
        pinned, pageable = host["num_pinned"][index], host["num_pageable"][index]
        how = ", used in place" if index == 0 and host["num_in_place"] else ""
        if pinned:
            yield _row(f"host, pinned{how}{name}", pinned, group, kv)
        if pageable:
            yield _row(f"host, pageable{name}", pageable, group, kv)


def _group_name(groups: Sequence[Mapping[str, Any]], index: int) -> str:
    """Which layers, where there are two kinds."""
    if len(groups) == 1:
        return ""
    group = groups[index]
    kind = "all tokens" if group["window"] is None else f"window of {group['window']}"
    return f" ({group['layers']} layers, {kind})"


def _row(
    name: str, blocks: int, group: Mapping[str, Any], kv: Mapping[str, Any]
) -> tuple[str, str, str, str]:
    size = blocks * group["block_bytes"] / GIB
    gib = f"{size:.2f}" if size >= 0.1 else f"{size:.2g}"
    return name, f"{blocks:,}", f"{blocks * kv['block_size']:,}", gib
