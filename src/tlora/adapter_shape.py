"""The shape of one adapter: names and meaning of PEFT's `LoraConfig`. Part of a job's order (`job.py`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError, core_schema

Number = TypeVar("Number", int, float)

ROW_ALIGNMENT = 16  # a slot's rows start at multiples of it: aligned loads, and bits that do not depend on the jobs before
ALL_LINEAR = "all-linear"
_ALL_LINEAR_MISSPELT = ("all", "all_linear", "all-linears", "linear", "all-linear")  # some are other trainers' words for it


@dataclass(frozen=True)
class Words:
    """Annotates a field's type: the words in which messages describe the allowed values."""

    text: str


@dataclass(frozen=True, eq=False)
class OneOf:
    """Annotates a string field: a key of `table`, which may grow after the model is made. Errors are those of a Literal of the keys."""

    table: Mapping[str, object]

    def check(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.table:
            *names, last = map(repr, self.table)
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(names)} or {last}"})
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: object, handler: object) -> dict[str, Any]:
        return {"enum": list(self.table), "type": "string"}


_IN_NO_LIST = frozenset({"all", "all-linear", "all_linear"})
NamePattern = Annotated[str, Field(min_length=1, max_length=1000), Words("a regular expression of whole names")]
ParameterName = Annotated[str, Field(min_length=1, max_length=1000)]
Alpha = Annotated[float, Field(ge=1e-6, le=1e6)]  # 1e308 is no number in fp32, and no scale is meant to be 1e-300
Token = Annotated[int, Field(ge=0, lt=2**31)]
TokenList = Annotated[list[Token], Field(min_length=1, max_length=65536)]
Layer = Annotated[int, Field(ge=0, le=10**6)]

_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


ExpertJobs = bool | Literal["some"]
"""Whether jobs adapt experts: all of them, none, or some."""


def expert_jobs(adapting: Iterable[bool]) -> ExpertJobs:
    """Of jobs, by whether each adapts experts."""
    kinds = set(adapting)
    return "some" if len(kinds) > 1 else True in kinds


class ExpertSize(NamedTuple):
    """Of a parameter of experts: features of one expert as an adapter has them, how many there are, and to how many a token goes (0: not
    known). `exchanged`: A lies at the outputs of the product that the parameter is in, and B at its inputs.
    """

    in_features: int
    out_features: int
    experts: int
    per_token: int
    exchanged: bool = False

    @property
    def product(self) -> tuple[int, int]:
        """In and out features of that product."""
        return (self.out_features, self.in_features) if self.exchanged else (self.in_features, self.out_features)


