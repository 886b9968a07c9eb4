"""Ray as a `HostEngine`. Ray itself is imported in a process of its own (`ray_driver.py`): a driver dies when its head is lost for long,
and a server must not.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tlora.cluster.host_engine import ENGINE_MESSAGES, EngineLostError, HostsSeen, HostsWanted
from tlora.errors import ConfigError
from tlora.link.lines import Line
from tlora.link.supervisor import SupervisedProcess, start_process, start_talking

MODULE = "tlora.cluster.ray_driver"
OLDEST = (2, 56)
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray's switch for: this machine's address is 127.0.0.1, and no other is used
REFUSED_US, LET_US_IN = 0, 3  # exit statuses of a probe without a token
_SYNC_SECONDS = 120.0  # a head takes 20 s to start
_PROBE_SECONDS = 60.0


class RayEngine:
    """`address`: host:port of a cluster's head; "" for a Ray of this machine, with `gpus`, which ends with this process."""

    name = "Ray"

    def __init__(self, address: str, gpus: tuple[int, ...], log: Path) -> None:
        """`log` gets what the driver prints. Raises ConfigError: without the package, and for a cluster that lets in anybody."""
        check_installed()
        self._address, self._log, self._lock = address, log, threading.Lock()
        self._gpus = ",".join(map(str, gpus))
        self._environment = {"RAY_AUTH_MODE": "token", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        if address:
            check_address(address, log)
        else:
            self._environment |= {"RAY_AUTH_TOKEN": secrets.token_hex(32)} | LOOPBACK
        self._driver: tuple[SupervisedProcess, Line] | None = None

    def sync(self, wanted: HostsWanted) -> HostsSeen:
        with self._lock:
            if self._driver is None:
                arguments = ["--address", self._address, "--gpus", self._gpus]
                self._driver = start_talking(MODULE, self._log, arguments, self._environment)
            process, line = self._driver
            line.send(ENGINE_MESSAGES.encode(wanted))
            try:
                answer = line.read_line(_SYNC_SECONDS)
                seen = ENGINE_MESSAGES.decode(answer) if answer is not None else None
            except (TimeoutError, ValueError) as error:
                seen = None
                why = f"its driver says nothing of use ({error or 'in time'})"
            else:
                process.wait(_PROBE_SECONDS if seen is None else 0)
                why = f"its driver {process.how_it_ended()}"
            if not isinstance(seen, HostsSeen):
                self._drop()
                raise EngineLostError(why)
            return seen

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._driver is not None:
            process, line = self._driver
            self._driver = None
            line.end()
            if not process.wait(10.0):
                process.kill(10.0)
            with contextlib.suppress(OSError):
                line.close()


def check_installed() -> None:
    """Raises ConfigError where Ray is not there, or too old. It is not imported."""
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise ConfigError("--backend ray: needs the package 'ray': pip install 'tlora[ray]'") from None
    if tuple(int(part) for part in found.split(".")[:2] if part.isdecimal()) < OLDEST:
        raise ConfigError(f"--backend ray: needs ray {OLDEST[0]}.{OLDEST[1]} or newer, and this is {found}: pip install -U 'tlora[ray]'")


def check_address(address: str, log: Path) -> None:
    """Raises ConfigError for a cluster that cannot be reached, or lets in who has no token: anybody could run programs there."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()) or "/" in address:
        raise ConfigError(f"--ray-address {address}: must be host:port of the cluster's head, as `ray start --head` prints it")
    bare = dict.fromkeys(("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"), "") | {"RAY_AUTH_MODE": "disabled"}
    probe = start_process(MODULE, log, ["--probe", address], bare)
    if not probe.wait(_PROBE_SECONDS):
        probe.kill(10.0)
    if probe.exit_status == LET_US_IN:
        raise ConfigError(
            f"--ray-address {address}: this cluster asks for no token, so anybody who reaches it could run programs on its hosts. Start "
            "it with RAY_AUTH_MODE=token (`ray get-auth-token --generate` makes one), on every host"
        )
    if probe.exit_status != REFUSED_US:
        raise ConfigError(f"--ray-address {address}: no Ray answers there ({probe.last_line()}). Start it with `ray start --head`")
    if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH") or (Path.home() / ".ray/auth_token").exists()):
        raise ConfigError(
            f"--ray-address {address}: this cluster asks for a token. Set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, or put it into "
            "~/.ray/auth_token"
        )
