"""The one error of this package."""


class ModelUnavailableError(RuntimeError):
    """A checkpoint is neither on this machine nor to be had; the message names the remedy."""


def unavailable(name: str, reason: str, remedy: str = "") -> ModelUnavailableError:
    """Build the error for model `name`: what is missing, why, and the ways out.

    Args:
        name: the model as the user wrote it (`model=NAME`).
        reason: what was expected and what was found, one sentence without a full stop.
        remedy: what helps in this case, before the two ways that always help.
    """
    ways = [remedy] if remedy else []
    ways.append("point model.path=FOLDER at a checkpoint folder that you have")
    ways.append("or use model.load_format=dummy (random weights of the exact shape)")
    return ModelUnavailableError(f"model {name}: {reason}. What helps: {', '.join(ways)}.")
