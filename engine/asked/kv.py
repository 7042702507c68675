"""What is asked of the KV cache: KVConfig, and KVTransferConfig, the published way to ask."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from engine.errors import ConfigError
from engine.sealed import GIB, Sealed, check_number, number

CONNECTOR: Final = "OffloadingConnector"
ROLE: Final = "kv_both"
IN_GIB: Final = "It is a size in GiB."
EXTRA: Final = ("num_cpu_blocks", "cpu_bytes_to_use", "block_size")
"""What kv_connector_extra_config may hold."""


@dataclass(kw_only=True)
class KVConfig(Sealed):
    """The paged KV cache."""

    section: ClassVar = "kv"
    SIZES: ClassVar = ("num_cpu_blocks", "cpu_gib", "swap_space")
    """Settings that size the host tier, of which one may be set."""
    block_size: int = 16
    """Tokens in a block: 8, 16, 32, 64 or 128."""
    enable_prefix_caching: bool = False
    """Keep full blocks by their content, and share blocks of equal prefixes."""
    num_cpu_blocks: int | None = number(None, low=0)
    """Blocks of the host tier; 0: no host tier."""
    cpu_gib: float | None = number(None, low=0, hint=IN_GIB)
    """Size of the host tier, GiB; 0: no host tier."""
    swap_space: float = number(0.0, low=0, hint=IN_GIB)
    """Host memory, GiB. If no offload is set, weights that do not fit the GPU use it first; KV
    blocks take the rest."""
    disable_sliding_window: bool = False
    """Attend to the whole context even if the checkpoint has a sliding window."""
    pin_limit_gib: float | None = number(None, low=0, hint=IN_GIB)
    """Limit of pinned memory for KV blocks, GiB; further blocks are pageable and are only copied,
    never read in place. null: all are pinned."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds, contradicts another or has no effect."""
        if type(self.block_size) is not int or self.block_size not in {8, 16, 32, 64, 128}:
            raise ConfigError(
                f"kv.block_size: expected 8, 16, 32, 64 or 128 tokens, got {self.block_size!r}."
            )
        sizes = self.sizes
        if len(sizes) > 1:
            given = " and ".join(f"kv.{name}={value:g}" for name, value in sizes.items())
            raise ConfigError(
                f"kv: expected one size of the host tier, got {given}. Set all but one to null "
                "(swap_space: to 0)."
            )
        if self.pin_limit_gib is not None and not self.has_host_tier:
            raise ConfigError(
                f"kv.pin_limit_gib: expected null without a host tier, got {self.pin_limit_gib:g}: "
                "it caps pinned memory of KV blocks, and there are none in host memory. Set "
                "kv.cpu_gib, kv.num_cpu_blocks or kv.swap_space, or remove it."
            )

    @property
    def sizes(self) -> dict[str, float]:
        """Sizes of the host tier that were given, by setting."""
        found = {name: getattr(self, name) for name in self.SIZES}
        return {
            name: value
            for name, value in found.items()
            if value is not None and (name != "swap_space" or value > 0)
        }

    @property
    def has_host_tier(self) -> bool:
        """Whether KV blocks may live in host memory."""
        return any(self.sizes.values())

    def for_blocks_alone(self) -> "KVConfig":
        """Return the same with what swap_space holds given to KV blocks alone."""
        return replace(self, swap_space=0.0, cpu_gib=self.swap_space) if self.swap_space else self

    def without_host_tier(self) -> "KVConfig":
        """Return the same with all KV blocks on the GPU."""
        return replace(self, num_cpu_blocks=None, cpu_gib=None, swap_space=0.0, pin_limit_gib=None)


@dataclass(kw_only=True)
class KVTransferConfig(Sealed):
    """The published way to ask for a host tier of KV blocks.

    `kv_connector_extra_config` holds one size, num_cpu_blocks or cpu_bytes_to_use (bytes), and
    optionally block_size: tokens in a block that num_cpu_blocks counts, a multiple of the cache's.
    The connector finds prefixes in host memory, so prefix caching is on.
    """

    kv_connector: str | None = None
    """OffloadingConnector."""
    kv_role: str | None = None
    """kv_both."""
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ConfigError for a connector or role that there is not, or a size that is none."""
        prefix = "kv_transfer_config."
        if self.kv_connector != CONNECTOR:
            raise ConfigError(
                f"{prefix}kv_connector: expected {CONNECTOR}, the only connector here, got "
                f"{self.kv_connector!r}. Change it, or ask for a host tier with cpu_gib."
            )
        if self.kv_role != ROLE:
            raise ConfigError(
                f"{prefix}kv_role: expected {ROLE} (one engine stores and loads), got "
                f"{self.kv_role!r}. Change it."
            )
        extra: object = self.kv_connector_extra_config
        if not isinstance(extra, dict):
            raise ConfigError(
                f"{prefix}kv_connector_extra_config: expected a dict of {', '.join(EXTRA)}, got "
                f"{extra!r}."
            )
        unknown = sorted(str(name) for name in set(extra) - set(EXTRA))
        if unknown:
            raise ConfigError(
                f"{prefix}kv_connector_extra_config: expected {', '.join(EXTRA)}, got "
                f"{', '.join(unknown)}. Remove it."
            )
        for name, value in extra.items():
            check_number(f"{prefix}kv_connector_extra_config.{name}", value, low=1, integer=True)
        if len(set(extra) - {"block_size"}) != 1:
            raise ConfigError(
                f"{prefix}kv_connector_extra_config: expected one of num_cpu_blocks and "
                f"cpu_bytes_to_use, got {extra!r}. Give one size."
            )

    def to_kv(self, block_size: int) -> dict[str, Any]:
        """Return the fields of KVConfig that mean the same, for a cache of so many tokens a block.

        Raises:
            ConfigError: `block_size` of the extra config is no multiple of it.
        """
        extra = self.kv_connector_extra_config
        size = extra.get("block_size", block_size)
        if size % block_size:
            raise ConfigError(
                "kv_transfer_config.kv_connector_extra_config.block_size: expected a multiple of "
                f"kv.block_size={block_size}, got {size}. Change one of them."
            )
        if "num_cpu_blocks" in extra:
            return {"num_cpu_blocks": extra["num_cpu_blocks"] * (size // block_size)}
        return {"cpu_gib": extra["cpu_bytes_to_use"] / GIB}
