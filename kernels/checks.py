"""Argument checks of the operators: comparisons of shape, dtype, device and stride, nothing else.

No check reads a tensor's values, so none waits for the device.
"""

import torch

from kernels.sizes import decode_num_splits
from kernels.workspace import DecodeWorkspace

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


def _check_shape(name: str, x: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    agrees = len(x.shape) == len(shape) and all(
        want is None or want == have for want, have in zip(shape, x.shape, strict=True)
    )
    if not agrees:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelArgumentError(name, f"shape ({wanted})", f"shape {tuple(x.shape)}")
