"""What a worker has reported and no controller has taken is said to the next one too, also where the worker is about to end."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

from tlora.link.dialer import Dialer
from tlora.link.lines import Line
from tlora.worker_protocol import Ack, Alive, Left


class Client:
    def alive(self) -> Alive:
        return Alive(0, "training", 0)


def test_a_worker_that_ends_first_says_again_what_was_not_taken() -> None:
    client: Any = Client()
    dialer = Dialer(None, client, 600.0)  # type: ignore[arg-type]
    dialer.put([Left("a", 2, None)], 1)
    (told,) = dialer._outbox.fresh()  # sent to a controller that was killed
    here, there = socket.socketpair()
    with here, there, there.makefile("rb") as heard:
        dialer._take(Line(here), Ack(0))  # the next one has answered
        drained = threading.Thread(target=dialer.drain, args=(60.0,))
        drained.start()
        drained.join(0.3)
        assert drained.is_alive()
        threading.Thread(target=dialer._send, daemon=True).start()
        drained.join()
        said = json.loads(heard.readline())
        dialer._ended = True
    assert said["kind"] == "envelope" and said["seq"] == told.seq and said["report"]["job_id"] == "a"
