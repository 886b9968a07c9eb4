"""Loads a frozen base through transformers, finds its decoder and head, and proves at load that packing is right for it."""

from __future__ import annotations

import warnings
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import cached_file

from tlora.data.base_files import located, refuse_mistyped, snapshot
from tlora.errors import ModelError, first_line
from tlora.job import BasePrecision, split_revision
from tlora.kernels.head import Head
from tlora.kernels.library_attention import SampleLayout
from tlora.sharing.layer_stream import LayerStream
from tlora.supermodel import attention, attention_probe
from tlora.supermodel.assembly import OutlinedExperts, hold_outlined, load_packed
from tlora.supermodel.base_config import one_line, package_missing, refuse_strange_config, unreadable
from tlora.supermodel.drawn_weights import why_not_packed_drawn
from tlora.supermodel.failed_proof import (
    UnpackedError,
    relative_difference,
    why_neither,
    why_not_finite,
    why_not_packed,
    why_of_other_tokens,
)
from tlora.supermodel.frozen_experts import stand_in
from tlora.supermodel.handed_keywords import hand_on_keywords
from tlora.supermodel.head_input import as_seen, find_head, input_of_head, look_at_head
from tlora.supermodel.held_experts import HeldExperts
from tlora.supermodel.held_linear import HeldLinear, check_precision, hold
from tlora.supermodel.indexers import at_their_limit, choose_all
from tlora.supermodel.inject import find_linears
from tlora.supermodel.move import move_model
from tlora.supermodel.one_by_one import OF_FAMILIES, prove_one_by_one, why_not_together
from tlora.supermodel.packed_format import check_unpacked, format_of, without_packing
from tlora.supermodel.packed_samples import change_by_place, depends_on_place, neighbours_reach
from tlora.supermodel.query_scales import count_in_samples, shown_in_short_samples
from tlora.supermodel.recurrent_layers import all_cut, cut_at_samples
from tlora.supermodel.stage import Stage
from tlora.supermodel.text_model import auto_class, decoder_of_text, has_other_modalities, leave_out_other_modalities
from tlora.supermodel.transposed_linears import stand_up
from tlora.supermodel.weight_files import check_weights, refuse_incomplete

_LENGTHS = (19, 5, 19)  # of the samples of the proof
_COMPARE = "Compare it with the original's"
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}


@dataclass(frozen=True)
class Base:
    """A frozen causal language model: the whole, the decoder that ends at the last norm, and the head.

    `layers`: what brings the weights of the decoder's layers, where several ranks share them (`shared_base.py`). `stage`: which of them
    are here, where other processes have the rest (`stage.py`), and `outlined` the whole of it on the meta device, by which all of them
    decide alike. `recurrent`: names of layers that carry something along a sample. `why_one_by_one`: why no two samples share a pass;
    "": they do. `whole_model`: whether there is more before the decoder, or between it and the head, so that
    a pass is the model's own, as far as its head.
    """

    model: Any
    decoder: Any
    head: Head
    name: str
    layers: LayerStream | None = None
    stage: Stage | None = None
    outlined: Base | None = None
    recurrent: tuple[str, ...] = ()
    why_one_by_one: str = ""
    whole_model: bool = False

    @property
    def vocab_size(self) -> int:
        return self.head.weight_VH.shape[0]

    def hidden(self, **inputs: Any) -> Tensor:
        """What the head gets, [T, H], of a pass over `inputs` of one row."""
        if self.whole_model:
            return input_of_head(self.model, **inputs)[0]
        return self.decoder(**inputs).last_hidden_state[0]

    @property
    def num_bytes(self) -> int:
        """Of all weights, also of those that are on no device yet."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def num_parameters(self) -> int:
        """Numbers that the weights stand for, counted alike for plain and packed forms."""
        held = (m for m in self.model.modules() if isinstance(m, HeldLinear | HeldExperts))
        more = sum(m.form.shape[0] * m.form.shape[1] - sum(p.numel() for name, p in m.named_parameters() if name != "bias") for m in held)
        return sum(p.numel() for p in self.model.parameters()) + more


def check_path(base_model: str) -> None:
    """Raise ModelError early for a local path that holds no model; what the hub may have is left to transformers."""
    name, _ = split_revision(base_model)
    path = Path(name)
    if path.exists() and not (path / "config.json").is_file():
        wrong = "is a file" if path.is_file() else "has no config.json"
        raise ModelError(f"base_model {base_model}: {wrong}. Give a directory as save_pretrained makes it, or a hub id")
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(f"base_model {base_model}: no such directory. Give a directory with config.json, or a hub id such as org/name")
    refuse_mistyped(base_model)


def find_directory(base_model: str) -> Path:
    """The directory with the base's config.json: for a hub id, the snapshot of its revision in the hub's cache. Raises ModelError."""
    check_path(base_model)
    if (there := snapshot(base_model)) is not None:
        return there
    name, revision = split_revision(base_model)
    try:
        config_file = cached_file(name, "config.json", revision=revision)
    except Exception as error:  # a library's border, as below
        raise unreadable(base_model, error) from None
    assert config_file is not None, f"{base_model}: cached_file found no config.json and did not say so"
    return Path(config_file).parent


def pin_revision(base_model: str) -> str:
    """A hub id with the commit that its branch or tag names today, `org/name@<commit>`; a directory as it is. Raises ModelError."""
    if Path(base_model).exists():
        return base_model
    directory = find_directory(base_model)
    is_snapshot = directory.parent.name == "snapshots"
    return f"{split_revision(base_model)[0]}@{directory.name}" if is_snapshot else base_model


def load_config(base_model: str) -> Any:
    """The base's transformers config. Raises ModelError."""
    check_path(base_model)
    name, revision = located(base_model)
    if Path(name).is_dir():
        refuse_strange_config(Path(name) / "config.json", base_model)
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # a library's border: what it raises depends on family and version
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"base_model {base_model}: it brings Python code of its own (auto_map in config.json), which is never run here. "
                "Use a version of it for a model class of transformers (such versions often end in -hf), or another base"
            ) from None
        raise unreadable(base_model, error) from None
    if auto_class(config) is None:
        raise ModelError(f"base_model {base_model}: {type(config).__name__} is no causal language model. Choose one with a causal head")
    _refuse_config(config, base_model)
    return config


