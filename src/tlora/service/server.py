"""`tlora serve`: opens the store, writes the first key, starts controller and HTTP, and ends in order."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from sqlalchemy import Connection, Engine, select

from tlora import durable
from tlora.cache_directory import open_caches
from tlora.cluster.listeners import TlsListener
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.errors import ConfigError
from tlora.link.address import tcp_place
from tlora.server_directory import ADDRESS, FIRST_KEY, HOME, default_directory
from tlora.service.app import make_app
from tlora.service.backend_factory import BackendFactory
from tlora.service.config import ServerConfig
from tlora.service.connection_protocol import ConnectionFactory
from tlora.service.connections import Connections, forwarders
from tlora.service.controller import Controller
from tlora.service.database.lease import Heart, take_lease, this_server
from tlora.service.database.store import default_url, open_store
from tlora.service.database.tables import bases
from tlora.service.database.writer import Failpoint, StoreError, Writer, WriterEnd
from tlora.service.housekeeping import Housekeeping
from tlora.service.keys import KeyRing, NewKey, write_first_key
from tlora.service.live_state import LiveState
from tlora.service.machine import find_places
from tlora.service.request_log import RequestLog
from tlora.service.services import Notifier, Services
from tlora.service.signed import BrowserSessions, Cursors, oldest_key, open_secret
from tlora.service.store_id import StoreId
from tlora.worker_protocol import settings_of
from tlora.writable_directory import check_writable

_GRACE_SECONDS = 5  # for requests that are being answered when the server ends
_TICK_SECONDS = 10.0
_OTHER_FILES = 1024  # beside connections: the store's, workers', those that are read


def _pass(_: str) -> None:
    pass


@dataclass(frozen=True)
class ServerParts:
    """A server's parts. `first_key` was made now, if there was none."""

    app: FastAPI
    services: Services
    controller: Controller
    first_key: NewKey | None
    close: Callable[[], None]

    @property
    def writer_end(self) -> WriterEnd:
        return self.services.writer.end


def open_server(config: ServerConfig, backend_factory: BackendFactory | None = None, failpoint: Failpoint = _pass) -> ServerParts:
    """Everything but the socket: the application starts the controller with its first breath. Raises TloraError.

    `backend_factory` is where jobs are trained, instead of this machine; `failpoint` is the store's writer's, for tests.
    """
    directory = config.directory
    check_writable(directory, "data_dir")
    durable.make_directory(directory)
    directory.chmod(0o700)
    lock = _hold(directory, config.standby)
    engine: Engine | None = None
    try:
        secret = open_secret(directory)
        identity, url = StoreId(directory), config.database_url or default_url(directory)
        identity.refuse_missing(url)
        engine = open_store(url)
        backend_factory = backend_factory or local_hall(config)
        notifier, live = Notifier(), LiveState(0 if config.hosts_may_come else len(backend_factory.places.gpus))
        lease = take_lease(engine, this_server(directory), identity.settle, standby=config.standby)
        identity.keep()
        writer = Writer(engine, notifier.ring, failpoint, lease.check)
        first = writer.do(lambda connection: write_first_key(connection, directory / FIRST_KEY))
        known = _known_bases(config.base_models, engine)
        controller = Controller(config, engine, writer, live, backend_factory)
        ring = KeyRing(engine)
        browser_sessions = BrowserSessions(secret, ring)
        log = RequestLog(directory / "logs", config.log_file_bytes)
        rest = (notifier, known, browser_sessions, controller.storage, Connections(config.connections), log)
        services = Services(config, engine, writer, ring, Cursors(secret), live, controller, *rest)
    except BaseException:
        if engine is not None:
            engine.dispose()
        os.close(lock)
        raise
    keeper, heart, closing = Housekeeping(services), Heart(lease, writer), threading.Lock()
    closed = False

    def start() -> None:
        controller.start(services.bases)
        keeper.start()

    def close() -> None:
        nonlocal closed
        with closing:
            if not closed:
                closed = True
                keeper.close()
                controller.close()
                heart.close()
                writer.close()
                log.close()
                engine.dispose()
                os.close(lock)

    return ServerParts(make_app(services, start, close), services, controller, first, close)


