"""Which linears of a base an adapter is put at: by names and sizes alone, so that a process without torch can tell too.

Names are matched as PEFT does (`check_target_module_exists`), but among linears only, and what matches nothing is refused.
"""

from __future__ import annotations

import difflib
import importlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tlora.adapter_shape import ALL_LINEAR, ExpertSize, LoraShape, matching_keys
from tlora.errors import ModelError
from tlora.json_file import read_object

_SECONDS = 2.0  # for all names of a base; an ordinary pattern takes a few milliseconds for 100,000
# `re` cannot be interrupted, and a server resolves patterns of its tenants. transformers needs this one too. It has no type stubs.
_regex: Any = importlib.import_module("regex")


def find_matches(pattern: str, names: Iterable[str], key: str, whole: bool = True) -> dict[str, str | None]:
    """Of `names` those that `pattern` matches, whole or their beginning, each with its group `idx` if there is one.

    `key` is the setting that it stands in. Raises ModelError for a pattern that takes too long.
    """
    compiled, end = _regex.compile(pattern), time.monotonic() + _SECONDS
    match = compiled.fullmatch if whole else compiled.match
    matches: dict[str, str | None] = {}
    try:
        for name in names:
            if hit := match(name, timeout=max(1e-3, end - time.monotonic())):
                matches[name] = hit.groupdict().get("idx")
    except TimeoutError:
        raise ModelError(
            f"{key}: the pattern {pattern!r} takes more than {_SECONDS:g} s to match the names of this base's layers. "
            "Write one without repetitions inside repetitions, or a list of names"
        ) from None
    return matches


Shape = TypeVar("Shape", bound=LoraShape)
Sizes = Mapping[str, tuple[int, int]]


ExpertSizes = Mapping[str, ExpertSize]
Targets = Mapping[str, "tuple[int, int] | ExpertSize"]


def resolve(
    linears: Sizes, modules: Collection[str], experts: Sequence[str], lora: LoraShape, parameters: ExpertSizes
) -> dict[str, tuple[int, int] | ExpertSize]:
    """Module name -> (in, out features) of those of `linears` that `lora` adapts, then of those of the experts' `parameters`. `modules` are
    all names of the base, `experts` its mixture-of-experts blocks.

    Raises ModelError for a name, pattern or layer that matches nothing (naming those that exist), for linears of mixture-of-experts
    blocks that are named, and where nothing is left.
    """
    wanted = _parameters(parameters, modules, _beside_experts(linears, experts), lora)
    adapted = {} if lora.target_modules == [] else _linears(linears, modules, experts, lora)
    for key in (*lora.rank_pattern, *lora.alpha_pattern):
        if not any(_ends(name, [key]) for name in (*adapted, *wanted)):
            there = ", ".join(_last_parts((*adapted, *wanted)))
            raise ModelError(f"{key!r} in rank_pattern or alpha_pattern matches none of the adapted layers: {there}")
    return {**adapted, **wanted}


def _parameters(parameters: ExpertSizes, modules: Collection[str], linears: Collection[str], lora: LoraShape) -> dict[str, ExpertSize]:
    """As PEFT matches `target_parameters`: whole names or ends, in all layers."""
    listed = lora.target_parameters or []
    exist = ", ".join(sorted({".".join(name.rsplit(".", 2)[-2:]) for name in parameters}))
    for target in listed:
        if not any(_ends(name, [target]) for name in parameters):
            there = f"It has: {exist}" if parameters else "It has no experts whose parameters can be. Take target_parameters out"
            module, why = target.rpartition(".")[0], ""
            if module and any(_ends(name, [module]) for name in linears):
                why = f": {module} is a linear layer, which target_modules adapts"
            elif module and any(_ends(name, [module]) for name in modules):  # PEFT makes such of all-linear
                why = f": {module} is frozen here, as routers are"
            raise ModelError(f"target_parameters: {target!r} is no parameter of experts of this base that can be adapted{why}. {there}")
    found = {name: size for name, size in parameters.items() if _ends(name, listed)}
    for name, size in found.items() if lora.expert_rank == "divide" else ():
        if size.per_token < 1:
            raise ModelError(
                f"expert_rank: divide: this base's config does not say to how many experts of {name} a token goes. "
                "Write expert_rank: same, and the rank that you mean as r"
            )
        if not matching_keys(lora.rank_pattern, name) and lora.r % size.per_token:
            raise ModelError(
                f"expert_rank: divide: r {lora.r} is not divisible by the {size.per_token} experts to which a token goes in this base. "
                f"Set r to a multiple of {size.per_token}, or expert_rank: same"
            )
    return found


