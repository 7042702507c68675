"""Errors as clients of OpenAI's API expect them: status, message, type, param and code."""

from itertools import islice
from typing import Any, Final

from engine.errors import RequestError
from server.wire import Refused

TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""Status -> the error's type; others are invalid_request_error."""
RETRY_AFTER_S: Final = 1
MAX_MESSAGE: Final = 1000
"""Characters of a message; what a client sent may be long."""
MAX_SHOWN: Final = 100
"""Characters of a value in a message."""
MAX_SHOWN_ITEMS: Final = 32
"""Items of each list and object in it."""
MAX_SHOWN_DEPTH: Final = 3


class APIError(Exception):
    """What a client gets instead of an answer, or at the end of a stream."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        if len(message) > MAX_MESSAGE:
            # What to do stands at the end.
            message = f"{message[: MAX_MESSAGE - 300]}...{message[-297:]}"
        self.status, self.message, self.code = status, message, code
        self.param = None if param is None else param[:MAX_SHOWN]
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def shown(value: Any) -> str:
    """Return a value for a message: its beginning where it is long, at a cost that is bounded."""
    text = _shown(value, MAX_SHOWN_DEPTH)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN].rstrip('.')}..."


def _shown(value: Any, depth: int) -> str:
    if isinstance(value, str):
        return repr(value[: MAX_SHOWN + 1])
    if not isinstance(value, (list, dict)):
        return repr(value)
    if depth == 0 and value:
        return "..."
    if isinstance(value, list):
        parts = [_shown(each, depth - 1) for each in islice(value, MAX_SHOWN_ITEMS)]
    else:
        items = islice(value.items(), MAX_SHOWN_ITEMS)
        parts = [f"{_shown(name, 0)}: {_shown(each, depth - 1)}" for name, each in items]
    parts += ["..."] if len(value) > MAX_SHOWN_ITEMS else []
    text = ", ".join(parts)
    return f"[{text}]" if isinstance(value, list) else f"{{{text}}}"


def bad_value(param: str | None, message: str) -> APIError:
    """Return the refusal of a parameter."""
    return APIError(400, message, param=param, code="invalid_value")


def about_form(error: RequestError, name: str) -> tuple[str, str | None]:
    """Return a refusal's message and parameter, which call the answer's form as the client does."""
    if error.param != "structured":
        return str(error), error.param
    return f"{name}: {str(error).removeprefix('structured: ')}", name


def unsupported(param: str, what: str) -> APIError:
    """Return the refusal of a published parameter that this server does not know how to follow."""
    return APIError(
        400, f"{param}: {what} is not supported yet. Remove it.", param=param, code="unsupported"
    )


def refused(message: Refused) -> APIError:
    """Return why the engine did not answer a request."""
    match message.status:
        case 503:
            return engine_gone(message.message)
        case 500:
            return APIError(500, message.message, code="request_failed")
        case status:
            code = message.code or "invalid_value"
            return APIError(status, message.message, param=message.param, code=code)


def overloaded(message: str) -> APIError:
    """Return the refusal of a request beyond the queue's bound."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return APIError(429, message, code="queue_full", headers=headers)


def engine_gone(reason: str | None) -> APIError:
    """Return what requests get when the engine has failed."""
    return APIError(503, f"{reason or 'the engine is gone'}.", code="engine_failed")


def not_ready(state: str) -> APIError:
    """Return what requests get before the engine is ready, and while it drains."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    why = {"draining": "the server is shutting down", "failed": "the engine has failed"}
    message = f"{why.get(state, 'the model is still loading')}. Try again later."
    return APIError(503, message, code=state, headers=headers)
