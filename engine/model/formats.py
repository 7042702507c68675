"""What a tensor is: its parameters in a checkpoint, its bytes in storage, its product; no torch.

A format is one class. Plans count its bytes, the store lays out its views, the reader fills them,
and the decoder calls its products; none of them knows which format it is. A new one is a class
beside engine/model/lossless.py, its operators in kernels, and their test; when it is taken is said
in engine/plan/weight_format.py.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

from engine.errors import ConfigError

ALIGNMENT: Final = 256
"""Every tensor of a slab, and every view of a tensor, starts at a multiple of this, bytes."""

PACK_BATCH_BYTES: Final = 128 * 2**20
"""Rows that are brought to the GPU before they are packed."""

DUMMY_STD: Final = 0.02
"""Standard deviation of random weights."""
DUMMY_POOL_SIZE: Final = 4_194_301
"""Normal draws that random weights are cut from; a prime, so that rows do not repeat in step."""

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


def align(num_bytes: int) -> int:
    """Round up to the alignment of tensors in a slab."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ParamSpec:
    """One tensor of a checkpoint, or some of its rows."""

    name: str
    shape: tuple[int, ...]
    first: int = 0
    """The element of the checkpoint's tensor that it begins with."""
    dtype: str | None = None
    """The only one that it may be stored in; None: any of floating-point numbers."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def rows(self, start: int, stop: int) -> "ParamSpec":
        """Return some of its rows."""
        size = math.prod(self.shape[1:])
        shape = stop - start, *self.shape[1:]
        return ParamSpec(self.name, shape, self.first + start * size, self.dtype)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the engine: parameters joined along dimension 0, placed as a whole."""

    name: str
    parts: tuple[ParamSpec, ...]
    num_experts: int = 0
    """Experts, whose blocks of equally many rows follow each other; 0: it has no experts."""

    @property
    def expert_rows(self) -> int:
        """Rows of one expert."""
        return self.shape[0] // self.num_experts

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined tensor."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def row_parts(self, start: int, stop: int) -> Iterator[tuple[ParamSpec, int, int]]:
        """Yield what rows start to stop - 1 are of each parameter, and where in these it is."""
        begin = 0
        for part in self.parts:
            end = begin + part.shape[0]
            low, high = max(start, begin), min(stop, end)
            if low < high:
                yield part.rows(low - begin, high - begin), low - start, high - start
            begin = end


@dataclass(frozen=True)
class View:
    """One array among a tensor's bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A name of torch."""
    offset: int
    """Bytes from the tensor's first to its own first, a multiple of ALIGNMENT."""


class Products(NamedTuple):
    """The operators that take a tensor in one format; signatures as in kernels.ops.linear."""

    linear: Callable[..., Any]
    linear_gated_mul: Callable[..., Any]
    embedding: Callable[..., Any]
    kernels_of: Callable[..., set[Any]] = lambda *_, **__: set()
    """What they launch, to be compiled ahead; signature as in kernels.ops.linear."""

    @classmethod
    def of(cls, module: Any) -> "Products":
        """Return those of a module of kernels.ops."""
        return cls(*(getattr(module, name) for name in cls._fields))


class Operators(NamedTuple):
    """The modules of kernels.ops that formats have products of."""

    linear: Any
    codes: Any
    quantised: Any


class Packing(ABC):
    """Packs one tensor, a block of rows after the other."""

    num_escapes: int = 0
    """Elements so far that are kept whole, beside what the format has for every one."""

    @abstractmethod
    def add(self, rows: Any) -> None:
        """Pack the next rows and bring them into place.

        Args:
            rows: On the device, in the dtype that the engine computes in.
        """

    @abstractmethod
    def finish(self) -> str:
        """End the tensor; return why its values cannot be kept, or nothing if they are."""


class Format(ABC):
    """How one tensor is kept and multiplied with; its kinds below say how it is filled.

    What a tensor takes follows from its shape alone, so that plans need no file.
    """

    name: str
    is_restored: ClassVar[bool] = False
    """Whether its products restore weights that are kept in fewer bytes."""
    whole_views: ClassVar[frozenset[str]] = frozenset()
    """Views that have no part for each row."""

    @abstractmethod
    def holds(self, tensor: TensorSpec, dtype: str) -> bool:
        """Whether a tensor of these sizes, computed with in this dtype, can be kept so."""

    @abstractmethod
    def num_bytes(self, tensor: ParamSpec | TensorSpec) -> int:
        """Bytes from the first of its first view to the last of its last one."""

    @abstractmethod
    def views(self, tensor: TensorSpec) -> tuple[View, ...]:
        """List the arrays that its bytes are."""

    @abstractmethod
    def products(self, ops: Operators) -> Products:
        """Return its products; asked for once, when built."""

    def row_bytes(self, tensor: TensorSpec) -> int:
        """Bytes that one row is read from."""
        return self.num_bytes(tensor) // tensor.shape[0]

    def parameters(self, tensor: TensorSpec) -> tuple[ParamSpec, ...]:
        """Parameters of a checkpoint that it is made from."""
        return tensor.parts

    def operand(
        self,
        tensor: TensorSpec,  # noqa: ARG002
        views: Mapping[str, Any],
        ops: Operators,  # noqa: ARG002
        scratch: Any = None,  # noqa: ARG002
    ) -> Any:
        """Return what its products take as the weight.

        Args:
            tensor: Which.
            views: torch tensors by the names of `views`.
            ops: Modules of kernels.ops.
            scratch: uint8 of GPU memory in which a product may make the weight anew, whose place it
                takes for as long as the product runs; None: there is none.
        """
        return views

    def token_elements(self, tensor: TensorSpec) -> int:  # noqa: ARG002
        """Elements of each token that its products allocate beside their result."""
        return 0


