"""What a resume must know of a run, copied into each job's directory, and `run.json` rebuilt from these copies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tlora import durable
from tlora.base_digest import BASE_FILE, TrainedOver, read_fingerprint, trained_over
from tlora.errors import ConfigError, ModelError
from tlora.group.isolation import try_call
from tlora.job import JobSpec, RunSpec
from tlora.json_file import read_object
from tlora.store.run_directory import earlier_order, job_spec_in, lock_directory, run_spec_in
from tlora.store.scheduled_directory import refuse_scheduled

_SETTINGS = ("base_model", "dtype", "base_precision", "deterministic", "cpu_threads")  # of the RunSpec
Facts = Mapping[str, Any]


def base_facts(run: RunSpec, tiles: str | None, base_files: Facts) -> dict[str, Any]:
    """The facts that decide a job's numbers and would otherwise be in `run.json` alone. `base_files` as `BaseGuard.facts` returns it."""
    settings = json.loads(run.model_dump_json(include=set(_SETTINGS)))
    return settings | ({"tiles": tiles} if tiles else {}) | dict(base_files)


def write_base_file(directory: Path, facts: Facts) -> None:
    """Write `base.json` into a job's directory. Raises CheckpointError."""
    durable.write_file(directory / BASE_FILE, json.dumps(facts, indent=1) + "\n")


def check_same_base(directory: Path, facts: Facts) -> None:
    """A job that goes on in `directory` does so over the base that it was trained over, of which `facts` are this worker's.

    Nothing is compared where an earlier version wrote no digest, or the file is damaged. Raises ModelError, and ConfigError for a damaged
    `job.json`.
    """
    over, now = try_call(trained_over, directory), read_fingerprint(facts)
    if not isinstance(over, TrainedOver) or over.files is None or now is None or over.files.quick == now.quick:
        return
    if earlier_order(directory) is not None:
        raise ModelError(
            f"base_model {facts['base_model']}: is not the base that the job was trained over (sizes, headers or sampled blocks differ), "
            "and a job cannot go on over another. Put the earlier files back and submit the job again as it was, or train anew under "
            "another name"
        )


def restore_run_file(run: RunSpec, note: Callable[[str], None]) -> None:
    """Rebuild a lost or damaged `run.json` of an earlier run from its jobs' `base.json`; the damaged one is set aside.

    Does nothing if `run.json` is intact, or no job in `output_dir` was begun. Raises ConfigError if the jobs lack the facts, or disagree,
    or are those of a cluster or a server.
    """
    directory = Path(run.output_dir)
    path = directory / "run.json"
    if not directory.is_dir() or (damage := _damage(path)) is None or not _begun_jobs(directory):
        return
    refuse_scheduled(directory)
    with lock_directory(directory):
        begun = _begun_jobs(directory)
        facts = _common_facts({job.name: _read_facts(job, damage) for job in begun}, damage)
        specs = [spec for job in begun if (spec := _read_spec(job)) is not None]
        jobs = [json.loads(spec.model_dump_json()) for spec in specs or run.jobs]
        aside = f"; what was there is now {durable.set_aside(path).name}" if path.exists() else ""
        durable.write_file(path, json.dumps({"output_dir": run.output_dir, **facts, "status": "stopped", "jobs": jobs}, indent=1) + "\n")
    sources = ", ".join(f"{job.name}/{BASE_FILE}" for job in begun[:3]) + (f" and {len(begun) - 3} more" if len(begun) > 3 else "")
    note(f"{damage}: it was made again from {sources}{aside}")


def _damage(path: Path) -> str | None:
    """The reason why a `run.json` cannot be used."""
    if not path.exists():
        return f"{path} is lost"
    try:
        content = read_object(path)
        run_spec_in(content)
        read_fingerprint(content)
    except (OSError, TypeError, ValueError, KeyError) as error:
        return f"{path} is damaged ({_first(error)})"
    return None


def _begun_jobs(directory: Path) -> list[Path]:
    """Directories of jobs that have a `base.json`, or would have something to lose without one."""
    begun = {path.parent for path in directory.glob(f"*/{BASE_FILE}")}
    return sorted(begun | {path.parent for path in directory.glob("*/job.json") if any(path.parent.glob("checkpoint-*"))})


def _read_facts(job: Path, damage: str) -> dict[str, Any]:
    path = job / BASE_FILE
    try:
        facts = read_object(path)
        if missing := [key for key in _SETTINGS if key not in facts]:
            raise KeyError(missing[0])
        run_spec_in(facts | {"jobs": [{"name": "any", "data": "any"}]})
        read_fingerprint(facts)
    except (OSError, TypeError, ValueError, KeyError) as error:
        missing = isinstance(error, FileNotFoundError)
        why = "is not there (earlier versions did not write it)" if missing else f"is damaged ({_first(error)})"
        raise ConfigError(
            f"{damage}, and {path} {why}: over which base and how {job.name} was trained is unknown. Put run.json back, move "
            f"{job} elsewhere, or use a new output_dir; nothing was changed"
        ) from None
    return facts


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _common_facts(facts_by_job: Mapping[str, Facts], damage: str) -> dict[str, Any]:
    """The facts that all jobs have in common. The base's sha256 become known during a run: a job that ended before has none."""
    common: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, facts in facts_by_job.items():
        for key, value in _comparable(facts).items():
            if key in common and common[key] != value:
                raise ConfigError(
                    f"{damage}, and its jobs disagree: {key} is {common[key]!r} in {sources[key]}/{BASE_FILE} and {value!r} in "
                    f"{name}/{BASE_FILE}. The jobs of one run have it in common: put run.json back, or move the directories of those "
                    "that do not belong to it elsewhere; nothing was changed"
                )
            common[key], sources[key] = value, sources.get(key, name)
    quick, sha256 = common.pop("base_files.quick", None), common.pop("base_files.sha256", {})
    return common | ({"base_files": {"quick": quick, "sha256": sha256}} if quick is not None else {})


def _comparable(facts: Facts) -> dict[str, Any]:
    base = read_fingerprint(facts)
    flat = {key: facts.get(key) for key in _SETTINGS} | ({"tiles": facts["tiles"]} if "tiles" in facts else {})
    if base is not None:
        flat |= {"base_files.quick": base.quick} | ({"base_files.sha256": dict(base.sha256)} if base.sha256 else {})
    return flat


def _read_spec(job: Path) -> JobSpec | None:
    """The job's recorded order. A damaged `job.json` fails its job alone, when it is opened."""
    try:
        return job_spec_in(read_object(job / "job.json"))
    except (OSError, ValueError):
        return None
