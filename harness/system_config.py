"""SystemConfig: what answers the requests. Imports no torch."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from engine.errors import ConfigError
from engine.sealed import Sealed, check_choice, check_number

SYSTEMS: Final = ("native", "accelerate", "vllm", "http")
APIS: Final = ("completions", "chat")
PROMPT_FORMS: Final = ("token_ids", "text")


@dataclass(kw_only=True)
class SystemConfig(Sealed):
    """What answers the requests: this project's engine or a peer."""

    kind: str = "native"
    """native | accelerate | vllm | http."""
    base_url: str | None = None
    """Of http: the server, such as http://localhost:8000/v1."""
    served_model: str | None = None
    """Of http: the name that the server knows the model by; null: the first one that it lists."""
    api_key_env: str | None = None
    """Of http: the environment variable that holds the key; null: no key is sent."""
    api: str | None = None
    """Of http: completions (null) | chat: each prompt is the text of a user's turn, to which the
    server's template is added."""
    prompts: str | None = None
    """Of http: token_ids (null) | text; text is decoded here and encoded again by the server."""
    extensions: bool | None = None
    """Of http: send ignore_eos, return_token_ids and cache_salt (null: true), which some servers
    refuse."""
    request_timeout_s: float | None = None
    """Of http: longest wait for the next part of an answer (null: 300)."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds or belongs to another kind."""
        check_choice("system.kind", self.kind, SYSTEMS)
        if self.kind != "http":
            self._check_unset()
            return
        if not self.base_url or urlsplit(self.base_url).scheme not in {"http", "https"}:
            raise ConfigError(
                "system.base_url: expected the address of a server, such as "
                f"http://localhost:8000/v1, got {self.base_url!r}."
            )
        check_choice("system.api", self.api or APIS[0], APIS)
        if self.api == "chat" and self.prompts == "token_ids":
            raise ConfigError(
                "system.prompts: expected null or text with system.api=chat, got token_ids. A chat "
                "takes text; remove it."
            )
        check_choice("system.prompts", self.prompts or PROMPT_FORMS[0], PROMPT_FORMS)
        if self.request_timeout_s is not None:
            check_number("system.request_timeout_s", self.request_timeout_s, low=0, low_open=True)

    def _check_unset(self) -> None:
        names = (
            "base_url",
            "served_model",
            "api_key_env",
            "api",
            "prompts",
            "extensions",
            "request_timeout_s",
        )
        for name in names:
            value = getattr(self, name)
            if value is not None:
                raise ConfigError(
                    f"system.{name}: expected null for system.kind={self.kind}, got {value!r}. "
                    "Remove it, or choose system=http."
                )
