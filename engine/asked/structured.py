"""StructuredOutput: the form that an output must have."""

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from engine.errors import RequestError


@dataclass(kw_only=True, frozen=True, slots=True)
class StructuredOutput:
    """The form that an output must have: exactly one field is set.

    Construction checks nothing; `check`, SamplingParams and the engine say what is wrong.
    An output that `max_tokens` or a stop string cuts short is the beginning of one in that form.
    """

    json_schema: dict[str, Any] | str | None = None
    """JSON that a schema describes, given as an object or as JSON text. A keyword that cannot be
    enforced is refused."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that a regular expression (Rust's syntax, without look-around) matches as a whole."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text that a grammar produces, in the Lark dialect of llguidance, from the rule `start`."""

    @property
    def kinds(self) -> list[str]:
        """Names of the fields that are set."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return [name for name, value in values.items() if value is not None and value is not False]

    def copied(self) -> "StructuredOutput":
        """Return a copy that later changes of a schema do not reach: it has it as JSON text.

        Raises:
            RequestError: The schema cannot be written as JSON; `param` is structured.
        """
        if not isinstance(self.json_schema, dict):
            return self
        try:
            text = json.dumps(self.json_schema, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise refusal(
                f"json_schema: expected JSON, got an error: {type(error).__name__}: {error}"
            ) from error
        return replace(self, json_schema=text)

    def check(self) -> None:
        """Return if exactly one field is set, to a value of its type.

        Raises:
            RequestError: It is not so; `param` is structured.
        """
        kinds = self.kinds
        if len(kinds) != 1:
            names = ", ".join(each.name for each in fields(self))
            got = ", ".join(kinds) or "none"
            raise refusal(f"expected exactly one of {names}, got {got}. Set one.")
        [kind] = kinds
        value: Any = getattr(self, kind)
        if kind == "json_schema" and not isinstance(value, (dict, str)):
            raise refusal(f"json_schema: expected an object or JSON text, got {value!r}.")
        if kind == "json_object" and value is not True:
            raise refusal(f"json_object: expected True or False, got {value!r}.")
        if kind in {"regex", "grammar"} and not isinstance(value, str):
            raise refusal(f"{kind}: expected a string, got {value!r}.")
        if kind == "choice":
            is_list = isinstance(value, (list, tuple)) and len(value) > 0
            if not is_list or not all(isinstance(text, str) and text for text in value):
                raise refusal(f"choice: expected a list of texts, none empty, got {value!r}.")


def refusal(message: str) -> RequestError:
    """Return the error of a form that cannot be asked for."""
    return RequestError(f"structured: {message}", param="structured")
