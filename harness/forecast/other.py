"""What another engine needs that reported too little memory for its KV cache."""

import math

from engine.plan.advise import DEFAULT_TOKENS
from engine.plan.answer import labelled, wrapped
from engine.sealed import GIB
from harness.forecast.rows import Forecast


def other_lines(found: Forecast, reported_gib: float) -> list[str]:
    """Return what the engine that reported `reported_gib` would have to offload, as lines of text.

    Its figure is of its own memory: activations, graphs and context differ from this engine's.
    """
    spec, most = found.spec, found.spec.max_position_embeddings
    length = found.config.engine.max_model_len or min(most, DEFAULT_TOKENS)
    size, need = spec.weight_bytes() / GIB, spec.kv_bytes_per_token() * length / GIB
    sequence = f"one sequence of {length:,} tokens needs {need:.2f} GiB of KV"
    least = math.ceil(round((need - reported_gib) * 100, 6)) / 100
    head = f"The engine that reported {reported_gib:.2f} GiB for its KV cache: {sequence}"
    if least <= 0:
        return ["", *wrapped(f"{head}. That fits, so no weights have to leave the GPU.")]
    name = found.config.model.source.repo or found.config.model.name
    text = f"{head}. {least:.2f} GiB are missing; it has to offload at least as much:"
    if least > size:
        return [
            "",
            *wrapped(
                f"{head}. {least:.2f} GiB are missing, more than the {size:.2f} GiB of its weights."
            ),
        ]
    vllm = f"vllm serve {name} --cpu-offload-gb {least:g} --max-model-len {length}"
    room = math.floor((size - least) * 100) / 100
    limits = f'{{0: "{room:g}GiB", "cpu": "{math.ceil(least + 1)}GiB"}}'
    accelerate = f'device_map="auto", max_memory={limits}'
    note = "The figure above describes that engine's memory, those below describe this engine's."
    return [
        "",
        *wrapped(text),
        *labelled("vLLM", vllm, " \\"),
        *labelled("accelerate", accelerate),
        *labelled("Note", note),
    ]
