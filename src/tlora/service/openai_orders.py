"""OpenAI's creation of a fine-tuning job as an order, and a refusal of that order in the words of the creation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tlora.api import Metadata, ObjectId, OrderSpec
from tlora.service.orders import describe
from tlora.service.problems import RefusedError

LEARNING_RATE = 2e-4  # which learning_rate_multiplier multiplies: the default of an order
_MOST_NAME = 63
_FINE_TUNED = re.compile(r"(job-[0-9a-z]{1,56})(:checkpoint-[0-9]{1,12})?")
Auto = Literal["auto"]


class Hyperparameters(BaseModel):
    model_config = ConfigDict(extra="forbid")

    batch_size: Auto | Annotated[int, Field(ge=1, le=10**6)] | None = "auto"
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0, le=1e3)] | None = "auto"
    n_epochs: Auto | Annotated[int, Field(ge=1, le=10**6)] | None = "auto"
    beta: Auto | Annotated[float, Field(gt=0, le=1e6)] | None = "auto"  # of dpo

    def chosen(self) -> dict[str, Any]:
        """Those that are not left to the server."""
        return {key: value for key, value in self.model_dump().items() if value not in ("auto", None)}


class MethodDetail(BaseModel):
    model_config = ConfigDict(extra="forbid")

    hyperparameters: Hyperparameters | None = None


class Method(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["supervised", "dpo"]
    supervised: MethodDetail | None = None
    dpo: MethodDetail | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Method:
        other = "dpo" if self.type == "supervised" else "supervised"
        if getattr(self, other) is not None:
            raise ValueError(
                f"method.{other}: method.type is {self.type!r}, and what is set here would be ignored. Take one of the two out"
            )
        return self

    @property
    def detail(self) -> MethodDetail | None:
        return self.supervised if self.type == "supervised" else self.dpo


class Creation(BaseModel):
    """As `client.fine_tuning.jobs.create` sends it. `tlora` holds fields of an order, which win. Null is as absent."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(min_length=1, max_length=200)]
    training_file: ObjectId
    validation_file: ObjectId | None = None
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    suffix: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    metadata: Metadata | None = None
    integrations: Annotated[list[Any], Field(max_length=0)] | None = None
    tlora: Annotated[dict[str, Any], Field(max_length=100)] | None = None

    @field_validator("integrations", mode="before")
    @classmethod
    def _check_integrations(cls, value: object) -> object:
        if value:
            raise ValueError("integrations: not offered here. Leave it out, and read a job's metrics from its events or its result file")
        return value

    @model_validator(mode="after")
    def _check_hyperparameters(self) -> Creation:
        inner = self.method.detail.hyperparameters if self.method and self.method.detail else None
        if self.hyperparameters and inner and self.hyperparameters.chosen() and inner.chosen() not in ({}, self.hyperparameters.chosen()):
            raise ValueError("hyperparameters: are set here and in method, and differ. Set those of method alone")
        if "beta" in self.chosen and (self.method is None or self.method.type != "dpo"):
            raise ValueError("hyperparameters.beta: is one of method dpo. Take it out, or set method to dpo")
        return self

    @property
    def chosen(self) -> dict[str, Any]:
        """Hyperparameters that are set, wherever."""
        inner = self.method.detail.hyperparameters if self.method and self.method.detail else None
        outer = self.hyperparameters.chosen() if self.hyperparameters else {}
        return outer | (inner.chosen() if inner else {})

    @property
    def fine_tuned(self) -> str | None:
        """The job whose adapter is continued, if `model` has the form of a fine-tuned model or of a checkpoint."""
        found = _FINE_TUNED.fullmatch(self.model)
        return found[1] if found else None


