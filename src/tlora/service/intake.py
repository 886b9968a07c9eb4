"""The server's end of intake: a process that is started, spoken to, and started again where it dies. Imports no part of it but its name.

It gets its settings in argv, then requests as lines. Its answers are JSON objects with the request's `key`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tlora.job import JobSpec
from tlora.link.lines import Line
from tlora.link.supervisor import SupervisedProcess, start_talking
from tlora.message_codec import Codec, message
from tlora.service.base_shapes import Precision
from tlora.service.config import Limits


@message
class IntakeSettings:
    """`bases_dir` keeps the outlines of bases; `slots` are batches at a time; `limits` has those of a job's data."""

    bases_dir: str
    precision: Precision
    limits: Limits
    slots: int


@message
class IntakeRequest:
    """One job to be profiled, or, without a `spec`, a base to be looked at. `tokens_dir` gets the tenant's tokenized data."""

    key: str
    base_model: str  # directory or hub id
    tenant: str = ""
    spec: JobSpec | None = None
    tokens_dir: str = ""


INTAKE_MESSAGES: Codec[IntakeSettings | IntakeRequest] = Codec(IntakeSettings | IntakeRequest)
request_line = INTAKE_MESSAGES.encode


def parse_request(line: bytes) -> IntakeRequest:
    """What `request_line` gave. Raises ValueError."""
    found = INTAKE_MESSAGES.decode(line)
    if not isinstance(found, IntakeRequest):
        raise ValueError(f"{type(found).__name__} is no request")
    return found


STALL_SECONDS = 180.0  # without a line while something is asked, after which the process is ended: it was stopped, or hangs
MOST_DEATHS = 3  # of the process in a row without an answer: then what it was asked is answered as failed
Answer = dict[str, Any]


class IntakeClient:
    """`put` asks, `on_answer` gets each answer in a thread of this object. What has no answer is asked again of a new process."""

    def __init__(
        self, settings: IntakeSettings, log: Path, on_answer: Callable[[Answer], None], stall_seconds: float = STALL_SECONDS
    ) -> None:
        self._settings, self._log, self._on_answer, self._stall_seconds = settings, log, on_answer, stall_seconds
        self._heard = time.monotonic()  # the last line, or the first question after there was none
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[str, bytes] = {}  # by key, in their order
        self._deaths = 0
        self._process: SupervisedProcess | None = None
        self._line: Line | None = None
        self._reader = threading.Thread(target=self._run, name="intake", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="intake watch", daemon=True)

    def start(self) -> None:
        self._reader.start()
        self._watcher.start()

    def put(self, key: str, line: bytes) -> None:
        """Ask, in any thread. `line` is a `request_line`."""
        with self._lock:
            if not self._open:
                self._heard = time.monotonic()
            self._open[key] = line
            self._send(line)

    def forget(self, key: str) -> None:
        """No answer is wanted any more."""
        with self._lock:
            self._open.pop(key, None)

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            process = self._process
        if process is not None:
            process.kill()
        if self._reader.ident is not None:
            self._reader.join()

    def _send(self, line: bytes) -> None:
        if self._line is not None:  # where the process has died, what is open is asked again of the next
            self._line.send(line)

    def _run(self) -> None:
        while not self._closed.is_set():
            started = self._start()
            if started is None:
                return
            process, line = started
            try:
                for received in line.lines():
                    try:
                        self._hear(json.loads(received))
                    except Exception:  # of the one who takes it: the other answers are for others
                        logging.getLogger(__name__).exception("an answer of intake is lost")
            except ValueError as error:  # a line without an end
                logging.getLogger(__name__).error("intake is started again: %s", error)
                process.kill()
            process.wait()
            with self._lock:
                self._line = None
            line.close()
            self._see_death()

    def _watch(self) -> None:
        """End a process that says nothing: the next one is asked again."""
        while not self._closed.wait(self._stall_seconds / 10):
            with self._lock:
                silent = time.monotonic() - self._heard
                if self._open and self._process is not None and silent > self._stall_seconds:
                    logging.getLogger(__name__).error("intake has said nothing for %.0f s and is started again", silent)
                    self._heard = time.monotonic()
                    self._process.kill()

    def _start(self) -> tuple[SupervisedProcess, Line] | None:
        settings = INTAKE_MESSAGES.encode(self._settings).decode()
        with self._lock:
            if self._closed.is_set():
                return None
            self._process, self._line = started = start_talking("tlora.service.intake_process", self._log, (settings,), _ENVIRONMENT)
            self._heard = time.monotonic()
            for line in self._open.values():
                self._send(line)
            return started

    def _hear(self, answer: Answer) -> None:
        with self._lock:
            self._heard = time.monotonic()
            if answer["key"] not in self._open:
                return  # forgotten, or answered before its process died
            if "rows" not in answer:  # not mere progress
                self._deaths = 0
                del self._open[answer["key"]]
        self._on_answer(answer)

    def _see_death(self) -> None:
        """What was open when several processes in a row ended without an answer is not asked again."""
        with self._lock:
            self._process = None
            if self._closed.is_set():
                return
            self._deaths += 1
            given_up = list(self._open) if self._deaths >= MOST_DEATHS else []
            for key in given_up:
                del self._open[key]
            if given_up:
                self._deaths = 0
        for key in given_up:
            self._on_answer({"key": key, "problem": f"the intake process ended {MOST_DEATHS} times in a row; the server's log says why"})


_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
