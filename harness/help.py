"""The text of `python -m harness --help`: what is in conf/ and in the user's folder."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from catalogue.files import CONF, tightfit_home

__all__ = ["GROUP_TITLES", "OPTIONS", "ROOT_KEYS", "help_text"]

_USAGE: Final = """\
usage: python -m harness [OPTION ...] [GROUP=FILE | KEY=VALUE ...]

Composes one configuration, builds the engine from it, runs the scenario in a process of its own
and records what was measured. -m runs every combination of several values, one after another.
model=x, +model=x and ++model=x are the same; of one key given twice, the later one holds.
"""
_WIDTH: Final = 100
_EXAMPLES: Final = """\
examples:
  python -m harness                                        the demo model, whatever hardware is here
  python -m harness +model=olmo7b offload=uva              a 7B model, 8 GiB of it in host memory
  python -m harness +model=olmo7b gpu=rtx4080_16gb offload=auto   the best placement is chosen
  python -m harness +model=olmo7b model.load_format=dummy  random weights, no download
  python -m harness -m offload=none,uva,prefetch gpu=rtx4080_16gb,rtx4090_24gb
  python -m harness +experiment=smoke                      a file that holds all choices
  python -m harness +model=olmo7b --cfg job                what a run would be asked, no run
  python -m harness --config-dir ~/mine +model=mine        your files beside those of conf/
"""
_CODES: Final = """\
exit codes:
  0 every point is ok    2 the configuration is wrong, nothing was loaded
  3 some point is not    130 interrupted
"""
OPTIONS: Final = {
    "-m, --multirun": "sweep: run every combination of the values given with commas",
    "--cfg job|hydra|all": "print the composed configuration and stop",
    "--package KEY": "with --cfg: print this part only, such as engine or scenario.latency",
    "--resolve": "with --cfg: print values in the place of ${...}",
    "--config-dir FOLDER": "look for files there too: FOLDER/model/mine.yaml is model=mine",
    "--version": "print the version",
    "-h, --help": "print this",
}
GROUP_TITLES: Final = {
    "model": "what runs (none chosen: the demo model smollm2_135m)",
    "system": "what answers the requests: this project's engine or a peer",
    "gpu": "on which card's memory; a budget that is enforced on the hardware that is here",
    "offload": "which weights live in host memory",
    "kv": "the KV cache; kv.cpu_gib, num_cpu_blocks or swap_space sizes its part in host memory",
    "scenario": "what is measured",
    "tracking": "where runs are mirrored to",
    "experiment": "files that hold all choices of one question",
}
ROOT_KEYS: Final = {
    "mode=run": "plan: print what fits, predicted times and what to choose; nothing runs",
    "rerun=null": "all | failed | none: which points run again that ended before, settings, code, "
    "card and versions being the same; null: failed in a sweep, all otherwise",
    "fail_fast=false": "true: stop a sweep at the first point that is not ok",
    "monotone_stop=true": "skip points of a sweep that ask for more room than one that had none",
    "timeout_s=null": "seconds that a point may take",
    "silence_s=1800.0": "seconds without a sign of work after which a point is stopped",
    "engine.*": "limits and switches of the engine; --cfg job --package engine lists them",
    "ab.*": "with scenario=ab: overrides of sides a and b, pairs, aa_pairs",
    "planner.*": "what is chosen by predicted times: objective, auto_fields, referee",
}


def _table(title: str, rows: dict[str, str]) -> Iterator[str]:
    yield f"{title}:"
    width = max(len(name) for name in rows) + 2
    for name, text in rows.items():
        lines = textwrap.wrap(text, _WIDTH - width - 2) or [""]
        yield f"  {name:<{width}}{lines[0]}".rstrip()
        yield from (" " * (width + 2) + line for line in lines[1:])
    yield ""


def _first_sentence(path: Path) -> str:
    """Return the first sentence of the comment at the top of a file."""
    words = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            words += line.removeprefix("#").split()
    text = " ".join(words).removeprefix("Question: ")
    sentence = re.match(r".+?[.?](?=\s|$)", text)
    return sentence[0] if sentence else text


def help_text(config_dir: Path | None = None) -> str:
    """Return the help.

    Args:
        config_dir: A folder of the user's.
    """
    lines = [_USAGE, *_table("options", OPTIONS)]
    folders = [CONF] if config_dir is None else [CONF, config_dir]
    for group, title in GROUP_TITLES.items():
        files = {
            path.stem: path
            for folder in reversed(folders)
            for path in sorted((folder / group).glob("*.yaml"))
        }
        rows = {name: _first_sentence(path) for name, path in sorted(files.items())}
        if rows:
            lines += _table(f"{group}=, {title}", rows)
    lines += _table("keys", ROOT_KEYS)
    lines += [
        "files:",
        f"  database, runs and models are in {tightfit_home()}",
        "  (TIGHTFIT_HOME sets it; default: tightfit in the user's data folder,",
        "  ~/.local/share/tightfit)",
        "",
        _EXAMPLES,
        _CODES.rstrip(),
    ]
    return "\n".join(lines) + "\n"
