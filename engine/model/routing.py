"""Which experts tokens go to: the setting model.routing, and traces of real routing as Parquet.

A trace has a row for each token and layer with experts: `token` (int64, from 0 without gaps),
`layer` (int32, the model's own number) and `ids` (a list of int16, the experts in the router's
order), in order of token, then layer. The file's metadata are `model`, `num_experts` and `top_k`.
"""

import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from sys import byteorder
from typing import TYPE_CHECKING, Any, Final

from engine.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from engine.model.spec import ModelSpec

SETTING: Final = "model.routing"
DUMMY: Final = "dummy"
TRACE: Final = "trace"
SYNTHETIC: Final = "synthetic"
ROUTER: Final = "router"
"""What a record calls the routing of real weights."""
WINDOW_TOKENS: Final = 8
"""Tokens before one whose experts a synthetic pick repeats."""
KEY_TOKENS: Final = 16
"""Leading tokens of a prompt that choose where in the table its sequence begins."""
TABLE_ROWS: Final = 4096
"""Most rows of a table; of a longer trace the first ones."""
MAX_EXPERTS: Final = 2**15
_REPLAYED_STEPS: Final = 512
"""Steps from which hit shares are counted."""
_FORMS: Final = f"{DUMMY}, {TRACE}:FILE or {SYNTHETIC}:REUSE"
_COLUMNS: Final = ("token", "layer", "ids")
_METADATA: Final = ("model", "num_experts", "top_k")


@dataclass(frozen=True)
class Routing:
    """How tokens of a model with dummy weights find their experts."""

    kind: str
    """dummy (the router's own choice) | trace | synthetic."""
    file: str | None = None
    """File of a trace."""
    reuse: float | None = None
    """Share of synthetic picks that repeat an expert of the last WINDOW_TOKENS tokens."""

    @classmethod
    def parse(cls, text: object) -> "Routing":
        """Read the setting.

        Raises:
            ConfigError: It has none of the three forms.
        """
        kind, colon, value = text.partition(":") if isinstance(text, str) else ("", "", "")
        if kind == DUMMY and not colon:
            return cls(DUMMY)
        if kind == TRACE and value.strip():
            return cls(TRACE, file=value)
        if kind == SYNTHETIC:
            try:
                reuse = float(value)
            except ValueError:
                reuse = math.nan
            if 0 <= reuse <= 1:
                return cls(SYNTHETIC, reuse=reuse)
            raise ConfigError(
                f"{SETTING}: expected {SYNTHETIC}:REUSE with a share from 0 to 1, got {text!r}."
            )
        raise ConfigError(f"{SETTING}: expected {_FORMS}, got {text!r}.")


def is_replaced(text: str | None) -> bool:
    """Whether a table of experts takes the place of a router's choice."""
    return text is not None and Routing.parse(text).kind != DUMMY


def check_routing(text: object, load_format: str) -> None:
    """Raise ConfigError unless the setting has a form, and is of dummy weights or null."""
    if text is None:
        return
    Routing.parse(text)
    if load_format != DUMMY:
        raise ConfigError(
            f"{SETTING}: expected null with load_format={load_format}, got {text!r}: the tokens "
            f"of real weights are those of their own router. Remove it, or set "
            "model.load_format=dummy."
        )


