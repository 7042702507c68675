"""The tables of the registry; times are seconds since the epoch, sizes are bytes."""

import time
from typing import Any, Final

from sqlalchemy import JSON, ForeignKey, Index, MetaData, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

MODEL_KINDS: Final = ("package", "hub", "folder", "gguf")
MODEL_STATES: Final = ("missing", "downloading", "untested", "testing", "ready", "failed")
TEST_KINDS: Final = ("test", "ab", "sweep")
TEST_STATUSES: Final = (
    "queued",
    "running",
    "finished",
    "partial",
    "failed",
    "no_fit",
    "cancelled",
    "interrupted",
)
OPEN: Final = ("queued", "running")
"""Statuses of tests that have not ended."""
PERFORMANCE_PARTS: Final = ("load", "throughput", "latency", "memory")
SERVICE_KINDS: Final = ("own", "systemd")
SERVICE_WISHES: Final = ("running", "stopped")

MOST_ID: Final = 2**63 - 1
"""The largest id that SQLite can be asked for."""
_IDS: Final = {"sqlite_autoincrement": True}
"""An id is never given again: what a page still shows of a removed row names no other."""
Plain: Final = JSON(none_as_null=True)
"""A column of plain data; None is the database's NULL."""


class Base(DeclarativeBase):
    """The base of all tables; constraints have names, so that later migrations can change them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the row's columns as plain data."""
        return {name: getattr(self, name) for name in self.__table__.columns.keys()}  # noqa: SIM118


class Model(Base):
    """A model that was added, and what this machine holds of it."""

    __tablename__ = "models"
    __table_args__ = _IDS

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    """What commands and pages call it: letters, digits, '.', '_' and '-'."""
    source: Mapped[str]
    """A name of the catalogue, a hub's OWNER/NAME, or a folder."""
    kind: Mapped[str]
    """One of MODEL_KINDS."""
    revision: Mapped[str | None] = mapped_column(default=None)
    """Of a hub's repository."""
    identity: Mapped[str | None] = mapped_column(unique=True, default=None)
    """The same for two names of one model: the folder, or the repository with its revision."""
    path: Mapped[str | None] = mapped_column(default=None)
    """The folder of the weights; None where this machine has none."""
    family: Mapped[str | None] = mapped_column(default=None)
    format: Mapped[str | None] = mapped_column(default=None)
    """How the files store the weights, such as bfloat16 or awq; None: unknown."""
    num_parameters: Mapped[int | None] = mapped_column(default=None)
    weights_bytes: Mapped[int | None] = mapped_column(default=None)
    max_model_len: Mapped[int | None] = mapped_column(default=None)
    """The longest sequence of the model, tokens."""
    spec: Mapped[dict[str, Any] | None] = mapped_column(Plain, default=None)
    """Fields of engine.model.spec.ModelSpec: a plan needs no files."""
    state: Mapped[str]
    """One of MODEL_STATES."""
    reason: Mapped[str | None] = mapped_column(default=None)
    """Why it failed or is missing."""
    done_bytes: Mapped[int | None] = mapped_column(default=None)
    total_bytes: Mapped[int | None] = mapped_column(default=None)
    """Of a download."""
    pid: Mapped[int | None] = mapped_column(default=None)
    """The process that downloads it."""
    pid_started_s: Mapped[float | None] = mapped_column(default=None)
    created_s: Mapped[float] = mapped_column(default=time.time)
    changed_s: Mapped[float] = mapped_column(default=time.time, onupdate=time.time)

    profiles: Mapped[list["Profile"]] = relationship(
        back_populates="model", cascade="all, delete-orphan", order_by="Profile.id"
    )


