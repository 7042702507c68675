"""OffloadConfig: the published fields, bounds, errors, warnings and hash of weight offloading."""

import hashlib
import json
import sys
import warnings
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import ClassVar, Final

from engine.errors import SPOKEN, ConfigError
from engine.sealed import Sealed, choice, from_plain, number, settings

BACKENDS = ("auto", "uva", "prefetch", "experts")


class OffloadWarning(UserWarning):
    """A setting of the offload configuration is ignored, or costs more than it brings."""


BETWEEN: Final = frozenset({"engine", "tightfit", "contextlib", "dataclasses"})
"""Packages between a user's line and a warning: this one, and modules of Python that call it."""


def warn_caller(message: str) -> None:
    """Warn of an offload setting, in the words of the door at hand, at the line that called it."""
    level, frame = 1, sys._getframe(0)  # noqa: SLF001  inspect.stack reads every source file
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(SPOKEN.get()(message), OffloadWarning, stacklevel=level)


def _check_selectors(name: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        raise ConfigError(
            f"{name}: expected a list of parameter selectors such as ['mlp.down_proj'], "
            f"got {value!r}. Put the selector into a list."
        )
    for item in value:
        if not isinstance(item, str) or not item or any(not part for part in item.split(".")):
            raise ConfigError(
                f"{name}: expected non-empty dotted segments such as 'mlp.down_proj', "
                f"got {item!r}. Remove empty segments."
            )


@dataclass(kw_only=True)
class UVAOffloadConfig(Sealed):
    """Weights that GPU kernels read in place from pinned host memory."""

    section: ClassVar = "offload.uva"
    cpu_offload_gb: float = number(0.0, low=0, hint="It is a size in GiB; 0 turns it off.")
    """GiB of weights per GPU that live in host memory; 0 turns it off."""
    cpu_offload_params: list[str] = field(default_factory=list)
    """Selectors of whole dotted segments of parameter names; empty selects every decoder layer."""
    experts_first: bool = False
    """Take the experts of all layers before anything else: a step reads a few of them, and all of
    the rest."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds."""
        _check_selectors("offload.uva.cpu_offload_params", self.cpu_offload_params)

    @property
    def is_set(self) -> bool:
        """Whether any field differs from its default."""
        return self != UVAOffloadConfig()


@dataclass(kw_only=True)
class PrefetchOffloadConfig(Sealed):
    """Layers that are copied ahead of their use into slots on the GPU."""

    section: ClassVar = "offload.prefetch"
    offload_group_size: int = number(0, low=0, hint="It counts layers; 0 turns prefetch off.")
    """Layers in a group; 0 turns prefetch off."""
    offload_num_in_group: int = number(
        1, low=1, hint="To offload nothing set offload_group_size=0."
    )
    """How many of each group, its last ones, live in host memory."""
    offload_prefetch_step: int = number(1, low=0)
    """How many offloaded layers ahead the copies run."""
    offload_params: list[str] = field(default_factory=list)
    """Selectors of whole dotted segments of parameter names; empty selects whole layers."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds."""
        _check_selectors("offload.prefetch.offload_params", self.offload_params)

    @property
    def is_set(self) -> bool:
        """Whether any field differs from its default."""
        return self != PrefetchOffloadConfig()


@dataclass(kw_only=True)
class ExpertOffloadConfig(Sealed):
    """Experts in host memory, with a bank of slots in each layer for those that were used last."""

    section: ClassVar = "offload.experts"
    expert_slots: int | None = number(None, low=1)
    """Slots of each layer's bank; null: as many as fit beside the KV cache of one sequence of
    max_model_len."""

    @property
    def is_set(self) -> bool:
        """Whether any field differs from its default."""
        return self != ExpertOffloadConfig()


@dataclass(kw_only=True)
class OffloadConfig(Sealed):
    """Which weights live in host memory and how they reach the compute."""

    section: ClassVar = "offload"
    offload_backend: str = choice(BACKENDS, "auto")
    """auto | uva | prefetch | experts. auto takes prefetch if group_size > 0, else uva if gb > 0,
    else experts if expert_slots is set."""
    uva: UVAOffloadConfig = field(default_factory=UVAOffloadConfig)
    """Read in place. Construction takes a dict of its fields too, here and below."""
    prefetch: PrefetchOffloadConfig = field(default_factory=PrefetchOffloadConfig)
    """Copied ahead."""
    experts: ExpertOffloadConfig = field(default_factory=ExpertOffloadConfig)
    """Cached on the GPU."""

    def check(self) -> None:
        """Raise ConfigError on a contradiction; warn about fields that are ignored."""
        for name, kind in (
            ("uva", UVAOffloadConfig),
            ("prefetch", PrefetchOffloadConfig),
            ("experts", ExpertOffloadConfig),
        ):
            node: object = getattr(self, name)
            if isinstance(node, dict):
                setattr(self, name, from_plain(kind, node, f"offload.{name}"))
            elif not isinstance(node, kind):
                raise ConfigError(
                    f"offload.{name}: expected {kind.__name__} or a dict of its fields, got "
                    f"{node!r}."
                )
        if self.offload_backend == "prefetch" or self.prefetch.offload_group_size > 0:
            self._check_prefetch()
        for message in self.ignored():
            warn_caller(message)

    def _check_prefetch(self) -> None:
        size, num = self.prefetch.offload_group_size, self.prefetch.offload_num_in_group
        if num > size:
            how = "Lower offload_num_in_group or raise" if size else "0 turns prefetch off: raise"
            raise ConfigError(
                "offload.prefetch.offload_num_in_group: expected at most offload_group_size="
                f"{size}, got {num}. {how} offload_group_size."
            )
        step = self.prefetch.offload_prefetch_step
        if step < 1:
            raise ConfigError(
                "offload.prefetch.offload_prefetch_step: expected at least 1 while prefetch is on "
                f"(offload_group_size={size}), got {step}. Set it to 1 or more."
            )

    @property
    def backend(self) -> str:
        """The backend in force: none | uva | prefetch | experts."""
        if self.offload_backend != "auto":
            return self.offload_backend
        if self.prefetch.offload_group_size > 0:
            return "prefetch"
        if self.uva.cpu_offload_gb > 0:
            return "uva"
        return "experts" if self.experts.is_set else "none"

    def changed(self) -> dict[str, object]:
        """The fields that differ from their defaults, by name."""
        found = {}
        for item in settings(OffloadConfig, "offload."):
            value = attrgetter(item.path.removeprefix("offload."))(self)
            if item.node is None and value != item.default:
                found[item.path] = value
        return found

    def ignored(self) -> list[str]:
        """The warnings: one sentence for each set of fields without effect."""
        backend = self.offload_backend
        nodes = ("prefetch", "uva", "experts") if backend != "auto" else ()
        others = [name for name in nodes if name != backend and getattr(self, name).is_set]
        if others:
            return [
                f"offload.{others[0]}: fields are set but offload_backend={backend}, so they are "
                f"ignored. Remove them or set offload_backend={others[0]}."
            ]
        if (
            self.offload_backend == "auto"
            and self.prefetch.offload_group_size > 0
            and self.uva.cpu_offload_gb > 0
        ):
            return [
                "offload: both offload.uva.cpu_offload_gb and offload.prefetch.offload_group_size "
                "are set with offload_backend=auto; prefetch is used and uva is ignored. "
                "Set offload_backend, or remove one of the two."
            ]
        if self.backend != "experts" and self.experts.is_set:
            return [
                f"offload.experts: expert_slots is set, but offload_backend=auto takes "
                f"{self.backend}, so it is ignored. Remove it or set offload_backend=experts."
            ]
        return []

    def compute_hash(self) -> str:
        """Hash every field, selectors as sets; the same in every process (SHA-256, hexadecimal)."""
        data = asdict(self)
        for node in data.values():
            if isinstance(node, dict):
                for key, value in node.items():
                    if isinstance(value, (list, tuple, set, frozenset)):
                        node[key] = sorted(set(value))
        data["uva"]["cpu_offload_gb"] = float(data["uva"]["cpu_offload_gb"])
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
