"""Bodies against their models: what is wrong is told at a cost that does not grow with it."""

from typing import Any

import pytest
from pydantic import ValidationError

from server.body import parsed
from server.errors import APIError, shown
from server.schemas import CompletionRequest, DetokenizeRequest

MANY = 100_000


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [1.5] * MANY}),
        (CompletionRequest, {"prompt": ["a"] * MANY}),
        (CompletionRequest, {"prompt": [["a"]] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)))}),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}),
    ],
)
def test_a_million_wrong_values_cost_as_much_as_one(model: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body, strict=True)
    assert caught.value.error_count() < 10


def test_the_forms_of_a_value_are_told_in_one_sentence() -> None:
    with pytest.raises(APIError) as caught:
        parsed(b'{"prompt": [1, "a"]}', CompletionRequest)
    assert caught.value.message == (
        "prompt: expected a valid string, or a valid integer, or a valid list, got [1, 'a']."
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("short", "'short'"),
        ([1, {"a": None}], "[1, {'a': None}]"),
        ([], "[]"),
        ([[[[1]]]], "[[[...]]]"),
        ("x" * 10**6, "'" + "x" * 99 + "..."),
        ([0] * 10**6, "[" + "0, " * 32 + "..."),
        ([0] * 3, "[0, 0, 0]"),
        ({"k" * 10**6: 1}, "{'" + "k" * 98 + "..."),
    ],
)
def test_a_value_is_shown_by_its_beginning(value: Any, text: str) -> None:
    assert shown(value) == text
