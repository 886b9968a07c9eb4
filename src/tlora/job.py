"""The order of a user: `JobSpec` (one adapter) and `RunSpec` (the file around several).

The same classes are the YAML, the Python objects and the resolved config in an adapter's directory. Field names are PEFT's
for the adapter and transformers'/TRL's for the run. Reading files, defaults and sweeps: `jobs_file/`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from tlora.adapter_shape import LoraConfig as LoraConfig
from tlora.adapter_shape import LoraShape as LoraShape
from tlora.adapter_shape import OneOf
from tlora.byte_size import Bytes
from tlora.registry import BASE_PRECISIONS, OBJECTIVES
from tlora.registry import Rows as Rows

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# Job directories share the output directory with the run's own files and those of `durable.py`: half-written, set aside, being replaced.
_RESERVED_NAME = re.compile(r"tmp-.*|bad-.*|.*\.replaced|run\.jsonl?|report\.html", re.IGNORECASE)
DataFormat = Literal[
    "auto", "chat", "prompt_completion", "text", "alpaca", "sharegpt", "query_response", "segments", "tokenized", "preference"
]
ObjectiveName = Annotated[str, OneOf(OBJECTIVES)]
SchedulerType = Literal["linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial"]
# Formats that a row may have, by what is learned from it.
FORMATS: dict[Rows, tuple[str, ...]] = {
    "samples": ("chat", "prompt_completion", "text", "alpaca", "sharegpt", "query_response", "segments", "tokenized"),
    "pairs": ("preference",),
    "labelled": ("chat", "prompt_completion", "alpaca", "sharegpt", "query_response"),
}
_TAKES: dict[Rows, str] = {"samples": "samples", "pairs": "pairs of answers", "labelled": "answers labelled as wanted or not"}
BasePrecision = Annotated[str, OneOf(BASE_PRECISIONS)]
TrainOn = Literal["completions", "last", "all"]
# What is handed to a chat template besides the chat. Names that say what is rendered are not the user's to set.
RESERVED_KWARGS = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length", "messages"),
        *("padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "self"),
        *("tokenize", "tokenizer_kwargs", "tools", "truncation"),
    )
)
TemplateKwargs = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")],
    bool | Annotated[int, Field(ge=-(10**9), le=10**9)] | float | Annotated[str, Field(max_length=1000)],
]
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
COMPRESSED_SUFFIXES = (".gz", ".zst")  # after the suffix of a data file
Positive = Annotated[int, Field(ge=1, le=10**9)]  # bounded, or ten to the four hundredth would overflow a float somewhere

_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class TrainConfig(BaseModel):
    """How one adapter is trained. Names and meaning are transformers'/TRL's, except `batch_size` and `weight`."""

    model_config = _STRICT

    objective: ObjectiveName = "sft"
    beta: Annotated[float, Field(gt=0, le=1e6)] = 0.1  # of dpo and kto: how far from the base; of orpo: weight of the odds ratio
    reference: Literal["start", "base"] = "start"  # of dpo and kto: what answers' probabilities are compared with
    desirable_weight: Annotated[float, Field(ge=0, le=1e6)] = 1.0  # of kto: weight of the wanted answers' losses
    undesirable_weight: Annotated[float, Field(ge=0, le=1e6)] = 1.0  # of kto: of the unwanted ones'
    learning_rate: Annotated[float, Field(ge=0, le=1e38)] = 2e-4  # the largest that fp32 holds
    lr_scheduler_type: SchedulerType = "linear"
    min_lr_rate: Annotated[float, Field(ge=0, le=1)] = 0.1  # floor of cosine_with_min_lr, a share of learning_rate
    warmup_steps: Annotated[float, Field(ge=0, le=1e9)] = 0  # below 1: a share of all steps
    weight_decay: Annotated[float, Field(ge=0, le=1e38)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[float, Field(ge=1e-37, le=1e38)] = 1e-8  # below it is 0 in fp32
    max_grad_norm: Annotated[float, Field(ge=0, le=1e38)] = 1.0  # 0: no clipping
    batch_size: Positive = 8  # samples, or pairs, per optimizer step
    num_train_epochs: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    max_steps: Positive | None = None  # wins over num_train_epochs
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # this job's share of the tokens against its neighbours

    logging_steps: Positive = 1
    eval_steps: Positive | Literal["epoch"] | None = None  # None: before the first step and after the last
    early_stopping_patience: Positive | None = None  # evaluations without a better eval loss
    load_best_model_at_end: bool = False
    save_steps: Positive | Literal["epoch"] = 500
    save_total_limit: Positive | None = 2

    @property
    def learns_from(self) -> Rows:
        """The kind of rows that the objective learns from."""
        return OBJECTIVES[self.objective].learns_from

    @property
    def needs_whole_batch(self) -> bool:
        """Whether each global batch must be computed in one place."""
        return OBJECTIVES[self.objective].whole_batch

    def warmup_count(self, total_steps: int) -> int:
        """Warm-up in optimizer steps out of `total_steps`."""
        return math.ceil(self.warmup_steps * total_steps) if self.warmup_steps < 1 else int(self.warmup_steps)

    def total_steps(self, num_samples: int) -> int:
        """Optimizer steps for `num_samples` training samples; the last batch of an epoch may be smaller."""
        per_epoch = math.ceil(num_samples / self.batch_size)
        return self.max_steps or max(1, math.ceil(self.num_train_epochs * per_epoch))


def check_kwargs(kwargs: Mapping[str, object]) -> None:
    """Raises ValueError for values that a chat template is given by tlora itself."""
    if taken := sorted(RESERVED_KWARGS & set(kwargs)):
        raise ValueError(
            f"chat_template_kwargs: {taken[0]!r} says what is rendered, which follows from the rows; take it out. "
            "Variables of the template itself belong here, such as enable_thinking: false"
        )


class DataSource(BaseModel):
    """One of several sources of samples: a file, a directory, a saved set, or a data set of the hub (`org/name`)."""

    model_config = _STRICT

    path: str
    name: str | None = None  # configuration of a hub data set
    split: str | None = None  # of a hub data set or a saved set
    revision: str | None = None  # branch, tag or commit of a hub data set; a run records the commit
    weight: Annotated[float, Field(gt=0, le=1e6)] | None = None  # share of the samples of an epoch against the other sources'

    @property
    def display_name(self) -> str:
        """As a message names it."""
        return ", ".join([self.path, *(f"{key} {value}" for key in ("name", "split") if (value := getattr(self, key)))])


SOURCE_KEYS = tuple(key for key in DataSource.model_fields if key != "weight")  # those that may stand in `data` itself


def _sources(value: object) -> object:
    """A list of sources in which `path:` may be left out; any other value unchanged."""
    return [{"path": item} if isinstance(item, str) else item for item in cast("list[object]", value)] if isinstance(value, list) else value


Weights = Sequence[tuple[str, float | None]]
Sources = Annotated[tuple[DataSource, ...], Field(min_length=1, max_length=1000), BeforeValidator(_sources)]


class DataFields(BaseModel):
    """How samples are read and which of their tokens are trained, wherever they lie: `DataConfig` has paths, `api.OrderedData` ids."""

    model_config = _STRICT

    format: DataFormat = "auto"
    eval_size: Annotated[float, Field(ge=0)] = 0  # below 1: a share of the rows, else a number of rows; split off by eval_seed
    eval_seed: Annotated[int, Field(ge=0, lt=2**32)] = 42  # not the job's seed: jobs of other seeds are evaluated on the same rows
    max_length: Annotated[int, Field(ge=2, le=10**9)] = 1024  # tokens; longer samples are cut at the end
    train_on: TrainOn = "completions"
    packing: bool = False  # samples share rows of max_length tokens, and batch_size counts rows
    on_bad_rows: Literal["error", "drop"] = "error"  # rows that cannot be used: listed, or left out and counted
    chat_template_kwargs: TemplateKwargs = {}  # for the chat template, such as enable_thinking: false; a row's own win

    def check_sources(self, sources: Weights, eval_sources: Weights) -> None:
        """The rules between these fields and the sources, which are each a name and a weight. Raises ValueError."""
        if self.eval_size >= 1 and not self.eval_size.is_integer():
            raise ValueError(f"eval_size {self.eval_size} is no whole number of rows; write {int(self.eval_size)}, or a share below 1")
        if self.eval_size and eval_sources:
            named = " + ".join(name for name, _ in eval_sources)
            raise ValueError(
                f"eval_size {self.eval_size:g} and eval_path {named!r} are both set, and evaluation has one source; "
                "remove one (eval_size: 0 on the job undoes a default)"
            )
        weighted = [name for name, weight in sources if weight is not None]
        bare = [name for name, weight in sources if weight is None]
        if bare and weighted:
            raise ValueError(f"path: the source {bare[0]!r} has no weight, and {weighted[0]!r} has one; give each a weight, or none")
        if any(weight is not None for _, weight in eval_sources):
            raise ValueError("eval_path: sources have weights, and an evaluation takes each row once; remove the weights")


class DataConfig(DataFields):
    """Where one job's samples come from, and how they are read."""

    path: str | Sources
    eval_path: str | Sources | None = None
    chat_template: str | None = None  # a file with a Jinja template, instead of the base model's own

    @model_validator(mode="before")
    @classmethod
    def _gather_source(cls, raw: object) -> object:
        """`{path: p, split: s}` is one source of a list."""
        fields = cast("dict[str, object]", raw) if isinstance(raw, dict) else {}
        source = {key: value for key, value in fields.items() if key in SOURCE_KEYS}
        if not isinstance(fields.get("path"), str) or len(source) == 1:
            return cast("object", raw)
        return {key: value for key, value in fields.items() if key not in SOURCE_KEYS} | {"path": [source]}

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_kwargs(cls, kwargs: TemplateKwargs) -> TemplateKwargs:
        check_kwargs(kwargs)
        return kwargs

    @model_validator(mode="after")
    def _check_sources(self) -> DataConfig:
        sources, eval_sources = ([(one.path, one.weight) for one in listed] for listed in (self.sources, self.eval_sources))
        self.check_sources(sources, eval_sources)
        return self

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The sources of the samples, in order."""
        return (DataSource(path=self.path),) if isinstance(self.path, str) else self.path

    @property
    def eval_sources(self) -> tuple[DataSource, ...]:
        """Those of `eval_path`; none without it."""
        if not self.eval_path:
            return ()
        return (DataSource(path=self.eval_path),) if isinstance(self.eval_path, str) else self.eval_path

    @property
    def display_name(self) -> str:
        """The sources as a message names them."""
        return " + ".join(source.display_name for source in self.sources)


SCHEDULED = ("arrival_seconds", "priority", "max_slowdown", "deadline_seconds")
"""Fields of a job that are for a scheduler: no number of a step depends on them."""

_DATA_KEYS = (
    "max_length",
    "train_on",
    "packing",
    "on_bad_rows",
    "chat_template_kwargs",
    "eval_size",
    "eval_seed",
    "eval_path",
    "chat_template",
    "format",
)


class JobFields(LoraShape, TrainConfig):
    """The fields of a job that do not depend on where its data is: on this machine (`JobSpec`) or on a server (`api.OrderSpec`)."""

    model_config = _STRICT

    gpus: Positive = 1  # replicas that each global batch is cut among, at most batch_size
    priority: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0  # of those that wait the highest goes first
    max_slowdown: Annotated[float, Field(ge=1, le=1e6)] = 1.5  # of its optimizer steps against what they take alone
    deadline_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None  # after its arrival, by which it wishes to be done

    def check_together(self, data: DataFields, eval_path: object) -> None:
        """The rules between a job's fields and those of its data. Raises ValueError."""
        rows = self.learns_from
        if data.format != "auto" and data.format not in FORMATS[rows]:
            raise ValueError(
                f"objective {self.objective} does not learn from format {data.format}: it takes {_TAKES[rows]}. "
                f"Set format to auto or one of {', '.join(FORMATS[rows])}, or choose another objective"
            )
        if rows != "samples" and data.train_on != "completions":
            raise ValueError(f"objective {self.objective} learns from answers alone: train_on: {data.train_on} has no meaning. Take it out")
        if rows != "samples" and data.packing:
            raise ValueError(
                f"objective {self.objective} takes batches of {_TAKES[rows]}, and packing makes batches of rows that hold several samples. "
                "Take packing out"
            )
        if rows == "labelled" and self.batch_size == 1:
            raise ValueError(
                f"objective {self.objective} compares an answer with those of other rows of its batch, and batch_size is 1. Set at least 2"
            )
        if self.gpus > self.batch_size:
            raise ValueError(
                f"gpus {self.gpus} is more than batch_size {self.batch_size}, and each replica needs a sample of the global batch. "
                f"Set gpus to at most {self.batch_size}, or raise batch_size"
            )
        needs_eval = [key for key in ("early_stopping_patience", "load_best_model_at_end", "eval_steps") if getattr(self, key)]
        if needs_eval and not (data.eval_size or eval_path):
            raise ValueError(f"{needs_eval[0]} needs evaluation data: set eval_size (say 0.05) or eval_path on the job's data")
        if self.early_stopping_patience and not self.eval_steps:
            raise ValueError(
                f"early_stopping_patience {self.early_stopping_patience} needs eval_steps: without it a job is evaluated before "
                "its first step and after its last only; set eval_steps (say 50, or epoch)"
            )