def order_of(creation: Creation, base_model: str | None = None) -> OrderSpec:
    """`base_model`: of the fine-tuned model that `model` names, which is then where the job starts. Raises RefusedError."""
    names = {"batch_size": "batch_size", "n_epochs": "num_train_epochs", "beta": "beta"}
    chosen, own = creation.chosen, creation.tlora or {}
    fields: dict[str, Any] = {name: chosen[key] for key, name in names.items() if key in chosen}
    if "learning_rate_multiplier" in chosen:
        fields["learning_rate"] = LEARNING_RATE * chosen["learning_rate_multiplier"]
    if creation.method is not None and creation.method.type == "dpo":
        fields["objective"] = "dpo"
    if creation.seed is not None:
        fields["seed"] = creation.seed
    if creation.metadata:
        fields["metadata"] = creation.metadata
    fields |= {"base_model": creation.model} if base_model is None else {"base_model": base_model, "start_from": creation.model}
    data: dict[str, Any] = {"file": creation.training_file}
    if creation.validation_file is not None:
        data["eval_file"] = creation.validation_file
    fields["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", creation.suffix or "").lstrip("-._")[:_MOST_NAME] or "fine-tune"
    own_data = own.get("data", {})
    if not isinstance(own_data, dict):
        raise RefusedError(400, "refused", "tlora.data: must be a mapping of keys such as max_length", "tlora.data")
    try:
        return OrderSpec.model_validate(fields | own | {"data": data | own_data})
    except ValidationError as error:
        first = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise in_openais_words(RefusedError(400, "refused", describe(error), first or None), creation) from None


_FIELDS = {
    "base_model": "model",
    "start_from": "model",
    "data.file": "training_file",
    "data.eval_file": "validation_file",
    "num_train_epochs": "hyperparameters.n_epochs",
    "batch_size": "hyperparameters.batch_size",
    "learning_rate": "hyperparameters.learning_rate_multiplier",
    "beta": "hyperparameters.beta",
    "seed": "seed",
    "metadata": "metadata",
    "name": "suffix",
}


def in_openais_words(error: RefusedError, creation: Creation) -> RefusedError:
    """The refusal with the fields of the creation in place of those of an order: a key of `tlora` is named as one."""
    own = creation.tlora or {}
    message = "; ".join(_renamed(part, own) for part in error.message.split("; "))
    param = error.param and _renamed(error.param, own)
    if error.code == "not_found":
        named = {"training_file": creation.training_file, "validation_file": creation.validation_file}
        param = next((key for key, value in named.items() if value and repr(value) in error.message), param)
    return RefusedError(error.status, error.code, message, param)


def _renamed(text: str, own: Mapping[str, Any]) -> str:
    """`text` begins with the field it is about, as messages here do."""
    found = re.match(r"(data\.eval_file|data\.file|[a-z_0-9]+)(?=[ :.]|$)", text)
    if found is None:
        return text
    key, rest = found[1], text[found.end() :]
    data = own.get("data")
    outer, _, inner = key.partition(".")
    if key in own or (inner and isinstance(data, dict) and inner in data) or (outer == "data" and not inner):
        return f"tlora.{text}"
    if key in _FIELDS:
        return _FIELDS[key] + rest
    return f"tlora.{text}" if key in OrderSpec.model_fields else text


def hyperparameters_of(order: OrderSpec) -> dict[str, Any]:
    """What the job is trained with, as OpenAI's clients show it."""
    epochs = order.num_train_epochs
    found = {
        "n_epochs": int(epochs) if epochs.is_integer() else epochs,
        "batch_size": order.batch_size,
        "learning_rate_multiplier": float(f"{order.learning_rate / LEARNING_RATE:.12g}"),
    }
    return found | ({"beta": order.beta} if order.objective != "sft" else {})


def method_of(order: OrderSpec) -> dict[str, Any]:
    """With its hyperparameters. Objectives that OpenAI has not keep their own names."""
    kind = "supervised" if order.objective == "sft" else order.objective
    return {"type": kind, kind: {"hyperparameters": hyperparameters_of(order)}}


def metadata_filter(query: Mapping[str, str]) -> dict[str, str] | None:
    """`metadata[KEY]=VALUE` of a list's query; empty for `metadata=null`, None without either. Raises RefusedError for other keys."""
    found: dict[str, str] | None = None
    for key, value in query.items():
        if key in ("after", "limit"):
            continue
        inner = re.fullmatch(r"metadata\[(.{1,64})\]", key)
        if inner is not None:
            found = (found or {}) | {inner[1]: value}
        elif key == "metadata" and value in ("", "null"):
            found = found or {}
        else:
            shown = key.encode("ascii", "backslashreplace").decode()[:80]
            raise RefusedError(400, "unknown_parameter", f"{shown}: unknown parameter; there are after, limit and metadata[KEY]", shown)
    return found
