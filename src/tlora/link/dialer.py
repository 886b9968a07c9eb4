"""A worker's end of the connection: connects, sends Hello, receives its desired state, sends reports until acknowledged, and redials.

It trains nothing: messages go through the functions that it is given. No call here waits for the network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tlora.link.authentication import AdmissionError
from tlora.link.endpoint import Endpoint, dial
from tlora.link.lines import Line
from tlora.link.log import note
from tlora.link.outbox import Outbox
from tlora.worker_protocol import Ack, Alive, DesiredState, Hello, Refusal, Report, parse_controller_line, worker_line

BEAT_SECONDS = 5.0
NOTICE_SECONDS = 60.0  # for a worker of another host to save its jobs before its lease ends
_SEND_SECONDS = 10  # for the controller to read: one that does not counts as lost
_BEATS_PER_LEASE = 8  # at least
_LOOK_SECONDS = 0.5  # between two looks at the lease
_AGAIN_SECONDS = 10.0  # without an answer, after which reports are sent once more
_REDIAL_SECONDS = (0.1, 1.0)  # the first pause and the longest


class Client(Protocol):
    """The side that dials. All methods may be called from any thread."""

    def hello(self, last_seq: int) -> Hello: ...
    def alive(self) -> Alive: ...
    def hear(self, want: DesiredState) -> bool:
        """Take in the desired state. Returns False if it comes from an older controller."""
        ...

    def end(self, reason: str) -> None:
        """Save all and exit: cut off for longer than the lease."""
        ...

    def expire(self) -> None:
        """Write nothing more, from now on: another may write. It does not return."""
        ...

    def be_refused(self, reason: str) -> None:
        """Save all and exit: the controller does not want this worker."""
        ...


@dataclass
class _Contact:
    """When this worker said the last sign of life that the controller has answered, on a clock that runs while the machine sleeps: no
    controller has heard it earlier, so its count of the lease ends later. `leased`: all must have ended when the lease does.
    """

    heard: float
    lease_seconds: float
    leased: bool = False

    @property
    def notice_seconds(self) -> float:
        """How long before the end of the lease the jobs are saved: none where the end of the process is proof enough."""
        return min(NOTICE_SECONDS, self.lease_seconds / 2) if self.leased else 0.0


def _now() -> float:
    """Seconds that pass while the host sleeps too; no setting of the wall clock changes them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Dialer:
    def __init__(self, endpoint: Endpoint, client: Client, lease_seconds: float) -> None:
        """`lease_seconds` holds until a Want changes it."""
        self._endpoint, self._client = endpoint, client
        self._outbox = Outbox()
        self._contact = _Contact(_now(), lease_seconds)
        self._changed = threading.Condition()  # of all that follows, and of the outbox
        self._line: Line | None = None
        self._again = self._ended = self._closed = self._sending = False
        self._sent = _now()

    def start(self) -> None:
        """Connect. Raises as `dial` does."""
        first = dial(self._endpoint, _SEND_SECONDS)
        threading.Thread(target=self._dial, args=(first,), name="dialer", daemon=True).start()
        threading.Thread(target=self._send, name="sender", daemon=True).start()
        threading.Thread(target=self._watch_lease, name="lease", daemon=True).start()

    def put(self, reports: Sequence[Report], generation: int) -> None:
        with self._changed:
            for report in reports:
                self._outbox.put(report, generation)
            self._changed.notify_all()

    def drain(self, timeout_seconds: float) -> None:
        """Wait until all reports are acknowledged, while there is a connection; the files on disk stand for the rest."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._has_to_send and self._line is not None and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def close(self) -> None:
        """End the connection, and dial no more: nothing is held under the lease any more."""
        with self._changed:
            self._ended = self._closed = True
            if self._line is not None:
                self._line.end()
            self._changed.notify_all()

    @property
    def _has_to_send(self) -> bool:
        """Whether there is something to send; call it under the lock. The next controller gets what a killed one has not taken."""
        return self._sending or self._outbox.has_fresh or (self._again and bool(self._outbox.again()))

    # -- the thread that hears -----------------------------------------------------------------------------------------

    def _dial(self, line: Line | None) -> None:
        pause, said = _REDIAL_SECONDS[0], ""
        while not self._ended:
            if line is None:
                try:
                    line = dial(self._endpoint, _SEND_SECONDS)
                except AdmissionError as error:
                    self._be_refused(str(error))
                    return
                except (OSError, ValueError) as error:  # no listener, no such place, or another user's: retried until the lease ends
                    if isinstance(error, ValueError) and str(error) != said:
                        said = str(error)
                        note(f"trains on, and dials again: {said}")
                    time.sleep(pause)
                    pause = min(2 * pause, _REDIAL_SECONDS[1])
                    continue
            if self._converse(line):
                pause = _REDIAL_SECONDS[0]
            line.close()
            line = None
            time.sleep(pause)
            pause = min(2 * pause, _REDIAL_SECONDS[1])

    def _converse(self, line: Line) -> bool:
        """Read until the connection ends. Returns whether the controller has sent anything valid."""
        hello = self._client.hello(self._outbox.last_taken)  # outside the lock, which the client takes while it holds its own
        with self._changed:
            ends = [end for end in self._outbox.ends() if all(end.job_id != held.job_id for held in hello.jobs)]
        line.send(worker_line(replace(hello, jobs=(*hello.jobs, *ends))))
        heard = False
        try:
            for received in line.lines():
                message = parse_controller_line(received)
                if isinstance(message, Refusal):
                    self._be_refused(message.reason)
                    return True
                if isinstance(message, DesiredState) and not self._client.hear(message):
                    return heard  # an older controller
                self._take(line, message)
                heard = True
        except ValueError:  # not a line of this protocol
            return heard
        finally:
            with self._changed:
                self._line = None
                self._changed.notify_all()
        return heard

    def _be_refused(self, reason: str) -> None:
        self._ended = True
        self._client.be_refused(reason)

    def _take(self, line: Line, message: DesiredState | Ack) -> None:
        with self._changed:
            if isinstance(message, DesiredState):
                self._contact.lease_seconds, self._contact.leased = message.lease_seconds, message.leased
            else:
                self._outbox.taken(message.seq)
                if message.heard is not None and self._contact.heard < message.heard <= _now():  # never from the future
                    self._contact.heard = message.heard
            if self._line is None:  # reports follow the Hello when that has been answered
                self._line, self._again = line, True
            self._changed.notify_all()

    # -- the thread that sends -----------------------------------------------------------------------------------------

    def _send(self) -> None:
        beat = 0.0
        while not self._ended:
            with self._changed:
                line, again = self._line, self._again or _now() - self._sent > _AGAIN_SECONDS
                due = (self._outbox.again() if again else []) + self._outbox.fresh() if line is not None else []
                if line is not None and again:
                    self._again = False
                    self._sent = _now()
                self._sending = bool(due)
                pause = min(BEAT_SECONDS, self._contact.lease_seconds / _BEATS_PER_LEASE)
                if not due and (left := beat + pause - _now()) > 0:
                    self._changed.wait(left)
            if line is not None:
                for said in due:
                    line.send(worker_line(said))
                with self._changed:
                    self._sending = False
                    self._changed.notify_all()
            if _now() - beat >= pause:
                beat = _now()
                if line is not None:
                    line.send(worker_line(replace(self._client.alive(), said_seconds=beat)))

    # -- the thread that watches the lease -----------------------------------------------------------------------------

    def _watch_lease(self) -> None:
        while True:
            time.sleep(min(_LOOK_SECONDS if self._contact.leased else BEAT_SECONDS, self._contact.lease_seconds / 10))
            if self._look_at_lease():
                return

    def _look_at_lease(self) -> bool:
        """End by the lease. Returns whether nothing is left to watch."""
        contact = self._contact
        silent = _now() - contact.heard
        if silent > contact.lease_seconds - contact.notice_seconds and not self._ended:
            self._ended = True
            self._client.end(f"nothing was heard of the controller for {silent:.0f} s, and the lease is {contact.lease_seconds:g} s")
        if silent > contact.lease_seconds and contact.leased and not self._closed:
            self._client.expire()
        return self._closed or (self._ended and not contact.leased)
