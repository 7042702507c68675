"""Twin of the most probable tokens. Shape letters: S rows, V vocabulary."""

import torch


def most_probable(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of kernels.ops.logits.most_probable."""
    largest_S, tokens_S = logits_SV.max(dim=-1)
    # Summed in float32, pairwise: an error of some 2^-22 of the sum.
    sums_S = (logits_SV - largest_S[:, None]).exp_().sum(dim=-1)
    return torch.stack([tokens_S.double(), sums_S.double().log_().neg_()], dim=1), largest_S
