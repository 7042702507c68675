"""Conversations: their form, and what messages say as text."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Final

from engine.errors import RequestError

Messages = SequenceOf[Mapping[str, Any]]
"""A conversation: dicts with `role` (system, user, assistant, ...) and `content`."""


def is_conversation(messages: object) -> bool:
    """Return whether this is one conversation, and not a list of them."""
    if isinstance(messages, list | tuple):
        return not messages or isinstance(messages[0], Mapping)
    return True


def content_text(content: object, param: str) -> str:
    """Return what a message says as one text, as templates take it; texts of parts are lines.

    Raises:
        RequestError: A part is no text; `param` and its place name it.
    """
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content if isinstance(content, list | tuple) else [content]):
        kind, text = (part.get(name) if isinstance(part, Mapping) else None for name in _PART)
        if kind != "text" or not isinstance(text, str):
            found = repr(kind[:40]) if isinstance(kind, str) else type(part).__name__
            raise RequestError(
                f"{param}.{place}: expected a part with type text and a text (this model takes no "
                f"other), got {found}.",
                param=f"{param}.{place}",
            )
        texts.append(text)
    return "\n".join(texts)


_PART: Final = ("type", "text")


def plain_messages(messages: object) -> list[Mapping[str, Any]]:
    """Return messages with contents as text.

    Raises:
        RequestError: They are of another form.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(
            f"messages: expected a list of dicts with role and content, got {messages!r}.",
            param="messages",
        )
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages: expected dicts with role and content, got {message!r}. Write "
                "{'role': 'user', 'content': '...'}.",
                param="messages",
            )
    return [
        message
        if message.get("content") is None
        else {**message, "content": content_text(message["content"], f"messages.{place}.content")}
        for place, message in enumerate(messages)
    ]
