"""Run by Alembic: carries migrations out on the connection that `Database.open` gives."""

from alembic import context

from console.registry.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
context.run_migrations()
