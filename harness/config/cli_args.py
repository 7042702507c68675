"""The command line of `python -m harness`, and its help."""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Final, NoReturn

from catalogue.files import CONF, tightfit_home
from engine.asked.keywords import NOT_SUPPORTED, keywords_of
from engine.errors import ConfigError, closest, did_you_mean
from engine.lines import WIDTH, by_words, wrapped
from engine.sealed import Setting, describe_type, settings, yaml_text
from harness.config.schema import GROUPS, RunConfig

CFG_CHOICES = ("job", "hydra", "all")


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What the user typed: overrides, and the options that OPTIONS explains."""

    overrides: list[str] = field(default_factory=list)
    """key=value, group=option, with + or ++ before them, in the order given."""
    multirun: bool = False
    help: bool = False
    """The page of all, or, with names of keys among the overrides, what these mean."""
    version: bool = False
    settings: bool = False
    choosing: bool = False
    json: bool = False
    cfg: str | None = None
    resolve: bool = False
    package: str | None = None
    config_dir: Path | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            option = message.removeprefix(prefix).split()[0]
            known = {name.strip("-"): name for name in self._option_string_actions}
            meant = closest(option.strip("-"), known)
            name = option.strip("-").replace("-", "_").partition("=")[0]
            why = NOT_SUPPORTED.get(name, ((), ""))[1]
            hint = f"There is no such setting: {why}" if why else _setting_like(option)
            if meant:
                hint = f"Did you mean {known[meant[0]]}?"
            message = f"unknown option {option}. {hint}"
        end = "" if message.endswith((".", "?")) else "."
        raise ConfigError(f"command line: {message}{end} See `tightfit run --help`.")


def _setting_like(option: str) -> str:
    """Say which setting an option means, such as --cpu-offload-gb of other engines."""
    name, _, value = option.strip("-").replace("-", "_").partition("=")
    paths = (found.path for found in settings(RunConfig) if found.path.endswith(f".{name}"))
    path = next(paths, None)
    if path is None and name not in GROUPS:
        return "Settings are KEY=VALUE, such as model=glass."
    return f"A setting: {path or name}={value or 'VALUE'}."


def _build_parser() -> _Parser:
    parser = _Parser(prog="python -m harness", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--settings", action="store_true")
    parser.add_argument("--choosing", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=CFG_CHOICES)
    parser.add_argument("-p", "--package")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    return parser


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Split the arguments after `python -m harness`, or refuse them; options may stand anywhere."""
    typed = CommandLine(**vars(_build_parser().parse_intermixed_args(list(argv))))
    if typed.help:
        return typed
    if typed.cfg is None:
        for name in ("resolve", "package"):
            if getattr(typed, name):
                raise ConfigError(
                    f"command line: --{name} has an effect only with --cfg. Add --cfg job, or "
                    "remove it."
                )
    if typed.config_dir is not None and not typed.config_dir.is_dir():
        raise ConfigError(
            f"command line: expected a folder for --config-dir, found none at {typed.config_dir}."
        )
    return typed


