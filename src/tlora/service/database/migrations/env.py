"""Alembic's entry: runs the versions over the connection that `store.py` gives."""

from __future__ import annotations

from alembic import context

from tlora.service.database.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
