"""Bounds of what can be asked, and checks that settings share.

Schedules and prompts are built whole before anything is sent: what would not fit any memory, or
never end, is refused when it is asked.
"""

from typing import Final

from engine.errors import ConfigError
from engine.sealed import check_number
from harness.measure.statistics import LEAST_REPEATS

MOST_REQUESTS: Final = 10**6
"""Of one part, all repeats."""
MOST_PROMPT_TOKENS: Final = 250_000_000
"""Of one part, all repeats: some 4 GiB of ids."""
MOST_LENGTH: Final = 10**8
"""Tokens of one prompt or one answer."""
MOST_S: Final = 1e7
"""Seconds: 115 days."""
MOST_FACTOR: Final = 1e6
LEAST_RATE: Final = 1e-4
MOST_RATE: Final = 1e6
LEAST_BURSTINESS: Final = 1e-3
MOST_BURSTINESS: Final = 1e6


def check_counts(node: str, settings: object, least: dict[str, int], most: int) -> None:
    """Check whole numbers of `settings`, from `least` of each to `most`; None is left out.

    Raises:
        ConfigError: A value is out of bounds.
    """
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None:
            check_number(f"{node}.{name}", value, low=low, high=most, integer=True)


def check_positive(name: str, value: float | None, *, high: float) -> None:
    """Raise ConfigError unless `value` is None or a number above 0 and at most `high`."""
    if value is not None:
        check_number(name, value, low=0, high=high, low_open=True)


def check_repeats(node: str, repeats: int, stop_share: float | None) -> None:
    """Check how often a part is measured.

    Raises:
        ConfigError: A value is out of bounds, or would have no effect.
    """
    check_number(f"{node}.repeats", repeats, low=1, high=MOST_REQUESTS, integer=True)
    if stop_share is None:
        return
    name = f"{node}.stop_share"
    check_number(name, stop_share, low=0, high=1, low_open=True)
    if repeats <= LEAST_REPEATS:
        raise ConfigError(
            f"{name}: expected null with repeats={repeats}: a series does not end before "
            f"{LEAST_REPEATS}. Raise {node}.repeats or remove it."
        )


def check_size(node: str, num_requests: float, prompt_tokens: float, settings: str) -> None:
    """Check how much a part builds before it sends anything.

    Args:
        node: the part, such as scenario.serve.
        num_requests: in all.
        prompt_tokens: of all of them; 0 where a file decides.
        settings: what to lower.

    Raises:
        ConfigError: It is more than MOST_REQUESTS or MOST_PROMPT_TOKENS.
    """
    for what, asked, most in (
        ("requests", num_requests, MOST_REQUESTS),
        ("prompt tokens", prompt_tokens, MOST_PROMPT_TOKENS),
    ):
        if asked > most:
            raise ConfigError(
                f"{node}: expected at most {most:,} {what} in all, got {asked:,.0f}. They are "
                f"built before anything is sent; lower {settings}."
            )


def check_used(node: str, values: dict[str, object], needed: set[str], why: str) -> None:
    """Check that exactly the needed settings have a value.

    Raises:
        ConfigError: One is null that is needed, or has a value that would have no effect.
    """
    for name, value in values.items():
        if name in needed and value is None:
            raise ConfigError(f"{node}.{name}: expected a value for {why}, got null. Set it.")
        if name not in needed and value is not None:
            raise ConfigError(
                f"{node}.{name}: expected null for {why}, got {value!r}. It would have no effect; "
                "remove it."
            )
