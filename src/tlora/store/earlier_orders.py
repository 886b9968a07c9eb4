"""Values that a resumed order takes from the order that it began with, where the jobs file leaves them open."""

from __future__ import annotations

from typing import Any

from tlora.data.sources import ALL_SPLITS
from tlora.job import DataSource, JobSpec, Sources


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
