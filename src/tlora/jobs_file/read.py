"""From a jobs file to a `RunSpec`: applies `--set`, merges the defaults into each job, expands sweeps, resolves paths.

All problems are collected and raised as one ConfigError. Data and base model are not opened here.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from tlora.errors import ConfigError
from tlora.job import SOURCE_KEYS, DataConfig, DataSource, JobSpec, RunSpec, may_be_hub_data
from tlora.jobs_file.located import Located, Problem, join_problems, plain, read_yaml
from tlora.jobs_file.other_trainers import explain_file
from tlora.jobs_file.rules import find_booleans, shown, translate
from tlora.jobs_file.spelling import meant, suggest
from tlora.jobs_file.sweep import expand, title_of
from tlora.json_file import is_utf8

MAX_BYTES = 1 << 20
MAX_JOBS = 10_000
_EXAMPLE = "a jobs file is YAML such as `base_model: ...` and `jobs: [{name: polite, data: polite.jsonl}]`"
_DATA_KEYS_ON_JOB = tuple(key for key in DataConfig.model_fields if key != "path")  # a job may have them directly
_DATA_KEYS = (*SOURCE_KEYS, *_DATA_KEYS_ON_JOB)
_RUN_KEYS = (*RunSpec.model_fields, "defaults")
_DEFAULT_KEYS = (*(key for key in JobSpec.model_fields if key not in ("name", "sweep_of")), *_DATA_KEYS_ON_JOB)
_JOB_KEYS = ("name", *_DEFAULT_KEYS, "sweep")
_SOURCES = ("path", "eval_path")
_REQUIRED = {
    key for model in (RunSpec, JobSpec, DataConfig, DataSource) for key, field in model.model_fields.items() if field.is_required()
}

Fields = dict[str, Located]


def read_jobs_file(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunSpec:
    """The run described by the file at `path`, with `overrides` ("defaults.r=8", "jobs.polite.r=32") applied.

    Relative paths in the file are resolved against its directory; those of `overrides` and `output_dir` against the current directory.
    Raises one ConfigError that lists every problem as `file:line: key: value, rule, remedy`, sorted by line.
    """
    file = Path(path)
    problems: list[Problem] = []
    root, (run, defaults, jobs) = _open(file, overrides, problems)
    run = _known(run, _RUN_KEYS, "", problems)
    defaults = _known(defaults, _DEFAULT_KEYS, "defaults", problems)
    expanded: list[Located] = []
    for job in jobs:
        fields = _known(job.fields, _JOB_KEYS, "a job", problems)
        expanded += [job.with_value(item) for item in expand(_merge(defaults, fields), _DEFAULT_KEYS, _DATA_KEYS_ON_JOB, problems)]
        if len(expanded) > MAX_JOBS:
            raise ConfigError(f"{job.where}: more than {MAX_JOBS} jobs after the sweeps; split the file")
    _check_names(expanded, problems)
    directory = file.parent.resolve()
    resolved = root.with_value([_resolve_job(job, directory, problems) for job in expanded])
    whole = Located(run | {"jobs": resolved}, 1, f"{file}:1")
    return _validate(whole, directory, problems)


def read_sweeps(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, dict[str, list[object]]]:
    """The `sweep` of each job that has one, by the job's name, its keys in the file's order. For a file that `read_jobs_file` accepts."""
    _, (_, _, jobs) = _open(Path(path), overrides, [])
    named = {str(plain(job.fields["name"])): plain(job.fields["sweep"]) for job in jobs if {"name", "sweep"} <= job.fields.keys()}
    return {name: cast("dict[str, list[object]]", sweep) for name, sweep in named.items() if sweep is not None}


def read_settings(settings: Sequence[str], name: str) -> tuple[dict[str, object], str]:
    """Of `KEY=VALUE` texts, values as a jobs file has them, and what a sweep over these would call the job `name`. Raises ConfigError."""
    problems: list[Problem] = []
    found: Fields = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {setting}: must be key=value; for example --set learning_rate=1e-4")
        value = read_yaml(text, lambda _, setting=setting: f"--set {setting}", problems)
        found[key] = value or Located(None, 0, f"--set {setting}")
    if problems:
        raise ConfigError(join_problems(problems))
    told = {key.removeprefix("data."): value for key, value in found.items() if key != "name"}
    title = title_of(name, told) if told else f"{name}-again"
    return {key: plain(value) for key, value in found.items()}, title[:63].rstrip("-._")


def _open(file: Path, overrides: Sequence[str], problems: list[Problem]) -> tuple[Located, tuple[Fields, Fields, list[Located]]]:
    """The file as it stands, and its layers with `overrides` applied."""
    root = read_yaml(_read_text(file), lambda line: f"{file}:{line}", problems)
    if root is None:
        raise ConfigError(f"{file}: the file is empty; {_EXAMPLE}")
    if not isinstance(root.value, dict):
        raise ConfigError(f"{root.where}: the file is not a mapping of keys to values; {_EXAMPLE}")
    if answer := explain_file(file, cast("dict[str, object]", plain(root))):
        raise ConfigError(answer)
    layers = _take_apart(root, problems)
    for override in overrides:
        _override(override, layers, problems)
    return root, layers


def _read_text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; give the path of a jobs file, for example `tlora train jobs.yaml`") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; give a readable jobs file") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{file}: longer than {MAX_BYTES} bytes; keep the data in files of its own and give their paths")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: byte {error.start} is not UTF-8; save the file as UTF-8") from None


def _take_apart(root: Located, problems: list[Problem]) -> tuple[Fields, Fields, list[Located]]:
    """The run's own keys, the defaults, and the jobs. In the last two, all keys of the data are moved under `data`."""
    run: Fields = dict(root.fields)
    defaults: Fields = {}
    if (given := run.pop("defaults", None)) and given.value is not None:
        if isinstance(given.value, dict):
            defaults = _gather(given.value, problems)
        else:
            problems.append(given.problem("defaults: must be a mapping of a job's keys; write `defaults: {r: 16}`"))
    listed = run.pop("jobs", root.with_value(None))
    jobs: list[Located] = []
    if not listed.value or not isinstance(listed.value, list):
        rule = "must be a list" if listed.value else "none"
        problems.append(listed.problem(f"jobs: {rule}; write `jobs:` and under it `- {{name: polite, data: polite.jsonl}}` lines"))
        return run, defaults, jobs
    for job in listed.value:
        if isinstance(job.value, dict):
            jobs.append(job.with_value(_gather(job.value, problems)))
        else:
            problems.append(job.problem(f"jobs: {shown(plain(job))} is not a mapping; write `- {{name: polite, data: polite.jsonl}}`"))
    if "report_to" in run and isinstance(given := run["report_to"].value, str | list):  # as transformers takes it
        listed = [run["report_to"]] if isinstance(given, str) else given
        kept = [] if [item.value for item in listed] == ["none"] else listed
        run["report_to"] = Located(kept, run["report_to"].line, run["report_to"].where)
    return run, defaults, jobs


