"""ConsoleSettings: where the console listens, and who may ask."""

from dataclasses import dataclass

from engine.sealed import number
from server.settings import SECONDS, ListenSettings


@dataclass(kw_only=True)
class ConsoleSettings(ListenSettings):
    """Where the console listens, who may ask, and its bounds."""

    port: int = number(7999, low=0, high=65535, hint="0 takes a free one.")
    """Port to listen on; 0: a free one, which the log names."""
    max_body_mib: float = number(4.0, low=0, low_open=True, high=1024)
    """Largest body of a request, MiB; a chat is the largest."""
    access_log: bool = False
    """Write a line of JSON to stderr for each request."""
    stop_s: float = number(60.0, low=0, hint=SECONDS)
    """Seconds that servers have to end after SIGTERM; a second SIGTERM ends them at once."""
