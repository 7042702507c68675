"""Twins of operators of mixtures of experts."""

from functools import partial

import torch

from kernels.arguments import Codes, Quantised
from kernels.ref import codes, linear, quantised

Weight = torch.Tensor | Quantised | Codes
"""A matrix of experts: plain, quantised or in codes."""


def route(
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    renormalise: bool,
    rounds: bool,
    rows_T: torch.Tensor | None = None,
    chosen_Tk: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of kernels.ops.experts.route."""
    shares = logits_TE.float().softmax(-1)
    if chosen_Tk is None:
        ids = shares.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    else:
        ids = chosen_Tk.long()
    weights = shares.gather(-1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if rounds:
        weights = weights.to(logits_TE.dtype).float()
    if rows_T is not None:
        is_padding = (rows_T < 0).unsqueeze(1)
        ids, weights = ids.masked_fill(is_padding, -1), weights.masked_fill(is_padding, 0)
    return ids.int(), weights


def experts_products(
    x_TD: torch.Tensor,
    w13: Weight,
    w2: Weight,
    slots_Tk: torch.Tensor,
    out_TkD: torch.Tensor,
    *,
    is_gelu: bool = False,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    clamp: tuple[float, float] | None = None,
) -> None:
    """Twin of kernels.ops.experts.experts_products."""
    rows, down_rows, top_k = 2 * w2.shape[1], x_TD.shape[1], slots_Tk.shape[1]
    slots, out = slots_Tk.reshape(-1), out_TkD.view(-1, down_rows)
    gated = partial(linear.gated_mul, is_gelu=is_gelu)
    if clamp is not None:
        gated = partial(_clamped_swiglu, clamp=clamp)
    bias13, bias2 = (None, None) if biases is None else biases
    for slot in sorted(set(slots.tolist())):
        if slot < 0:
            continue
        pairs = (slots == slot).nonzero().squeeze(1)
        both = linear.linear(
            x_TD[pairs // top_k], _block(w13, slot, rows), _of_block(bias13, slot, rows)
        )
        block, bias = _block(w2, slot, down_rows), _of_block(bias2, slot, down_rows)
        out[pairs] = linear.linear(gated(both), block, bias)


def _clamped_swiglu(gate_up_T2F: torch.Tensor, clamp: tuple[float, float]) -> torch.Tensor:
    """Return what experts_products says of gates and then ups with `clamp`."""
    (limit, alpha), (gate, up) = clamp, gate_up_T2F.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(gate_up_T2F.dtype)


def _of_block(bias: torch.Tensor | None, slot: int, num_rows: int) -> torch.Tensor | None:
    """Return one expert's part of a bias."""
    return None if bias is None else bias[slot * num_rows : (slot + 1) * num_rows]


def _block(weight: Weight, slot: int, num_rows: int) -> torch.Tensor:
    """Return one expert's rows of a matrix of experts, restored."""
    start = slot * num_rows
    if isinstance(weight, torch.Tensor):
        return weight[start : start + num_rows]
    if isinstance(weight, Codes):
        ids = torch.arange(start, start + num_rows, device=weight.bytes.device)
        return codes.embedding(ids, weight)
    ids = torch.arange(start, start + num_rows, device=weight.values.device)
    return quantised.rows(weight, ids)


def experts_sum(
    products_TkD: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    shared_TD: torch.Tensor | None = None,
    shared_logits_T1: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of kernels.ops.experts.experts_sum."""
    is_none = (ids_Tk < 0).unsqueeze(-1)
    products = products_TkD.float().masked_fill(is_none, 0)
    found = torch.zeros_like(products[:, 0])
    for place in range(products.shape[1]):
        found += weights_Tk[:, place, None] * products[:, place]
    if shared_TD is not None and shared_logits_T1 is not None:
        found += shared_logits_T1.float().sigmoid() * shared_TD.float()
    return found.to(products_TkD.dtype)