@dataclass(frozen=True)
class ExpertSizes:
    """What a routing must fit: the layers with experts, and of each layer experts and picks."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int


def expert_sizes(spec: "ModelSpec") -> ExpertSizes | None:
    """Return what a routing must fit; None for a model without experts."""
    if not spec.expert_layers:
        return None
    return ExpertSizes(spec.expert_layers, spec.num_experts, spec.num_experts_per_tok)


def check_trace(routing: str | None, spec: "ModelSpec | None") -> None:
    """Raise ConfigError where a setting names a trace that is absent, malformed or of other sizes.

    Sizes are those of a model with experts, where they are known.
    """
    if routing is None or (file := Routing.parse(routing).file) is None:
        return
    trace = _table(*_version(file))
    sizes = None if spec is None else expert_sizes(spec)
    if sizes is not None:
        trace.check_model(file, sizes)


def check_experts(spec: "ModelSpec", routing: str | None, *, is_recorded: bool) -> None:
    """Raise ConfigError where a routing is set or to be recorded of a model without experts."""
    if spec.expert_layers:
        return
    if routing is not None:
        raise ConfigError(
            f"{SETTING}: expected null for a model without experts ({spec.model_type}), got "
            f"{routing!r}. Remove it."
        )
    if is_recorded:
        raise ConfigError(
            f"record_routing: expected a model with experts, got {spec.model_type}, which has "
            "none. Remove it."
        )


def first_row(prompt_token_ids: Sequence[int]) -> int:
    """Return where in a table of routing a prompt's sequence begins.

    The token at a position uses row (first_row + position) mod P of the table's P rows. This is the
    CRC-32 of the first KEY_TOKENS token ids as little-endian uint32: prompts that differ there use
    other rows, whatever batch they are in, and equal prompts the same rows in every run.
    """
    head = array("I", prompt_token_ids[:KEY_TOKENS])
    if byteorder == "big":
        head.byteswap()
    return zlib.crc32(head.tobytes())


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Experts of N tokens in L layers."""

    model: str
    """Name of the model that chose them."""
    sizes: ExpertSizes
    ids: "np.ndarray"
    """int16 [N, L, top_k]."""
    digest: str = ""
    """SHA-256 of the file that it was read from, hexadecimal."""

    def check_model(self, path: str, sizes: ExpertSizes) -> None:
        """Raise ConfigError unless it fits a model's sizes."""
        for name, found, wanted in (
            ("experts", self.sizes.num_experts, sizes.num_experts),
            ("experts a token", self.sizes.top_k, sizes.top_k),
            ("layers with experts", list(self.sizes.layers), list(sizes.layers)),
        ):
            if found != wanted:
                raise ConfigError(
                    f"{SETTING}: expected a trace with {wanted} {name}, as the model has, got "
                    f"{found} in {path} (of {self.model}). Choose a trace of this model."
                )


