"""Mixtures of experts: which experts a token goes to, their products, and the weighted sum.

A matrix of experts has the rows of one expert after those of the other. Where it is whole, an
expert's number says where its rows are; where it is a bank of slots, the number of its slot does.
Shape letters: T tokens, k experts of each, E experts, S slots, D hidden, F feed-forward.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kernels.arguments import Codes, Quantised
from kernels.expert_arguments import ExpertCache
from kernels.ops import codes, quantised
from kernels.ops.checks import KernelArgumentError, check_dims, check_float, check_tensor
from kernels.ref import experts as ref
from kernels.sizes import MAX_SMALL_TOKENS, restored_experts

# Triton and the CUDA kernels are imported by the first call on a GPU.
# ruff: noqa: PLC0415

Biases = tuple[torch.Tensor, torch.Tensor]
"""Of the products with w13 and with w2."""


def route(
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    renormalise: bool,
    rounds: bool,
    rows_T: torch.Tensor | None = None,
    chosen_Tk: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their weights.

    They are those with the largest softmax, computed in float32, the largest first; of equal ones
    the lower number.

    Args:
        logits_TE: the router's product.
        top_k: experts of a token, 1 to E.
        renormalise: divide the weights of a token by their sum.
        rounds: round weights to the dtype of the logits.
        rows_T: int64; a token with a negative entry is padding: its experts are -1, its weights 0.
        chosen_Tk: int32 [T, top_k], 0 to E - 1, no two of a token the same: the experts, in place
            of those with the largest softmax; weights are those of the logits at them.

    Returns:
        int32 [T, top_k] and float32 [T, top_k].
    """
    check_float("route.logits", logits_TE)
    check_dims("route.logits", logits_TE, "TE")
    num_tokens, num_experts = logits_TE.shape
    if not 1 <= top_k <= num_experts:
        raise KernelArgumentError("route.top_k", f"1 to {num_experts}", f"{top_k}")
    device = logits_TE.device
    if rows_T is not None:
        check_tensor("route.rows", rows_T, (num_tokens,), torch.int64, device)
    if chosen_Tk is not None:
        check_tensor("route.chosen", chosen_Tk, (num_tokens, top_k), torch.int32, device)
    run = ref.route
    if logits_TE.is_cuda:
        from kernels.triton import experts

        run = experts.route
    return run(
        logits_TE,
        top_k,
        renormalise=renormalise,
        rounds=rounds,
        rows_T=rows_T,
        chosen_Tk=chosen_Tk,
    )


def experts_products(
    x_TD: torch.Tensor,
    w13: ref.Weight,
    w2: ref.Weight,
    slots_Tk: torch.Tensor,
    out_TkD: torch.Tensor,
    *,
    is_gelu: bool = False,
    biases: Biases | None = None,
    clamp: tuple[float, float] | None = None,
    arriving: ExpertCache | None = None,
) -> None:
    """Write what each expert of each token makes of it: act(x @ gate.T) * (x @ up.T) @ down.T.

    Gate, up and what is between the products are rounded as those of a dense layer. The result of
    a token and an expert depends on neither the other tokens, nor the other experts, nor where the
    expert lies.

    Args:
        x_TD: stride 1 in the last dimension.
        w13: of S blocks of F rows of gate and F of up, D columns; a plain matrix, Quantised or
            Codes. On a GPU also over pinned host memory, of which only what is routed to is read.
        w2: of S blocks of D rows, F columns.
        slots_Tk: int32 [T, k], 0 to S - 1: the block of each expert, no two of a token the same;
            -1: nothing is written.
        out_TkD: [T, k, D], dtype of x, contiguous; written.
        is_gelu: the activation is gelu, approximated by tanh, and not silu.
        biases: of the products with w13 and with w2, one value for each of their rows, dtype of x,
            contiguous. None: there are none.
        clamp: limit and alpha: in place of act(gate) * up it is gate * sigmoid(alpha * gate) *
            (up + 1), with gate at most limit and up from -limit to limit. None: it is not.
        arriving: the cache in whose bank the matrices are, where its gather was the last that was
            enqueued, and the claim before it made slots_Tk: products with what was there already
            may run while missing experts are copied. None: nothing is being copied.
    """
    check_float("experts_products.x", x_TD)
    check_dims("experts_products.x", x_TD, "TD")
    (num_tokens, hidden_size), device = x_TD.shape, x_TD.device
    check_tensor("experts_products.x", x_TD, (num_tokens, hidden_size), x_TD.dtype, device)
    check_dims("experts_products.slots", slots_Tk, "Tk")
    slots_shape = num_tokens, slots_Tk.shape[1]
    check_tensor("experts_products.slots", slots_Tk, slots_shape, torch.int32, device)
    out_shape = (*slots_shape, hidden_size)
    check_tensor("experts_products.out", out_TkD, out_shape, x_TD.dtype, device)
    _check_weights(x_TD, w13, w2)
    for bias, weight in zip(biases or (), (w13, w2), strict=False):
        check_tensor("experts_products.biases", bias, weight.shape[:1], x_TD.dtype, device)
    if not slots_Tk.numel():
        return
    if not slots_Tk.is_contiguous():
        slots_Tk, arriving = slots_Tk.contiguous(), None
    operands = x_TD, w13, w2, slots_Tk, out_TkD
    if not x_TD.is_cuda:
        ref.experts_products(*operands, is_gelu=is_gelu, biases=biases, clamp=clamp)
        return
    from kernels.cuda import experts as cuda
    from kernels.triton.experts import Gate

    ffn = w2.shape[1]
    if biases is not None or clamp is not None or not cuda.can_run(x_TD, w13, w2, ffn):
        _products_in_parts(*operands, biases, Gate(is_gelu, clamp))
        return
    hidden, out = x_TD.new_empty((slots_Tk.numel(), ffn)), out_TkD.view(-1, hidden_size)
    tokens = cuda.aligned(x_TD)
    if tokens is not x_TD:  # the copies are no longer what was enqueued last
        arriving = None
    cuda.product(tokens, w13, slots_Tk, hidden, is_gated=True, is_gelu=is_gelu, arriving=arriving)
    cuda.product(hidden, w2, slots_Tk, out, is_gated=False, arriving=arriving)


