"""Files in an adapter's directory that make prompts as in its training: the tokenizer, the chat template, the format of the rows.

Written when a job begins, so that its checkpoints are served alike; as TRL does, in transformers' own files. `prompt.json` adds what
those cannot say: whether the prompts went through the template at all.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tlora import durable
from tlora.data.chat import open_template
from tlora.data.formats import Chat, detect, read_example, read_pair
from tlora.data.report import DataReport
from tlora.data.rows import read_rows
from tlora.data.tokenizer import load_tokenizer
from tlora.errors import DataError, ModelError, TloraError
from tlora.job import DataConfig, JobSpec
from tlora.supermodel.base_name import naming_warning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_FILE = "prompt.json"
_LINKED_BYTES = 64 << 10  # the smallest file that adapters share: people edit the smaller ones
_TEMPLATE_FILE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
TemplateOrigin = Literal["job", "base", "tlora"]
_SAID: dict[str | None, str] = {
    "job": "the chat template that the job gave",
    "base": "the base model's own chat template",
    "tlora": "tlora's plain chat template, because the base model has none",
    None: "plain text, without a chat template",
}


@dataclass(frozen=True)
class PromptFormat:
    """The format of a job's samples: `template` is where their chat template came from, None for plain text or token ids."""

    format: str  # of the rows, as a job's `format`
    template: TemplateOrigin | None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # for the template, of the job

    def __str__(self) -> str:
        given = ", ".join(f"{key}: {json.dumps(value)}" for key, value in self.chat_template_kwargs.items())
        return _SAID[self.template] + (f" with {given}" if given else "")


class ServingFiles:
    """Writes them for jobs over one base, whose tokenizer is loaded once. A large file, such as the tokenizer's vocabulary, is stored once:
    the jobs' directories have hard links to it, where the file system can.
    """

    def __init__(self, base_model: str) -> None:
        self._base_model = base_model
        self._stored: dict[str, Path] = {}  # a job's copy of each file, which the next job's is linked to

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._base_model)

    @cached_property
    def _files(self) -> dict[str, bytes]:
        """The tokenizer as `save_pretrained` writes it, by relative path."""
        with tempfile.TemporaryDirectory() as scratch:
            self._tokenizer.save_pretrained(scratch)
            files = sorted(path for path in Path(scratch).rglob("*") if path.is_file())
            return {str(path.relative_to(scratch)): path.read_bytes() for path in files}

    def write(self, directory: Path, spec: JobSpec, report: DataReport, note: Callable[[str], None]) -> None:
        """Write the files into the job's directory; `report` is of its rows. A failure is only noted: the adapter matters more."""
        try:
            for name, content in self._contents(spec, report).items():
                self._store(name, content, directory / name)
        except (TloraError, OSError) as error:
            note(f"{spec.name}: its tokenizer and chat template are not saved with its adapter: {error}")

    def _store(self, name: str, content: bytes, path: Path) -> None:
        """Put the file at `path` by a rename: hard links to the file that it replaces keep their content."""
        if not _holds(path, content):
            durable.make_directory(path.parent)
            stored = self._stored.get(name)
            if stored is not None and len(content) >= _LINKED_BYTES and _holds(stored, content):
                durable.link_file(stored, path)
            else:
                durable.write_file(path, content)
        self._stored[name] = path

    def warn(self, jobs: Sequence[tuple[JobSpec, DataReport]]) -> list[str]:
        """Warn of jobs (with the report of their rows) whose template is neither their own nor the base's, and of an ambiguous name of
        the base. Raises ModelError.
        """
        naming = naming_warning(self._base_model)
        warnings = [naming] if naming else []
        if self._tokenizer.chat_template:
            return warnings
        names = [spec.name for spec, report in jobs if not spec.data.chat_template and report.has_chats]
        if not names:
            return warnings
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return [
            *warnings,
            f"{listed}: the base model has no chat template, so tlora's plain one is used (### User: ...). chat_template sets another",
        ]

    def _contents(self, spec: JobSpec, report: DataReport) -> dict[str, bytes]:
        own = bool(self._tokenizer.chat_template)
        origin: TemplateOrigin = "job" if spec.data.chat_template else "base" if own else "tlora"
        plain = not report.has_chats
        prompt = PromptFormat(report.format, None if plain else origin, {} if plain else spec.data.chat_template_kwargs)
        files = dict(self._files)
        if prompt.template in ("job", "tlora"):
            source = Path(spec.data.chat_template).read_text(encoding="utf-8") if spec.data.chat_template else None
            files = {name: content for name, content in files.items() if not name.startswith(_MORE_TEMPLATES)}
            files[_TEMPLATE_FILE] = open_template(self._tokenizer, source).text().encode()
        said = {key: value for key, value in asdict(prompt).items() if key != "chat_template_kwargs" or value}
        return files | {PROMPT_FILE: (json.dumps(said, indent=1) + "\n").encode()}


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