class ReadFormat(Format):
    """A format whose parameters are read into place."""

    @abstractmethod
    def targets(
        self, tensor: TensorSpec, views: Mapping[str, Any]
    ) -> Iterable[tuple[ParamSpec, Any]]:
        """Yield each parameter with the contiguous array that it is read into, or converted."""


class UnpackedFormat(ReadFormat):
    """A format that is made of other arrays of a checkpoint, but for its `targets`."""

    is_restored = True

    def kinds(self, tensor: TensorSpec) -> Iterable[tuple[str, TensorSpec]]:  # noqa: ARG002
        """Yield for each part that products restore the kind of its values, and the part.

        A kind is one of kernels.arguments.Quantised, with "+sub" behind it where groups have
        subgroups.
        """
        return ()

    @abstractmethod
    def sources(self, tensor: TensorSpec) -> Iterable[Any]:
        """Yield what is read at a time and what it becomes, engine.model.quantised.Source."""

    @abstractmethod
    def dummies(self, tensor: TensorSpec) -> Iterable[tuple[str, float | str]]:
        """Yield the views of random weights, and what is in them.

        One value everywhere, or "bytes" (random ones), "float8" (draws in it), "noise" (what plain
        weights have), "order" (the numbers of the elements), or a layout, whose table it is.
        """


class PackedFormat(Format):
    """A format that is made of its rows, some at a time, on the GPU."""

    is_restored = True

    @abstractmethod
    def block_rows(self, tensor: TensorSpec) -> int:
        """Return how many rows are packed at a time; the last block may have fewer."""

    @abstractmethod
    def scratch_bytes(self, tensor: TensorSpec) -> int:
        """GPU memory that packing a block takes beside its rows and their place."""

    @abstractmethod
    def packing(self, tensor: TensorSpec, views: Mapping[str, Any], ops: Operators) -> Packing:
        """Return what makes the tensor.

        Args:
            tensor: Which.
            views: Arrays to write, on any device.
            ops: Modules of kernels.ops.
        """


@dataclass(frozen=True)
class Plain(ReadFormat):
    """Elements of one dtype, row after row."""

    name: str
    element_bytes: int

    def holds(self, tensor: TensorSpec, dtype: str) -> bool:  # noqa: ARG002
        """Whether it is the dtype that the engine computes in."""
        return self.name == dtype

    def num_bytes(self, tensor: ParamSpec | TensorSpec) -> int:
        """Bytes of all elements."""
        return tensor.numel * self.element_bytes

    def views(self, tensor: TensorSpec) -> tuple[View, ...]:
        """List the tensor itself."""
        return (View("", tensor.shape, self.name, 0),)

    def products(self, ops: Operators) -> Products:
        """Return those that read a weight once and round nothing but the result."""
        return Products.of(ops.linear)

    def operand(
        self,
        tensor: TensorSpec,  # noqa: ARG002
        views: Mapping[str, Any],
        ops: Operators,  # noqa: ARG002
        scratch: Any = None,  # noqa: ARG002
    ) -> Any:
        """Return the tensor itself."""
        return views[""]

    def targets(
        self, tensor: TensorSpec, views: Mapping[str, Any]
    ) -> Iterable[tuple[ParamSpec, Any]]:
        """Yield each parameter with its rows."""
        row = 0
        for part in tensor.parts:
            yield part, views[""][row : row + part.shape[0]]
            row += part.shape[0]


FORMATS: Final[Mapping[str, Plain]] = MappingProxyType(
    {each.name: each for each in (Plain("bfloat16", 2), Plain("float16", 2), Plain("float32", 4))}
)
"""The formats that are named after the dtype that the engine computes in."""
NO_FORMATS: Final[Mapping[str, Format]] = MappingProxyType({})
"""Formats of a model whose tensors all have that of the dtype."""


