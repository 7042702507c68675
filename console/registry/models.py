"""Models: adds models to the registry, lists them, keeps their settings, and removes them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session, selectinload

from catalogue.checkpoint import missing_files
from catalogue.entry import Model as Entry
from catalogue.entry import ModelSource
from catalogue.files import expanded
from catalogue.models import State, describe, find, named, state
from console.registry.checks import (
    MOST_CHARACTERS,
    FieldError,
    check_name,
    check_settings,
    check_source,
    shown,
    spec_of,
)
from console.registry.database import Database
from console.registry.results import Results
from console.registry.tables import Model, Profile
from engine.errors import CheckpointError, ConfigError, did_you_mean
from engine.model.checkpoint import find_tensors
from engine.model.formats import EMBEDDING, FORMATS, HEAD, TensorFormats
from engine.model.gguf import is_gguf
from engine.model.quant_config import SUPPORTED
from engine.model.spec import ModelSpec

if TYPE_CHECKING:
    from console.registry.proposals import Proposal

DEFAULT: Final = "default"
"""The name of a model's first profile."""
FILES: Final = f"config.json and safetensors in {', '.join(FORMATS)}, or quantised as {SUPPORTED}"
"""What a folder must have."""


class Models:
    """The models of a registry; each call is a transaction of its own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(self) -> Sequence[Model]:
        """Return all models in order of their names, with their profiles."""
        with self._database.read() as session:
            chosen = select(Model).options(selectinload(Model.profiles)).order_by(Model.name)
            return session.scalars(chosen).all()

    def get(self, model: str | int) -> Model:
        """Return a model by its name or id, with its profiles.

        Raises:
            FieldError: there is none.
        """
        with self._database.read() as session:
            return read_row(session, model)

    def find(self, name: str) -> Model | None:
        """Return a model by its name, with its profiles; None: there is none."""
        with self._database.read() as session:
            return _find(session, name)

    def add(
        self,
        source: str,
        *,
        name: str | None = None,
        revision: str | None = None,
        profile: str = DEFAULT,
        settings: Mapping[str, Any] | None = None,
        card: str | None = None,
    ) -> Model:
        """Add a model with its first profile, whose open settings are proposed (see `plan`).

        Args:
            source: see `describe`.
            name: see `describe`.
            revision: see `describe`.
            profile: name of the first profile, which is the default.
            settings: by flags of `tightfit serve` with underscores.
            card: that the settings are for; see `plan`.

        Raises:
            FieldError: a field is refused, or the name or the model is in the registry already.
            ModelUnavailableError: the hub's config.json is not to be had.
        """
        check_name("profile", profile)
        row = self.describe(source, name=name, revision=revision)
        return self.store(row, self.plan(row, settings, card=card).settings, profile=profile)

    def describe(
        self, source: str, *, name: str | None = None, revision: str | None = None
    ) -> Model:
        """Return the row of a model that is to be added; it is not stored.

        Nothing is downloaded but a hub's config.json.

        Args:
            source: a name of the catalogue, a hub's OWNER/NAME, or a folder.
            name: what commands call it; None: the catalogue's name, or that of the folder.
            revision: branch, tag or commit of a hub's repository; None: main.

        Raises:
            FieldError: a field is refused, or the name or the model is in the registry already.
            ModelUnavailableError: the hub's config.json is not to be had.
        """
        return self.describe_entry(_entry(check_source(source), revision), name)

    def describe_entry(self, entry: Entry, name: str | None = None) -> Model:
        """Return the row of a model of the catalogue that is to be added; it is not stored."""
        found = check_name(
            "name", short_name(entry.name.removesuffix(".gguf")) if name is None else name
        )
        with self._database.read() as session:
            _check_new(session, found, identity_of(entry))
        row = _described(entry)
        row.name = found
        return row

    def plan(
        self,
        model: Model,
        settings: Mapping[str, Any] | None = None,
        *,
        card: str | None = None,
        explain: bool = True,
    ) -> "Proposal":
        """Say whether a profile fits, what each way to make it fit costs, and propose settings.

        Args:
            model: a row of the registry, or of `describe`.
            settings: by flags of `tightfit serve` with underscores; those without a value are open.
            card: a card of conf/gpu, or cpu; None: that of this machine, or what the settings say.
            explain: look for choices, which takes a second or more (see `propose`).

        Raises:
            FieldError: there is no such card, or a setting is refused.
        """
        from console.registry.proposals import propose  # noqa: PLC0415  brings the planner

        measured = Results(self._database).throughput(model.id)
        given = _given(settings or {})
        return propose(model, given, card=card, measured=measured, explain=explain)

    def store(self, row: Model, settings: Mapping[str, Any], *, profile: str = DEFAULT) -> Model:
        """Store a row of `describe` with its first profile, whose settings are as given.

        Raises:
            FieldError: a setting is refused, or the name or the model is in the registry already.
        """
        kept = check_settings(_given(settings), spec_of(row))
        row.profiles = [
            Profile(name=check_name("profile", profile), is_default=True, settings=kept)
        ]
        with self._database.write() as session:
            _check_new(session, row.name, row.identity)
            session.add(row)
        return self.get(row.id)

    def set_profile(
        self,
        model: str | int,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        make_default: bool = False,
    ) -> Profile:
        """Change settings of a profile; the others keep their values. Return it.

        A profile that is not there yet begins with the settings of the default one.

        Args:
            model: its name or id.
            name: of the profile; None: the default one.
            settings: by flags of `tightfit serve` with underscores; None removes a setting.
            make_default: use it where none is named.

        Raises:
            FieldError: there is no such model, or a field is refused.
        """
        if name is not None:
            check_name("profile", name)
        with self._database.write() as session:
            row = read_row(session, model)
            default = default_of(row)
            found = default if name is None else find_profile(row, name)
            if found is None:
                found = Profile(name=str(name), settings=default.settings)
                row.profiles.append(found)
            merged = dict(found.settings)
            for key, value in (settings or {}).items():
                merged[key.replace("-", "_")] = value
            found.settings = check_settings(_given(merged), spec_of(row))
            if make_default and not found.is_default:
                default.is_default = False
                session.flush()  # there is never more than one
                found.is_default = True
        return found

    def remove_profile(self, model: str | int, name: str) -> None:
        """Remove a profile; what was measured with it stays.

        Raises:
            FieldError: there is none, or it is the default one.
        """
        with self._database.write() as session:
            row = read_row(session, model)
            found = profile_of(row, name)
            if found.is_default:
                raise FieldError(
                    "profile",
                    f"profile: expected another one than the default, got {name}. Make another "
                    "one the default first.",
                )
            row.profiles.remove(found)


def name_of(entry: Entry) -> str:
    """Return what a model is called where no name is given."""
    return short_name(entry.name.removesuffix(".gguf"))


def short_name(text: str) -> str:
    """Return a name that `check_name` takes, for a folder or a repository called otherwise."""
    kept = re.sub(r"[^\w.-]+", "_", text, flags=re.ASCII)
    return re.sub(r"\.{2,}", ".", kept).strip("._-")[:MOST_CHARACTERS] or "model"


def default_of(model: Model) -> Profile:
    """Return the profile that is used where none is named."""
    return next(profile for profile in model.profiles if profile.is_default)


def find_profile(model: Model, name: str) -> Profile | None:
    """Return the profile of this name; None: there is none."""
    return next((profile for profile in model.profiles if profile.name == name), None)


def profile_of(model: Model, name: str | None = None) -> Profile:
    """Return the profile of this name; without a name the default one.

    Raises:
        FieldError: there is none.
    """
    found = default_of(model) if name is None else find_profile(model, name)
    if found is None:
        known = ", ".join(profile.name for profile in model.profiles)
        hint = did_you_mean(str(name), [profile.name for profile in model.profiles])
        raise FieldError("profile", f"profile: expected one of {known}, got {shown(name)}.{hint}")
    return found


def entry_of(model: Model) -> Entry:
    """Return a model of the registry as the catalogue has it, which finds, fetches and removes it.

    Raises:
        ConfigError: the catalogue has it no more.
    """
    if model.kind in {"folder", "gguf"}:
        return Entry(name=model.name, path=model.path)
    if "/" not in model.source:
        return named(model.source)
    source = ModelSource(kind="hub", repo=model.source, revision=model.revision)
    return Entry(name=model.name, source=source)


def _entry(source: str, revision: str | None) -> Entry:
    """Return what the catalogue knows of a source.

    Raises:
        FieldError: it is none, or has no revisions.
    """
    path = expanded(source)
    if path.is_file() and not is_gguf(path):
        raise FieldError(
            "source",
            f"source: expected a folder or a file whose name ends in .gguf, got the file {path}. "
            "Give the folder that holds it.",
        )
    try:
        entry = find(source)
    except ConfigError as error:
        raise _about_source(error) from error
    if revision is None:
        return entry
    if entry.source.kind != "hub" or entry.path is not None:
        raise FieldError(
            "revision",
            f"revision: expected one of a hub's repository alone, got {shown(revision)} for "
            f"{source}. Remove it.",
        )
    if not revision.isprintable() or not revision.strip() or ".." in revision:
        raise FieldError(
            "revision", f"revision: expected a branch, tag or commit, got {shown(revision)}."
        )
    if revision == entry.source.revision:
        return entry
    changed = ModelSource(kind="hub", repo=entry.source.repo, revision=revision)
    return Entry(name=entry.name, source=changed)


def identity_of(entry: Entry) -> str:
    """Return what is the same for two names of one model."""
    if entry.path is not None:
        return f"folder:{expanded(entry.path).resolve()}"
    source = entry.source
    if source.kind == "hub":
        return f"hub:{str(source.repo).lower()}@{source.revision}"
    return f"package:{source.package}=={source.version}"


def _check_new(session: Session, name: str, identity: str | None) -> None:
    """Raise FieldError where a name, or a model, is in the registry already."""
    if session.scalar(select(Model.id).where(Model.name.collate("NOCASE") == name)) is not None:
        raise FieldError(
            "name",
            f"name: expected one that no model of the registry has, got {name}. Choose another "
            "one, or change the settings of that model.",
        )
    other = session.scalar(select(Model.name).where(Model.identity == identity))
    if other is not None:
        raise FieldError(
            "source",
            f"source: expected a model that is not in the registry yet, got that of {other}. Give "
            "it another profile.",
        )


def _described(entry: Entry) -> Model:
    """Return a new row of what the files, or the catalogue, say of a model.

    Raises:
        FieldError: the folder is no whole checkpoint of a supported model.
        ModelUnavailableError: the hub's config.json is not to be had.
    """
    found, folder = state(entry), None if entry.path is None else expanded(entry.path).resolve()
    if folder is not None and found.kind != "present":
        raise FieldError("source", f"source: {_lacking(folder)}")
    try:
        columns = from_files(entry, found)
    except (CheckpointError, ConfigError) as error:
        raise _about_source(error) from error
    named_by = entry.name if entry.spec is not None else str(entry.source.repo)
    return Model(
        source=named_by if folder is None else str(folder),
        kind=entry.source.kind if folder is None else "gguf" if is_gguf(folder) else "folder",
        revision=entry.source.revision if folder is None else None,
        identity=identity_of(entry),
        **columns,
    )


def from_files(entry: Entry, found: State) -> dict[str, Any]:
    """Return the columns of a row that the files of a model, or the catalogue, tell.

    Raises:
        CheckpointError: a file is damaged, cut short, or does not belong to the model.
        ConfigError: it is of no supported model.
        ModelUnavailableError: the hub's config.json is not to be had.
    """
    spec = describe(entry).spec
    return {
        "path": None if found.path is None else str(found.path.resolve()),
        "family": spec.model_type,
        "format": spec.quantization.get("method", spec.dtype),
        "num_parameters": spec.num_parameters,
        "weights_bytes": _stored_bytes(found, spec),
        "max_model_len": spec.max_position_embeddings,
        "spec": asdict(spec),
        **standing(found),
    }


def _lacking(folder: Path) -> str:
    """Return what to say of a folder that is no whole checkpoint."""
    gguf = sorted(folder.glob("*.gguf"))
    if gguf and not any(folder.glob("*.safetensors")):
        return f"expected one GGUF file, got the folder {folder}. Give the file, such as {gguf[0]}."
    return (
        f"expected a folder with {FILES}; {folder} lacks {', '.join(missing_files(folder))}. "
        "Fetch what is missing, or give another folder."
    )


def standing(found: State) -> dict[str, Any]:
    """Return the columns state and reason of a model that nothing was measured of."""
    if found.kind == "present":
        return {"state": "untested", "reason": None}
    if found.kind == "absent":
        return {"state": "missing", "reason": "its files are not on this machine"}
    lacking = [] if found.path is None else missing_files(found.path)
    what = f"lacks {', '.join(lacking)}" if lacking else "a download was cut short"
    return {"state": "missing", "reason": f"{what} ({found.num_bytes} bytes are here)"}


def _stored_bytes(found: State, spec: ModelSpec) -> int:
    """Return the bytes of a model's weights: as its files' headers say, else by its sizes.

    Raises:
        CheckpointError: a file is absent, damaged or cut short, or does not belong to the model.
    """
    if found.kind != "present" or found.path is None:
        return spec.weight_bytes()
    formats = TensorFormats(FORMATS[spec.dtype], spec.formats(spec.dtype))
    stored, _ = find_tensors(found.path, spec, formats)
    is_twice = spec.tie_word_embeddings and {HEAD, EMBEDDING} <= stored.keys()
    left_out = {HEAD} if is_twice else set()
    return sum(tensor.num_bytes for name, tensor in stored.items() if name not in left_out)


def _about_source(error: Exception) -> FieldError:
    """Return the refusal of a source that the catalogue or the engine words with a key."""
    text = str(error)
    for key in ("model.path: ", "model: "):
        text = text.removeprefix(key)
    return FieldError("source", f"source: {text}")


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that have a value."""
    return {name: value for name, value in settings.items() if value is not None}


def read_row(session: Session, model: str | int) -> Model:
    """Return a model by its name or id, with its profiles.

    Raises:
        FieldError: there is none.
    """
    row = _find(session, model)
    if row is None:
        names = list(session.scalars(select(Model.name).order_by(Model.name)))
        hint = did_you_mean(str(model), names)
        raise FieldError(
            "model",
            f"model: expected a model of the registry ({_some(names)}), got {shown(model)}.{hint} "
            "`tightfit models add NAME` adds one.",
        )
    return row


_MOST_NAMES: Final = 10


def _some(names: Sequence[str]) -> str:
    """Return the first of some names, and how many others there are."""
    more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return ", ".join([*names[:_MOST_NAMES], *more]) or "it has none"


def _find(session: Session, model: str | int) -> Model | None:
    by = Model.id == model if isinstance(model, int) else Model.name == model
    return session.scalar(select(Model).options(selectinload(Model.profiles)).where(by))
