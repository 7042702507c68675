"""MLflow's pages in one process; the server itself is a stand-in."""

import socket

import pytest

from catalogue.terminal import UsageError
from engine.errors import ConfigError
from harness import ui


@pytest.fixture
def served(monkeypatch):
    """What the server was started with; its socket as the address of the pages."""
    found = []

    def serve(store, home, listener, experiment):
        found.append((store, home, ui.address_of(listener), experiment))

    monkeypatch.setattr(ui, "serve", serve)
    return found


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_the_database_of_the_home_is_shown(tmp_path, monkeypatch, served, capsys):
    home, port = tmp_path / "home", free_port()
    monkeypatch.setenv("TIGHTFIT_HOME", str(home))
    assert ui.main(["--port", str(port)]) == 0
    address = f"http://127.0.0.1:{port}"
    assert served == [(f"sqlite:///{home}/mlflow.db", home, address, "tightfit")]
    assert "so its database is made first" in capsys.readouterr().err
    (tmp_path / "runs.db").touch()
    ui.main(["--store", f"sqlite:///{tmp_path}/runs.db", "--port", "0"])
    assert served[1][0] == f"sqlite:///{tmp_path}/runs.db"
    assert int(served[1][2].rpartition(":")[2]) > 0  # the port that was taken, not the one asked


@pytest.mark.parametrize(
    ("typed", "error", "said"),
    [
        (["--port", "99999"], ConfigError, "--port: expected an integer >= 0 and <= 65535"),
        (["--port", "-1"], ConfigError, "--port: expected an integer >= 0 and <= 65535, got -1"),
        (["--port", "x"], UsageError, "--port: expected an integer, got 'x'"),
        (["--store", "/data/runs.db"], ConfigError, "A file of runs: sqlite:////PATH"),
        (["--store", "x://y"], ConfigError, "--store: expected a database"),
        (["--store", "http://a:1"], ConfigError, "open http://a:1 in the browser"),
        (["--store", "sqlite:////no/such.db"], ConfigError, "found none at /no/such.db"),
    ],
)
def test_what_cannot_be_shown_is_refused_at_once(tmp_path, monkeypatch, served, typed, error, said):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    with pytest.raises(error) as refusal:
        ui.main(typed)
    assert said in str(refusal.value)
    assert not served


def test_a_port_that_is_taken_is_refused_before_mlflow_is_imported(tmp_path, monkeypatch, served):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"port {port}: .*in use.*--port 0 takes a free one"):
            ui.main(["--port", port])
    assert not served


def test_an_address_with_colons_is_in_brackets():
    class Listener:
        def getsockname(self):
            return ("::1", 5000, 0, 0)

    assert ui.address_of(Listener()) == "http://[::1]:5000"
