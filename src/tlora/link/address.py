"""Where a controller listens: a unix socket in a directory that only its user may enter, and if asked for a TCP port (`tls.py`)."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from tlora import durable
from tlora.errors import ConfigError
from tlora.link.lines import peer_pid

SOCKET, ADDRESS_FILE = "controller.sock", "address"
_LONGEST_PATH = 100  # bytes of a unix socket's: Linux takes 107, other systems 103
_SCHEME, _TCP = "unix:", "tcp://"
_BACKLOG = 128


def listen(directory: Path) -> tuple[socket.socket, str]:
    """A listening socket and its address, which workers of an earlier controller of `directory` know too.

    The socket lies in `directory`/link; where that path is too long, or the file system takes no sockets, in a directory of its own under
    the system's temporary one. `directory`/address says where. The caller holds the lock of the store: an older socket there is stale.
    Raises ConfigError where neither can be had.
    """
    place = directory.absolute() / "link"
    listener = _bind(place) if len(os.fsencode(place / SOCKET)) <= _LONGEST_PATH else None
    if listener is None:
        place = _earlier(directory) or Path(tempfile.mkdtemp(prefix="tlora-"))
        listener = _bind(place)
    if listener is None:
        raise ConfigError(f"no unix socket can be made in {place}. Set TMPDIR to a directory on a local file system, with a short path")
    address = f"{_SCHEME}{place / SOCKET}"
    durable.write_file(directory / ADDRESS_FILE, address + "\n")
    return listener, address


def forget(address: str) -> None:
    """Remove a socket that is no longer in use, and its directory if that is empty then."""
    place = _path_in(address).parent
    with contextlib.suppress(OSError):
        (place / SOCKET).unlink(missing_ok=True)
        place.rmdir()


def connect(address: str) -> socket.socket:
    """To the unix socket of a controller of this user.

    Raises OSError if nothing listens there, and ConfigError for an invalid address, a socket that others may use, and a controller of
    another user.
    """
    path = _path_in(address)
    private = path.parent.stat()
    if private.st_uid != os.geteuid() or stat.S_IMODE(private.st_mode) & 0o077:
        raise ConfigError(f"{path.parent} is not this user's alone, so a process that listens there cannot be trusted. Make it mode 0700")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    if peer_pid(connection) is None:
        connection.close()
        raise ConfigError(f"{address}: another user listens there, whom this worker does not obey. Start it as the controller's user")
    return connection


def is_tcp(address: str) -> bool:
    return address.startswith(_TCP)


def tcp_place(address: str) -> tuple[str, int]:
    """Host and port of tcp://host:port. Raises ConfigError."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not is_tcp(address) or not host or not port or address.rpartition(":")[2] != str(port) or "@" in address:
        raise ConfigError(f"address {address!r}: must be tcp://host:port with a port from 1 to 65535, as in tcp://127.0.0.1:8322")
    return host, port


def tcp_address(host: str, port: int) -> str:
    """What `tcp_place` reads."""
    return f"{_TCP}{f'[{host}]' if ':' in host else host}:{port}"


def resolve(address: str) -> str:
    """`address`, or where the cluster in the output directory `address` listens. Raises ConfigError."""
    if is_tcp(address):
        tcp_place(address)
        return address
    if address.startswith(_SCHEME):
        _path_in(address)
        return address
    written = Path(address) / "workers" / ADDRESS_FILE
    try:
        return written.read_text(encoding="utf-8").strip()
    except OSError:
        raise ConfigError(
            f"--connect {address}: is neither an address (unix:/path/to/{SOCKET}, tcp://host:port) nor the output directory of a cluster "
            f"({written} is not there). Give one of the two"
        ) from None


def _path_in(address: str) -> Path:
    path = Path(address.removeprefix(_SCHEME))
    if not address.startswith(_SCHEME) or not path.is_absolute():
        raise ConfigError(f"address {address!r}: must be unix: and an absolute path, as in unix:/tmp/tlora-x/{SOCKET}")
    return path


def _bind(place: Path) -> socket.socket | None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        place.chmod(0o700)
        (place / SOCKET).unlink(missing_ok=True)
        listener.bind(str(place / SOCKET))
        (place / SOCKET).chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener


def _earlier(directory: Path) -> Path | None:
    """The temporary directory of an earlier controller, if it is there still and this user's alone."""
    with contextlib.suppress(OSError, ConfigError):
        place = _path_in((directory / ADDRESS_FILE).read_text(encoding="utf-8").strip()).parent
        found = place.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
            return place
    return None
