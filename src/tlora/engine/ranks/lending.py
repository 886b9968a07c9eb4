"""A worker that lends its GPUs: it starts ranks here for the worker of another host that leads their group, and passes on what they say.

It holds no job and decides nothing. What names paths of the leader's host is given this host's instead: the base and the jobs' data, which
lie here once. With the line to the leader it and its ranks end.
"""

from __future__ import annotations

import os
import platform
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tlora.engine.interrupts import OF_THE_TERMINAL, blocked_in_children
from tlora.engine.messages import FROM_RANK, TO_RANK, Enter, Faulty, FromRank, Leave, Sending, Spread, Stop, ToRank
from tlora.engine.ranks.gpu_change import worker_device
from tlora.engine.ranks.lending_line import BEAT_SECONDS, LENDING, Frame, KillRank, Lent, RankEnded, StartRank, framed, read_frame
from tlora.engine.ranks.link import Meeting, encode
from tlora.engine.ranks.rank_group import RANK_OF_WORKER
from tlora.errors import TloraError
from tlora.link.keyed_listener import dial_keyed
from tlora.link.lines import Buffer, Line
from tlora.link.log import note
from tlora.link.supervisor import SupervisedProcess, start_process
from tlora.sharing.multicast import NO_MULTICAST
from tlora.worker_protocol import Join, Lending, Load

_GONE_SECONDS = 20.0
_SAVE_SECONDS = 20.0  # for a leader to save what stages here have parts of


class Lender:
    """`load`: what the group's worker loads, with this host's paths; `bring` gives a job those."""

    def __init__(self, load: Load, gpus: tuple[int, ...], lending: Lending, bring: Callable[[Join], Join]) -> None:
        self._load, self._gpus, self._lending, self._bring = load, gpus, lending, bring
        self._meeting = Meeting()
        self._processes: dict[int, SupervisedProcess] = {}
        self._gpu_of: dict[int, int] = {}
        self._coming: dict[tuple[int, str], Spread] = {}  # parts whose data is on its way here, by rank and job
        self._deciding = threading.Lock()  # whether such a part is sent or has left
        self._has_stages, self._over = False, threading.Event()

    def run(self, commands: queue.SimpleQueue[Any]) -> str:
        """Until the leader lets it go, is gone, or a `Stop` comes. Returns why. Raises ConfigError where the leader cannot be reached."""
        lending = self._lending
        line = dial_keyed(lending.address, lending.fingerprint, lending.key)
        lent = LENDING.encode(Lent(platform.node(), os.getpid(), tuple(lending.gpus)))
        line.send(lent)
        reasons: list[str] = []
        threading.Thread(target=self._obey, args=(line, reasons), name="leader", daemon=True).start()
        threading.Thread(target=self._await_stop, args=(line, commands, reasons), name="commands", daemon=True).start()
        try:
            while (item := self._next()) is not None:
                if not item:
                    line.send(lent)
                    continue
                rank, report = item
                if report is None:
                    self._end_rank(line, rank)
                else:
                    self._send(line, rank, *encode(FROM_RANK, report))
        finally:
            self._over.set()
            line.end()
            for process in self._processes.values():
                process.kill(_GONE_SECONDS)
            self._meeting.close(keep_logs=False)
        return reasons[0] if reasons else "its GPUs are needed by the other host no more, or that one is gone"

    def _next(self) -> tuple[int, FromRank | Sending | None] | tuple[()] | None:
        """What a rank has said; () where none has said anything for a while."""
        try:
            return self._meeting.inbox.get(timeout=BEAT_SECONDS)
        except queue.Empty:
            return ()

    def _send(self, line: Line, rank: int, *parts: Buffer) -> None:
        line.send(*framed(rank, parts))

    def _end_rank(self, line: Line, rank: int) -> None:
        process = self._processes[rank]
        process.wait(1.0)  # it is about to exit
        how = process.how_it_ended()
        process.kill(_GONE_SECONDS)
        line.send(LENDING.encode(RankEnded(rank, how)))

    def _await_stop(self, line: Line, commands: queue.SimpleQueue[Any], reasons: list[str]) -> None:
        while not isinstance(commands.get(), Stop):
            pass
        reasons.append("it was told to stop")
        if self._has_stages:  # the leader, where it is told so at the same time, saves its jobs with what is here
            self._over.wait(_SAVE_SECONDS)
        line.end()

    # -- what the leader says ----------------------------------------------------------------------------------------------

    def _obey(self, line: Line, reasons: list[str]) -> None:
        """In a thread of its own, until the line ends."""
        try:
            for received in line.lines():
                match LENDING.decode(received):
                    case StartRank(rank, gpu):
                        self._start(line, rank, gpu)
                    case KillRank(rank) if rank in self._processes:
                        self._processes[rank].kill(_GONE_SECONDS)
                    case Frame(rank) as frame:
                        self._pass(line, rank, read_frame(line, frame, TO_RANK.decode))
                    case _:
                        pass
        except (OSError, ValueError) as error:
            reasons.append(f"the line to the worker that leads has ended ({error})")
        finally:
            line.close()
            self._meeting.inbox.put(None)

    def _start(self, line: Line, rank: int, gpu: int) -> None:
        self._gpu_of[rank] = self._lending.gpus[gpu]
        environment = {**NO_MULTICAST, "WORLD_SIZE": str(rank + 1), "LOCAL_RANK": str(rank), "RANK": str(rank)}
        module, *arguments = RANK_OF_WORKER
        log = open(2, "wb", 0, closefd=False)  # noqa: SIM115
        try:
            with blocked_in_children(OF_THE_TERMINAL):
                self._processes[rank] = start_process(module, log, arguments, environment, self._meeting.address, own_session=False)
        except OSError as error:
            line.send(LENDING.encode(RankEnded(rank, f"cannot be started: {error}")))

    def _pass(self, line: Line, rank: int, command: ToRank | Sending) -> None:
        match command:
            case Enter():
                self._has_stages = bool(command.stages)
                load = replace(self._load, layout="whole", calibrate=False)
                device = worker_device(load.device, self._gpus, self._gpu_of[rank])
                command = replace(command, load=load, device=device, store="", together=1, worker_pid=os.getpid())
            case Spread():
                self._coming[rank, command.join.job.name] = command
                threading.Thread(target=self._fetch, args=(line, rank, command), daemon=True).start()
                return
            case Leave(name):
                with self._deciding:
                    self._coming.pop((rank, name), None)
            case _:
                pass
        self._meeting.send(rank, command)

    def _fetch(self, line: Line, rank: int, spread: Spread) -> None:
        """In a thread of its own: what else is said to ranks does not wait for data."""
        name = spread.join.job.name
        try:
            brought = replace(spread, join=self._bring(spread.join))
        except (TloraError, OSError) as error:
            note(f"{name}: its data does not come from the controller's host: {error}")
            self._send(line, rank, FROM_RANK.encode(Faulty(name, f"its data does not come to host {platform.node()}: {error}")))
            return
        with self._deciding:
            if self._coming.get((rank, name)) is spread:  # it has not left meanwhile
                self._meeting.send(rank, brought)
