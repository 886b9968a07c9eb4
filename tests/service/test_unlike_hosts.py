"""What GPUs are is shown where they differ: by the API, by `tlora queue` and on the page."""

from __future__ import annotations

import io

from rich.console import Console

from tlora.cli.service_view import print_cluster
from tlora.cluster_api import ClusterView, GroupView
from tlora.protocol import GpusUnheard, KindsFound, NodeAdded
from tlora.service.live_jobs import LiveJobs
from tlora.service.machine import Devices
from tlora.service.routes.cluster import _host_views
from tlora.shape.gpu_models import find_gpu


def shown(*kinds: str) -> tuple[ClusterView, str]:
    live, gpus = LiveJobs(), tuple(range(len(kinds)))
    for event in (KindsFound(gpus, kinds, (1.0,) * len(kinds)), NodeAdded("local", gpus)):
        assert not list(live.see(event))
    snapshot = live.snapshot(Devices("cuda", gpus), {})
    group = GroupView(id="g0", gpus=[0, 1], base_model="base", token_budget=1024, jobs=[], other_jobs=0, placement="on hosts")
    view = ClusterView(
        device="cuda", gpus=list(gpus), hosts=_host_views(snapshot), groups=[group], waiting=[], others_waiting=0, draining=False
    )
    console = Console(record=True, width=120, file=io.StringIO())
    print_cluster(console, view, {})
    return view, console.export_text()


def test_kinds_are_shown_where_they_differ() -> None:
    view, text = shown("H100", "A100", "A100")
    assert view.hosts[0].kinds == ["H100", "A100", "A100"] and view.kinds_of([0, 1]) == "H100 and A100" and view.kinds_of([2]) == "A100"
    assert "kind" in text and "H100 and A100" in text and "GPUs 0, 1: on hosts" in text


def test_speeds_are_predicted_for_the_slowest_gpu_here() -> None:
    kinds = ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 3090")
    assert Devices("cuda", (0, 1), kinds=kinds).model == find_gpu("rtx3090")
    guessed = Devices("cuda", (0, 1), kinds=(kinds[0], "Voodoo 2")).model
    assert guessed is not None and guessed.name == "Voodoo 2" and Devices("cuda", (0,)).model is None, "no name is known"
    assert Devices("cuda", ()).model == find_gpu("h200"), "only other hosts train"
    assert Devices("cpu", (0,)).model is None


def test_gpus_of_one_kind_are_shown_as_before() -> None:
    view, text = shown("H100", "H100")
    assert view.unlike == {} and view.kinds_of([0]) == "" and "H100" not in text


def test_gpus_of_which_nothing_is_heard_are_not_called_free() -> None:
    live = LiveJobs()
    for event in (NodeAdded("a", (0, 1)), NodeAdded("b", (1000,)), GpusUnheard((1, 1000), "its lease")):
        assert not list(live.see(event))
    hosts = _host_views(live.snapshot(Devices("cpu", (0, 1)), {}))
    view = ClusterView(device="cpu", gpus=[0, 1, 1000], hosts=hosts, groups=[], waiting=[], others_waiting=0, draining=False)
    assert [host.state for host in hosts] == ["not heard in part", "not heard"] and view.states == {1: "not heard", 1000: "not heard"}
    console = Console(record=True, width=120, file=io.StringIO())
    print_cluster(console, view, {})
    assert [line.split()[1:3] for line in console.export_text().splitlines() if line.startswith("1")] == [["not", "heard"]] * 2
