"""GPUs of two kinds in one cluster, which fake workers on a CPU are said to have: what the scheduler is told, and who is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.fake_workers import local_backend
from tests.cluster.test_local import job, submitted
from tests.scheduler.mirror import made_spec
from tlora import durable
from tlora.cluster.hosts import STRIDE, node_events
from tlora.cluster.kept_kind import KeptKind, processor_here, processor_of
from tlora.cluster.listeners import Peer
from tlora.cluster.local_machine import LocalMachine
from tlora.cluster.remote_hosts import RemoteHosts
from tlora.errors import ConfigError
from tlora.link.versions import versions
from tlora.protocol import KindsFound, MemoryFound, NodeAdded, StartGroup
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.cost import CostModel, scaled_constants
from tlora.shape.gpu_files import training_speed
from tlora.shape.predicted_constants import live_constants
from tlora.worker_protocol import Device, Hello, HostLabels

NEW, OLD = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 3090"


def test_the_speed_of_a_gpu_is_that_of_the_table() -> None:
    assert training_speed(NEW) == 1.0 and 0.1 < training_speed("of no row") < 0.2 and 0.05 < training_speed(OLD) < 0.1


def test_a_live_cluster_places_jobs_by_the_speed_of_each_gpu(tmp_path: Path) -> None:
    notes: list[str] = []
    with local_backend(tmp_path, note=notes.append, kinds=(OLD, NEW)) as backend:
        events = backend.poll()
        assert events[:2] == [KindsFound((0, 1), (OLD, NEW), (training_speed(OLD), 1.0)), NodeAdded("local", (0, 1))]
        speed = training_speed(OLD)
        cost = CostModel({"base": scaled_constants(live_constants(16e9), speed)}, speed=speed)
        scheduler = Scheduler(LIVE_POLICIES["residual_capacity"](), cost)
        for event in events:
            scheduler.handle(event, 0.0)
        started: list[tuple[int, ...]] = []
        for name in ("a", "b"):
            spec = made_spec(name, tokens=16_384.0, steps=10_000, base_model="base", max_slowdown=1.0, least_gpus=1)
            started += [action.group.gpus for action in scheduler.handle(spec, 1.0) if isinstance(action, StartGroup)]
        assert started == [(1,), (0,)]
        seconds = [scheduler.state.jobs[name].step_seconds for name in "ab"]
        assert seconds[0] == pytest.approx(CostModel({"base": live_constants(16e9)}).alone_step_seconds("base", 16_384.0, 1))
        assert seconds[1] > 10 * seconds[0]
    assert notes == [
        f"GPUs of several kinds: 0 is {OLD} (0.08 x an H200), 1 is {NEW} (1.00 x an H200); jobs are placed by each one's speed"
    ]


def test_a_deterministic_cluster_has_gpus_of_one_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"deterministic: true keeps each job on one kind .* \(--gpus 0,2,\), or deterministic: false"):
        LocalMachine((0, 1, 2), "cuda", {}, tmp_path, deterministic=True, kinds=(NEW, OLD, NEW))
    assert LocalMachine((0, 1), "cuda", {}, tmp_path, kinds=(NEW, OLD)).kinds == (NEW, OLD)
    with local_backend(tmp_path, deterministic=True, kinds=(NEW, NEW)) as backend:
        kept = backend.worker_pool.remote_hosts.kept_kind
        assert kept is not None and kept.name == NEW


def labels(*kinds: str, processor: str = "") -> HostLabels:
    return HostLabels("h", devices=tuple(Device(kind) for kind in kinds), processor=processor)


def test_a_host_of_another_kind_is_refused_where_bits_must_not_depend_on_it(tmp_path: Path) -> None:
    none, new = KeptKind(tmp_path, "", print), KeptKind(tmp_path, NEW, print)
    assert new.why_not(labels(OLD)).startswith(f"has {OLD}, and this cluster is deterministic: it keeps its jobs on {NEW}")
    assert not new.why_not(labels(NEW)) and not none.why_not(labels(OLD)), "the first host decides"
    assert none.why_not(labels(OLD, NEW)).startswith(f"has {NEW}, and this cluster is deterministic: it keeps its jobs on {OLD}")
    assert RemoteHosts(tmp_path, (), 1.0, lambda: "cuda", print).kept_kind is None, "else all kinds are taken"


def test_processors_of_two_kinds_are_two_kinds(tmp_path: Path) -> None:
    kept = KeptKind(tmp_path, processor_here(), print)
    assert processor_here() and kept.why_not(labels("cpu", processor="GenuineTest 6 1")).startswith("has GenuineTest 6 1, and this")
    assert not kept.why_not(labels("cpu", "cpu", processor=processor_here()))


def test_processors_of_one_design_that_can_do_different_things_are_two_kinds(tmp_path: Path) -> None:
    """As where a virtual machine has no AVX-512: its products have other last bits. What is not of vectors does not count."""
    intel = "processor : 0\nvendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\nflags : fpu {} avx2 fma\n\nprocessor : 1\nmodel : 7"
    whole, less, other = (processor_of(intel.format(flags)) for flags in ("sse2 avx512f smep sme_coherent", "sse2", "ibrs avx512f sse2"))
    assert whole == other == "GenuineIntel 6 143, with avx2 avx512f fma sse2" and less == "GenuineIntel 6 143, with avx2 fma sse2"
    assert processor_of("CPU implementer : 0x41\nFeatures : fp asimd sme crc32\nCPU part : 0xd40") == "0x41 0xd40, with asimd sme"
    assert processor_of("") == ""
    kept = KeptKind(tmp_path, whole, print)
    told = kept.why_not(labels("cpu", processor=less))
    assert told.startswith("has GenuineIntel 6 143 without avx512f, and this cluster"), told
    assert "keeps its jobs on GenuineIntel 6 143 with avx512f, for" in told and not kept.why_not(labels("cpu", processor=other))


def test_a_processor_that_is_known_by_its_design_alone_is_taken_by_it(tmp_path: Path) -> None:
    """A store of an earlier version has no more of it, and takes what it lacks from the first host that comes."""
    durable.write_file(tmp_path / "kind.json", json.dumps({"kind": "GenuineIntel 6 143"}))
    whole, less, other = "GenuineIntel 6 143, with avx2 fma", "GenuineIntel 6 143, with fma", "GenuineIntel 6 85, with avx2 fma"
    notes: list[str] = []
    kept = KeptKind(tmp_path, "", notes.append)
    assert not kept.why_not(labels("cpu", processor=whole)) and kept.why_not(labels("cpu", processor=other))
    kept.settle(whole)
    assert kept.name == KeptKind(tmp_path, whole, notes.append).name == whole and not notes
    assert kept.why_not(labels("cpu", processor=less)) and not kept.why_not(labels("cpu", processor="GenuineIntel 6 143"))
    kept.settle("GenuineIntel 6 143")
    assert kept.name == whole
    (new := tmp_path / "new").mkdir()
    in_one_name = "GeForce RTX 2080 with Max-Q Design"
    assert KeptKind(new, in_one_name, notes.append).why_not(labels("GeForce RTX 2080"))


def test_the_kind_on_which_jobs_began_decides_after_a_restart(tmp_path: Path) -> None:
    """Not the first stranger that dials: a cluster without GPUs of its own, with a job that is unfinished, and then without one."""
    for dials, decided in (("", ""), (NEW, NEW), (OLD, NEW)):
        with local_backend(tmp_path, deterministic=True, device="cuda", gpus=()) as backend:
            kept = backend.worker_pool.remote_hosts.kept_kind
            assert kept is not None
            backend.submit(submitted("a"), job("a"))
            if dials and not kept.why_not(labels(dials)):
                kept.settle(dials)
            assert kept.name == decided
    notes: list[str] = []
    with local_backend(tmp_path, note=notes.append, deterministic=True, kinds=(OLD, OLD)) as backend:
        assert any(f"jobs here began on {NEW} and go on on {OLD}" in line for line in notes)
    with local_backend(tmp_path, deterministic=True, device="cuda", gpus=()) as backend:
        kept = backend.worker_pool.remote_hosts.kept_kind
        assert kept is not None and kept.name == "" and not kept.why_not(labels(NEW)), "no job was left"


def test_a_worker_that_comes_to_leave_decides_no_kind(tmp_path: Path) -> None:
    hosts, peer = RemoteHosts(tmp_path, (), 1.0, lambda: "cuda", lambda _: None), Peer(7, None, is_remote=True)
    kept = hosts.kept_kind = KeptKind(tmp_path, "", print)
    for name, kind, said, decided in (("old", OLD, {"tlora": "0.0.1"}, ""), ("new", NEW, versions(), NEW), ("more", OLD, versions(), NEW)):
        host = HostLabels(name, devices=(Device(kind),))
        hosts.take_on((hosts.hosts.first_number(host),), Hello(name, (0,), said, host=host), host, peer, 1)
        assert kept.name == decided


def test_a_host_brings_what_its_gpus_are() -> None:
    host = HostLabels("h", "rack", devices=(Device(OLD, 24 << 30), Device(NEW, 80 << 30)))
    gpus = (STRIDE, STRIDE + 1)
    kinds, memory, node = node_events(host, gpus)
    assert kinds == KindsFound(gpus, (OLD, NEW), (training_speed(OLD), 1.0)) and node == NodeAdded("h", gpus, "rack")
    assert isinstance(memory, MemoryFound)
    on_cpu = HostLabels("c", devices=(Device("cpu", 1 << 30),))
    assert [type(event) for event in node_events(on_cpu, (STRIDE,))] == [MemoryFound, NodeAdded]
