"""Which store this is and the server that may write to it; tokenized sets and the jobs that use them."""

from __future__ import annotations

import json
from pathlib import PurePath

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the tables. Sets of jobs are known from what was read of their data; their bytes are measured by the server."""
    op.create_table(
        "store",
        sa.Column("one", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("heartbeat", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("one"),
    )
    sets = op.create_table(
        "token_sets",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name"),
    )
    uses = op.create_table(
        "job_tokens",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("job", "name"),
    )
    op.create_index("jobs_of_tokens", "job_tokens", ["name"], unique=False)
    found = op.get_bind().execute(sa.text("SELECT id, tenant, intake FROM jobs WHERE intake IS NOT NULL")).all()
    rows = [(job, tenant, intake if isinstance(intake, dict) else json.loads(intake) or {}) for job, tenant, intake in found]
    names = [
        (job, tenant, PurePath(intake[key]).name) for job, tenant, intake in rows for key in ("train_set", "eval_set") if intake.get(key)
    ]
    if names:
        op.bulk_insert(uses, [{"job": job, "name": name} for job, name in sorted({(job, name) for job, _, name in names})])
        op.bulk_insert(sets, [{"tenant": one, "name": name, "bytes": 0} for one, name in sorted({(one, name) for _, one, name in names})])


def downgrade() -> None:
    """Remove them."""
    for name in ("job_tokens", "token_sets", "store"):
        op.drop_table(name)
