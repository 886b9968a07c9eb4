"""A PostgreSQL server of its own for the tests. Where the program is not installed, they fail: nothing is skipped."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql

_REMEDY = "PostgreSQL is not installed, and the store is tested against it. Remedy on Debian: apt-get install postgresql"


def find_program(name: str) -> str:
    """Debian keeps the server's programs off the path."""
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    found = shutil.which(name) or next((str(path) for path in installed), None)
    assert found is not None, _REMEDY
    return str(Path(found).resolve())


@contextmanager
def postgres_server() -> Iterator[str]:
    """The directory of its socket. It does not run as root: then it is the package's own user."""
    directory = Path(tempfile.mkdtemp(prefix="tlora-postgres-"))
    user = "postgres" if os.geteuid() == 0 else None
    if user is not None:
        found = pwd.getpwnam(user)
        os.chown(directory, found.pw_uid, found.pw_gid)
    data = directory / "data"
    make = [find_program("initdb"), "-D", str(data), "-A", "trust", "-U", "postgres", "--no-sync", "--no-locale", "-E", "UTF8"]
    subprocess.run(make, check=True, capture_output=True, user=user, cwd=directory)
    serve = [find_program("postgres"), "-D", str(data), "-k", str(directory), "-c", "listen_addresses=", "-c", "fsync=off"]
    process = subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=user, cwd=directory)
    try:
        _wait(directory, process)
        yield str(directory)
    finally:
        process.send_signal(2)  # a fast shutdown
        process.wait(60)
        shutil.rmtree(directory)


def _wait(directory: Path, process: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            psycopg.connect(f"host={directory} user=postgres dbname=postgres").close()
            return
        except psycopg.OperationalError:
            assert process.poll() is None, f"postgres ended with {process.returncode}"
            time.sleep(0.05)


def make_database(directory: str, name: str) -> str:
    """The URL of a fresh database."""
    with psycopg.connect(f"host={directory} user=postgres dbname=postgres", autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return f"postgresql://postgres@/{name}?host={directory}"
