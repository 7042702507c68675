"""Argument checks of the operators: comparisons of shape, dtype, device and stride, nothing else.

No check reads a tensor's values, so none waits for the device.
"""

import torch

from kernels.host_cache import HostCache
from kernels.sizes import (
    MAX_SMALL_TOKENS,
    PREFILL_PART_KEYS,
    decode_num_splits,
    prefill_partial_rows,
)
from kernels.workspace import DecodeWorkspace, PrefillState, PrefillWorkspace

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that every operator accepts."""


class KernelArgumentError(ValueError):
    """An operator was called with an argument that it cannot take.

    Attributes:
        what: the operator's argument, as "operator.argument".
        expected: the rule that the argument breaks.
        got: what the caller passed.
    """

    def __init__(self, what: str, expected: str, got: str) -> None:
        operator = what.partition(".")[0]
        super().__init__(
            f"{what}: expected {expected}, got {got}. Pass what kernels.ops.{operator} documents."
        )
        self.what = what
        self.expected = expected
        self.got = got


def check_tensor(
    name: str,
    x: torch.Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    last_contiguous: bool = True,
) -> None:
    """Raise unless a tensor has this shape, dtype and device.

    Args:
        name: the argument's name for the message, as "operator.argument".
        x: the tensor.
        shape: one entry a dimension; None stands for any length.
        dtype: the element type.
        device: where the tensor must lie.
        last_contiguous: also ask for stride 1 in the last dimension.

    Raises:
        KernelArgumentError: naming the first rule that the tensor breaks.
    """
    if x.shape != shape:
        _check_shape(name, x, shape)
    if x.dtype != dtype:
        raise KernelArgumentError(name, str(dtype), str(x.dtype))
    if x.device != device:
        raise KernelArgumentError(name, f"a tensor on {device}", f"one on {x.device}")
    if last_contiguous and shape and x.stride(-1) != 1 and x.shape[-1] > 1:
        raise KernelArgumentError(
            name, "stride 1 in the last dimension", f"strides {tuple(x.stride())}"
        )


def check_float(name: str, x: torch.Tensor) -> None:
    """Raise unless a tensor holds one of the float types of the operators.

    Args:
        name: the argument's name for the message, as "operator.argument".
        x: the tensor.

    Raises:
        KernelArgumentError: if the dtype is another one.
    """
    if x.dtype not in FLOAT_DTYPES:
        raise KernelArgumentError(name, "float32, bfloat16 or float16", str(x.dtype))


def check_dims(name: str, x: torch.Tensor, dims: str) -> None:
    """Raise unless a tensor has as many dimensions as there are shape letters.

    Args:
        name: the argument's name for the message, as "operator.argument".
        x: the tensor.
        dims: one shape letter a dimension, for example "TNH".

    Raises:
        KernelArgumentError: if the number of dimensions differs.
    """
    if x.dim() != len(dims):
        raise KernelArgumentError(name, f"shape [{', '.join(dims)}]", f"shape {tuple(x.shape)}")


def check_attention(
    name: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables_SM: torch.Tensor,
    seq_lens_S: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    """Raise unless the arguments that both paged attentions share agree with each other.

    Args:
        name: the operator's name.
        q: [T, N, H].
        k_cache: [B, K, P, H].
        v_cache: [B, K, P, H].
        block_tables_SM: [S, M] int32.
        seq_lens_S: [S] int32.
        out: [T, N, H] or None.

    Raises:
        KernelArgumentError: naming the first argument that does not fit.
    """
    q_shape, cache_shape = q.shape, k_cache.shape
    if len(q_shape) != 3 or len(cache_shape) != 4 or block_tables_SM.dim() != 2:
        check_dims(f"{name}.q", q, "TNH")
        check_dims(f"{name}.k_cache", k_cache, "BKPH")
        check_dims(f"{name}.block_tables", block_tables_SM, "SM")
    check_float(f"{name}.q", q)
    num_blocks, num_kv_heads, tokens_per_block, _ = cache_shape
    num_heads, head_size = q_shape[1:]
    dtype, device = q.dtype, q.device
    if not 16 <= head_size <= 256:
        raise KernelArgumentError(f"{name}.q", "a head size (H) of 16 to 256", f"{head_size}")
    if num_heads % num_kv_heads:
        expected = f"a multiple of {num_kv_heads} query heads (N), the cache's KV heads"
        raise KernelArgumentError(f"{name}.q", expected, f"{num_heads}")
    # Shapes are given in full where they can be: comparing with None costs a loop.
    num_seqs, table_width = block_tables_SM.shape
    expected_cache = (num_blocks, num_kv_heads, tokens_per_block, head_size)
    check_tensor(f"{name}.q", q, q_shape, dtype, device)
    check_tensor(f"{name}.k_cache", k_cache, expected_cache, dtype, device)
    check_tensor(f"{name}.v_cache", v_cache, cache_shape, dtype, device)
    tables_shape = (num_seqs, table_width)
    check_tensor(f"{name}.block_tables", block_tables_SM, tables_shape, torch.int32, device)
    check_tensor(f"{name}.seq_lens", seq_lens_S, (num_seqs,), torch.int32, device)
    if out is not None:
        check_tensor(f"{name}.out", out, q_shape, dtype, device)


def check_host(what: str, host: HostCache, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raise unless blocks beside a cache are like the cache's own.

    Args:
        what: the argument's name for the message, as "operator.argument".
        host: the blocks beside it.
        k_cache: [B, K, P, H].
        v_cache: [B, K, P, H].

    Raises:
        KernelArgumentError: if sizes, dtype, device or the strides within a block differ.
    """
    shape = (host.k.shape[0], *k_cache.shape[1:])
    for part, blocks, cache in (("k", host.k, k_cache), ("v", host.v, v_cache)):
        check_tensor(f"{what}.{part}", blocks, shape, cache.dtype, cache.device)
        if blocks.stride()[1:] != cache.stride()[1:]:
            expected = f"the strides of the cache within a block, {cache.stride()[1:]}"
            raise KernelArgumentError(f"{what}.{part}", expected, f"{blocks.stride()[1:]}")