def _linears(linears: Sizes, modules: Collection[str], experts: Sequence[str], lora: LoraShape) -> dict[str, tuple[int, int]]:
    wanted = lora.target_modules
    if wanted == ALL_LINEAR:
        names = _beside_experts(linears, experts)
    elif isinstance(wanted, str):
        names = _matching(wanted, linears, modules)
    else:
        _refuse_unknown(wanted, linears, modules)
        names = [name for name in linears if _ends(name, wanted)]
    excluded = _excluded(lora, modules)
    names = [name for name in names if name not in excluded]
    names = _in_layers(names, lora)
    present = ", ".join(_last_parts(linears))
    block = next((block for block in experts for name in names if name.startswith(block + ".")), None)
    if block is not None:
        raise ModelError(
            f"{block} is a mixture of experts, whose layers are adapted by target_parameters alone. "
            "Name the attention's linears in target_modules instead: "
            f"{', '.join(_last_parts(_beside_experts(linears, experts)))}"
        )
    if not names:
        raise ModelError(f"target_modules, exclude_modules and layers_to_transform together leave no layer to adapt. There are: {present}")
    return {name: linears[name] for name in names}


def left_out(linears: Sizes, experts: Sequence[str], lora: LoraShape) -> list[str]:
    """What `all-linear` leaves as it is, in a line: experts, unless they are targets, and the other linears of their blocks."""
    if lora.target_modules != ALL_LINEAR or not experts:
        return []
    adapted, parts = ", ".join(_last_parts(_beside_experts(linears, experts))), " and ".join(_last_parts(experts))
    left = f"{parts} of all layers {'are left as they are' if ' and ' in parts else 'is left as it is'}"
    if lora.target_parameters:
        left = f"of {parts} of all layers the experts' {', '.join(_last_parts(lora.target_parameters))} alone are adapted"
    layers = max(Counter(block.rsplit(".", 1)[-1] for block in experts).values())
    return [f"all-linear adapts {adapted}: {layers} layers have a mixture of experts, and {left}"]


def saved_names(targets: Collection[str], modules: Iterable[str], lora: LoraShape) -> tuple[str, ...]:
    """The shortest literal names that mean exactly `targets` among `modules`, for a reader such as PEFT that has the base."""
    listed = lora.target_modules if isinstance(lora.target_modules, list) else _last_parts(targets)
    names = list(modules)
    if {name for name in names if _ends(name, listed)} == set(targets):
        return tuple(sorted(set(listed)))
    every, mine = (Counter(name.rsplit(".", 1)[-1] for name in of) for of in (names, targets))
    return tuple(sorted({end if every[end] == mine[end] else name for name in targets for end in (name.rsplit(".", 1)[-1],)}))


def read_shape(adapter: Path) -> LoraShape:
    """Of an adapter that PEFT or this program has written. Raises OSError, ValueError."""
    config = read_object(adapter / "adapter_config.json")
    keys = ("r", "target_modules", "target_parameters", "rank_pattern", "alpha_pattern", "trainable_token_indices")
    fields = {key: config[key] for key in keys if config.get(key) is not None}
    return LoraShape.model_validate(({"target_modules": []} if config.get("target_parameters") else {}) | fields)


SHAPE_KEYS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "trainable_token_indices")