_USAGE: Final = """\
usage: tightfit run [OPTION ...] [GROUP=FILE | KEY=VALUE ...]

Composes one configuration, builds the engine from it, runs the scenario in a
process of its own and records what was measured. `tightfit plan` is mode=plan,
`ab` is scenario=ab, and `sweep` is -m; their settings and options are the same.
model=x, +model=x and ++model=x are the same; of one key given twice, the later
one holds.
"""
COMMANDS: Final = {
    "plan": (
        "Says what fits and how fast it will be, without a run or a download. The card need not be "
        "in this machine.",
        ("plan", "planner"),
        (
            ("+model=olmo7b gpu=rtx4080_16gb", "what fits on that card, and the best fix"),
            ("+model=olmo7b gpu.memory_gib=16 plan.verbose=true", "with all details"),
            ("-m +model=olmo7b gpu=rtx4080_16gb engine.max_model_len=2048,8192", "several plans"),
        ),
    ),
    "sweep": (
        "Runs every combination of the values given with commas, one after another. The same "
        "command resumes a sweep that was stopped: points that are ok are reused.",
        ("rerun", "fail_fast", "monotone_stop", "timeout_s", "silence_s"),
        (
            ("offload=none,uva,prefetch gpu=rtx4080_16gb,rtx4090_24gb", "6 points"),
            ("+model=olmo7b 'offload.uva.cpu_offload_gb=range(4,12,2)'", "4 points"),
        ),
    ),
    "ab": (
        "Runs two settings, a and b, in turns, and says by how much they differ, with intervals.",
        ("ab",),
        (("+model=olmo7b 'ab.a=[offload=uva]' 'ab.b=[offload=prefetch]'", "two backends"),),
    ),
}
"""Command -> what it does, keys of its own, and settings of examples with what they are for."""
_EXAMPLES: Final = {
    "run": "the demo model, whatever hardware is here",
    "plan +model=olmo7b gpu=rtx4080_16gb": "what fits and how fast it will be, no run",
    "run +model=olmo7b offload=uva": "a 7B model, 8 GiB of it in host memory",
    "run +model=olmo7b gpu=rtx4080_16gb offload=auto": "the best placement is chosen",
    "run +model=olmo7b model.load_format=dummy": "random weights, no download",
    "sweep offload=none,uva,prefetch gpu=rtx4080_16gb,rtx4090_24gb": "6 points",
    "ab +model=olmo7b 'ab.a=[offload=uva]' 'ab.b=[offload=prefetch]'": "two settings in turns",
    "run +experiment=smoke": "a file that holds all choices",
    "run +model=olmo7b --cfg job": "what a run would be asked, no run",
    "run --config-dir ~/mine +model=mine": "your files beside those of conf/",
}
"""Words behind `tightfit` -> what they are for."""
_SETTINGS_TITLE: Final = """\
# Settings

Every key of a configuration, as `python -m harness --settings` prints it. The engine's keys are
keywords of `tightfit.LLM` too, under the names in the fourth column."""
_SETTINGS_HEAD: Final = ("| key | default | type | keyword | meaning |", "|---|---|---|---|---|")
_CODES: Final = """\
exit codes:
  0 every point is ok    2 the configuration is wrong, nothing was loaded
  3 at least one is not  130 interrupted
"""
OPTIONS: Final = {
    "-m, --multirun": "sweep: run every combination of the values given with commas",
    "--cfg job|hydra|all": "print the composed configuration and stop",
    "--package KEY": "with --cfg: print this part only, such as engine or scenario.latency",
    "--resolve": "with --cfg: print values in the place of ${...}",
    "--config-dir FOLDER": "look for files there too: FOLDER/model/mine.yaml is model=mine",
    "--json": "print one JSON document on stdout, all else on stderr",
    "--settings": "print every key with its default, type and meaning (docs/settings.md)",
    "--choosing": "print what every model needs on cards of usual sizes (docs/choosing.md)",
    "--version": "print the version",
    "-h, --help [KEY ...]": "print this, or what keys mean, such as engine.max_num_seqs or gpu",
}


def key_rows() -> dict[str, str]:
    """Return the keys that no file chooses, with their defaults and meanings, as the schema says.

    A node that has no group of files is one row, with its keys.
    """
    rows = {}
    for found in settings(RunConfig):
        if "." in found.path or found.path in GROUPS:
            continue
        if found.node is None:
            rows[f"{found.path}={yaml_text(found.default)}"] = found.help
        else:
            keys = ", ".join(item.name for item in fields(found.node))
            rows[f"{found.path}.*"] = f"{found.help} Keys: {keys}."
    return rows


def settings_page() -> str:
    """Return docs/settings.md: every key of a configuration, with default, type and meaning."""
    keywords = {found.path: name for name, found in keywords_of().items()}
    tables: dict[str, list[str]] = {}
    for found in settings(RunConfig):
        if found.node is not None:
            continue
        node, _, name = found.path.rpartition(".")
        default = "" if found.default is MISSING else f"`{yaml_text(found.default)}`"
        keyword = f"`{keywords[found.path]}`" if found.path in keywords else ""
        words = found.help.replace("|", "\\|")
        cells = (f"`{name}`", default, describe_type(found.hint), keyword, words)
        tables.setdefault(node, []).append(f"| {' | '.join(cells)} |")
    lines = [_SETTINGS_TITLE]
    for node, rows in tables.items():
        lines += ["", f"## `{node}`" if node else "## The root", "", *_SETTINGS_HEAD, *rows]
    return "\n".join(lines) + "\n"