def check_window(name: str, window: int | None) -> None:
    """Raise unless a window of attention is None or holds a token at least.

    Args:
        name: the operator's name.
        window: tokens, or None.

    Raises:
        KernelArgumentError: if it is below 1.
    """
    if window is not None and window < 1:
        raise KernelArgumentError(f"{name}.window", "None or at least 1 token", f"{window}")


def check_workspace(
    name: str, q_SNH: torch.Tensor, workspace: DecodeWorkspace, max_seq_len: int
) -> None:
    """Raise unless a workspace of decode attention has room for a call.

    Args:
        name: the operator's name.
        q_SNH: the call's queries.
        workspace: the scratch tensors.
        max_seq_len: the call's bound on sequence lengths, in tokens.

    Raises:
        KernelArgumentError: if there are too few sequences or splits, or other heads.
    """
    num_seqs, num_heads, head_size = q_SNH.shape
    partial = workspace.partial
    splits = decode_num_splits(max_seq_len)
    fits = partial.shape[0] >= num_seqs and partial.shape[2] >= splits
    if not fits or (partial.shape[1], partial.shape[3]) != (num_heads, head_size):
        expected = f"room for {num_seqs} x {num_heads} heads x {splits} splits x {head_size}"
        raise KernelArgumentError(f"{name}.workspace", expected, f"{tuple(partial.shape)}")
    if partial.device != q_SNH.device:
        expected = f"tensors on {q_SNH.device}"
        raise KernelArgumentError(f"{name}.workspace", expected, f"{partial.device}")


def check_prefill_workspace(name: str, q_TNH: torch.Tensor, workspace: PrefillWorkspace) -> None:
    """Raise unless a workspace of prefill attention has room for a call.

    Args:
        name: the operator's name.
        q_TNH: the call's queries.
        workspace: the scratch tensors.

    Raises:
        KernelArgumentError: if there are too few rows, or they have another size.
    """
    what, partial = f"{name}.workspace", workspace.partial
    num_tokens, num_heads, size = q_TNH.shape
    rows = prefill_partial_rows(num_tokens, num_heads, size, workspace.max_seq_len)
    if partial.shape[0] < rows or partial.shape[1] != size:
        raise KernelArgumentError(what, f"room for {rows} x {size}", f"{tuple(partial.shape)}")
    if partial.device != q_TNH.device:
        raise KernelArgumentError(what, f"tensors on {q_TNH.device}", f"{partial.device}")


def check_part(
    name: str,
    q_TNH: torch.Tensor,
    state: PrefillState,
    begin_key: int,
    end_key: int,
    *,
    is_last: bool,
) -> None:
    """Raise unless a part of a prefill's keys is made of whole tiles and the state has room.

    Args:
        name: the operator's name.
        q_TNH: the call's queries.
        state: what is kept between parts.
        begin_key: the part's first key.
        end_key: the key after its last one.
        is_last: whether the part ends where the keys do.

    Raises:
        KernelArgumentError: naming what does not fit.
    """
    if begin_key < 0 or begin_key % PREFILL_PART_KEYS:
        expected = f"a multiple of {PREFILL_PART_KEYS}"
        raise KernelArgumentError(f"{name}.begin_key", expected, f"{begin_key}")
    if end_key <= begin_key:
        raise KernelArgumentError(f"{name}.end_key", f"more than {begin_key}", f"{end_key}")
    if end_key % PREFILL_PART_KEYS and not is_last:
        expected = f"a multiple of {PREFILL_PART_KEYS} in all parts but the last"
        raise KernelArgumentError(f"{name}.end_key", expected, f"{end_key}")
    num_tokens, num_heads, head_size = q_TNH.shape
    have = state.acc.shape
    if have[0] < num_tokens or have[1:] != (num_heads, head_size):
        expected = f"room for {num_tokens} queries x {num_heads} heads x {head_size}"
        raise KernelArgumentError(f"{name}.state", expected, f"{tuple(have)}")
    if state.acc.device != q_TNH.device:
        expected = f"tensors on {q_TNH.device}"
        raise KernelArgumentError(f"{name}.state", expected, f"{state.acc.device}")