def local_hall(config: ServerConfig) -> BackendFactory:
    """This machine's GPUs, or its CPU. Raises ConfigError."""
    places, keeper = find_places(config), None
    warn = logging.getLogger(__name__).warning
    for line in (*places.told, *missing_bases(config.base_models)):
        warn(line)
    if config.backend == "ray":
        from tlora.cluster.ray_keeper import open_ray

        listener, keeper = open_ray(config.ray_options, places.device, places.gpus, config.directory, warn)
        places = replace(places, gpus=(), memory_bytes=None, room_bytes=(), kinds=(), engine_gpus=len(places.gpus))
    else:
        listener = TlsListener(config.directory / "workers", tcp_place(config.worker_listen)) if config.worker_listen else None

    if config.layout == "stages" and (len(places.gpus) or places.engine_gpus) == 1 and not config.hosts_may_come:
        warn("layout: stages is of several GPUs, and here is one: bases lie as with layout: auto")

    def make(base_models: Mapping[str, str]) -> LocalBackend:
        here = places.gpus, places.device, base_models, config.directory
        settings = settings_of(config)
        own = {"memory_bytes": places.room_bytes, "kinds": places.kinds}
        machine = LocalMachine(*here, tick_seconds=_TICK_SECONDS, calibrate=True, **own, **settings)
        return LocalBackend(machine, warn, listener, open_keeper=keeper)

    return BackendFactory(places, make)


def missing_bases(base_models: Mapping[str, str]) -> list[str]:
    """A line on each that is a directory's path and no base lies there: it may come yet."""
    paths = {name: Path(base) for name, base in base_models.items() if base.startswith(("/", "."))}
    gone = {name: path for name, path in paths.items() if not (path / "config.json").is_file()}
    return [
        f"base model {name}: {path} has no config.json, and its jobs fail until it has. Correct the path" for name, path in gone.items()
    ]


def _known_bases(settings: Mapping[str, str], engine: Engine) -> dict[str, str]:
    """Paths of those in the settings and of those in the store, which count where a name is in both; other paths are warned of."""
    with engine.connect() as connection:
        stored = {row.name: row.path for row in connection.execute(select(bases.c.name, bases.c.path))}
    for name, path in settings.items():
        if stored.get(name, path) != path:
            logging.getLogger(__name__).warning(
                "base model %s: %s is used, as `tlora bases add` has stored it, and not %s of the settings. Choose another name for that",
                *(name, stored[name], path),
            )
    return {**settings, **stored}


def _hold(directory: Path, standby: bool = False) -> int:
    """A lock on the directory's `lock` file; not inherited by workers, which may outlive the server. With `standby` it is waited for.
    Raises ConfigError.
    """
    handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if standby else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"data_dir {directory}: another server runs there. Stop it, or choose another directory") from None
    return handle


