"""Student's t, from scipy: used by the parent, which hands its workers a table.

scipy takes half a second and 30 MB, which would be in a worker's load and peak of host memory.
"""

from harness.observe.statistics import CONFIDENCE, DRIFT_CONFIDENCE, TTable


def student_t(confidence: float, freedom: int) -> float:
    """Return the t beyond which a share 1 - confidence of the distribution lies, both tails."""
    from scipy.special import stdtrit  # noqa: PLC0415  takes half a second

    return float(stdtrit(freedom, (1 + confidence) / 2))


def t_table(repeats: int, requests: int) -> TTable:
    """Return what intervals of so many repeats and drifts over so many requests need."""
    from scipy.special import stdtrit  # noqa: PLC0415

    ends = {CONFIDENCE: repeats, DRIFT_CONFIDENCE: requests // 3}  # one more than the freedom
    return TTable(
        {
            confidence: tuple(map(float, stdtrit(range(1, end), (1 + confidence) / 2)))
            for confidence, end in ends.items()
        }
    )
