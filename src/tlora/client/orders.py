"""From a jobs file to what a server is sent: data files to upload, and one request for each job or sweep.

What only `tlora train` can do is refused here, with all problems at once; what the server decides by itself is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora.base_digest import quick_digest
from tlora.data_directory import check_kind, check_link, may_have_splits
from tlora.errors import ConfigError, DataError
from tlora.job import DATA_SUFFIXES, DataConfig, DataSource, JobSpec, RunSpec

_NOT_SENT = {"name", "data", "adapter_path", "arrival_seconds", "sweep_of"}
_SERVERS = (
    "dtype",
    "base_precision",
    "layout",
    "unused_weights",
    "deterministic",
    "token_budget",
    "recompute",
    "memory_limit",
    "cpu_threads",
    "report_to",
)
_ONE_BY_ONE = ("data", "eval_path", "chat_template", "adapter_path", "arrival_seconds")  # sweeps over these are no single request
_SAVED_SET = ("state.json", "dataset_dict.json")


@dataclass(frozen=True, slots=True)
class Submission:
    """One request: a job, or, with `sweep`, the first of its jobs, to be sent with the values of all. `names` are those of the jobs."""

    job: JobSpec
    names: tuple[str, ...]
    sweep: Mapping[str, Sequence[object]] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be sent. `files` has each data file once, `notes` what of the jobs file the server does not hear of."""

    base_model: str
    files: tuple[Path, ...]
    submissions: tuple[Submission, ...]
    notes: tuple[str, ...]


def plan_orders(run: RunSpec, sweeps: Mapping[str, Mapping[str, Sequence[object]]]) -> Plan:
    """`sweeps` as `read_sweeps` gives them. Raises ConfigError with every job that a server cannot take."""
    problems: dict[str, None] = {}
    files: dict[Path, None] = {}
    for job in run.jobs:
        for problem in _problems(job):
            problems[problem] = None
        for source in (*job.data.sources, *job.data.eval_sources):
            try:
                files |= dict.fromkeys(files_of(source))
            except ConfigError as error:
                problems[str(error)] = None
    if problems:
        found = list(problems)
        raise ConfigError(found[0] if len(found) == 1 else f"{len(found)} problems:\n" + "\n".join(f"  {item}" for item in found))
    return Plan(run.base_model, tuple(files), tuple(_submissions(run.jobs, sweeps)), tuple(_notes(run)))


def _problems(job: JobSpec) -> Iterable[str]:
    if job.adapter_path is not None:
        yield (
            f"{job.name}: adapter_path {job.adapter_path!r}: a server continues adapters of its own jobs. Remove it, and name a job "
            "with --start-from"
        )
    if job.data.chat_template is not None:
        yield f"{job.name}: chat_template {job.data.chat_template!r}: a server uses that of its base. Remove it, or use `tlora train`"


def _notes(run: RunSpec) -> Iterable[str]:
    given = [key for key in _SERVERS if key in run.model_fields_set]
    if given:
        yield f"{', '.join(given)}: the server's own settings hold; the jobs file's are not sent"
    if any(job.arrival_seconds for job in run.jobs):
        yield "arrival_seconds: not sent; a job arrives when it is submitted"


def _submissions(jobs: Sequence[JobSpec], sweeps: Mapping[str, Mapping[str, Sequence[object]]]) -> Iterable[Submission]:
    """In the file's order."""
    groups: dict[str, list[JobSpec]] = {}
    for job in jobs:
        sweep = sweeps.get(job.sweep_of or "")
        whole = sweep is not None and not any(key in sweep for key in _ONE_BY_ONE)
        groups.setdefault(f"sweep {job.sweep_of}" if whole else f"job {job.name}", []).append(job)
    for title, group in groups.items():
        sweep = sweeps[group[0].sweep_of or ""] if title.startswith("sweep ") else None
        yield Submission(group[0], tuple(job.name for job in group), sweep)


