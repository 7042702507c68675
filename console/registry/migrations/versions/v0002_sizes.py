"""What makes models the same, their sizes as plans need them, and who downloads them."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the change."""
    with op.batch_alter_table("models", table_kwargs={"sqlite_autoincrement": True}) as table:
        table.add_column(sa.Column("identity", sa.String(), nullable=True))
        table.create_unique_constraint("uq_models_identity", ["identity"])
        table.add_column(sa.Column("spec", sa.JSON(), nullable=True))
        table.add_column(sa.Column("pid", sa.Integer(), nullable=True))
        table.add_column(sa.Column("pid_started_s", sa.Double(), nullable=True))
    op.create_index(
        "ix_performance_model_id_profile_id_part", "performance", ["model_id", "profile_id", "part"]
    )
