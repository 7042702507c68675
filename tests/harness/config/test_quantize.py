"""model.quantize in a configuration of the harness."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.asked.config import EngineSettings
from engine.errors import ConfigError
from harness.config.engine import check_settings, engine_config, reference_config
from harness.config.schema import FakeScript, ModelNode, SystemConfig
from tests.engine.specs import small_spec
from tests.harness.cases import run_config


def test_it_reaches_the_engine_and_its_reference_and_no_peer() -> None:
    node = ModelNode(name="small", load_format="dummy", spec=small_spec(), quantize="int4")
    config = run_config(model=node)
    check_settings(config)
    assert engine_config(config, Path("folder")).model.quantize == "int4"
    assert reference_config(config, Path("folder")).model.quantize == "int4"
    quantised = {"method": "awq", "schemes": [{"layout": "awq", "bits": 4}]}
    spec = replace(small_spec(), quantization=quantised)
    for changes, why in (
        ({"system": SystemConfig(kind="vllm")}, "model.quantize: expected null with system=vllm"),
        ({"engine": EngineSettings(weight_format="lossless")}, "weight_format: expected null or"),
        ({"model": replace(node, spec=spec)}, r"expected a checkpoint of plain weights.*\(awq\)"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_settings(replace(config, **changes))
    with pytest.raises(ConfigError, match=r"quantize: expected null with model=fake"):
        replace(node, fake=FakeScript())
