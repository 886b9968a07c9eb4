"""Answers from one adapter over its base, with plain torch and transformers' `generate`, for a first try after training.

Not for serving: adapters run as forward hooks on the base's own linears. Nothing is merged, so a head that is tied to the
embedding keeps its weights, and the base can be asked without the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from tlora.adapters.layout import AdapterLayout, make_layout
from tlora.adapters.peft import load_params, read_config
from tlora.base_digest import TrainedOver, trained_over
from tlora.data.base_download import fetch_base
from tlora.data.encode import ChatSettings, Encoder, open_encoder
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError, ModelError
from tlora.job import DataConfig, JobSpec, UnusedWeights
from tlora.json_file import is_utf8, read_object
from tlora.planning.plan import pick_device
from tlora.planning.start import adopt_adapter_config, fit_adapter
from tlora.planning.threads import compute_with, default_threads
from tlora.shape.token_cost import CPU_BUDGET_CAP
from tlora.store.serving import find_prompting
from tlora.supermodel.base_config import learned_positions, max_positions
from tlora.supermodel.base_name import same_base
from tlora.supermodel.cpu_dtype import settle_dtype
from tlora.supermodel.experts import Experts
from tlora.supermodel.inject import find_linears, resolve_targets
from tlora.supermodel.load import find_directory, load_config, load_weights
from tlora.supermodel.move import move_model
from tlora.supermodel.new_tokens import row_shapes, rows_in, with_rows
from tlora.supermodel.weight_files import check_unused

OnText = Callable[[str], None]
_TEMPERATURES = 1e-30, 1e5  # logits divided by less overflow in 32 bits; by more, all tokens are equally likely
_MOST_SEED = 2**64 - 1  # that torch takes
_REMEDY = "Give --base-model DIRECTORY, with the files of the base that it was trained over"


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. Temperature 0 takes the likeliest token each time and needs no seed. Raises ConfigError."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        lowest, highest = _TEMPERATURES
        if self.temperature and not lowest <= self.temperature <= highest:
            raise ConfigError(f"temperature {self.temperature}: must be 0 (greedy decoding), or from {lowest} to {highest}. 0.7 is usual")
        if not 0 <= self.seed <= _MOST_SEED:
            raise ConfigError(f"seed {self.seed}: must be from 0 to {_MOST_SEED}. Choose such a number")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens {self.max_new_tokens}: must be at least 1. 128 is usual")


@dataclass(frozen=True)
class AdaptedModel:
    """A base, its tokenizer and one adapter that fits. `raw`: the adapter was trained on plain text, without a chat template.
    `notes`: which template is used, and what else the user should know.
    """

    model: Any
    encoder: Encoder
    layout: AdapterLayout
    params: Tensor
    experts: Experts
    raw: bool
    notes: tuple[str, ...] = ()


def generate(
    adapter_dir: str | Path,
    prompts: Sequence[str],
    *,
    base_model: str | None = None,
    sampling: Sampling | None = None,
    unused_weights: UnusedWeights = "refuse",
) -> list[str]:
    """The adapter's answer to each prompt. Raises ModelError when the adapter is broken or does not fit its base."""
    model = open_adapter(Path(adapter_dir), base_model=base_model, unused_weights=unused_weights)
    return answer(model, prompts, sampling or Sampling())


def open_adapter(
    directory: Path,
    *,
    base_model: str | None = None,
    device: str | None = None,
    unused_weights: UnusedWeights = "refuse",
    watcher: Watcher | None = None,
) -> AdaptedModel:
    """Load the adapter in `directory` and its base: `base_model`, else the one that the adapter names. `unused_weights` as in a jobs file,
    or as the run says that trained the adapter over this base. `watcher` sees how far a download is.

    Raises ModelError where the base that the adapter leads to is not the one in its `base.json`, and naming the first tensor that is
    missing, too many or of another shape.
    """
    named, over = _base_of(read_config(directory)), trained_over(directory)
    if over is not None and over.served:  # no path and no hub id: what has that name here is another model
        if not base_model:
            raise ModelError(f"{directory}: the adapter was trained over {over}, a name of that server alone. {_REMEDY}")
        named = None
    base = base_model or _find_base(directory, named)
    if not base:
        raise ModelError(f"{directory}: the adapter names no base model. Add --base-model")
    notes = [] if not named or same_base(named, base) else [f"the adapter names {named} as its base, and is used over {base}"]
    place = pick_device(device)
    try:
        config = load_config(base)
    except ModelError as error:
        raise (error if base_model else ModelError(f"{error}. The adapter names this base: --base-model says where it is")) from None
    fetch_base(base, (watcher or Watcher()).stages())
    notes += _compare_bases(directory, over, base, given=bool(base_model)) if over is not None else []
    prompting = find_prompting(directory, base)
    dtype, line = settle_dtype(base, "auto", place)
    notes += [line] if line else []
    trained_so = any(run.get("unused_weights") == "ignore" and run.get("base_model") == base for run in _runs_of(directory))
    notes += check_unused(base, config, "ignore" if trained_so else unused_weights, "give --unused-weights ignore")
    model: Any = move_model(load_weights(base, dtype), place).eval()
    try:
        shape, _ = adopt_adapter_config(JobSpec(name="adapter", data=DataConfig(path="-")), directory)
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{directory}: its adapter_config.json is no LoRA of this program's range: {error}") from None
    experts = Experts(model)
    layout = fit_adapter(partial(_layout, model, experts), shape, directory, then="and use that alone")
    precision = torch.float64 if model.dtype == torch.float64 else torch.float32
    params = load_params(directory, layout, precision).to(place)
    vocabulary, chats = model.get_input_embeddings().num_embeddings, ChatSettings(prompting.kwargs)
    encoder = open_encoder(prompting.tokenizer, prompting.template, False, vocabulary, chats)
    return AdaptedModel(model, encoder, layout, params, experts, prompting.raw, (*notes, f"prompt: {prompting.said}"))


