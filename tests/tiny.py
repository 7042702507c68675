"""Tiny random checkpoints of every model family, engines on them, and transformers as oracle."""

import json
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine import LLM, SamplingParams
from engine.asked.config import EngineConfig
from engine.asked.keywords import config_from_keywords
from engine.asked.offload import OffloadWarning
from engine.asked.request import RequestOutput
from engine.errors import EngineError

VOCAB = 151
MAX_POSITION = 1200
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 40}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "olmo2": ("Olmo2", {}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 4,
            "sliding_window": 48,
            "sliding_window_pattern": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_biases": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo2_biases": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "llama_llama3_rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama_linear_rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}},
    ),
    "mistral_window": ("Mistral", {"sliding_window": 29}),
    "qwen2_window": ("Qwen2", {**QWEN_WINDOW, "max_window_layers": 1}),
    "qwen3_window": ("Qwen3", {**QWEN_WINDOW, "max_window_layers": 0, "head_dim": 32}),
    "gemma3_odd_sizes": (
        "Gemma3",
        {
            "head_dim": 22,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "hidden_size": 60,
            "num_hidden_layers": 7,
            "sliding_window": 17,
        },
    ),
    "llama_odd_sizes": (
        "Llama",
        {
            "hidden_size": 60,
            "intermediate_size": 77,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 22,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 32, **EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3_moe_sparse": ("Qwen3Moe", {"head_dim": 32, **EXPERTS, "decoder_sparse_step": 2}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral_one": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 40,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 150,
            },
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 7, "num_experts_per_tok": 3}),
    "olmoe_all": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True}),
}
"""transformers' class prefix, and what differs from COMMON."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma3")
EXPERT_FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss")


def hf_model(variant: str, seed: int = 1, **changes: Any) -> Any:
    """Return a random transformers model on the CPU in float32; norms and biases are random too."""
    import transformers

    kind, sizes = VARIANTS[variant]
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**{**COMMON, **sizes, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, 0.0 if "Gemma" in kind else 1.0, 0.2)
        elif kind == "GptOss" and name.endswith("gate_up_proj"):
            torch.nn.init.normal_(parameter, 0.0, 0.6)  # some gates and ups are clamped
        elif name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.generation_config.eos_token_id = None
    return model


def save(model: Any, folder: Path, dtype: str = "float32", max_shard_size: str = "50GB") -> Path:
    """Save as safetensors and return the folder."""
    target = getattr(torch, dtype)
    model.to(target).save_pretrained(folder, max_shard_size=max_shard_size)
    model.float()
    return folder


def hf_greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return transformers' greedy continuation, which ignores ends of sequences."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def greedy_of_transformers(
    folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Return what transformers answers with the checkpoint of a folder, as it reads it."""
    content = tuple(sorted((file, file.stat().st_mtime_ns) for file in folder.iterdir()))
    return _greedy_of_folder(folder, content, tuple(map(tuple, prompts)), max_tokens)


@cache
def _greedy_of_folder(
    folder: Path, _content: object, prompts: tuple[tuple[int, ...], ...], max_tokens: int
) -> list[list[int]]:
    """Compute them once for what the folder holds: many tests ask for the same."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [hf_greedy(model, prompt, max_tokens) for prompt in prompts]


def make_prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Return random token ids, another list for each length and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def make_config(folder: Path | str, **keywords: Any) -> EngineConfig:
    """Return the configuration of a small engine."""
    given: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "gpu_memory_gib": 0.125,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "host_reserve_gib": 0.0,
        **keywords,
    }
    if given["device"] == "cuda" and "gpu_memory_gib" not in keywords:
        given["gpu_memory_gib"] = 4.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        return config_from_keywords(str(folder), given)


def open_llm(folder: Path | str, *, reference: bool = False, **keywords: Any) -> LLM:
    """Build a small engine; notes about offload are not warned of."""
    config = make_config(folder, **keywords)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        return LLM.from_config(config, reference=reference)


def unchecked(**changes: Any) -> SamplingParams:
    """Params with values that construction refuses: they were set later."""
    params = SamplingParams(temperature=0)
    for name, value in changes.items():
        setattr(params, name, value)
    return params


def greedy_params(max_tokens: int, **changes: Any) -> SamplingParams:
    """Return greedy sampling of exactly `max_tokens` tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)


def greedy(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return the greedy tokens of prompts that run together."""
    params = greedy_params(max_tokens)
    return tokens_of(llm.generate([list(p) for p in prompts], params))


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Return each request's first answer in tokens; raise if a request failed."""
    for output in outputs:
        if output.error is not None:
            raise EngineError(output.error)
    return [output.outputs[0].token_ids for output in outputs]


def write_config(folder: Path, **changes: Any) -> None:
    """Change keys of a folder's config.json; None removes a key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def add_tokenizer(folder: Path) -> None:
    """Save a tokenizer of 151 tokens: printable characters, some pairs, two special tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)]
    pairs = [(a, b) for a in "aehnorst" for b in "eghinort"]
    merges = pairs[: VOCAB - 2 - len(characters)]
    words = ["<s>", "</s>", *characters, *(a + b for a, b in merges)]
    assert len(words) == VOCAB
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
