"""Models: adds models to the registry, lists them and keeps their settings."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session, selectinload

from catalogue.entry import Model as Entry
from catalogue.models import describe, find, state
from console.registry.database import Database
from console.registry.tables import Model, Profile
from engine.errors import ConfigError

DEFAULT: Final = "default"
"""The name of a model's first profile."""


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
            ConfigError: there is none.
        """
        with self._database.read() as session:
            return _get(session, model)

    def add(
        self,
        source: str,
        *,
        name: str | None = None,
        profile: str = DEFAULT,
        settings: Mapping[str, Any] | None = None,
    ) -> Model:
        """Add a model with its first profile; nothing is downloaded but a hub's config.json.

        Args:
            source: a name of the catalogue, a hub's OWNER/NAME, or a folder.
            name: what commands call it; None: the catalogue's name for it.
            profile: name of the first profile, which is the default.
            settings: flat, named as the flags of `tightfit serve`.

        Raises:
            ConfigError: there is no such model, or the name is taken.
            ModelUnavailableError: its sizes are not to be had.
        """
        row = _described(source, find(source), name)
        row.profiles = [Profile(name=profile, is_default=True, settings=dict(settings or {}))]
        with self._database.write() as session:
            if session.scalar(select(Model.id).where(Model.name == row.name)) is not None:
                raise ConfigError(
                    f"name: expected one that no model of the registry has, got {row.name!r}. "
                    "Choose another one, or change the settings of that model."
                )
            session.add(row)
        return self.get(row.id)


def _described(source: str, entry: Entry, name: str | None) -> Model:
    """Return a new row of what the files or the catalogue say of a model."""
    found, spec = state(entry), describe(entry).spec
    is_here = found.kind == "present"
    return Model(
        name=name or entry.name,
        source=source,
        kind="folder" if entry.path is not None else entry.source.kind,
        revision=entry.source.revision,
        path=None if found.path is None else str(found.path),
        family=spec.model_type,
        format=spec.dtype,
        num_parameters=spec.num_parameters,
        weights_bytes=spec.weight_bytes(),
        max_model_len=spec.max_position_embeddings,
        state="untested" if is_here else "missing",
    )


def _get(session: Session, model: str | int) -> Model:
    by = Model.id == model if isinstance(model, int) else Model.name == model
    row = session.scalar(select(Model).options(selectinload(Model.profiles)).where(by))
    if row is None:
        raise ConfigError(f"model: expected one of the registry, got {model!r}.")
    return row
