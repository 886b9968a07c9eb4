"""TLS over a TCP connection, used as a socket is. The other end is known by its certificate's fingerprint, not by an authority.

An OpenSSL connection is not to be used by two threads at once, so it works on bytes in memory (`ssl.MemoryBIO`), behind a lock that no
thread holds while it waits for the network. One thread may use many that do not block, with `send` and `recv`. Cryptography is `ssl`'s.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from tlora.errors import ConfigError
from tlora.link.address import tcp_address
from tlora.link.lines import Buffer

T = TypeVar("T")
HANDSHAKE_SECONDS = 30.0  # of a worker; a controller has less patience with strangers
CUT_SECONDS = 30  # without an answer of the other host's kernel, after which a line has ended
_CHUNK = 1 << 18  # read or sent at once: several records that stay in a processor's cache
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")


class TlsStream:
    """`recv` by one thread, `sendall` by any other meanwhile. Errors are OSErrors, as a socket's."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._state = threading.Lock()  # of all three
        self._order = threading.Lock()  # records go out in the order in which they were made
        self._records, self._taken = memoryview(b""), 0  # what is not out yet, and the bytes of the last `send` that are in it
        self._received = memoryview(bytearray(_CHUNK))

    def handshake(self, timeout_seconds: float) -> None:
        """Complete the handshake within the timeout, else TimeoutError. Raises ssl.SSLError if the peer speaks no TLS."""
        deadline = time.monotonic() + timeout_seconds
        while not self._shake_hands():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            self._receive()
        self._socket.settimeout(None)

    def _shake_hands(self) -> bool:
        try:
            with self._state:
                self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            with suppress(OSError):  # an alert says to the other end what is wrong; the error itself counts more
                self._flush()
        return True

    @property
    def peer_fingerprint(self) -> str:
        """The certificate's fingerprint; valid after the handshake, in which the peer has proved that it has the key."""
        certificate = self._tls.getpeercert(binary_form=True)
        assert certificate is not None, "a server without a certificate"
        return fingerprint_of(certificate)

    def sendall(self, content: Buffer) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[self.send(rest) :]

    def send(self, content: memoryview) -> int:
        """Send the beginning of `content`: how many bytes. Where the socket does not block, BlockingIOError says that not all is out: then
        the same content is to be given again.
        """
        with self._order:
            if not self._taken:
                with self._state:
                    self._taken = self._tls.write(content[:_CHUNK])
                    self._take_records()
            self._send_records()
            taken, self._taken = self._taken, 0
            return taken

    def recv(self, size: int) -> bytes:
        return self._once_come(partial(self._tls.read, size))

    def recv_into(self, target: memoryview) -> int:
        """All that has come and that it holds; nothing comes after 0."""
        return self._once_come(partial(self._read_records, target))

    def _once_come(self, read: Callable[[], T]) -> T:
        while True:
            with self._state, suppress(ssl.SSLWantReadError):
                return read()
            self._flush()  # TLS may have something to answer
            self._receive()

    def _read_records(self, target: memoryview) -> int:
        """Of whole records, each of 16 KB at most. Raises ssl.SSLWantReadError where there is none."""
        size = more = self._read_record(target)
        while more and size < len(target):
            try:
                more = self._read_record(target[size:])
            except OSError:  # it is said again to who asks next
                break
            size += more
        return size

    def _read_record(self, target: memoryview) -> int:
        return cast("int", self._tls.read(len(target), target))  # a count, where it is given a place

    def _receive(self) -> None:
        size = self._socket.recv_into(self._received)
        with self._state:
            if size:
                self._incoming.write(self._received[:size])
            else:
                self._incoming.write_eof()

    def _flush(self) -> None:
        """Send what is pending. Takes no lock if there is nothing: a concurrent sender has sent it then."""
        if self._outgoing.pending:
            with self._order:
                with self._state:
                    self._take_records()
                with suppress(BlockingIOError):  # the next `send` goes on
                    self._send_records()

    def _take_records(self) -> None:
        made = self._outgoing.read()
        self._records = memoryview(bytes(self._records) + made if self._records else made)

    def _send_records(self) -> None:
        while self._records:
            self._records = self._records[self._socket.send(self._records) :]

    # -- as the socket does --------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._socket.fileno()

    def setblocking(self, blocks: bool) -> None:
        self._socket.setblocking(blocks)

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        self._socket.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()


