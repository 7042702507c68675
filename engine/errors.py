"""Errors of the engine: what was wrong, what was expected, what was got, what to change."""

import difflib
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Final

SPOKEN: Final[ContextVar[Callable[[str], str]]] = ContextVar("spoken", default=str)
"""What the door at hand makes of a warning: LLM names its keywords in the place of keys."""


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A setting is out of bounds, contradicts another or would have no effect."""


class CapacityError(EngineError):
    """What was asked does not fit into GPU or host memory.

    Attributes:
        plan: The plan that does not fit as a plain dict (bytes by part), or None.
    """

    def __init__(self, message: str, plan: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.plan = plan


class KernelError(EngineError):
    """A CUDA kernel could not be compiled, loaded or launched while an engine was built."""


class PinningError(CapacityError):
    """Host memory could not be registered with the device."""


class CheckpointError(EngineError):
    """A checkpoint is absent, incomplete, or does not match the model's sizes."""


class UnpackableError(CheckpointError):
    """Tensors have values that the format which they were planned in cannot keep.

    Attributes:
        reasons: Why, by the tensor's name.
        escapes: How many elements are kept whole of the tensors beside them, which are made.
    """

    def __init__(self, reasons: dict[str, str], escapes: dict[str, int]) -> None:
        each = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(
            f"formats: expected values that can be packed, {len(reasons)} tensors have others "
            f"({each}). Leave these plain."
        )
        self.reasons, self.escapes = reasons, escapes


class RequestError(EngineError, ValueError):
    """One request cannot be served; other requests are not affected.

    Attributes:
        param: The argument, or the field of SamplingParams, that is at fault; None: no single one.
        code: A word for programs, CONTEXT_LENGTH or none.
    """

    CONTEXT_LENGTH = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class QueueFullError(RequestError):
    """As many requests are unfinished as may be; the same one may be served later."""


class FailedRequestError(RequestError):
    """A request failed while it ran, through no fault of its own."""


_ALSO_CALLED: Final = {
    "auto": ("automatic", "default"),
    "bfloat16": ("bf16", "torch.bfloat16"),
    "checkpoint": ("as_stored", "original", "plain", "raw", "safetensors"),
    "context": ("length",),
    "cpu": ("host", "ram", "swap"),
    "cuda": ("gpu", "nvidia"),
    "dummy": ("random",),
    "experts": ("moe",),
    "float16": ("f16", "fp16", "half", "torch.float16"),
    "float32": ("f32", "float", "fp32", "full", "torch.float32"),
    "gpu": ("cuda", "device", "vram"),
    "http": ("api", "openai", "remote"),
    "int4": ("4", "4bit", "4-bit", "nf4", "q4", "w4", "w4a16"),
    "int8": ("8", "8bit", "8-bit", "q8", "w8", "w8a16"),
    "native": ("engine", "own", "tightfit"),
    "accelerate": ("hf", "huggingface", "transformers"),
    "none": ("0", "disable", "disabled", "false", "no", "off"),
    "lossless": ("df11", "dfloat11"),
    "prefetch": ("copy", "stream", "streaming"),
    "uva": ("cpu", "uvm", "zero_copy"),
}
"""Choice -> other words for it that do not resemble it, in lower case."""


def closest(word: str, choices: Iterable[str]) -> list[str]:
    """Return the choice that a word means, or resembles most; an empty list if there is none."""
    lower = {choice.lower(): choice for choice in choices}
    if word.lower() not in lower:
        for name, words in _ALSO_CALLED.items():
            if name in lower and word.lower() in words:
                return [lower[name]]
    found = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return [lower[name] for name in found]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return " Did you mean X?" for the closest choice, or an empty string."""
    found = closest(word, choices)
    return f" Did you mean {found[0]}?" if found else ""
