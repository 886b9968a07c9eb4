"""`--backend ray`: from its options to a keeper of hosts. Nothing here imports Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tlora import durable
from tlora.cluster.credentials import WorkerTokens
from tlora.cluster.engine_hosts import OpenKeeper
from tlora.cluster.host_engine import WorkerOrder
from tlora.cluster.host_keeper import HostKeeper, HostLimits
from tlora.cluster.listeners import TCP_ADDRESS_FILE, TlsListener
from tlora.cluster.ray_engine import RayEngine
from tlora.errors import ConfigError
from tlora.link.address import tcp_place

_TOKEN_SECONDS = 10 * 365 * 86_400.0  # a host may come at any time
_EVERY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class RayOptions:
    """`address` "": a Ray of this machine, which ends with its controller; else the head's host:port. `worker_listen`: where workers of
    other hosts reach this one.
    """

    address: str = ""
    worker_listen: str | None = None
    limits: HostLimits = field(default_factory=HostLimits)

    @property
    def hosts_may_come(self) -> bool:
        """Whether there may be more GPUs than this machine's."""
        return bool(self.address or self.worker_listen)

    def check(self) -> None:
        """Raises ConfigError."""
        if self.limits.max_hosts is not None and self.limits.max_hosts < max(1, self.limits.min_hosts):
            raise ConfigError(f"max_hosts {self.limits.max_hosts}: must be at least 1 and min_hosts ({self.limits.min_hosts}). Raise it")
        if self.address and (self.worker_listen is None or tcp_place(self.worker_listen)[0] in _EVERY_ADDRESS):
            raise ConfigError(
                f"ray_address {self.address}: workers of its hosts must reach this one, at an address that they can dial. Give "
                "--worker-listen tcp://HOST:PORT with this host's name or address"
            )


def open_ray(
    options: RayOptions, device: str, gpus: tuple[int, ...], store: Path, note: Callable[[str], None]
) -> tuple[TlsListener, OpenKeeper]:
    """Where workers come in, and what keeps hosts. `gpus` are those of this machine for a Ray of its own; `store`: the controller's
    directory. Raises ConfigError, CheckpointError.
    """
    options.check()
    workers = store / "workers"
    durable.make_directory(workers)
    engine = RayEngine(options.address, gpus, workers / "ray.log")
    listener = TlsListener(workers, tcp_place(options.worker_listen)) if options.worker_listen else _listen_here(workers)
    _, token = WorkerTokens(workers).create(_TOKEN_SECONDS)
    connect = options.worker_listen or listener.address
    order = WorkerOrder(connect, listener.fingerprint, token, device)
    return listener, lambda prove: HostKeeper(engine, order, options.limits, prove, note)


def _listen_here(workers: Path) -> TlsListener:
    """On loopback, where an earlier controller of the store has listened if that is free: its workers dial that again."""
    with contextlib.suppress(OSError, ConfigError):
        return TlsListener(workers, tcp_place((workers / TCP_ADDRESS_FILE).read_text(encoding="utf-8").strip()))
    return TlsListener(workers, ("127.0.0.1", 0))
