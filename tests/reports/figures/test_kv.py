"""The figure of the KV cache."""

import pytest

from reports.figures.run import FIGURES
from tests.reports.examples import kv_rows, ok_record
from tests.reports.figures.pictures import LIGHT, drawn, pixels, rgb, share_near


def test_the_kv_figure_has_a_panel_for_each_tier_that_is_there():
    with_host = pixels(drawn("kv"))
    alone = ok_record(samples={"kv": kv_rows(cpu_blocks=0) | {"part": "serve"}})
    still = kv_rows()
    still["rows"] = [[*row[:6], 0, 0, 0] for row in still["rows"]]
    png = FIGURES["kv"](ok_record(samples={"kv": still}), LIGHT)
    assert pixels(png).shape[0] < with_host.shape[0]  # nothing crossed the link
    assert pixels(FIGURES["kv"](alone, LIGHT)).shape[0] < with_host.shape[0]


@pytest.mark.thorough
def test_a_little_of_a_large_kv_cache_is_seen():
    png = FIGURES["kv"](ok_record(samples={"kv": kv_rows(0) | {"gpu_blocks": 2.5e6}}), LIGHT)
    held = [round(0.85 * part + 0.15 * 255) for part in rgb(LIGHT.accent)]
    assert share_near(png, "#" + "".join(f"{part:02x}" for part in held)) > 0.1


@pytest.mark.parametrize(
    "kv",
    [
        *(None, [], {"columns": ["time_s"], "rows": []}),
        kv_rows() | {"rows": kv_rows()["rows"][:1]},
        kv_rows() | {"columns": None},
        kv_rows() | {"block_bytes": 0},
        kv_rows(cpu_blocks=0) | {"gpu_blocks": 0},
    ],
)
def test_the_kv_figure_needs_rows_and_sizes(kv):
    assert FIGURES["kv"](ok_record(samples={"kv": kv}), LIGHT) is None
