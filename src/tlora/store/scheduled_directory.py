"""Directories that a cluster or a server of tlora schedules: a run of `tlora train` may not take them up."""

from __future__ import annotations

from pathlib import Path

from tlora.errors import ConfigError


def refuse_scheduled(directory: Path) -> None:
    """Raise ConfigError if `directory` is the output directory of a cluster or a server, or the one in it that holds its jobs."""
    absolute = directory.absolute()
    if (absolute / "workers").is_dir() and (absolute / "jobs").is_dir() and not (absolute / "run.json").is_file():  # or jobs are called so
        top = absolute
    elif absolute.name == "jobs" and (absolute.parent / "workers").is_dir() and _keeps_a_store(absolute.parent):
        top = absolute.parent
    else:
        return
    whose, remedy = ("server", "`tlora submit`") if (top / "bases").is_dir() else ("cluster", "`tlora cluster`, which goes on")
    raise ConfigError(
        f"output_dir {directory} belongs to a {whose} of tlora, which schedules the jobs in {top / 'jobs'}. "
        f"Train there with {remedy}, or choose another output_dir"
    )


def _keeps_a_store(directory: Path) -> bool:
    """Whether a cluster or a server has begun there."""
    return (directory / "events.jsonl").is_file() or (directory / "tokens").is_dir()