def write_trace(path: Path, trace: RoutingTrace) -> None:
    """Write a trace as Parquet; a file that is there is replaced when all is written."""
    import numpy as np  # noqa: PLC0415  planning does without
    import pyarrow as pa  # noqa: PLC0415  takes a tenth of a second
    import pyarrow.parquet as pq  # noqa: PLC0415

    num_tokens, num_layers, top_k = trace.ids.shape
    layers = np.asarray(trace.sizes.layers, dtype=np.int32)
    values = pa.array(np.ascontiguousarray(trace.ids, dtype=np.int16).reshape(-1))
    offsets = np.arange(0, trace.ids.size + 1, top_k, dtype=np.int32)
    facts = {
        "model": trace.model,
        "num_experts": str(trace.sizes.num_experts),
        "top_k": str(trace.sizes.top_k),
    }
    table = pa.table(
        {
            "token": np.repeat(np.arange(num_tokens, dtype=np.int64), num_layers),
            "layer": np.tile(layers, num_tokens),
            "ids": pa.ListArray.from_arrays(offsets, values),
        }
    ).replace_schema_metadata(facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
    temporary.replace(path)


def read_trace(path: Path) -> RoutingTrace:
    """Read and check a trace.

    Raises:
        ConfigError: There is no such file, or it is no trace; the first fault is named.
    """
    import pyarrow as pa  # noqa: PLC0415  takes a tenth of a second
    import pyarrow.parquet as pq  # noqa: PLC0415

    if not path.is_file():
        raise ConfigError(f"{SETTING}: expected a trace, found no file at {path.absolute()}.")
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        names = tuple(table.column_names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise _fault(path, "a Parquet file", f"one that cannot be read ({reason})") from None
    if names != _COLUMNS:
        raise _fault(path, f"the columns {', '.join(_COLUMNS)}", ", ".join(names))
    model, num_experts, top_k = _metadata(path, table.schema.metadata or {})
    token, layer, ids = _columns(path, table, top_k)
    sizes = ExpertSizes(_layers(path, token, layer), num_experts, top_k)
    ids = ids.reshape(-1, len(sizes.layers), top_k)
    _check_ids(path, ids, sizes)
    digest = sha256(path.read_bytes()).hexdigest()
    return RoutingTrace(model, sizes, ids.astype("int16"), digest)


def reuse_share(ids: "np.ndarray") -> float | None:
    """Return the share of picks that repeat an expert of their layer's last WINDOW_TOKENS rows.

    Args:
        ids: int [N, L, k]. The first WINDOW_TOKENS rows, which have fewer before them, are not
            counted; None where there are no more.
    """
    import numpy as np  # noqa: PLC0415  planning does without

    later = ids[WINDOW_TOKENS:]
    if not len(later):
        return None
    is_repeat = np.zeros(later.shape, dtype=bool)
    for back in range(1, WINDOW_TOKENS + 1):
        before = ids[WINDOW_TOKENS - back : len(ids) - back]
        is_repeat |= (later[..., :, None] == before[..., None, :]).any(axis=-1)
    return float(is_repeat.mean())


def hit_shares(ids: "np.ndarray", num_experts: int, num_sequences: int) -> tuple[float, ...]:
    """Return the share of routed experts that a bank of 0, 1, ... num_experts slots has.

    Sequences run through the table from rows that are evenly spaced. A bank has the experts that
    were used last; one counts once in a step.

    Args:
        ids: int [P, L, k], a table.
        num_experts: Of a layer.
        num_sequences: That decode in each step.
    """
    import numpy as np  # noqa: PLC0415

    num_rows, num_layers, _ = ids.shape
    numbers = np.arange(num_experts)
    starts = np.arange(num_sequences) * num_rows // num_sequences
    last_use = np.full((num_layers, num_experts), -1)
    depths = np.zeros(num_experts, dtype=np.int64)
    num_routed = 0
    for step in range(_REPLAYED_STEPS):
        chosen = ids[(starts + step) % num_rows].transpose(1, 0, 2).reshape(num_layers, -1)
        routed = np.zeros(last_use.shape, dtype=bool)
        np.put_along_axis(routed, chosen, values=True, axis=1)
        if step >= _REPLAYED_STEPS // 4:  # banks are filled before
            depth = np.argsort(np.argsort(-last_use, axis=1), axis=1)
            depths += np.bincount(depth[routed & (last_use >= 0)], minlength=num_experts)
            num_routed += int(routed.sum())
        np.copyto(last_use, step * num_experts + numbers, where=routed)
    return (0.0, *(depths.cumsum() / num_routed).tolist())


def trace_reuse(file: str) -> float | None:
    """Return the reuse_share of what a table has of a trace.

    Raises:
        ConfigError: as of read_trace.
    """
    return _reuse_share(*_version(file))


def trace_hit_shares(file: str, num_sequences: int) -> tuple[float, ...]:
    """Return the hit_shares of what a table has of a trace.

    Raises:
        ConfigError: as of read_trace.
    """
    return _hit_shares(*_version(file), num_sequences)


def _version(file: str) -> tuple[Path, int]:
    """Return a file and when it was changed."""
    path = Path(file).expanduser()
    return path, path.stat().st_mtime_ns if path.is_file() else 0


@lru_cache(maxsize=8)  # an answer may take many plans
def _reuse_share(path: Path, changed_ns: int) -> float | None:
    return reuse_share(_table(path, changed_ns).ids)


@lru_cache(maxsize=64)
def _hit_shares(path: Path, changed_ns: int, num_sequences: int) -> tuple[float, ...]:
    trace = _table(path, changed_ns)
    return hit_shares(trace.ids, trace.sizes.num_experts, num_sequences)


@lru_cache(maxsize=8)
def _table(path: Path, changed_ns: int) -> RoutingTrace:  # noqa: ARG001
    trace = read_trace(path)
    return replace(trace, ids=trace.ids[:TABLE_ROWS])


def _fault(path: Path, expected: str, got: str) -> ConfigError:
    return ConfigError(
        f"{SETTING}: {path}: expected {expected}, got {got}. docs/experts.md has the format."
    )


def _metadata(path: Path, raw: dict[bytes, bytes]) -> tuple[str, int, int]:
    found = {name: raw.get(name.encode(), b"").decode(errors="replace") for name in _METADATA}
    missing = [name for name in _METADATA if not found[name]]
    if missing:
        raise _fault(path, f"the metadata {', '.join(_METADATA)}", f"no {', '.join(missing)}")
    numbers = []
    for name, most in (("num_experts", MAX_EXPERTS), ("top_k", MAX_EXPERTS)):
        text = found[name]
        is_short = text.isascii() and text.isdecimal() and len(text) < 9
        if not (is_short and 1 <= int(text) <= most):
            raise _fault(path, f"{name} from 1 to {most}", repr(text[:20]))
        numbers.append(int(text))
    num_experts, top_k = numbers
    if top_k > num_experts:
        raise _fault(path, f"top_k of at most num_experts={num_experts}", str(top_k))
    return found["model"], num_experts, top_k


def _columns(path: Path, table: Any, top_k: int) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
    """Return token [R], layer [R] and ids int16 [R, top_k] of the rows."""
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    kinds = {"token": pa.types.is_integer, "layer": pa.types.is_integer, "ids": _is_list}
    for name, is_right in kinds.items():
        column = table.column(name)
        if not is_right(column.type) or column.null_count:
            wanted = "lists of integers" if name == "ids" else "integers"
            got = f"{column.type} with {column.null_count} nulls"
            raise _fault(path, f"{wanted} in the column {name}, no nulls", got)
    if not table.num_rows:
        raise _fault(path, "at least one row", "none")
    lists = table.column("ids").combine_chunks()
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(lengths != top_k)
    if wrong.size:
        row = int(wrong[0])
        raise _fault(path, f"top_k={top_k} ids in row {row}", str(int(lengths[row])))
    values = lists.flatten()
    if values.null_count:
        raise _fault(path, "integers in the column ids", "a null")
    ids = values.to_numpy(zero_copy_only=False).astype(np.int64).reshape(-1, top_k)
    token, layer = (table.column(name).to_numpy().astype(np.int64) for name in ("token", "layer"))
    return token, layer, ids


def _is_list(kind: Any) -> bool:
    import pyarrow as pa  # noqa: PLC0415

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and bool(pa.types.is_integer(kind.value_type))


def _layers(path: Path, token: "np.ndarray", layer: "np.ndarray") -> tuple[int, ...]:
    """Return the layers that every token has; raise unless all have the same, in order."""
    import numpy as np  # noqa: PLC0415

    count = int(np.searchsorted(token, token[0], side="right"))
    layers = layer[:count]
    wanted = np.arange(len(token)) // max(1, count), np.resize(layers, len(token))
    wrong = np.flatnonzero((token != wanted[0]) | (layer != wanted[1]))
    if wrong.size:
        row = int(wrong[0])
        expected = f"token {wanted[0][row]}, layer {wanted[1][row]} in row {row}"
        raise _fault(path, expected, f"token {token[row]}, layer {layer[row]}")
    if len(token) % count or (np.diff(layers) <= 0).any() or layers[0] < 0:
        why = "layers in order, and the same of each token"
        raise _fault(path, why, f"{len(token)} rows with the layers {layers.tolist()}")
    return tuple(layers.tolist())


def _check_ids(path: Path, ids: "np.ndarray", sizes: ExpertSizes) -> None:
    import numpy as np  # noqa: PLC0415

    flat = ids.reshape(-1, sizes.top_k)
    outside = np.flatnonzero(((flat < 0) | (flat >= sizes.num_experts)).any(axis=1))
    if outside.size:
        row = int(outside[0])
        expected = f"ids from 0 to {sizes.num_experts - 1} in row {row}"
        raise _fault(path, expected, str(flat[row].tolist()))
    ordered = np.sort(flat, axis=1)
    twice = np.flatnonzero((np.diff(ordered, axis=1) == 0).any(axis=1))
    if twice.size:
        row = int(twice[0])
        raise _fault(path, f"distinct ids in row {row}", str(flat[row].tolist()))