def files_of(source: DataSource) -> list[Path]:
    """The local files of a source, as `tlora train` reads them. Raises ConfigError for what cannot be uploaded."""
    path = Path(source.path)
    about = next((key for key in ("name", "split", "revision") if getattr(source, key) is not None), None)
    if not path.exists() and not path.is_absolute():
        raise ConfigError(
            f"{source.path}: a data set of the hub, and a server learns from uploaded files. Save it as JSONL, and name the file"
        )
    if about is not None or any((path / name).exists() for name in _SAVED_SET):
        raise ConfigError(
            f"{source.display_name}: a saved data set, and a server learns from uploaded files. Save it as JSONL, and name the file"
        )
    try:
        check_link(path)
        check_kind(path)
        split = path.is_dir() and may_have_splits(path)
    except DataError as error:
        raise ConfigError(str(error)) from None
    if path.is_dir():
        found = sorted(item for item in path.iterdir() if item.is_file() and _is_data(item) and item.name[0] not in "._")
        if not found:
            raise ConfigError(f"{path}: holds no data file; one ends in {', '.join(DATA_SUFFIXES)}")
        if split and len(found) > 1:
            raise ConfigError(
                f"{path}: may hold splits, of which `tlora train` reads one, and a server learns from all files that it is given. "
                f"Name the files: {', '.join(file.name for file in found[:5])}"
            )
        if len(found) > 1 and source.weight is not None:
            raise ConfigError(f"{path}: a directory of {len(found)} files has one weight. Name its files, each with a weight of its own")
        return found
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; correct the path in the jobs file")
    if not _is_data(path):
        raise ConfigError(f"{path}: must end in one of {', '.join(DATA_SUFFIXES)}; convert or rename the file")
    if not path.stat().st_size:
        raise ConfigError(f"{path}: the file is empty; at least one row is needed")
    return [path]


def _is_data(path: Path) -> bool:
    """For a server, which takes no compressed files."""
    return path.suffix.lower() in DATA_SUFFIXES


def order_of(submission: Submission, base_model: str, ids: Mapping[Path, str], start_from: str | None = None) -> dict[str, Any]:
    """The body of a request: an order, or a sweep. `ids` are those of the uploaded files."""
    job = submission.job
    fields: dict[str, Any] = job.model_dump(mode="json", exclude_unset=True, exclude=_NOT_SENT)
    fields |= {"name": job.sweep_of if submission.sweep is not None else job.name, "base_model": base_model, "data": _data(job.data, ids)}
    if start_from is not None:
        fields["start_from"] = start_from
    return fields if submission.sweep is None else {"job": fields, "sweep": {key: list(values) for key, values in submission.sweep.items()}}


def _data(data: DataConfig, ids: Mapping[Path, str]) -> dict[str, Any]:
    fields: dict[str, Any] = data.model_dump(mode="json", exclude_unset=True, exclude={"path", "eval_path", "chat_template"})
    fields["file"] = _files(data.sources, ids)
    if data.eval_sources:
        fields["eval_file"] = _files(data.eval_sources, ids)
    return fields


def _files(sources: Sequence[DataSource], ids: Mapping[Path, str]) -> str | list[dict[str, Any]]:
    found = [(ids[path], source.weight) for source in sources for path in files_of(source)]
    if len(found) == 1 and found[0][1] is None:
        return found[0][0]
    return [{"file": file} | ({} if weight is None else {"weight": weight}) for file, weight in found]


def find_base(wanted: str, known: Mapping[str, str | None], tell: Callable[[str], None]) -> str:
    """The server's name for the base model of a jobs file: the same, or that of the directory, which is said. `known`: the names that it
    serves, with the digests of their files.

    Raises ConfigError for one that it does not serve, also where another model has the directory's name there.
    """
    if wanted in known:
        return wanted
    if Path(wanted).is_absolute() and (name := Path(wanted).name) in known:
        try:
            here = quick_digest(Path(wanted))
        except OSError:
            here = None
        if here is not None and known[name] is not None and here != known[name]:
            raise ConfigError(
                f"base_model {wanted}: the server's {name!r} is another model (its config, sizes, headers or sampled blocks differ). Train "
                f"over that one with --set base_model={name}, or let its operator add yours under another name: tlora bases add"
            )
        same = "which has the same files" if here is not None and known[name] is not None else "whose files are not compared"
        tell(f"base_model {wanted}: the server's {name!r} is used, {same}")
        return name
    listed = f"It serves {', '.join(known)}: choose one with --set base_model=NAME, or let" if known else "Let"
    raise ConfigError(
        f"base_model {wanted}: the server does not serve it. {listed} its operator add it: tlora bases add {_name_of(wanted)}"
    )


def _name_of(wanted: str) -> str:
    return f"{Path(wanted).name}={wanted}" if Path(wanted).is_absolute() else wanted
