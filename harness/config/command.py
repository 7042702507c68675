"""Overrides as they are typed: their keys, and the command that runs them, as a shell takes it."""

import shlex
from collections.abc import Sequence

from engine.asked.kv import KVConfig


def key_of(override: str) -> str:
    """Return the key or group that an override sets."""
    return override.partition("=")[0].lstrip("+")


def command_with(
    typed: Sequence[str], settings: Sequence[str], config_dir: str | None = None
) -> str:
    """Return the command that runs `settings`: what was typed, less what they replace."""
    keys = [key_of(text) for text in settings]
    gone = [f"{key}=" for key in keys]
    if any(key.split(".")[0] == "offload" for key in keys):
        gone += ["offload", "planner."]
    if "kv=gpu" in settings:
        gone += [f"kv.{name}=" for name in (*KVConfig.SIZES, "pin_limit_gib")]
    kept = [item for item in typed if not item.lstrip("+").startswith((*gone, "plan."))]
    return command_line([*kept, *settings], config_dir)


def command_line(overrides: Sequence[str], config_dir: str | None = None) -> str:
    """Return the command that runs these overrides, with the user's folder of configurations."""

    def quoted(item: str) -> str:
        if "'" in item and not {*item} & {*'"$`\\!'}:
            return f'"{item}"'
        return shlex.quote(item)

    kept = (quoted(item) for item in overrides if not item.startswith("mode="))
    folder = [] if config_dir is None else ["--config-dir", shlex.quote(config_dir)]
    return " ".join(["tightfit run", *folder, *kept])
