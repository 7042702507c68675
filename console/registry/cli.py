"""`tightfit models`: the models of the registry and of the catalogue, and what this machine has."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from catalogue.checkpoint import ModelUnavailableError, freed_bytes
from catalogue.entry import Model as Entry
from catalogue.files import kept_folder, tightfit_home
from catalogue.listing import catalogue_table, model_lines, size_rows, source_text
from catalogue.models import describe, entries, fetch, find, kept_copy, own_folder, remove, state
from catalogue.terminal import (
    EXIT_BAD_CONFIG,
    EXIT_NOT_ALL_OK,
    EXIT_OK,
    CommandParser,
    columns,
    say,
    say_error,
    screen_lines,
    show,
)
from console.registry.listing import read_models
from engine.errors import ConfigError, EngineError, did_you_mean
from engine.sealed import GIB
from server.flags import add_engine_flags, as_flags, engine_names

if TYPE_CHECKING:
    from console.registry.proposals import Proposal
    from console.registry.registry import Registry
    from console.registry.tables import Model, Performance, Profile

VERBS: Final = ("list", "show", "add", "set", "test", "fetch", "pack", "remove", "scan", "home")
_NAME: Final = "a name of `list`, or a hub's OWNER/NAME"
_ADDED: Final = "a name that a model was added with"
LAST: Final = 5
"""Tests that `show` prints."""
Command = Callable[[list[str]], int]


@dataclass(frozen=True)
class Answer:
    """What a verb found out."""

    lines: Sequence[str]
    plain: Any
    """The same for --json."""


def main(arguments: Sequence[str], elsewhere: Mapping[str, Command]) -> int:
    """Carry out `tightfit models`.

    Args:
        arguments: what stands behind it.
        elsewhere: what carries out the verbs pack and test.

    Returns:
        0; 3 when a model cannot be had, or is in use; 2 for a wrong name or setting.
    """
    verb, *rest = arguments or [""]
    if verb in elsewhere:
        return elsewhere[verb](rest)
    try:
        chosen = _parser(verb).parse_args(arguments)
        for answer in _CARRY_OUT[chosen.verb](chosen):
            show([json.dumps(answer.plain, indent=1)] if chosen.json else _wrapped(answer.lines))
    except ModelUnavailableError as error:
        return say_error(as_flags(str(error)), arguments, EXIT_NOT_ALL_OK)
    except ConfigError as error:
        code = EXIT_NOT_ALL_OK if getattr(error, "is_busy", False) else EXIT_BAD_CONFIG
        return say_error(error, arguments, code)
    except EngineError as error:
        return say_error(error, arguments, EXIT_NOT_ALL_OK)
    return EXIT_OK


def _wrapped(lines: Iterable[str]) -> list[str]:
    """Return lines as wide as the terminal; those of tables stay."""
    return [part for line in lines for part in screen_lines(line, sys.stdout)]


def _parser(asked: str) -> argparse.ArgumentParser:
    """Return what reads the arguments of a verb; the engine's flags are made for that alone."""
    parser = CommandParser(
        prog="tightfit models", description="Manage models: files, settings, results."
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    helps = (
        "list the models that were added, and those of the catalogue",
        "print a model's sizes, files, profiles and last results",
        "add a model; settings that you omit are proposed, with what they cost",
        "change settings of a model's profile, or make another profile",
        "measure a model with a profile, or two profiles in turns",
        f"download models into {tightfit_home()}",
        f"keep a model's weights in lossless codes in {kept_folder()}, for later loads",
        "remove models: their files, settings and results",
        "find models that vanished, changed, or are new on this disk",
        "print the folder of models, runs and database",
    )
    made = {
        verb: verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        for verb, text in zip(VERBS, helps, strict=True)
    }
    for verb in ("show", "add", "set"):
        what = {"show": f"{_NAME}, or a folder", "add": f"{_NAME}, or a folder"}.get(verb, _ADDED)
        made[verb].add_argument("name", metavar="NAME", help=what)
    for verb in ("fetch", "remove"):
        made[verb].add_argument("names", nargs="+", metavar="NAME", help=_NAME)
    for verb in ("list", "show", "fetch", "remove"):
        made[verb].add_argument(
            "--config-dir", type=Path, help="a folder of yours, whose model/ has files too"
        )
    for parser_of in made.values():
        parser_of.add_argument("--json", action="store_true", help="print one JSON document")
    for verb in ("show", "add", "set"):
        made[verb].add_argument(
            "--card", metavar="CARD", help="plan for this card of conf/gpu, or cpu (this machine's)"
        )
    add, change, gone = made["add"], made["set"], made["remove"]
    add.add_argument("--as", dest="as_name", metavar="NAME", help="what commands call it")
    add.add_argument("--revision", metavar="X", help="branch, tag or commit of a hub's repository")
    add.add_argument("--as-is", action="store_true", help="propose nothing")
    for each in (add, change):
        each.add_argument("--profile", metavar="NAME", help="of the settings (default)")
    if asked in {"add", "set"}:
        made[asked].usage = "%(prog)s NAME [--FLAG VALUE ...]"
        add_engine_flags(made[asked])
    change.add_argument("--unset", nargs="+", metavar="X", default=[], help="settings to remove")
    change.add_argument("--default", action="store_true", help="use it where none is named")
    change.add_argument("--propose", action="store_true", help="have open settings proposed")
    change.add_argument("--drop", action="store_true", help="remove the profile")
    gone.add_argument("--keep-files", action="store_true", help="leave its files where they are")
    gone.add_argument("--dry-run", action="store_true", help="say what would go")
    return parser


def _registry(*, is_needed: bool = False) -> "Registry | None":
    """Return the registry; None where nothing was added yet, and it need not be made."""
    if not is_needed and not (tightfit_home() / "registry.db").exists():
        return None
    from console.registry.registry import Registry  # noqa: PLC0415  brings SQLAlchemy

    return Registry.open()


def _opened() -> "Registry":
    registry = _registry(is_needed=True)
    assert registry is not None
    return registry


def _added(name: str) -> "tuple[Registry, Model] | None":
    """Return a model of the registry by its name; None: there is none of that name."""
    registry = _registry()
    row = None if registry is None else registry.models.find(name)
    return None if registry is None or row is None else (registry, row)


# What there is.


def _list(chosen: argparse.Namespace) -> Iterator[Answer]:
    rows = _rows()
    known = {row["source"] for row in rows}
    others = [entry for entry in entries(chosen.config_dir) if entry.name not in known]
    if not chosen.json:
        yield Answer([*_table(rows), *[""][: len(rows)], *catalogue_table(others)], None)
        return
    for row in rows:
        del row["spec"]  # `show` has it
    yield Answer([], {"models": rows, "catalogue": [_plain_entry(entry) for entry in others]})


def _rows() -> list[dict[str, Any]]:
    """Return the models that were added; none where there is no registry yet."""
    path = tightfit_home() / "registry.db"
    if not path.exists():
        return []
    if (rows := read_models(path)) is None:
        _opened().database.close()
        rows = read_models(path)
    assert rows is not None
    return rows


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each model that was added."""
    if not rows:
        return []
    head = ("added", "state", "GiB", "billion weights", "tok/s", "default profile", "source")
    found = [head]
    for row in rows:
        rate, count = row["output_tok_s"], row["num_parameters"]
        default = (_words(each["settings"]) for each in row["profiles"] if each["is_default"])
        found.append(
            (
                row["name"],
                row["state"],
                _gib(row["weights_bytes"]),
                "-" if count is None else f"{count / 1e9:.2f}",
                "-" if rate is None else f"{rate:.1f}",
                next(default, ""),
                row["source"],
            )
        )
    return columns(found, left={0, 1, 5, 6})


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def _words(settings: Mapping[str, Any]) -> str:
    """Return settings as they are typed."""
    return " ".join(f"{name}={_text(value)}" for name, value in settings.items()) or "-"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _plain(row: "Model") -> dict[str, Any]:
    return row.to_dict() | {"profiles": [profile.to_dict() for profile in row.profiles]}


def _plain_entry(entry: Entry) -> dict[str, Any]:
    found, spec = state(entry), entry.spec
    return {
        "name": entry.name,
        "source": source_text(entry),
        "here": found.kind,
        "path": None if found.path is None else str(found.path),
        "num_bytes": found.num_bytes,
        "num_parameters": None if spec is None else spec.num_parameters,
    }


def _show(chosen: argparse.Namespace) -> Iterator[Answer]:
    added = _added(chosen.name)
    if added is not None:
        yield _described(*added, chosen.card)
        return
    entry = find(chosen.name, chosen.config_dir)
    if chosen.card is not None:
        raise ConfigError(
            f"card: expected a model that was added, got {entry.name}. Add it first, or see "
            f"`tightfit plan +model={entry.name} gpu={chosen.card}`."
        )
    folder = describe(entry)
    plain = _plain_entry(entry) | {"spec": asdict(folder.spec), "notes": folder.notes}
    yield Answer(model_lines(entry, folder), plain)


def _described(registry: "Registry", row: "Model", card: str | None) -> Answer:
    """Return what is known of a model that was added."""
    from console.registry.checks import spec_of  # noqa: PLC0415  brings SQLAlchemy
    from console.registry.models import profile_of  # noqa: PLC0415

    runs = registry.results.runs(row.id, limit=LAST)
    measured = registry.results.latest(row.id).get(row.id, [])
    rows = [
        ("model", row.name),
        ("source", row.source if row.revision is None else f"{row.source} {row.revision}"),
        ("state", row.state if row.reason is None else f"{row.state}: {row.reason}"),
        ("folder", row.path or "-"),
        *size_rows(spec_of(row), row.weights_bytes or 0),
        *(_profile_row(profile) for profile in row.profiles),
        *_measured_rows(measured, row),
        *((f"test {run.id}", f"{run.kind}, {run.status}") for run in runs),
    ]
    plain = _plain(row) | {
        "tests": [run.to_dict() for run in runs],
        "performance": [each.to_dict() for each in measured],
        "comparisons": [
            each.to_dict() for each in registry.results.comparisons(row.id, limit=LAST)
        ],
    }
    lines = columns(rows, left={0, 1}, has_paths=True)
    if card is not None:
        proposal = registry.models.plan(row, profile_of(row).settings, card=card)
        lines, plain = [*lines, "", *proposal.lines], plain | {"plan": asdict(proposal)}
    return Answer(lines, plain)


def _profile_row(profile: "Profile") -> tuple[str, str]:
    mark = " (default)" if profile.is_default and profile.name != "default" else ""
    return f"profile {profile.name}{mark}", _words(profile.settings)


def _measured_rows(measured: "Sequence[Performance]", row: "Model") -> list[tuple[str, str]]:
    """Return what was measured last, a row for each profile and card."""
    from reports.record.metrics import found, metric_text  # noqa: PLC0415  when there is some

    profiles: dict[int | None, str] = {profile.id: profile.name for profile in row.profiles}
    metrics: dict[tuple[str, str], dict[str, Any]] = {}
    for each in measured:
        whose = profiles.get(each.profile_id, "a removed profile")
        metrics.setdefault((whose, each.card), {}).update(each.metrics)
    return [
        (
            f"measured, {profile}",
            ", ".join(
                [
                    card,
                    *(
                        f"{metric.label} {metric_text(metric.name, values[metric.name])}"
                        for metric in found("sweep", [values])
                    ),
                ]
            ),
        )
        for (profile, card), values in metrics.items()
    ]


def _home(_: argparse.Namespace) -> Iterator[Answer]:
    yield Answer([str(tightfit_home())], {"home": str(tightfit_home())})


# What changes the registry.


def _add(chosen: argparse.Namespace) -> Iterator[Answer]:
    models, profile = _opened().models, chosen.profile or "default"
    row = models.describe(chosen.name, name=chosen.as_name, revision=chosen.revision)
    asked = _settings(chosen)
    proposal = None if chosen.as_is else models.plan(row, asked, card=chosen.card)
    if chosen.as_is and chosen.card is not None:
        raise ConfigError("card: expected none beside --as-is, which plans nothing. Remove one.")
    row = models.store(row, asked if proposal is None else proposal.settings, profile=profile)
    is_here = row.state == "untested"
    where = f"in {row.path}" if is_here else f"not here yet: tightfit models fetch {row.name}"
    lines = [
        f"{row.name} is added ({_gib(row.weights_bytes)} GiB, {where}).",
        *([] if proposal is None else proposal.lines),
        *_profile_lines(row.profiles[0], proposal),
    ]
    yield Answer(lines, _plain(row) | {"plan": None if proposal is None else asdict(proposal)})


def _profile_lines(profile: "Profile", proposal: "Proposal | None") -> list[str]:
    """Return a profile's settings, and what they are predicted to cost."""
    lines = [f"Profile {profile.name}: {_words(profile.settings)}"]
    price = None if proposal is None else proposal.price
    if price is not None:
        lines.append(
            f"Predicted: {price['decode_tokens_s']:.1f} tok/s for one sequence, "
            f"{price['decode_tokens_full_s']:.0f} for {price['full_batch']} at once "
            f"({price['source']})"
        )
    return lines


def _settings(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's flags that were given."""
    given = vars(chosen)
    return {name: given[name] for name in engine_names() if given.get(name) is not None}


def _set(chosen: argparse.Namespace) -> Iterator[Answer]:
    from console.registry.models import profile_of  # noqa: PLC0415  brings SQLAlchemy

    models = _opened().models
    if chosen.drop:
        if chosen.profile is None:
            raise ConfigError("drop: expected --profile NAME beside it, got none.")
        models.remove_profile(chosen.name, chosen.profile)
        row = models.get(chosen.name)
        yield Answer([f"{row.name}: profile {chosen.profile} is removed"], _plain(row))
        return
    changes = {name.replace("-", "_"): None for name in chosen.unset} | _settings(chosen)
    if not changes and not chosen.default and not chosen.propose:
        raise ConfigError(
            "set: expected a setting, such as --cpu-offload-gb 4, or --unset, --default, "
            f"--propose or --drop, got none. `tightfit models show {chosen.name}` shows them."
        )
    known = engine_names()
    if unknown := [name for name in chosen.unset if name.replace("-", "_") not in known]:
        raise ConfigError(
            f"unset: expected the name of a setting, got {unknown[0]!r}."
            f"{did_you_mean(unknown[0], known)} `tightfit models show {chosen.name}` shows those "
            "that are set."
        )
    models.set_profile(chosen.name, chosen.profile, changes, make_default=chosen.default)
    row = models.get(chosen.name)
    profile = profile_of(row, chosen.profile)
    proposal = models.plan(row, profile.settings, card=chosen.card, explain=chosen.propose)
    if chosen.propose:
        gone = {name: None for name in profile.settings if name not in proposal.settings}
        models.set_profile(row.name, profile.name, {**gone, **proposal.settings})
        row = models.get(chosen.name)
        profile = profile_of(row, chosen.profile)
    lines = [*_profile_lines(profile, None), *proposal.lines]
    yield Answer(lines, _plain(row) | {"plan": asdict(proposal)})


def _fetch(chosen: argparse.Namespace) -> Iterator[Answer]:
    for name in chosen.names:
        added = _added(name)
        if added is None:
            entry = find(name, chosen.config_dir)
            folder = fetch(entry, report=say)
            where = folder or "random weights, nothing to fetch"
            yield Answer(
                [f"{entry.name}: {where}"], {"name": entry.name, "path": folder and str(folder)}
            )
        else:
            row = added[0].holdings.fetch(name, report=say)
            yield Answer([f"{row.name}: {row.path}"], {"name": row.name, "path": row.path})


def _remove(chosen: argparse.Namespace) -> Iterator[Answer]:
    for name in chosen.names:
        added = _added(name)
        yield (
            _removed_entry(find(name, chosen.config_dir), chosen)
            if added is None
            else _removed(added[0], name, chosen)
        )


def _removed_entry(entry: Entry, chosen: argparse.Namespace) -> Answer:
    """Remove the files of a model that was not added."""
    if chosen.keep_files:
        raise ConfigError(f"keep_files: expected a model that was added, got {entry.name}.")
    folder, copy = own_folder(entry), kept_copy(entry)
    num_bytes = sum(freed_bytes(each) for each in (folder, copy) if each is not None)
    size = num_bytes if chosen.dry_run else remove(entry)
    done = "would be removed" if chosen.dry_run else "removed"
    return Answer(
        [f"{entry.name}: {size / GIB:.2f} GiB {done}"],
        {
            "name": entry.name,
            "folder": str(folder),
            "copy": None if copy is None else str(copy),
            "num_bytes": size,
        },
    )


def _removed(registry: "Registry", name: str, chosen: argparse.Namespace) -> Answer:
    act = registry.holdings.removal if chosen.dry_run else registry.holdings.remove
    found = act(name, keep_files=chosen.keep_files)
    done = "would be removed" if chosen.dry_run else "removed"
    sizes = ((found.folder, found.num_bytes - found.copy_bytes), (found.copy, found.copy_bytes))
    parts = [f"{size / GIB:.2f} GiB in {folder}" for folder, size in sizes if folder is not None]
    files = " and ".join(parts) or "no files"
    lines = [
        f"{found.name}: {files} {done}, with {_count(len(found.profiles), 'profile')}, "
        f"{_count(found.num_tests, 'test')} and {_count(found.num_measurements, 'measurement')}"
    ]
    folders = {"folder": found.folder, "copy": found.copy}
    plain = {name: None if path is None else str(path) for name, path in folders.items()}
    return Answer(lines, asdict(found) | plain)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _scan(_: argparse.Namespace) -> Iterator[Answer]:
    found = asdict(_opened().holdings.scan())
    refused = found.pop("refused")
    lines = [f"{what}: {', '.join(models)}" for what, models in found.items() if models]
    lines += [f"not added: {source}: {reason}" for source, reason in refused.items()]
    yield Answer(lines or ["nothing changed"], found | {"refused": refused})


_CARRY_OUT: Final[Mapping[str, Callable[[argparse.Namespace], Iterator[Answer]]]] = {
    "list": _list,
    "show": _show,
    "add": _add,
    "set": _set,
    "fetch": _fetch,
    "remove": _remove,
    "scan": _scan,
    "home": _home,
}
