"""Energy of one timed part, from the GPU's counter."""


def energy_metrics(
    before_j: float | None, after_j: float | None, num_tokens: int
) -> dict[str, float | None]:
    """Return the metrics of `num_tokens` output tokens from two readings of the energy counter.

    None without a counter, or where it was started anew meanwhile.
    """
    total_j = None
    if before_j is not None and after_j is not None and after_j >= before_j:
        total_j = after_j - before_j
    return {
        "energy/total_j": total_j,
        "energy/j_per_token": total_j / num_tokens if total_j and num_tokens else None,
    }