def _gather(layer: Fields, problems: list[Problem]) -> Fields:
    """`data` as a mapping, with the data's keys that were written directly on the job."""
    fields = dict(layer)
    data = fields.get("data")
    inner: Fields = {}
    if data is not None:
        if isinstance(data.value, dict):
            inner = dict(data.value)
        elif isinstance(data.value, str | list):
            inner = {"path": data}
        else:
            return fields  # the model's own rule reports it
    for key in _DATA_KEYS_ON_JOB:
        if key in fields:
            given = fields.pop(key)
            if key in inner:
                problems.append(given.problem(f"{key}: given twice, on the job and in its data; keep one of the two"))
            inner.setdefault(key, given)
            data = data or given
    return fields | {"data": data.with_value(inner)} if data else fields


def _override(override: str, layers: tuple[Fields, Fields, list[Located]], problems: list[Problem]) -> None:
    """Apply one `--set key=value`."""
    run, defaults, jobs = layers
    where = f"--set {override}"
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        problems.append(Problem(0, where, "must be key=value; for example --set defaults.r=8"))
        return
    value = read_yaml(text, lambda _: where, problems)
    place = Located(value.value if value else None, 0, where)
    target, rest = run, key.split(".")
    names = {str(name.value): job.fields for job in jobs if (name := job.fields.get("name"))}
    if rest[0] not in _RUN_KEYS and (prefixes := [name for name in names if key.startswith(f"{name}.")]):
        problems.append(Problem(0, where, f"{max(prefixes, key=len)!r} is a job; write jobs.{override}"))
        return
    if rest == ["defaults"]:
        problems.append(Problem(0, where, "write defaults.key=value"))
        return
    if rest[0] == "defaults":
        target, rest = defaults, rest[1:]
    elif rest[0] == "jobs":
        named = [name for name in names if key.startswith(f"jobs.{name}.")]
        if not named:
            whole = len(rest) < 3 and (len(rest) < 2 or rest[1] in names)
            problems.append(Problem(0, where, "write jobs.NAME.key=value" if whole else f"unknown job; {suggest(rest[1], names)}"))
            return
        name = max(named, key=len)  # names may contain dots
        target, rest = names[name], key.removeprefix(f"jobs.{name}.").split(".")
    if target is not run and rest[0] in _DATA_KEYS_ON_JOB:
        rest = ["data", *rest]
    elif target is not run and rest == ["data"] and not isinstance(place.value, dict):
        rest = ["data", "path"]
    _put(target, rest, place)


