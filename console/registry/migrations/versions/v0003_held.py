"""For which test a service was stopped."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the change."""
    op.add_column("services", sa.Column("held_by_test_id", sa.Integer(), nullable=True))
