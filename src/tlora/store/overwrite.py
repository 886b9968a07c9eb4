"""What `--overwrite` removes of an earlier run: files that this program writes, known by their names, and directories left empty."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from tlora import durable
from tlora.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from tlora.base_digest import BASE_FILE
from tlora.errors import ConfigError
from tlora.manifest import MANIFEST
from tlora.store.checkpoint import OPTIMIZER_FILE, REFERENCE_DIRECTORY, STATE_FILE
from tlora.store.metrics import WANDB_ID
from tlora.store.model_card import is_unedited
from tlora.store.serving import PROMPT_FILE
from tlora.wording.card_seal import CARD_FILE

RUN_FILES = ("run.json", "run.jsonl", "report.html")
_ADAPTER = (CONFIG_FILE, WEIGHTS_FILE)
_TOKENIZER = (  # what transformers' save_pretrained writes; a name that is missing here is kept
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
_JOB_FILES = {*_ADAPTER, *_TOKENIZER, BASE_FILE, PROMPT_FILE, WANDB_ID, "job.json", "result.json", "metrics.jsonl"}
_TEMPORARY = r"tmp-[0-9a-f]{32}"
_CHECKPOINT = re.compile(rf"(bad-)?checkpoint-[0-9]{{1,18}}(-[0-9a-f]{{8}}|\.replaced)?|{_TEMPORARY}")
_IN_CHECKPOINT = re.compile("|".join(map(re.escape, (*_ADAPTER, OPTIMIZER_FILE, STATE_FILE, MANIFEST))))
_DIRECTORIES = {  # in a job's directory, each with its files
    _CHECKPOINT: _IN_CHECKPOINT,
    re.compile(rf"{REFERENCE_DIRECTORY}(\.replaced)?"): re.compile("|".join(map(re.escape, (WEIGHTS_FILE, MANIFEST)))),
    re.compile("tensorboard"): re.compile(r"events\.out\.tfevents\..*"),
    re.compile("additional_chat_templates"): re.compile(r".*\.jinja"),
}


def check_links(directory: Path, jobs: Collection[str]) -> None:
    """Raise ConfigError for a symbolic link where `remove_run` would delete, or the next run would write through it."""
    for path in [*(directory / name for name in RUN_FILES), *(directory / job for job in jobs)]:
        _refuse_link(path)
    for path in (path for job in jobs for path in _entries(directory / job)):
        if path.name in _JOB_FILES or path.name == CARD_FILE:
            _refuse_link(path)
        elif (files := _files_of(path)) is not None:
            _refuse_link(path)
            for file in _entries(path):
                if files.fullmatch(file.name):
                    _refuse_link(file)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise ConfigError(
            f"--overwrite: {path} is a symbolic link (to {path.readlink()}), and tlora writes none: what is behind it is not its own. "
            "Remove the link, or choose another output_dir"
        )


def remove_run(directory: Path, jobs: Collection[str]) -> list[str]:
    """Remove an earlier run with these `jobs` from `directory`, all but `run.json`. Returns the kept files as relative paths. A checkpoint
    with kept files is renamed `kept-checkpoint-…`, so that the next run does not use it. Raises ConfigError as `check_links`.
    """
    check_links(directory, jobs)
    for job in jobs:
        for file in list(_own_files(directory / job)):
            file.unlink()
        for path in _entries(directory / job):
            if _files_of(path) is not None and not _remove_empty(path) and _CHECKPOINT.fullmatch(path.name):
                durable.set_aside(path, "kept")
        _remove_empty(directory / job)
    for name in RUN_FILES[1:]:  # run.json is replaced, not removed: it marks the directory as a run's
        (directory / name).unlink(missing_ok=True)
    return [str(path.relative_to(directory)) for path in _kept(directory, jobs)]


def _own_files(job: Path) -> Iterator[Path]:
    for path in _entries(job):
        files = _files_of(path)
        if path.is_file():
            if path.name in _JOB_FILES or durable.is_leftover(path) or (path.name == CARD_FILE and is_unedited(path)):
                yield path
        elif files is not None:
            yield from (file for file in _entries(path) if file.is_file() and files.fullmatch(file.name))


def _files_of(path: Path) -> re.Pattern[str] | None:
    """The names of the files that we write into a directory of this name inside a job's."""
    return next((files for name, files in _DIRECTORIES.items() if path.is_dir() and name.fullmatch(path.name)), None)


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _remove_empty(directory: Path) -> bool:
    if not directory.is_dir() or _entries(directory):
        return False
    directory.rmdir()
    return True


def _kept(directory: Path, jobs: Collection[str]) -> Iterator[Path]:
    """What is kept: each file in jobs' directories, of other directories only the name."""
    for path in _entries(directory):
        if path.name in jobs and path.is_dir():
            yield from (inner for inner in sorted(path.rglob("*")) if inner.is_symlink() or not inner.is_dir())
        elif path.name not in RUN_FILES and not durable.is_leftover(path):
            yield path
