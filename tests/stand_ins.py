"""Which fakes of the tests stand for which protocols: `make check` finds a verb that one of them lacks. Nothing is run here.

Pyright reads no `test_*.py` but what it needs of them here. A fake of a protocol that is not a subclass of it is to be named.
"""

from __future__ import annotations

from tests.cluster.fake_workers import FakeProcess
from tests.cluster.test_asked_queue import Engine as GivingEngine
from tests.cluster.test_controller import Scripted, Simple
from tests.cluster.test_culprit import OneGroup
from tests.cluster.test_host_keeper import Engine
from tests.cluster.test_killed_workers import Killer
from tests.engine.ranks.test_span_exchange import Memory
from tests.planning.test_memory_probe import Counters
from tests.service.test_service_connections import Client
from tests.sharing.test_layer_stream import Memory as NotedMemory
from tests.sim.test_simulate import Unreliable
from tests.supermodel.test_stage import Before
from tlora.cluster.controller import Backend, Handles
from tlora.cluster.engine_hosts import Keeper
from tlora.cluster.host_engine import HostEngine
from tlora.cluster.remote_worker import Process
from tlora.planning.memory_probe import Meter
from tlora.service.connections import Member
from tlora.sharing.layer_stream import LayerSource
from tlora.sharing.peer_memory import PeerMemory
from tlora.supermodel.stage import Upstream

BACK_ENDS: tuple[type[Backend], ...] = (Scripted, Unreliable)
SCHEDULERS: tuple[type[Handles], ...] = (Simple, OneGroup, Killer)
HOST_ENGINES: tuple[type[HostEngine], ...] = (Engine,)
KEEPERS: tuple[type[Keeper], ...] = (GivingEngine,)
PROCESSES: tuple[type[Process], ...] = (FakeProcess,)
CONNECTIONS: tuple[type[Member], ...] = (Client,)
MEMORIES: tuple[type[PeerMemory], ...] = (Memory,)
LAYER_SOURCES: tuple[type[LayerSource], ...] = (NotedMemory,)
METERS: tuple[type[Meter], ...] = (Counters,)
STAGES: tuple[type[Upstream], ...] = (Before,)
