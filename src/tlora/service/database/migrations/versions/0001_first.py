"""The first schema, as Alembic writes it: one long function, a statement for each table and index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make all tables."""
    op.create_table(
        "answers",
        sa.Column("serial", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("payload", sa.String(length=64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("serial"),
        sa.UniqueConstraint("tenant", "key", name="one_answer_a_key"),
    )
    op.create_table(
        "bases",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "creations",
        sa.Column("serial", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("payload", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("sent", sa.Boolean(), nullable=False),
        sa.Column("matched", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("serial"),
    )
    op.create_index("creations_by_payload", "creations", ["tenant", "payload"], unique=False)
    op.create_table(
        "events",
        sa.Column("serial", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=True),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("serial"),
    )
    op.create_index("events_of_job", "events", ["job", "serial"], unique=False)
    op.create_index("events_of_tenant", "events", ["tenant", "serial"], unique=False)
    op.create_table(
        "files",
        sa.Column("serial", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(length=255), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("suffix", sa.String(length=16), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("deleted", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("serial"),
        sa.UniqueConstraint("id"),
    )
    op.create_index("files_by_content", "files", ["tenant", "sha256"], unique=False)
    op.create_index("files_of_tenant", "files", ["tenant", "serial"], unique=False)
    op.create_table(
        "job_files",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("file", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("job", "file"),
    )
    op.create_index("jobs_of_file", "job_files", ["file"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("serial", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("base_model", sa.String(length=200), nullable=False),
        sa.Column("order", sa.JSON(), nullable=False),
        sa.Column("sweep", sa.String(length=64), nullable=True),
        sa.Column("cloned_from", sa.String(length=64), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("started", sa.Float(), nullable=True),
        sa.Column("ended", sa.Float(), nullable=True),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("intake", sa.JSON(), nullable=True),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("removed", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("serial"),
        sa.UniqueConstraint("id"),
    )
    op.create_index("jobs_ended", "jobs", ["ended", "serial"], unique=False)
    op.create_index("jobs_of_tenant", "jobs", ["tenant", "serial"], unique=False)
    op.create_index("jobs_open", "jobs", ["tenant", "ended"], unique=False)
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("lookup", sa.String(length=16), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.String(length=64), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("revoked", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_keys_lookup"), "keys", ["lookup"], unique=False)
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )


def downgrade() -> None:
    """Remove them."""
    for name in ("answers", "bases", "creations", "events", "files", "job_files", "jobs", "keys", "tenants"):
        op.drop_table(name)
