"""Which runs a comparison makes, in which order, and which of them it leaves out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from harness.ab_config import SIDES, AbConfig
from reports.record.record import RunRecord

AGAINST_ITSELF: Final = "aa"
COMPARED: Final = "ab"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One run of one side."""

    phase: str
    """aa: side a against itself | ab."""
    pair: int
    """From 1."""
    side: str
    """a or b."""

    @property
    def label(self) -> str:
        """Short name, such as aa1-a or ab2-b."""
        return f"{self.phase}{self.pair}-{self.side}"


def steps(ab: AbConfig) -> Iterator[Step]:
    """Yield the runs in order: side a against itself, then A B, B A, A B, ..."""
    for pair in range(1, ab.aa_pairs + 1):
        for _ in SIDES:
            yield Step(phase=AGAINST_ITSELF, pair=pair, side=SIDES[0])
    for pair in range(1, ab.pairs + 1):
        for side in SIDES if pair % 2 else reversed(SIDES):
            yield Step(phase=COMPARED, pair=pair, side=side)


def is_needed(step: Step, done: Sequence[tuple[Step, RunRecord]]) -> bool:
    """Return whether a run can still say something.

    A side that ended otherwise than ok is not run again; the other one then runs once.
    """
    bad = {before.side for before, record in done if record.status != "ok"}
    good = {before.side for before, record in done if record.status == "ok"}
    if step.side in bad:
        return False
    return not bad or step.side not in good


def pairs_of(
    done: Sequence[tuple[Step, RunRecord]], phase: str
) -> list[tuple[RunRecord, RunRecord]]:
    """Return the records of the complete pairs of a phase: a and b, or a and a in order of time."""
    found: dict[int, list[tuple[str, RunRecord]]] = {}
    for step, record in done:
        if step.phase == phase and record.status == "ok":
            found.setdefault(step.pair, []).append((step.side, record))
    whole = [sorted(runs, key=lambda run: run[0]) for runs in found.values() if len(runs) == 2]
    return [(first, second) for (_, first), (_, second) in whole]


def side_records(done: Sequence[tuple[Step, RunRecord]]) -> Mapping[str, list[RunRecord]]:
    """Return the records of each side in order."""
    return {side: [record for step, record in done if step.side == side] for side in SIDES}
