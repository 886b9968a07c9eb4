"""The run's directory: held by one run at a time, opened without ever destroying what is not ours; `run.json`, `job.json`, and where
a job can go on from.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora import durable
from tlora.base_digest import BASE_FILE, Fingerprint, read_fingerprint
from tlora.directory_lock import try_lock
from tlora.errors import ConfigError
from tlora.group.isolation import Failure, try_call
from tlora.job import SCHEDULED, JobSpec, RunSpec, split_revision
from tlora.json_file import read_object
from tlora.store.checkpoint import read_progress
from tlora.store.earlier_orders import pinned
from tlora.store.job_result import is_finished
from tlora.store.model_card import library_versions
from tlora.store.overwrite import check_links, remove_run
from tlora.store.scheduled_directory import refuse_scheduled
from tlora.supermodel.cpu_dtype import settle_dtype
from tlora.supermodel.load import pin_revision
from tlora.version import __version__
from tlora.writable_directory import check_writable

_NO_NUMBER = ("weight", "logging_steps", "save_steps", "save_total_limit", "sweep_of", *SCHEDULED)  # of any step depends on them
_LENGTH = ("max_steps", "num_train_epochs")  # what follows is said by job_length.py
REFERENCE_KEY = "reference"
_FREE_TO_CHANGE = {*_NO_NUMBER, *_LENGTH}  # by --resume


def check_run_directory(run: RunSpec, resume: bool, overwrite: bool) -> None:
    """Raise early the ConfigErrors of `hold_run_directory`, without changing anything."""
    directory = Path(run.output_dir)
    check_writable(directory, "output_dir")
    exists = directory.is_dir()
    if exists:
        with lock_directory(directory, fcntl.LOCK_SH):  # shared, for others may look at this moment too
            pass
    if not exists or all(durable.is_leftover(path) for path in directory.iterdir()):
        return
    refuse_scheduled(directory)
    if resume:
        _check_resume(run, directory)
    elif overwrite:
        _check_overwrite(run, directory)
    else:
        _refuse_occupied(directory)


def _check_resume(run: RunSpec, directory: Path) -> None:
    if not (directory / "run.json").is_file():
        raise _no_run(directory)
    before, now = read_run_file(directory / "run.json"), json.loads(run.model_dump_json())
    shared = [key for key in ("base_model", "dtype", "base_precision", "deterministic") if before.get(key) != now[key]]
    if before.get("base_model") == split_revision(run.base_model)[0] and "base_model" in shared:
        shared.remove("base_model")  # of a version that did not pin the hub's revision
    if shared:
        _refuse_other_run([f"{key} was {before.get(key)!r} and is {getattr(run, key)!r}" for key in shared])


def _refuse_occupied(directory: Path) -> None:
    if (directory / "run.json").is_file():
        remedy = "Continue it with --resume, replace it with --overwrite, or choose another"
        raise ConfigError(f"output_dir {directory} holds an earlier run. {remedy}")
    if next(directory.glob(f"*/{BASE_FILE}"), None):
        raise ConfigError(
            f"output_dir {directory} holds jobs of an earlier run, whose run.json is lost. "
            "Continue it with --resume, which makes run.json again, replace it with --overwrite, or choose another"
        )
    raise _no_run(directory)


def _no_run(directory: Path) -> ConfigError:
    return ConfigError(f"output_dir {directory} exists and is no run of tlora. Choose another, so that nothing of it is lost")


def _check_overwrite(run: RunSpec, directory: Path) -> None:
    """Raises ConfigError if files that do not belong to the earlier run would be deleted or overwritten."""
    earlier = _earlier_jobs(directory)
    if not (earlier or (directory / "run.json").is_file()):
        raise _no_run(directory)
    for job in run.jobs:
        if job.adapter_path and directory.resolve() in Path(job.adapter_path).resolve().parents:
            raise ConfigError(f"job {job.name!r} starts from {job.adapter_path}, which --overwrite would delete. Choose another output_dir")
        path = directory / job.name
        if job.name not in earlier and os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            raise ConfigError(
                f"--overwrite: {path} is no job of the earlier run, and job {job.name!r} would write there. Move it away, or rename the job"
            )
    check_links(directory, earlier)


def _earlier_jobs(directory: Path) -> set[str]:
    """The jobs that `run.json` names; if it is lost or damaged, those with a `job.json` in their directory. Raises ConfigError if a
    damaged `run.json` is all that there is: it may be another program's.
    """
    path = directory / "run.json"
    try:
        if path.is_file():
            return {job["name"] for job in read_run_file(path)["jobs"]}
    except ConfigError:
        if not (names := _jobs_by_themselves(directory)):
            raise
        return names
    return _jobs_by_themselves(directory)


def _jobs_by_themselves(directory: Path) -> set[str]:
    """Directories with a `job.json` of their own name."""

    def name(path: Path) -> str:
        return job_spec_in(read_object(path)).name

    return {path.parent.name for path in directory.glob("*/job.json") if try_call(name, path) == path.parent.name}


def pin_base(run: RunSpec, resume: bool) -> RunSpec:
    """`run` with the commit of a hub id in its `base_model`: on a resume the one that `run.json` names, else today's.

    Raises ConfigError and ModelError.
    """
    earlier = Path(run.output_dir) / "run.json"
    name, revision = split_revision(run.base_model)
    if resume and revision is None and earlier.is_file():
        before = read_run_file(earlier)["base_model"]
        if split_revision(before) != (before, None) and split_revision(before)[0] == name:
            return run.model_copy(update={"base_model": before})
    return run.model_copy(update={"base_model": pin_revision(run.base_model)})


def pin_dtype(run: RunSpec, device: str | None, resume: bool, note: Callable[[str], None]) -> RunSpec:
    """`run` with the dtype that `auto` means on `device`, as in `settle_dtype`; on a resume with the dtype that the run began in.

    Raises ConfigError and ModelError.
    """
    if run.dtype != "auto":
        return run
    settled, line = settle_dtype(run.base_model, run.dtype, device)
    earlier = Path(run.output_dir) / "run.json"
    before = read_run_file(earlier)["dtype"] if resume and earlier.is_file() else settled
    if before not in ("auto", "float32"):
        return run  # which is refused: another dtype was ordered
    if before == settled:
        if line:
            note(line)
    elif before == "float32":
        note("dtype auto: this run began in float32, and goes on in it")
    else:
        note("dtype auto: this run began in the dtype of the base's files, and goes on in it; this CPU has no instructions for it")
    return run.model_copy(update={"dtype": before})


def pin_data(run: RunSpec) -> RunSpec:
    """`run`, to be resumed, with the values that its jobs used before where the jobs file leaves them open: commits of hub data sets, the
    seed of the evaluation rows. A recorded order that differs otherwise, or cannot be read, pins nothing: opening the job reports it.
    """
    earlier = [try_call(earlier_order, Path(run.output_dir) / job.name) for job in run.jobs]
    pairs = zip(run.jobs, earlier, strict=True)
    return run.model_copy(update={"jobs": [pinned(job, order) if isinstance(order, JobSpec) else job for job, order in pairs]})


def earlier_base(run: RunSpec, resume: bool) -> Fingerprint | None:
    """The base's fingerprint in `run.json`, on a resume of a run that recorded it. Raises ConfigError for a damaged file."""
    path = Path(run.output_dir) / "run.json"
    if not (resume and path.is_file()):
        return None
    read_run_file(path)
    try:
        return read_fingerprint(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is damaged (base_files: {error}). Use a new output_dir; the adapters there stay") from None


@dataclass(frozen=True)
class HeldDirectory:
    """`lock` is the open file that keeps other runs out; each process that inherits it, or a copy of it, keeps them out too."""

    path: Path
    lock: int


@contextmanager
def hold_run_directory(run: RunSpec, resume: bool, overwrite: bool, note: Callable[[str], None]) -> Iterator[HeldDirectory]:
    """Make `output_dir`, or reuse an earlier run's, and hold it until the end. Raises ConfigError.

    Call it after all other checks: what `overwrite` deletes is deleted here.
    """
    check_run_directory(run, resume, overwrite)
    directory = Path(run.output_dir)
    try:
        durable.make_directory(directory)
    except OSError as error:
        raise _cannot_write(directory, error) from None
    with lock_directory(directory) as lock:
        try:
            _take_up(directory, run, resume, note)
        except OSError as error:
            raise _cannot_write(directory, error) from None
        yield HeldDirectory(directory, lock)


@contextmanager
def lock_directory(directory: Path, kind: int = fcntl.LOCK_EX) -> Iterator[int]:
    """Lock `directory` against other runs and return the open lock, of `flock`'s `kind`. Raises ConfigError if a run holds it."""
    try:
        handle = try_lock(directory, kind)
    except OSError as error:
        raise _cannot_write(directory, error) from None
    if handle is None:
        raise ConfigError(f"output_dir {directory} is in use by another run. Wait for it, or choose another")
    try:
        yield handle
    finally:
        os.close(handle)


def _cannot_write(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"output_dir {directory} cannot be written ({error.strerror or error}). Choose one where you may write")


def _take_up(directory: Path, run: RunSpec, resume: bool, note: Callable[[str], None]) -> None:
    for path in directory.iterdir():
        if durable.is_leftover(path) and path.is_file():
            path.unlink()
    if resume:
        check_same_jobs(directory, run.jobs)
        durable.truncate_rows(directory / "run.jsonl", lambda _: True)  # a kill may have torn its last line
        for job in run.jobs:  # also of those that are done, which are not opened; what cannot be read fails its own job
            try_call(durable.clean, directory / job.name)
    elif any(directory.iterdir()):
        kept = remove_run(directory, _earlier_jobs(directory))
        if (directory / "run.json").is_file() and isinstance(try_call(read_run_file, directory / "run.json"), Failure):
            kept.append(durable.set_aside(directory / "run.json").name)
        if kept:
            note(f"--overwrite kept what tlora did not write: {', '.join(kept[:5])}{f' and {len(kept) - 5} more' if len(kept) > 5 else ''}")
    write_run_file(directory, run, {"status": "preparing"}, forget=not resume)  # first of all: from here on a killed process leaves a run


def check_tiles(run: RunSpec, tiles: str | None) -> str | None:
    """What to say of a resume whose GPU kernels have other tiles (digest `tiles`) than before: roundings, and no more, follow from them.

    None where they are the same, or one of the two ran without the kernels. Raises ConfigError where bits are promised (`deterministic`).
    """
    before = _tiles_before(Path(run.output_dir) / "run.json")
    if None in (before, tiles) or before == tiles:
        return None
    if run.deterministic:
        what = f"tiles {before} of the GPU kernels, which are {tiles} by now (`tlora tune`, another version, another GPU)"
        raise ConfigError(f"resume: this deterministic run began with {what}. Put that table or version back, or use a new output_dir")
    return f"the GPU kernels' tiles were {before} and are {tiles} by now: from here on results differ by rounding"


def _tiles_before(path: Path) -> str | None:
    return json.loads(path.read_text(encoding="utf-8")).get("tiles") if path.is_file() else None


def read_run_file(path: Path) -> dict[str, Any]:
    """The resolved RunSpec in a `run.json`. Raises ConfigError for a damaged one."""
    try:
        return json.loads(run_spec_in(read_object(path)).model_dump_json())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({str(error).splitlines()[0]}). Use a new output_dir; the adapters there stay") from None


def run_spec_in(content: Mapping[str, Any]) -> RunSpec:
    """The RunSpec among the facts of a `run.json`. Raises ValidationError, which is a ValueError."""
    return RunSpec.model_validate({key: value for key, value in content.items() if key in RunSpec.model_fields})


def job_spec_in(content: Mapping[str, Any]) -> JobSpec:
    """The JobSpec in a `job.json`, perhaps of another version. Raises ValidationError."""
    return JobSpec.model_validate({key: value for key, value in content.items() if key in JobSpec.model_fields})


def check_same_job(directory: Path, job: JobSpec) -> None:
    """A resumed job must have the settings it began with. Raises ConfigError, also if these cannot be read."""
    if changed := _changes(directory, job):
        _refuse_other_run(changed)


def check_same_jobs(directory: Path, jobs: Sequence[JobSpec]) -> None:
    """`check_same_job` for all jobs of a run. New jobs may be added, others left out for now. A job whose `job.json` cannot be read fails
    alone, when it is opened.
    """
    changes_by_job = [try_call(_changes, directory / job.name, job) for job in jobs]
    if changed := [change for changes in changes_by_job if not isinstance(changes, Failure) for change in changes]:
        _refuse_other_run(changed)


def earlier_order(directory: Path) -> JobSpec | None:
    """The order whose checkpoints or finished adapter are in `directory`. Raises ConfigError for a damaged `job.json`.

    None without either: the job starts anew, regardless of an earlier run's records of it.
    """
    path = directory / "job.json"
    if not path.exists() or not (any(directory.glob("checkpoint-*")) or is_finished(directory)):
        return None
    try:
        return job_spec_in(read_object(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is damaged ({str(error).splitlines()[0]}): it cannot be seen whether what lies there is of this order. "
            "Put it back; or remove it, if you know that it is"
        ) from None


def _changes(directory: Path, job: JobSpec) -> list[str]:
    """How `job` differs from the order whose checkpoints or adapter are in `directory`. Raises ConfigError as `earlier_order`."""
    earlier = earlier_order(directory)
    if earlier is None:
        return []
    old, now = _fields(earlier), _fields(job)
    if REFERENCE_KEY not in earlier.model_fields_set:
        old[REFERENCE_KEY] = now[REFERENCE_KEY]  # of an earlier version: `names_reference`
    return [f"{job.name}: {key} was {old[key]!r} and is {now[key]!r}" for key in now if key not in _FREE_TO_CHANGE and old[key] != now[key]]


def _fields(job: JobSpec) -> dict[str, Any]:
    """An order's fields as a jobs file names them, those of `data` one by one."""
    fields = json.loads(job.model_dump_json())
    return {key: value for key, value in fields.items() if key != "data"} | {f"data.{key}": value for key, value in fields["data"].items()}


def _refuse_other_run(changed: list[str]) -> None:
    what = "; ".join(changed)
    raise ConfigError(f"resume: this is not the run that was interrupted: {what}. Put it back, or use a new output_dir")


def write_job_file(directory: Path, job: JobSpec, without: Collection[str] = ()) -> None:
    """Write `job.json`, the resolved order, into the adapter's directory; `without` fields that it has had no say in."""
    durable.write_file(directory / "job.json", job.model_dump_json(indent=1, exclude=set(without)) + "\n")


def names_reference(directory: Path) -> bool:
    """Whether the job in `directory` began with a version that has a reference setting; before, the reference was the bare base."""
    return REFERENCE_KEY in read_object(directory / "job.json")


def write_run_file(directory: Path, run: RunSpec, facts: dict[str, Any], forget: bool = False) -> None:
    """Write `run.json`: the resolved run with its status and versions. Jobs of earlier runs in the directory stay in its list."""
    path = directory / "run.json"
    versions = library_versions() | {"tlora": __version__, "python": platform.python_version()}
    content = json.loads(run.model_dump_json()) | {"versions": versions} | facts
    if not forget and path.is_file():
        names = {job.name for job in run.jobs}
        before = json.loads(path.read_text(encoding="utf-8"))
        for key in ("tiles", "base_files"):  # a kill before they are known again must not forget them
            if before.get(key):
                content.setdefault(key, before[key])
        content["jobs"] += [job for job in read_run_file(path)["jobs"] if job["name"] not in names]
    durable.write_file(path, json.dumps(content, indent=1) + "\n")


def find_checkpoint(directory: Path, note: Callable[[str], None]) -> Path | None:
    """The job's newest intact checkpoint; its metrics are cut back to it. None, and no metrics, if there is none. Raises ConfigError for a
    finished job without one, which would be overwritten.
    """
    durable.clean(directory)
    checkpoint, notes = durable.newest_verified(directory)
    for line in notes:
        note(line)
    if checkpoint is None and is_finished(directory):
        raise ConfigError(
            f"{directory} holds a finished job without a whole checkpoint: it cannot go on, and its adapter is not trained over. Order the "
            "steps that it has, as before; or move the directory away, and the job begins at step 0"
        )
    if checkpoint is None and notes:
        note(f"{directory.name}: no whole checkpoint is left: begins at step 0")
    step, evaluated = -1, -1
    if checkpoint is not None:
        progress = read_progress(checkpoint)
        step, evaluated = progress.step, progress.evaluated_step

    def keep(row: dict[str, Any]) -> bool:
        return row.get("step", 0) <= (evaluated if "eval_loss" in row else step)

    if (directory / "metrics.jsonl").is_file():
        cut_rows(directory / "metrics.jsonl", keep, note)
    return checkpoint


def cut_rows(path: Path, keep: Callable[[dict[str, Any]], bool], note: Callable[[str], None]) -> None:
    """Keep only the rows that `keep` accepts. Unreadable rows are dropped and counted in a note."""
    kept, damaged = durable.truncate_rows(path, keep)
    if damaged:
        rows = "1 row is" if damaged == 1 else f"{damaged} rows are"
        note(f"{path}: {rows} damaged and left out, {kept} kept; the training is not touched by that, only its recorded metrics")
