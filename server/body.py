"""Bodies of requests: bounded, JSON only, checked against their models."""

import asyncio
import json
import re
from codecs import BOM_UTF8
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from server.errors import APIError, bad_value, overloaded, shown
from server.settings import ListenSettings

MAX_OBJECTS: Final = 100_000
"""Braces in a body, and brackets: parsing so many takes some 100 ms, in which nobody else is
served."""
MAX_MEMBERS: Final = 300_000
"""Colons in a body, likewise."""
MAX_VALUES: Final = 2_000_000
"""Commas in a body, likewise."""
MAX_HELD: Final = 8
"""Bodies of the largest size that all open requests may hold together."""
_LARGE_EXPONENT: Final = re.compile(rb"\d[eE]\+?\d{3}")
_FORMS: Final = ("str", "int", "float", "bool", "dict", "list")
_MIB: Final = 2**20
Model = TypeVar("Model", bound=BaseModel)


class Bodies:
    """Reads the bodies of all requests within one bound."""

    def __init__(self, settings: ListenSettings) -> None:
        self._max_bytes = int(settings.max_body_mib * _MIB)
        self._timeout_s = settings.body_timeout_s
        self._held_bytes = 0
        """Of all open requests, also of bodies that are being read."""

    async def read(self, request: Request) -> bytes:
        """Return a request's body, which counts until the caller releases it.

        Raises:
            APIError: It is no JSON by its type, too large, too slow, or others hold too much.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise APIError(
                415,
                f"Content-Type: expected application/json, got {kind or 'none'}.",
                code="unsupported_media_type",
            )
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            raise APIError(
                415,
                f"Content-Encoding: expected none, got {shown(coding)}. Send the body as it is.",
                code="unsupported_media_type",
            )
        length = request.headers.get("content-length", "").lstrip("0")  # int() takes 4300 digits
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large(int(length))
        parts = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                async for part in request.stream():
                    self._hold(len(part))
                    parts += part
                    if len(parts) > self._max_bytes:
                        raise self._too_large(len(parts))
        except TimeoutError:
            self.release(len(parts))
            raise APIError(
                408,
                f"the body: expected all of it within {self._timeout_s:g} s, got {len(parts)} "
                "bytes.",
                code="body_timeout",
                headers={"Connection": "close"},
            ) from None
        except BaseException:
            self.release(len(parts))
            raise
        return bytes(parts)

    def _hold(self, num_bytes: int) -> None:
        if self._held_bytes + num_bytes > MAX_HELD * self._max_bytes:
            raise overloaded(
                "the bodies of open requests hold all the memory that there is for them. Try "
                "again later."
            )
        self._held_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Let go of a body that was read."""
        self._held_bytes -= num_bytes

    def _too_large(self, num_bytes: int) -> APIError:
        return APIError(
            413,
            f"the body: expected at most {self._max_bytes} bytes, got {num_bytes} or more. "
            "Send less, or raise --max-body-mib.",
            code="body_too_large",
        )


def parsed(body: bytes, model: type[Model]) -> Model:
    """Return a body as its model.

    Raises:
        APIError: It is no JSON object, or a value is of the wrong type or out of bounds.
    """
    is_large = body.count(b"{") > MAX_OBJECTS or body.count(b"[") > MAX_OBJECTS
    if is_large or body.count(b":") > MAX_MEMBERS or body.count(b",") > MAX_VALUES:
        raise bad_value(
            None,
            f"the body: expected at most {MAX_OBJECTS} objects, as many lists, {MAX_MEMBERS} "
            f"members of objects and {MAX_VALUES} values, got more.",
        )
    try:
        content: Any = from_json(body.removeprefix(BOM_UTF8), allow_inf_nan=False)
        if _LARGE_EXPONENT.search(body):
            json.dumps(content, allow_nan=False)
    except ValueError as error:
        raise APIError(
            400, f"the body: expected JSON with finite numbers ({error}).", code="invalid_json"
        ) from None
    if not isinstance(content, dict):
        raise APIError(
            400,
            f"the body: expected a JSON object, got {type(content).__name__}.",
            code="invalid_json",
        )
    try:
        return model.model_validate(content, strict=True)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> APIError:
    """Return the refusal of the first value that is wrong."""
    first, *others = error.errors(include_url=False, include_context=False)
    param = _param(first["loc"])
    if first["type"] == "missing":
        return APIError(
            400, f"{param}: expected a value, got none.", param=param, code="missing_value"
        )
    # Each form that a value may have says why it is none of it.
    same = [each for each in others if _param(each["loc"]) == param]
    words = dict.fromkeys(_words(str(each["msg"])) for each in [first, *same])
    text = ", or ".join(words).replace(", or expected ", ", or ")
    return bad_value(param, f"{param or 'the body'}: {text}, got {shown(first['input'])}.")


def _words(message: str) -> str:
    """Return what was expected, in this program's words."""
    message = message.removeprefix("Value error, ").replace("dictionary", "object")
    begin, is_there, rest = message.partition(" should ")
    if is_there and " " not in begin:  # Input, String, List
        words = rest.removeprefix("be ").removeprefix("have ").partition(" after validation")[0]
        return f"expected {words}"
    return message


def _param(place: tuple[int | str, ...]) -> str | None:
    """Return the field at a place, without the names of the forms that its value may have."""
    names: list[str] = []
    for part in place:
        if isinstance(part, str) and names and (part in _FORMS or not part.isidentifier()):
            break
        names.append(str(part))
    return ".".join(names) or None