def adopted_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of an `adapter_config.json`: what a job that continues the adapter has in place of its own `SHAPE_KEYS`."""
    return {key: config[key] for key in SHAPE_KEYS if config.get(key) is not None}


def shape_warnings(said: LoraShape, config: Mapping[str, Any], start: str | Path) -> list[str]:
    """Where a job says other values than the adapter has that it continues, which has this `config` and is called `start`."""
    adopted = adopted_values(config)
    differ = [key for key in adopted if key in said.model_fields_set and not _same(getattr(said, key), adopted[key])]
    return [f"{key} is {adopted[key]}, as in {start} (the job says {getattr(said, key)})" for key in differ]


def _same(said: object, adopted: object) -> bool:
    """The order of a pattern's keys counts."""
    return list(said.items()) == list(adopted.items()) if isinstance(said, dict) and isinstance(adopted, dict) else said == adopted


def token_rows(lora: LoraShape, embedding: str, rows: int) -> tuple[int, ...]:
    """Ids of the tokens whose rows `lora` trains, of the input embedding of that name, which has so many (0: it is not known).

    Raises ModelError for another module, and for an id that it lacks.
    """
    given = lora.trainable_token_indices
    if isinstance(given, dict):
        other = next((name for name in given if embedding and not _ends(embedding, [name])), None)
        if other is not None:
            raise ModelError(
                f"trainable_token_indices: {other!r} is not the input embedding, which alone has trained rows. Write {embedding}, or a list"
            )
        given = next(iter(given.values()))
    tokens = tuple(given or ())
    if tokens and rows and max(tokens) >= rows:
        raise ModelError(
            f"trainable_token_indices: token {max(tokens)} has no row in this base's embedding of {rows}. "
            "Enlarge it (resize_token_embeddings, save_pretrained), or name ids below that"
        )
    return tokens


def trained_parameters(targets: Targets, lora: LoraShape, embedding_width: int) -> int:
    """Of an adapter at `targets`, and of its rows of an embedding."""
    adapted = sum(rows_of(lora, name, size) * (size[0] + size[1]) for name, size in targets.items())
    return adapted + len(token_rows(lora, "", 0)) * embedding_width


def rows_of(lora: LoraShape, name: str, size: tuple[int, int] | ExpertSize) -> int:
    """Of A at a target: its rank, of experts each one's."""
    return size.experts * lora.rank_of(name, max(1, size.per_token)) if isinstance(size, ExpertSize) else lora.rank_of(name)


def _ends(name: str, ends: Iterable[str]) -> bool:
    return any(name == end or name.endswith("." + end) for end in ends)


def _beside_experts(linears: Iterable[str], experts: Iterable[str]) -> list[str]:
    """Linears outside of the experts' blocks, and of what stands in their place in dense layers: PEFT drops the names of those where it
    loads an adapter of such a base, as names of experts in an older layout. Where blocks are named as attention is (Nemotron-3-H calls
    each of its layers' parts `mixer`), those outside of the blocks alone.
    """
    blocks = {block.rsplit(".", 1)[-1] for block in experts}
    beside = [name for name in linears if blocks.isdisjoint(name.split("."))]
    return beside or [name for name in linears if not name.startswith(tuple(f"{block}." for block in experts))]


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in names})