def _put(target: Fields, keys: list[str], place: Located) -> None:
    for key in keys[:-1]:
        inner = target.get(key)
        fields = dict(inner.fields) if inner else {}
        target[key] = place.with_value(fields) if inner is None else inner.with_value(fields)
        target = fields
    target[keys[-1]] = place


def _known(fields: Fields, known: Iterable[str], holder: str, problems: list[Problem]) -> Fields:
    """`fields` without unknown keys, each of which becomes a problem."""
    kept = dict(fields)
    names = tuple(known)
    for key in [key for key in fields if key not in names]:
        problems.append(kept[key].problem(f"{key}: unknown key; {_meant(key, names, holder)}"))
        _rename(kept, key, names)
    if holder and (data := kept.get("data")) and data.fields:
        inner = dict(data.fields)
        for key in [key for key in inner if key not in _DATA_KEYS]:
            elsewhere = f"{key!r} belongs on the job, not in its data" if key in _JOB_KEYS else suggest(key, _DATA_KEYS)
            problems.append(inner[key].problem(f"data.{key}: unknown key; {elsewhere}"))
            _rename(inner, key, _DATA_KEYS)
        kept["data"] = data.with_value(inner)
    return kept


def _rename(fields: dict[str, Located], key: str, known: Iterable[str]) -> None:
    """Take an unknown key out. Its value stands for a key that must be given, if that was meant: it is not missing too."""
    place, (right, _) = fields.pop(key), meant(key, known)
    if right in _REQUIRED:
        fields.setdefault(right, place)


def _meant(key: str, known: tuple[str, ...], holder: str) -> str:
    if holder and key in RunSpec.model_fields:
        return f"{key!r} belongs at the top of the file, not in {holder}"
    if holder == "defaults" and key in ("sweep", "name"):
        return f"{key!r} belongs on a job, not in defaults"
    if not holder and key in _JOB_KEYS:
        return f"{key!r} belongs in `defaults` or on a job (--set defaults.{key}=... or jobs.NAME.{key}=...)"
    sentence = suggest(key, known)
    if sentence.startswith("known here") and holder and suggest(key, _RUN_KEYS).startswith("did"):
        return f"{suggest(key, _RUN_KEYS)[:-1]} at the top of the file?"
    if sentence.startswith("known here") and not holder and suggest(key, _JOB_KEYS).startswith("did"):
        return f"{suggest(key, _JOB_KEYS)[:-1]} in `defaults` or on a job?"
    return sentence


def _merge(defaults: Fields, job: Fields) -> Fields:
    merged = defaults | job
    under, over = defaults.get("data"), job.get("data")
    if under and over and under.fields and over.fields:
        merged["data"] = over.with_value(under.fields | over.fields)
    return merged


def _check_names(jobs: list[Located], problems: list[Problem]) -> None:
    seen: dict[str, Located] = {}
    for job in jobs:
        fields = job.fields
        if not (name := fields.get("name")) or not isinstance(name.value, str):
            continue
        folded = name.value.casefold()  # on some file systems, names that differ only in case are one directory
        if folded in seen:
            other = seen[folded]
            same = f"two jobs are named {name.value!r}"
            alike = same if name.value == other.value else f"{name.value!r} and {other.value!r} differ in case alone"
            problems.append(name.problem(f"name: {alike}, the other on {other.where}; names are directories and must differ"))
        seen.setdefault(folded, name)


def _resolve_job(job: Located, directory: Path, problems: list[Problem]) -> Located:
    fields = dict(job.fields)
    if "adapter_path" in fields:
        fields["adapter_path"] = _local(fields["adapter_path"], "adapter_path", directory, problems)
    if data := fields.get("data"):
        fields["data"] = data.with_value(_resolve_data(data.fields, directory, problems)) if data.fields else data
    return job.with_value(fields)


def _resolve_data(data: Fields, directory: Path, problems: list[Problem]) -> Fields:
    """With absolute paths, and with `split` and the like moved to the one source that they are about."""
    fields = dict(data)
    about = {key: fields.pop(key) for key in SOURCE_KEYS[1:] if key in fields}
    path = fields.get("path")
    if path and isinstance(path.value, str) and about:
        fields["path"] = path.with_value([path.with_value({"path": path} | about)])
    elif about:
        key, given = next(iter(about.items()))
        found = "a list" if path else "none"
        problems.append(given.problem(f"data.{key}: it is about one path, and there is {found}; write it beside the path it is about"))
    if "chat_template" in fields:
        fields["chat_template"] = _local(fields["chat_template"], "data.chat_template", directory, problems)
    for key in _SOURCES:
        if key in fields:
            fields[key] = _resolve_sources(fields[key], f"data.{key}", directory, problems)
    return fields


