"""Types of the keywords of LLM, for type checkers and editors. Made by engine/asked/keywords.py."""

from typing import Any, TypedDict

from engine.asked.kv import KVTransferConfig
from engine.asked.offload import OffloadConfig
from engine.model.spec import ModelSpec


class Keywords(TypedDict, total=False):
    """Every keyword of LLM but the model; each may be left out."""

    auto_fields: list[str]
    """Settings to choose: cpu_offload_gb (the least that fits), max_model_len and max_num_seqs
    (the largest that fit, at most the value set)."""
    bf16_tflops: float | None
    """Dense bf16 matrix rate, TFLOP/s; for a card without bf16, that of float16."""
    block_size: int
    """Tokens in a block: 8, 16, 32, 64 or 128."""
    choose: bool
    """Choose the placement of every tensor by predicted times."""
    compute_capability: float | None
    """Compute capability of a planned card that is not in this machine; below 8.0, weights are
    planned in float16. None: 8.0 or more."""
    cpu_gib: float | None
    """Size of the host tier, GiB; 0: no host tier."""
    cpu_offload_gb: float
    """GiB of weights per GPU that live in host memory; 0 turns it off."""
    cpu_offload_params: list[str]
    """Selectors of whole dotted segments of parameter names; empty selects every decoder
    layer."""
    device: str
    """auto (CUDA if there is one, else the CPU) | cuda | cpu."""
    disable_sliding_window: bool
    """Attend to the whole context even if the checkpoint has a sliding window."""
    dtype: str
    """auto (the checkpoint's on a GPU, float32 on a CPU) | bfloat16 | float16 | float32."""
    emulated_kv_tokens: int | None
    """Most tokens of KV on an emulated GPU, whose memory is RAM; None: what the budget
    leaves."""
    enable_prefix_caching: bool
    """Keep full blocks by their content, and share blocks of equal prefixes."""
    enforce_eager: bool
    """Run decode without CUDA graphs."""
    expert_slots: int | None
    """Slots of each layer's bank; None: as many as fit beside the KV cache of one sequence of
    max_model_len."""
    experts_first: bool
    """Take the experts of all layers before anything else: a step reads a few of them, and all
    of the rest."""
    facts_folder: str | None
    """Folder in which a load notes which tensors of a checkpoint codes cannot hold, so that the
    next plan knows; None: nothing is noted."""
    gpu_memory_gib: float | None
    """Memory of the card as nvidia-smi shows it, GiB; the budget is this times
    gpu_memory_utilization. None: the memory of this card (CPU: half of the free host
    memory)."""
    gpu_memory_utilization: float
    """Share of the GPU's memory that the engine may use, (0, 1]."""
    gpu_name: str
    """Name of the card in reports."""
    hbm_gb_s: float | None
    """GPU memory bandwidth, GB/s."""
    host_gib: float | None
    """Memory of the card's host, GiB; the plan uses at most this. None: the free memory of this
    host, or no limit when planning for a card that is not in this machine."""
    host_reserve_gib: float
    """Host memory that must stay free after the load, GiB."""
    keep_lossless: bool
    """Keep what a load packs (weight_format) in TIGHTFIT_HOME/lossless, at 0.75 of its size;
    later loads read that."""
    kept_folder: str | None
    """Folder of weights that were packed before (keep_lossless); None: none are kept or
    read."""
    kv_tokens: int | None
    """KV tokens that the chosen placement must leave memory for; None: one sequence of
    max_model_len."""
    link_gb_s: float | None
    """Host link, one direction, GB/s (10^9)."""
    load_format: str
    """auto (safetensors) | safetensors | dummy (random weights of the exact shape, no
    download)."""
    max_model_len: int | None
    """Longest prompt plus output, tokens; None: the model's own limit, cut to what fits but to
    no less than 8192."""
    max_num_batched_tokens: int
    """Tokens of one step."""
    max_num_seqs: int
    """Sequences that run at once."""
    measured_rates: dict[str, float | None]
    """Rates that a probe found on this machine, for predicted times; empty: unknown."""
    model_name: str
    """Short name."""
    num_cpu_blocks: int | None
    """Blocks of the host tier; 0: no host tier."""
    objective: str
    """latency (one sequence) | throughput (a queue of 200 requests) | context (the longest
    sequence)."""
    offload_backend: str
    """auto | uva | prefetch | experts. auto takes prefetch if group_size > 0, else uva if gb >
    0, else experts if expert_slots is set."""
    offload_group_size: int
    """Layers in a group; 0 turns prefetch off."""
    offload_num_in_group: int
    """How many of each group, its last ones, live in host memory."""
    offload_params: list[str]
    """Selectors of whole dotted segments of parameter names; empty selects whole layers."""
    offload_prefetch_step: int
    """How many offloaded layers ahead the copies run."""
    pin_limit_gib: float | None
    """Limit of pinned memory for KV blocks, GiB; further blocks are pageable and are only
    copied, never read in place. None: all are pinned."""
    quantize: str | None
    """int8 | int4: round plain weights to integers at the load (to the nearest, groups of 128);
    embedding and head stay plain, and tokens differ from those of the checkpoint. None: weights
    stay as they are."""
    record_routing: bool
    """Keep the experts of every token that runs, in host memory (2 bytes a layer and expert),
    for LLM.routing_trace."""
    referee: bool
    """Build the two best candidates, time a few steps of each and keep the faster one."""
    request_tokens: int | None
    """Prompt and output tokens of the longest request that is known beforehand: no length that
    is advised, or taken where none is set, is shorter. None: none is known."""
    routing: str | None
    """Experts of dummy weights: dummy (None; what a random router chooses, without locality) |
    trace:FILE (as recorded) | synthetic:REUSE (a share of picks, 0 to 1, repeats an expert of
    the last 8 tokens)."""
    seed: int
    """Seed of dummy weights and of requests without a seed."""
    spec: ModelSpec | None
    """Sizes; None: read from config.json in `path`."""
    swap_space: float
    """Host memory, GiB. If no offload is set, weights that do not fit the GPU use it first; KV
    blocks take the rest."""
    uva_stage_tokens: int | None
    """From this many tokens in a step on, uva weights are staged through GPU slots first. None:
    where reading in place takes 15 % longer than copying, by the rates of the card and of
    formats. That is 65 for 16-bit weights on an H200, and 1 for weights of 4 bits, which
    products read slower in place (docs/quantised.md). 1 stages every step, so nothing is read
    in place, as with offload_backend=prefetch."""
    weight_format: str | None
    """checkpoint (weights as they are stored) | lossless (every bfloat16 matrix that takes less
    in 12-bit codes, restored to the bit) | auto (whichever is predicted to be better, or some
    of both). None: checkpoint, or auto where the planner chooses placements (choose=True) of
    weights that are not rounded (quantize)."""
    offload_config: OffloadConfig | dict[str, Any] | None
    """An OffloadConfig or a dict of its fields, in the place of single ones."""
    kv_transfer_config: KVTransferConfig | dict[str, Any] | None
    """A KVTransferConfig or a dict of its fields, which sizes the host tier of KV blocks in the
    place of num_cpu_blocks, cpu_gib and swap_space."""
    tensor_parallel_size: int
    """1: several GPUs are not available yet."""
