"""`python -m tests.cluster.ray_cluster PLACES…`: a Ray cluster of raylets on this machine, one for each number of fake GPUs, in a process
of its own. It prints its head's address, obeys lines on stdin, and answers each with one:

`actor` kills the agent on the first host, `node` kills the first host's raylet, `head` ends all.
"""

from __future__ import annotations

import sys
import warnings

warnings.simplefilter("ignore")
import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

LOOPBACK = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, **LOOPBACK})
    nodes = [cluster.add_node(num_cpus=1, num_gpus=int(places), **LOOPBACK) for places in sys.argv[1:]]
    print(cluster.address, flush=True)
    if nodes:
        ray.init(address=cluster.address, namespace="tlora", log_to_driver=False)
    for order in map(str.strip, sys.stdin):
        if order == "actor":
            name = next(name for name in ray.util.list_named_actors() if name.endswith(nodes[0].node_id[:8]))
            ray.kill(ray.get_actor(name))
        elif order == "node":
            cluster.remove_node(nodes.pop(0), allow_graceful=False)
        elif order == "head":
            break
        print("done", flush=True)
    if ray.is_initialized():
        ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
