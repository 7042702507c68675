"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the change."""
    op.create_table(
        "models",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("revision", sa.String(), nullable=True),
        sa.Column("path", sa.String(), nullable=True),
        sa.Column("family", sa.String(), nullable=True),
        sa.Column("format", sa.String(), nullable=True),
        sa.Column("num_parameters", sa.Integer(), nullable=True),
        sa.Column("weights_bytes", sa.Integer(), nullable=True),
        sa.Column("max_model_len", sa.Integer(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("done_bytes", sa.Integer(), nullable=True),
        sa.Column("total_bytes", sa.Integer(), nullable=True),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("changed_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_models"),
        sa.UniqueConstraint("name", name="uq_models_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "profiles",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("is_default", sa.Boolean(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("changed_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.id"], name="fk_profiles_model_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_profiles"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "uq_profiles_default",
        "profiles",
        ["model_id"],
        unique=True,
        sqlite_where=sa.text("is_default = 1"),
    )
    op.create_index("uq_profiles_model_id_name", "profiles", ["model_id", "name"], unique=True)
    op.create_table(
        "services",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("unit", sa.String(), nullable=True),
        sa.Column("model_id", sa.Integer(), nullable=True),
        sa.Column("profile_id", sa.Integer(), nullable=True),
        sa.Column("port", sa.Integer(), nullable=True),
        sa.Column("wanted", sa.String(), nullable=False),
        sa.Column("auto_restart", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("log_tail", sa.String(), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("pid_started_s", sa.Double(), nullable=True),
        sa.Column("failures", sa.JSON(), nullable=False),
        sa.Column("changed_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.id"], name="fk_services_model_id", ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(
            ["profile_id"], ["profiles.id"], name="fk_services_profile_id", ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_services"),
        sa.UniqueConstraint("name", name="uq_services_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "test_runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("profile_id", sa.Integer(), nullable=True),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("num_requests", sa.Integer(), nullable=True),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("environment", sa.JSON(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("progress", sa.JSON(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=True),
        sa.Column("folder", sa.String(), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("pid_started_s", sa.Double(), nullable=True),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("started_s", sa.Double(), nullable=True),
        sa.Column("ended_s", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.id"], name="fk_test_runs_model_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["profile_id"], ["profiles.id"], name="fk_test_runs_profile_id", ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_test_runs"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_test_runs_created_s", "test_runs", ["created_s"], unique=False)
    op.create_index(
        "ix_test_runs_model_id_created_s", "test_runs", ["model_id", "created_s"], unique=False
    )
    op.create_index("ix_test_runs_profile_id", "test_runs", ["profile_id"], unique=False)
    op.create_index("ix_test_runs_status", "test_runs", ["status"], unique=False)
    op.create_table(
        "comparisons",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("test_run_id", sa.Integer(), nullable=True),
        sa.Column("profile_a_id", sa.Integer(), nullable=True),
        sa.Column("profile_b_id", sa.Integer(), nullable=True),
        sa.Column("rows", sa.JSON(), nullable=False),
        sa.Column("tokens_equal", sa.Integer(), nullable=True),
        sa.Column("tokens_total", sa.Integer(), nullable=True),
        sa.Column("verdict", sa.String(), nullable=True),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.id"], name="fk_comparisons_model_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["profile_a_id"],
            ["profiles.id"],
            name="fk_comparisons_profile_a_id",
            ondelete="SET NULL",
        ),
        sa.ForeignKeyConstraint(
            ["profile_b_id"],
            ["profiles.id"],
            name="fk_comparisons_profile_b_id",
            ondelete="SET NULL",
        ),
        sa.ForeignKeyConstraint(
            ["test_run_id"], ["test_runs.id"], name="fk_comparisons_test_run_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_comparisons"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_comparisons_model_id_created_s", "comparisons", ["model_id", "created_s"], unique=False
    )
    op.create_index("ix_comparisons_test_run_id", "comparisons", ["test_run_id"], unique=False)
    op.create_table(
        "performance",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("profile_id", sa.Integer(), nullable=True),
        sa.Column("test_run_id", sa.Integer(), nullable=True),
        sa.Column("card", sa.String(), nullable=False),
        sa.Column("part", sa.String(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.id"], name="fk_performance_model_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["profile_id"], ["profiles.id"], name="fk_performance_profile_id", ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(
            ["test_run_id"], ["test_runs.id"], name="fk_performance_test_run_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_performance"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_performance_model_id_created_s", "performance", ["model_id", "created_s"], unique=False
    )
    op.create_index(
        "ix_performance_profile_id_card_part",
        "performance",
        ["profile_id", "card", "part"],
        unique=False,
    )
    op.create_index("ix_performance_test_run_id", "performance", ["test_run_id"], unique=False)