class LoraShape(BaseModel):
    """Shape of one adapter. Names and meaning are those of PEFT's `LoraConfig`."""

    model_config = _STRICT

    r: Annotated[int, Field(ge=1, le=256)] = 16
    lora_alpha: Alpha = 32.0
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: Literal["all-linear"] | list[str] | NamePattern = ALL_LINEAR
    # of a mixture of experts, such as [mlp.experts.gate_up_proj, mlp.experts.down_proj]; with target_modules: [] these alone
    target_parameters: Annotated[
        Annotated[list[ParameterName], Field(min_length=1, max_length=1000)] | None, Words("a list of names or null")
    ] = None
    expert_rank: Literal["same", "divide"] = "same"  # of each expert: r, or r divided by the experts of a token
    exclude_modules: list[str] | NamePattern | None = None
    layers_to_transform: Layer | list[Layer] | None = None
    # the list of modules that the layers are in; None: any
    layers_pattern: Annotated[NamePattern | list[NamePattern] | None, Words("a name, a list of names or null")] = None
    use_rslora: bool = False
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=256)]] = {}
    alpha_pattern: dict[str, Alpha] = {}
    # rows of the input embedding that are trained whole; a mapping names that embedding
    trainable_token_indices: Annotated[
        TokenList | Annotated[dict[str, TokenList], Field(min_length=1, max_length=1)] | None,
        Words("a list of token ids, a mapping of the embedding's name to one or null"),
    ] = None

    @field_validator("target_modules", "exclude_modules", "layers_pattern")
    @classmethod
    def _check_patterns(cls, value: str | list[str] | None, info: ValidationInfo) -> str | list[str] | None:
        key = str(info.field_name)
        for pattern in [value] if isinstance(value, str) else (value or []) if key == "layers_pattern" else []:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{key}: {pattern!r} is no regular expression ({error}); write a list of names, or correct it") from None
        if key == "target_modules" and isinstance(value, list) and (listed := _IN_NO_LIST & {name.lower() for name in value}):
            raise ValueError(
                f"target_modules: {min(listed)!r} in a list is a module's name, and stands for every layer only without brackets; "
                f"write `target_modules: {ALL_LINEAR}`"
            )
        if key != "layers_pattern" and isinstance(value, str) and value != ALL_LINEAR and re.fullmatch(r"[\w-]+", value):
            meant = ALL_LINEAR if key == "target_modules" and value.lower() in _ALL_LINEAR_MISSPELT else f"[{value}]"
            raise ValueError(
                f"{key}: {value!r} is a regular expression that no layer's whole name matches (model.layers.0...); write `{key}: {meant}`"
                + (" ('all-linear' takes every layer)" if key == "target_modules" and meant != ALL_LINEAR else "")
            )
        return value

    @field_validator("trainable_token_indices")
    @classmethod
    def _check_tokens(cls, value: list[int] | dict[str, list[int]] | None) -> list[int] | dict[str, list[int]] | None:
        for tokens in value.values() if isinstance(value, dict) else [value or []]:
            if len(set(tokens)) < len(tokens):
                twice = next(token for token in tokens if tokens.count(token) > 1)
                raise ValueError(f"trainable_token_indices: token {twice} is listed twice; list each once")
        return value

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        if self.target_modules == [] and not self.target_parameters:
            raise ValueError(
                "target_modules: [] adapts no linear layer, and target_parameters is not set; name layers, "
                f"write `target_modules: {ALL_LINEAR}`, or set target_parameters"
            )
        if self.target_parameters and self.lora_dropout:
            raise ValueError(
                f"lora_dropout {self.lora_dropout:g} with target_parameters: PEFT's adapters of parameters have no dropout, and PEFT loads "
                "none with one; set lora_dropout: 0, or take target_parameters out"
            )
        if self.expert_rank == "divide" and not self.target_parameters:
            raise ValueError("expert_rank: divide is of experts, and target_parameters is not set; set it, or take expert_rank out")
        return self

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("layers_pattern says where layers are counted, and layers_to_transform is not set; set both, or neither")
        if self.layers_to_transform is not None and isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            raise ValueError(
                "layers_to_transform has no meaning with a target_modules that is a regular expression, which names layers itself; "
                "write the layers into it, or target_modules as a list"
            )
        return self

    @property
    def largest_rank(self) -> int:
        """Of all modules; at least 1."""
        return max(self.r, *self.rank_pattern.values(), 1)

    def rank_of(self, module: str, per_token: int = 1) -> int:
        """Rank of the adapter at `module` (its dotted name in the base): `rank_pattern` first, then `r`; of each expert of a parameter,
        of which a token goes to `per_token`, as `expert_rank` says.
        """
        return pattern_value(self.rank_pattern, module, self.r // per_token if self.expert_rank == "divide" else self.r)

    def alpha_of(self, module: str, per_token: int = 1) -> float:
        """Alpha there: `alpha_pattern` first, then `lora_alpha`, which a divided rank divides so that the scale stays the same."""
        divided = self.expert_rank == "divide" and per_token > 1 and not matching_keys(self.rank_pattern, module)
        by = (math.sqrt(per_token) if self.use_rslora else per_token) if divided else 1
        return pattern_value(self.alpha_pattern, module, self.lora_alpha / by)

    def scale_of(self, module: str, per_token: int = 1) -> float:
        """alpha/r, or alpha/sqrt(r) with `use_rslora`, with this module's own rank and alpha."""
        rank, alpha = self.rank_of(module, per_token), self.alpha_of(module, per_token)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


class LoraConfig(LoraShape):
    """The shape of an adapter, and where its weights begin."""

    model_config = _STRICT

    adapter_path: str | None = None  # an existing PEFT adapter to start from


def matching_keys(pattern: Iterable[str], module: str) -> list[str]:
    """Keys of a `rank_pattern` or `alpha_pattern` that mean `module`: its whole name or its end. The first of them counts, as in PEFT.

    They are literal names: PEFT reads them as regular expressions, which mean the same then.
    """
    return [key for key in pattern if module == key or module.endswith("." + key)]


def pattern_value(pattern: Mapping[str, Number], module: str, default: Number) -> Number:
    """The value of `pattern` for `module`."""
    return next((pattern[key] for key in matching_keys(pattern, module)), default)
