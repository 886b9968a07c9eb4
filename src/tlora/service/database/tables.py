"""The tables. Every row of a tenant's carries the tenant; ids are opaque and random; times are Unix seconds.

The schema in force is what the migrations make; a test compares the two.
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text, UniqueConstraint

metadata = MetaData()
_Serial = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts rows up only in a column of this type
_ID = String(64)

tenants = Table(
    "tenants",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("name", String(63), nullable=False, unique=True),
    Column("created", Float, nullable=False),
    Column("gpu_seconds", Float, nullable=False, default=0.0, server_default="0"),  # used, decayed to `gpu_seconds_at`
    Column("gpu_seconds_at", Float, nullable=False, default=0.0, server_default="0"),
)

keys = Table(
    "keys",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant", _ID, nullable=False),
    Column("name", String(63), nullable=False),
    Column("lookup", String(16), nullable=False, index=True),  # the first digits of the hash
    Column("hash", String(64), nullable=False),  # SHA-256 of the key; the key itself is nowhere
    Column("scopes", String(64), nullable=False),  # separated by spaces
    Column("created", Float, nullable=False),
    Column("revoked", Float),
)

files = Table(
    "files",
    metadata,
    Column("serial", _Serial, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    Column("tenant", _ID, nullable=False),
    Column("filename", String(255), nullable=False),  # as the tenant calls it; never part of a path
    Column("purpose", String(32), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("suffix", String(16), nullable=False),  # one of a fixed list
    Column("created", Float, nullable=False),
    Column("deleted", Float),
    Index("files_of_tenant", "tenant", "serial"),
    Index("files_by_content", "tenant", "sha256"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("serial", _Serial, primary_key=True, autoincrement=True),  # the order of submission
    Column("id", _ID, nullable=False, unique=True),
    Column("tenant", _ID, nullable=False),
    Column("name", String(63), nullable=False),
    Column("status", String(16), nullable=False),
    Column("base_model", String(200), nullable=False),
    Column("order", JSON, nullable=False),  # of an OrderSpec what was set
    Column("sweep", _ID),  # shared by the jobs of one sweep
    Column("cloned_from", _ID),
    Column("created", Float, nullable=False),
    Column("started", Float),
    Column("ended", Float),
    Column("steps", BigInteger, nullable=False, default=0),
    Column("reason", Text, nullable=False, default=""),
    Column("intake", JSON),  # of the job's data: profile, sets, warnings; empty until it has been read
    Column("result", JSON),  # numbers of `result.json`
    Column("removed", Float),  # its directory is gone
    Index("jobs_of_tenant", "tenant", "serial"),
    Index("jobs_open", "tenant", "ended"),
    Index("jobs_ended", "ended", "serial"),
)

job_files = Table(
    "job_files",
    metadata,
    Column("job", _ID, primary_key=True),
    Column("file", _ID, primary_key=True),
    Index("jobs_of_file", "file"),
)

events = Table(
    "events",
    metadata,
    Column("serial", _Serial, primary_key=True, autoincrement=True),
    Column("tenant", _ID, nullable=False),
    Column("job", _ID),
    Column("time", Float, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("message", Text, nullable=False),
    Column("data", JSON),
    Index("events_of_job", "job", "serial"),
    Index("events_of_tenant", "tenant", "serial"),
)

answers = Table(
    "answers",
    metadata,
    Column("serial", _Serial, primary_key=True, autoincrement=True),
    Column("tenant", _ID, nullable=False),
    Column("key", String(255), nullable=False),
    Column("payload", String(64), nullable=False),  # SHA-256 of route and body
    Column("status", Integer, nullable=False),
    Column("body", Text, nullable=False),
    Column("created", Float, nullable=False),
    UniqueConstraint("tenant", "key", name="one_answer_a_key"),
)

creations = Table(  # through the OpenAI skin, whose client names no key
    "creations",
    metadata,
    Column("serial", _Serial, primary_key=True, autoincrement=True),
    Column("tenant", _ID, nullable=False),
    Column("payload", String(64), nullable=False),
    Column("job", _ID, nullable=False),
    Column("created", Float, nullable=False),
    Column("sent", Boolean, nullable=False, default=False),  # the answer went out as a whole
    Column("matched", Boolean, nullable=False, default=False),  # a retry has had it
    Index("creations_by_payload", "tenant", "payload"),
)

bases = Table(
    "bases",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("path", Text, nullable=False),
    Column("created", Float, nullable=False),
)

store = Table(  # one row: which store this is, and the server that may write to it
    "store",
    metadata,
    Column("one", Integer, primary_key=True, autoincrement=False),  # 1
    Column("id", _ID, nullable=False),  # also in `store.json` of the data directory
    Column("epoch", BigInteger, nullable=False),  # counts the servers that there have been
    Column("holder", Text, nullable=False),  # the server in words; empty without one
    Column("place", Text, nullable=False),  # host and data directory of the holder
    Column("since", Float, nullable=False),
    Column("heartbeat", Float, nullable=False),  # of the holder, on the database's clock
)