def check_gate_up(name: str, gate_up_T2F: torch.Tensor) -> None:
    """Raise unless a tensor can be split into gates and ups.

    Args:
        name: the operator's name.
        gate_up_T2F: [T, 2F].

    Raises:
        KernelArgumentError: naming what does not fit.
    """
    what = f"{name}.gate_up"
    check_float(what, gate_up_T2F)
    check_dims(what, gate_up_T2F, "TF")
    num_tokens, width = gate_up_T2F.shape
    if width % 2:
        raise KernelArgumentError(what, "an even number of columns", f"{width}")
    check_tensor(what, gate_up_T2F, (num_tokens, width), gate_up_T2F.dtype, gate_up_T2F.device)


def check_linear(
    name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise unless the arguments of a product agree with each other.

    Args:
        name: the operator's name.
        x: [..., in].
        weight: [out, in].
        bias: [out] or None.

    Raises:
        KernelArgumentError: naming the first argument that does not fit.
    """
    check_float(f"{name}.x", x)
    if x.dim() == 0:
        raise KernelArgumentError(f"{name}.x", "one dimension or more", "none")
    shape = (None, x.shape[-1])
    check_tensor(f"{name}.weight", weight, shape, x.dtype, x.device, last_contiguous=False)
    if bias is not None:
        check_tensor(f"{name}.bias", bias, (weight.shape[0],), x.dtype, x.device)


def is_small_product(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Tell whether a product runs in the kernel for few tokens.

    Args:
        x: [..., in].
        weight: [out, in].
    """
    if not x.is_cuda or x.dtype == torch.float32 or weight.numel() == 0:
        return False
    num_tokens = x.numel() // x.shape[-1]
    return 0 < num_tokens <= MAX_SMALL_TOKENS and x.stride(-1) == weight.stride(-1) == 1


def check_rotary_write_kv(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Raise unless the arguments of rotary_write_kv_ agree with each other.

    Args:
        q_TNH: queries.
        k_TKH: keys.
        v_TKH: values.
        q_weight: of the queries' norm, or None.
        k_weight: of the keys' norm, or None.
        cos_sin: [max_positions, R].
        positions: [T].
        k_cache: [B, K, P, H].
        v_cache: [B, K, P, H].
        slots: [T].

    Raises:
        KernelArgumentError: naming the first argument that does not fit.
    """
    name = "rotary_write_kv_"
    check_float(f"{name}.q", q_TNH)
    check_dims(f"{name}.q", q_TNH, "TNH")
    check_dims(f"{name}.k", k_TKH, "TKH")
    num_tokens, num_q_heads, head_size = q_TNH.shape
    num_k_heads = k_TKH.shape[1]
    dtype, device = q_TNH.dtype, q_TNH.device
    kv_shape = (num_tokens, num_k_heads, head_size)
    check_tensor(f"{name}.q", q_TNH, q_TNH.shape, dtype, device)
    check_tensor(f"{name}.k", k_TKH, kv_shape, dtype, device)
    check_tensor(f"{name}.v", v_TKH, kv_shape, dtype, device)
    check_tensor(f"{name}.cos_sin", cos_sin, (None, None), torch.float32, device)
    check_tensor(f"{name}.positions", positions, (num_tokens,), torch.int64, device)
    check_tensor(f"{name}.slots", slots, (num_tokens,), torch.int64, device)
    cache_shape = (None, num_k_heads, None, head_size)
    check_tensor(f"{name}.k_cache", k_cache, cache_shape, dtype, device)
    check_tensor(f"{name}.v_cache", v_cache, k_cache.shape, dtype, device)
    rotated = cos_sin.shape[1]
    if rotated % 2 or not 0 < rotated <= head_size:
        expected = f"an even number of columns, 2 to {head_size} (H)"
        raise KernelArgumentError(f"{name}.cos_sin", expected, f"{rotated}")
    if (q_weight is None) != (k_weight is None):
        got = "q_weight alone" if k_weight is None else "k_weight alone"
        raise KernelArgumentError(f"{name}.k_weight", "both weights or neither", got)
    if q_weight is not None and k_weight is not None:
        is_head = q_weight.shape == (head_size,)
        q_size = head_size if is_head else num_q_heads * head_size
        k_size = head_size if is_head else num_k_heads * head_size
        check_tensor(f"{name}.q_weight", q_weight, (q_size,), dtype, device)
        check_tensor(f"{name}.k_weight", k_weight, (k_size,), dtype, device)


def _check_shape(name: str, x: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    agrees = len(x.shape) == len(shape) and all(
        want is None or want == have for want, have in zip(shape, x.shape, strict=True)
    )
    if not agrees:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelArgumentError(name, f"shape ({wanted})", f"shape {tuple(x.shape)}")
