"""Measure what layers take beside their products where a CPU stands in for a GPU."""

from statistics import median
from time import perf_counter
from typing import Final

from engine.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.spec import ModelSpec

FEW: Final = 2
MANY: Final = 12
"""Layers of the two models that are compared."""
BATCH: Final = 8
STEPS: Final = 12


def probe_layers() -> dict[str, float]:
    """Return seconds beside the bytes of weights: of a step, of a layer, of a sequence in a layer.

    Decode steps of two models whose products take no time, of 2 and 12 layers, of one sequence and
    of 8: medians of 12.
    """
    few, many = _decode_s(FEW, 1), _decode_s(MANY, 1)
    together = _decode_s(MANY, BATCH)
    layer_s = max(1e-6, (many - few) / (MANY - FEW))
    sequence_s = min(0.9 * layer_s, max(1e-9, together - many) / (BATCH - 1) / MANY)
    return {
        "layer_overhead_s": layer_s - sequence_s,
        "sequence_overhead_s": sequence_s,
        "step_overhead_s": max(1e-6, few - FEW * layer_s),
    }


def _decode_s(num_layers: int, batch: int) -> float:
    spec = ModelSpec(
        model_type="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_theta=10000.0,
    )
    config = EngineConfig(
        model=ModelConfig(name="probe", load_format="dummy", spec=spec),
        gpu=GPUConfig(name="probe", device="cpu", memory_gib=0.25),
        engine=EngineSettings(max_num_seqs=BATCH, max_num_batched_tokens=64),
    )
    llm = LLM.from_config(config)
    try:
        for index in range(batch):
            params = SamplingParams(temperature=0, max_tokens=STEPS + 4, ignore_eos=True)
            llm.add_request([index + 1, 2, 3, 4], params)
        times = []
        while llm.has_unfinished():
            begin_s = perf_counter()
            llm.step()
            times.append(perf_counter() - begin_s)
        return median(times[2:-2])
    finally:
        llm.close()
