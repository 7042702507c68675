"""A transformers model whose last layers accelerate keeps in host memory."""

from dataclasses import dataclass
from typing import Any, Final

from engine.asked.config import EngineConfig
from engine.errors import EngineError
from engine.model.spec import DTYPE_BYTES, ModelSpec
from harness.systems.accelerate_plan import device_map
from harness.systems.base import PeerLoad
from harness.systems.hf_sizes import config_json
from harness.systems.torch_device import PeerDevice
from harness.work.drive import Clock

_TILE: Final = 2**20
"""Random values that dummy weights repeat: their times do not depend on them."""


@dataclass(frozen=True, kw_only=True)
class PlacedModel:
    """The model, and where its weights are as found in its modules."""

    model: Any
    host_bytes: int
    """Weights that a forward pass copies to the device."""
    device_bytes: int
    host_modules: tuple[str, ...]
    attention: str


def load_model(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: str,
    device: PeerDevice,
    num_host: int,
    *,
    load: PeerLoad,
    clock: Clock,
) -> PlacedModel:
    """Build the model with `num_host` layers in host memory, and check that they are there.

    Args:
        config: what is asked.
        spec: sizes of the model.
        dtype: of all weights.
        device: where the model runs.
        num_host: decoder layers that are copied when they run.
        load: receives the phases.
        clock: seconds.

    Raises:
        EngineError: accelerate put other weights in host memory than was asked.
    """
    target = 0 if device.kind == "cuda" else "cpu"
    placed = device_map(spec.num_hidden_layers, num_host, target)
    first = spec.num_hidden_layers - num_host
    host_modules = tuple(f"model.layers.{index}" for index in range(first, spec.num_hidden_layers))
    if config.model.load_format == "dummy":
        with load.phase("convert", clock):
            model = _random_model(config, spec, dtype, host_modules, device)
        _dispatch(model, placed, host_modules, device)
    else:
        with load.phase("read", clock):
            model = _stored_model(config, dtype, placed, device)
        if device.kind != "cuda":
            _dispatch(model, placed, host_modules, device)
    model.eval()
    return _check(model, spec, dtype, host_modules)


def _stored_model(
    config: EngineConfig, dtype: str, placed: dict[str, str | int], device: PeerDevice
) -> Any:
    import torch  # noqa: PLC0415  takes seconds
    from transformers import AutoModelForCausalLM

    where: dict[str, Any] = {"device_map": placed} if device.kind == "cuda" else {}
    return AutoModelForCausalLM.from_pretrained(
        str(config.model.path), dtype=getattr(torch, dtype), local_files_only=True, **where
    )


def _random_model(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: str,
    host_modules: tuple[str, ...],
    device: PeerDevice,
) -> Any:
    """Return the model with random weights, each made where it stays."""
    import torch  # noqa: PLC0415  takes seconds
    from accelerate import init_empty_weights  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = getattr(torch, dtype)
    sizes = config_json(spec)
    asked = AutoConfig.for_model(**{**sizes, "dtype": dtype})
    with init_empty_weights():
        classes: Any = AutoModelForCausalLM
        model = classes.from_config(asked, dtype=kind)
    model.tie_weights()
    draw = torch.Generator().manual_seed(config.engine.seed)
    tile = (torch.randn(_TILE, generator=draw) * 0.02).to(kind)
    made: dict[int, Any] = {}
    for name, module in model.named_modules():
        is_host = any(name == top or name.startswith(f"{top}.") for top in host_modules)
        where = "cpu" if is_host else device.torch_name
        for key, param in module.named_parameters(recurse=False):
            if id(param) not in made:
                made[id(param)] = _filled(param.shape, tile, where, is_norm="norm" in name)
            setattr(module, key, made[id(param)])
    model.tie_weights()
    return model


def _filled(shape: Any, tile: Any, where: str, *, is_norm: bool) -> Any:
    import torch  # noqa: PLC0415  takes seconds

    tensor = torch.empty(shape, dtype=tile.dtype, device=where)
    flat, source = tensor.view(-1), tile.to(where)
    for start in range(0, flat.numel(), source.numel()):
        part = flat[start : start + source.numel()]
        part.copy_(source[: part.numel()])
    if is_norm:
        tensor.fill_(1.0)
    return torch.nn.Parameter(tensor, requires_grad=False)


def _dispatch(
    model: Any,
    placed: dict[str, str | int],
    host_modules: tuple[str, ...],
    device: PeerDevice,
) -> None:
    """Let accelerate copy the modules in host memory when they run."""
    from accelerate import dispatch_model  # noqa: PLC0415  an extra
    from accelerate.hooks import attach_align_device_hook  # noqa: PLC0415
    from accelerate.utils import OffloadedWeightsLoader  # noqa: PLC0415

    if device.kind == "cuda":
        skip = model._skip_keys_device_placement  # noqa: SLF001  transformers' own way to say it
        dispatch_model(model, placed, skip_keys=skip)
        return
    # Where the device is the CPU, dispatch_model keeps nothing apart: the hooks are attached here.
    for name in host_modules:
        module = model.get_submodule(name)
        weights = OffloadedWeightsLoader(state_dict=dict(module.state_dict()))
        attach_align_device_hook(module, execution_device="cpu", offload=True, weights_map=weights)


def _check(model: Any, spec: ModelSpec, dtype: str, host_modules: tuple[str, ...]) -> PlacedModel:
    """Count the weights by where they are; weights that a pass copies lie on no device."""
    host = resident = 0
    seen: set[int] = set()
    for param in model.parameters():
        if id(param) in seen:
            continue
        seen.add(id(param))
        size = param.numel() * DTYPE_BYTES[dtype]
        if param.device.type == "meta":
            host += size
        else:
            resident += size
    layer = sum(tensor.numel for tensor in spec.layer_tensors(0)) * DTYPE_BYTES[dtype]
    expected = len(host_modules) * layer
    if host != expected:
        raise EngineError(
            f"accelerate: expected {expected} bytes of {len(host_modules)} layers in host memory, "
            f"found {host}. This version of transformers or accelerate places them otherwise."
        )
    attention = str(getattr(model.config, "_attn_implementation", None))
    return PlacedModel(
        model=model,
        host_bytes=host,
        device_bytes=resident,
        host_modules=host_modules,
        attention=attention,
    )