def serve(config: ServerConfig, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP; the exit status, 0 after SIGTERM. `say` gets a line at a time for whoever started the server.
    Raises TloraError, also where the store's writer ends: a server that cannot write is of no use.
    """
    open_caches(say)
    tls = _open_tls(config)
    if config.standby:
        say(f"waits until no other server has {config.directory} and its database, and serves then")
    found = open_server(config)
    try:
        listener = _listen(config)
    except BaseException:
        found.close()
        raise
    scheme = "https" if config.tls_certificate else "http"
    host, port = listener.getsockname()[:2]
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    durable.write_file(config.directory / ADDRESS, url + "\n")
    say(f"tlora serves at {url}; everything lies in {config.directory}")
    if config.directory.resolve() != default_directory().resolve():
        say(f"commands of this user on this machine find it with {HOME}={config.directory} TLORA_URL={url}")  # login may name another
    if config.worker_listen is not None:
        say(f"workers may come to {config.worker_listen} over TLS; `tlora worker-token {config.directory}` makes a token for them")
    if found.first_key is not None:
        say(f"the first key is in {config.directory / FIRST_KEY}")
        if sys.stdout.isatty():
            say(f"  {found.first_key.secret}")
    if sys.stdout.isatty() and (key := oldest_key(found.services.engine)) is not None:
        where = url if not config.root_path else f"(your proxy's address){config.root_path}"
        say(f"its page: {where}{found.services.browser_sessions.make_link(*key)}")
    most = raise_file_limit(config.connections.most)
    if most < config.connections.most:
        say(f"{most} connections at most: this process may not open more files (ulimit -Hn)")
    found.services.connections.most = most
    server = uvicorn.Server(uvicorn_config(found.app, config, found.services.connections, tls))
    received = _stop_at_signals(server)

    def stop(reason: str) -> None:
        found.services.live.fault = reason
        server.should_exit = True

    try:
        found.writer_end.tell = stop
        if found.writer_end.reason is None:
            gc.collect()
            gc.freeze()  # the code's own objects, which live as long: looking through them all stops every request for 0.2 s
            server.run(sockets=[listener])
    finally:
        gc.unfreeze()
        found.close()
        listener.close()
    if (reason := found.writer_end.reason) is not None:
        raise StoreError(f"{reason}. Jobs are checkpointed, and go on when the server is started again")
    if received and received[0] != signal.SIGTERM:
        return 128 + received[0]
    return 0 if server.started or received else 1


def _stop_at_signals(server: uvicorn.Server) -> list[int]:
    """The list of those that come: the first ends the server in order, and later ones change nothing. uvicorn would break off what the
    application does at its end at a second SIGINT, with a traceback.
    """
    received: list[int] = []

    def stop(sig: int, frame: FrameType | None) -> None:  # with uvicorn's names
        received.append(sig)
        server.should_exit = True

    server.handle_exit = stop  # uvicorn sets it for the signals that it knows
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
    return received


def uvicorn_config(app: FastAPI, config: ServerConfig, connections: Connections, tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    """How the application is served."""
    protocol = ConnectionFactory(connections, config.trusted_proxies, tls)
    return uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type] # uvicorn calls it, whatever makes the protocol
        ws="none",
        # uvloop reads from a new connection before TLS can begin on it, and the handshake then never ends
        loop="asyncio" if tls is not None else "auto",
        log_level="error",  # its warnings are of requests that clients got wrong: anyone could fill the log with them
        access_log=False,
        proxy_headers=bool(config.trusted_proxies),
        forwarded_allow_ips=forwarders(config.trusted_proxies),
        server_header=False,
        timeout_keep_alive=config.connections.keep_alive_seconds,  # type: ignore[arg-type] # which may be a float
        timeout_graceful_shutdown=_GRACE_SECONDS,
        lifespan="on",
    )


def _open_tls(config: ServerConfig) -> ssl.SSLContext | None:
    """Raises ConfigError for a certificate or key that cannot be used."""
    if config.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key)
    except OSError as error:  # SSLError is one
        raise ConfigError(
            f"tls_certificate {config.tls_certificate}, tls_key {config.tls_key}: cannot be used: {error.strerror or error}. "
            "Give PEM files of a certificate chain and its key"
        ) from None
    return context


def raise_file_limit(connections: int) -> int:
    """Let this process open as many files as so many connections need, each with an upload; how many of them it then may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted and soft != hard:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    return max(1, (soft - min(_OTHER_FILES, soft // 2)) // 2)


def _listen(config: ServerConfig) -> socket.socket:
    """Raises ConfigError for an address that cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"{config.host}:{config.port}: cannot listen there: {error.strerror}. Choose another port, or 0") from None
    listener.listen(2048)
    return listener


def with_store(config: ServerConfig, operation: Callable[[Connection], object]) -> object:
    """One operation on the store of a server that may be running, for whoever owns its directory. Raises TloraError."""
    engine = open_store(config.database_url or default_url(config.directory))
    writer = Writer(engine)
    try:
        return writer.do(operation)
    finally:
        writer.close()
        engine.dispose()