class JobSpec(LoraConfig, JobFields):
    """One user's order for one adapter.

    `data` may be a path, a list of sources, or a mapping with the fields of `DataConfig`; those fields may also stand on the job, so that
    `max_length: 2048` can be written on the job or in the defaults.
    """

    model_config = _STRICT

    name: str
    data: DataConfig
    arrival_seconds: Annotated[float, Field(ge=0, le=1e9)] = 0.0  # after the start, under a scheduler
    sweep_of: str | None = None  # set by the reader of a jobs file for each job of a sweep

    @model_validator(mode="before")
    @classmethod
    def _gather_data(cls, raw: object) -> object:
        if not isinstance(raw, dict) or "data" not in raw:
            return cast("object", raw)
        fields = dict(cast("dict[str, object]", raw))
        data = fields["data"]
        if isinstance(data, str | list):
            data = {"path": cast("object", data)}
        if isinstance(data, DataConfig):
            data = data.model_dump(exclude_unset=True)
        if isinstance(data, dict):
            on_job = {key: fields.pop(key) for key in _DATA_KEYS if key in fields}
            fields["data"] = on_job | cast("dict[str, object]", data)
        return fields

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not NAME_PATTERN.fullmatch(name) or name.endswith("."):
            raise ValueError(f"job name {name!r} must match {NAME_PATTERN.pattern}: letters, digits, '.', '_' and '-', no '/', 63 at most")
        if _RESERVED_NAME.fullmatch(name):
            raise ValueError(
                f"job name {name!r} is kept for the run's own files: a name may not begin with 'tmp-' or 'bad-', "
                "end with '.replaced', or be run.json, run.jsonl or report.html; choose another"
            )
        return name

    @model_validator(mode="after")
    def _check_together(self) -> JobSpec:
        self.check_together(self.data, self.data.eval_path)
        return self