def server_context(certificate: Path) -> ssl.SSLContext:
    """`certificate`: a PEM file with the key in it. Raises OSError, of which ssl.SSLError is one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # TLS sessions are never resumed
    context.load_cert_chain(certificate, password="")  # one with a password is an error, not a question
    return context


def make_certificate(name: str) -> tuple[str, str]:
    """A self-signed one in PEM, with its key behind it, and its fingerprint. It does not expire: it is known by that alone."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime(9999, 12, 31, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    text = (made.public_bytes(serialization.Encoding.PEM) + secret).decode("ascii")
    return text, fingerprint_of(made.public_bytes(serialization.Encoding.DER))


def set_options(connection: socket.socket) -> None:
    """Those of a line between hosts: what is said goes at once, and the kernel ends the line when the other host has not answered for
    `CUT_SECONDS`, also while nothing is sent.
    """
    options = [(socket.IPPROTO_TCP, "TCP_NODELAY", 1), (socket.SOL_SOCKET, "SO_KEEPALIVE", 1)]
    options += [(socket.IPPROTO_TCP, "TCP_KEEPIDLE", CUT_SECONDS // 3), (socket.IPPROTO_TCP, "TCP_KEEPINTVL", CUT_SECONDS // 6)]
    options += [(socket.IPPROTO_TCP, "TCP_KEEPCNT", 4), (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 1000 * CUT_SECONDS)]
    for level, name, value in options:
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(level, getattr(socket, name), value)


def connect_tls(place: tuple[str, int], fingerprint: str) -> TlsStream:
    """Connect to a controller whose certificate has this fingerprint, which is checked before anything is sent.

    Raises OSError if nothing listens there, ConfigError if the peer speaks no TLS or has another certificate.
    """
    where = tcp_address(*place)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint below takes their place
    connection = socket.create_connection(place, HANDSHAKE_SECONDS)
    try:
        set_options(connection)
        stream = TlsStream(connection, context, server_side=False)
        stream.handshake(HANDSHAKE_SECONDS)
        found = stream.peer_fingerprint
        if not hmac.compare_digest(found, fingerprint):
            raise ConfigError(
                f"{where} has the certificate {found}, and {fingerprint} was given: it is another controller, or an interceptor. "
                "Nothing was sent. Compare with what `tlora worker-token` prints on the controller's machine"
            )
        return stream
    except (ssl.SSLError, TimeoutError) as error:
        connection.close()
        why = f"no handshake within {HANDSHAKE_SECONDS:g} s" if isinstance(error, TimeoutError) else error.reason or error
        raise ConfigError(
            f"{where}: what listens there does not speak TLS 1.3 ({why}), so it is no controller's address for workers. "
            "Take the one that `tlora worker-token` prints"
        ) from None
    except BaseException:
        connection.close()
        raise


def fingerprint_of(certificate: bytes) -> str:
    """The fingerprint of a certificate in DER."""
    return f"sha256:{hashlib.sha256(certificate).hexdigest()}"


def read_fingerprint(text: str) -> str:
    """As `fingerprint_of` writes it; openssl's capital letters and colons are taken too. Raises ConfigError."""
    kind, _, digits = text.strip().lower().partition(":")
    found = f"{kind}:{digits.replace(':', '')}"
    if not _FINGERPRINT.fullmatch(found):
        raise ConfigError(f"--fingerprint {text[:100]!r}: must be sha256: and 64 hexadecimal digits, as `tlora worker-token` prints it")
    return found
