"""Cases that take long: `make test-slow` runs them, `make test` those beside them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return one case for `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(cases: Iterable[Any], is_fast: Callable[[Any], bool]) -> list[Any]:
    """Return all cases, of one value each; those that are not fast are slow ones."""
    return [case if is_fast(case) else slow(case) for case in cases]