def experts_sum(
    products_TkD: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    shared_TD: torch.Tensor | None = None,
    shared_logits_T1: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's products, in the order of its experts, in float32.

    Args:
        products_TkD: of experts_products, contiguous.
        weights_Tk: float32.
        ids_Tk: int32; a product whose entry is negative is not read and counts as 0.
        shared_TD: what an expert that runs for every token made, dtype of the products, contiguous;
            it is added last. None: there is none.
        shared_logits_T1: [T, 1], dtype of the products; its sigmoid multiplies `shared`. None where
            that is None.

    Returns:
        A new tensor [T, D], dtype of the products.
    """
    check_float("experts_sum.products", products_TkD)
    check_dims("experts_sum.products", products_TkD, "TkD")
    num_tokens, top_k, hidden = products_TkD.shape
    dtype, device = products_TkD.dtype, products_TkD.device
    check_tensor("experts_sum.weights", weights_Tk, (num_tokens, top_k), torch.float32, device)
    check_tensor("experts_sum.ids", ids_Tk, (num_tokens, top_k), torch.int32, device)
    if (shared_TD is None) != (shared_logits_T1 is None):
        raise KernelArgumentError("experts_sum.shared", "logits beside it", "one of the two")
    if shared_TD is not None and shared_logits_T1 is not None:
        check_tensor("experts_sum.shared", shared_TD, (num_tokens, hidden), dtype, device)
        check_tensor("experts_sum.shared_logits", shared_logits_T1, (num_tokens, 1), dtype, device)
    args = products_TkD, weights_Tk, ids_Tk, shared_TD, shared_logits_T1
    if products_TkD.is_cuda:
        from kernels.triton import experts

        return experts.experts_sum(*args)
    return ref.experts_sum(*args)


def _products_in_parts(
    x_TD: torch.Tensor,
    w13: ref.Weight,
    w2: ref.Weight,
    slots_Tk: torch.Tensor,
    out_TkD: torch.Tensor,
    biases: Biases | None,
    gate: Any,
) -> None:
    """Run both products with kernels of Triton: some experts are restored, and then multiplied.

    There is at least one pair; `gate` is a Gate of kernels.triton.experts. Parts have no influence
    on the result.
    """
    from kernels.triton import experts as triton

    (num_tokens, top_k), ffn = slots_Tk.shape, w2.shape[1]
    num_slots = w13.shape[0] // (2 * ffn)
    hidden = x_TD.new_empty((num_tokens * top_k, ffn))
    out = out_TkD.view(num_tokens * top_k, -1)
    bias13, bias2 = biases or (None, None)
    pairs = None
    if num_tokens > MAX_SMALL_TOKENS:
        pairs = triton.sort_pairs(slots_Tk, num_slots, x_TD.dtype)
    _product(x_TD, w13, slots_Tk, pairs, hidden, bias13, gate)
    _product(hidden, w2, slots_Tk, pairs, out, bias2)


def _product(
    x: torch.Tensor,
    weight: ref.Weight,
    slots_Tk: torch.Tensor,
    pairs: Any,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    gate: Any = None,
) -> None:
    """Run a product whose arguments are those of kernels.triton.experts; few tokens: no pairs."""
    from kernels.triton import experts, quantised_experts

    if isinstance(weight, Quantised) and pairs is None:
        quantised_experts.few(x, weight, slots_Tk, out, bias, gate)
        return
    if isinstance(weight, Quantised) and bias is not None:
        quantised_experts.many(x, weight, pairs, out, bias, gate)
        return
    num_slots = weight.shape[0] // (out.shape[1] if gate is None else 2 * out.shape[1])
    for first, part, own in _restored_parts(weight, num_slots, bias):
        if pairs is None:
            experts.few(x, part, slots_Tk, out, own, gate, first)
        else:
            experts.many(x, part, pairs, out, own, gate, first)


def _restored_parts(
    weight: ref.Weight, num_slots: int, bias: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """Yield plain matrices of some experts each, all in one place, with their first slots.

    What reads one must be enqueued before the next is asked for. A plain matrix is yielded whole.

    Args:
        weight: of experts.
        num_slots: blocks of rows of it.
        bias: a value for each of its rows, whose part is yielded too; None: there is none.
    """
    if isinstance(weight, torch.Tensor):
        yield 0, weight, bias
        return
    rows = weight.shape[0] // num_slots
    scratch = weight.scratch
    if scratch is None:
        dtype = _dtype_of(weight)
        count = restored_experts(num_slots, rows, weight.shape[1], dtype.itemsize)
        shape = count * rows, weight.shape[1]
        scratch = torch.empty(shape, dtype=dtype, device=_device_of(weight))
    for start, part in _parts_of(weight, scratch.shape[0]):
        out = scratch[: part.shape[0]]
        if isinstance(part, Codes):
            codes.restore(part, out)
        else:
            quantised.restore(part, out)
        yield start // rows, out, None if bias is None else bias[start : start + part.shape[0]]


def _parts_of(weight: Codes | Quantised, size: int) -> list[tuple[int, Codes | Quantised]]:
    """Return what is restored together of a matrix, `size` rows each, with their first rows.

    Made once for a matrix and size, as are the arguments of launches.
    """
    key = f"parts of {size}"
    found: list[tuple[int, Codes | Quantised]] | None = weight.launches.get(key)
    if found is None:
        total = weight.shape[0]
        found = weight.launches[key] = [
            (start, weight.rows(start, min(start + size, total))) for start in range(0, total, size)
        ]
    return found


def _check_weights(x_TD: torch.Tensor, w13: ref.Weight, w2: ref.Weight) -> None:
    """Raise unless two matrices of experts agree with each other and with tokens."""
    hidden = x_TD.shape[1]
    (rows, columns), (down_rows, ffn) = w13.shape, w2.shape
    if columns != hidden:
        raise KernelArgumentError("experts_products.w13", f"{hidden} columns", f"{columns}")
    if rows % (2 * ffn) or down_rows % hidden or rows // (2 * ffn) != down_rows // hidden:
        raise KernelArgumentError(
            "experts_products.w2",
            f"as many blocks of {hidden} rows as w13 has of {2 * ffn}, the columns of w2 twice",
            f"shapes {tuple(w13.shape)} and {tuple(w2.shape)}",
        )
    for name, weight in (("w13", w13), ("w2", w2)):
        dtype, device = _dtype_of(weight), _device_of(weight)
        if (dtype, device) != (x_TD.dtype, x_TD.device):
            expected, got = f"{x_TD.dtype} on {x_TD.device}", f"{dtype} on {device}"
            raise KernelArgumentError(f"experts_products.{name}", expected, got)


def _dtype_of(weight: ref.Weight) -> torch.dtype:
    return torch.bfloat16 if isinstance(weight, Codes) else weight.dtype


def _device_of(weight: ref.Weight) -> torch.device:
    if isinstance(weight, Codes):
        return weight.bytes.device
    return weight.values.device if isinstance(weight, Quantised) else weight.device