def _table(title: str, rows: dict[str, str]) -> Iterator[str]:
    yield from wrapped(f"{title}:", indent="  ")
    width = max(len(name) for name in rows) + 2
    for name, text in rows.items():
        lines = by_words(text, WIDTH - width - 2)
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
    """Return the help; the files of a user's folder are listed too."""
    lines = [_USAGE, *_table("options", OPTIONS)]
    for group in GROUPS:
        lines += _files(group, config_dir)
    lines += _table("keys (--settings lists all of them)", key_rows())
    lines += [
        "files:",
        f"  database, runs and models are in {tightfit_home()}",
        "  (TIGHTFIT_HOME sets it; default: tightfit in the user's data folder,",
        "  ~/.local/share/tightfit)",
        "",
        *_examples(_EXAMPLES.items()),
        "",
        _CODES.rstrip(),
    ]
    return "\n".join(lines) + "\n"


def command_text(name: str) -> str:
    """Return the help of a command of COMMANDS; the rest is that of `run`."""
    words, keys, examples = COMMANDS[name]
    lines = [f"usage: tightfit {name} [OPTION ...] [GROUP=FILE | KEY=VALUE ...]", ""]
    lines += [*wrapped(words), ""]
    lines.append(keys_text(keys))
    lines += _examples((f"{name} {settings_of}", purpose) for settings_of, purpose in examples)
    lines += ["", "`tightfit help run` lists options, files and all keys.", "", _CODES.rstrip()]
    return "\n".join(lines) + "\n"


def _examples(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield "examples:"
    for words, purpose in found:
        yield f"  tightfit {words}"
        yield f"      {purpose}"


def _files(group: str, config_dir: Path | None) -> Iterator[str]:
    """Yield the table of a group's files, nothing where it has none."""
    folders = [CONF] if config_dir is None else [config_dir, CONF]
    files = {path.stem: path for folder in folders for path in (folder / group).glob("*.yaml")}
    rows = {name: _first_sentence(path) for name, path in sorted(files.items())}
    if rows:
        yield from _table(f"{group}=, {GROUPS[group]}", rows)


def keys_text(names: Sequence[str], config_dir: Path | None = None) -> str:
    """Return what keys mean: a key, the last part of one, a keyword of LLM, a node or a group.

    Raises:
        ConfigError: There is no such key.
    """
    keywords = {found.path: name for name, found in keywords_of().items()}
    known = {found.path: found for found in settings(RunConfig)}
    lines: list[str] = []
    for name in names:
        meant = (
            [name]
            if name in known
            else [path for path in known if path.endswith(f".{name}") or name == keywords.get(path)]
        )
        if not meant and name not in GROUPS:
            words = {word for path in known for word in (path, path.rpartition(".")[2])}
            raise ConfigError(
                f"--help: expected the name of a key, got {name!r}."
                f"{did_you_mean(name, sorted(words))} `tightfit run --settings` lists all keys."
            )
        if name in GROUPS:
            lines += _files(name, config_dir)
        for path in meant:
            lines += _key_lines(known, path, keywords.get(path))
    return "\n".join(lines).rstrip() + "\n"


def _key_lines(known: Mapping[str, Setting], path: str, keyword: str | None) -> Iterator[str]:
    found = known[path]
    if found.node is not None:
        below = [item for item in known.values() if item.path.startswith(f"{path}.")]
        rows = {_assigned(item): item.help for item in below if item.node is None}
        yield from _table(path, rows)
        return
    rows = {"type": describe_type(found.hint), "meaning": found.help}
    if keyword is not None:
        rows["keyword"] = f"{keyword}, of tightfit.LLM"
    yield from _table(_assigned(found), rows)


def _assigned(found: Setting) -> str:
    """Return a key with its default, alone where a value must be given."""
    is_open = found.default is MISSING
    return found.path if is_open else f"{found.path}={yaml_text(found.default)}"