@dataclass(frozen=True)
class TensorFormats:
    """The format of every tensor of a model."""

    default: Plain
    others: Mapping[str, Format] = field(default_factory=dict)
    """By the tensor's name."""

    def __getitem__(self, name: str) -> Format:
        """Return the format of a tensor."""
        return self.others.get(name, self.default)

    def num_bytes(self, tensor: TensorSpec) -> int:
        """Bytes of one tensor."""
        return self.others.get(tensor.name, self.default).num_bytes(tensor)

    def total_bytes(self, tensors: Iterable[TensorSpec]) -> int:
        """Bytes of several."""
        return sum(map(self.num_bytes, tensors))

    def packed(self, tensors: Iterable[TensorSpec]) -> list[tuple[TensorSpec, PackedFormat]]:
        """Return those that are made of their rows, with their formats."""
        if not self.others:
            return []  # known at once, and asked for often
        every = ((tensor, self[tensor.name]) for tensor in tensors)
        return [(tensor, form) for tensor, form in every if isinstance(form, PackedFormat)]

    def unpacked(self, tensors: Iterable[TensorSpec]) -> list[tuple[TensorSpec, UnpackedFormat]]:
        """Return those that are made of other arrays, with their formats."""
        if not self.others:
            return []
        every = ((tensor, self[tensor.name]) for tensor in tensors)
        return [(tensor, form) for tensor, form in every if isinstance(form, UnpackedFormat)]

    def restored(self, tensors: Iterable[TensorSpec]) -> list[TensorSpec]:
        """Return those that products restore."""
        if not self.others:
            return []
        return [tensor for tensor in tensors if self[tensor.name].is_restored]

    def token_elements(self, tensors: Iterable[TensorSpec]) -> int:
        """Elements of each token that a product allocates at most beside its result."""
        restored = self.restored(tensors)
        return max((self[each.name].token_elements(each) for each in restored), default=0)

    def unpacking_bytes(self, tensors: Iterable[TensorSpec]) -> tuple[int, int]:
        """Return the GPU memory that arrays of a checkpoint are brought to, and that beside it."""
        known: dict[tuple[object, ...], tuple[int, int, int]] = {}
        found = [(0, 0, 0)]
        for tensor, form in self.unpacked(tensors):
            # Of the same parts of other layers, which may be those of hundreds of experts.
            shapes = tuple(part.shape for part in tensor.parts)
            key = form, tensor.name.split(".", 3)[-1], shapes
            if key not in known:
                sources = list(form.sources(tensor))
                sizes = [source.num_bytes for source in sources]
                scratch = max((source.scratch_bytes for source in sources), default=0)
                known[key] = max(sizes, default=0), sum(sizes), scratch
            found.append(known[key])
        largest, totals, scratches = zip(*found, strict=True)
        return max(*largest, min(PACK_BATCH_BYTES, sum(totals))), max(scratches)

    @property
    def has_codes(self) -> bool:
        """Whether any tensor is packed."""
        return any(isinstance(form, PackedFormat) for form in self.others.values())

    def block_bytes(self, tensor: TensorSpec, form: PackedFormat) -> int:
        """Bytes of the rows of a tensor that are packed at a time."""
        rows = min(tensor.shape[0], form.block_rows(tensor))
        return self.default.num_bytes(tensor) // tensor.shape[0] * rows

    def batch_bytes(self, tensors: Iterable[TensorSpec]) -> int:
        """GPU memory that rows of packed tensors are brought to; some blocks, the largest at least.

        Args:
            tensors: Tensors; those that are packed count.
        """
        packed = self.packed(tensors)
        largest = max((self.block_bytes(*each) for each in packed), default=0)
        total = sum(self.default.num_bytes(tensor) for tensor, _ in packed)
        return max(largest, min(PACK_BATCH_BYTES, total))

    def packing_bytes(self, tensors: Iterable[TensorSpec]) -> int:
        """GPU memory that packing takes beside the tensors' places."""
        every = list(tensors)
        packed = self.packed(every)
        scratch = (form.scratch_bytes(tensor) for tensor, form in packed)
        packing = self.batch_bytes(tensor for tensor, _ in packed) + max(scratch, default=0)
        return max(packing, sum(self.unpacking_bytes(every)))

    def check(self, tensors: Iterable[TensorSpec]) -> None:
        """Raise ConfigError where a tensor is unknown, or cannot be held."""
        known = {tensor.name: tensor for tensor in tensors}
        for name, each in self.others.items():
            if name not in known or not each.holds(known[name], self.default.name):
                shape = known[name].shape if name in known else ()
                raise ConfigError(
                    f"formats: expected a tensor of the model that {each.name} can hold, got "
                    f"{name} (shape {shape}) in {self.default.name}. Leave it plain."
                )

    def to_dict(self) -> dict[str, str]:
        """Return the formats that differ from the default, by tensor."""
        plain = self.default.name
        return {name: each.name for name, each in self.others.items() if each.name != plain}


def plain(dtype: str) -> TensorFormats:
    """Return the formats of a model whose tensors are all of one dtype."""
    return TensorFormats(FORMATS[dtype])
