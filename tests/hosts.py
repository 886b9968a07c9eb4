"""Hosts on one machine: namespaces with a network, processes, a host name, a home and files of their own.

Where none can be made (a container without CAP_SYS_ADMIN and CAP_NET_ADMIN), a process stands for a host that says of itself that it is of
another boot and sees no file of the store; it has a home of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from functools import cache
from pathlib import Path

_STRANGER = """
import dataclasses, sys
from tlora.link import authentication
own = authentication.identify
authentication.identify = lambda pid: dataclasses.replace(own(pid), boot="of another host")
authentication.prove = lambda path: authentication.AuthResponse(problem="No such file or directory")
from tlora.cli import main
sys.argv[0] = "tlora"
main()
"""


@cache
def why_no_namespaces() -> str:
    """ "" where they can be made."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip or unshare is not installed"
    name = f"tlora-look-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    if tried.returncode:
        return f"ip netns add: {tried.stderr.strip()}"
    mounts = subprocess.run(["unshare", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True, text=True, check=False)
    return f"unshare: {mounts.stderr.strip()}" if mounts.returncode else ""


class Network:
    """Hosts 0, 1, … and this machine on a network of their own, 10.213.x.0/24: each host is a network namespace that reaches the others by
    their addresses and nothing else. `here` is this machine's address.
    """

    def __init__(self, number: int, hosts: int) -> None:
        self.here = f"10.213.{number}.1"
        self._bridge, self.hosts = f"tlora{number}", range(hosts)
        self._number = number

    def namespace(self, host: int) -> str:
        return f"{self._bridge}-{host}"

    def address(self, host: int) -> str:
        return f"10.213.{self._number}.{host + 2}"

    def cut(self, host: int, direction: str, *, yes: bool = True) -> None:
        """Lose silently all that goes `out` of a host to this machine, or comes `in` from it: frames go to an address that nobody has. With
        `yes` False the line has healed.
        """
        where, peer, device = ["-n", self.namespace(host)], self.here, "eth0"
        if direction == "in":
            where, peer, device = [], self.address(host), self._bridge
        if yes:
            _ip(*where, "neigh", "replace", peer, "lladdr", "02:00:00:00:00:01", "dev", device, "nud", "permanent")
        else:
            _ip(*where, "neigh", "del", peer, "dev", device)

    def delay(self, host: int, direction: str, *, yes: bool = True) -> None:
        """Let a kilobyte a second through of what goes `out` of a host or comes `in`, 10 s late at most; what comes later still is lost."""
        where, device = (["-n", self.namespace(host)], "eth0") if direction == "out" else ([], self._outer(host))
        how = "tbf rate 8kbit burst 2kb latency 10s" if yes else ""
        command = ["tc", *where, "qdisc", "add" if yes else "del", "dev", device, "root", *how.split()]
        subprocess.run(command, check=True, capture_output=True)

    @property
    def can_delay(self) -> bool:
        """Whether this system has what `delay` takes: tc, and a kernel with token buckets."""
        try:
            for yes in (True, False):
                self.delay(0, "in", yes=yes)
        except (OSError, subprocess.CalledProcessError):
            return False
        return True

    def make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.here}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in self.hosts:
            name, outer = self.namespace(host), self._outer(host)
            _ip("netns", "add", name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", outer, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", device, "up")

    def remove(self) -> None:
        """Links by name: a namespace lives on while a process that was killed in it has not gone."""
        for host in self.hosts:
            for command in (["link", "del", self._outer(host)], ["netns", "del", self.namespace(host)]):
                subprocess.run(["ip", *command], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)

    def _outer(self, host: int) -> str:
        return f"{self._bridge}p{host}"


def _claim_number(claim: socket.socket) -> int:
    for number in range(7, 250):
        with contextlib.suppress(OSError):
            claim.bind(f"\0tlora-test-network-{number}")
            return number
    raise AssertionError("all numbers of networks are taken")


@contextlib.contextmanager
def network(hosts: int = 1) -> Generator[Network]:
    """One that no other process of the tests has."""
    with socket.socket(socket.AF_UNIX) as claim:
        made = Network(_claim_number(claim), hosts)
        made.remove()  # what a killed test has left
        try:
            made.make()
            yield made
        finally:
            made.remove()


def start_worker(
    options: Sequence[str], token: str, home: Path, hidden: Sequence[Path] = (), *, name: str = "b", namespace: str | None
) -> subprocess.Popen[bytes]:
    """`tlora worker` on a host called `name`. In a network namespace it finds nothing in the directories `hidden`."""
    home.mkdir(exist_ok=True)
    command = [sys.executable, *(["-m", "tlora"] if namespace else ["-c", _STRANGER]), "worker", *options]
    if namespace is not None:
        hide = "".join(f"mount -t tmpfs none '{path}' && " for path in hidden)
        script = f'hostname {name} && {hide}cd / && exec "$@"'
        apart = ["unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script, "sh"]
        command = ["ip", "netns", "exec", namespace, *apart, *command]
    environment = os.environ | {
        "TLORA_WORKER_TOKEN": token,
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(home),
        "TLORA_CACHE": str(home / "cache"),
    }
    environment |= {} if namespace is not None else {"TLORA_HOST": name}
    return subprocess.Popen(command, env=environment, cwd=home, stdin=subprocess.DEVNULL, start_new_session=True)


def kill_host(process: subprocess.Popen[bytes]) -> None:
    """All processes of it at once, as when its power is cut."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
