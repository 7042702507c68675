"""Verdicts behind the pages, planned at once."""

from concurrent.futures import Executor, Future

import pytest

from console import verdicts
from console.registry.database import Database
from console.registry.models import Models
from console.registry.tables import Model, Profile
from engine.errors import ConfigError


class AtOnce(Executor):
    """Runs what is submitted before it returns."""

    def submit(self, fn, /, *args, **kwargs):
        done = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def a_model(changed_s=1.0):
    profile = Profile(name="default", is_default=True, settings={}, changed_s=changed_s)
    return Model(id=1, name="m", changed_s=1.0, profiles=[profile])


@pytest.mark.parametrize("error", [ConfigError("no such card"), OSError("no such card")])
def test_a_plan_that_fails_says_why_until_the_settings_change(error, tmp_path, monkeypatch):
    asked = []

    def propose(*args, **kwargs):
        asked.append(args)
        raise error

    monkeypatch.setattr(Models, "plan", propose)
    found = verdicts.Verdicts(Database.open(tmp_path / "registry.db"), worker=AtOnce())
    assert found.of_model(a_model()) == verdicts.PLANNING
    verdict = found.of_model(a_model())
    assert verdict["brief"] != verdicts.PLANNING["brief"]
    assert "no such card" in verdict["why"][0]
    assert len(asked) == 1
    found.of_model(a_model(changed_s=2.0))
    assert len(asked) == 2
