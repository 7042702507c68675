"""The setting model.routing, and traces of routing as Parquet."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import ConfigError
from engine.model.routing import (
    KEY_TOKENS,
    ExpertSizes,
    Routing,
    RoutingTrace,
    check_routing,
    first_row,
    hit_shares,
    is_replaced,
    read_trace,
    trace_hit_shares,
    trace_reuse,
    write_trace,
)

SIZES = ExpertSizes(layers=(1, 3), num_experts=6, top_k=2)


def ids(num_tokens: int = 5) -> np.ndarray:
    draws = np.random.default_rng(1)
    each = [draws.permutation(6)[:2] for _ in range(num_tokens * 2)]
    return np.array(each, dtype=np.int16).reshape(num_tokens, 2, 2)


def test_setting_has_three_forms() -> None:
    assert Routing.parse("dummy") == Routing("dummy")
    assert Routing.parse("trace:a b/[c]:d.parquet") == Routing("trace", file="a b/[c]:d.parquet")
    assert Routing.parse("synthetic:0.8") == Routing("synthetic", reuse=0.8)
    assert [Routing.parse(f"synthetic:{x}").reuse for x in (0, 1)] == [0, 1]
    texts = (None, "dummy", "trace:f", "synthetic:0")
    assert [is_replaced(text) for text in texts] == [False, False, True, True]


@pytest.mark.parametrize("text", ["", "router", "dummy:1", "trace:", "trace: ", "synthetic", 3])
def test_other_forms_are_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=r"model\.routing: expected .*, got "):
        Routing.parse(text)


@pytest.mark.parametrize("value", ["", "x", "-0.1", "1.01", "nan", "inf"])
def test_reuse_is_a_share(value: str) -> None:
    with pytest.raises(ConfigError, match="expected synthetic:REUSE with a share from 0 to 1"):
        Routing.parse(f"synthetic:{value}")


def test_real_weights_keep_their_router() -> None:
    check_routing(None, "auto")
    check_routing("synthetic:0.5", "dummy")
    for text in ("dummy", "trace:f", "synthetic:0.5"):
        with pytest.raises(ConfigError, match="expected null with load_format=safetensors"):
            check_routing(text, "safetensors")


def test_first_row_is_of_the_first_tokens() -> None:
    prompt = list(range(40))
    assert first_row(prompt) == first_row(prompt[:KEY_TOKENS])
    assert first_row(prompt) != first_row([1, *prompt[1:]])
    assert first_row([1, 2, 3]) != first_row([1, 2])
    assert first_row([1, 2**31]) == zlib.crc32(b"\1\0\0\0\0\0\0\x80")


@pytest.mark.thorough
def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "in a folder" / "a [trace].parquet"
    write_trace(path, RoutingTrace("some", SIZES, ids()))
    found = read_trace(path)
    assert found.model == "some"
    assert found.sizes == SIZES
    np.testing.assert_array_equal(found.ids, ids(), strict=True)
    assert len(found.digest) == 64
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    table = pq.read_table(path)
    assert table.column_names == ["token", "layer", "ids"]
    assert table.schema.metadata == {b"model": b"some", b"num_experts": b"6", b"top_k": b"2"}
    assert table.slice(3, 1).to_pylist() == [{"token": 1, "layer": 3, "ids": ids()[1, 1].tolist()}]


def columns(**others: Any) -> dict[str, Any]:
    values = {
        "token": pa.array([0, 0, 1, 1], pa.int64()),
        "layer": pa.array([1, 3, 1, 3], pa.int32()),
        "ids": pa.array([[0, 1], [2, 3], [4, 5], [1, 0]], pa.list_(pa.int16())),
    }
    return values | others


FAULTS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "columns": (
        lambda: {"token": pa.array([0])},
        "expected the columns token, layer, ids, got token",
    ),
    "kind": (
        lambda: columns(token=pa.array(["a", "a", "b", "b"])),
        "expected integers in the column token, no nulls, got string",
    ),
    "null": (
        lambda: columns(layer=pa.array([1, None, 1, 3])),
        "expected integers in the column layer, no nulls, got int64 with 1 nulls",
    ),
    "no list": (
        lambda: columns(ids=pa.array([1, 2, 3, 4])),
        "expected lists of integers in the column ids, no nulls, got int64",
    ),
    "length": (
        lambda: columns(ids=pa.array([[0, 1], [2], [4, 5], [1, 0]])),
        "expected top_k=2 ids in row 1, got 1",
    ),
    "null id": (
        lambda: columns(ids=pa.array([[0, 1], [2, None], [4, 5], [1, 0]])),
        "expected integers in the column ids, got a null",
    ),
    "range": (
        lambda: columns(ids=pa.array([[0, 1], [2, 3], [4, 6], [1, 0]])),
        r"expected ids from 0 to 5 in row 2, got \[4, 6\]",
    ),
    "twice": (
        lambda: columns(ids=pa.array([[0, 1], [2, 3], [4, 5], [1, 1]])),
        r"expected distinct ids in row 3, got \[1, 1\]",
    ),
    "gap": (
        lambda: columns(token=pa.array([0, 0, 2, 2])),
        "expected token 1, layer 1 in row 2, got token 2, layer 1",
    ),
    "layer": (
        lambda: columns(layer=pa.array([1, 3, 1, 2])),
        "expected token 1, layer 3 in row 3, got token 1, layer 2",
    ),
    "order": (
        lambda: columns(layer=pa.array([3, 1, 3, 1])),
        r"expected layers in order, and the same of each token, got 4 rows with .*\[3, 1\]",
    ),
    "cut": (
        lambda: {name: array.slice(0, 3) for name, array in columns().items()},
        r"expected layers in order, and the same of each token, got 3 rows with .*\[1, 3\]",
    ),
    "empty": (
        lambda: {name: array.slice(0, 0) for name, array in columns().items()},
        "expected at least one row, got none",
    ),
}
METADATA = {"model": "some", "num_experts": "6", "top_k": "2"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_trace_is_refused(tmp_path: Path, fault: str) -> None:
    made, message = FAULTS[fault]
    path = tmp_path / "trace.parquet"
    pq.write_table(pa.table(made()).replace_schema_metadata(METADATA), path)
    with pytest.raises(ConfigError, match=f"trace.parquet: {message}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"model": ""}, "expected the metadata model, num_experts, top_k, got no model"),
        ({"top_k": "two"}, "expected top_k from 1 to 32768, got 'two'"),
        ({"num_experts": "0"}, "expected num_experts from 1 to 32768, got '0'"),
        ({"num_experts": "9" * 5000}, "expected num_experts from 1 to 32768, got '9999"),
        ({"top_k": "7"}, "expected top_k of at most num_experts=6, got 7"),
    ],
)
def test_metadata_are_checked(tmp_path: Path, others: dict[str, str], message: str) -> None:
    path = tmp_path / "trace.parquet"
    pq.write_table(pa.table(columns()).replace_schema_metadata(METADATA | others), path)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_no_file_and_no_parquet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a trace, found no file at "):
        read_trace(tmp_path / "none.parquet")
    path = tmp_path / "text.parquet"
    path.write_text("token,layer,ids\n")
    with pytest.raises(ConfigError, match="expected a Parquet file, got one that cannot be read"):
        read_trace(path)
    write_trace(path, RoutingTrace("some", SIZES, ids()))
    damaged = path.read_bytes().replace(b"layer", b"l\xb7yer")
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match="expected a Parquet file, got one that cannot be read"):
        read_trace(path)


def test_a_trace_whose_bytes_changed_is_refused(tmp_path: Path) -> None:
    """Wherever it is in the columns: the routing would be another one."""
    path = tmp_path / "trace.parquet"
    write_trace(path, RoutingTrace("some", SIZES, ids()))
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    for place in range(4, len(whole) - footer, 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            found = read_trace(path)
        except ConfigError:
            continue
        np.testing.assert_array_equal(found.ids, ids())


def test_a_trace_is_read_and_replayed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The many plans of an answer ask for the same."""
    file = str(tmp_path / "trace.parquet")
    write_trace(Path(file), RoutingTrace("a", SIZES, ids(20)))
    reuse, shares = trace_reuse(file), trace_hit_shares(file, 2)
    assert reuse is not None
    for name in ("read_trace", "reuse_share", "hit_shares"):
        monkeypatch.delattr(f"engine.model.routing.{name}")
    assert (trace_reuse(file), trace_hit_shares(file, 2)) == (reuse, shares)


