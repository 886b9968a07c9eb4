"""The processes of workers: how a controller starts one, and the records by which the next controller finds it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from tlora.json_file import read_object
from tlora.link.process_identity import ProcessIdentity
from tlora.link.supervisor import SupervisedProcess, start_process
from tlora.sharing.multicast import NO_MULTICAST


def supervise(log: Path, identity: ProcessIdentity | None) -> SupervisedProcess:
    """Supervise a worker that an earlier controller or a user has started."""
    return SupervisedProcess(identity, log, whole_session=True)


def launch(gpus: tuple[int, ...], all_gpus: tuple[int, ...], device: str, address: str, log: Path) -> SupervisedProcess:
    """Start a worker process, which dials `address` and may come to have others of `all_gpus`; `log` gets what it, its ranks and their
    libraries print.
    """
    arguments = ["--connect", address, "--gpus", ",".join(map(str, gpus))]
    visible = ",".join(map(str, (*gpus, *(gpu for gpu in all_gpus if gpu not in gpus))))
    environment = {**NO_MULTICAST, **device_environment(device, visible)}
    process = start_process("tlora.engine.worker", log, arguments, environment)
    process.whole_session = True
    return process


def file_stem(gpus: tuple[int, ...]) -> str:
    """The stem of the file names of the worker on these GPUs: gpu0, gpu0-1."""
    return f"gpu{'-'.join(map(str, gpus))}"


def write_record(directory: Path, gpus: tuple[int, ...], identity: ProcessIdentity | None) -> None:
    """Record the worker of those GPUs for the next controller of this store. A full disk costs only its adoption. Not synced: what ends
    the kernel ends the worker.
    """
    if identity is not None:
        path = directory / f"{file_stem(gpus)}.json"
        with contextlib.suppress(OSError):
            path.with_suffix(".new").write_text(json.dumps(asdict(identity)) + "\n")
            path.with_suffix(".new").replace(path)


def remove_record(directory: Path, gpus: tuple[int, ...], identity: ProcessIdentity | None) -> None:
    """Unless it is another worker's by now."""
    if read_records(directory).get(gpus) == identity:
        with contextlib.suppress(OSError):
            (directory / f"{file_stem(gpus)}.json").unlink()


def read_records(directory: Path) -> dict[tuple[int, ...], ProcessIdentity]:
    """GPUs -> the worker of an earlier controller on them, if it is still alive."""
    found: dict[tuple[int, ...], ProcessIdentity] = {}
    for path in directory.glob("gpu*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            identity = ProcessIdentity(**read_object(path))
            if identity.is_alive:
                found[tuple(map(int, path.stem.removeprefix("gpu").split("-")))] = identity
    return found


def device_environment(device: str, numbers: str) -> dict[str, str]:
    """A worker sees the cluster's GPUs, its own first; on a CPU each of its ranks is one thread, so that several behave like GPUs."""
    if device == "cuda":
        return {"CUDA_VISIBLE_DEVICES": numbers}
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
