"""A Ray cluster on this machine, in a process of its own: a head without GPUs, and a raylet for each of some numbers of fake GPUs.

`python -m tests.cluster.ray_cluster PORT GPUS…` prints the address of its head, obeys lines on stdin, and answers each with one: `actor`
kills the agent on the first host, `node` the first host's raylet, `head` the head, after which raylets end by themselves, and `new head`
starts another on its port, with raylets.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tlora.cluster.ray_engine import LOOPBACK

ROOT = Path(__file__).parents[2]
_NODE: dict[str, Any] = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}
_HEAD_LOST_SECONDS = "3"  # after which a raylet or driver that finds no head ends; 60 where nothing is set


class RayCluster:
    """The other end of the process."""

    def __init__(self, process: subprocess.Popen[str], environment: dict[str, str]) -> None:
        self._process, self.environment = process, environment
        self.address = self._answer()

    def say(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith(("127.0.0.1:", "done")):
            assert line, "the cluster has ended"
        return line.strip()


@contextmanager
def ray_cluster(*gpus: int, token: bool = True) -> Iterator[RayCluster]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TLORA_", "CUDA_"))}
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if token else {"RAY_AUTH_MODE": "disabled"}
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), own.get("PYTHONPATH")]))
    lost = {"RAY_gcs_rpc_server_reconnect_timeout_s": _HEAD_LOST_SECONDS}
    environment = {**own, **auth, **lost, "PYTHONPATH": source, "RAY_USAGE_STATS_ENABLED": "0", **LOOPBACK}
    command = [sys.executable, "-m", "tests.cluster.ray_cluster", *map(str, (free_port(), *gpus))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            yield RayCluster(process, environment)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main(port: int, gpus: Sequence[int]) -> None:
    warnings.simplefilter("ignore")
    import ray
    from ray.cluster_utils import Cluster

    cluster, nodes = Cluster(), []

    def start() -> None:
        cluster.add_node(gcs_server_port=port, num_cpus=0, num_gpus=0, include_dashboard=False, **_NODE)
        nodes[:] = [cluster.add_node(num_cpus=1, num_gpus=count, **_NODE) for count in gpus]

    start()
    print(cluster.address, flush=True)
    for order in map(str.strip, sys.stdin):
        if order == "actor":
            ray.init(address=cluster.address, namespace="tlora", log_to_driver=False)
            name = next(name for name in ray.util.list_named_actors() if name.endswith(nodes[0].node_id[:8]))
            ray.kill(ray.get_actor(name))
            ray.shutdown()
        elif order == "node":
            cluster.remove_node(nodes.pop(0), allow_graceful=False)
        elif order == "head":
            cluster.remove_node(cluster.head_node, allow_graceful=False)
            while any(node.any_processes_alive() for node in nodes):  # which reaps them: to its actors a raylet that is a zombie lives
                time.sleep(0.1)
        elif order == "new head":
            start()
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(count) for count in sys.argv[2:]])
