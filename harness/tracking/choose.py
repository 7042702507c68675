"""The tracker that the configuration asks for, guarded."""

from pathlib import Path

from harness.config.schema import TrackingConfig
from harness.tracking.base import GuardedTracker, NoTracker, Tracker
from harness.tracking.mlflow import MlflowTracker


def open_tracker(config: TrackingConfig, home: Path) -> GuardedTracker:
    """Return an open tracker; its troubles are in `warnings`, never raised.

    Args:
        config: the node `tracking`.
        home: TIGHTFIT_HOME, where the database and the artifacts are.
    """
    tracker: Tracker = NoTracker() if config.backend == "none" else MlflowTracker(config, home)
    return GuardedTracker(tracker)