def is_plain(data: DataConfig, data_format: str) -> bool:
    """Whether samples are plain text or token ids. Raises DataError and OSError if that depends on the rows and none can be read."""
    if data_format in ("chat", "sharegpt", "alpaca", "query_response"):
        return False
    if data_format in ("text", "segments", "tokenized"):
        return True
    row = next(islice(read_rows(Path(data.sources[0].path)), 1))
    if data_format == "preference":
        return not isinstance(read_pair(row).chosen, Chat)
    return not isinstance(read_example(row, detect(row) if data_format == "auto" else data_format), Chat)  # type: ignore[arg-type]


def read_prompt(directory: Path) -> PromptFormat | None:
    """The `prompt.json` in `directory`; None if there is none. Raises ModelError for a broken one."""
    path = directory / PROMPT_FILE
    try:
        prompt = PromptFormat(**json.loads(path.read_text(encoding="utf-8")))
        return prompt if str(prompt) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path}: cannot be read ({error}). Copy the directory again, or only the adapter's files") from None


@dataclass(frozen=True)
class Prompting:
    """How prompts are rendered: `template` as for `open_encoder`, `raw` for plain text; `said` describes it to the user."""

    tokenizer: Any
    template: str | None
    raw: bool
    said: str
    kwargs: dict[str, Any] = field(default_factory=dict)  # for the template


def find_prompting(directory: Path, base_model: str) -> Prompting:
    """How prompts are rendered for the adapter in `directory`: as in its training, or its job's. Raises ModelError.

    The files in the adapter's directory decide; without them, the job's order; without that, the base.
    """
    for place in (directory, directory.parent):
        saved = read_prompt(place)
        if saved is not None:
            return Prompting(
                load_tokenizer(str(place)), None, saved.template is None, f"{saved}, as saved with the adapter", saved.chat_template_kwargs
            )
    if (directory / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(str(directory))
        if tokenizer.chat_template:
            return Prompting(tokenizer, None, False, "the chat template saved with the adapter")
    tokenizer = load_tokenizer(base_model)
    data = _trained_on(directory)
    source = _template_of(data)
    kwargs = data.chat_template_kwargs if data is not None else {}
    prompt = PromptFormat("", "job" if source else "base" if tokenizer.chat_template else "tlora", kwargs)
    if data is None:
        return Prompting(tokenizer, source, False, f"{prompt}; how the adapter was trained is not saved with it")
    try:
        raw = is_plain(data, data.format)
    except (DataError, OSError, StopIteration) as error:
        why = f"{prompt}; the training data cannot be read ({error}), and plain text would be prompted without a template"
        return Prompting(tokenizer, source, False, why, kwargs)
    return Prompting(tokenizer, source, raw, str(PromptFormat("", None) if raw else prompt), kwargs)


def _trained_on(directory: Path) -> DataConfig | None:
    """The data that the job of this adapter or checkpoint was trained on; None for an adapter from elsewhere."""
    for file in (directory / "job.json", directory.parent / "job.json"):
        try:
            return DataConfig.model_validate(json.loads(file.read_text(encoding="utf-8"))["data"])
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{file}: cannot be read ({error}). Copy the directory again, or only the adapter's files") from None
    return None


def _template_of(data: DataConfig | None) -> str | None:
    if data is None or data.chat_template is None:
        return None
    try:
        return Path(data.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template {data.chat_template} of the training cannot be read: {error}. Put it back") from None
