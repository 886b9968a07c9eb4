"""One rank of a worker with several GPUs: `python -m tlora.engine.team.member`. A trainer whose commands come from the worker's process.

The address comes on stdin, its number in RANK. It ends with the worker's process, however that ends: no other process knows it.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from typing import Any

from tlora.libraries import begin_imports, end_imports

if __name__ == "__main__":
    begin_imports()

from tlora.engine.heartbeat import Heartbeat
from tlora.engine.messages import Broken, Bye, Enter, Stop, ToRank
from tlora.engine.ranks.link import RankLine, connect
from tlora.engine.ranks.rank import hello
from tlora.engine.team.spanning_jobs import RankContext
from tlora.engine.worker import open_trainer
from tlora.errors import TloraError
from tlora.link.flight import flight_name
from tlora.link.log import leave, note, show_stacks_when_asked
from tlora.processes import die_with_parent
from tlora.worker_protocol import Alive

BEAT_SECONDS = 1.0


def serve(address: str, number: int, count: int) -> int:
    """Train for the worker at `address` until it sends a stop. Returns the exit status."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    heartbeat = Heartbeat("loading")

    def hear(command: ToRank | None) -> None:
        if command is None:  # what it would write now, its successor may be reading
            os._exit(1)
        if isinstance(command, Stop):
            heartbeat.ending.set()
        inbox.put(command)

    line = connect(address, hear)(hello(number))
    try:
        entered = inbox.get()
        assert isinstance(entered, Enter), entered
        threading.Thread(target=_beat, args=(line, heartbeat), name="heartbeat", daemon=True).start()
        rank_context = RankContext(number, count, entered.store, flight_name(entered.worker_pid, number))
        load = replace(entered.load, device=entered.device)
        trainer = open_trainer(load, inbox, line.send, heartbeat, rank_context, lambda: entered.expected)
        trainer.go_on()
        line.send(Bye())
    except BaseException as error:
        note(traceback.format_exc())
        kind = type(error).__name__
        line.send(Broken(str(error), kind) if isinstance(error, TloraError) else Broken(f"{kind}: {error}"))
        return 1
    return 0


def _beat(line: RankLine, heartbeat: Heartbeat) -> None:
    last_beat = None
    while True:
        beat = Alive(0, heartbeat.phase, heartbeat.count, heartbeat.in_flight)
        if beat != last_beat:
            line.send(beat)
        last_beat = beat
        time.sleep(BEAT_SECONDS)


def main() -> None:
    """Serve and exit."""
    end_imports()
    show_stacks_when_asked()
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # what follows from them is the worker's decision
    status = 1
    try:
        status = serve(sys.stdin.read(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except BaseException:
        note(traceback.format_exc())
    leave(status)


if __name__ == "__main__":
    main()
