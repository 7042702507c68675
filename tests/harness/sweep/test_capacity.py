"""The table of the KV cache: a row for each tier and group, what runs at once, what is kept."""

from pathlib import Path
from typing import Any

from harness.point.show import capacity_lines, summary_lines
from reports.record.record import RunRecord


def group(layers: int, window: int | None, blocks: int) -> dict[str, Any]:
    return {
        "layers": layers,
        "window": window,
        "block_bytes": 2**20,
        "num_blocks": blocks,
        "tokens": 16 * blocks,
    }


def kv(*groups: dict[str, Any], host: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "block_size": 16,
        "max_model_len": 4096,
        "max_concurrency": 2.25,
        "max_kept": 9.5,
        "longest_tokens": 18_000,
        "groups": list(groups),
        "host": host,
    }


def test_one_tier() -> None:
    assert capacity_lines(kv(group(32, None, 1024))) == [
        "  KV cache  blocks  tokens   GiB",
        "  GPU        1,024  16,384  1.00",
        "  longest sequence: 18,000 tokens (max_model_len 4,096); 2.2 sequences of 4,096",
        "    tokens run at once",
    ]


def test_small_caches_are_told_in_digits_too() -> None:
    small = group(4, None, 26) | {"block_bytes": 2**15}
    assert capacity_lines(kv(small))[1] == "  GPU           26     416  0.00079"


def test_two_tiers_and_what_compute_reaches() -> None:
    host = {"num_pinned": [512], "num_pageable": [2048], "num_in_place": 512}
    lines = capacity_lines(kv(group(32, None, 1024), host=host))
    assert lines[1:4] == [
        "  GPU                           1,024  16,384  1.00",
        "  host, pinned, used in place     512   8,192  0.50",
        "  host, pageable                2,048  32,768  2.00",
    ]
    assert " ".join(lines[4:]).endswith(
        "2.2 sequences of 4,096     tokens run at once, 9.5 are kept"
    )


def test_two_groups_of_layers() -> None:
    host = {"num_pinned": [512, 512], "num_pageable": [0, 0], "num_in_place": 0}
    lines = capacity_lines(kv(group(5, None, 1024), group(29, 512, 64), host=host))
    assert [line.split("  ")[1] for line in lines[1:5]] == [
        "GPU (5 layers, all tokens)",
        "host, pinned (5 layers, all tokens)",
        "GPU (29 layers, window of 512)",
        "host, pinned (29 layers, window of 512)",
    ]


def test_the_summary_of_a_point_has_it() -> None:
    plan = {"kv": kv(group(32, None, 1024))}
    record = RunRecord(run_id="1", name="n", status="ok", plan=plan)
    lines = summary_lines(record, Path("absent"), view_command=None)
    at = lines.index("  KV cache  blocks  tokens   GiB")
    assert lines[at : at + 4] == capacity_lines(plan["kv"])
