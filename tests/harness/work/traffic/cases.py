"""ServeScenarios for the tests of traffic."""

from typing import Any

from harness.config.serve import Arrivals, Lengths, ServeScenario


def fixed(tokens: int) -> Lengths:
    return Lengths(tokens=tokens)


def serve(**changes: Any) -> ServeScenario:
    """Four requests of 8 + 4 tokens, one a second, unless changed."""
    fields: dict[str, Any] = {
        "num_requests": 4,
        "arrivals": Arrivals(process="constant", rate_per_s=1.0),
        "prompt": fixed(8),
        "output": fixed(4),
    }
    return ServeScenario(**(fields | changes))
