"""Settings of model=fake: bounds, and what would have no effect."""

import pytest

from engine.errors import ConfigError
from harness.config.compose import Composer
from harness.config.schema import FakeScript, ModelNode
from tests.harness.cases import SPEC, run_config


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"clock": "fast"}, "model.fake.clock: expected one of scripted, real"),
        ({"fail": "explode"}, "model.fake.fail: expected one of none, no_fit"),
        ({"fail_at": "lunch"}, "model.fake.fail_at"),
        ({"decode_ms": []}, "model.fake.decode_ms: expected at least one time"),
        ({"prefill_ms": [5, -1]}, "model.fake.prefill_ms: expected a number >= 0"),
        ({"weights_gib": 0}, "model.fake.weights_gib: expected a number > 0"),
        ({"refuse_every": 0}, "model.fake.refuse_every: expected an integer >= 1"),
        ({"fail_after_steps": 3}, "expected 0 with fail=none"),
        ({"fail": "oom", "fail_at": "build", "fail_after_steps": 3}, "fail_at=step"),
    ],
)
def test_wrong_settings_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        FakeScript(**fields)


def test_only_the_native_system_is_scripted_and_nothing_is_planned():
    model = ModelNode(name="fake", load_format="dummy", spec=SPEC, fake=FakeScript())
    with pytest.raises(ConfigError, match="expected run with model=fake"):
        run_config(model=model, mode="plan")
    with pytest.raises(ConfigError, match=r"model\.load_format=dummy beside it"):
        ModelNode(name="fake", path="somewhere", spec=SPEC, fake=FakeScript())


def test_the_model_composes_whatever_is_typed_before_it():
    points = [Composer().plan([f"{sign}model=fake"]).points[0] for sign in ("", "+", "++")]
    (config,) = {repr(point.config) for point in points}
    assert points[0].config.model.fake == FakeScript()
    assert "fake=FakeScript" in config