_HUB_DATA = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+")


def may_be_hub_data(path: str) -> bool:
    """Whether `path`, which does not exist, looks like a data set of the hub: `org/name`, without the suffix of a data file."""
    return _HUB_DATA.fullmatch(path) is not None and Path(path).suffix.lower() not in (*DATA_SUFFIXES, *COMPRESSED_SUFFIXES)


def split_revision(base_model: str) -> tuple[str, str | None]:
    """A hub id `org/name@revision` as its name and its branch, tag or commit; a directory, or a hub id without one, with None."""
    name, _, revision = base_model.partition("@")
    if not revision or base_model.startswith((".", "/", "~")) or Path(base_model).is_dir():
        return base_model, None
    return name, revision


DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
UnusedWeights = Literal["refuse", "ignore"]
Recompute = Literal["auto", "none", "all"] | Annotated[int, Field(ge=0, le=10**9)]
LayoutSetting = Literal["auto", "whole", "shared", "streamed", "stages"]
WorkerLayout = Literal["auto", "streamed", "stages"]  # where a scheduler places jobs, it also decides which GPUs hold a base together
LinkSetting = Literal["auto", "host"]
MemoryLimit = Literal["auto"] | Bytes
TrackerName = Literal["tensorboard", "wandb", "trackio"]


