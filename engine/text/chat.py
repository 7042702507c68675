"""Conversations as prompts, by the chat template of a checkpoint."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from engine.errors import RequestError

Messages = SequenceOf[Mapping[str, Any]]
"""A conversation: dicts with `role` (system, user, assistant, ...) and `content`."""


def is_conversation(messages: object) -> bool:
    """Return whether this is one conversation, and not a list of them."""
    if isinstance(messages, list | tuple):
        return not messages or isinstance(messages[0], Mapping)
    return True


def chat_tokens(tokenizer: Any | None, messages: Messages, /, **template: Any) -> list[int]:
    """Return the tokens of a conversation; arguments and errors are those of `chat_text`."""
    text = chat_text(tokenizer, messages, **template)
    assert tokenizer is not None
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def chat_text(tokenizer: Any | None, messages: Messages, /, **template: Any) -> str:
    """Return a conversation as the text that the model goes on with, special tokens included.

    Args:
        tokenizer: A tokenizer of transformers; None: the model has none.
        messages: One conversation.
        **template: For apply_chat_template.

    Raises:
        RequestError: There is no tokenizer or template, or it refuses the messages.
    """
    if tokenizer is None:
        raise RequestError(
            "messages: expected a model with a tokenizer, this one has none. Use generate with "
            "token ids.",
            param="messages",
        )
    _check(messages)
    given = {"add_generation_prompt": True, **template}
    if not given.get("chat_template") and not tokenizer.chat_template:
        raise RequestError(
            "messages: expected a model with a chat template, this one has none: it was not "
            "trained on conversations. Use generate, or give chat_template.",
            param="messages",
        )
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **given))
    except Exception as error:  # a template raises what it likes
        reason = " ".join(str(error).split())[:300]
        raise RequestError(
            f"messages: the chat template refuses them ({type(error).__name__}: {reason}). Change "
            "the messages, or give another chat_template.",
            param="messages",
        ) from error


def _check(messages: object) -> None:
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
