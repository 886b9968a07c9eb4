"""Intake: `python -m tlora.service.intake_process`, beside the server, warm and without torch. It profiles jobs.

Requests and answers are lines of JSON. A tenant's bytes are parsed by neither process: the data worker of `data/prepare.py` does that,
with limits, and a new one takes over where one dies. One tenant's jobs never hold all slots while there are several.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlora import durable
from tlora.adapters.targets import read_shape, shape_warnings
from tlora.data.prepare import Prepared, prepare, start_worker
from tlora.data.profile import profile_of
from tlora.data.request import DataLimits, PrepareRequest
from tlora.errors import DataError, ModelError, TloraError
from tlora.job import JobSpec
from tlora.json_file import read_object
from tlora.link.supervisor import line_to_parent
from tlora.service.base_shapes import adapter_parameters, find_outline
from tlora.service.intake import INTAKE_MESSAGES, IntakeRequest, IntakeSettings, parse_request
from tlora.shape.base_shape import BaseShape
from tlora.shape.length_limits import check_length

MOST_TOGETHER = 100  # jobs of one tenant that share a data worker


class IntakeSlots:
    """Slots that take batches of one tenant's jobs, in turns of the tenants."""

    def __init__(self, settings: IntakeSettings, answer: Callable[[dict[str, Any]], None]) -> None:
        """`answer` is called in any thread."""
        self._outlines, self._answer, self._slots = Path(settings.bases_dir), answer, settings.slots
        self._precision, most = settings.precision, settings.limits
        self._limits = DataLimits(most.intake_memory_bytes, most.intake_cpu_seconds, most.intake_seconds, most.line_bytes, most.file_rows)
        self._state = threading.Condition()
        self._waiting: dict[str, deque[IntakeRequest]] = {}  # by tenant, whose turn is next first
        self._busy: dict[str, int] = {}  # slots by tenant
        self._bases = threading.Lock()
        for _ in range(settings.slots):
            threading.Thread(target=self._serve, daemon=True).start()

    def put(self, request: IntakeRequest) -> None:
        with self._state:
            self._waiting.setdefault(request.tenant, deque()).append(request)
            self._state.notify()

    def _serve(self) -> None:
        while True:
            with start_worker() as spare:  # its libraries are there when the next job comes
                batch = self._take()
                tenant = batch[0].tenant
                try:
                    self._do(batch, spare)
                except Exception as error:
                    logging.getLogger(__name__).exception("intake failed")
                    for request in batch:
                        self._answer({"key": request.key, "problem": f"intake failed: {type(error).__name__}: {error}"})
                finally:
                    with self._state:
                        self._busy[tenant] -= 1
                        self._state.notify_all()

    def _take(self) -> list[IntakeRequest]:
        with self._state:
            while (tenant := self._next_tenant()) is None:
                self._state.wait()
            waiting = self._waiting.pop(tenant)
            base = waiting[0].base_model
            batch: list[IntakeRequest] = []
            while waiting and len(batch) < MOST_TOGETHER and waiting[0].base_model == base:
                batch.append(waiting.popleft())
            if waiting:
                self._waiting[tenant] = waiting  # at the end of the line
            self._busy[tenant] = self._busy.get(tenant, 0) + 1
            return batch

    def _next_tenant(self) -> str | None:
        """Of several slots one stays free for the others."""
        most = max(1, self._slots - 1)
        return next((tenant for tenant in self._waiting if self._busy.get(tenant, 0) < most), None)

    def _do(self, batch: list[IntakeRequest], spare: Any) -> None:
        try:
            with self._bases:  # two slots would work out the same one
                outline = find_outline(self._outlines, batch[0].base_model, self._precision)
        except TloraError as error:
            full = durable.is_full(error)
            for request in batch:
                self._answer({"key": request.key, "problem": str(error), "base_problem": True, "disk_full": full})
            return
        asked = {request.key: (request, request.spec) for request in batch if request.spec is not None}
        for request in batch:
            if request.spec is None:
                self._answer({"key": request.key, "bytes": outline.bytes})
        sizes: dict[str, tuple[int, list[str]]] = {}
        for key, (_, spec) in asked.items():
            try:
                sizes[key] = _parameters(spec, outline)
            except TloraError as error:
                self._answer({"key": key, "problem": str(error)})
        wanted = [self._prepare_request(*asked[key], outline) for key in sizes]
        if not wanted:
            return
        try:
            found = prepare(wanted, lambda seen: self._answer({"key": seen.key, "rows": seen.rows, "share": seen.share}), spare)
        except ModelError as error:  # of the tokenizer, which all share
            found = {request.key: DataError(str(error)) for request in wanted}
        for key, size in sizes.items():
            self._answer({"key": key} | _profiled(found[key], asked[key][1], size, outline))

    def _prepare_request(self, request: IntakeRequest, spec: JobSpec, outline: BaseShape) -> PrepareRequest:
        place, vocab = Path(request.tokens_dir), outline.vocab_size
        tokenizer, rows = request.base_model, spec.learns_from
        # a tenant's file may be deleted before the set is made again: nothing of it may stay
        return PrepareRequest(request.key, spec.data, tokenizer, vocab, place, place, rows, self._limits, keep_unfinished=False)