def test_hit_shares_are_those_of_banks_that_keep_what_was_used_last() -> None:
    table = np.array([[0, 1], [1, 2], [0, 1], [3, 0]], dtype=np.int16)[:, None]
    shares = hit_shares(table, 4, 1)
    assert (shares[0], shares[4]) == (0, 1)
    # With two slots expert 1 of rows 1 and 2, and 0 of rows 3 and 0, which follows it.
    assert shares[2] == 0.5
    assert hit_shares(table[:1], 4, 3)[2] == 1
    assert hit_shares(table, 4, 4)[2] < 0.6  # all four are routed to in each step


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (ExpertSizes((1, 3), 8, 2), "a trace with 8 experts, as the model has, got 6 in f"),
        (ExpertSizes((1, 3), 6, 1), "a trace with 1 experts a token, as the model has, got 2"),
        (
            ExpertSizes((1, 2), 6, 2),
            r"with \[1, 2\] layers with experts, as the model has, got \[1, 3\]",
        ),
    ],
)
def test_a_trace_of_another_model_is_refused(sizes: ExpertSizes, message: str) -> None:
    trace = RoutingTrace("some", SIZES, ids())
    trace.check_model("f", SIZES)
    with pytest.raises(ConfigError, match=message):
        trace.check_model("f", sizes)
