"""ServerSettings: what is asked of the server beside the engine's settings; imports no torch."""

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from engine.errors import ConfigError
from engine.sealed import Sealed, choice, number

API_KEY_VARIABLE: Final = "TIGHTFIT_API_KEY"
PARSERS: Final = ("auto", "hermes", "llama3_json", "none")
SECONDS: Final = "It is a time in seconds."
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")


@dataclass(kw_only=True)
class ListenSettings(Sealed):
    """Where a process listens, who may ask, and its bounds: of the server and of the console."""

    section: ClassVar = "server"
    host: str = "127.0.0.1"
    """Address to listen on. Any other than a loopback address needs a key."""
    port: int = number(8000, low=0, high=65535, hint="0 takes a free one.")
    """Port to listen on; 0: a free one, which the log names."""
    api_key: list[str] = field(default_factory=list, repr=False)
    """Keys of clients. Other users of the machine see them in the list of processes: prefer
    api_key_file or the variable TIGHTFIT_API_KEY."""
    api_key_file: str | None = None
    """File with one key a line."""
    max_body_mib: float = number(32.0, low=0, low_open=True, high=1024)
    """Largest body of a request, MiB."""
    header_timeout_s: float = number(10.0, low=0, low_open=True, hint=SECONDS)
    """Seconds until a request's headers must have arrived."""
    body_timeout_s: float = number(60.0, low=0, low_open=True, hint=SECONDS)
    """Seconds until a request's body must have arrived."""
    idle_timeout_s: float = number(60.0, low=0, low_open=True, hint=SECONDS)
    """Seconds that a connection without a request stays open."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Host names that requests may name, in addition to this machine's own. Empty: only these if
    the server listens on a loopback address, any name if it listens elsewhere with a key."""
    cors_origins: list[str] = field(default_factory=list)
    """Origins of web pages that may ask, such as http://localhost:3000; empty: none."""
    access_log: bool = True
    """Write a line of JSON to stderr for each request."""

    def check(self) -> None:
        """Raise ConfigError when a value is unusable or would have no effect."""
        for name in ("api_key", "allowed_hosts", "cors_origins"):
            _check_texts(f"{self.section}.{name}", getattr(self, name))

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def keys(self) -> list[str]:
        """Return the keys of all three sources.

        Raises:
            ConfigError: The file is unusable, or a key is needed and there is none.
        """
        found = list(self.api_key)
        if self.api_key_file is not None:
            found += _keys_of(Path(self.api_key_file))
        if variable := os.environ.get(API_KEY_VARIABLE, "").strip():
            found.append(variable)
        if not found and not self.is_loopback:
            raise ConfigError(
                f"host: expected this machine's own address (127.0.0.1) without a key, got "
                f"{self.host}: anybody who reaches it could use it. Add --api-key-file "
                f"FILE or set {API_KEY_VARIABLE}, or remove --host."
            )
        return found


@dataclass(kw_only=True)
class ServerSettings(ListenSettings):
    """What is asked of the server beside the engine's settings."""

    served_model_name: list[str] = field(default_factory=list)
    """Names of the model for clients, the first in answers; empty: the name as it was asked for."""
    chat_template: str | None = None
    """File with a Jinja template of chats; null: the checkpoint's."""
    tool_call_parser: str = choice(PARSERS, "auto")
    """hermes (Qwen) | llama3_json | none | auto (by the chat template)."""
    generation_config: str = choice(("auto", "vllm"), "auto")
    """auto (sampling parameters that a request leaves out are those of the checkpoint's
    generation_config.json) | vllm (they are the API's own defaults)."""
    max_num_queued_reqs: int = number(256, low=1)
    """Answers that may wait beside those that run; one more is refused with status 429."""
    write_timeout_s: float = number(60.0, low=0, low_open=True, hint=SECONDS)
    """Seconds for which a client may take nothing of its answer before its request is dropped."""
    drain_s: float = number(30.0, low=0, hint=SECONDS)
    """Seconds that requests may go on after SIGTERM; a second SIGTERM ends them at once."""
    log_prompts: bool = False
    """Put prompts and answers into these lines."""

    def check(self) -> None:
        """Raise ConfigError when a value is unusable or would have no effect."""
        super().check()
        _check_texts("server.served_model_name", self.served_model_name)
        if self.log_prompts and not self.access_log:
            raise ConfigError(
                "server.log_prompts: expected access_log beside it, whose lines hold the prompts, "
                "got access_log=false. Remove one of the two."
            )


def _check_texts(name: str, values: object) -> None:
    if not isinstance(values, (list, tuple)) or not all(
        isinstance(value, str) and value.strip() for value in values
    ):
        raise ConfigError(f"{name}: expected texts of at least one character, got {values!r}.")


def _keys_of(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"api_key_file: expected a file of keys, got {file} ({error})."
        ) from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"api_key_file: expected one key a line, got none in {file}.")
    return found