def _refuse_config(config: Any, base_model: str) -> None:
    """Raise ModelError for weights in a form that is not read, and for code from the hub."""
    format_of(config, base_model)
    kernel = str(config._attn_implementation or "")
    if "/" in kernel:
        raise ModelError(
            f"base_model {base_model}: its config.json asks for attention code from the hub ({kernel}), which is never run here. "
            "Remove attn_implementation from its config.json"
        )


def load_base(
    base_model: str, dtype: str = "auto", device: torch.device | str = "cpu", base_precision: BasePrecision | None = None
) -> Base:
    """Load the weights of `base_model` (a directory or hub id) onto `device`, frozen. Raises ModelError, ConfigError."""
    place, config = torch.device(device), load_config(base_model)
    form = format_of(config, base_model)
    check_unpacked(form, base_precision, base_model)
    model = load_weights(base_model, dtype, place)
    if base_precision is not None and form is None:
        check_precision(base_precision, place, model.dtype)
        hold(model, list(find_linears(model)), place, base_precision, pick_dtype(config, "auto", base_model))
    return make_any_base(move_model(model, place), base_model)


def load_weights(base_model: str, dtype: str = "auto", device: torch.device | None = None) -> Any:
    """The transformers model, whole: a missing tensor would be drawn at random. Packed weights are on `device`. Raises ModelError."""
    config = load_config(base_model)
    computes = pick_dtype(config, dtype, base_model)
    check_weights(base_model, config)
    if (form := format_of(config, base_model)) is not None:
        return load_packed(base_model, config, computes, form, device or torch.device("cpu"))
    name, revision = located(base_model, weights=True)
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        loaded: Any = auto_class(config).from_pretrained(
            name, revision=revision, dtype=wanted, output_loading_info=True, trust_remote_code=False
        )
        model, loading_info = loaded
    except Exception as error:  # a library's border: what it raises depends on family and version
        raise ModelError(f"base_model {base_model}: cannot be loaded: {first_line(error)}. Copy the model again") from None
    refuse_incomplete(loading_info, base_model)
    stand_up(model)
    leave_out_other_modalities(model)
    return model


def pick_dtype(config: Any, dtype: str, base_model: str) -> torch.dtype:
    """Of the base's weights. Raises ModelError for one that cannot be computed in."""
    picked = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    if picked not in _TOLERANCE:
        raise ModelError(
            f"base_model {base_model}: its config.json has dtype {str(picked).removeprefix('torch.')}, and must be float32, bfloat16, "
            "float16 or float64. Use the original, unquantised weights, or set dtype if the files hold such"
        )
    return picked


