"""Weights that a checkpoint keeps quantised: what config.json says of them, and formats; no torch.

A scheme says how one linear layer is stored. All of them are brought into one layout at the load,
kernels.arguments.Quantised, by engine/weights/layouts.py.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any, ClassVar, Final

from engine.errors import ConfigError
from engine.model.formats import (
    DUMMY_STD,
    FORMATS,
    Format,
    Operators,
    ParamSpec,
    Products,
    ReadFormat,
    TensorSpec,
    UnpackedFormat,
    View,
    align,
)
from engine.model.schemes import (
    ELEMENT_BYTES,
    EXPERT_ROWS,
    GGUF_NORM,
    GGUF_ROWS,
    LAYOUTS,
    LINEAR,
    MXFP4,
    ROUNDED,
    ROWS_BIAS,
    TILE,
    TILE_ROWS,
    Arrays,
    Scheme,
    arrays_of,
    groups_of,
    why_not,
)

_SPREAD: Final = MappingProxyType({"uint4": 4.6, "uint5": 9.2, "uint6": 18.5, "uint8": 73.9})
"""Standard deviation of values that are random bits."""
_DUMMY_PART: Final = 16
"""A subscale, and a sublow, of random weights."""


@dataclass(frozen=True)
class Source:
    """Rows of a tensor that are made at a time."""

    scheme: Scheme
    shape: tuple[int, int]
    """Rows and columns of the matrix."""
    parameters: tuple[tuple[str, ParamSpec], ...]
    """Suffix, and what is read."""
    prefix: str
    """What the names of the views begin with."""
    row: int
    """The first row in the views."""
    heads: int = 0
    """Heads whose rows are put into another order: those of even numbers first; 0: they are not."""

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
        return 10 * math.prod(self.shape) + 2**20


@dataclass(frozen=True)
class _OfOneScheme(UnpackedFormat):
    """A format of which all parts are stored in one scheme."""

    scheme: Scheme
    dtype: str
    """What the engine computes in."""

    def parameters(self, tensor: TensorSpec) -> tuple[ParamSpec, ...]:
        """List the arrays of a checkpoint that it is made from."""
        return tuple(p for part in tensor.parts for _, p in _stored(self.scheme, part))

    def sources(self, tensor: TensorSpec) -> Iterator[Source]:
        """Yield one for each parameter."""
        row = 0
        for part in tensor.parts:
            yield from sources_of(self.scheme, part, row)
            row += part.shape[0]

    def targets(
        self,
        tensor: TensorSpec,  # noqa: ARG002
        views: Mapping[str, Any],  # noqa: ARG002
    ) -> Iterable[tuple[ParamSpec, Any]]:
        """Yield nothing: all is made of `sources`."""
        return ()


class Grouped(_OfOneScheme):
    """Values and scales of groups."""

    whole_views: ClassVar[frozenset[str]] = frozenset({"columns", "table"})

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the scheme."""
        return self.scheme.name

    def holds(self, tensor: TensorSpec, dtype: str) -> bool:
        """Whether each of its parameters can be stored so."""
        return dtype == self.dtype and not any(
            why_not(self.scheme, *part.shape) for part in tensor.parts
        )

    def _arrays(self, tensor: ParamSpec | TensorSpec) -> Arrays:
        rows, columns = tensor.shape
        return arrays_of(self.scheme, rows, columns)

    def kinds(self, tensor: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensor."""
        arrays = self._arrays(tensor)
        yield arrays.kind + "+sub" * bool(arrays.subgroup), tensor

    def views(self, tensor: ParamSpec | TensorSpec) -> tuple[View, ...]:
        """List the tensors of kernels.arguments.Quantised, whose rows are filled up to tiles."""
        arrays, columns = self._arrays(tensor), tensor.shape[1]
        rows, tiles = -(-tensor.shape[0] // TILE_ROWS) * TILE_ROWS, -(-columns // TILE)
        groups = groups_of(self.scheme, columns)
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
        arrays = arrays_of(self.scheme, TILE_ROWS, TILE)
        stored = ops.quantised.Stored.of(
            kind=arrays.kind,
            scale_dtype=self.scheme.scale_dtype,
            group=self.scheme.group,
            subgroup=arrays.subgroup,
            offset=arrays.offset,
            arrays=arrays.has,
        )
        found = Products.of(ops.quantised)
        return found._replace(kernels_of=partial(found.kernels_of, stored=stored))

    def token_elements(self, tensor: TensorSpec) -> int:
        """Elements of inputs that are brought into the order of the columns."""
        return tensor.shape[1] if self.scheme.ordered else 0

    def dummies(self, tensor: TensorSpec) -> Iterator[tuple[str, float | str]]:
        """Yield views of weights with a standard deviation of about DUMMY_STD and a mean of 0."""
        arrays = self._arrays(tensor)
        if arrays.kind == "float8_e4m3fn":
            yield from (("values", "float8"), ("scale", 1.0))
            return
        scale = DUMMY_STD / _SPREAD.get(arrays.kind, 0.6)
        middle = (
            (2 ** int(arrays.kind.removeprefix("uint")) - 1) / 2 if "uint" in arrays.kind else 0
        )
        part = _DUMMY_PART if "subscale" in arrays.has else 1
        values: dict[str, float | str] = {
            "scale": 120 if self.scheme.layout == MXFP4 else scale / part,  # 120: 2 ** -7
            "zero": math.ceil(middle),
            "low": scale * middle / (_DUMMY_PART if "sublow" in arrays.has else 1),
            "subscale": _DUMMY_PART,
            "sublow": _DUMMY_PART,
            "columns": "order",
            "table": self.scheme.layout,
        }
        for view in self.views(tensor):
            yield view.name, values.get(view.name, "bytes")

    def operand(
        self, tensor: TensorSpec, views: Mapping[str, Any], ops: Operators, scratch: Any = None
    ) -> Any:
        """Return kernels.arguments.Quantised, restored in the scratch if it fits."""
        arrays, (rows, columns) = self._arrays(tensor), tensor.shape
        return ops.quantised.Quantised.of(
            views,
            scratch,
            tensor.num_experts,
            kind=arrays.kind,
            dtype=self.dtype,
            num_rows=rows,
            num_columns=columns,
            group=self.scheme.group or columns,
            subgroup=arrays.subgroup or columns,
            offset=arrays.offset,
        )


class Rewritten(_OfOneScheme):
    """Plain elements that are put into another order, or have 1 subtracted."""

    is_restored: ClassVar[bool] = False

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the dtype."""
        return self.dtype

    def holds(self, tensor: TensorSpec, dtype: str) -> bool:  # noqa: ARG002
        """Whether it is the dtype that the engine computes in."""
        return dtype == self.dtype

    def num_bytes(self, tensor: ParamSpec | TensorSpec) -> int:
        """Bytes of all elements."""
        return FORMATS[self.dtype].num_bytes(tensor)

    def views(self, tensor: TensorSpec) -> tuple[View, ...]:
        """List the tensor itself."""
        return FORMATS[self.dtype].views(tensor)

    def products(self, ops: Operators) -> Products:
        """Return those of plain weights."""
        return FORMATS[self.dtype].products(ops)

    def dummies(self, tensor: TensorSpec) -> Iterator[tuple[str, float | str]]:  # noqa: ARG002
        """Yield the tensor itself, which has the noise of plain ones."""
        yield "", "noise"

    def operand(
        self, tensor: TensorSpec, views: Mapping[str, Any], ops: Operators, scratch: Any = None
    ) -> Any:
        """Return the tensor itself."""
        return FORMATS[self.dtype].operand(tensor, views, ops, scratch)


@dataclass(frozen=True)
class Mixed(UnpackedFormat):
    """Parts that are kept each in its own format."""

    parts: tuple[ReadFormat, ...]
    name: str = field(default="mixed", init=False)

    def _each(self, tensor: TensorSpec) -> Iterator[tuple[str, ReadFormat, TensorSpec]]:
        """Yield of each part the prefix of its views, its format and the tensor that it is.

        Neighbours in one format are one part, where they can be one matrix.
        """
        at = 0
        for form, group in groupby(zip(self.parts, tensor.parts, strict=True), itemgetter(0)):
            parts = tuple(part for _, part in group)
            are_one = not isinstance(form, _OfOneScheme) or _fit(parts, form.scheme)
            for each in (parts,) if are_one else ((part,) for part in parts):
                yield f"{at}.", form, TensorSpec(each[0].name, each)
                at += 1

    def holds(self, tensor: TensorSpec, dtype: str) -> bool:
        """Whether each part can be kept in its format."""
        return len(self.parts) == len(tensor.parts) and all(
            form.holds(part, dtype) for _, form, part in self._each(tensor)
        )

    def kinds(self, tensor: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        """Yield all parts but plain ones."""
        for _, form, part in self._each(tensor):
            if isinstance(form, UnpackedFormat):
                yield from form.kinds(part)

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
        """Elements of the parts' results, and of the largest part's inputs."""
        inputs = (form.token_elements(part) for _, form, part in self._each(tensor))
        return tensor.shape[0] + max(inputs)

    def sources(self, tensor: TensorSpec) -> Iterator[Source]:
        """Yield those of all parts."""
        for prefix, form, part in self._each(tensor):
            if isinstance(form, UnpackedFormat):
                for source in form.sources(part):
                    yield replace(source, prefix=prefix)

    def dummies(self, tensor: TensorSpec) -> Iterator[tuple[str, float | str]]:
        """Yield those of all parts but the plain ones, which are `targets`."""
        for prefix, form, part in self._each(tensor):
            if isinstance(form, UnpackedFormat):
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


def _matrix(part: ParamSpec) -> tuple[int, int]:
    """Return rows and columns; of a vector one column."""
    return (part.shape[0], part.shape[1] if len(part.shape) == 2 else 1)


def _stored(scheme: Scheme, part: ParamSpec) -> tuple[tuple[str, ParamSpec], ...]:
    """Return what a checkpoint keeps of a parameter, by suffix."""
    return tuple(
        (suffix, ParamSpec(f"{module_of(part)}.{suffix}", shape, dtype=dtype))
        for suffix, shape, dtype in arrays_of(scheme, *_matrix(part)).stored
    )


_BLOCK_ELEMENTS: Final = 2**23
"""Elements of rows that are made at a time where rows stand alone."""


def sources_of(scheme: Scheme, part: ParamSpec, row: int) -> Iterator[Source]:
    """Yield how the rows of one parameter are made.

    Args:
        scheme: Scheme of the parameter.
        part: Which.
        row: The first of its rows in the views.
    """
    stored, (rows, columns) = _stored(scheme, part), _matrix(part)
    ending = module_of(part).rpartition(".")[2]
    heads = dict(zip(("q_proj", "k_proj"), scheme.heads, strict=True)).get(ending, 0)
    if ending == INTERLEAVED and scheme.layout in {EXPERT_ROWS, ROWS_BIAS, MXFP4}:
        heads = 1
    whole = Source(scheme, (rows, columns), stored, "", row, heads)
    step = max(1, _BLOCK_ELEMENTS // columns // TILE_ROWS) * TILE_ROWS
    if not (scheme.gguf_type or scheme.layout == ROUNDED) or heads or step >= rows:
        yield whole
        return
    [(suffix, parameter)] = stored
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        read = ((suffix, parameter.rows(start, stop)),)
        yield replace(whole, shape=(stop - start, columns), parameters=read, row=row + start)


INTERLEAVED: Final = "gate_up_proj"
"""How names of experts end whose gates and ups are rows in turn."""


def interleaved(tensors: Iterable[TensorSpec], dtype: str) -> dict[str, Format]:
    """Return the formats of plain experts of a checkpoint that has gates and ups in turn."""
    found: dict[str, Format] = {}
    for tensor in tensors:
        if tensor.num_experts and len(tensor.shape) == 2:
            found[tensor.name] = Rewritten(Scheme(EXPERT_ROWS, 16, 0, dtype), dtype)
        elif tensor.num_experts and module_of(tensor.parts[0]).endswith(INTERLEAVED):
            found[tensor.name] = Rewritten(Scheme(ROWS_BIAS, 16, 0, dtype), dtype)
    return found


@dataclass(frozen=True)
class Quantisation:
    """Which matrices of a model are quantised, and how: the content of `spec.quantization`.

    Attributes:
        method: The method's name in config.json.
        schemes: By the modules that they are of, in order; the first that matches counts.
        ignore: Modules that stay plain.

    A module is meant by its name, in which a star may stand for the number of an expert, by `re:`
    and a regular expression that its name begins with, or by Linear, which means every matrix of a
    layer and the head.
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
                rest = {**each, "heads": tuple(each.get("heads", (0, 0)))}
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
            if "heads" in kept:
                kept["heads"] = list(scheme.heads)
            schemes.append(kept | ({} if targets == (LINEAR,) else {"targets": list(targets)}))
        found: dict[str, Any] = {"method": self.method, "schemes": schemes}
        return found | ({"ignore": list(self.ignore)} if self.ignore else {})

    def scheme_of(self, module: str) -> Scheme | None:
        """Return how a module is stored; None: plain."""
        ignored, *rules = self._rules
        if ignored.matches(module):
            return None
        for rule, (_, scheme) in zip(rules, self.schemes, strict=True):
            if rule.matches(module):
                return scheme
        return None

    @cached_property
    def _rules(self) -> tuple["_Rule", ...]:
        """What is ignored, and then the targets of each scheme."""
        return tuple(map(_Rule.of, (self.ignore, *(targets for targets, _ in self.schemes))))

    def formats(self, tensors: Iterable[TensorSpec], dtype: str) -> dict[str, Format]:
        """Return the formats of those tensors that are not plain.

        Args:
            tensors: Tensors of the model.
            dtype: What the engine computes in.

        Raises:
            ConfigError: A matrix cannot be stored so.
        """
        found: dict[str, Format] = {}
        for tensor in tensors:
            if len(tensor.shape) != 2:
                if tensor.name.endswith("norm.weight") and self._norm is not None:
                    found[tensor.name] = Rewritten(self._norm, dtype)
                elif tensor.name.endswith("qkv_proj.bias") and (heads := self._heads):
                    own = Scheme(ROWS_BIAS, 16, 0, "float32", heads=heads)
                    found[tensor.name] = Rewritten(own, dtype)
                continue
            schemes = [self.scheme_of(module_of(part)) for part in tensor.parts]
            for part, scheme in zip(tensor.parts, schemes, strict=True):
                if scheme is not None and (why := why_not(scheme, *part.shape)):
                    raise ConfigError(
                        f"{module_of(part)}: expected {why} in {scheme.name}. {self._remedy}"
                    )
            if not any(schemes):
                continue
            first = schemes[0]
            if len({*schemes}) == 1 and first and (len(schemes) == 1 or _fit(tensor.parts, first)):
                found[tensor.name] = _format(first, dtype)
            elif tensor.num_experts:
                names = sorted({scheme.name if scheme else dtype for scheme in schemes})
                raise ConfigError(
                    f"{tensor.name}: expected all experts in one format, of a multiple of "
                    f"{TILE_ROWS} rows each and without an order of columns (desc_act, actorder), "
                    f"got {', '.join(names)} and {tensor.parts[0].shape[0]} rows. {self._remedy}"
                )
            else:
                found[tensor.name] = Mixed(tuple(_format(scheme, dtype) for scheme in schemes))
        return found

    @property
    def _remedy(self) -> str:
        is_rounded = any(scheme.layout == ROUNDED for _, scheme in self.schemes)
        return "Remove model.quantize." if is_rounded else "This checkpoint is not supported."

    @property
    def _norm(self) -> Scheme | None:
        """The scheme of norms, where they are not as they are used."""
        return next((each for _, each in self.schemes if each.layout == GGUF_NORM), None)

    @property
    def _heads(self) -> tuple[int, int] | None:
        """Heads whose rows a GGUF file has in another order."""
        return next((each.heads for _, each in self.schemes if any(each.heads)), None)

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


def _fit(parts: Iterable[ParamSpec], scheme: Scheme) -> bool:
    """Whether parts in one scheme can be one matrix: in one order of columns, of whole tiles."""
    whole = scheme.layout == GGUF_ROWS or not any(p.shape[0] % TILE_ROWS for p in parts)
    return whole and not scheme.ordered


ROUTERS: Final = (r"re:.*\.gate$", r"re:.*\.shared_expert_gate$", r"re:.*\.router$")
"""Modules that choose experts."""


def _format(scheme: Scheme | None, dtype: str) -> ReadFormat:
    if scheme is None:
        return FORMATS[dtype]
    return (Rewritten if scheme.layout == GGUF_ROWS else Grouped)(scheme, dtype)


def _as_stored(scheme: Scheme, modules: Iterable[str], stored: Mapping[str, str]) -> Scheme:
    """Return a scheme with the dtypes that its scales and its order of columns are stored in."""
    own = list(modules)
    dtypes = {stored[name] for m in own for s in SCALES if (name := f"{m}.{s}") in stored}
    dtypes &= set(FORMATS)
    if not dtypes:
        return scheme
    if scheme.layout == "pack-quantized":
        scheme = replace(scheme, ordered=any(f"{m}.weight_g_idx" in stored for m in own))
    if scheme.layout == "gptq":
        known = {"int32", "int64"} | ({""} if not scheme.ordered else set())
        indices = {stored.get(f"{m}.g_idx", "") for m in own}
        if len(indices) == 1 and indices <= known:  # else what differs is refused by its name
            scheme = replace(scheme, index_dtype=indices.pop())
    return replace(scheme, scale_dtype=dtypes.pop() if len(dtypes) == 1 else "float32")


SCALES: Final = ("scales", "weight_scale")
"""What scales are called in a checkpoint."""
UNUSED: Final = MappingProxyType(
    {
        "compressed-tensors": tuple(
            f"{of}_{what}"
            for of in ("input", "output", "q", "k", "v")
            for what in ("scale", "zero_point")
        ),
        "fp8": ("input_scale", "activation_scale", "k_scale", "v_scale", "kv_scale"),
    }
)
"""By method, ends of the names of parameters that say how activations are quantised."""


def module_of(part: ParamSpec) -> str:
    """Return the name of the module whose weight or bias a parameter is."""
    return part.name.removesuffix(".weight").removesuffix(".bias")


def any_expert(module: str) -> str:
    """Return the name of a module of an expert with a star for its number; others as they are."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", module)


@dataclass(frozen=True)
class _Rule:
    """Patterns that modules are meant by."""

    names: frozenset[str]
    expressions: tuple[re.Pattern[str], ...]
    is_linear: bool
    has_stars: bool

    @classmethod
    def of(cls, patterns: Iterable[str]) -> "_Rule":
        """Sort patterns: a model with experts has ten thousands of modules."""
        every = tuple(patterns)
        expressions = tuple(re.compile(each[3:]) for each in every if each.startswith("re:"))
        has_stars = any(".experts.*." in each for each in every)
        return cls(frozenset(every), expressions, LINEAR in every, has_stars)

    def matches(self, module: str) -> bool:
        """Whether any of them means a module."""
        if module in self.names or (self.has_stars and any_expert(module) in self.names):
            return True
        if self.is_linear and not module.endswith(("embed_tokens", "norm")):
            return True
        return any(each.match(module) for each in self.expressions)


def _check(scheme: Scheme) -> None:
    """Raise ConfigError for a scheme that nothing reads."""
    dtypes = ("uint8",) if scheme.layout == MXFP4 else tuple(FORMATS)
    layout = LAYOUTS.get(scheme.layout)
    if layout is None or scheme.bits not in layout.bits or scheme.scale_dtype not in dtypes:
        raise ConfigError(
            f"model.spec.quantization: expected a layout among {', '.join(LAYOUTS)} with bits and "
            f"scale_dtype that it has, got layout={scheme.layout}, bits={scheme.bits}, "
            f"scale_dtype={scheme.scale_dtype}."
        )
