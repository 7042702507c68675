"""From a RunConfig to what the engine is built from, and the checks that need no weights."""

from dataclasses import replace
from pathlib import Path

from catalogue.files import expanded
from engine.asked.config import EngineConfig, ModelConfig, PlannerConfig
from engine.asked.offload import OffloadConfig
from engine.errors import ConfigError
from engine.model.formats import plain
from engine.plan.memory import resolve_dtype, resolve_max_model_len
from engine.plan.policy import assign
from harness.config.peers import check_system
from harness.config.schema import RunConfig


def with_model(config: RunConfig, model: ModelConfig) -> EngineConfig:
    """Return the configuration of an engine of this model under a run's settings."""
    return EngineConfig(
        model=model,
        gpu=config.gpu,
        offload=config.offload,
        kv=config.kv,
        engine=config.engine,
        planner=config.planner,
    )


def engine_config(config: RunConfig, model_path: Path | None) -> EngineConfig:
    """Return the configuration of the engine under test.

    Args:
        config: What is asked.
        model_path: The checkpoint's folder; None for random weights of the sizes in model.spec.

    Raises:
        ConfigError: No folder for weights that are not random.
    """
    model = ModelConfig(
        name=config.model.name,
        path=None if model_path is None else str(model_path),
        load_format=config.model.load_format,
        spec=config.model.spec,
    )
    return with_model(config, model)


def reference_config(config: RunConfig, model_path: Path | None) -> EngineConfig:
    """Return the configuration whose tokens are the yardstick; the same for every placement.

    It has no host tier of KV blocks; where there is one, only room for the prompts that are
    compared, so that it fits where the engine under test does.

    Args:
        config: What is asked of the engine under test.
        model_path: As in engine_config.
    """
    longest = config.engine.max_model_len
    if config.kv.has_host_tier:
        longest = config.scenario.correctness.prompt_tokens
        longest += config.scenario.correctness.output_tokens
    return replace(
        engine_config(config, model_path),
        offload=OffloadConfig(),
        planner=PlannerConfig(),
        kv=replace(
            config.kv,
            enable_prefix_caching=False,
            num_cpu_blocks=None,
            cpu_gib=None,
            swap_space=0.0,
            pin_limit_gib=None,
        ),
        engine=replace(config.engine, enforce_eager=True, max_model_len=longest),
    )


def check_settings(config: RunConfig) -> None:
    """Check what depends on the model's sizes but on no machine and no weights.

    Raises:
        ConfigError: A selector matches nothing, an offload moves nothing, a window or a length is
            refused, or a file of prompts or a trace is absent.
    """
    for name, file in config.scenario.files().items():
        path = expanded(file)
        if not path.is_file():
            raise ConfigError(f"scenario.{name}: expected a file, found none at {path.absolute()}.")
    serve = config.scenario.serve
    if serve is not None and serve.trace is not None:
        serve.trace.check_ending()
    check_system(config)
    spec = config.model.spec
    if spec is None:
        return
    sizes = ModelConfig(name=config.model.name, load_format="dummy", spec=spec)
    asked = with_model(config, sizes)
    resolve_max_model_len(asked, spec)
    # Only whether anything moves matters here, and that is the same in every dtype.
    assign(spec, config.offload, plain(resolve_dtype(asked, spec, "cuda")))