def make_base(model: Any, name: str, layers: LayerStream | None = None, stage: Stage | None = None, outlined: Base | None = None) -> Base:
    """Freeze a loaded transformers causal LM and check that packed samples get the logits that each gets alone: before the last stage, the
    hidden states.
    """
    stand_up(model.requires_grad_(False).eval())
    base = Base(model, decoder_of(model, name), find_head(model, name), name, layers, stage, outlined, tuple(cut_at_samples(model)))
    attention_probe.register()
    count_in_samples(base.decoder)
    _fit_to_packed(base.decoder)
    try:
        with shown_in_short_samples(base.decoder), at_their_limit(model, max(_LENGTHS)):
            base = _check_packing(base)
        _check_reach(base)
    except UnpackedError as error:
        if layers is None and stage is None:
            raise
        raise ModelError(f"{error}. Held whole, its samples may go one by one") from None
    return base


def make_any_base(model: Any, name: str) -> Base:
    """As `make_base`; where samples cannot share a pass, one whose samples go one by one. Raises ModelError."""
    try:
        return make_base(model, name)
    except UnpackedError as error:
        base, why = Base(model, decoder_of(model, name), find_head(model, name), name), str(error).removeprefix(f"base_model {name}: ")
        try:
            return replace(prove_one_by_one(base, _sample_ids(base), _TOLERANCE[base.head.weight_VH.dtype]), why_one_by_one=why)
        except OF_FAMILIES as also:
            raise why_neither(base, error, also) from None


def outline(base_model: str, dtype: str = "auto", base_precision: BasePrecision | None = None) -> Base:
    """The base without its weights, on the meta device: for shapes and for counting memory."""
    config = load_config(base_model)
    stored, wanted = (pick_dtype(config, each, base_model) for each in ("auto", dtype))
    attention.register()
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # of tensors without numbers: refused below
            model: Any = auto_class(config).from_config(without_packing(config), dtype=wanted, trust_remote_code=False)
            model.set_attn_implementation(attention.NAME)  # not before: a tower for images may know no other than its own
    except ImportError as error:
        raise package_missing(base_model, error) from None
    except Exception as error:  # a library's border: what it raises depends on family and version
        raise ModelError(f"base_model {base_model}: no model can be made of its config.json: {one_line(error)}. {_COMPARE}") from None
    stand_up(model)
    leave_out_other_modalities(model)
    if (empty := next((name for name, p in model.named_parameters() if not p.numel()), None)) is not None:
        raise ModelError(f"base_model {base_model}: by its config.json, {empty} has no numbers. {_COMPARE}")
    form = format_of(config, base_model)
    check_unpacked(form, base_precision, base_model)
    if form is not None:
        model.config.quantization_config = config.quantization_config  # by which the files are read
        hold_outlined(model, form, stored)
    elif base_precision is not None:
        hold(model, list(find_linears(model)), torch.device("meta"), base_precision, stored)
    stand_in(model.requires_grad_(False).eval())
    _fit_to_packed(decoder := decoder_of(model, base_model))
    base = Base(model, decoder, find_head(model, base_model), base_model, recurrent=tuple(cut_at_samples(model)))
    why = why_not_together(base, _run_two_tokens, lambda outlined: why_not_packed_drawn(outlined, make_base))
    return _with_outlined_head(replace(base, why_one_by_one=why))


def _fit_to_packed(decoder: Any) -> None:
    """What layers are changed in for passes of packed samples: indexers choose all tokens, and attention gets its keywords."""
    choose_all(decoder, attention_probe.PACKED)
    hand_on_keywords(decoder)


def decoder_of(model: Any, name: str) -> Any:
    """The part that ends at the last norm. Llama 4's text model names a prefix that it does not have. Raises ModelError."""
    if has_other_modalities(model.config):
        return decoder_of_text(model)
    decoder = getattr(model, model.base_model_prefix, None) or getattr(model, "model", None)
    if decoder is None:
        raise ModelError(f"base_model {name}: {type(model).__name__} keeps its decoder in no {model.base_model_prefix!r}. Use another base")
    return decoder


def layers_of(decoder: Any) -> list[nn.Module]:
    """The layers in a decoder's own lists of modules."""
    return [layer for child in decoder.children() if isinstance(child, nn.ModuleList) for layer in child]


def hidden_states(base: Base, input_ids_T: Tensor, position_ids_T: Tensor, lengths: tuple[int, ...] | SampleLayout | Tensor) -> Tensor:
    """Last hidden states [T, H] of packed samples, whose lengths are given, or the number of their pass (`kernels/pass_operations.py`).

    A mask of four dims is handed on as it is by transformers, where None would make it search `position_ids` for sequences and
    wait for the device. Packed attention does not look at it.
    """
    with OutlinedExperts() if input_ids_T.is_meta else nullcontext():
        return base.hidden(**_inputs(base, input_ids_T, position_ids_T, lengths))


