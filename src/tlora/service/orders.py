"""What a tenant orders: `OrderSpec`, a `JobSpec` without paths: files and adapters go by their ids.

Here are the order, its sweep, and the way from it to a `JobSpec`. What there is of files, bases and jobs is the store's to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from tlora.adapter_shape import Alpha, Layer
from tlora.errors import ConfigError
from tlora.job import NAME_PATTERN, DataFormat, JobSpec, LoraShape, Positive, TemplateKwargs, TrainConfig, TrainOn
from tlora.jobs_file import suggest
from tlora.jobs_file.located import Located, Problem, join_problems, plain
from tlora.jobs_file.sweep import expand

_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
MOST_SOURCES = 100
Name = Annotated[str, Field(min_length=1, max_length=63, pattern=f"^{NAME_PATTERN.pattern}$")]
StartId = Annotated[str, Field(min_length=1, max_length=90, pattern="^[a-z]+-[0-9a-z]{1,56}(:checkpoint-[0-9]{1,12})?$")]
ObjectId = Annotated[str, Field(min_length=1, max_length=64, pattern="^[a-z]+-[0-9a-z]{1,56}$")]
BaseName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@/-]*$")]
# The engine's own bounds allow longer lists and names than a tenant has use for.
ModuleName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.]+$")]
ModulePattern = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[!-~]+$")]

Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)]

_PATTERNS = Field(max_length=1000, json_schema_extra={"additionalProperties": False})


class OrderedFile(BaseModel):
    """One of several files of a job's data."""

    model_config = _STRICT

    file: ObjectId
    weight: Annotated[float, Field(gt=0, le=1e6)] | None = None  # share of the samples of an epoch against the other files'


def _files(value: object) -> object:
    """A list of files in which ids may stand without `file:`; anything else as it is."""
    return [{"file": item} if isinstance(item, str) else item for item in cast("list[object]", value)] if isinstance(value, list) else value


Files = Annotated[list[OrderedFile], Field(min_length=1, max_length=MOST_SOURCES), BeforeValidator(_files)]


class OrderedData(BaseModel):
    """Which uploaded files a job learns from, and how. The fields are those of a jobs file's `data`, with ids in place of paths."""

    model_config = _STRICT

    file: ObjectId | Files
    format: DataFormat = "auto"
    eval_file: ObjectId | Files | None = None
    eval_size: Annotated[float, Field(ge=0, le=1e9)] = 0
    eval_seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    max_length: Annotated[int, Field(ge=2, le=10**9)] = 1024
    train_on: TrainOn = "completions"
    packing: bool = False
    on_bad_rows: Literal["error", "drop"] = "error"
    # pydantic leaves names that do not fit out of its schema, which then allows them
    chat_template_kwargs: Annotated[TemplateKwargs, Field(max_length=20, json_schema_extra={"additionalProperties": False})] = {}

    @property
    def files(self) -> tuple[OrderedFile, ...]:
        return (OrderedFile(file=self.file),) if isinstance(self.file, str) else tuple(self.file)

    @property
    def eval_files(self) -> tuple[OrderedFile, ...]:
        if not self.eval_file:
            return ()
        return (OrderedFile(file=self.eval_file),) if isinstance(self.eval_file, str) else tuple(self.eval_file)

    @property
    def file_ids(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys(part.file for part in (*self.files, *self.eval_files)))


class OrderSpec(LoraShape, TrainConfig):
    """One tenant's order for one adapter. Fields are those of a job in a jobs file, but for `base_model`, `data` and `start_from`."""

    model_config = _STRICT

    name: Name
    base_model: BaseName  # a name of GET /v1/bases
    data: OrderedData
    target_modules: Literal["all-linear"] | Annotated[list[ModuleName], Field(min_length=1, max_length=1000)] | ModulePattern = "all-linear"
    exclude_modules: Annotated[list[ModuleName], Field(max_length=1000)] | ModulePattern | None = None
    layers_to_transform: Layer | Annotated[list[Layer], Field(max_length=1000)] | None = None
    layers_pattern: ModulePattern | Annotated[list[ModulePattern], Field(max_length=10)] | None = None
    rank_pattern: Annotated[dict[ModuleName, Annotated[int, Field(ge=1, le=256)]], _PATTERNS] = {}
    alpha_pattern: Annotated[dict[ModuleName, Alpha], _PATTERNS] = {}
    gpus: Positive = 1
    priority: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0  # of those that wait the highest goes first
    max_slowdown: Annotated[float, Field(ge=1, le=1e6)] = 1.5
    deadline_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None  # after its submission
    start_from: StartId | None = None  # a job that has succeeded, or JOB:checkpoint-STEP of one that has ended: its adapter is continued
    metadata: Metadata = {}  # the tenant's own keys: kept and shown, and of no effect

    @property
    def start_job(self) -> str | None:
        """The job that it starts from, without the checkpoint."""
        return self.start_from.partition(":")[0] if self.start_from else None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not NAME_PATTERN.fullmatch(name):  # the schema's pattern lets a line end through
            raise ValueError(f"name {name!r} must match {NAME_PATTERN.pattern}")
        return name

    @model_validator(mode="after")
    def _check_as_a_job(self) -> OrderSpec:
        """The rules between a job's fields, which stand in `JobSpec`."""
        try:
            job_spec(self, "job-0", {file: Path(file) for file in self.data.file_ids}, None)
        except ValidationError as error:
            raise ValueError(str(error.errors(include_url=False)[0]["msg"]).removeprefix("Value error, ")) from None
        return self


