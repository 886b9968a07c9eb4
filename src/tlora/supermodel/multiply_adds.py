"""What tokens are multiplied with in a model, by which seconds are predicted. The model may lie on the meta device, or be a stage of it."""

from __future__ import annotations

from tlora.job import JobSpec
from tlora.registry import OBJECTIVES
from tlora.shape.work import FEATURE_WEIGHTS, SampleWork, sample_work
from tlora.supermodel.frozen_experts import Visited, frozen_parameters
from tlora.supermodel.load import layers_of
from tlora.supermodel.supermodel import SuperModel


def multiplied_weights(model: SuperModel, adapts_experts: bool) -> int:
    """Weights that each token is multiplied with, in forward and again in backward; of all stages. `adapts_experts`: in passes with a job
    that does so.
    """
    linears = sum(k * n for k, n in model.targets().values())
    return linears + sum(active_weights(model, adapts_experts).values()) + model.base.head.weight_VH.numel()


def active_weights(model: SuperModel, adapts_experts: bool) -> dict[str, int]:
    """Of each parameter of experts, the weights that a token is multiplied with."""
    visits = model.experts.visits(adapts_experts)
    own = {name: visits[name] * size.in_features * size.out_features for name, size in model.experts.sizes.items()}
    return own | {name: int(each.visits * each.in_features * each.out_features) for name, each in frozen_experts(model).items()}


def frozen_experts(model: SuperModel) -> dict[str, Visited]:
    """Those parameters of experts that cannot be adapted."""
    return frozen_parameters(model.model, {name.rpartition(".")[0] for name in model.experts.sizes})


def timed_weights(model: SuperModel, device_type: str, adapts_experts: bool) -> int:
    """The same, and on a GPU what the features of all linears and the head take besides, as so many weights more."""
    weights = multiplied_weights(model, adapts_experts)
    if device_type != "cuda":
        return weights
    features = sum(k + n for k, n in model.targets().values()) + sum(model.base.head.weight_VH.shape)
    return weights + FEATURE_WEIGHTS * features


def width_of_layers(model: SuperModel) -> int:
    """Of the hidden states of all layers, one beside the other."""
    return max(1, len(layers_of(model.base.decoder))) * model.base.head.weight_VH.shape[1]


def work_of_samples(model: SuperModel, spec: JobSpec) -> SampleWork:
    """Multiply-adds of the job's samples, by their length and its rank; of all stages."""
    forwards, adapter = 2 + OBJECTIVES[spec.objective].forwards_beside, model.layout(spec).numel
    weights = multiplied_weights(model, spec.target_parameters is not None)
    return sample_work(weights, width_of_layers(model), forwards, adapter)