def _inputs(base: Base, input_ids_T: Tensor, position_ids_T: Tensor, lengths: tuple[int, ...] | SampleLayout | Tensor) -> dict[str, Any]:
    """What a pass of `hidden_states` hands the family's code."""
    if base.why_one_by_one:
        return {"input_ids": input_ids_T[None], "use_cache": False}
    return {
        "input_ids": input_ids_T[None],
        "position_ids": position_ids_T[None],
        "attention_mask": input_ids_T.new_ones(1, 1, 1, 1),
        "use_cache": False,
        ("pass_number" if isinstance(lengths, Tensor) else "sequence_lengths"): lengths,
    }


@torch.no_grad()
def _check_packing(base: Base) -> Base:
    """The family's own eager attention on each sample alone is the oracle; any family that packs wrongly is refused here. The base, with
    what it shows of its head.
    """
    model, lengths, device, dtype = base.model, _LENGTHS, base.head.weight_VH.device, base.head.weight_VH.dtype
    ids = _sample_ids(base)
    model.set_attn_implementation("eager")
    try:
        ends = base.stage is None or base.stage.layers.is_last
        with look_at_head(model, base.decoder) as look:
            outputs = [(model if ends else base.decoder)(input_ids=i[None], use_cache=False) for i in ids]
        base = as_seen(base, look)
        alone = torch.cat([(output.logits if ends else output.last_hidden_state)[0].float() for output in outputs])
        model.set_attn_implementation(attention.NAME)
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        run = partial(hidden_states, base, position_ids_T=positions, lengths=lengths)
        with all_cut():
            hidden_TH = run(torch.cat(ids))
        packed = (base.head.logits(hidden_TH) if ends else hidden_TH).float()
        leaks, change = neighbours_reach(base, run, ids), change_by_place(run, ids) if dtype.itemsize == 2 else 0.0
    except OF_FAMILIES as error:
        raise UnpackedError(f"base_model {base.name}: {type(model).__name__} cannot run packed samples: {first_line(error)}") from error
    if not bool(alone.isfinite().all()):
        raise ModelError(f"base_model {base.name}: {why_not_finite(base)}")
    if alone.shape != packed.shape:
        raise ModelError(f"base_model {base.name}: {why_of_other_tokens(base, len(alone), len(packed))}")
    if leaks or not relative_difference(packed, alone) <= _TOLERANCE[dtype]:
        raise why_not_packed(base, packed, alone, leaks, _TOLERANCE[dtype])
    if depends_on_place(change, relative_difference(packed[: lengths[0]], alone[: lengths[0]]), dtype):
        said = f"gives a sample other hidden states behind others (relative difference {change:.1e})"
        raise UnpackedError(f"base_model {base.name}: {type(model).__name__} {said}, so they cannot share a pass")
    return base


@torch.no_grad()
def _check_reach(base: Base) -> None:
    """The samples above are short: here each layer's attention mask is compared at all distances (`attention_probe.py`)."""
    device, kind = base.head.weight_VH.device, type(base.model).__name__
    tokens = torch.arange(3, device=device)
    base.model.set_attn_implementation(attention_probe.NAME)
    try:
        # without a mask and without lengths of two samples: transformers then makes each layer's mask from the family's rule
        base.decoder(input_ids=tokens[None], position_ids=tokens[None], attention_mask=None, use_cache=False, sequence_lengths=(3,))
    except ModelError as error:
        raise UnpackedError(f"base_model {base.name}: {kind} cannot be packed: {error}") from None
    except OF_FAMILIES as error:
        raise UnpackedError(f"base_model {base.name}: {kind} cannot run packed samples: {first_line(error)}") from error
    finally:
        base.model.set_attn_implementation(attention.NAME)


def _run_two_tokens(base: Base) -> None:
    device = base.head.weight_VH.device
    with nullcontext() if base.why_one_by_one else all_cut():
        hidden_states(base, torch.zeros(2, dtype=torch.long, device=device), torch.arange(2, device=device), (2,))


def _with_outlined_head(base: Base) -> Base:
    """Of a base on the meta device, with what its own code shows of its head: where that does not run there, nothing."""
    tokens = torch.zeros(2, dtype=torch.long, device=base.head.weight_VH.device)
    with look_at_head(base.model, base.decoder) as look, OutlinedExperts(), suppress(*OF_FAMILIES), torch.no_grad():
        base.model(**_inputs(base, tokens, tokens, (2,)))
    return as_seen(base, look)


def _sample_ids(base: Base) -> list[Tensor]:
    """Of a proof's samples."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, base.vocab_size, (n,), generator=generator).to(base.head.weight_VH.device) for n in _LENGTHS]
