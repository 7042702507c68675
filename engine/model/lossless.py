"""Lossless12: bfloat16 matrices in 12 bits a weight, each restored to the bit; no torch."""

import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, Final

from engine.model.formats import (
    EMBEDDING,
    FORMATS,
    Operators,
    PackedFormat,
    Packing,
    ParamSpec,
    Products,
    TensorFormats,
    TensorSpec,
    View,
    align,
)
from engine.model.spec import ModelSpec
from kernels.sizes import (
    MAX_GROUP_ESCAPES,
    codes_table_size,
    has_codes,
    pack_chunk_rows,
    pack_scratch_bytes,
)

DTYPE: Final = "bfloat16"
_ELEMENT_BYTES: Final = {"int32": 4, "int16": 2, "uint8": 1}


@lru_cache(maxsize=256)
def _views(num_rows: int, num_columns: int) -> tuple[View, ...]:
    """List the tensors of kernels.arguments.Codes."""
    groups, tiles = num_rows // 16, num_columns // 64
    arrays = (
        ("bytes", (groups, tiles, 2, 32, 4), "int32"),
        ("codes", (groups, tiles, 32, 4), "int32"),
        ("first", (num_rows,), "uint8"),
        ("offsets", (groups,), "int32"),
        ("table", (codes_table_size(num_rows, num_columns),), "int16"),
    )
    sizes = (align(math.prod(shape) * _ELEMENT_BYTES[dtype]) for _, shape, dtype in arrays)
    return tuple(
        View(*array, offset)
        for array, offset in zip(arrays, accumulate(sizes, initial=0), strict=False)
    )


class Lossless(PackedFormat):
    """Codes of 4 bits and bytes of 8, and a table of what the codes of a row do not reach."""

    name = "lossless12"
    whole_views: ClassVar[frozenset[str]] = frozenset({"table"})

    def holds(self, tensor: TensorSpec, dtype: str) -> bool:
        """Whether it is a bfloat16 matrix that fills tiles and takes less than it would plain.

        So does each of its parameters: products take tiles of gates and of ups in turn.
        """
        if dtype != DTYPE or len(tensor.shape) != 2:
            return False
        if not all(has_codes(*part.shape) for part in tensor.parts):
            return False
        return self.num_bytes(tensor) < FORMATS[DTYPE].num_bytes(tensor)

    def num_bytes(self, tensor: ParamSpec | TensorSpec) -> int:
        """Bytes of the five arrays, each aligned."""
        last = _views(*tensor.shape)[-1]
        return last.offset + math.prod(last.shape) * _ELEMENT_BYTES[last.dtype]

    def row_bytes(self, tensor: TensorSpec) -> int:
        """Bytes that one row is read from: a word has weights of another row too."""
        return 3 * tensor.shape[1] + 5

    def views(self, tensor: TensorSpec) -> tuple[View, ...]:
        """List the five arrays."""
        return _views(*tensor.shape)

    def products(self, ops: Operators) -> Products:
        """Return those that restore weights as they are read."""
        return Products.of(ops.codes)

    def operand(
        self,
        tensor: TensorSpec,
        views: Mapping[str, Any],
        ops: Operators,
        scratch: Any = None,
    ) -> Any:
        """Return kernels.arguments.Codes, which are restored in the scratch if they fit."""
        made = ops.codes.Codes(**views)
        return made if scratch is None else made.with_scratch(scratch, tensor.num_experts)

    def block_rows(self, tensor: TensorSpec) -> int:
        """Return the rows that are packed in one pass."""
        return pack_chunk_rows(tensor.shape[1])

    def scratch_bytes(self, tensor: TensorSpec) -> int:
        """Bytes of a pass, and of the codes of its rows until they are in place."""
        num_rows, num_columns = tensor.shape
        rows = min(num_rows, self.block_rows(tensor))
        table = 2 * MAX_GROUP_ESCAPES * (rows // 16 + 1)
        codes = rows * num_columns * 3 // 2 + rows + rows // 4 + table
        return pack_scratch_bytes(rows, num_columns) + codes

    def packing(self, tensor: TensorSpec, views: Mapping[str, Any], ops: Operators) -> Packing:
        """Return what packs rows where they are, and copies the codes into place."""
        del tensor
        return _Packing(views, ops.codes)


class _Packing(Packing):
    """Packs blocks, each with a table that has room for all that its groups may need.

    Args:
        views: Views of the whole tensor.
        codes: The module kernels.ops.codes.
    """

    def __init__(self, views: Mapping[str, Any], codes: Any) -> None:
        self._views, self._codes = views, codes
        self._row = self._most = 0
        self._capacity = views["table"].shape[0] - MAX_GROUP_ESCAPES

    def add(self, rows: Any) -> None:
        """Pack the rows; copy the codes unless there are too many escapes by now."""
        start, stop = self._row, self._row + rows.shape[0]
        self._row = stop
        places = {
            name: self._views[name][start // 16 : stop // 16]
            for name in ("bytes", "codes", "offsets")
        }
        places["first"] = self._views["first"][start:stop]
        made = {
            name: view.new_empty(view.shape, device=rows.device) for name, view in places.items()
        }
        room = MAX_GROUP_ESCAPES * (rows.shape[0] // 16 + 1)
        table = self._views["table"].new_empty(room, device=rows.device)
        escapes = self._codes.pack_into(rows, self._codes.Codes(**made, table=table))
        before, self.num_escapes = self.num_escapes, self.num_escapes + escapes.total
        self._most = max(self._most, escapes.most)
        if not self._reason():
            made["offsets"] += before
            places["table"], made["table"] = (
                self._views["table"][before : self.num_escapes],
                table[: escapes.total],
            )
            for name, view in places.items():
                view.copy_(made[name], non_blocking=True)

    def finish(self) -> str:
        """Write zeros behind the escapes."""
        if not self._reason():
            self._views["table"][self.num_escapes :] = 0
        return self._reason()

    def _reason(self) -> str:
        if self.num_escapes <= self._capacity and self._most <= MAX_GROUP_ESCAPES:
            return ""
        return (
            f"{self.num_escapes} escapes, {self._most} in 16 rows; expected at most "
            f"{self._capacity}, {MAX_GROUP_ESCAPES} in 16 rows"
        )


LOSSLESS: Final = Lossless()


def lossless_formats(
    spec: ModelSpec, dtype: str = DTYPE, plain: Collection[str] = ()
) -> TensorFormats:
    """Return the formats of a model of which every matrix that gains is lossless.

    An embedding of its own, of which a step reads few rows, stays plain; a tied table, which is the
    head too, does not: its rows are restored alone.

    Args:
        spec: Sizes of the model.
        dtype: What the engine computes in; all is plain in any but bfloat16.
        plain: Tensors to leave as they are.
    """
    chosen = {
        tensor.name: LOSSLESS
        for tensor in spec.tensors()
        if tensor.name not in plain and not why_plain(tensor, spec, dtype)
    }
    return TensorFormats(FORMATS[dtype], chosen)


def why_plain(tensor: TensorSpec, spec: ModelSpec, dtype: str = DTYPE) -> str:
    """Return why `lossless_formats` leaves a tensor as it is; nothing where it does not."""
    if len(tensor.shape) != 2:
        return "no matrix"
    if tensor.name in spec.formats(dtype):
        return "quantised in the checkpoint" if spec.quantization else "in another order there"
    if tensor.name == EMBEDDING and not spec.tie_word_embeddings:
        return "looked up by row"
    if not LOSSLESS.holds(tensor, dtype):
        rows, columns = tensor.shape
        return f"{rows} rows of {columns} do not fill a tile, or would not become smaller"
    return ""
