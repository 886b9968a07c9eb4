"""Child processes that start in milliseconds: `python -m tlora …` forked from a server that has imported the libraries once.

A child is a process of its own, and a child of the test's: pid, session, environment, directory, standard streams, signals and exit code
are those of any process. What it cannot show is its start: what is imported when, the interpreter's own options, what a library reads from
the environment as it is loaded (OMP_WAIT_POLICY). A test of these starts a real one.

A forked `tlora`, a forked rank and a forked intake fork their own children in the same way: a process forked beside them, before they ran,
is their server. Where that one has torch, a child that tokenizes is forked from it all the same, and torch is hidden from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tlora.libraries import end_imports

REPOSITORY, PYTHON = Path(__file__).parents[1], sys.executable  # a test may put another in place of the latter
SERVERS = {
    "tlora": "training",
    "tlora.engine.worker": "training",
    "tlora.engine.ranks.rank": "training",
    "tlora.planning.base_outline": "training",
    "bench.shared_base": "training",
    "tlora.data.worker": "tokenizing",
    "tlora.service.intake_process": "tokenizing",
}
"""Which server forks the process of a module: those that tokenize go without torch."""
IMPORTS = {
    "training": (
        "tlora.engine.train",
        "tlora.engine.worker",
        "tlora.engine.ranks.rank",
        "tlora.engine.check",
        "tlora.cli.commands",
        "tlora.cli.progress",
        "tlora.cli.result_view",
        "tlora.cli.terminal",
    ),
    "tokenizing": ("tlora.data.worker",),
}
_PARENTS = ("tlora", "tlora.engine.ranks.rank", "tlora.service.intake_process")  # whose children are forked too
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
_LARGEST_REQUEST = 1 << 20
_BEYOND = 512  # the numbers of files that a child keeps
_ADOPTING = threading.Lock()  # one request at a time, to whichever server: while it lasts, what others fork becomes this process's child


class Server:
    """A process that forks children for this one. It ends with it: its end of the socket is closed then, however this one ends."""

    def __init__(self, requests: socket.socket, process: subprocess.Popen[Any] | None = None) -> None:
        self._socket, self._process = requests, process
        self._owner, self._asked = os.getpid(), 0

    @classmethod
    def start(cls, kind: str, environment: Mapping[str, str] = os.environ) -> Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = {**environment, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
        command = [PYTHON, "-m", "tests.forked", kind, str(theirs.fileno())]
        with theirs:
            return cls(ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], env=given, cwd=REPOSITORY))

    @property
    def is_ours(self) -> bool:
        """Not so in a process that a test has forked by itself: whom the server forks is no child of that one."""
        return self._owner == os.getpid()

    def fileno(self) -> int:
        return self._socket.fileno()

    def fork(self, request: dict[str, Any], streams: Sequence[int]) -> int:
        """The pid of a child that runs `request`; the process that forked it has ended by then, and the child been handed to this one.

        Where this is interrupted (by Ctrl-C, or by a test's time limit) the child may have been forked: it is ended by the next call, which
        hears of it first.
        """
        prctl = ctypes.CDLL(None).prctl
        with _ADOPTING:
            self._asked += 1
            prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                numbered = request | {"number": self._asked, "parent": self._owner}
                socket.send_fds(self._socket, [json.dumps(numbered).encode()], streams)
                while True:
                    answer = self._socket.recv(100)
                    assert answer, "the server that forks children has ended"
                    number, pid = map(int, answer.split())
                    if number == self._asked:
                        return pid
                    _end_child(pid)
            finally:
                prctl(_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        self._socket.close()
        if self._process is not None:
            self._process.wait()


def _end_child(pid: int) -> None:
    """Where it is a child of this process: one that was forked and handed to another has ended by itself."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class ForkingPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`, whose `python -m tlora …` is forked on Linux; all other commands are started as ever.

    `environment` is what the servers load libraries with: that of the test run, and not of the test that needs one first. None, in a
    forked child: no server is started beside those that there are.
    """

    servers: ClassVar[dict[str, Server]] = {}
    environment: ClassVar[Mapping[str, str] | None] = os.environ
    _starting: ClassVar[threading.Lock] = threading.Lock()

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        command = [os.fspath(part) for part in asked["args"]] if isinstance(asked["args"], list) else []
        python = command[:1] == [PYTHON]
        safe_path = command[1:2] == ["-P"]
        rest = command[2 if safe_path else 1 :]
        kind = SERVERS.get(rest[1]) if python and rest[:1] == ["-m"] else None
        if kind not in self.servers and self.environment is None:
            kind = "training" if kind == "tokenizing" and "training" in self.servers else None
        if kind in self.servers and not self.servers[kind].is_ours:
            kind = None
        if kind is None or asked["preexec_fn"] or asked["shell"] or sys.platform != "linux":
            super()._execute_child(*given)  # type: ignore[misc]
            return
        with self._starting:
            if kind not in self.servers:
                assert self.environment is not None
                self.servers[kind] = Server.start(kind, self.environment)
        streams = [asked[name] if asked[name] != -1 else place for place, name in enumerate(("p2cread", "c2pwrite", "errwrite"))]
        request = {
            "arguments": rest[1:],
            "command": command,
            "environment": dict(os.environ if asked["env"] is None else asked["env"]),
            "directory": os.path.abspath(asked["cwd"] or "."),  # noqa: PTH100
            "safe_path": safe_path,
            "new_session": bool(asked["start_new_session"]),
            "kept": list(asked["pass_fds"]),
        }
        self.pid = self.servers[kind].fork(request, [*streams, *asked["pass_fds"]])
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))  # type: ignore[attr-defined]


def _serve(kind: str, requests: socket.socket) -> dict[str, Any]:
    """Import, then fork a child for each request. Returns in each child, with its request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test run, which ends this one
    if kind == "tokenizing":
        sys.modules["torch"] = None  # type: ignore[assignment]  # as the worker's own start has it
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # as its parent has it
        importlib.import_module("tlora.data.tokenizer").load_libraries()
    for module in IMPORTS[kind]:
        importlib.import_module(module)
    if kind == "training":
        _warm_up()
    end_imports()
    return _serve_requests(kind, requests)


def _serve_requests(kind: str, requests: socket.socket) -> dict[str, Any]:
    """As `_serve`, of a process that has imported all."""
    while True:
        line, streams, *_ = socket.recv_fds(requests, _LARGEST_REQUEST, 16)
        if not line:
            os._exit(0)
        request: dict[str, Any] = json.loads(line) | {"streams": streams}
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            child = os.fork()
            if not child:
                while os.getppid() == between:
                    os.sched_yield()
                os.close(reading)
                os.close(writing)
                if os.getppid() != request["parent"]:  # it was interrupted, and nobody knows of this child
                    os._exit(0)
                if request["arguments"][0] in _PARENTS and (own := _fork_server(kind, requests, streams)):
                    requests = own
                    continue
                requests.detach()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return request
            os.write(writing, f"{request['number']} {child}".encode())
            os._exit(0)
        os.waitpid(between, 0)
        with contextlib.suppress(BrokenPipeError):  # who asked has been killed
            requests.send(os.read(reading, 100))
        for number in (reading, writing, *streams):
            os.close(number)


def _warm_up() -> None:
    """Make what a process makes once for all bases: transformers' table of weights' names, torch's shape functions, the modules of a
    model and of a tokenizer. It takes 0.4 s of CPU time.
    """
    import torch
    from tqdm import tqdm

    from tests.engine.tiny_runs import save_base
    from tlora.planning.memory import measure
    from tlora.supermodel.load import outline
    from tlora.supermodel.supermodel import SuperModel

    threads, interval = torch.get_num_threads(), tqdm.monitor_interval
    torch.set_num_threads(1)  # neither a pool of threads nor tqdm's would be in the children
    tqdm.monitor_interval = 0
    with tempfile.TemporaryDirectory() as directory:
        measure(SuperModel(outline(str(save_base(Path(directory))))), 0, torch.device("cpu"))
        SuperModel.from_pretrained(directory)
    torch.set_num_threads(threads)
    tqdm.monitor_interval = interval


def _fork_server(kind: str, requests: socket.socket, streams: Sequence[int]) -> socket.socket | None:
    """In a child: forks a server for that child's own children. In that server: the socket of its requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        beyond = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, _BEYOND)
        ours.close()
        ForkingPopen.servers, ForkingPopen.environment = {kind: Server(socket.socket(fileno=beyond))}, None
        subprocess.Popen = ForkingPopen  # type: ignore[misc]
        return None
    for number in (requests.detach(), ours.detach(), *streams):
        os.close(number)
    return theirs


def _become(request: dict[str, Any]) -> None:
    """What the kernel and the interpreter do between fork and `__main__`."""
    if request["new_session"]:
        os.setsid()
    places = [0, 1, 2, *request["kept"]]
    beyond = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, max(places) + 1) for number in request["streams"]]
    for number, place in zip(beyond, places, strict=True):
        os.dup2(number, place)
    servers = {server.fileno() for server in ForkingPopen.servers.values()}
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - set(places) - servers:  # noqa: PTH208
        with contextlib.suppress(OSError):  # the listing's own
            os.close(number)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    buffered = not os.environ.get("PYTHONUNBUFFERED")
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(open(0, "rb", closefd=False))  # type: ignore[misc]  # noqa: SIM115
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        lines = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(open(number, "wb", closefd=False), errors=errors, line_buffering=lines, write_through=not buffered)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    extra = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = extra if request["safe_path"] else [request["directory"], *extra]
    sys.orig_argv[:], sys.argv[:] = request["command"], request["arguments"]
    if torch := sys.modules.get("torch"):  # always, or threads that load a base race for the pool of before the fork
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    if extra:
        sys.modules.pop("sitecustomize", None)
        with contextlib.suppress(ImportError):
            importlib.import_module("sitecustomize")


def _leave_torch() -> None:
    """For a process that goes without torch and is forked from one that has it: transformers looks for it anew, and is as quiet."""
    from transformers.utils import is_torch_available, logging

    sys.modules["torch"] = None  # type: ignore[assignment]
    is_torch_available.cache_clear()
    logging.set_verbosity_error()


def _fork_ranks() -> dict[str, Any] | None:
    """A server for the ranks of this worker, in its session; the worker goes on as it was. Returns in each rank, with its request."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        return _serve_requests("training", theirs)
    theirs.close()
    ForkingPopen.servers, ForkingPopen.environment = {"training": Server(ours)}, None
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    return None


def main() -> None:
    request = _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
    _become(request)
    module = request["arguments"][0]
    if module == "tlora.engine.worker" and (rank := _fork_ranks()) is not None:
        request = rank
        _become(request)
        module = request["arguments"][0]
    if SERVERS[module] == "tokenizing" and sys.modules.get("torch") is not None:
        _leave_torch()
    if module != "tlora":
        sys.modules.pop(module, None)  # what others import of it is another copy, as ever
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
