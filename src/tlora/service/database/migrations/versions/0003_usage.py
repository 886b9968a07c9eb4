"""The GPU time that tenants have used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns; none has used anything that is known."""
    op.add_column("tenants", sa.Column("gpu_seconds", sa.Float(), nullable=False, server_default="0"))
    op.add_column("tenants", sa.Column("gpu_seconds_at", sa.Float(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Remove them."""
    op.drop_column("tenants", "gpu_seconds_at")
    op.drop_column("tenants", "gpu_seconds")
