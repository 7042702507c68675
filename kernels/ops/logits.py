"""Most probable tokens of rows of logits.

Shape letters: S rows, V vocabulary.
"""

import torch

from kernels.ops.checks import KernelArgumentError, check_tensor
from kernels.ref import logits as ref

# Triton is imported by the first call on a GPU: machines without one need not have it.
# ruff: noqa: PLC0415


def most_probable(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the token with the largest logit of each row, and how probable it is.

    Args:
        logits_SV: [S, V] float32, V at least 1, stride 1 in the last dimension.

    Returns:
        float64 [S, 2], the token and its log-probability: the lowest id among equals, and NaN where
        the row holds NaN or positive infinity, or nothing but negative infinity. And float32 [S],
        the largest logits. A row's values are the same in every batch.

    Stream: enqueued on the current stream.
    """
    shape = None, None
    check_tensor("most_probable.logits", logits_SV, shape, torch.float32, logits_SV.device)
    if logits_SV.shape[1] == 0:
        raise KernelArgumentError("most_probable.logits", "one token or more", "none")
    if logits_SV.is_cuda:
        from kernels.triton import logits

        return logits.most_probable(logits_SV)
    return ref.most_probable(logits_SV)
