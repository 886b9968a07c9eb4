"""The process that talks to Ray: `python -m tlora.cluster.ray_driver`. The only file that imports ray.

It is told over its line what is wanted, and answers with what there is (`host_engine.py`). Per host there is a detached named actor
(`host_agent.py`), which outlives this process; the next driver on the cluster finds it by its name.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# (ray is an extra, which need not be there where types are checked)
from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tlora.cluster.host_agent import HostAgent
from tlora.cluster.host_engine import ENGINE_MESSAGES, AgentReport, EngineHost, HostsSeen, HostsWanted, WorkerEnd, WorkerOrder
from tlora.cluster.ray_engine import LET_US_IN, REFUSED_US
from tlora.link.supervisor import line_to_parent

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray
    from ray.autoscaler.sdk import request_resources
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAMESPACE = "tlora"
_PREFIX = "host-"
_ANSWER_SECONDS = 5.0  # for agents to report; one that starts takes longer, and is asked again
_STORE_BYTES = 80 << 20  # of a local Ray's objects, of which there are none
_ZONE = "ray.io/availability-zone"
_SPARE_WORKERS = {"RAY_kill_child_processes_on_worker_exit": "0"}  # with an actor: they hear of its end by their lines, and save their jobs


class Driver:
    """Connected to a cluster. `_agents`: the actors by the names of their hosts."""

    def __init__(self) -> None:
        self._agents: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}  # the host's name -> Ray's id of the node
        self._asked: dict[str, Any] = {}  # reports that have not come
        self._requested: tuple[int, int] | None = None
        for name in ray.util.list_named_actors():
            if name.startswith(_PREFIX):
                self._agents[name.removeprefix(_PREFIX)] = ray.get_actor(name)
        self._strange = set(self._agents)  # of an earlier driver: they are told how workers start now

    def sync(self, wanted: HostsWanted) -> HostsSeen:
        problems: list[str] = []
        hosts = {host.name: host for host in self._hosts(wanted.order.device)}
        for name in [name for name in self._agents if name not in hosts]:  # its node is dead
            del self._agents[name]
        for name in wanted.keep:
            if name in hosts and name not in self._agents:
                self._agents[name] = self._start(hosts[name], wanted.order)
        for name in self._strange & self._agents.keys():
            self._agents[name].follow.remote(wanted.order)
        self._strange.clear()
        reports = self._reports(wanted.workers, problems)
        for name in set(wanted.drain) & self._agents.keys():
            self._agents[name].drain.remote()
            if name in reports and not reports[name].running:
                ray.kill(self._agents.pop(name))
                del reports[name]
        self._request(wanted)
        return HostsSeen(tuple(hosts.values()), tuple(reports.values()), tuple(problems))

    def _hosts(self, device: str) -> list[EngineHost]:
        """Live nodes with GPUs; those without, too, where the cluster trains on CPUs."""
        found: list[EngineHost] = []
        for node in ray.nodes():
            places = int(node["Resources"].get("GPU", 0)) or (1 if device == "cpu" and node["Resources"].get("CPU", 0) else 0)
            if node["Alive"] and places:
                name = f"{node['NodeManagerHostname']}-{node['NodeID'][:8]}"
                self._nodes[name] = node["NodeID"]
                found.append(EngineHost(name, places, node["Labels"].get(_ZONE, "")))
        return found

    def _start(self, host: EngineHost, order: WorkerOrder) -> Any:
        """An actor that holds the node's GPUs, so that Ray gives them to nobody else and does not take the node for idle."""
        node = next(node for node in ray.nodes() if node["NodeID"] == self._nodes[host.name])
        options = {
            "name": f"{_PREFIX}{host.name}",
            "lifetime": "detached",
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "num_cpus": 0,
            "num_gpus": int(node["Resources"].get("GPU", 0)),
            "max_restarts": 0,
            "runtime_env": {"env_vars": _SPARE_WORKERS},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._nodes[host.name], soft=False),
        }
        return ray.remote(Agent).options(**options).remote(host.name, host.failure_domain, host.places, order)

    def _reports(self, workers: Mapping[str, Sequence[int]], problems: list[str]) -> dict[str, AgentReport]:
        """What the agents report within some seconds. One that has died is forgotten, so that the next call starts it again."""
        for name, agent in self._agents.items():
            if name not in self._asked:
                self._asked[name] = agent.report.remote(list(workers.get(name, ())))
        if self._asked:
            ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=_ANSWER_SECONDS)
        found: dict[str, AgentReport] = {}
        for name, asked in list(self._asked.items()):
            if not ray.wait([asked], timeout=0)[0]:
                continue
            del self._asked[name]
            try:
                running, ended = ray.get(asked)
            except ray.exceptions.ActorUnavailableError:  # for now: it is asked again
                continue
            except ray.exceptions.RayActorError as error:
                self._agents.pop(name, None)
                problems.append(f"the agent on {name} has ended: {' '.join(str(error).split())[:300]}")
            else:
                found[name] = AgentReport(name, running, tuple(WorkerEnd(pid, how) for pid, how in ended))
        return found

    def _request(self, wanted: HostsWanted) -> None:
        wish = (wanted.request, wanted.request_places)
        if wanted.request is not None and wish != self._requested:
            self._requested = (wanted.request, wanted.request_places)
            resource = "GPU" if wanted.order.device == "cuda" else "CPU"
            request_resources(bundles=[{resource: wanted.request_places}] * wanted.request)


class Agent(HostAgent):
    """`HostAgent` in an actor, which has the GPUs that Ray has given to it."""

    def __init__(self, host: str, failure_domain: str, places: int, order: WorkerOrder) -> None:
        given = [int(gpu) for gpu in ray.get_gpu_ids()]
        super().__init__(host, failure_domain, given or range(places), order)


def connect(address: str, gpus: list[int]) -> None:
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
    if address:
        ray.init(address=address, **options)
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    local = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    ray.init(address="local", num_gpus=len(gpus), num_cpus=max(1, len(gpus)), **local, **options)


def probe(address: str) -> int:
    """Whether a cluster refuses who has no token: an exit status."""
    from ray._raylet import GcsClient

    try:
        GcsClient(address=address)  # asks for the cluster's id
    except ray.exceptions.AuthenticationError:
        return REFUSED_US
    except Exception as error:
        print(" ".join(str(error).split())[:300], file=sys.stderr)  # noqa: T201
        return 1
    return LET_US_IN


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tlora.cluster.ray_driver", description=__doc__)
    parser.add_argument("--probe", metavar="ADDRESS")
    parser.add_argument("--address", default="")
    parser.add_argument("--gpus", default="")
    arguments = parser.parse_args()
    if arguments.probe:
        raise SystemExit(probe(arguments.probe))
    line = line_to_parent()
    connect(arguments.address, [int(gpu) for gpu in arguments.gpus.split(",") if gpu])
    driver = Driver()
    for received in line.lines():
        wanted = ENGINE_MESSAGES.decode(received)
        assert isinstance(wanted, HostsWanted), wanted
        line.send(ENGINE_MESSAGES.encode(driver.sync(wanted)))


if __name__ == "__main__":
    main()
