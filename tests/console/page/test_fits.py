"""Verdicts behind the pages, planned at once."""

from concurrent.futures import Executor, Future

import pytest

from console.page import fits
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
def test_a_plan_that_fails_says_why_until_the_settings_change(error, monkeypatch):
    asked = []

    def propose(*args, **kwargs):
        asked.append(args)
        raise error

    monkeypatch.setattr(fits, "propose", propose)
    found = fits.Fits(AtOnce())
    assert found.of(a_model()) == fits.PLANNING
    verdict = found.of(a_model())
    assert verdict["answer"] != fits.PLANNING["answer"]
    assert "no such card" in verdict["why"][0]
    assert len(asked) == 1
    found.of(a_model(changed_s=2.0))
    assert len(asked) == 2