def _layout(model: Any, experts: Experts, shape: JobSpec) -> AdapterLayout:
    return with_rows(make_layout(shape, resolve_targets(model, find_linears(model), experts, shape)), row_shapes(model, shape))


def _compare_bases(directory: Path, over: TrainedOver, base: str, *, given: bool) -> list[str]:
    """What is to be said where the files of `base` are not those of the training. Raises ModelError unless the user has `given` it."""
    differs = over.differs(find_directory(base))
    if differs and not given:
        found = "its config, sizes, headers or sampled blocks differ"
        raise ModelError(f"{directory}: the adapter was trained over {over}, and {base} is another model ({found}). {_REMEDY}")
    if differs:
        return [f"the adapter was trained over {over}, and {base} has other files: another model, or this one in another format"]
    return (
        [f"the adapter was trained over {over}; whether {base} is the same model is not known"] if over.served and differs is None else []
    )


def _find_base(directory: Path, named: str | None) -> str | None:
    """The path of the base that an adapter names: where its run had it, if that is still the same; else the name itself."""
    for run in _runs_of(directory):
        found = run.get("base_model")
        if named and isinstance(found, str) and Path(found).is_dir() and same_base(named, found):
            return found
    return named


def _runs_of(directory: Path) -> Iterator[dict[str, Any]]:
    """The run files of runs that may have trained the adapter in `directory`."""
    for path in (directory.parent / "run.json", directory.parent.parent / "run.json"):
        with suppress(OSError, ValueError):
            yield read_object(path)


def _base_of(config: dict[str, Any]) -> str | None:
    """The base that an adapter's config names, with the revision of the hub that it was trained over."""
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return f"{name}@{revision}" if name and revision and not Path(name).exists() else name


def check_prompts(prompts: Sequence[str]) -> None:
    """Raises ConfigError for bytes that are not UTF-8, which a command line hands on as lone surrogates."""
    for prompt in prompts:
        if not is_utf8(prompt):
            raise ConfigError(f"prompt {prompt!a}: has bytes that are not UTF-8. Write it in UTF-8")


def answer(
    model: AdaptedModel,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    adapted: bool = True,
    on_text: OnText | None = None,
    on_note: OnText | None = None,
) -> list[str]:
    """An answer to each prompt, in one batch; `adapted=False` asks the base alone. `on_text` gets a single answer as it grows, `on_note`
    a line where the longest has gone beyond the positions that the base is made for. Raises ConfigError for a prompt that is no text, or
    fills all positions of the base that has a table of them.
    """
    check_prompts(prompts)
    assert on_text is None or len(prompts) == 1, f"{len(prompts)} answers cannot be streamed into one another"
    tokenizer: Any = model.encoder.tokenizer
    ids = [_prompt_ids(model, prompt) for prompt in prompts]
    longest, pad, most = max(map(len, ids)), _pad_id(tokenizer), learned_positions(model.model)
    if most and longest >= most:
        raise ConfigError(f"prompt of {longest} tokens: the base has {most} learned positions, one at least for the answer. Shorten it")
    device = model.params.device
    input_ids = torch.tensor([[pad] * (longest - len(row)) + row for row in ids], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=device)
    stops, stop_text = _stops(model)
    stream = _Stream(tokenizer, on_text, stop_text) if on_text else None
    config = GenerationConfig(
        max_new_tokens=min(sampling.max_new_tokens, most - longest) if most else sampling.max_new_tokens,
        do_sample=sampling.temperature > 0,
        temperature=sampling.temperature if sampling.temperature > 0 else None,
        eos_token_id=stops or None,
        pad_token_id=pad,
        stop_strings=[stop_text] if stop_text else None,
    )
    with ExitStack() as stack, torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(sampling.seed)
        if device.type == "cpu":
            linears = [(shape.in_features, shape.out_features) for shape in model.layout.linears]
            stack.enter_context(compute_with(min(default_threads(linears, CPU_BUDGET_CAP), torch.get_num_threads())))
        if adapted:
            _attach(model, stack)
            stack.enter_context(model.experts.adapted(model.layout, model.params))
        out: Tensor = model.model.generate(input_ids, attention_mask=mask, generation_config=config, tokenizer=tokenizer, streamer=stream)
    if on_note and (line := _beyond_positions(max_positions(model.model), longest, out.shape[1])):
        on_note(line)
    return [_cut(tokenizer.decode(row, skip_special_tokens=True), stop_text) for row in out[:, longest:]]


