"""A base's shape as JSON, for who has no torch: `python -m tlora.planning.base_outline BASE OUT HOW`, the last of `service.base_shapes`.

With it a job's profile is arithmetic (`data/profile.py`, `adapters/targets.py`).
"""

from __future__ import annotations

import errno
import json
import sys
from contextlib import nullcontext
from pathlib import Path

from tlora.adapter_shape import ExpertJobs
from tlora.libraries import begin_imports

if __name__ == "__main__":
    begin_imports()

import torch

from tlora import durable
from tlora.errors import TloraError
from tlora.job import BasePrecision, DType, LayoutSetting, UnusedWeights
from tlora.json_file import fields_of
from tlora.kernels.device import as_if_on, can_be_asked
from tlora.planning.base_parts import count_parts
from tlora.planning.memory import ACTIVATION_RANK, count_base
from tlora.shape.base_shape import BaseShape
from tlora.supermodel.base_config import max_positions
from tlora.supermodel.cpu_dtype import settle_dtype
from tlora.supermodel.held_linear import check_precision
from tlora.supermodel.inject import expert_modules
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.weight_files import check_unused


def describe_base(
    base_model: str,
    dtype: DType,
    base_precision: BasePrecision | None,
    device: str,
    unused_weights: UnusedWeights = "refuse",
    layout: LayoutSetting = "auto",
    rank: int = ACTIVATION_RANK,
    adapts_experts: ExpertJobs = False,
    deterministic: bool = False,
) -> BaseShape:
    """For those who train over the base on a `device`; `parts` is counted for adapters of up to `rank`, of experts too or not, in a
    deterministic run or not. Raises ModelError, ConfigError.
    """
    settled, line = settle_dtype(base_model, dtype, device)
    base = outline(base_model, settled, base_precision)
    if can_be_asked(torch.device(device)):
        check_precision(base_precision, torch.device(device), base.head.weight_VH.dtype)
    notes = check_unused(base_model, base.model.config, unused_weights, "set unused_weights: ignore in the server's settings")
    notes += [f"{line} in the server's settings"] if line else []  # it ends with the dtype to set
    modules, experts = tuple(name for name, _ in base.model.named_modules()), tuple(expert_modules(base.model))  # before adapters are in it
    model = SuperModel(base, deterministic)
    return BaseShape(
        model.targets(),
        modules,
        experts,
        base.num_bytes,
        base.vocab_size,
        model.limits,
        max_positions(base.model),
        count_base(model, torch.device(device), layout),
        tuple(note.replace(base_model, "the base") for note in notes),  # a tenant does not see where it lies
        count_parts(model, torch.device(device), rank, adapts_experts),
        (model.new_tokens.name, *model.new_tokens.size),
        model.experts.sizes,
    )


def main() -> int:
    """Write the outline of the base in argv. The exit status, with the reason on stderr: 2 for a base that cannot be had, ENOSPC where
    there is no room for its outline now.
    """
    base_model, out, told = sys.argv[1:]
    held = json.loads(told)
    gpu, capability = held.pop("gpu"), held.pop("capability")
    try:
        with as_if_on(gpu, capability) if capability else nullcontext():
            found = describe_base(base_model, **held)
        durable.write_file(Path(out), json.dumps(fields_of(found)))
    except TloraError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return errno.ENOSPC if durable.is_full(error) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
