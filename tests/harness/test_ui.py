"""MLflow's pages in one process; the server itself is a stand-in."""

import pytest

from harness import ui


@pytest.fixture
def served(monkeypatch):
    """What the server was started with."""
    found = []
    monkeypatch.setattr(ui, "serve", lambda *asked: found.append(asked))
    return found


def test_the_database_of_the_home_is_shown(tmp_path, monkeypatch, served, capsys):
    home = tmp_path / "home"
    monkeypatch.setenv("TIGHTFIT_HOME", str(home))
    assert ui.main([]) == 0
    assert served == [(f"sqlite:///{home}/mlflow.db", home, "127.0.0.1", 5000, "tightfit")]
    assert "so its database is made first" in capsys.readouterr().err
    ui.main(["--store", "sqlite:////data/runs.db", "--port", "5001"])
    assert served[1] == ("sqlite:////data/runs.db", home, "127.0.0.1", 5001, "tightfit")
