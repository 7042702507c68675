"""ModelNode: the model of a run, as the catalogue knows it, or an engine of scripted times."""

from dataclasses import dataclass

from catalogue.entry import Model
from engine.errors import ConfigError
from harness.fake_config import FakeScript


@dataclass(kw_only=True)
class ModelNode(Model):
    """The model: its sizes, where its weights are and how they are loaded."""

    fake: FakeScript | None = None
    """What an engine that computes nothing pretends (model=fake); null: a real engine."""

    def check(self) -> None:
        """Raise ConfigError when neither sizes nor a folder are known."""
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
        super().check()