class Profile(Base):
    """Named settings of a model; one of them is the default."""

    __tablename__ = "profiles"
    __table_args__ = (
        Index("uq_profiles_model_id_name", "model_id", "name", unique=True),
        Index("uq_profiles_default", "model_id", unique=True, sqlite_where=text("is_default = 1")),
        _IDS,
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"))
    name: Mapped[str]
    is_default: Mapped[bool] = mapped_column(default=False)
    settings: Mapped[dict[str, Any]] = mapped_column(Plain)
    """Flat; keys are the flags of `tightfit serve` with underscores."""
    created_s: Mapped[float] = mapped_column(default=time.time)
    changed_s: Mapped[float] = mapped_column(default=time.time, onupdate=time.time)

    model: Mapped[Model] = relationship(back_populates="profiles")


class TestRun(Base):
    """A test of a model, by the harness in processes of its own."""

    __tablename__ = "test_runs"
    __table_args__ = (
        Index("ix_test_runs_model_id_created_s", "model_id", "created_s"),
        Index("ix_test_runs_status", "status"),
        Index("ix_test_runs_created_s", "created_s"),
        _IDS,
    )
    __test__ = False

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"))
    profile_id: Mapped[int | None] = mapped_column(
        ForeignKey("profiles.id", ondelete="SET NULL"), default=None, index=True
    )
    kind: Mapped[str]
    """One of TEST_KINDS."""
    num_requests: Mapped[int | None] = mapped_column(default=None)
    settings: Mapped[dict[str, Any]] = mapped_column(Plain, default=dict)
    """All settings as they were."""
    environment: Mapped[dict[str, Any] | None] = mapped_column(Plain, default=None)
    status: Mapped[str]
    """One of TEST_STATUSES."""
    reason: Mapped[str | None] = mapped_column(default=None)
    progress: Mapped[dict[str, Any] | None] = mapped_column(Plain, default=None)
    """done, total, phase."""
    metrics: Mapped[dict[str, Any] | None] = mapped_column(Plain, default=None)
    folder: Mapped[str | None] = mapped_column(default=None)
    """Of the record."""
    pid: Mapped[int | None] = mapped_column(default=None)
    pid_started_s: Mapped[float | None] = mapped_column(default=None)
    """When the process began, which tells it from a later one with its id."""
    created_s: Mapped[float] = mapped_column(default=time.time)
    started_s: Mapped[float | None] = mapped_column(default=None)
    ended_s: Mapped[float | None] = mapped_column(default=None)


class Performance(Base):
    """What one test measured of a part, on a card; rows are added and never changed."""

    __tablename__ = "performance"
    __table_args__ = (
        Index("ix_performance_model_id_created_s", "model_id", "created_s"),
        Index("ix_performance_profile_id_card_part", "profile_id", "card", "part"),
        Index("ix_performance_model_id_profile_id_part", "model_id", "profile_id", "part"),
        _IDS,
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"))
    profile_id: Mapped[int | None] = mapped_column(
        ForeignKey("profiles.id", ondelete="SET NULL"), default=None
    )
    test_run_id: Mapped[int | None] = mapped_column(
        ForeignKey("test_runs.id", ondelete="CASCADE"), default=None, index=True
    )
    card: Mapped[str]
    part: Mapped[str]
    """One of PERFORMANCE_PARTS."""
    metrics: Mapped[dict[str, Any]] = mapped_column(Plain)
    created_s: Mapped[float] = mapped_column(default=time.time)


class Comparison(Base):
    """Two profiles, run in turns."""

    __tablename__ = "comparisons"
    __table_args__ = (Index("ix_comparisons_model_id_created_s", "model_id", "created_s"), _IDS)

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"))
    test_run_id: Mapped[int | None] = mapped_column(
        ForeignKey("test_runs.id", ondelete="CASCADE"), default=None, index=True
    )
    profile_a_id: Mapped[int | None] = mapped_column(
        ForeignKey("profiles.id", ondelete="SET NULL"), default=None
    )
    profile_b_id: Mapped[int | None] = mapped_column(
        ForeignKey("profiles.id", ondelete="SET NULL"), default=None
    )
    rows: Mapped[list[dict[str, Any]]] = mapped_column(Plain, default=list)
    """Of metrics: metric, unit, a, b, ratio, low, high."""
    tokens_equal: Mapped[int | None] = mapped_column(default=None)
    tokens_total: Mapped[int | None] = mapped_column(default=None)
    """Requests that gave the same tokens on both sides, and those that were compared."""
    verdict: Mapped[str | None] = mapped_column(default=None)
    created_s: Mapped[float] = mapped_column(default=time.time)


class Service(Base):
    """A server that is kept in the state that was asked for."""

    __tablename__ = "services"
    __table_args__ = _IDS

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    """One of SERVICE_KINDS."""
    unit: Mapped[str | None] = mapped_column(default=None)
    """Of systemd."""
    model_id: Mapped[int | None] = mapped_column(
        ForeignKey("models.id", ondelete="SET NULL"), default=None
    )
    profile_id: Mapped[int | None] = mapped_column(
        ForeignKey("profiles.id", ondelete="SET NULL"), default=None
    )
    port: Mapped[int | None] = mapped_column(default=None)
    wanted: Mapped[str] = mapped_column(default="stopped")
    """One of SERVICE_WISHES."""
    auto_restart: Mapped[bool] = mapped_column(default=True)
    state: Mapped[str] = mapped_column(default="stopped")
    reason: Mapped[str | None] = mapped_column(default=None)
    log_tail: Mapped[str | None] = mapped_column(default=None)
    pid: Mapped[int | None] = mapped_column(default=None)
    pid_started_s: Mapped[float | None] = mapped_column(default=None)
    failures: Mapped[list[float]] = mapped_column(Plain, default=list)
    """Times of the last ones."""
    held_by_test_id: Mapped[int | None] = mapped_column(default=None)
    """The test for which it was stopped, until it is started again."""
    changed_s: Mapped[float] = mapped_column(default=time.time, onupdate=time.time)