def _refuse_unknown(wanted: Sequence[str], linears: Sizes, modules: Collection[str]) -> None:
    exist = _last_parts(linears)
    for target in wanted:
        if any(_ends(name, [target]) for name in linears):
            continue
        if other := next((name for name in modules if _ends(name, [target])), None):
            raise ModelError(f"target module {target!r} {_why_none(other)}. Choose from: {', '.join(exist)}")
        close = difflib.get_close_matches(target, exist, 1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ModelError(f"target module {target!r} is not in this base model. {hint}It has: {', '.join(exist)} (or write all-linear)")


def in_indexer(name: str) -> bool:
    """Whether the module or weight of that name is in an indexer (of sparse attention). Its linears get no gradients, and its weights stay
    plain in any base: its own code reads them.
    """
    return "indexer" in name.split(".")


def outside_indexers(lora: Shape, modules: Collection[str]) -> Shape:
    """`lora` without what it says of linears in indexers, of an adapter that has A and B at `modules` and adapts others too."""
    inside = {name for name in modules if in_indexer(name)}
    of_experts = tuple(name.rpartition(".")[0] for name in lora.target_parameters or ())
    others = sorted(name for name in modules if name not in inside and not name.partition(".base_layer")[0].endswith(of_experts))
    if not inside or not others or lora.target_modules == ALL_LINEAR:
        return lora
    wanted = lora.target_modules
    targets = others if isinstance(wanted, str) else [name for name in wanted if any(_ends(other, [name]) for other in others)]
    patterns = {
        key: {name: value for name, value in pattern.items() if any(_ends(other, [name]) for other in others)}
        for key, pattern in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern))
    }
    return lora.model_copy(update={"target_modules": targets, **patterns})


def _why_none(module: str) -> str:
    """Why no adapter is put at one that is no linear to adapt."""
    if in_indexer(module):
        return "is in an indexer, which chooses tokens without gradients, and cannot be adapted"
    return "is no inner linear layer, and cannot be adapted"


def _matching(pattern: str, linears: Sizes, modules: Collection[str]) -> list[str]:
    matched = find_matches(pattern, modules, "target_modules")
    exist = _last_parts(linears)
    other = next((name for name in matched if name not in linears), None)
    if other is not None:
        raise ModelError(
            f"target_modules: the pattern {pattern!r} matches {other}, which {_why_none(other)}. "
            rf"Let it match layers that can be alone: .*\.({'|'.join(exist)})"
        )
    if not matched:
        raise ModelError(
            f"target_modules: the pattern {pattern!r} matches no layer of this base: "
            f"it must match whole names, such as {next(iter(linears))}"
        )
    return [name for name in linears if name in matched]


def _excluded(lora: LoraShape, modules: Collection[str]) -> Collection[str]:
    exclude = lora.exclude_modules
    if not exclude:
        return ()
    if isinstance(exclude, str):
        excluded = set(find_matches(exclude, modules, "exclude_modules"))
        missing = [] if excluded else [exclude]
    else:
        excluded = {name for name in modules if _ends(name, exclude)}
        missing = [end for end in exclude if not any(_ends(name, [end]) for name in excluded)]
    if missing:
        raise ModelError(
            f"exclude_modules: {missing[0]!r} matches no module of this base model. A list holds names or their ends, such as "
            "[down_proj]; a pattern matches whole names. Correct it, or take it out"
        )
    return excluded


def _in_layers(names: list[str], lora: LoraShape) -> list[str]:
    """Those in `layers_to_transform`. As in PEFT, a layer's number is the first after a list of modules, and a name that is given whole
    counts in any layer.
    """
    wanted = lora.layers_to_transform
    if wanted is None or wanted == []:
        return names
    layers = {wanted} if isinstance(wanted, int) else set(wanted)
    listed = lora.layers_pattern or []
    patterns = [rf"(?:^|.*?\.){one}\.(?P<idx>\d+)\." for one in ([listed] if isinstance(listed, str) else listed)]
    numbers: dict[str, int] = {}
    for pattern in patterns or [r".*?\.[^.]*\.(?P<idx>\d+)\."]:
        for name, number in find_matches(pattern, names, "layers_pattern", whole=False).items():
            numbers.setdefault(name, int(number or -1))
    whole = lora.target_modules if isinstance(lora.target_modules, list) else []
    kept = [name for name in names if name in whole or numbers.get(name) in layers]
    absent = sorted(layers - set(numbers.values()))
    if absent:
        there = f"from {min(numbers.values())} to {max(numbers.values())}" if numbers else "in no list of layers"
        raise ModelError(f"layers_to_transform: no adapted module is in layer {absent[0]}: they are {there}. Name layers that exist")
    return kept
