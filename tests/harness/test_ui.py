"""MLflow's pages in one process; the server itself is a stand-in."""

import pytest

from harness import ui


@pytest.fixture
def served(monkeypatch):
    """What the server was started with."""
    found = []
    monkeypatch.setattr(ui, "serve", lambda *asked: found.append(asked))
    return found


def test_the_database_of_the_home_is_shown(tmp_path, monkeypatch, served):
    home = tmp_path / "home"
    monkeypatch.setenv("TIGHTFIT_HOME", str(home))
    assert ui.main([]) == 0
    store, root = f"sqlite:///{home}/mlflow.db", (home / "artifacts").as_uri()
    assert served == [(store, root, "127.0.0.1", 5000, "tightfit")]
    ui.main(["--store", "sqlite:////data/runs.db", "--port", "5001"])
    assert served[1][:2] == ("sqlite:////data/runs.db", "file:///data/artifacts")
    assert served[1][3] == 5001
