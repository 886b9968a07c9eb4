"""The HTTP messages between a client and `tlora serve`: requests, then answers, each declared once and imported by both.

No rows and no routes: `service/services.py` makes answers from rows of the store, `service/orders.py` expands sweeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema, core_schema

from tlora.adapter_shape import Alpha, Layer
from tlora.job import NAME_PATTERN, DataFields, JobFields, JobSpec, TemplateKwargs, check_kwargs

_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
Status = Literal["preparing", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
OPEN: tuple[Status, ...] = ("preparing", "queued", "running", "paused")
ENDED: tuple[Status, ...] = ("succeeded", "failed", "cancelled")
Purpose = Literal["fine-tune", "evals", "user_data"]
Scope = Literal["read", "submit", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
DEFAULT_TENANT = "default"
TENANT_HEADER = "tlora-tenant"  # of a request that acts on another tenant's jobs and files, for a key with the scope admin
MOST_SOURCES = 100
MISSED = "missed its deadline"
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


class OrderedData(DataFields):
    """Which uploaded files a job learns from, and how. The fields are those of a jobs file's `data`, with ids in place of paths."""

    model_config = _STRICT

    file: ObjectId | Files
    eval_file: ObjectId | Files | None = None
    eval_size: Annotated[float, Field(ge=0, le=1e9)] = 0
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
        """The ids of the files, without repeats."""
        return tuple(dict.fromkeys(part.file for part in (*self.files, *self.eval_files)))


class OrderSpec(JobFields):
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
    def _check_together(self) -> OrderSpec:
        data = self.data
        check_kwargs(data.chat_template_kwargs)
        files, eval_files = ([(one.file, one.weight) for one in listed] for listed in (data.files, data.eval_files))
        data.check_sources(files, eval_files)
        self.check_together(data, data.eval_file)
        return self


class SweepOrder(BaseModel):
    """Jobs for all combinations of the values in `sweep`, named after them. Accepted as a whole, or not at all."""

    model_config = _STRICT

    job: OrderSpec
    sweep: Annotated[dict[str, Annotated[list[Any], Field(min_length=1, max_length=1000)]], Field(min_length=1, max_length=20)]


class CloneOrder(BaseModel, frozen=True, extra="forbid"):
    """Fields of the order that the clone shall have otherwise; `data` is merged key by key."""

    set: Annotated[dict[str, Any], Field(max_length=100)] = {}


class KeyOrder(BaseModel, frozen=True, extra="forbid"):
    """A key for a tenant, which is made if there is none of that name."""

    tenant: Name = DEFAULT_TENANT
    name: Name
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=3)] = ["read", "submit"]


class BaseOrder(BaseModel, frozen=True, extra="forbid"):
    """A base model for orders to name. `path` is a directory of the server's machine or a hub id, as in a jobs file."""

    name: BaseName
    path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f]+$")]


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


class AsSent:
    """Annotates a field's type: documented as that type but not validated, since the server may be newer than its client."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        unchecked = core_schema.simple_ser_schema("any")
        return core_schema.no_info_wrap_validator_function(lambda value, _: value, handler(source), serialization=unchecked)


def _document_known_keys(schema: dict[str, Any]) -> None:
    schema.pop("additionalProperties", None)


class Answer(BaseModel):
    """Keys that are not known here are kept: the server may be newer. No documented answer has any."""

    model_config = ConfigDict(frozen=True, extra="allow", json_schema_extra=_document_known_keys)


class FileView(Answer):
    """An uploaded file, as OpenAI's API has it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    sha256: str


class FileList(Answer):
    object: Literal["list"] = "list"
    data: list[FileView]
    has_more: bool
    next_cursor: str | None = None
    first_id: str | None = None
    last_id: str | None = None


class StorageView(Answer):
    """What a tenant's data takes: its files, and what was made of them for jobs."""

    object: Literal["storage"] = "storage"
    files_bytes: int
    tokenized_bytes: int
    limit_bytes: int


class Deleted(Answer):
    id: str
    object: str
    deleted: bool = True


class JobView(Answer):
    """A job as it stands now. Times are Unix seconds."""

    id: str
    object: Literal["job"] = "job"
    name: str
    status: Annotated[Status, AsSent()]
    base_model: str
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    steps: int = 0
    total_steps: int | None = None  # known once its data has been read
    train_loss: float | None = None  # the mean over its last 10 logged steps; of jobs that are asked for, not of orders
    eval_loss: float | None = None  # of its last evaluation
    waiting_for: str | None = None  # why it does not train just now, in words; of one that is running, too
    queue_place: int | None = None  # in the order in which the policy will start jobs, 1 being the next; of one that is queued
    estimated_start: float | None = None  # if no other job comes; None where it is too far away to be foreseen
    reason: str | None = None  # why it failed
    warnings: list[str] = []
    deadline_missed: bool = False  # its `deadline_seconds` passed before it ended
    sweep: str | None = None
    cloned_from: str | None = None
    order: Annotated[OrderSpec, AsSent()]
    result: dict[str, Any] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def order_fields(self) -> dict[str, Any]:
        """The order's fields as in JSON; in a client as they were sent."""
        order: object = self.order
        return order.model_dump(mode="json") if isinstance(order, BaseModel) else cast("dict[str, Any]", order)


class JobList(Answer):
    object: Literal["list"] = "list"
    data: list[JobView]
    has_more: bool = False
    next_cursor: str | None = None


class TenantJobView(JobView):
    """A job, and the name of the tenant whose it is: for operators."""

    tenant: str


class TenantJobList(Answer):
    object: Literal["list"] = "list"
    data: list[TenantJobView]
    has_more: bool = False
    next_cursor: str | None = None


class Sweep(Answer):
    id: str
    object: Literal["sweep"] = "sweep"
    data: list[JobView]


class EventView(Answer):
    id: int
    object: Literal["event"] = "event"
    job: str | None
    created_at: float
    kind: str
    message: str
    data: dict[str, Any] | None = None


class EventList(Answer):
    object: Literal["list"] = "list"
    data: list[EventView]
    has_more: bool = False
    next_cursor: str | None = None


class MetricList(Answer):
    """Rows of a job's metrics from `offset` on; `next_offset` is where the next ones will begin."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    next_offset: int


class LogText(Answer):
    object: Literal["log"] = "log"
    lines: list[str]


class KeyView(Answer):
    id: str
    object: Literal["key"] = "key"
    tenant: str
    name: str
    scopes: Annotated[list[Scope], AsSent()]
    created_at: float
    revoked_at: float | None = None


class NewKeyView(KeyView):
    """With the key itself, which is shown this once."""

    key: str


class KeyList(Answer):
    object: Literal["list"] = "list"
    data: list[KeyView]


class BaseView(Answer):
    """A base model that orders may name."""

    name: str
    object: Literal["base"] = "base"
    status: Annotated[Literal["unknown", "ready", "failed"], AsSent()]
    problem: str | None = None
    bytes: int | None = None
    digest: Annotated[str | None, Field(description="Of the files, if it is a directory: as in the `base.json` of adapters.")] = None


class BaseList(Answer):
    object: Literal["list"] = "list"
    data: list[BaseView]


class LoginLink(Answer):
    """A path on this server that logs a browser in, once."""

    path: str
    expires_in: int


class ModelView(Answer):
    """A base, or the adapter of a job that has succeeded: then `id` is the job's and `owned_by` its base."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[ModelView]
