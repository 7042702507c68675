"""Results: the tests of models, and what they measured; rows of measurements are never changed."""

import time
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import func, select, update

from console.registry.checks import FieldError
from console.registry.database import Database
from console.registry.tables import (
    MOST_ID,
    OPEN,
    TEST_STATUSES,
    Comparison,
    Performance,
    TestRun,
)
from engine.sealed import check_choice

PAGE: Final = 50
"""Rows of a page."""


class Results:
    """Tests and measurements of a registry; each call is a transaction of its own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, model_id: int, kind: str, **columns: Any) -> TestRun:
        """Add a test that waits for its turn.

        Args:
            model_id: of the model.
            kind: test, ab or sweep.
            **columns: further ones of TestRun: profile_id, num_requests, settings, ...
        """
        with self._database.write() as session:
            row = TestRun(model_id=model_id, kind=kind, **{"status": "queued", **columns})
            session.add(row)
        return row

    def change(self, run_id: int, **columns: Any) -> bool:
        """Change columns of a test that has not ended; return whether it had not.

        A test that was cancelled meanwhile so stays cancelled. A status that ends it sets ended_s.
        """
        if (status := columns.get("status")) is not None:
            check_choice("status", status, TEST_STATUSES)
            if status not in OPEN:
                columns.setdefault("ended_s", time.time())
        where = (TestRun.id == run_id, TestRun.status.in_(OPEN))
        with self._database.write() as session:
            done = session.execute(
                update(TestRun).where(*where).values(**columns).returning(TestRun.id)
            )
            return done.first() is not None

    def get(self, run_id: int) -> TestRun:
        """Return a test.

        Raises:
            FieldError: there is none.
        """
        with self._database.read() as session:
            row = session.get(TestRun, run_id)
        if row is None:
            raise FieldError(
                "test", f"test: expected the number of one that there is, got {run_id}."
            )
        return row

    def runs(
        self,
        model_id: int | None = None,
        *,
        statuses: Sequence[str] = (),
        before_id: int | None = None,
        limit: int = PAGE,
    ) -> Sequence[TestRun]:
        """Return a page of tests, the last first.

        Args:
            model_id: whose; None: of all models.
            statuses: those wanted; empty: all.
            before_id: the last one of the page before, of any size; None: the first page.
            limit: rows of a page.
        """
        chosen = select(TestRun).order_by(TestRun.id.desc()).limit(limit)
        if model_id is not None:
            chosen = chosen.where(TestRun.model_id == model_id)
        if statuses:
            chosen = chosen.where(TestRun.status.in_(statuses))
        if before_id is not None:
            chosen = chosen.where(TestRun.id < max(0, min(before_id, MOST_ID)))
        with self._database.read() as session:
            return session.scalars(chosen).all()

    def performance(
        self, model_id: int, *, card: str | None = None, limit: int = PAGE
    ) -> Sequence[Performance]:
        """Return what was measured of a model, the last first."""
        chosen = select(Performance).where(Performance.model_id == model_id)
        if card is not None:
            chosen = chosen.where(Performance.card == card)
        with self._database.read() as session:
            return session.scalars(chosen.order_by(Performance.id.desc()).limit(limit)).all()

    def throughput(
        self, model_id: int, *, limit: int = PAGE
    ) -> Sequence[tuple[TestRun, Performance]]:
        """Return the tests of a model with what they measured of throughput, the last first."""
        chosen = (
            select(TestRun, Performance)
            .join(Performance, Performance.test_run_id == TestRun.id)
            .where(Performance.model_id == model_id, Performance.part == "throughput")
            .order_by(Performance.id.desc())
            .limit(limit)
        )
        with self._database.read() as session:
            return [(run, row) for run, row in session.execute(chosen)]

    def latest(self, model_id: int | None = None) -> dict[int, list[Performance]]:
        """Return the last measurement of each part of each profile, by the model's id.

        Args:
            model_id: of the only model; None: of all.
        """
        by = (Performance.model_id, Performance.profile_id, Performance.part)
        last = select(func.max(Performance.id)).group_by(*by)
        if model_id is not None:
            last = last.where(Performance.model_id == model_id)
        with self._database.read() as session:
            rows = session.scalars(select(Performance).where(Performance.id.in_(last))).all()
        found: dict[int, list[Performance]] = {}
        for row in rows:
            found.setdefault(row.model_id, []).append(row)
        return found

    def comparisons(
        self, model_id: int | None = None, *, limit: int = PAGE
    ) -> Sequence[Comparison]:
        """Return comparisons, the last first."""
        chosen = select(Comparison).order_by(Comparison.id.desc()).limit(limit)
        if model_id is not None:
            chosen = chosen.where(Comparison.model_id == model_id)
        with self._database.read() as session:
            return session.scalars(chosen).all()


def settings_of(run: TestRun, row: Performance) -> dict[str, Any]:
    """Return the settings of the profile that a measurement was made with, as they were."""
    ids = run.settings.get("profile_ids", {})
    name = next((name for name, profile_id in ids.items() if profile_id == row.profile_id), None)
    found: dict[str, Any] = run.settings.get("profiles", {}).get(name, {})
    return found
