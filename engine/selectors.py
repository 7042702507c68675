"""Selectors: dotted segments that pick parameters by their checkpoint names."""

from collections.abc import Iterable, Sequence

from engine.errors import ConfigError
from engine.spec import TensorSpec


def matches(selector: str, name: str) -> bool:
    """Whether the selector's segments occur as whole, adjacent segments of the name.

    `experts.w2_weight` matches `mlp.experts.w2_weight`; `w2` does not.
    """
    wanted, have = selector.split("."), name.split(".")
    width = len(wanted)
    return any(have[i : i + width] == wanted for i in range(len(have) - width + 1))


def selected(tensor: TensorSpec, selectors: Sequence[str]) -> bool:
    """Whether any selector matches the tensor's fused name or one of its parts."""
    names = [tensor.name, *(part.name for part in tensor.parts)]
    return any(matches(selector, name) for selector in selectors for name in names)


def check_selectors(setting: str, selectors: Sequence[str], tensors: Iterable[TensorSpec]) -> None:
    """Raise ConfigError for a selector that matches none of the tensors.

    Args:
        setting: The setting's full name, for the message.
        selectors: What was given.
        tensors: The tensors that the setting may choose from.

    Raises:
        ConfigError: A selector matches nothing.
    """
    candidates = list(tensors)
    for selector in selectors:
        if not any(selected(tensor, [selector]) for tensor in candidates):
            segments = {
                segment
                for tensor in candidates
                for part in tensor.parts
                for segment in part.name.split(".")
                if not segment.isdigit() and segment not in {"model", "layers", "weight", "bias"}
            }
            raise ConfigError(
                f"{setting}: expected whole dotted segments of a parameter name, got {selector!r}, "
                f"which matches no parameter of this model. Segments here: "
                f"{', '.join(sorted(segments))}; aliases: qkv_proj, gate_up_proj."
            )


def widened(tensors: Iterable[TensorSpec], selectors: Sequence[str]) -> list[str]:
    """Name the fused products that a selector takes whole although it names only a part."""
    found = []
    for tensor in tensors:
        if len(tensor.parts) > 1 and not any(matches(s, tensor.name) for s in selectors):
            hit = [selected(TensorSpec(part.name, (part,)), selectors) for part in tensor.parts]
            if any(hit) and not all(hit):
                found.append(tensor.name)
    return found