class SweepOrder(BaseModel):
    """Jobs for all combinations of the values in `sweep`, named after them. Accepted as a whole, or not at all."""

    model_config = _STRICT

    job: OrderSpec
    sweep: Annotated[dict[str, Annotated[list[Any], Field(min_length=1, max_length=1000)]], Field(min_length=1, max_length=20)]


_SWEPT = tuple(key for key in OrderSpec.model_fields if key not in ("name", "base_model", "metadata"))
_SWEPT_DATA = tuple(key for key in OrderedData.model_fields if key not in ("file", "eval_file"))


def expand_sweep(order: SweepOrder, most: int) -> list[OrderSpec]:
    """One order for each combination. Raises ConfigError for keys and values that cannot be swept, and for more than `most` jobs."""
    problems: list[Problem] = []
    count = 1
    for values in order.sweep.values():
        count *= len(values)
    if count > most:
        raise ConfigError(f"sweep: {count} combinations, more than {most}; sweep fewer values")
    fields = _located(order.job.model_dump(exclude_unset=True, mode="json") | {"sweep": order.sweep})
    found = expand(fields.fields, (*_SWEPT, *_SWEPT_DATA), _SWEPT_DATA, problems)
    if problems:
        raise ConfigError(join_problems([problem.text for problem in problems]))
    orders: list[OrderSpec] = []
    for one in found:
        values = cast("dict[str, Any]", {key: plain(place) for key, place in one.items() if key != "sweep_of"})
        if "path" in values["data"]:  # `sweep: {data: [file-1, file-2]}`
            values["data"]["file"] = values["data"].pop("path")
        try:
            orders.append(OrderSpec.model_validate(values))
        except ValidationError as error:
            raise ConfigError(f"sweep: {values['name']}: {describe(error)}") from None
    return orders


def describe(error: ValidationError) -> str:
    """What is wrong with an order, one problem after the other."""
    found: dict[str, None] = {}
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in item["loc"])
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            text = f"unknown key; {suggest(str(item['loc'][-1]), known_keys(OrderSpec, item['loc']))}"
        found[f"{where}: {text}" if where else text] = None
    return "; ".join(found)


def known_keys(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[str, ...]:
    """The keys that `model` has where pydantic's `loc` points: beside its last part."""
    found = model
    for part in loc[:-1]:
        field = found.model_fields.get(str(part))
        inner = _model_in(field.annotation) if field is not None else None
        found = inner or found
    return tuple(found.model_fields)


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model of an annotation, or within its union or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)


def job_spec(order: OrderSpec, job_id: str, files: Mapping[str, Path], adapter: Path | None) -> JobSpec:
    """The order as the engine takes it, with `job_id` as its name; `files` are paths by id, `adapter` is where it starts from."""
    own = {"base_model", "data", "start_from", "name", "gpus", "metadata"}
    fields = order.model_dump(exclude_unset=True, exclude=own)
    asked = order.data.model_dump(exclude_unset=True, exclude={"file", "eval_file"})
    data: dict[str, Any] = asked | {"path": _sources(order.data.files, files)}
    if order.data.eval_file:
        data["eval_path"] = _sources(order.data.eval_files, files)
    if adapter is not None:
        fields["adapter_path"] = str(adapter)
    return JobSpec.model_validate(fields | {"name": job_id, "gpus": order.gpus, "data": data})


def _sources(ordered: tuple[OrderedFile, ...], files: Mapping[str, Path]) -> str | list[dict[str, Any]]:
    if len(ordered) == 1 and ordered[0].weight is None:
        return str(files[ordered[0].file])
    return [{"path": str(files[part.file])} | ({"weight": part.weight} if part.weight is not None else {}) for part in ordered]


def _located(value: object) -> Located:
    """As the reader of jobs files has it, but without lines."""
    if isinstance(value, dict):
        return Located({str(key): _located(item) for key, item in cast("dict[Any, object]", value).items()}, 0, "body")
    if isinstance(value, list):
        return Located([_located(item) for item in cast("list[object]", value)], 0, "body")
    return Located(cast("Any", value), 0, "body")