class RunSpec(BaseModel):
    """The file around several jobs: what they share."""

    model_config = _STRICT

    base_model: str
    output_dir: str = "out"
    dtype: DType = "auto"
    base_precision: BasePrecision | None = None  # of the frozen linears; None: as dtype
    layout: LayoutSetting = "auto"  # of the base: where its decoder layers lie
    links: LinkSetting = "auto"  # between GPUs; host: none reads another's memory
    unused_weights: UnusedWeights = "refuse"  # tensors of the base's files that its model does not take
    deterministic: bool = False  # each adapter's bytes as if trained alone (docs/explanation/numerics.md)
    token_budget: Literal["auto"] | Annotated[int, Field(ge=16, le=10**9)] = "auto"  # tokens per micro-batch
    recompute: Recompute = "auto"  # decoder layers computed again in backward
    memory_limit: MemoryLimit = "auto"  # of the device, that the run may use
    cpu_threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"  # that a run on a CPU computes with
    report_to: list[TrackerName] = []
    jobs: Annotated[list[JobSpec], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_names(self) -> RunSpec:
        seen: dict[str, str] = {}
        for job in self.jobs:  # case-folded: two names that differ in case are one directory on some file systems
            if job.name.casefold() in seen:
                raise ValueError(
                    f"two jobs are named {job.name!r}: names must differ in more than case, they are directories of output_dir"
                )
            seen[job.name.casefold()] = job.name
        return self
