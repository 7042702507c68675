"""Errors of the engine: what was wrong, what was expected, what was got, what to change."""


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


class PinningError(CapacityError):
    """Host memory could not be registered with the device."""


class CheckpointError(EngineError):
    """A checkpoint is absent, incomplete, or does not match the model's sizes."""


class RequestError(EngineError, ValueError):
    """One request cannot be served; other requests are not affected."""
