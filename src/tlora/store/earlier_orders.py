"""Values that a resumed order takes from the order that it began with, where the jobs file leaves them open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tlora.data.sources import ALL_SPLITS, has_layout
from tlora.job import DataSource, JobSpec, Sources


def in_terms_of_today(job: JobSpec) -> JobSpec:
    """A recorded order in today's terms. Before `eval_seed`, evaluation rows were drawn by the job's seed, and directories read whole."""
    data = job.data
    if "eval_seed" in data.model_fields_set:
        return job
    meant: dict[str, Any] = {"path": _read_whole(data.path, data.sources)}
    if data.eval_path:
        meant["eval_path"] = _read_whole(data.eval_path, data.eval_sources)
    if data.eval_size:
        meant["eval_seed"] = job.seed
    return job.model_copy(update={"data": data.model_copy(update=meant)})


def _read_whole(path: str | Sources, sources: Sources) -> str | Sources:
    """`path` itself if none of its sources is a directory that may have splits."""

    def whole(source: DataSource) -> DataSource:
        is_whole = not (source.split or source.name) and has_layout(source, Path())
        return source.model_copy(update={"split": ALL_SPLITS}) if is_whole else source

    opened = tuple(map(whole, sources))
    return path if opened == sources else opened


def pinned(job: JobSpec, earlier: JobSpec) -> JobSpec:
    """`job` with the evaluation seed, the revisions and the reading of directories of `earlier`, where it leaves them open."""
    data, before = job.data, earlier.data
    changes: dict[str, Any] = {"path": _pin_sources(data.path, data.sources, before.sources)}
    if data.eval_path:
        changes["eval_path"] = _pin_sources(data.eval_path, data.eval_sources, before.eval_sources)
    if "eval_seed" not in data.model_fields_set:
        changes["eval_seed"] = before.eval_seed
    return job.model_copy(update={"data": data.model_copy(update=changes)})


def _pin_sources(path: str | Sources, now: Sources, before: Sources) -> str | Sources:
    """`path`, whose sources are `now`, with the sources of `before` where these differ only in what is left open."""
    if len(now) != len(before):
        return path

    def left_open(old: DataSource) -> DataSource:
        return old.model_copy(update={"revision": None} | ({"split": None} if old.split == ALL_SPLITS else {}))

    fixed = tuple(old if new == left_open(old) else new for new, old in zip(now, before, strict=True))
    return path if fixed == now else fixed