def _parameters(spec: JobSpec, outline: BaseShape) -> tuple[int, list[str]]:
    """Of the job's adapter; one that continues another has that one's shape, with a warning where the order says otherwise. Raises
    TloraError.
    """
    if spec.adapter_path is None:
        return adapter_parameters(outline, spec), []
    start = Path(spec.adapter_path)
    try:
        shape, config = read_shape(start), read_object(start / "adapter_config.json")
    except (OSError, ValueError) as error:
        raise ModelError(f"start_from: the adapter there cannot be read ({error}). Start from another job") from None
    return adapter_parameters(outline, shape), shape_warnings(spec, config, "the adapter that it continues")


def _profiled(found: Prepared | DataError, spec: JobSpec, adapter: tuple[int, list[str]], outline: BaseShape) -> dict[str, Any]:
    if isinstance(found, DataError):
        return {"problem": str(found), "disk_full": found.disk_full}
    sequence = found.longest_sequence
    try:
        check_length(outline.limits, sequence)
    except DataError as error:
        return {"problem": str(error)}
    parameters, of_start = adapter
    warnings = [*of_start, *outline.notes, *found.warnings()]
    if outline.max_position_embeddings and sequence > outline.max_position_embeddings:
        warnings.append(
            f"samples of up to {sequence:,} tokens are longer than the {outline.max_position_embeddings:,} positions of this base"
        )
    profile = profile_of(found.train, spec, found.longest, parameters)
    return {
        "profile": asdict(profile),
        "train_set": str(found.train.directory),
        "eval_set": str(found.eval.directory) if found.eval is not None and spec.data.eval_path else None,
        "samples": len(found.train),
        "warnings": warnings,
    }


def main() -> None:
    """Serve requests until the server ends. argv has the settings in JSON."""
    settings = INTAKE_MESSAGES.decode(sys.argv[1].encode())
    assert isinstance(settings, IntakeSettings), settings
    sys.modules["torch"] = None  # type: ignore[assignment]  # nothing here may import it: 1 s and 300 MB
    line = line_to_parent()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def write() -> None:  # apart from the slots, which have other things to do while the server is busy
        while True:
            line.send(lines.get())

    threading.Thread(target=write, daemon=True).start()
    intake = IntakeSlots(settings, lambda found: lines.put(json.dumps(found).encode() + b"\n"))
    for received in line.lines():
        intake.put(parse_request(received))
    os._exit(0)  # slots wait for requests that will not come; their data workers end with this process


if __name__ == "__main__":
    main()
