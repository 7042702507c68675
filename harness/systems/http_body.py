"""What is sent to an OpenAI-compatible server for a request: completions, or a chat of one turn."""

from typing import Any

from engine.errors import RequestError
from engine.request import Request
from harness.system_config import SystemConfig


class Bodies:
    """Bodies of requests to one server.

    Args:
        system: what the server takes.
        model: the name that it knows the model by.
        tokenizer: decodes prompts where text is sent; None: there is none.
    """

    def __init__(self, system: SystemConfig, model: str, tokenizer: Any) -> None:
        self._system, self._model, self._tokenizer = system, model, tokenizer

    @property
    def path(self) -> str:
        """Where they are posted to, below the base address."""
        return "/chat/completions" if self._system.api == "chat" else "/completions"

    def of(self, request: Request) -> dict[str, Any]:
        """Return the body of one request.

        Raises:
            RequestError: text is sent and there is no tokenizer.
        """
        body: dict[str, Any] = {
            "model": self._model,
            **self._prompt(request.prompt_token_ids),
            "max_tokens": request.params.max_tokens,
            "temperature": request.params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._system.extensions is not False:
            body |= {"ignore_eos": request.params.ignore_eos, "return_token_ids": True}
            if request.params.cache_salt is not None:
                body["cache_salt"] = request.params.cache_salt
        return body

    def _prompt(self, ids: list[int]) -> dict[str, Any]:
        if self._system.api == "chat":
            return {"messages": [{"role": "user", "content": self._text(ids)}]}
        return {"prompt": self._text(ids) if self._system.prompts == "text" else ids}

    def _text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            raise RequestError(
                "system: expected a tokenizer in the model's folder for prompts as text, found "
                "none. Set system.api=completions and system.prompts=token_ids."
            )
        return str(self._tokenizer.decode(ids))
