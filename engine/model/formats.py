"""What a tensor is: its parameters in a checkpoint, its bytes in storage, its product; no torch.

A format is one class. Plans count its bytes, the store lays out its views, the reader fills them,
and the decoder calls its products; none of them knows which format it is. A new one is an entry of
FORMATS, its operators in kernels, and their test.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

from engine.errors import ConfigError

ALIGNMENT: Final = 256
"""Every tensor of a slab, and every view of a tensor, starts at a multiple of this, bytes."""


EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


def align(num_bytes: int) -> int:
    """Round up to the alignment of tensors in a slab."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ParamSpec:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the engine: parameters joined along dimension 0, placed as a whole."""

    name: str
    parts: tuple[ParamSpec, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined tensor."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


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
    linear_silu_mul: Callable[..., Any]
    linear_gelu_mul: Callable[..., Any]
    embedding: Callable[..., Any]


class Format(ABC):
    """How one tensor is kept, filled and multiplied with.

    What a tensor takes follows from its shape alone, so that plans need no file.
    """

    name: str
    is_packed: ClassVar[bool] = False
    """Whether it is made of whole parameters by `pack`, else they are read into `targets`."""
    is_for_products: ClassVar[bool] = True
    """Whether it holds matrices alone; norms and biases, which no product takes, stay plain."""

    @abstractmethod
    def num_bytes(self, tensor: ParamSpec | TensorSpec) -> int:
        """Bytes from the first of its first view to the last of its last one."""

    @abstractmethod
    def views(self, tensor: TensorSpec) -> tuple[View, ...]:
        """List the arrays that its bytes are."""

    @abstractmethod
    def products(self, ops: Any) -> Products:
        """Return its products among those of kernels.ops.linear; asked for once, when built."""

    def row_bytes(self, tensor: TensorSpec) -> int:
        """Bytes that one row is read from."""
        return self.num_bytes(tensor) // tensor.shape[0]

    def parameters(self, tensor: TensorSpec) -> tuple[ParamSpec, ...]:
        """Parameters of a checkpoint that it is made from."""
        return tensor.parts

    def operand(self, views: Mapping[str, Any]) -> Any:
        """Return what its products take as the weight.

        Args:
            views: torch tensors by the names of `views`.
        """
        return views

    def targets(
        self, tensor: TensorSpec, views: Mapping[str, Any]
    ) -> Iterable[tuple[ParamSpec, Any]]:
        """Yield each parameter with the contiguous array that it is read into, or converted."""
        raise NotImplementedError(f"{self.name} is packed")

    def pack(self, tensor: TensorSpec, values: Mapping[str, Any], views: Mapping[str, Any]) -> None:
        """Make the tensor from whole parameters.

        Args:
            tensor: Which.
            values: Its parameters by name on the CPU, in the dtype of the file.
            views: CPU arrays to write.

        Raises:
            CheckpointError: The values cannot be kept in this format.
        """
        raise NotImplementedError(f"{self.name} is read into place")


@dataclass(frozen=True)
class Plain(Format):
    """Elements of one dtype, row after row."""

    name: str
    element_bytes: int
    is_for_products: ClassVar[bool] = False

    def num_bytes(self, tensor: ParamSpec | TensorSpec) -> int:
        """Bytes of all elements."""
        return tensor.numel * self.element_bytes

    def views(self, tensor: TensorSpec) -> tuple[View, ...]:
        """List the tensor itself."""
        return (View("", tensor.shape, self.name, 0),)

    def products(self, ops: Any) -> Products:
        """Return those that read a weight once and round nothing but the result."""
        return Products(ops.linear, ops.linear_silu_mul, ops.linear_gelu_mul, ops.embedding)

    def operand(self, views: Mapping[str, Any]) -> Any:
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

    default: Format
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

    def packing_bytes(self, tensors: Iterable[TensorSpec], stored: Format) -> int:
        """Host memory beside its place that the largest packed tensor is made in, from files."""
        if not self.others and not self.default.is_packed:
            return 0  # known at once, and asked for often
        packed = (t for t in tensors if self[t.name].is_packed)
        return max((stored.num_bytes(t) + self.num_bytes(t) for t in packed), default=0)

    def check(self, tensors: Iterable[TensorSpec]) -> None:
        """Raise ConfigError where a tensor is unknown, or cannot be held."""
        known = {tensor.name: tensor for tensor in tensors}
        for name, each in self.others.items():
            found = known[name].shape if name in known else ()
            if not found or (each.is_for_products and len(found) != 2):
                raise ConfigError(
                    f"formats: expected a matrix of the model for {each.name}, got {name} "
                    f"(shape {found}). Leave it in {self.default.name}."
                )

    def to_dict(self) -> dict[str, str]:
        """Return the formats that differ from the default, by tensor."""
        return {name: each.name for name, each in self.others.items()}


def plain(dtype: str) -> TensorFormats:
    """Return the formats of a model whose tensors are all of one dtype."""
    return TensorFormats(FORMATS[dtype])
