"""Clusters and jobs whose times can be worked out by hand: a GPU does 1,000 tokens/s, and nothing else costs anything."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from tlora.protocol import Event, JobGroup, JobProfile, JobSubmitted, NodeAdded, ParallelPlan
from tlora.scheduler.policies import POLICIES
from tlora.shape.cost import BaseConstants, CostModel
from tlora.shape.moves import MoveCosts
from tlora.sim.backend import SimulatedCluster
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape
from tlora.sim.mapping import MappedJob
from tlora.sim.records import FinalState
from tlora.sim.simulate import simulated_cluster

BASE = "base"
IN_EVERY_RUN = ("backfill", "srtf", "residual_capacity")
POLICY_CASES = [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in POLICIES]

FREE_MOVES = MoveCosts(0.0, 0.0, 0.0, 0.0, 0.0, new_gpu_seconds=0.0)


def even_cost() -> CostModel:
    """Micro-batches of 1,000 tokens take a second on one GPU; two GPUs are twice as fast."""
    constants = BaseConstants(1000.0, 0.0, 0.0, 0.0, 0.0, 1e9, 0.0, 1e11, {})
    return CostModel({BASE: constants, "other": constants}, fill_share=1.0)


def made_job(name: str, steps: int, at: float = 0.0, gpus: int = 1, tokens: float = 1000.0, ends: FinalState = "done") -> MappedJob:
    """By itself on one GPU a step takes tokens / 1,000 seconds, so that a job of 1,000 steps of 1,000 tokens takes 1,000 seconds."""
    profile = JobProfile(tokens, steps, 512, 1000)
    seconds = tokens / (1000.0 * gpus)
    return MappedJob(at, steps * seconds, seconds, JobSubmitted(name, BASE, gpus, profile, max_slowdown=2.0), ends, samples_per_step=10**6)


def group_of(name: str, *jobs: str, gpus: tuple[int, ...] = (0,), budget: int = 1000) -> JobGroup:
    """Equal shares of micro-batches of `budget` tokens on each GPU."""
    return JobGroup(name, BASE, gpus, ParallelPlan(len(gpus), budget * len(gpus)), jobs, tuple(1.0 for _ in jobs))


def cluster_of(*jobs: MappedJob, nodes: int = 1, conditions: Conditions | None = None, tick_seconds: float = math.inf) -> SimulatedCluster:
    """Nodes of two GPUs. What starts and moves costs nothing unless `conditions` says so."""
    shape = ClusterShape(nodes, 2, tick_seconds=tick_seconds)
    return simulated_cluster(jobs, shape, even_cost(), conditions or Conditions(moves=FREE_MOVES))


def events_of(cluster: SimulatedCluster) -> Iterator[tuple[float, Event]]:
    """What it tells, with the time; whoever asks acts between two. The nodes that it begins with are left out."""
    while events := cluster.poll():
        yield from ((cluster.now(), event) for event in events if cluster.now() or not isinstance(event, NodeAdded))


def alarm(seconds: float) -> MappedJob:
    """A job that nobody starts: its submission is a moment to act at."""
    return made_job(f"alarm at {seconds}", 1, seconds)


def until(events: Iterator[tuple[float, Event]], kind: type[Event]) -> tuple[float, Event]:
    """The next event of this kind."""
    return next((seconds, event) for seconds, event in events if isinstance(event, kind))
