"""Hosts on one machine: namespaces with a network, processes, a host name, a home and files of their own.

Where none can be made (a container without CAP_SYS_ADMIN and CAP_NET_ADMIN), a process stands for a host that says of itself that it is of
another boot and sees no file of the store; it has a home of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from functools import cache
from pathlib import Path

OUTSIDE, INSIDE = "10.213.7.1", "10.213.7.2"  # of a pair of interfaces that nothing else is joined to
_NAMESPACE = "tlora-test"
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
    name = f"{_NAMESPACE}-look"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    if tried.returncode:
        return f"ip netns add: {tried.stderr.strip()}"
    mounts = subprocess.run(["unshare", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True, text=True, check=False)
    return f"unshare: {mounts.stderr.strip()}" if mounts.returncode else ""


@contextlib.contextmanager
def network() -> Generator[None]:
    """A network namespace that reaches this one by `OUTSIDE` and no other address; without a default route."""
    _ip("netns", "add", _NAMESPACE)
    try:
        _ip("link", "add", "tlora-out", "type", "veth", "peer", "name", "tlora-in", "netns", _NAMESPACE)
        _ip("addr", "add", f"{OUTSIDE}/30", "dev", "tlora-out")
        _ip("link", "set", "tlora-out", "up")
        for command in (["addr", "add", f"{INSIDE}/30", "dev", "tlora-in"], ["link", "set", "tlora-in", "up"], ["link", "set", "lo", "up"]):
            _ip("-n", _NAMESPACE, *command)
        yield
    finally:
        subprocess.run(["ip", "link", "del", "tlora-out"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", _NAMESPACE], check=False, capture_output=True)


def cut(direction: str, *, yes: bool = True) -> None:
    """Lose silently all that goes `out` of the namespace, or comes `in`: frames go to an address that nobody has. With `yes` False the line
    has healed.
    """
    where, peer, device = (["-n", _NAMESPACE], OUTSIDE, "tlora-in") if direction == "out" else ([], INSIDE, "tlora-out")
    if yes:
        _ip(*where, "neigh", "replace", peer, "lladdr", "02:00:00:00:00:01", "dev", device, "nud", "permanent")
    else:
        _ip(*where, "neigh", "del", peer, "dev", device)


def start_worker(
    options: Sequence[str], token: str, home: Path, hidden: Sequence[Path] = (), *, name: str = "b", namespace: bool
) -> subprocess.Popen[bytes]:
    """`tlora worker` on a host called `name`. In a namespace it finds nothing in the directories `hidden`."""
    home.mkdir(exist_ok=True)
    command = [sys.executable, *(["-m", "tlora"] if namespace else ["-c", _STRANGER]), "worker", *options]
    if namespace:
        hide = "".join(f"mount -t tmpfs none '{path}' && " for path in hidden)
        script = f'hostname {name} && {hide}cd / && exec "$@"'
        apart = ["unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script, "sh"]
        command = ["ip", "netns", "exec", _NAMESPACE, *apart, *command]
    environment = os.environ | {
        "TLORA_WORKER_TOKEN": token,
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(home),
        "TLORA_CACHE": str(home / "cache"),
    }
    environment |= {} if namespace else {"TLORA_HOST": name}
    return subprocess.Popen(command, env=environment, cwd=home, stdin=subprocess.DEVNULL, start_new_session=True)


def kill_host(process: subprocess.Popen[bytes]) -> None:
    """All processes of it at once, as when its power is cut."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