def _beyond_positions(made_for: int | None, prompt: int, tokens: int) -> str:
    """What to say of `tokens`, those of the `prompt` and its answer; empty where the base is made for so many."""
    if made_for is None or tokens <= made_for:
        return ""
    remedy = "Shorten the prompt" if prompt >= made_for else f"Give --max-new-tokens {made_for - prompt}"
    rule = f"the base is made for {made_for:,} positions (max_position_embeddings)"
    return f"prompt and answer have {tokens:,} tokens, and {rule}: what it writes beyond them is not to be relied on. {remedy}"


def _attach(model: AdaptedModel, stack: ExitStack) -> None:
    """One hook per adapted linear: y + scale · (x·Aᵀ)·Bᵀ, in the adapter's precision as PEFT computes it. Trained rows take the place of
    the embedding's, and so of a head's that is tied to it.
    """
    for shape, a_rK, b_rN in model.layout.views(model.params):
        if shape.tokens:
            weight = model.model.get_input_embeddings().weight
            stack.enter_context(rows_in(weight, torch.tensor(shape.tokens, device=weight.device), a_rK))
        if shape.tokens or shape.module in model.experts.sizes:  # these by `Experts.adapted`
            continue

        def add(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor, a: Tensor = a_rK, b: Tensor = b_rN, scale: float = shape.scale):
            return (out + (inputs[0].to(a.dtype) @ a.t()) @ b * scale).to(out.dtype)

        stack.callback(model.model.get_submodule(shape.module).register_forward_hook(add).remove)


def _prompt_ids(model: AdaptedModel, prompt: str) -> list[int]:
    """The prompt as the samples began in training: through the same template, with the same single BOS."""
    encoder, tokenizer = model.encoder, model.encoder.tokenizer
    if model.raw:
        ids = [int(token) for token in tokenizer(prompt, add_special_tokens=False)["input_ids"]]  # type: ignore[union-attr]
        return [*encoder.prefix_ids, *ids] or [_pad_id(tokenizer)]
    kwargs: dict[str, Any] = {**encoder.template.kwargs, "chat_template": encoder.template.source, "add_generation_prompt": True}
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, **kwargs)
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]  # type: ignore[arg-type, union-attr]


def _stops(model: AdaptedModel) -> tuple[list[int], str]:
    """Tokens that end an answer, and a text that does if the template ends its turns with more than one token."""
    tokenizer: Any = model.encoder.tokenizer
    configured = model.model.generation_config.eos_token_id
    stops = configured if isinstance(configured, list) else [configured]
    found = {token for token in (*stops, tokenizer.eos_token_id) if token is not None}
    end = "" if model.raw else model.encoder.template.end_of_turn
    ids = tokenizer(end, add_special_tokens=False)["input_ids"] if end else []
    if len(ids) == 1:
        return sorted({*found, ids[0]}), ""
    return sorted(found), end


def _pad_id(tokenizer: Any) -> int:
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)


def _cut(text: str, stop_text: str) -> str:
    return text.partition(stop_text)[0] if stop_text else text


class _Stream:
    """What `generate` calls with each new token; hands on text once no later token can change it."""

    def __init__(self, tokenizer: Any, on_text: OnText, stop_text: str) -> None:
        self._tokenizer, self._on_text, self._stop_text = tokenizer, on_text, stop_text
        self._ids: list[int] = []
        self._shown, self._prompt_seen = 0, False

    def put(self, value: Tensor) -> None:
        if not self._prompt_seen:  # the first call brings the prompt
            self._prompt_seen = True
            return
        self._ids += value.flatten().tolist()
        self._show(ended=False)

    def end(self) -> None:
        self._show(ended=True)

    def _show(self, ended: bool) -> None:
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        whole = _cut(text, self._stop_text)
        if not ended and whole == text:  # half a character or half a stop text may stand at the end
            whole = text.rstrip("\ufffd")[: len(text) - max(len(self._stop_text) - 1, 0)]
        if len(whole) > self._shown:
            self._on_text(whole[self._shown :])
            self._shown = len(whole)
