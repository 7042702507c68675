"""Where accelerate is to put which module, and how many sequences fit beside; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from engine.asked.config import EngineConfig
from engine.errors import CapacityError
from engine.model.formats import FORMATS
from engine.model.spec import DTYPE_BYTES, ModelSpec
from engine.sealed import GIB

HOST: Final = "cpu"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes that decide what fits."""

    spec: ModelSpec
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    """Tokens of KV that must have room beside the weights."""
    room_bytes: int
    """Bytes of the GPU budget for weights, KV and activations."""

    @property
    def outer_bytes(self) -> int:
        """Weights outside of the decoder layers."""
        return sum(map(FORMATS[self.dtype].num_bytes, self.spec.outer_tensors()))

    @property
    def layer_bytes(self) -> int:
        """Weights of one decoder layer."""
        return sum(map(FORMATS[self.dtype].num_bytes, self.spec.layer_tensors(0)))

    @property
    def copy_bytes(self) -> int:
        """Room for the weight that is copied when it is needed: of the largest projection."""
        parts = (part for tensor in self.spec.layer_tensors(0) for part in tensor.parts)
        return 2 * max(map(FORMATS[self.dtype].num_bytes, parts))

    def sequence_bytes(self, num_tokens: int) -> int:
        """KV of so many tokens, and what their prefill holds for a while."""
        spec = self.spec
        kv = spec.kv_bytes_per_token(self.dtype)
        # torch.cat makes a layer's keys and values anew for each token.
        kv += kv // spec.num_hidden_layers
        work = (4 * spec.intermediate_size + 6 * spec.hidden_size) * DTYPE_BYTES[self.dtype]
        return num_tokens * (kv + work) + 6 * spec.vocab_size


def host_layers(sizes: Sizes, config: EngineConfig) -> int:
    """Return how many of the last decoder layers go to host memory.

    With offload=auto the GPU is filled from the first layer on, else cpu_offload_gb is reached.

    Raises:
        CapacityError: The rest does not fit the GPU budget.
    """
    layers = sizes.spec.num_hidden_layers
    needed = sizes.sequence_bytes(sizes.kv_tokens)
    if config.planner.choose:
        left = sizes.room_bytes - needed - sizes.outer_bytes
        if left >= layers * sizes.layer_bytes:
            return 0
        on_gpu = max(0, (left - sizes.copy_bytes) // sizes.layer_bytes)
        num = layers - on_gpu
    else:
        asked = config.offload.uva.cpu_offload_gb * GIB
        num = min(layers, -(-int(asked) // sizes.layer_bytes))
    resident = sizes.outer_bytes + (layers - num) * sizes.layer_bytes
    resident += sizes.copy_bytes if num else 0
    if resident + needed > sizes.room_bytes:
        raise CapacityError(
            f"accelerate: expected room for {resident / GIB:.3f} GiB of weights and "
            f"{needed / GIB:.3f} GiB for {sizes.kv_tokens} tokens, got "
            f"{sizes.room_bytes / GIB:.3f} GiB of the GPU budget. Choose offload=auto, or a "
            "larger cpu_offload_gb with offload=uva, or lower engine.max_model_len."
        )
    return num


def device_map(num_layers: int, num_host: int, device: str | int) -> dict[str, str | int]:
    """Return accelerate's device map with the last `num_host` decoder layers in host memory.

    Args:
        num_layers: decoder layers in all.
        num_host: of them in host memory.
        device: where the others and all that is no decoder layer go.
    """
    if not num_host:
        return {"": device}
    found: dict[str, str | int] = {"model.embed_tokens": device}
    for index in range(num_layers):
        found[f"model.layers.{index}"] = HOST if index >= num_layers - num_host else device
    others = ("model.norm", "model.rotary_emb", "lm_head")
    return found | dict.fromkeys(others, device)


def largest_batch(sizes: Sizes, num_host: int, lengths: Mapping[str, int]) -> int:
    """Return how many of the sequences of these lengths fit beside the weights, in order.

    Args:
        sizes: of the model and the budget.
        num_host: decoder layers in host memory.
        lengths: prompt plus output tokens of each waiting sequence.
    """
    layers = sizes.spec.num_hidden_layers
    left = sizes.room_bytes - sizes.outer_bytes - (layers - num_host) * sizes.layer_bytes
    left -= sizes.copy_bytes if num_host else 0
    longest = num = 0
    for length in list(lengths.values())[: sizes.max_num_seqs]:
        longest = max(longest, length)
        if (num + 1) * sizes.sequence_bytes(longest) > left:
            break
        num += 1
    return num
