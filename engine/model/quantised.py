"""Weights that a checkpoint keeps quantised: what config.json says of them, and formats; no torch.

A scheme says how one linear layer is stored. All of them are brought into one layout at the load,
kernels.arguments.Quantised, by engine/weights/layouts.py.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, ClassVar, Final

from engine.errors import CheckpointError, ConfigError
from engine.model.formats import (
    FORMATS,
    Format,
    Operators,
    ParamSpec,
    Products,
    TensorSpec,
    View,
    align,
)

TILE: Final = 64
"""Columns whose values lie side by side; the last ones of a row are filled up."""
ELEMENT_BYTES: Final = MappingProxyType(
    {
        "int64": 8,
        "float32": 4,
        "int32": 4,
        "float16": 2,
        "bfloat16": 2,
        "uint8": 1,
        "int8": 1,
        "float8_e4m3fn": 1,
    }
)
LINEAR: Final = "Linear"
"""A target that every matrix of a layer and the head match."""


@dataclass(frozen=True)
class Scheme:
    """How the weight of a linear layer is stored.

    Attributes:
        layout: A key of LAYOUTS.
        bits: Of a value.
        group: Input columns of one scale; 0: all.
        scale_dtype: Of scales as they are stored.
        symmetric: Whether there are no zero points.
        ordered: Whether columns are grouped in an order of their own (g_idx).
        zeros_from_one: Whether zero points are stored less one (GPTQ's first version).
        rows: Rows of one scale; 0: all.
    """

    layout: str
    bits: int
    group: int = 0
    scale_dtype: str = "float16"
    symmetric: bool = False
    ordered: bool = False
    zeros_from_one: bool = False
    rows: int = 1

    @property
    def name(self) -> str:
        """Name in plans and records."""
        return f"{self.layout}{self.bits}"


@dataclass(frozen=True)
class Arrays:
    """What one scheme keeps of a matrix of N rows and K columns in a checkpoint, and here."""

    kind: str
    """Of kernels.arguments.Quantised."""
    stored: tuple[tuple[str, tuple[int, ...], str | None], ...]
    """Suffix of the parameter, shape, dtype; None: that of scales."""
    offset: int = 0
    has: tuple[str, ...] = ()
    """Optional tensors of kernels.arguments.Quantised."""
    subgroup: int = 0


def _groups(scheme: Scheme, columns: int) -> int:
    return -(-columns // (scheme.group or columns))


def _awq(scheme: Scheme, rows: int, columns: int) -> Arrays:
    groups = _groups(scheme, columns)
    return Arrays(
        "uint4",
        (
            ("qweight", (columns, rows // 8), "int32"),
            ("qzeros", (groups, rows // 8), "int32"),
            ("scales", (groups, rows), None),
        ),
        has=("zero",),
    )


def _gptq(scheme: Scheme, rows: int, columns: int) -> Arrays:
    groups, bits = _groups(scheme, columns), scheme.bits
    return Arrays(
        f"uint{bits}",
        (
            ("qweight", (columns * bits // 32, rows), "int32"),
            ("qzeros", (groups, rows * bits // 32), "int32"),
            ("scales", (groups, rows), None),
            ("g_idx", (columns,), "int32"),
        ),
        has=("zero", "columns") if scheme.ordered else ("zero",),
    )


def _scale_shape(scheme: Scheme, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of scales that stand by rows."""
    if not scheme.rows:
        return (1,)
    return -(-rows // scheme.rows), _groups(scheme, columns)


def _packed(scheme: Scheme, rows: int, columns: int) -> Arrays:
    bits, groups = scheme.bits, _groups(scheme, columns)
    zeros = ("weight_zero_point", (-(-rows * bits // 32), groups), "int32")
    return Arrays(
        f"uint{bits}",
        (
            ("weight_packed", (rows, -(-columns * bits // 32)), "int32"),
            ("weight_scale", _scale_shape(scheme, rows, columns), None),
            ("weight_shape", (2,), "int64"),
            *(() if scheme.symmetric else (zeros,)),
            *((("weight_g_idx", (columns,), "int32"),) if scheme.ordered else ()),
        ),
        offset=2 ** (bits - 1) if scheme.symmetric else 0,
        has=(
            *(() if scheme.symmetric else ("zero",)),
            *(("columns",) if scheme.ordered else ()),
        ),
    )


def _bytes(scheme: Scheme, rows: int, columns: int) -> Arrays:
    """Return what is kept of whole bytes: int8, or float8."""
    is_float, shape = scheme.layout != "int-quantized", _scale_shape(scheme, rows, columns)
    is_inverse = scheme.layout == "fp8" and scheme.rows > 1
    has_zero = not (is_float or scheme.symmetric)
    return Arrays(
        "float8_e4m3fn" if is_float else "uint8",
        (
            ("weight", (rows, columns), "float8_e4m3fn" if is_float else "int8"),
            ("weight_scale_inv" if is_inverse else "weight_scale", shape, None),
            *((("weight_zero_point", shape, "int8"),) if has_zero else ()),
        ),
        offset=0 if is_float or has_zero else 128,
        has=("zero",) if has_zero else (),
    )


LAYOUTS: Final = MappingProxyType(
    {
        "awq": _awq,
        "gptq": _gptq,
        "pack-quantized": _packed,
        "int-quantized": _bytes,
        "float-quantized": _bytes,
        "fp8": _bytes,
    }
)
"""What each layout keeps of a matrix, by name."""
BITS: Final = MappingProxyType(
    {
        "awq": (4,),
        "gptq": (4, 8),
        "pack-quantized": (4, 8),
        "int-quantized": (8,),
        "float-quantized": (8,),
        "fp8": (8,),
    }
)
"""Bits of a value in each layout."""
_WORDS: Final = frozenset({"awq", "gptq"})
"""Layouts that keep values of several rows in one word."""


def arrays_of(scheme: Scheme, rows: int, columns: int) -> Arrays:
    """Return what a scheme keeps of a matrix."""
    return LAYOUTS[scheme.layout](scheme, rows, columns)


def why_not(scheme: Scheme, rows: int, columns: int) -> str:
    """Return why a matrix cannot be stored so; nothing if it can."""
    size, unit = scheme.group, 32 // scheme.bits
    if size and size not in {16, 32, columns} and size % TILE:
        return f"groups of 16, 32, a multiple of {TILE} or all columns, got {size}"
    if size and columns % size and scheme.layout in _WORDS:
        return f"groups of {size} that divide its columns, got {columns}"
    if scheme.layout in _WORDS and (rows % unit or columns % unit):
        return f"rows and columns that fill words of {unit}, got {rows} x {columns}"
    return ""


DUMMIES: Final = ("bytes", "float8", "order")
"""Random bytes; draws in float8; the numbers of the elements."""
_SPREAD: Final = MappingProxyType({"uint4": 4.6, "uint5": 9.2, "uint6": 18.5, "uint8": 73.9})
"""Standard deviation of values that are random bits."""
_STD: Final = 0.02
"""Standard deviation of random weights."""
_DUMMY_PART: Final = 16
"""A subscale, and a sublow, of random weights."""


class Unpacked(Format):
    """A format that is made of other arrays than those that it keeps."""

    is_unpacked: ClassVar[bool] = True

    @abstractmethod
    def sources(self, tensor: TensorSpec) -> Iterator["Source"]:
        """Yield what is read at a time and what it becomes."""

    @abstractmethod
    def dummies(self, tensor: TensorSpec) -> Iterator[tuple[str, float | str]]:
        """Yield the views of random weights: one value everywhere, or one of DUMMIES."""


@dataclass(frozen=True)
class Source:
    """Rows of a tensor that are made at a time."""

    scheme: Scheme
    shape: tuple[int, int]
    """Rows and columns of the matrix."""
    parameters: tuple[tuple[str, ParamSpec], ...]
    """Suffix, and what is read."""
    prefix: str
    """Of the names of the views."""
    row: int
    """The first row in the views."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are read."""
        return sum(align(p.numel * ELEMENT_BYTES[self.dtype_of(p)]) for _, p in self.parameters)

    def dtype_of(self, parameter: ParamSpec) -> str:
        """Return the dtype in which one is read."""
        return parameter.dtype or self.scheme.scale_dtype

    @property
    def scratch_bytes(self) -> int:
        """Memory that making it takes beside that, at most: the values in several orders."""
        return 6 * math.prod(self.shape) + 2**20


@dataclass(frozen=True)
class Grouped(Unpacked):
    """Values and scales of groups, all parts in one scheme."""

    scheme: Scheme
    dtype: str
    """That the engine computes in."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """That of the scheme."""
        return self.scheme.name

    def holds(self, tensor: TensorSpec, dtype: str) -> bool:
        """Whether each of its parameters can be stored so."""
        return dtype == self.dtype and not any(
            why_not(self.scheme, *part.shape) for part in tensor.parts
        )

    def _arrays(self, tensor: ParamSpec | TensorSpec) -> Arrays:
        rows, columns = tensor.shape
        return arrays_of(self.scheme, rows, columns)

    def views(self, tensor: ParamSpec | TensorSpec) -> tuple[View, ...]:
        """List the tensors of kernels.arguments.Quantised."""
        rows, columns = tensor.shape
        arrays, tiles = self._arrays(tensor), -(-columns // TILE)
        groups = _groups(self.scheme, columns)
        subgroups = -(-columns // (arrays.subgroup or columns))
        bits = {"uint8": 8, "float8_e4m3fn": 8, "uint5": 5, "uint6": 6}.get(arrays.kind, 4)
        low_bits = 8 if bits == 8 else 4
        every = {
            "values": ((rows, tiles * TILE * low_bits // 8), "uint8"),
            "scale": ((rows, groups), self.scheme.scale_dtype),
            "high": ((rows, tiles * TILE * (bits - low_bits) // 8), "uint8"),
            "zero": ((rows, groups), "uint8"),
            "low": ((rows, groups), self.scheme.scale_dtype),
            "subscale": ((rows, subgroups), "int8"),
            "sublow": ((rows, subgroups), "uint8"),
            "columns": ((columns,), "int32"),
            "table": ((16,), "float32"),
        }
        has = {"values", "scale", *arrays.has, *(("high",) if bits in {5, 6} else ())}
        kept = [(name, *each) for name, each in every.items() if name in has]
        sizes = (align(math.prod(shape) * ELEMENT_BYTES[dtype]) for _, shape, dtype in kept)
        offsets = accumulate(sizes, initial=0)
        return tuple(View(*each, at) for each, at in zip(kept, offsets, strict=False))

    def num_bytes(self, tensor: ParamSpec | TensorSpec) -> int:
        """Bytes of the arrays, each aligned but for the last."""
        last = self.views(tensor)[-1]
        return last.offset + math.prod(last.shape) * ELEMENT_BYTES[last.dtype]

    def products(self, ops: Operators) -> Products:
        """Return those that restore weights as they are read."""
        return Products.of(ops.quantised)

    def parameters(self, tensor: TensorSpec) -> tuple[ParamSpec, ...]:
        """List the arrays of a checkpoint that it is made from."""
        return tuple(p for source in self.sources(tensor) for _, p in source.parameters)

    def token_elements(self, tensor: TensorSpec) -> int:
        """Those of inputs that are brought into the order of the columns."""
        return tensor.shape[1] if self.scheme.ordered else 0

    def sources(self, tensor: TensorSpec) -> Iterator[Source]:
        """Yield one for each parameter."""
        row = 0
        for part in tensor.parts:
            yield source_of(self.scheme, part, "", row)
            row += part.shape[0]

    def dummies(self, tensor: TensorSpec) -> Iterator[tuple[str, float | str]]:
        """Yield views of weights with a standard deviation of about 0.02 and a mean of 0."""
        arrays = self._arrays(tensor)
        if arrays.kind == "float8_e4m3fn":
            yield from (("values", "float8"), ("scale", 1.0))
            return
        scale = _STD / _SPREAD.get(arrays.kind, 0.6)
        middle = (
            (2 ** int(arrays.kind.removeprefix("uint")) - 1) / 2 if "uint" in arrays.kind else 0
        )
        part = _DUMMY_PART if "subscale" in arrays.has else 1
        values: dict[str, float | str] = {
            "scale": scale / part,
            "zero": math.ceil(middle),
            "low": scale * middle / (_DUMMY_PART if "sublow" in arrays.has else 1),
            "subscale": _DUMMY_PART,
            "sublow": _DUMMY_PART,
            "columns": "order",
        }
        for view in self.views(tensor):
            yield view.name, values.get(view.name, "bytes")

    def targets(
        self,
        tensor: TensorSpec,  # noqa: ARG002
        views: Mapping[str, Any],  # noqa: ARG002
    ) -> Iterable[tuple[ParamSpec, Any]]:
        """Yield nothing: all is made of `sources`."""
        return ()

    def operand(
        self, tensor: TensorSpec, views: Mapping[str, Any], ops: Operators, scratch: Any = None
    ) -> Any:
        """Return kernels.arguments.Quantised, restored in the scratch if it fits."""
        arrays, columns = self._arrays(tensor), tensor.shape[1]
        return ops.quantised.Quantised.of(
            views,
            scratch,
            kind=arrays.kind,
            dtype=self.dtype,
            num_columns=columns,
            group=self.scheme.group or columns,
            subgroup=arrays.subgroup or columns,
            offset=arrays.offset,
        )


@dataclass(frozen=True)
class Mixed(Unpacked):
    """Parts that are kept each in its own format."""

    parts: tuple[Format, ...]
    name: str = field(default="mixed", init=False)

    def _each(self, tensor: TensorSpec) -> Iterator[tuple[str, Format, TensorSpec]]:
        """Yield of each part the prefix of its views, its format and the tensor that it is."""
        for at, (form, part) in enumerate(zip(self.parts, tensor.parts, strict=True)):
            yield f"{at}.", form, TensorSpec(part.name, (part,))

    def holds(self, tensor: TensorSpec, dtype: str) -> bool:
        """Whether each part can be kept in its format."""
        return len(self.parts) == len(tensor.parts) and all(
            form.holds(part, dtype) for _, form, part in self._each(tensor)
        )

    def views(self, tensor: TensorSpec) -> tuple[View, ...]:
        """List the arrays of all parts, one after the other."""
        found: list[View] = []
        start = 0
        for prefix, form, part in self._each(tensor):
            found.extend(
                replace(view, name=prefix + view.name, offset=start + view.offset)
                for view in form.views(part)
            )
            start += align(form.num_bytes(part))
        return tuple(found)

    def num_bytes(self, tensor: ParamSpec | TensorSpec) -> int:
        """Bytes of all parts, each aligned."""
        assert isinstance(tensor, TensorSpec)
        return sum(align(form.num_bytes(part)) for _, form, part in self._each(tensor))

    def products(self, ops: Operators) -> Products:
        """Return those that multiply part after part."""
        return Products.of(ops.quantised)

    def parameters(self, tensor: TensorSpec) -> tuple[ParamSpec, ...]:
        """List those of all parts."""
        return tuple(
            parameter for _, form, part in self._each(tensor) for parameter in form.parameters(part)
        )

    def token_elements(self, tensor: TensorSpec) -> int:
        """Those of the parts' results, and of the largest's inputs."""
        inputs = (form.token_elements(part) for _, form, part in self._each(tensor))
        return tensor.shape[0] + max(inputs)

    def sources(self, tensor: TensorSpec) -> Iterator[Source]:
        """Yield those of all parts."""
        for prefix, form, part in self._each(tensor):
            if isinstance(form, Unpacked):
                for source in form.sources(part):
                    yield replace(source, prefix=prefix)

    def dummies(self, tensor: TensorSpec) -> Iterator[tuple[str, float | str]]:
        """Yield those of all parts but the plain ones, which are `targets`."""
        for prefix, form, part in self._each(tensor):
            if isinstance(form, Unpacked):
                for name, value in form.dummies(part):
                    yield prefix + name, value

    def targets(
        self, tensor: TensorSpec, views: Mapping[str, Any]
    ) -> Iterable[tuple[ParamSpec, Any]]:
        """Yield those of plain parts."""
        for prefix, form, part in self._each(tensor):
            yield from form.targets(part, _of_part(views, prefix))

    def operand(
        self, tensor: TensorSpec, views: Mapping[str, Any], ops: Operators, scratch: Any = None
    ) -> Any:
        """Return kernels.arguments.Joined."""
        return ops.quantised.Joined(
            tuple(
                form.operand(part, _of_part(views, prefix), ops, scratch)
                for prefix, form, part in self._each(tensor)
            )
        )


def _of_part(views: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): view for name, view in views.items() if name.startswith(prefix)
    }


def source_of(scheme: Scheme, part: ParamSpec, prefix: str, row: int) -> Source:
    """Return how the rows of one parameter are made."""
    rows, columns = part.shape
    module = part.name.removesuffix(".weight")
    stored = tuple(
        (suffix, ParamSpec(f"{module}.{suffix}", shape, dtype=dtype))
        for suffix, shape, dtype in arrays_of(scheme, rows, columns).stored
    )
    return Source(scheme, (rows, columns), stored, prefix, row)


@dataclass(frozen=True)
class Quantisation:
    """Which matrices of a model are quantised, and how: the content of `spec.quantization`.

    Attributes:
        method: As config.json names it.
        schemes: By the modules that they are of, in order; the first that matches counts.
        ignore: Modules that stay plain.

    A module is meant by its name, by `re:` and a regular expression that its name begins with, or
    by Linear, which means every matrix of a layer and the head.
    """

    method: str
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignore: tuple[str, ...] = ()

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Quantisation":
        """Read the content of `spec.quantization`.

        Raises:
            ConfigError: A key is unknown or absent, or a value is none of those that are supported.
        """
        try:
            unknown = sorted(set(content) - {"method", "schemes", "ignore"})
            schemes = []
            for each in content["schemes"]:
                rest = dict(each)
                targets = tuple(rest.pop("targets", (LINEAR,)))
                schemes.append((targets, Scheme(**rest)))
            found = cls(content["method"], tuple(schemes), tuple(content.get("ignore", ())))
        except (TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                "model.spec.quantization: expected method, schemes (each with layout and bits) and "
                f"ignore, got {content!r} ({error!r}). Copy them from a plan of the checkpoint."
            ) from error
        for _, scheme in found.schemes:
            _check(scheme)
        if unknown:
            raise ConfigError(
                f"model.spec.quantization: expected method, schemes and ignore, got "
                f"{', '.join(unknown)}. Remove it."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return what `of` reads, without what has its default."""
        schemes = []
        for targets, scheme in self.schemes:
            plain = asdict(scheme)
            defaults = asdict(Scheme(scheme.layout, scheme.bits))
            kept = {k: v for k, v in plain.items() if k in {"layout", "bits"} or v != defaults[k]}
            schemes.append(kept | ({} if targets == (LINEAR,) else {"targets": list(targets)}))
        found: dict[str, Any] = {"method": self.method, "schemes": schemes}
        return found | ({"ignore": list(self.ignore)} if self.ignore else {})

    def scheme_of(self, module: str) -> Scheme | None:
        """Return how a module is stored; None: plain."""
        if any(_matches(pattern, module) for pattern in self.ignore):
            return None
        for targets, scheme in self.schemes:
            if any(_matches(pattern, module) for pattern in targets):
                return scheme
        return None

    def formats(self, tensors: Iterable[TensorSpec], dtype: str) -> dict[str, Format]:
        """Return the formats of those tensors that are not plain.

        Args:
            tensors: Of the model.
            dtype: That the engine computes in.

        Raises:
            ConfigError: A matrix cannot be stored so.
        """
        found: dict[str, Format] = {}
        for tensor in tensors:
            if len(tensor.shape) != 2:
                continue
            schemes = [self.scheme_of(module_of(part)) for part in tensor.parts]
            for part, scheme in zip(tensor.parts, schemes, strict=True):
                if scheme is not None and (why := why_not(scheme, *part.shape)):
                    raise ConfigError(
                        f"{module_of(part)}: expected {why} in {scheme.name}. This checkpoint is "
                        "not supported."
                    )
            if not any(schemes):
                continue
            first = schemes[0]
            if len({*schemes}) == 1 and first and (len(schemes) == 1 or not first.ordered):
                found[tensor.name] = Grouped(first, dtype)
            else:
                found[tensor.name] = Mixed(
                    tuple(Grouped(x, dtype) if x else FORMATS[dtype] for x in schemes)
                )
        return found

    def as_stored(self, stored: Mapping[str, str], parts: Iterable[ParamSpec]) -> "Quantisation":
        """Return the same as the headers of a checkpoint's files have it.

        They, and not the rules of its config.json, say which modules are plain, and the dtype of
        scales.

        Args:
            stored: The dtype of every stored tensor by its name.
            parts: The matrices of the model's linear layers.
        """
        plain = [m for m in map(module_of, parts) if stored.get(f"{m}.weight") in FORMATS]
        names = [module_of(part) for part in parts]
        if plain != [name for name in names if self.scheme_of(name) is None]:
            found = replace(self, ignore=tuple(plain))
        else:
            found = self
        schemes = []
        for targets, scheme in found.schemes:
            own = [name for name in names if found.scheme_of(name) == scheme]
            schemes.append((targets, _as_stored(scheme, own, stored)))
        return replace(found, schemes=tuple(schemes))


def _as_stored(scheme: Scheme, modules: Iterable[str], stored: Mapping[str, str]) -> Scheme:
    """Return a scheme with the dtype that its scales are stored in."""
    own = list(modules)
    dtypes = {stored[name] for m in own for s in SCALES if (name := f"{m}.{s}") in stored}
    dtypes &= set(FORMATS)
    if not dtypes:
        return scheme
    if scheme.layout == "pack-quantized":
        scheme = replace(scheme, ordered=any(f"{m}.weight_g_idx" in stored for m in own))
    return replace(scheme, scale_dtype=dtypes.pop() if len(dtypes) == 1 else "float32")


SCALES: Final = ("scales", "weight_scale", "weight_scale_inv")
"""What scales are called in a checkpoint."""
UNUSED: Final = MappingProxyType(
    {
        "compressed-tensors": ("input_scale", "output_scale", "k_scale", "v_scale"),
        "fp8": ("input_scale", "k_scale", "v_scale"),
    }
)
"""Of each method, what parameters that say how activations are quantised end with."""


def module_of(part: ParamSpec) -> str:
    """Return the name of the module whose weight a parameter is."""
    return part.name.removesuffix(".weight")


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if pattern == LINEAR:
        return not module.endswith("embed_tokens")
    return pattern == module


SUPPORTED: Final = (
    "AWQ (gemm, 4 bits), GPTQ (4 and 8 bits), compressed-tensors (pack-quantized of 4 and 8 bits, "
    "int-quantized, float-quantized) and fp8 (e4m3)"
)
"""What is said of every checkpoint that is refused."""


def _refused(text: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: quantization_config: {text}. Supported: {SUPPORTED}; or use the bfloat16, "
        "float16 or float32 checkpoint."
    )


def _check(scheme: Scheme) -> None:
    """Raise ConfigError for a scheme that nothing reads."""
    if scheme.bits not in BITS.get(scheme.layout, ()) or scheme.scale_dtype not in FORMATS:
        raise ConfigError(
            f"model.spec.quantization: expected a layout among {', '.join(LAYOUTS)} with bits and "
            f"scale_dtype that it has, got layout={scheme.layout}, bits={scheme.bits}, "
            f"scale_dtype={scheme.scale_dtype}."
        )


def read_quantization(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the content of `spec.quantization` from that of a config.json; empty: all is plain.

    Args:
        config: The content of config.json.
        dtype: That of the model.

    Raises:
        CheckpointError: The checkpoint is quantised in a way that is not supported.
    """
    # The second is the name that compressed-tensors had for it.
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return {}
    if not isinstance(found, Mapping):
        raise _refused(f"expected an object, got {type(found).__name__}")
    method = found.get("quant_method", "unknown")
    if method not in _READERS:
        raise _refused(f"got quant_method={method!r}")
    return _READERS[method](found, dtype if dtype in FORMATS else "float16").to_dict()


def quantization_notes(config: Mapping[str, Any]) -> list[str]:
    """Return what is to be said of a config.json whose quantisation is read in part."""
    found = config.get("quantization_config") or config.get("compression_config") or {}
    groups = (found.get("config_groups") or {}).values()
    inputs = any(group.get("input_activations") for group in groups)
    inputs |= found.get("quant_method") == "fp8"
    kinds = {"activations": inputs, "keys and values": bool(found.get("kv_cache_scheme"))}
    named = ", ".join(name for name, is_there in kinds.items() if is_there)
    if not named:
        return []
    return [
        f"checkpoint: weights are quantised; {named} are not quantised here, though "
        "config.json says how: tokens may differ from those of engines that do."
    ]


def _whole(found: Mapping[str, Any], *names: str) -> int:
    """Return a whole number that stands under one of some names."""
    for name in names:
        value = found.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    got = {name: found.get(name) for name in names}
    raise _refused(f"expected a whole number for {names[0]}, got {got[names[0]]!r}")


def _read_awq(found: Mapping[str, Any], dtype: str) -> Quantisation:
    """Read what AutoAWQ writes; a scale is float16 there whatever the model's dtype is."""
    del dtype
    version = str(found.get("version", "gemm")).lower()
    bits, group = _whole(found, "bits", "w_bit"), _whole(found, "group_size", "q_group_size")
    if version != "gemm":
        raise _refused(f"got AWQ with version={version!r}, expected gemm")
    if bits != 4:
        raise _refused(f"got AWQ with {bits} bits, expected 4")
    if found.get("zero_point", True) is not True:
        raise _refused("got AWQ with zero_point=false, expected true")
    kept = found.get("modules_to_not_convert") or ()
    # transformers takes any part of a name.
    ignore = ("lm_head", *(f"re:.*{re.escape(name)}" for name in kept if name != "lm_head"))
    scheme = Scheme("awq", 4, 0 if group == -1 else group)
    return Quantisation("awq", (((LINEAR,), scheme),), ignore)


def _read_gptq(found: Mapping[str, Any], dtype: str) -> Quantisation:
    """Read what AutoGPTQ and GPTQModel write."""
    del dtype
    bits, group = _whole(found, "bits"), _whole(found, "group_size")
    version = str(found.get("checkpoint_format") or "gptq").lower()
    if bits not in {4, 8}:
        raise _refused(f"got GPTQ with {bits} bits, expected 4 or 8")
    if version not in {"gptq", "gptq_v2"}:
        raise _refused(f"got GPTQ with checkpoint_format={version!r}, expected gptq or gptq_v2")
    if dynamic := found.get("dynamic"):
        raise _refused(f"got GPTQ with dynamic={dynamic!r}, expected the same bits everywhere")
    if pack := {found.get("pack_dtype", "int32")} - {"int32"}:
        raise _refused(f"got GPTQ with pack_dtype={pack.pop()!r}, expected int32")
    scheme = Scheme(
        "gptq",
        bits,
        0 if group == -1 else group,
        ordered=bool(found.get("desc_act", False)),
        zeros_from_one=version == "gptq",
    )
    ignore = () if found.get("lm_head") else ("lm_head",)
    return Quantisation("gptq", (((LINEAR,), scheme),), ignore)


def _read_compressed(found: Mapping[str, Any], dtype: str) -> Quantisation:
    """Read what llm-compressor writes; of activations nothing is quantised here."""
    if status := {found.get("quantization_status", "compressed")} - {"compressed", "frozen"}:
        raise _refused(f"got quantization_status={status.pop()!r}, expected compressed")
    sparsity = (found.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refused(f"got a sparsity_config of format {sparsity!r}, expected none")
    if (found.get("transform_config") or {}).get("config_groups"):
        raise _refused("got a transform_config, expected none")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused(f"expected config_groups, got {groups!r}")
    schemes = []
    for group in groups.values():
        targets = tuple(group.get("targets") or ())
        for target in targets:
            if target[:1].isupper() and target != LINEAR:
                raise _refused(f"got the target {target!r}, expected Linear or names of modules")
        kind = group.get("format") or found.get("format")
        schemes.append((targets, _scheme_of(group.get("weights") or {}, kind, dtype)))
    # A name, or an expression, counts before what all matrices match.
    schemes.sort(key=lambda each: LINEAR in each[0])
    return Quantisation("compressed-tensors", tuple(schemes), tuple(found.get("ignore") or ()))


def _scheme_of(weights: Mapping[str, Any], kind: Any, dtype: str) -> Scheme:
    """Return the scheme of one group of compressed-tensors."""
    bits, number = weights.get("num_bits"), weights.get("type", "int")
    if kind == "naive-quantized":
        kind = f"{number}-quantized"
    if kind not in {"pack-quantized", "int-quantized", "float-quantized"}:
        raise _refused(f"got compressed-tensors with format={kind!r}")
    if bits not in BITS[kind] or number != ("float" if kind == "float-quantized" else "int"):
        expected = " or ".join(map(str, BITS[kind]))
        raise _refused(f"got {kind} with {number}{bits}, expected {expected} bits")
    strategy, symmetric = weights.get("strategy"), bool(weights.get("symmetric", True))
    group, rows = 0, 1
    match strategy:
        case "group":
            group = _whole(weights, "group_size")
        case "block":
            rows, group = _block(weights.get("block_structure"))
        case "tensor":
            rows = 0
        case "channel":
            pass
        case _:
            raise _refused(f"got strategy={strategy!r}, expected group, channel, tensor or block")
    if not symmetric and (number == "float" or strategy not in {"group", "channel"}):
        raise _refused(f"got {kind} with zero points and strategy={strategy!r}")
    ordered = weights.get("actorder") == "group"
    return Scheme(kind, bits, group, dtype, symmetric, ordered, rows=rows)


def _block(found: Any) -> tuple[int, int]:
    """Return rows and columns of a block of one scale."""
    if isinstance(found, str):
        found = [int(each) for each in found.split("x") if each.isdigit()]
    if not isinstance(found, (list, tuple)) or len(found) != 2:
        raise _refused(f"expected a block of rows and columns, got {found!r}")
    if any(type(each) is not int or each <= 1 for each in found):
        raise _refused(f"expected a block of several rows and columns, got {found!r}")
    return found[0], found[1]


def _read_fp8(found: Mapping[str, Any], dtype: str) -> Quantisation:
    """Read what DeepSeek's and Qwen's checkpoints have; of activations nothing is quantised."""
    del dtype
    if (fmt := found.get("fmt", "e4m3")) != "e4m3":
        raise _refused(f"got fp8 with fmt={fmt!r}, expected e4m3")
    if kind := {found.get("scale_fmt", "float")} - {"float", None}:
        raise _refused(f"got fp8 with scale_fmt={kind.pop()!r}, expected float")
    block = found.get("weight_block_size")
    rows, group = (0, 0) if block is None else _block(block)
    kept = found.get("modules_to_not_convert") or found.get("ignored_layers") or ()
    ignore = ("lm_head", *(f"re:.*{re.escape(name)}" for name in kept if name != "lm_head"))
    scheme = Scheme("fp8", 8, group, "float32", symmetric=True, rows=rows)
    return Quantisation("fp8", (((LINEAR,), scheme),), ignore)


_READERS: Final = MappingProxyType(
    {
        "awq": _read_awq,
        "gptq": _read_gptq,
        "compressed-tensors": _read_compressed,
        "fp8": _read_fp8,
    }
)