def _resolve_sources(place: Located, key: str, directory: Path, problems: list[Problem]) -> Located:
    """The path of each source of a list, or the one path."""
    if isinstance(place.value, list):
        return place.with_value([_resolve_sources(item, key, directory, problems) for item in place.value])
    if not isinstance(place.value, dict):
        local = _absolute(place, key, directory, problems)
        is_hub = isinstance(place.value, str) and may_be_hub_data(place.value) and not Path(str(local.value)).exists()
        return place if is_hub else _in_utf8(local, key, problems)
    source = dict(place.value)
    for unknown in [name for name in source if name not in DataSource.model_fields]:
        problems.append(source[unknown].problem(f"{key}.{unknown}: unknown key; {suggest(unknown, DataSource.model_fields)}"))
        _rename(source, unknown, DataSource.model_fields)
    if "path" not in source:
        problems.append(place.problem(f"{key}: a source without `path`; write {{path: polite.jsonl}}"))
        return place.with_value({})
    return place.with_value(source | {"path": _resolve_sources(source["path"], key, directory, problems)})


def _absolute(place: Located, key: str, directory: Path, problems: list[Problem]) -> Located:
    """The absolute path, so that a run resumed from another directory finds the same file."""
    if not isinstance(place.value, str):
        return place
    if not place.value or "\0" in place.value:
        problems.append(place.problem(f"{key}: {place.value!r} is not a path; give a file"))
        return place
    base = directory if place.line else Path.cwd()
    local = os.path.normpath(base / _at_home(place, key, problems))
    try:
        os.lstat(local)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            problems.append(place.problem(f"{key}: {place.value!r} is not a path: {error.strerror}; give a shorter one"))
            local = os.curdir
    return Located(local, place.line, place.where)


def _local(place: Located, key: str, directory: Path, problems: list[Problem]) -> Located:
    return _in_utf8(_absolute(place, key, directory, problems), key, problems)


def _in_utf8(path: Located, key: str, problems: list[Problem]) -> Located:
    if isinstance(path.value, str) and not is_utf8(path.value):
        problems.append(path.problem(f"{key}: {path.value!a} has bytes that are not UTF-8, and a run's files are UTF-8; rename it"))
        return path.with_value(os.curdir)
    return path


def at_home(path: str) -> str:
    """`path` with the home directory that a `~` at its beginning means. Raises ConfigError."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        raise ConfigError(f"{path!r}: there is no such home directory here; write it out, without ~") from None


def _at_home(place: Located, key: str, problems: list[Problem]) -> str:
    try:
        return at_home(str(place.value))
    except ConfigError as error:
        problems.append(place.problem(f"{key}: {error}"))
        return str(place.value)


def _resolve_base(place: Located, directory: Path, problems: list[Problem]) -> Located:
    """An absolute path if such a directory exists or the value is written as a path; otherwise a hub id, unchanged."""
    if not isinstance(place.value, str) or not place.value:
        return place if place.value != "" else _absolute(place, "base_model", directory, problems)
    local = _absolute(place, "base_model", directory, problems)
    is_path = place.value.startswith((".", "/", "~")) or Path(str(local.value)).is_dir()
    return _in_utf8(local, "base_model", problems) if is_path else place


def _validate(run: Located, directory: Path, problems: list[Problem]) -> RunSpec:
    fields = dict(run.fields)
    if "base_model" in fields:
        fields["base_model"] = _resolve_base(fields["base_model"], directory, problems)
    if isinstance((out := fields.get("output_dir", run)).value, str):
        fields["output_dir"] = out.with_value(_at_home(out, "output_dir", problems))
    run = run.with_value(fields)
    problems += find_booleans(fields, RunSpec)
    jobs = fields["jobs"].value
    for job in jobs if isinstance(jobs, list) else []:
        problems += find_booleans(job.fields, JobSpec)
        problems += find_booleans(job.fields["data"].fields, DataConfig, "data.") if "data" in job.fields else []
    spec = None
    try:
        spec = RunSpec.model_validate(plain(run))
    except ValidationError as error:
        known = bool(problems)  # problems of all jobs together (none, equal names) are then reported already, with their lines
        errors = error.errors(include_url=False, include_context=False)
        problems += translate([item for item in errors if not known or item["loc"] not in ((), ("jobs",))], run)
    unique = sorted(set(problems))
    if unique or spec is None:
        raise ConfigError(join_problems(unique))
    return spec
